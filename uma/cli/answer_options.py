"""Options of `uma generate` about the form of the answer: grammars, log probabilities, several answers.

Like `options`, this module imports nothing that starts slowly.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import attrs

from uma import json_text
from uma.cli.options import add_flag, add_option
from uma.errors import ConfigError
from uma.types import MAX_ANSWERS, MAX_LOGPROBS, Grammar, SamplingParams


def add_answer(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options."""
    group = parser.add_argument_group("form of the answer")
    form = group.add_mutually_exclusive_group()
    schema = "the answer is JSON that fits the schema in this file, or written out here"
    add_option(form, "--json-schema", "FILE", schema, "any text")
    add_flag(form, "--json-object", "the answer is a JSON object")
    add_option(form, "--regex", "TEXT", "the whole answer matches this expression", "any text")
    choice = "the answer is one of the texts given so; at least two make sense"
    add_option(form, "--choice", "TEXT", choice, "any text", action="append")
    add_option(form, "--lark", "FILE", "the answer follows this Lark grammar", type=Path)
    add_option(form, "--gbnf", "FILE", "the answer follows this GBNF grammar", type=Path)
    told = "tell each token's log probability on standard error, or with --json in the events, and those of so many "
    add_option(group, "--logprobs", "N", f"{told}likeliest", "none", f"0 to {MAX_LOGPROBS}", type=int)
    same = "the same of the prompt's tokens, which are all computed for it"
    add_option(group, "--prompt-logprobs", "N", same, "none", f"0 to {MAX_LOGPROBS}", type=int)
    add_flag(group, "--echo", "write the prompt before the answer")
    add_option(group, "-n --n", "N", "so many answers", "1", f"1 to {MAX_ANSWERS}", type=int)
    add_option(group, "--best-of", "N", "draw so many answers and give the -n likeliest", "as -n", type=int)
    bias = "make a token likelier or less likely; its id, or a text for all of its tokens"
    add_option(group, "--logit-bias", "TOKEN=X", bias, "0", "-100 to 100", type=_bias, action="append")


def with_answer(sampling: SamplingParams, options: argparse.Namespace) -> SamplingParams:
    """`sampling` with what the options ask for. Raises `ConfigError` for a file or value that cannot be used."""
    try:
        return attrs.evolve(
            sampling,
            grammar=_grammar(options),
            logprobs=options.logprobs,
            prompt_logprobs=options.prompt_logprobs,
            echo=options.echo,
            n=options.n or 1,
            best_of=options.best_of,
            logit_bias=dict(options.logit_bias) if options.logit_bias else None,
        )
    except ValueError as error:
        raise ConfigError(f"the form of the answer cannot be used: {error}") from None


def _grammar(options: argparse.Namespace) -> Grammar | None:
    given: dict[str, Any] = {
        "json_schema": json_object(options.json_schema) if options.json_schema else None,
        "json_object": options.json_object or None,
        "regex": options.regex,
        "choice": options.choice,
        "lark": _text(options.lark) if options.lark else None,
        "gbnf": _text(options.gbnf) if options.gbnf else None,
    }
    return Grammar(**given) if any(value is not None for value in given.values()) else None


def json_object(named: str) -> dict[str, Any]:
    """The JSON object, such as a schema, that a file of this name holds, or that `named` is. Raises `ConfigError`."""
    try:
        value = json_text.loads(named if named.lstrip().startswith("{") else _text(Path(named)))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{named!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{named}: holds no JSON object, as a schema is")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {why}") from None


def _bias(text: str) -> tuple[str, float]:
    token, _, value = text.rpartition("=")
    try:
        bias = float(value)
    except ValueError:
        bias = math.nan
    if not token or math.isnan(bias):
        raise argparse.ArgumentTypeError(f"expected TOKEN=X with a number X, not {text!r}")
    return token, bias
