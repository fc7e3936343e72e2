"""`uma decide`: questions about texts, answered by probabilities: a line of JSON each, in the order of the texts, or
a table of the likeliest answers, which is tabs and whole texts where it goes to a pipe or a file.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from uma.cli import say
from uma.cli.embed import read_texts
from uma.cli.generate import quiet
from uma.cli.options import load_settings
from uma.cli.source import open_source, watched
from uma.cli.table import print_table
from uma.cli.terminal import TextOutput
from uma.cli.trio_run import Interrupts, run
from uma.config import Loaded
from uma.errors import BadRequest, ConfigError, DecodeFailed, FrameTooLarge, PromptTooLarge, TemplateError
from uma.types import Decision, DecisionQuestion, DecisionRequest, Message, Priority

MIN_MASS = 0.01
"""`label_mass` below which an answer is warned of: a model that means one of the options has far more."""
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
    advice = 'give a line each, in a file, `uma decide --yes "Is it spam?" mails.txt`, or on standard input'
    texts = [text for text in read_texts([], options.file, advice, options.column) if text.strip()]
    if not texts:
        raise ConfigError(f"there is no text, blank lines aside; {advice}")
    return run(partial(_decide_all, options, loaded, texts))


async def _decide_all(options: argparse.Namespace, loaded: Loaded, texts: list[str], interrupts: Interrupts) -> int:
    questions: list[DecisionQuestion] = options.questions
    columns = ["text", *(str(question.name) for question in questions), "label_mass", "error"]
    rows, masses = list[list[str]](), list[float]()
    async with open_source(loaded, interrupts, local=options.local, say=say.note) as opened:
        output = TextOutput.standard("utf-8")
        is_shown = options.table and output.is_terminal
        if options.table and not is_shown:
            await output.write(_line(columns))
        failed, told = 0, dict[str, Any]()
        try:
            for number, text in enumerate(texts, 1):
                lead = f"text {number:,} of {len(texts):,}"
                try:
                    request = _request(options, number, text, opened.model)
                    work = partial(opened.source.decide, request)
                    found = (await watched(opened.source, request.id, work, lead)).answers
                except OF_A_TEXT as error:
                    failed += 1
                    say.complain(f"text {number:,}: {error}")
                    row = [text, *("" for _ in questions), "", f"see text {number:,}" if is_shown else error.code]
                    told = {"error": {"code": error.code, "message": error.message}}
                else:
                    pairs = list(zip(questions, found, strict=True))
                    masses.append(min(answer.label_mass for answer in found))
                    row = [text, *(_cell(*pair) for pair in pairs), f"{masses[-1]:.2f}", ""]
                    told = {"answers": {str(question.name): _told(question, answer) for question, answer in pairs}}
                if is_shown:
                    rows.append([" ".join(text.split()), *row[1:]])
                elif options.table:
                    await output.write(_line(row))
                else:
                    await output.write(json.dumps({"text": text} | told, ensure_ascii=False) + "\n")
        finally:  # what has been asked, also where the rest was stopped
            if rows:
                print_table(columns, rows)
    if unsure := sum(mass < MIN_MASS for mass in masses):
        texts_told = f"of {unsure:,} of {len(texts):,} texts " if len(texts) > 1 else ""
        say.warn(
            f"label_mass {texts_told}is below 1 % (the least {100 * min(masses):.2g} %): the model would hardly answer "
            "with one of the options, so their probabilities say little; reword the question, or use another model"
        )
    return 1 if failed else 0


def _request(options: argparse.Namespace, number: int, text: str, model: str | None) -> DecisionRequest:
    """The questions about a text. Raises `BadRequest`."""
    return DecisionRequest(
        id=f"decide-{os.getpid()}-{number}",
        messages=[Message("user", text)],
        questions=options.questions,
        priority=Priority[options.priority.upper()].value,
        reproducible=options.reproducible,
        model=model,
    )


def _line(cells: Sequence[str]) -> str:
    """A row for programs: white space in a cell is one space, so that tabs tell cells apart."""
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
