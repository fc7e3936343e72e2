"""vLLM's scores: `POST /score`, how well texts go together in pairs. A reranker's are those of its classifier, as in
`/rerank`; of a model that embeds they are the cosines of its embeddings.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from uma.constraints import show
from uma.errors import BadRequest, errors_renamed
from uma.http.dialect import Body
from uma.http.embedding import Computes, EmbedAsk, RankAsk
from uma.http.openai_embeddings import usage
from uma.http.reader import Reader, checked_text
from uma.net.quota import Lane
from uma.types import Embeddings, Ranking, RerankRequest

PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Names that vLLM has for the two sides."""


@attrs.frozen(kw_only=True)
class ScoreBody:
    """The fields that do something; the rest is named in `X-UMA-Ignored`. One of `PAIRS` is given."""

    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None
    model: str | None = None
    priority: Lane | None = None


@attrs.frozen
class Side:
    """One of the two that are compared."""

    field: str
    is_single: bool
    """One text by itself, not in a list."""
    texts: tuple[str, ...]

    @classmethod
    def of(cls, field: str, value: Any) -> Side:
        """Raises `BadRequest` for what is neither a text nor a list of some."""
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(each, str) for each in texts):
            raise BadRequest.at(field, f"expected a text or a list of texts, not {show(value)}")
        side = cls(field, isinstance(value, str), tuple(texts))
        for text, place in zip(side.texts, side.places, strict=True):
            checked_text(text, place)
        return side

    @property
    def places(self) -> list[str]:
        """What the body calls each text."""
        return [self.field] if self.is_single else [f"{self.field}[{index}]" for index in range(len(self.texts))]


def _read(fields: Mapping[str, Any], reader: Reader) -> EmbedAsk | RankAsk:
    body = reader.body(fields, ScoreBody)
    given = {name for names in PAIRS for name in names if getattr(body, name) is not None}
    names = next((pair for pair in PAIRS if set(pair) == given), None)
    if names is None:
        every = ", ".join(" and ".join(pair) for pair in PAIRS)
        raise BadRequest.at("text_1", f"expected two sides to compare, by one of these pairs of names: {every}")
    first, second = (Side.of(name, getattr(body, name)) for name in names)
    if len(first.texts) not in (1, len(second.texts)):
        raise BadRequest.at(
            first.field,
            f"{len(first.texts):,} texts cannot be compared with {len(second.texts):,}: give one, or as "
            f"many as {second.field} has",
        )
    # The only text of the first side goes with each of the second, or each with that of its place.
    pairs = [(0 if len(first.texts) == 1 else at, at) for at in range(len(second.texts))]
    read = _read_ranked if reader.able.rerank else _read_compared
    return read(first, second, pairs, body.priority, partial(_form, reader.id, reader.model))


Form = Callable[[Sequence[float], int], Body]
"""Makes the answer of a score for each pair, and of the tokens that were read."""


def _form(id: str, model: str, scores: Sequence[float], prompt_tokens: int) -> Body:
    return {
        "id": f"score-{id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [{"index": index, "object": "score", "score": each} for index, each in enumerate(scores)],
        "usage": usage(prompt_tokens),
    }


def _read_compared(
    first: Side, second: Side, pairs: Sequence[tuple[int, int]], priority: Lane | None, form: Form
) -> EmbedAsk:
    """Scores are the cosines of embeddings, which have length 1."""
    n_first = len(first.texts)

    def scored(rows: Sequence[Any], found: Embeddings) -> Body:
        return form([float(rows[at] @ rows[n_first + other]) for at, other in pairs], sum(found.prompt_tokens))

    names = _names("texts", first.places + second.places)
    every = [*first.texts, *second.texts]
    return EmbedAsk(value=every, field=first.field, names=names, form=scored, priority=priority, fail_on_empty=True)


def _read_ranked(
    first: Side, second: Side, pairs: Sequence[tuple[int, int]], priority: Lane | None, form: Form
) -> RankAsk:
    """Scores are a reranker's: each query has all that it is compared with."""
    of_query: defaultdict[int, list[int]] = defaultdict(list)
    for at, other in pairs:
        of_query[at].append(other)
    requests, names = list[RerankRequest](), list[Mapping[str, str]]()
    for at, others in of_query.items():
        names.append(_names("documents", [second.places[other] for other in others]) | {"query": first.places[at]})
        with errors_renamed(names[-1]):
            documents = tuple(second.texts[other] for other in others)
            requests.append(RerankRequest("score", first.texts[at], documents))

    def scored(found: Sequence[Ranking]) -> Body:
        scores = [0.0] * len(pairs)
        for others, ranking in zip(of_query.values(), found, strict=True):
            for each in ranking.results:
                scores[others[each.index]] = each.score
        return form(scores, sum(ranking.prompt_tokens for ranking in found))

    return RankAsk(requests=requests, names=names, form=scored, priority=priority)


def _names(field: str, places: Sequence[str]) -> dict[str, str]:
    """The body's names for the texts of a field of the engine's."""
    return {field: places[0].partition("[")[0]} | {f"{field}[{at}]": place for at, place in enumerate(places)}


score = Computes(_read)
"""`POST /score`."""
