"""Questions of `uma decide` as its options spell them."""

from __future__ import annotations

import argparse

from uma.types import DecisionQuestion


def predicate(text: str) -> DecisionQuestion:
    """A question of `--yes`."""
    return _made("predicate", text, [])


def choice(text: str) -> DecisionQuestion:
    """A question of `--choice`: `topic=a,b,c`."""
    question, _, labels = text.rpartition("=")
    return _made("choice", question, labels.split(","))


def score(text: str) -> DecisionQuestion:
    """A question of `--score`: `How urgent?=1..5`, or with names of levels."""
    question, _, labels = text.rpartition("=")
    first, dots, last = labels.partition("..")
    if dots and first.isdecimal() and last.isdecimal():
        return _made("score", question, list(map(str, range(int(first), min(int(last), int(first) + 99) + 1))))
    return _made("score", question, labels.split(","))


def _made(kind: str, question: str, labels: list[str]) -> DecisionQuestion:
    if not question:
        raise argparse.ArgumentTypeError("expected a question, then = and its options: topic=a,b")
    make = {"choice": DecisionQuestion.choice, "score": DecisionQuestion.score}.get(kind)
    try:
        return DecisionQuestion.predicate(question, question) if make is None else make(question, labels, question)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
