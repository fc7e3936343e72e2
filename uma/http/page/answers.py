"""Answers that the page shows while they are being written, and that outlive a reload.

An answer keeps no log of events: it keeps its text, the thinking before it, and its tokens where their log
probabilities were asked for. An event's id is how much there was of each. So a reader that comes back with
`Last-Event-ID` is given what has come since, a new one is given everything, a slow one finds several tokens in one
event, and memory is bounded by the answer's own length.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any

import attrs
import orjson
import trio

from uma.errors import CUT_OFF, BadRequest, Ended, Overloaded, ShuttingDown, UmaError
from uma.http.gateway import Gateway, running
from uma.http.page.likelihoods import Likelihoods, TokenLikelihood
from uma.http.problem import NotFound
from uma.net.client import CLIENT
from uma.net.logfmt import log
from uma.net.metering import metered
from uma.net.quota import ClientAccount
from uma.types import EventStream, Finished, ReasoningDelta, Request, Source, Token

logger = logging.getLogger("uma.http")

KEEP_SEC = 60.0
"""Time for which an answer without a reader goes on, and can be picked up again."""
UPDATE_INTERVAL_SEC = 0.1
"""Minimum time between two updates of one reader: a faster one would be no easier to read."""
MAX_ANSWERS = 256
"""Answers that are written or kept at one time. One of 4,096 tokens takes some 20 KB, a longer one in proportion: the
context bounds it, or `--max-tokens`."""


Extent = tuple[int, int, int]
"""Characters of text and of thinking, and tokens with a log probability."""
NOTHING: Extent = (0, 0, 0)
_EVENT_ID = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})", re.ASCII)

Make = Callable[[], Awaitable[Request]]
"""Gives a request, once its model is loaded."""


def given(request: Request) -> Make:
    """Called for a request that is there."""

    async def make() -> Request:
        return request

    return make


@attrs.define(eq=False)
class PageAnswer:
    """One answer: the request that makes it, its text so far, and its readers. Trio thread."""

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
    text: str = ""
    """Text so far; of one that is continued, from its first beginning on."""
    thinking: str = attrs.field(default="", init=False)
    """The model's thinking."""
    tokens: list[TokenLikelihood] = attrs.field(factory=list, init=False)
    """The text's tokens, where log probabilities were asked for."""
    finished: Finished | None = attrs.field(default=None, init=False)
    error: UmaError | None = attrs.field(default=None, init=False)
    made_ms: float = attrs.field(default=0.0, init=False)
    """Time until its request was made: of several models, while its own was loaded."""
    has_begun: bool = attrs.field(default=False, init=False)
    """The model has written or thought something."""
    ended: trio.Event = attrs.field(factory=trio.Event, init=False)
    """Set once nothing more comes: `finished` or `error` says why."""
    _likelihoods: Likelihoods = attrs.field(factory=Likelihoods, init=False)
    _running: ExitStack = attrs.field(factory=ExitStack, init=False)
    """Counts it for its account."""
    _readers: int = attrs.field(default=0, init=False)
    _stream: EventStream | None = attrs.field(default=None, init=False)
    _making: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    """Until its request is made."""
    _is_stopped: bool = attrs.field(default=False, init=False)
    _ends_thinking: bool = attrs.field(default=False, init=False)
    _news: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _readers_changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    async def run(self, source: Source) -> None:
        """Generate, until the answer has had no reader for `keep_sec`: then it is cancelled if need be."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._generate, source)
            await self._wait_until_unwanted()
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        """End it at the next token; what is there stays, and it ends with `Finished` of reason `cancelled`. Where its
        model is not loaded yet, it ends at once with `Ended`.
        """
        self._is_stopped = True
        self._making.cancel()
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
            self._end()

    def give_up(self, error: UmaError) -> None:
        """End it with `error`, whatever has been generated."""
        self.error = error
        self._end()

    @contextmanager
    def reader(self) -> Iterator[None]:
        """A reader is attached: the answer is wanted for as long as the block lasts."""
        self._readers += 1
        self._readers_changed.unpark_all()
        try:
            yield
        finally:
            self._readers -= 1
            self._readers_changed.unpark_all()

    @property
    def extent(self) -> Extent:
        """How much there is."""
        return len(self.text), len(self.thinking), len(self.tokens)

    async def wait(self, seen: Extent) -> None:
        """Wait until there is more than `seen`, or the end."""
        while not self.ended.is_set() and not (self.has_begun and self.extent != seen):
            await self._news.park()

    def changes(self, seen: Extent) -> dict[str, Any]:
        """What has come since there was `seen`: text, thinking and tokens to append."""
        text, thinking, tokens = seen
        new = {"tokens": self.tokens[tokens:]} if len(self.tokens) > tokens else {}
        return {"text": self.text[text:], "thinking": self.thinking[thinking:], **new}

    def seen_extent(self, last_event_id: str | None) -> Extent:
        """What a reader has that was given this event; nothing for a new reader, or an id that is none of ours."""
        match = _EVENT_ID.fullmatch(last_event_id or "")
        if match is None:
            return NOTHING
        text, thinking, tokens = map(int, match.groups())
        return min(text, len(self.text)), min(thinking, len(self.thinking)), min(tokens, len(self.tokens))

    def count(self, gateway: Gateway) -> None:
        """Count an answer that runs from now on, for its account, and list it."""
        gateway.began(self.id, self)
        self._running.callback(gateway.answering.pop, self.id, None)
        self._running.enter_context(running(self.account, 1))

    def count_no_more(self) -> None:
        """Count and list an answer no more: it has ended, or never ran."""
        self._running.close()

    async def _generate(self, source: Source) -> None:
        try:
            async with AsyncExitStack() as stack:
                stack.callback(self.count_no_more)
                assert self._make is not None  # it is generated once
                came = trio.current_time()
                with self._making:
                    request = await self._make()
                if self._making.cancelled_caught:
                    raise Ended("it was stopped before its model was loaded")
                self.made_ms = 1000 * (trio.current_time() - came)
                stream = await stack.enter_async_context(source.generate(request))
                meter = await stack.enter_async_context(metered(stream, self.account))
                self._stream = stream
                if self._ends_thinking:
                    stream.end_thinking()
                if self._is_stopped:
                    stream.cancel()
                async for event in stream:
                    if isinstance(event, Token):
                        self.text += event.text
                        self.tokens += self._likelihoods.take(event)
                    elif isinstance(event, ReasoningDelta):
                        self.thinking += event.text
                        self._likelihoods.aside()
                    elif isinstance(event, Finished):
                        self.finished = event
                        meter.usage = event.usage
                    self.has_begun = True
                    self._news.unpark_all()
        except UmaError as error:
            self.error = error
            if self.account is not None and type(error) is Overloaded:
                self.account.refused += 1
        self._make = None
        self._end()

    def _end(self) -> None:
        self.ended.set()
        self._news.unpark_all()

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
    _by_token: dict[str, PageAnswer] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.gateway.at_abort.append(self.abort)

    def abort(self) -> None:
        """End all, and tell their readers that the server stops."""
        for answer in self._by_token.values():
            answer.abort(ShuttingDown(CUT_OFF))

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
    ) -> PageAnswer:
        """Begin an answer to the request that `make` gives and that has this id. Some of its `text` can be there
        already. It needs a reader at once. Raises `Overloaded` or, for a token in use, `BadRequest`.
        """
        if token in self._by_token:
            raise BadRequest.at(
                "token", "an answer of this token is there already; each answer needs a token of its own"
            )
        client, kept = CLIENT.get(), len(self._by_token)
        mine = sum(each.client == client for each in self._by_token.values())
        # Each client leaves as many places as it takes.
        if kept >= MAX_ANSWERS or mine > MAX_ANSWERS - kept:
            raise Overloaded(f"{kept} answers are being written or kept for their readers; try again later")
        keep_sec = KEEP_SEC if is_kept else 0.0
        answer = self._by_token[token] = PageAnswer(id, make, keep_sec, model, account, client, owner, text)
        answer.count(
            self.gateway
        )  # at once: the next request is held against the account's bounds before this one's task begins
        assert self.gateway.tasks is not None  # the service runs, or there would be no connection
        self.gateway.tasks.start_soon(self._run, answer, token)
        return answer

    def find(self, token: str, account: ClientAccount | None) -> PageAnswer:
        """The answer of this token, which the same account has asked for. Raises `NotFound`."""
        answer = self._by_token.get(token)
        if answer is None or answer.account is not account:
            raise NotFound(
                f"no such answer: it was never asked for, or had no reader for {KEEP_SEC:g} seconds; ask again"
            )
        return answer

    async def _run(self, answer: PageAnswer, token: str) -> None:
        try:
            await answer.run(self.gateway.source)
        except Exception as fault:  # noqa: BLE001  (whatever it is, it is this answer's alone)
            log(logger, logging.ERROR, "page.answer_crashed", request=answer.id, fault=fault)
            answer.give_up(UmaError("a fault in the server itself; its log says more"))
        finally:
            answer.count_no_more()
            del self._by_token[token]


def event(name: str, data: dict[str, Any], id: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if id is None else b"id: %s\n" % id.encode()
    return head + b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps(data))
