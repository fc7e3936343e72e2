"""Ollama's embeddings: `POST /api/embed`, and `/api/embeddings`, which it has replaced and which clients still use.

Ollama cuts a text that is too long unless `truncate` is false. Here none is ever cut: it is an error in either case.
Where a text has no token, its embedding is an empty list, which Ollama's own clients can read, and not null.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import attrs
import trio

from uma.constraints import Range, Text, show
from uma.errors import BadRequest
from uma.http.content import checked_text
from uma.http.embedding import Input, InputRequest, answer_vectors, embed, request_of, warnings_of
from uma.http.exchange import Exchange
from uma.http.fields import read
from uma.http.gateway import Gateway
from uma.net.quota import Lane

_NS_PER_SEC = 1_000_000_000


@attrs.frozen(kw_only=True)
class EmbedOptions:
    """`options`: those of Ollama's are about generating, or about loading a model."""

    priority: Lane | None = None


@attrs.frozen(kw_only=True)
class _Body:
    model: str | None = None
    options: EmbedOptions | None = None
    priority: Lane | None = None

    @property
    def lane(self) -> Lane | None:
        """Lane as it stands in `options` or beside them."""
        return self.priority if self.priority is not None or self.options is None else self.options.priority


@attrs.frozen(kw_only=True)
class EmbedBody(_Body):
    """`POST /api/embed`."""

    input: Any = None
    truncate: bool | None = None
    """Taken, and without effect: no text is cut."""
    dimensions: Annotated[int, Range(0)] | None = None
    """0: all."""
    fail_on_empty: bool | None = None
    """UMA's own: 400 for a text of no token."""


@attrs.frozen(kw_only=True)
class EmbeddingsBody(_Body):
    """`POST /api/embeddings`."""

    prompt: Annotated[str, Text()] | None = None


async def embed_texts(gateway: Gateway, http: Exchange) -> None:
    """`POST /api/embed`. Without texts it only says that the model is loaded."""
    began = trio.current_time()
    model, wanted = await http.built(partial(_asked, gateway, http))
    if wanted is None:
        await http.answer_json({"model": model, "embeddings": []})
        return
    found = await embed(gateway, http, wanted)

    def form(vectors: Sequence[Any]) -> dict[str, Any]:
        return {
            "model": model,
            "embeddings": [[] if each is None else each for each in vectors],
            "total_duration": total_ns,
            "load_duration": 0,
            "prompt_eval_count": sum(found.prompt_tokens),
            **warnings_of(found),
        }

    total_ns = round((trio.current_time() - began) * _NS_PER_SEC)
    await answer_vectors(gateway, http, found, form)


def _asked(gateway: Gateway, http: Exchange, fields: dict[str, Any]) -> tuple[str, InputRequest | None]:
    """The model, and what to embed; None: nothing."""
    body = read(fields, EmbedBody, http)
    model, texts = gateway.names.check(body.model, http), _texts(body.input)
    if not texts:
        return model, None
    given = Input("input", isinstance(body.input, str), texts, None)
    wanted = request_of(
        gateway,
        http,
        given,
        priority=body.lane,
        dimensions=body.dimensions or None,
        fail_on_empty=body.fail_on_empty,
    )
    return model, wanted


def _texts(given: Any) -> tuple[str, ...]:
    if given is None or given == "":
        return ()
    if isinstance(given, str):
        return (checked_text(given, "input"),)
    if not (isinstance(given, list) and all(isinstance(each, str) for each in given)):
        raise BadRequest(f"input: expected a string or a list of strings, not {show(given)}")
    return tuple(checked_text(each, f"input[{index}]") for index, each in enumerate(given))


async def embed_prompt(gateway: Gateway, http: Exchange) -> None:
    """`POST /api/embeddings`: one text, whose embedding is not normalised."""

    def read_body(fields: dict[str, Any]) -> InputRequest | None:
        body = read(fields, EmbeddingsBody, http)
        gateway.names.check(body.model, http)
        if not body.prompt:
            return None
        given = Input("prompt", True, (body.prompt,), None)
        return request_of(gateway, http, given, priority=body.lane, normalize=False)

    wanted = await http.built(read_body)
    if wanted is None:
        await http.answer_json({"embedding": []})
        return
    found = await embed(gateway, http, wanted)

    def form(vectors: Sequence[Any]) -> dict[str, Any]:
        return {"embedding": [] if vectors[0] is None else vectors[0], **warnings_of(found)}

    await answer_vectors(gateway, http, found, form)
