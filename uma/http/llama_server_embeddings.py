"""llama-server's embeddings and rankings: `POST /embedding`, and `/rerank` in Jina's form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import attrs

from uma.constraints import Length, Range, Text
from uma.errors import BadRequest
from uma.http import abilities
from uma.http.embedding import Input, InputRequest, answer_vectors, embed, errors_naming, request_of, warnings_of
from uma.http.exchange import Exchange
from uma.http.fields import first, lane_alone, read
from uma.http.gateway import Gateway
from uma.http.openai_embeddings import usage
from uma.http.problem import Unsupported
from uma.http.prompts import built_with_ids, is_one_prompt, prompts
from uma.net.quota import Lane
from uma.types import MAX_TEXTS, Ranking, RerankRequest

AS_IT_IS, EUCLIDEAN = -1, 2
"""Values of `embd_normalize`."""


@attrs.frozen(kw_only=True)
class EmbeddingBody:
    """`POST /embedding`: the texts are in `content` or in `input`."""

    content: Any = None
    input: Any = None
    model: str | None = None
    embd_normalize: int | None = None
    fail_on_empty: bool | None = None
    """UMA's own: 400 for a text of no token."""
    priority: Lane | None = None


async def embedding(gateway: Gateway, http: Exchange) -> None:
    """`POST /embedding`: an object for each text, whose `embedding` is a list of one, or null for a text of no token.

    The first of these has the warning of all.
    """
    build = partial(_embedding, gateway, http)
    found = await embed(
        gateway, http, await built_with_ids(gateway, http, ("input", "content"), build, in_one_kind=True)
    )

    def form(vectors: Sequence[Any]) -> list[dict[str, Any]]:
        items = [{"index": index, "embedding": None if each is None else [each]} for index, each in enumerate(vectors)]
        if found.warnings:
            next(item for item in items if item["embedding"] is None).update(warnings_of(found))
        return items

    await answer_vectors(gateway, http, found, form)


def _embedding(gateway: Gateway, http: Exchange, fields: dict[str, Any]) -> InputRequest:
    body = read(fields, EmbeddingBody, http)
    gateway.names.check(body.model, http)
    if body.embd_normalize not in (None, AS_IT_IS, EUCLIDEAN):
        raise Unsupported("embd_normalize: this server can do 2 (Euclidean) and -1 (none)")
    field = "content" if body.input is None else "input"
    value = first(http, ("input", body.input), ("content", body.content))
    if value is None:
        raise BadRequest("content: is required (a string, token ids, or a list of either)")
    given = Input.of(prompts(gateway, value, field), field, is_single=is_one_prompt(value))
    return request_of(
        gateway,
        http,
        given,
        priority=body.priority,
        normalize=body.embd_normalize != AS_IT_IS,
        fail_on_empty=body.fail_on_empty,
    )


Documents = Annotated[tuple[Annotated[str, Text()], ...], Length(1, MAX_TEXTS, "documents")]


@attrs.frozen(kw_only=True)
class RerankBody:
    """Body of `POST /rerank`, as Jina and llama-server have it."""

    query: Annotated[str, Length(1), Text()]
    documents: Documents
    model: str | None = None
    top_n: Annotated[int, Range(1)] | None = None
    return_documents: bool | None = None
    """Whether each result has its document."""
    priority: Lane | None = None


async def rerank(gateway: Gateway, http: Exchange) -> None:
    """`POST /rerank`: the documents, best first."""
    body, model, request = await http.built(partial(_rerank, gateway, http))
    with errors_naming("documents"):
        found = await gateway.compute(http, request, gateway.source.rerank, lambda ranking: ranking.prompt_tokens)
    await http.answer_json(_as_jina(found, model, body))


def _rerank(gateway: Gateway, http: Exchange, fields: dict[str, Any]) -> tuple[RerankBody, str, RerankRequest]:
    body = read(fields, RerankBody, http)
    model = gateway.names.check(body.model, http)
    abilities.rerank(gateway.source.info.capabilities)
    priority = lane_alone(body.priority, http)
    request = RerankRequest(http.id, body.query, body.documents, top_n=body.top_n, priority=priority)
    return body, model, request


def _as_jina(found: Ranking, model: str, body: RerankBody) -> dict[str, Any]:
    documents = body.documents if body.return_documents else None
    return {
        "model": model,
        "object": "list",
        "usage": usage(found.prompt_tokens),
        "results": [
            {
                "index": each.index,
                "relevance_score": each.score,
                **({} if documents is None else {"document": {"text": documents[each.index]}}),
            }
            for each in found.results
        ],
    }
