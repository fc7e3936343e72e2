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
from uma.errors import ConfigError
from uma.types import MAX_ANSWERS, MAX_LOGPROBS, Grammar, SamplingParams


def add_answer(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options."""
    group = parser.add_argument_group("form of the answer")
    form = group.add_mutually_exclusive_group()
    form.add_argument(
        "--json-schema",
        metavar="FILE",
        help="the answer is JSON that fits the schema in this file, or written out here (default: any text)",
    )
    form.add_argument("--json-object", action="store_true", help="the answer is a JSON object")
    form.add_argument("--regex", metavar="TEXT", help="the whole answer matches this expression (default: any text)")
    form.add_argument(
        "--choice",
        metavar="TEXT",
        action="append",
        help="the answer is one of the texts given so; at least two make sense (default: any text)",
    )
    form.add_argument("--lark", metavar="FILE", type=Path, help="the answer follows this Lark grammar (default: none)")
    form.add_argument("--gbnf", metavar="FILE", type=Path, help="the answer follows this GBNF grammar (default: none)")
    group.add_argument(
        "--logprobs",
        metavar="N",
        type=int,
        help="tell each token's log probability on standard error, or with --json in the events, and those of so many "
        f"likeliest (0 to {MAX_LOGPROBS}; default: none)",
    )
    group.add_argument(
        "--prompt-logprobs",
        metavar="N",
        type=int,
        help=f"the same of the prompt's tokens, which are all computed for it (0 to {MAX_LOGPROBS}; default: none)",
    )
    group.add_argument("--echo", action="store_true", help="write the prompt before the answer")
    group.add_argument("-n", "--n", metavar="N", type=int, help=f"so many answers (1 to {MAX_ANSWERS}; default: 1)")
    group.add_argument(
        "--best-of", metavar="N", type=int, help="draw so many answers and give the -n likeliest (default: as -n)"
    )
    group.add_argument(
        "--logit-bias",
        metavar="TOKEN=X",
        type=_bias,
        action="append",
        help="make a token likelier or less likely; its id, or a text for all of its tokens (-100 to 100; default: 0)",
    )


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
        raise ConfigError(f"{named}: is no JSON: {error}") from None
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
