"""Embeddings and rankings: what is asked and what is answered."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import attrs

from uma.constraints import Json, Length, Range, Text, check
from uma.errors import WrongValues
from uma.types.fields import tuple_or_none
from uma.types.request import ModelName
from uma.wrong import Wrong

MAX_TEXTS = 2048
"""Maximum texts or documents of one request."""


def _token_lists(lists: Iterable[Iterable[int]] | None) -> Any:
    return None if lists is None else tuple(tuple(tokens) if isinstance(tokens, list) else tokens for tokens in lists)


@attrs.frozen
class EmbedRequest:
    """A request for embeddings. Exactly one of `texts` and `token_ids` is given (`ValueError` otherwise).

    Each text stands alone. One that does not fit the context refuses the whole request: none is ever cut.
    """

    id: Annotated[str, Length(1, 128)]
    texts: Annotated[tuple[Annotated[str, Text()], ...], Length(1, MAX_TEXTS, "texts")] | None = attrs.field(
        default=None, converter=tuple_or_none
    )
    token_ids: (
        Annotated[
            tuple[Annotated[tuple[Annotated[int, Range(0)], ...], Length(1, None, "tokens")], ...],
            Length(1, MAX_TEXTS, "texts"),
        ]
        | None
    ) = attrs.field(default=None, converter=_token_lists)
    """Texts as token ids, taken literally."""
    dimensions: Annotated[int, Range(1)] | None = None
    """Number of leading dimensions to keep of each embedding; None: all. Normalisation follows the cut."""
    normalize: bool = True
    """Scale each embedding to length 1."""
    fail_on_empty: bool = False
    """Refuse the request for a text of no token, such as an empty line, which otherwise has None for an embedding."""
    priority: Literal[-1, 0, 1] = 0
    metadata: Annotated[dict[str, Any], Json()] | None = None
    """Echoed in every event of the request on the wire."""
    model: ModelName | None = None
    """See `Request.model`."""

    def __attrs_post_init__(self) -> None:
        if (self.texts is None) == (self.token_ids is None):
            raise WrongValues(Wrong("texts", "give exactly one of texts and token_ids"))
        check(self)


def warnings_of_empty(
    vectors: Sequence[object | None], field: str = "texts", *, is_single: bool = False
) -> tuple[str, ...]:
    """Warning of the texts that have no token, and so no embedding among `vectors`; `field` has the texts, or with
    `is_single` the only one.
    """
    empty = [index for index, vector in enumerate(vectors) if vector is None]
    if not empty:
        return ()
    rest = f" and {len(empty) - 1:,} more" if len(empty) > 1 else ""
    place = field if is_single else f"{field}[{empty[0]}]{rest}"
    return (f"{place}: no token at all, so there is no embedding (fail_on_empty refuses such texts)",)


@attrs.frozen
class Embeddings:
    """The answer to an `EmbedRequest`: one embedding for each text, in their order."""

    id: str
    vectors: tuple[array[float] | None, ...]
    """Each of 32-bit floats (`array("f")`); None: the text has no token."""
    prompt_tokens: tuple[int, ...]
    """Tokens of each text."""
    warnings: tuple[str, ...] = ()

    @property
    def n_figures(self) -> int:
        """Figures of all embeddings together."""
        return sum(len(vector) for vector in self.vectors if vector is not None)

    @property
    def read_tokens(self) -> int:
        """Tokens of all texts together."""
        return sum(self.prompt_tokens)


@attrs.frozen
class RerankRequest:
    """Documents to rank by how well each answers a query. It needs a model that was trained as a reranker."""

    id: Annotated[str, Length(1, 128)]
    query: Annotated[str, Length(1), Text()]
    documents: Annotated[tuple[Annotated[str, Text()], ...], Length(1, MAX_TEXTS, "documents")] = attrs.field(
        converter=tuple_or_none
    )
    top_n: Annotated[int, Range(1)] | None = None
    """Number of documents to return, the best ones; None: all."""
    priority: Literal[-1, 0, 1] = 0
    metadata: Annotated[dict[str, Any], Json()] | None = None
    """Echoed in every event of the request on the wire."""
    model: ModelName | None = None
    """See `Request.model`."""

    def __attrs_post_init__(self) -> None:
        check(self)


@attrs.frozen
class Ranked:
    """A document's place in a ranking."""

    index: int
    """Index of the document in the request."""
    score: float
    """The model's classifier score: higher is better; its range depends on the model."""


@attrs.frozen
class Ranking:
    """The answer to a `RerankRequest`."""

    id: str
    results: tuple[Ranked, ...]
    """The best first; of equal scores, the earlier document."""
    prompt_tokens: int
    """Tokens of all pairs of query and document."""

    @property
    def read_tokens(self) -> int:
        """Tokens of all pairs."""
        return self.prompt_tokens
