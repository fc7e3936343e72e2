"""Reasons why a grammar is refused, in words for its author.

llguidance's reasons name its own parts and settings, and can contain pages of a grammar's state. Reasons about the
grammar itself (an unknown name, a parenthesis that is not closed) stay as they are.
"""

from __future__ import annotations

import re

from llguidance import LLParserLimits

MAX_WAYS = 2_000
"""Maximum parallel parses of a text at one place: llguidance tracks each (items in an Earley row)."""
MAX_STEPS = 50_000
"""Maximum steps through a grammar's rules for one token: about 2 ms."""
MAX_SYMBOLS = 500_000
"""Maximum symbols in all rules of a grammar together."""
MAX_STATES = 250_000
"""Maximum lexer states for a grammar's strings and expressions together: each takes up to 2 KB."""
MAX_KEPT_STATES = 16_000
"""Maximum lexer states of a kept grammar: some 10 MiB. Ordinary schemas, of hundreds of fields or with formats, stay
below a third of this, whatever texts they have seen."""
MAX_KEPT_SYMBOLS = 50_000
"""Maximum symbols in the rules of a kept grammar: some 20 MiB."""


def _limits(symbols: int, states: int) -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=MAX_WAYS,
        step_max_items=MAX_STEPS,
        max_grammar_size=symbols,
        max_lexer_states=states,
        verbose_errors=False,
    )


LIMITS = _limits(MAX_SYMBOLS, MAX_STATES)
"""Limits of any grammar. The messages below name them."""
KEPT_LIMITS = _limits(MAX_KEPT_SYMBOLS, MAX_KEPT_STATES)
"""Limits of grammars that are kept. llguidance reports no size, only that a limit was reached."""
MAX_CHARS = 400
"""Maximum length of a reason in an error message."""

_BOUNDS = (
    (
        r"Current row has \d+ items",
        f"at one place of its text it can go on in more than {MAX_WAYS:,} ways; name fewer alternatives there, or give "
        "them as choice or as one regular expression",
    ),
    (
        r"Too many items|max items exceeded",
        f"one token of its text takes more than {MAX_STEPS:,} steps through its rules: it has no end, or repeats very "
        "short parts; make such parts one regular expression",
    ),
    (r"grammar size \(number of symbols\) too big", f"its rules have more than {MAX_SYMBOLS:,} symbols; give fewer"),
    (
        r"initial lexer configuration|lexer precomputation|fuel exhausted|DNF too large|schema too large|"
        r"Schema intersection stack|Unable to determine if regex|grammar\.symbols\.len\(\)|too deeply nested",
        "it is too large or too deeply nested; give one with fewer and simpler parts",
    ),
    (
        r"^(?:[lL]exer error: |LexerTooComplex)",
        f"at one place of its text its strings and expressions need more than {MAX_STATES:,} states, or too long to "
        "compute; make them simpler",
    ),
    (r"^(?:[pP]arser error: |ParserTooComplex)", "at one place of its text it is too complex; make it simpler"),
)
"""Patterns of llguidance's reasons at a limit, and the message instead."""
_OTHERS = (
    (
        r"^(?:NoExtension|NoExtensionBias)$",
        "no text fits it: it has no end, or asks for what this model's vocabulary has no tokens for",
    ),
    (r"doesn't satisfy the grammar", "this model's vocabulary has no tokens for what must come next"),
    (
        r"oneOf constraints are not supported",
        "oneOf is not available where a value can be valid for two of its alternatives; anyOf is",
    ),
    (r"^panic|^[A-Z][A-Za-z]+$", "no grammar can be made of it"),
    (r"^lexer error$", "a character cannot stand there"),
)
_REGEX = re.compile(r"regex parse error:\n    (.*)\n    ( *)\^.*\nerror: (.*)")
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
"""Place in Lark's notation: line and character."""
_SOURCE = "Parser Error: "
"""Prefix of some reasons: the part of llguidance that failed."""


def limit_message(reason: str) -> str | None:
    """Message for the limit that a grammar has reached; None where `reason` is something else."""
    line = reason.strip().removeprefix(_SOURCE)
    return next((words for pattern, words in _BOUNDS if re.search(pattern, line)), None)


def is_size_limit(reason: str) -> bool:
    """Whether that limit is one in which `KEPT_LIMITS` and `LIMITS` differ."""
    bound = limit_message(reason) or ""
    return f"{MAX_STATES:,}" in bound or f"{MAX_SYMBOLS:,}" in bound


def in_plain_words(reason: str, *, has_places: bool = True) -> str:
    """Message for llguidance's reason, on one line. Without `has_places` a place in it is dropped: the grammar was
    converted from another notation.
    """
    if match := _REGEX.search(reason):
        return _cut(f"{match[3]} (character {len(match[2]) + 1} of the regular expression)")
    if (bound := limit_message(reason)) is not None:
        return bound
    line = reason.strip().removeprefix(_SOURCE).partition("\n")[0]
    place = match[0] if (match := _PLACE.match(line)) else ""
    rest = line.removeprefix(place)
    words = next((words for pattern, words in _OTHERS if re.search(pattern, rest)), rest)
    if match := re.fullmatch(r"Unimplemented keys: \[(.*)\]", words):
        words = f"not available: {match[1].replace(chr(34), '')}"
    if match := re.fullmatch(r"Invalid type: (.*)", words):
        words = f"type: expected array, boolean, integer, null, number, object or string, not {match[1]!r}"
    return _cut(place + words if has_places else words)


def _cut(line: str) -> str:
    return line if len(line) <= MAX_CHARS else line[:MAX_CHARS] + "..."
