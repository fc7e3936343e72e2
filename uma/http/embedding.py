"""One path from a body to embeddings or a ranking: what a dialect has read of it is computed, and written as JSON.

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

from uma.errors import BadRequest, UmaError, errors_renamed
from uma.http import abilities
from uma.http.ask import Said
from uma.http.dialect import Body
from uma.http.exchange import Exchange
from uma.http.fields import lane_alone
from uma.http.gateway import Gateway
from uma.http.generation import MAX_AT_ONCE, small_work
from uma.http.prompts import has_mixed, is_one_prompt, prompts, with_ids
from uma.http.reader import Reader
from uma.net.quota import Lane
from uma.protocol.codec import MAX_INLINE_FIGURES
from uma.types import Embeddings, EmbedRequest, Ranking, RerankRequest, warnings_of_empty

Encoding = Literal["float", "base64"]


@attrs.frozen(kw_only=True)
class EmbedAsk:
    """Texts that a body asks to be embedded, in the words that all dialects share."""

    value: Any
    """One text or token ids, or a list of them; see `prompts`."""
    field: str
    """The body's name for them."""
    names: Mapping[str, str] = attrs.field(factory=dict)
    """The body's names for single texts, where these are not places in `field`."""
    form: Callable[[Sequence[Any], Embeddings], Any]
    """Makes the answer of the vectors, each a list, a string or None."""
    priority: Lane | None
    dimensions: int | None = None
    normalizes: bool = True
    fail_on_empty: bool | None = None
    encoding: Encoding = "float"
    """How the answer has vectors: numbers, or base64 of 32-bit floats, little-endian."""


@attrs.frozen(kw_only=True)
class RankAsk:
    """Documents that a body asks to be ranked, in the words that all dialects share."""

    requests: Sequence[RerankRequest]
    """A request for each query, whose lane is `priority`."""
    names: Sequence[Mapping[str, str]]
    """The body's names for the fields of each."""
    form: Callable[[Sequence[Ranking]], Body]
    """Makes the answer of a ranking for each query."""
    priority: Lane | None

    def whole(self, lane: Lane) -> RerankRequest:
        """One request of all that is asked, whose bounds hold for all together. Raises `BadRequest`."""
        documents = tuple(document for request in self.requests for document in request.documents)
        with errors_renamed(self.names[0]):
            return attrs.evolve(self.requests[0], documents=documents, priority=lane)


@attrs.frozen(eq=False)
class Computes:
    """An endpoint that embeds or ranks."""

    read: Callable[[Mapping[str, Any], Reader], EmbedAsk | RankAsk | Said]

    async def __call__(self, gateway: Gateway, http: Exchange) -> None:
        """Answer one body."""
        reader = gateway.reader(http)
        ask, request = await http.built(partial(self.begin, gateway, http, reader))
        if isinstance(ask, Said):
            await http.answer_json(ask.body)
            return
        if isinstance(ask, RankAsk):
            await http.answer_json(ask.form(await _ranked(gateway, http, ask, request)))
            return
        if request is None:
            asked = partial(with_ids, gateway.source, http.id, ask.value, ask.field, in_one_kind=True)
            request = _request(http, reader, attrs.evolve(ask, value=await small_work(http, asked)))
        found = await gateway.compute(http, request, gateway.source.embed)
        warnings = warnings_of_empty(found.vectors, ask.field, is_single=is_one_prompt(ask.value))
        found = attrs.evolve(found, warnings=warnings)
        await _answer(gateway, http, ask, found)

    def begin(
        self, _: Gateway, http: Exchange, reader: Reader, fields: dict[str, Any]
    ) -> tuple[EmbedAsk | RankAsk | Said, Any]:
        """What a body asks, and the request, as `Generates.begin`."""
        ask = self.read(fields, reader)
        if isinstance(ask, RankAsk):
            return ask, ask.whole(lane_alone(ask.priority, http))
        if isinstance(ask, Said) or has_mixed(ask.value, in_one_kind=True):
            return ask, None
        return ask, _request(http, reader, ask)


async def _ranked(gateway: Gateway, http: Exchange, ask: RankAsk, whole: RerankRequest) -> list[Ranking]:
    """A ranking for each query; they run side by side, and the key is charged for `whole`."""
    found: dict[int, Ranking] = {}
    failures: list[UmaError] = []
    turns = trio.CapacityLimiter(MAX_AT_ONCE)

    async def one(number: int, lane: Lane, scope: trio.CancelScope) -> None:
        id = f"{http.id}-{number}" if number else http.id
        request = attrs.evolve(ask.requests[number], id=id, priority=lane)
        try:
            async with turns:
                with errors_renamed(ask.names[number]):
                    found[number] = await gateway.source.rerank(request)
        except UmaError as error:
            failures.append(error)
            scope.cancel()

    async def every(admitted: RerankRequest) -> list[Ranking]:
        async with trio.open_nursery() as nursery:
            for number in range(len(ask.requests)):
                nursery.start_soon(one, number, admitted.priority, nursery.cancel_scope)
        if failures:
            raise failures[0]
        return [found[number] for number in range(len(ask.requests))]

    return await gateway.compute(http, whole, every, lambda found: sum(each.prompt_tokens for each in found))


def _request(http: Exchange, reader: Reader, ask: EmbedAsk) -> EmbedRequest:
    """Any thread. Raises `BadRequest` for two kinds in one list, and for what is no text."""
    for name in ("texts", "token_ids"):
        if is_one_prompt(ask.value):
            http.names[f"{name}[0]"] = ask.field
        http.names[name] = ask.field
    http.names.update(ask.names)
    given = prompts(reader, ask.value, ask.field, with_media=False)
    texts = tuple(each["prompt"] for each in given if "prompt" in each)
    token_ids = tuple(each["token_ids"] for each in given if "token_ids" in each)
    if texts and token_ids:
        raise BadRequest.at(ask.field, "some are strings and some token ids; send each kind in a request of its own")
    abilities.embeddings(reader.able)
    return EmbedRequest(
        http.id,
        texts=texts or None,
        token_ids=token_ids or None,
        dimensions=ask.dimensions,
        normalize=ask.normalizes,
        fail_on_empty=bool(ask.fail_on_empty),
        priority=lane_alone(ask.priority, http),
        model=reader.adapted_model,
    )


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
