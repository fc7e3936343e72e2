"""llama-server's embeddings and rankings: `POST /embedding`, and `/rerank` in Jina's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import attrs

from uma.constraints import Length, Range, Text
from uma.errors import BadRequest
from uma.http import abilities
from uma.http.embedding import Computes, EmbedAsk, RankAsk, warnings_of
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


embedding = Computes(_read)


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


def _read_ranked(fields: Mapping[str, Any], reader: Reader) -> RankAsk:
    body = reader.body(fields, RerankBody)
    abilities.rerank(reader.able)
    request = RerankRequest(reader.id, body.query, body.documents, top_n=body.top_n, model=reader.adapted_model)
    form = partial(_as_jina, reader.model, body)
    return RankAsk(requests=[request], names=[{}], form=form, priority=body.priority)


def _as_jina(model: str, body: RerankBody, found: Sequence[Ranking]) -> dict[str, Any]:
    documents = body.documents if body.return_documents else None
    return {
        "model": model,
        "object": "list",
        "usage": usage(found[0].prompt_tokens),
        "results": [
            {
                "index": each.index,
                "relevance_score": each.score,
                **({} if documents is None else {"document": {"text": documents[each.index]}}),
            }
            for each in found[0].results
        ],
    }


rerank = Computes(_read_ranked)
"""`POST /rerank`: the documents, best first."""
