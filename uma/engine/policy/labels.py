"""Labels of a question's options, and their probabilities: pure.

An option has one or several spellings, each a run of tokens. Spellings form a trie: for each inner node a row of logits
must be read, behind the prompt and the node's path. Where one spelling is the beginning of another, the end of the turn
tells the two apart.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

Path = tuple[int, ...]
Spellings = Sequence[Sequence[Path]]
"""Spellings of each option."""


def rows_of(spellings: Spellings, ends: Iterable[int]) -> list[tuple[Path, list[int]]]:
    """Rows of logits to read, to tell the options apart: the path of label tokens before each row, and the tokens whose
    log probabilities it gives. Shorter paths come first. `ends` are the tokens that can end the turn.
    """
    every = [spelling for option in spellings for spelling in option]
    following: dict[Path, dict[int, None]] = {}
    for spelling in every:
        for at, token in enumerate(spelling):
            following.setdefault(spelling[:at], {})[token] = None
    for spelling in every:
        if spelling in following:
            following[spelling].update(dict.fromkeys(ends))
    return [(path, list(tokens)) for path, tokens in sorted(following.items(), key=lambda row: len(row[0]))]


def is_distinct(spellings: Spellings) -> bool:
    """Whether each option has a spelling, and no two options share one."""
    every = [spelling for option in spellings for spelling in set(option)]
    return all(every) and len(set(every)) == len(every)


def logprobs_of(spellings: Spellings, read: Mapping[Path, Mapping[int, float]], ends: Iterable[int]) -> list[float]:
    """Log probability of each option: over its spellings, the sum of the products along each. See `rows_of`."""

    def along(spelling: Path) -> Iterator[float]:
        for at, token in enumerate(spelling):
            yield read[spelling[:at]][token]
        if spelling in read:
            yield log_sum([read[spelling][end] for end in ends])

    return [log_sum([math.fsum(along(spelling)) for spelling in set(option)]) for option in spellings]


def log_sum(values: Sequence[float]) -> float:
    """Logarithm of the sum of the powers of e."""
    most = max(values)
    return most + math.log(math.fsum(math.exp(value - most) for value in values))


def softmax(values: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Probabilities of options that have these log probabilities."""
    most = max(values)
    powers = [math.exp((value - most) / temperature) for value in values]
    total = math.fsum(powers)
    return [power / total for power in powers]


def orders(count: int, how: str) -> list[tuple[int, ...]]:
    """Orders in which the options are asked: for each place in the prompt, the index of its option."""
    plain = tuple(range(count))
    if how == "all":
        return [plain[at:] + plain[:at] for at in plain]
    return [plain, plain[::-1]] if how == "two" else [plain]


@attrs.frozen(eq=False)
class AskedPrompt:
    """A question in one order of its options."""

    question: int
    order: tuple[int, ...]
    """Option of the question that stands at each place."""
    tokens: array[int]
    """Tokens of the prompt behind those of the state that is asked about."""
    spellings: Spellings
    """Spellings by place."""
    temperature: float = 1.0
    """Divisor of their log probabilities that the model was given, beside the request's."""


def by_option(found: Sequence[float], order: Sequence[int]) -> list[float]:
    """Probabilities by option, from `found` by place. Of ratings: the expected rating as yes, the rest as no."""
    if len(found) > len(order):
        yes = math.fsum(at * share for at, share in enumerate(found)) / (len(found) - 1)
        return [yes, 1 - yes]
    return [found[order.index(option)] for option in range(len(found))]


def mean(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Mean of each column, none over 1."""
    return tuple(min(1.0, math.fsum(column) / len(rows)) for column in zip(*rows, strict=True))


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PAIRS = tuple(a + b for a in LETTERS for b in LETTERS)


def codes(count: int) -> tuple[str, ...]:
    """Labels for `count` options. With two letters all pairs, so that the caller can choose short tokens."""
    return tuple(LETTERS[:count]) if count <= len(LETTERS) else PAIRS
