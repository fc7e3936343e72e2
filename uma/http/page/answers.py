"""Answers that the page shows while they are being written, and that outlive a reload.

An answer keeps no log of events: it keeps its text, the thinking before it, and its blocks, each with the version in
which it last changed. A reader that comes back with `Last-Event-ID` is given what changed since, a new one is given
everything, and a slow one simply finds several versions' changes in one event. So memory is bounded by the answer's own
length.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any

import attrs
import orjson
import trio

from uma.errors import BadRequest, Overloaded, ShuttingDown, UmaError
from uma.http.gateway import Gateway, running
from uma.http.page.growing import GrowingText
from uma.http.page.likelihoods import Likelihoods, TokenLikelihood
from uma.http.page.renderer import Renderer
from uma.http.problem import NotFound
from uma.net.client import CLIENT
from uma.net.logfmt import log
from uma.net.metering import metered
from uma.net.quota import ClientAccount
from uma.types import EventStream, Finished, ReasoningDelta, Request, Source, Token

logger = logging.getLogger("uma.http")

KEEP_SEC = 60.0
"""Time for which an answer without a reader goes on, and can be picked up again."""
RENDER_INTERVAL_SEC = 0.1
"""Minimum time between two renderings of a block."""
RENDER_SHARE = 0.2
"""Maximum share of a core for rendering one answer while it is written; a long block is rendered less often."""
MAX_ANSWERS = 256
"""Answers that are written or kept at one time. One of 4,096 tokens takes some 100 KB, a longer one in proportion: the
context bounds it, or `--max-tokens`."""


Make = Callable[[], Awaitable[Request]]
"""Gives a request, once its model is loaded."""


def given(request: Request) -> Make:
    """Called for a request that is there."""

    async def make() -> Request:
        return request

    return make


@attrs.define(eq=False)
class Answer:
    """One answer: the request that makes it, its text and blocks so far, and its readers. Trio thread."""

    id: str
    """The request's id."""
    _make: Make | None
    """Gives its request; until it has been generated: a conversation can be megabytes."""
    keep_sec: float
    model: str | None = None
    """Model of several; None: the default one."""
    account: ClientAccount | None = None
    """The account of the key it was asked for with; its bounds count the answer."""
    client: Hashable = None
    """The client among whose answers it counts."""
    owner: Hashable = None
    """See `Exchange.owner`."""
    exchange: None = attrs.field(default=None, init=False)
    """See `Answering`: a page that is left comes back by another one."""
    text: str = attrs.field(default="", init=False)
    """Text as far as it has been rendered; of one that is continued, from its first beginning on."""
    thinking: str = attrs.field(default="", init=False)
    """The model's thinking. It is shown as it is, at the pace of the text."""
    tokens: list[TokenLikelihood] = attrs.field(factory=list, init=False)
    """The text's tokens, where log probabilities were asked for."""
    blocks: list[str] = attrs.field(factory=list, init=False)
    version: int = attrs.field(default=0, init=False)
    finished: Finished | None = attrs.field(default=None, init=False)
    error: UmaError | None = attrs.field(default=None, init=False)
    is_over: bool = attrs.field(default=False, init=False)
    """Ended, and rendered to its end: nothing changes any more."""
    _arrived: list[str] = attrs.field(factory=list, init=False)
    """Text since the last rendering."""
    _thought: list[str] = attrs.field(factory=list, init=False)
    """Thinking since then."""
    _likelihoods: Likelihoods = attrs.field(factory=Likelihoods, init=False)
    """Tokens since then, where log probabilities were asked for."""
    _lengths: list[tuple[int, int, int]] = attrs.field(factory=lambda: [(0, 0, 0)], init=False)
    """Characters of text and of thinking, and tokens, by version."""
    _changed: list[int] = attrs.field(factory=list, init=False)
    """Version in which a block last changed, by block."""
    _running: ExitStack = attrs.field(factory=ExitStack, init=False)
    """Counts it for its account."""
    _readers: int = attrs.field(default=0, init=False)
    _stream: EventStream | None = attrs.field(default=None, init=False)
    _has_ended: trio.Event = attrs.field(factory=trio.Event, init=False)
    """No more text comes: what there is, is rendered without a pause."""
    _is_stopped: bool = attrs.field(default=False, init=False)
    _ends_thinking: bool = attrs.field(default=False, init=False)
    _arrival: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _rendered: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _readers_changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    async def run(self, source: Source, renderer: Renderer) -> None:
        """Generate and render, until the answer has had no reader for `keep_sec`: then it is cancelled if need be."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._generate, source)
            nursery.start_soon(self._render, renderer)
            await self._wait_until_unwanted()
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        """End it at the next token; what is there stays, and it ends with `Finished` of reason `cancelled`."""
        self._is_stopped = True
        if self._stream is not None:
            self._stream.cancel()

    def end_thinking(self) -> None:
        """See `types.EventStream.end_thinking`."""
        self._ends_thinking = True
        if self._stream is not None:
            self._stream.end_thinking()

    def abort(self, error: UmaError) -> None:
        """End it now, with `error`."""
        if self.finished is None:
            self.error = error
            self.stop()
            self._has_ended.set()
            self._arrival.unpark_all()

    def give_up(self, error: UmaError) -> None:
        """Nothing comes any more, not even what has been generated. Its readers get `error`."""
        self.error = error
        self.is_over = True
        self._rendered.unpark_all()

    @contextmanager
    def reader(self) -> Iterator[None]:
        """A reader is attached: the answer is wanted, and rendered, for as long as the block lasts."""
        self._readers += 1
        self._readers_changed.unpark_all()
        self._arrival.unpark_all()
        try:
            yield
        finally:
            self._readers -= 1
            self._readers_changed.unpark_all()

    async def wait(self, seen: int) -> None:
        """Wait until there is a version after `seen`, or the end."""
        while self.version <= seen and not self.is_over:
            await self._rendered.park()

    def changes(self, seen: int) -> dict[str, Any]:
        """What is new since version `seen`: text, thinking and tokens to append, and the blocks that changed."""
        text_chars, thinking_chars, tokens = self._lengths[seen]
        new = {"tokens": self.tokens[tokens:]} if len(self.tokens) > tokens else {}
        return {
            **new,
            "text": self.text[text_chars:],
            "thinking": self.thinking[thinking_chars:],
            "blocks": {index: self.blocks[index] for index, at in enumerate(self._changed) if at > seen},
            "count": len(self.blocks),
        }

    def seen_version(self, last_event_id: str | None) -> int:
        """The version that a reader has; 0, nothing, for a new one or one with an id that is none of ours."""
        known = last_event_id is not None and last_event_id.isascii() and last_event_id.isdigit()
        return min(int(last_event_id or 0), self.version) if known and len(last_event_id or "") < 10 else 0

    def count(self) -> None:
        """Count an answer that runs from now on, for its account."""
        self._running.enter_context(running(self.account, 1))

    def count_no_more(self) -> None:
        """Count an answer no more: it has ended, or never ran."""
        self._running.close()

    async def _generate(self, source: Source) -> None:
        try:
            async with AsyncExitStack() as stack:
                stack.callback(self.count_no_more)
                assert self._make is not None  # it is generated once
                stream = await stack.enter_async_context(source.generate(await self._make()))
                meter = await stack.enter_async_context(metered(stream, self.account))
                self._stream = stream
                if self._ends_thinking:
                    stream.end_thinking()
                if self._is_stopped:
                    stream.cancel()
                async for event in stream:
                    if isinstance(event, Token):
                        self._arrived.append(event.text)
                        self._likelihoods.take(event)
                    elif isinstance(event, ReasoningDelta):
                        self._thought.append(event.text)
                        self._likelihoods.aside()
                    elif isinstance(event, Finished):
                        self.finished = event
                        meter.usage = event.usage
                    self._arrival.unpark_all()
        except UmaError as error:
            self.error = error
        self._make = None
        self._has_ended.set()
        self._arrival.unpark_all()

    async def _render(self, renderer: Renderer) -> None:
        growing = GrowingText(renderer.parse, renderer.render)
        while not self.is_over:
            while not self._is_due():
                await self._arrival.park()
            began = trio.current_time()
            is_end = self.finished is not None or self.error is not None
            text = self.text + "".join(self._arrived)
            thinking = self.thinking + "".join(self._thought)
            self._arrived.clear()
            self._thought.clear()
            if is_end or len(text) > len(self.text):
                render = growing.finish if is_end else growing.update
                await trio.to_thread.run_sync(render, text, limiter=renderer.turns, abandon_on_cancel=True)
            self._publish(text, thinking, growing.blocks, is_end)
            took = trio.current_time() - began
            with trio.move_on_after(max(RENDER_INTERVAL_SEC - took, took * (1 / RENDER_SHARE - 1))):
                await self._has_ended.wait()

    def _is_due(self) -> bool:
        has_news = self._arrived or self._thought or self.finished is not None or self.error is not None
        return bool(has_news) and self._readers > 0

    def _publish(self, text: str, thinking: str, blocks: list[str], is_end: bool) -> None:
        self.version += 1
        self.text, self.thinking = text, thinking
        self.tokens += self._likelihoods.drain()
        self._lengths.append((len(text), len(thinking), len(self.tokens)))
        for index, html in enumerate(blocks):
            if index == len(self._changed):
                self._changed.append(self.version)
            elif html != self.blocks[index]:
                self._changed[index] = self.version
        del self._changed[len(blocks) :]
        self.blocks = list(blocks)
        self.is_over = is_end
        self._rendered.unpark_all()

    async def _wait_until_unwanted(self) -> None:
        while True:
            while self._readers:
                await self._readers_changed.park()
            with trio.move_on_after(self.keep_sec):
                await self._readers_changed.park()
            if not self._readers:
                return


@attrs.define(eq=False)
class Answers:
    """All answers that are written or kept, by their resume token. Trio thread."""

    gateway: Gateway
    _by_token: dict[str, Answer] = attrs.field(factory=dict, init=False)
    _renderer: Renderer = attrs.field(factory=Renderer, init=False)

    def __attrs_post_init__(self) -> None:
        self.gateway.at_abort.append(self.abort)
        self.gateway.at_end.append(self._renderer.close)

    def warm(self) -> None:
        """Answers will be asked for: have the process that renders them start meanwhile."""
        if self.gateway.tasks is not None:
            self.gateway.tasks.start_soon(self._renderer.warm)

    def abort(self) -> None:
        """End all, and tell their readers that the server stops."""
        for answer in self._by_token.values():
            answer.abort(ShuttingDown("the server is stopping, and this took longer than drain_timeout_sec"))

    def start(
        self,
        id: str,
        make: Make,
        token: str,
        account: ClientAccount | None = None,
        owner: Hashable = None,
        *,
        model: str | None = None,
        text: str = "",
        is_kept: bool,
    ) -> Answer:
        """Begin an answer to the request that `make` gives and that has this id. Some of its `text` can be there
        already. It needs a reader at once. Raises `Overloaded` or, for a token in use, `BadRequest`.
        """
        if token in self._by_token:
            raise BadRequest("token: an answer of this token is there already; each answer needs a token of its own")
        client, kept = CLIENT.get(), len(self._by_token)
        mine = sum(each.client == client for each in self._by_token.values())
        # Each client leaves as many places as it takes.
        if kept >= MAX_ANSWERS or mine > MAX_ANSWERS - kept:
            raise Overloaded(f"{kept} answers are being written or kept for their readers; try again later")
        keep_sec = KEEP_SEC if is_kept else 0.0
        answer = self._by_token[token] = Answer(id, make, keep_sec, model, account, client, owner)
        self.gateway.began(id, answer)
        answer.text = text
        answer.count()  # at once: the next request is held against the account's bounds before this one's task begins
        assert self.gateway.tasks is not None  # the service runs, or there would be no connection
        self.gateway.tasks.start_soon(self._run, answer, token)
        return answer

    def find(self, token: str, account: ClientAccount | None) -> Answer:
        """The answer of this token, which the same account has asked for. Raises `NotFound`."""
        answer = self._by_token.get(token)
        if answer is None or answer.account is not account:
            raise NotFound(
                f"no such answer: it was never asked for, or had no reader for {KEEP_SEC:g} seconds; ask again"
            )
        return answer

    async def _run(self, answer: Answer, token: str) -> None:
        try:
            await answer.run(self.gateway.source, self._renderer)
        except Exception as fault:  # noqa: BLE001  (whatever it is, it is this answer's alone)
            log(logger, logging.ERROR, "page.answer_crashed", request=answer.id, fault=fault)
            answer.give_up(UmaError("a fault in the server itself; its log says more"))
        finally:
            answer.count_no_more()
            del self._by_token[token], self.gateway.answering[answer.id]


def event(name: str, data: dict[str, Any], id: int | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if id is None else b"id: %d\n" % id
    return head + b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS))
