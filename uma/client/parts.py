"""Requests of many texts that one frame does not hold: they are asked in parts, and the answers joined."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import attrs

from uma.errors import FrameTooLarge, PromptTooLarge, UmaError
from uma.types import Embeddings, EmbedRequest, Ranked, Ranking, RerankRequest, warnings_of_empty
from uma.wrong import Wrong

R = TypeVar("R", EmbedRequest, RerankRequest)

_PLACE = re.compile(r"(texts|token_ids|documents)\[(\d+)\]")
"""Paths of texts."""


def halves(request: R, error: FrameTooLarge) -> tuple[R, R, int]:
    """A request that is too long for one frame, as two of half its texts each, and how many the first one has.

    Raises `PromptTooLarge` for one text alone.
    """
    field = next(name for name in ("texts", "token_ids", "documents") if getattr(request, name, None) is not None)
    texts = getattr(request, field)
    middle = len(texts) // 2
    if not middle:
        raise PromptTooLarge.at(f"{field}[0]", f"prompt too large: {error.message}") from None
    return attrs.evolve(request, **{field: texts[:middle]}), attrs.evolve(request, **{field: texts[middle:]}), middle


def joined_embeddings(first: Embeddings, second: Embeddings) -> Embeddings:
    """The answer to a whole request, of those to its `halves`."""
    vectors = first.vectors + second.vectors
    return Embeddings(first.id, vectors, first.prompt_tokens + second.prompt_tokens, warnings_of_empty(vectors))


def joined_ranking(first: Ranking, second: Ranking, middle: int, top_n: int | None) -> Ranking:
    """The answer to a whole request, of those to its `halves`, the first of which has `middle` documents."""
    moved = (Ranked(result.index + middle, result.score) for result in second.results)
    results = sorted((*first.results, *moved), key=lambda ranked: (-ranked.score, ranked.index))
    return Ranking(first.id, tuple(results[:top_n]), first.prompt_tokens + second.prompt_tokens)


@contextmanager
def errors_moved(by: int) -> Iterator[None]:
    """A block of a request's part, before which so many texts stand: its errors name a text by its place in all."""
    try:
        yield
    except UmaError as error:
        error.retell(
            Wrong(_moved(line.field, by), line.why) if isinstance(line, Wrong) else line for line in error.lines
        )
        raise


def _moved(path: str, by: int) -> str:
    return _PLACE.sub(lambda place: f"{place[1]}[{int(place[2]) + by}]", path)
