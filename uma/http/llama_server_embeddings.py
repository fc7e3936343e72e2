"""llama-server's embeddings and rankings: `POST /embedding`, and `/rerank` in Jina's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import attrs

from uma.constraints import Length, Range, Text
from uma.errors import BadRequest
from uma.http import abilities
from uma.http.embedding import EmbedAsk, Embeds, name_texts, warnings_of
from uma.http.exchange import Exchange
from uma.http.fields import lane_alone
from uma.http.gateway import Gateway
from uma.http.openai_embeddings import usage
from uma.http.problem import Unsupported
from uma.http.reader import Reader
from uma.net.quota import Lane
from uma.types import MAX_TEXTS, Embeddings, Ranking, RerankRequest

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


def _read(fields: Mapping[str, Any], reader: Reader) -> EmbedAsk:
    body = reader.body(fields, EmbeddingBody)
    if body.embd_normalize not in (None, AS_IT_IS, EUCLIDEAN):
        raise Unsupported.at("embd_normalize", "this server can do 2 (Euclidean) and -1 (none)")
    field, value = reader.named_first(("input", body.input), ("content", body.content))
    if value is None:
        raise BadRequest.at("content", "is required (a string, token ids, or a list of either)")
    return EmbedAsk(
        value=value,
        field=field,
        form=_form,
        priority=body.priority,
        normalizes=body.embd_normalize != AS_IT_IS,
        fail_on_empty=body.fail_on_empty,
    )


def _form(vectors: Sequence[Any], found: Embeddings) -> list[dict[str, Any]]:
    """An object for each text, whose `embedding` is a list of one, or null for a text of no token: the first of these
    has the warning of all.
    """
    items = [{"index": index, "embedding": None if each is None else [each]} for index, each in enumerate(vectors)]
    if found.warnings:
        next(item for item in items if item["embedding"] is None).update(warnings_of(found))
    return items


embedding = Embeds(_read)


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
    reader = gateway.reader(http)
    body, request = await http.built(partial(_read_ranked, http, reader))
    found = await gateway.compute(http, request, gateway.source.rerank, lambda ranking: ranking.prompt_tokens)
    await http.answer_json(_as_jina(found, reader.model, body))


def _read_ranked(http: Exchange, reader: Reader, fields: dict[str, Any]) -> tuple[RerankBody, RerankRequest]:
    body = reader.body(fields, RerankBody)
    abilities.rerank(reader.able)
    name_texts(http.names, "documents")
    priority = lane_alone(body.priority, http)
    return body, RerankRequest(http.id, body.query, body.documents, top_n=body.top_n, priority=priority)


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
