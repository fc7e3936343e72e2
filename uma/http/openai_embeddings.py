"""OpenAI's embeddings: `POST /v1/embeddings`. The input is a string, a list of token ids, or a list of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import attrs

from uma.constraints import Range
from uma.http.embedding import Computes, EmbedAsk, Encoding, warnings_of
from uma.http.prompts import PROMPTS
from uma.http.reader import Reader
from uma.net.quota import Lane
from uma.types import Embeddings


@attrs.frozen(kw_only=True)
class EmbeddingsBody:
    """The fields that do something; the rest is named in `X-UMA-Ignored`."""

    input: Annotated[Any, PROMPTS]
    model: str | None = None
    dimensions: Annotated[int, Range(1)] | None = None
    encoding_format: Encoding | None = None
    fail_on_empty: bool | None = None
    """UMA's own: 400 for a text of no token, whose embedding is null otherwise."""
    priority: Lane | None = None


def _read(fields: Mapping[str, Any], reader: Reader) -> EmbedAsk:
    body = reader.body(fields, EmbeddingsBody)
    return EmbedAsk(
        value=body.input,
        field="input",
        form=partial(_form, reader.model),
        priority=body.priority,
        dimensions=body.dimensions,
        fail_on_empty=body.fail_on_empty,
        encoding=body.encoding_format or "float",
    )


def _form(model: str, vectors: Sequence[Any], found: Embeddings) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(vectors)],
        "model": model,
        "usage": usage(sum(found.prompt_tokens)),
        **warnings_of(found),
    }


def usage(prompt_tokens: int) -> dict[str, int]:
    """OpenAI's `usage` where nothing is generated."""
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}


embeddings = Computes(_read)
