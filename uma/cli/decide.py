"""`uma decide`: questions about texts, answered by probabilities: a line of JSON each, in the order of the texts."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from uma.cli import say, words
from uma.cli.embed import read_texts
from uma.cli.generate import quiet
from uma.cli.options import load_settings
from uma.cli.source import open_source
from uma.cli.terminal import TextOutput
from uma.cli.trio_run import Interrupts, run
from uma.config import Loaded
from uma.errors import ConfigError
from uma.types import Decision, DecisionQuestion, DecisionRequest, Message, Priority

SHOWN_CHARS = 40
"""Maximum characters of a text in a row of `--table`."""


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    if not options.questions:
        raise ConfigError(
            'there is no question; give --yes "Is it spam?", --choice topic=a,b or --score "How urgent?=1..5"'
        )
    loaded = quiet(load_settings(options))
    return run(partial(_decide_all, options, loaded, read_texts([], options.file)))


async def _decide_all(options: argparse.Namespace, loaded: Loaded, texts: list[str], interrupts: Interrupts) -> int:
    questions: list[DecisionQuestion] = options.questions
    async with open_source(loaded, interrupts, local=options.local, say=say.note) as opened:
        if line := words.demonstration(opened.source.info.model, loaded):
            say.note(line)
        output = TextOutput.standard("utf-8")
        if options.table:
            await output.write("\t".join(["text", *(str(question.name) for question in questions)]) + "\n")
        for number, text in enumerate(texts, 1):
            try:
                request = DecisionRequest(
                    f"decide-{number}",
                    [Message("user", text)],
                    questions,
                    priority=Priority[options.priority.upper()].value,
                    reproducible=options.reproducible,
                )
            except ValueError as error:
                raise ConfigError(f"text {number:,}: {error}") from None
            answers = (await opened.source.decide(request)).answers
            pairs = list(zip(questions, answers, strict=True))
            if options.table:
                await output.write("\t".join([text[:SHOWN_CHARS], *(_cell(*pair) for pair in pairs)]) + "\n")
            else:
                told = {str(question.name): _told(question, answer) for question, answer in pairs}
                await output.write(json.dumps({"text": text, "answers": told}, ensure_ascii=False) + "\n")
    return 0


def _labels(question: DecisionQuestion) -> list[str]:
    return [option.label for option in question.options] or ["yes", "no"]


def _told(question: DecisionQuestion, answer: Decision) -> dict[str, Any]:
    labels = _labels(question)
    return {
        "answer": labels[answer.best],
        **({"score": answer.score} if question.kind == "score" else {}),
        "probabilities": dict(zip(labels, answer.probabilities, strict=True)),
        "label_mass": answer.label_mass,
    }


def _cell(question: DecisionQuestion, answer: Decision) -> str:
    return f"{_labels(question)[answer.best]} {max(answer.probabilities):.2f}"
