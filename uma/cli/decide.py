"""`uma decide`: questions about texts, answered by probabilities: a line of JSON each, in the order of the texts."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from typing import Any

from uma.cli import say
from uma.cli.embed import read_texts
from uma.cli.generate import quiet
from uma.cli.options import load_settings
from uma.cli.source import open_source, watched
from uma.cli.terminal import TextOutput
from uma.cli.trio_run import Interrupts, run
from uma.config import Loaded
from uma.errors import BadRequest, ConfigError, DecodeFailed, FrameTooLarge, PromptTooLarge, TemplateError
from uma.llm.arguments import make_request
from uma.types import Decision, DecisionQuestion, DecisionRequest, Message, Priority

SHOWN_CHARS = 40
"""Maximum characters of a text in a row of `--table`."""
OF_A_TEXT = (BadRequest, TemplateError, PromptTooLarge, FrameTooLarge, DecodeFailed)
"""Errors about one text: the others are still asked about."""


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    if not options.questions:
        raise ConfigError(
            'there is no question; give --yes "Is it spam?", --choice topic=a,b or --score "How urgent?=1..5"'
        )
    names = [question.name for question in options.questions]
    if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
        raise ConfigError(f"question {twice!r} is there twice, and its answers could not be told apart; reword one")
    loaded = quiet(load_settings(options))
    return run(partial(_decide_all, options, loaded, read_texts([], options.file)))


async def _decide_all(options: argparse.Namespace, loaded: Loaded, texts: list[str], interrupts: Interrupts) -> int:
    questions: list[DecisionQuestion] = options.questions
    async with open_source(loaded, interrupts, local=options.local, say=say.note) as opened:
        output = TextOutput.standard("utf-8")
        if options.table:
            await output.write(_row(["text", *(str(question.name) for question in questions)]))
        failed, told = 0, dict[str, Any]()
        for number, text in enumerate(texts, 1):
            lead = f"text {number:,} of {len(texts):,}"
            try:
                request = _request(options, number, text, opened.model)
                work = partial(opened.source.decide, request)
                found = (await watched(opened.source, request.id, work, lead)).answers
            except OF_A_TEXT as error:
                failed += 1
                say.complain(f"text {number:,}: {error}")
                cells, told = [f"error: {error.code}"], {"error": {"code": error.code, "message": error.message}}
            else:
                pairs = list(zip(questions, found, strict=True))
                cells = [_cell(*pair) for pair in pairs]
                told = {"answers": {str(question.name): _told(question, answer) for question, answer in pairs}}
            if options.table:
                await output.write(_row([text[:SHOWN_CHARS], *cells]))
            else:
                await output.write(json.dumps({"text": text} | told, ensure_ascii=False) + "\n")
    return 1 if failed else 0


def _request(options: argparse.Namespace, number: int, text: str, model: str | None) -> DecisionRequest:
    """The questions about a text. Raises `BadRequest`."""
    return make_request(
        DecisionRequest,
        id=f"decide-{os.getpid()}-{number}",
        messages=[make_request(Message, role="user", content=text)],
        questions=options.questions,
        priority=Priority[options.priority.upper()].value,
        reproducible=options.reproducible,
        model=model,
    )


def _row(cells: list[str]) -> str:
    """A line of `--table`: white space in a cell is one space, so that tabs tell cells apart."""
    return "\t".join(" ".join(cell.split()) for cell in cells) + "\n"


def _told(question: DecisionQuestion, answer: Decision) -> dict[str, Any]:
    labels = question.labels
    return {
        "answer": labels[answer.best],
        **({"score": answer.score} if question.kind == "score" else {}),
        "probabilities": dict(zip(labels, answer.probabilities, strict=True)),
        "label_mass": answer.label_mass,
    }


def _cell(question: DecisionQuestion, answer: Decision) -> str:
    return f"{question.labels[answer.best]} {max(answer.probabilities):.2f}"
