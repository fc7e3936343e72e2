"""One path from a body to embeddings: what a dialect has read of it is computed, and its vectors written as JSON.

Vectors are large: more than a few are written in another thread, so that streams do not wait for them.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import attrs
import orjson
import trio

from uma.errors import BadRequest
from uma.http import abilities
from uma.http.ask import Said
from uma.http.exchange import Exchange
from uma.http.fields import lane_alone
from uma.http.gateway import Gateway
from uma.http.generation import small_work
from uma.http.prompts import has_mixed, is_one_prompt, prompts, with_ids
from uma.http.reader import Reader
from uma.net.quota import Lane
from uma.protocol.codec import MAX_INLINE_FIGURES
from uma.types import Embeddings, EmbedRequest, warnings_of_empty

Encoding = Literal["float", "base64"]


@attrs.frozen(kw_only=True)
class EmbedAsk:
    """Texts that a body asks to be embedded, in the words that all dialects share."""

    value: Any
    """One text or token ids, or a list of them; see `prompts`."""
    field: str
    """The body's name for them."""
    form: Callable[[Sequence[Any], Embeddings], Any]
    """Makes the answer of the vectors, each a list, a string or None."""
    priority: Lane | None
    dimensions: int | None = None
    normalizes: bool = True
    fail_on_empty: bool | None = None
    encoding: Encoding = "float"
    """How the answer has vectors: numbers, or base64 of 32-bit floats, little-endian."""


@attrs.frozen(eq=False)
class Embeds:
    """An endpoint that embeds."""

    read: Callable[[Mapping[str, Any], Reader], EmbedAsk | Said]

    async def __call__(self, gateway: Gateway, http: Exchange) -> None:
        """Answer one body."""
        reader = gateway.reader(http)

        def begin(fields: dict[str, Any]) -> tuple[EmbedAsk | Said, EmbedRequest | None]:
            ask = self.read(fields, reader)
            if isinstance(ask, Said) or has_mixed(ask.value, in_one_kind=True):
                return ask, None
            return ask, _request(http, reader, ask)

        ask, request = await http.built(begin)
        if isinstance(ask, Said):
            await http.answer_json(ask.body)
            return
        if request is None:
            asked = partial(with_ids, gateway.source, http.id, ask.value, ask.field, in_one_kind=True)
            request = _request(http, reader, attrs.evolve(ask, value=await small_work(http, asked)))
        found = await gateway.compute(http, request, gateway.source.embed, lambda found: sum(found.prompt_tokens))
        warnings = warnings_of_empty(found.vectors, ask.field, is_single=is_one_prompt(ask.value))
        found = attrs.evolve(found, warnings=warnings)
        await _answer(gateway, http, ask, found)


def name_texts(names: dict[str, str], field: str, *, is_single: bool = False) -> None:
    """Have errors name a text as the body does: by its place in `field`, or `field` alone for a single one."""
    for name in ("texts", "token_ids", "documents"):
        if is_single:
            names[f"{name}[0]"] = field
        names[name] = field


def _request(http: Exchange, reader: Reader, ask: EmbedAsk) -> EmbedRequest:
    """Any thread. Raises `BadRequest` for two kinds in one list, and for what is no text."""
    name_texts(http.names, ask.field, is_single=is_one_prompt(ask.value))
    given = prompts(reader, ask.value, ask.field, with_media=False)
    texts = tuple(each["prompt"] for each in given if "prompt" in each)
    token_ids = tuple(each["token_ids"] for each in given if "token_ids" in each)
    if texts and token_ids:
        raise BadRequest.at(ask.field, "some are strings and some token ids; send each kind in a request of its own")
    abilities.embeddings(reader.able)
    try:
        return EmbedRequest(
            http.id,
            texts=texts or None,
            token_ids=token_ids or None,
            dimensions=ask.dimensions,
            normalize=ask.normalizes,
            fail_on_empty=bool(ask.fail_on_empty),
            priority=lane_alone(ask.priority, http),
        )
    except ValueError as error:
        raise BadRequest.of(error) from None


def warnings_of(found: Embeddings) -> dict[str, Any]:
    """`warnings`, where there are any."""
    return {"warnings": found.warnings} if found.warnings else {}


async def _answer(gateway: Gateway, http: Exchange, ask: EmbedAsk, found: Embeddings) -> None:
    write = partial(_written, found, ask)
    if found.n_figures <= MAX_INLINE_FIGURES:
        data = write()
    else:
        data = await trio.to_thread.run_sync(write, limiter=gateway.writers, abandon_on_cancel=True)
    with gateway.unread.holding(len(data)):
        await http.answer(data)


def _written(found: Embeddings, ask: EmbedAsk) -> bytes:
    if ask.encoding == "base64":
        texts = [None if each is None else b64encode(each).decode("ascii") for each in found.vectors]
        return orjson.dumps(ask.form(texts, found))
    import numpy as np  # noqa: PLC0415  (a gateway to a socket starts without it)

    rows = [None if each is None else np.frombuffer(each, np.float32) for each in found.vectors]
    return orjson.dumps(ask.form(rows, found), option=orjson.OPT_SERIALIZE_NUMPY)
