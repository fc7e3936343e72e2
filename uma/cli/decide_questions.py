"""Questions of `uma decide` as its options spell them."""

from __future__ import annotations

import argparse

from uma.types import DecisionQuestion, Option
from uma.types.decision import QuestionKind


def question(kind: QuestionKind, text: str) -> DecisionQuestion:
    """What an option asks: `Is it spam?`, `topic=a,b,c`, or `How urgent?=1..5` or with names of levels."""
    asked, _, given = (text, "", "") if kind == "predicate" else text.rpartition("=")
    if not asked:
        raise argparse.ArgumentTypeError("expected a question, then = and its options: topic=a,b")
    first, dots, last = given.partition("..")
    names = given.split(",") if kind != "predicate" else []
    if kind == "score" and dots and first.isdecimal() and last.isdecimal():
        names = list(map(str, range(int(first), min(int(last), int(first) + 99) + 1)))
    try:
        return DecisionQuestion(kind, asked, tuple(map(Option, names)), asked)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
