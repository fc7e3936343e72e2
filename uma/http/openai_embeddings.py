"""OpenAI's embeddings: `POST /v1/embeddings`. The input is a string, a list of token ids, or a list of either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import attrs

from uma.constraints import Range
from uma.http.embedding import Encoding, Input, InputRequest, answer_vectors, embed, request_of, warnings_of
from uma.http.exchange import Exchange
from uma.http.fields import read
from uma.http.gateway import Gateway
from uma.http.prompts import PROMPTS, built_with_ids, is_one_prompt, prompts
from uma.net.quota import Lane


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


async def embeddings(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/embeddings`."""

    def read_body(fields: dict[str, Any]) -> tuple[EmbeddingsBody, str, InputRequest]:
        body = read(fields, EmbeddingsBody, http)
        model = gateway.names.check(body.model, http)
        given = Input.of(prompts(gateway, body.input, "input"), "input", is_single=is_one_prompt(body.input))
        wanted = request_of(
            gateway,
            http,
            given,
            priority=body.priority,
            dimensions=body.dimensions,
            fail_on_empty=body.fail_on_empty,
        )
        return body, model, wanted

    body, model, wanted = await built_with_ids(gateway, http, ("input",), read_body, in_one_kind=True)
    found = await embed(gateway, http, wanted)

    def form(vectors: Sequence[Any]) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(vectors)],
            "model": model,
            "usage": usage(sum(found.prompt_tokens)),
            **warnings_of(found),
        }

    await answer_vectors(gateway, http, found, form, body.encoding_format or "float")


def usage(prompt_tokens: int) -> dict[str, int]:
    """OpenAI's `usage` where nothing is generated."""
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
