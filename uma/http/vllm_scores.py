"""vLLM's scores: `POST /score`, how well texts go together in pairs. A reranker's are those of its classifier, as in
`/rerank`; of a model that embeds they are the cosines of its embeddings.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import trio

from uma.constraints import show
from uma.errors import BadRequest, UmaError, errors_renamed
from uma.http import abilities
from uma.http.exchange import Exchange
from uma.http.fields import lane_alone
from uma.http.gateway import Gateway
from uma.http.generation import MAX_AT_ONCE
from uma.http.openai_embeddings import usage
from uma.net.quota import Lane
from uma.protocol.codec import MAX_INLINE_FIGURES
from uma.types import Embeddings, EmbedRequest, Ranking, RerankRequest

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
        return cls(field, isinstance(value, str), tuple(texts))

    @property
    def places(self) -> list[str]:
        """What the body calls each text."""
        return [self.field] if self.is_single else [f"{self.field}[{index}]" for index in range(len(self.texts))]


@attrs.frozen
class Pairs:
    """Two sides of texts to compare: the only text of `first` with each of `second`, or each with that of its place."""

    first: Side
    second: Side
    model: str
    priority: Lane

    @property
    def places(self) -> list[tuple[int, int]]:
        """Places of the two texts of each pair."""
        count = len(self.second.texts)
        return [(0 if len(self.first.texts) == 1 else index, index) for index in range(count)]


@attrs.frozen
class Scored:
    """A score for each pair."""

    scores: Sequence[float]
    prompt_tokens: int


async def score(gateway: Gateway, http: Exchange) -> None:
    """`POST /score`."""
    asked = await http.built(partial(_asked, gateway, http))
    is_ranker = gateway.source.info.capabilities.rerank
    scored = await (_ranked(gateway, http, asked) if is_ranker else _compared(gateway, http, asked))
    await http.answer_json(
        {
            "id": f"score-{http.id}",
            "object": "list",
            "created": int(time.time()),
            "model": asked.model,
            "data": [{"index": index, "object": "score", "score": each} for index, each in enumerate(scored.scores)],
            "usage": usage(scored.prompt_tokens),
        }
    )


def _asked(gateway: Gateway, http: Exchange, fields: dict[str, Any]) -> Pairs:
    reader = gateway.reader(http)
    body, able = reader.body(fields, ScoreBody), reader.able
    if not able.rerank:
        abilities.embeddings(able)
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
    return Pairs(first, second, reader.model, lane_alone(body.priority, http))


async def _compared(gateway: Gateway, http: Exchange, asked: Pairs) -> Scored:
    """Scores by their embeddings."""
    n_first = len(asked.first.texts)
    with errors_renamed(_names("texts", asked.first.places + asked.second.places)):
        texts = asked.first.texts + asked.second.texts
        request = EmbedRequest(http.id, texts=texts, fail_on_empty=True, priority=asked.priority)
        found = await gateway.compute(http, request, gateway.source.embed, lambda found: sum(found.prompt_tokens))
    places = [(at, n_first + other) for at, other in asked.places]
    if found.n_figures <= MAX_INLINE_FIGURES:
        scores = _cosines(found, places)
    else:
        scores = await trio.to_thread.run_sync(_cosines, found, places, limiter=gateway.writers, abandon_on_cancel=True)
    return Scored(scores, sum(found.prompt_tokens))


def _cosines(found: Embeddings, places: Sequence[tuple[int, int]]) -> list[float]:
    """Cosines of embeddings of length 1."""
    import numpy as np  # noqa: PLC0415  (a gateway to a socket starts without it)

    rows = [np.frombuffer(each, np.float32) for each in found.vectors if each is not None]
    return [float(rows[at] @ rows[other]) for at, other in places]


async def _ranked(gateway: Gateway, http: Exchange, asked: Pairs) -> Scored:
    """Scores of a reranker: a request for each query, with all that it is compared with."""
    of_query: defaultdict[int, list[int]] = defaultdict(list)
    for at, other in asked.places:
        of_query[at].append(other)
    scores, used = [0.0] * len(asked.places), [0] * len(of_query)
    failures: list[UmaError] = []
    turns = trio.CapacityLimiter(MAX_AT_ONCE)

    async def one(number: int, whole: RerankRequest, others: list[int], scope: trio.CancelScope) -> None:
        own = _names("documents", [asked.second.places[at] for at in others]) | {"query": asked.first.places[number]}
        texts = tuple(asked.second.texts[at] for at in others)
        try:
            async with turns:
                with errors_renamed(own):
                    query = asked.first.texts[number]
                    request = attrs.evolve(whole, id=f"{http.id}-{number}", query=query, documents=texts)
                    found = await gateway.source.rerank(request)
        except UmaError as error:
            failures.append(error)
            scope.cancel()
            return
        used[number] = found.prompt_tokens
        for each in found.results:
            scores[others[each.index]] = each.score

    async def every(whole: RerankRequest) -> Ranking:
        async with trio.open_nursery() as nursery:
            for number, others in of_query.items():
                nursery.start_soon(one, number, whole, others, nursery.cancel_scope)
        if failures:
            raise failures[0]
        return Ranking(http.id, (), sum(used))

    with errors_renamed(_names("documents", asked.second.places) | {"query": asked.first.places[0]}):
        whole = RerankRequest(http.id, max(asked.first.texts), asked.second.texts, priority=asked.priority)
    ranking = await gateway.compute(http, whole, every, lambda ranking: ranking.prompt_tokens)
    return Scored(scores, ranking.prompt_tokens)


def _names(field: str, places: Sequence[str]) -> dict[str, str]:
    """The body's names for the texts of a field of the engine's."""
    return {field: places[0].partition("[")[0]} | {f"{field}[{at}]": place for at, place in enumerate(places)}
