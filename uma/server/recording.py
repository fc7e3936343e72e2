"""Requests on their way to the history (`uma.history`), where `--history` keeps one."""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import accumulate

import trio

from uma.config import RuntimeConfig
from uma.engine import Engine
from uma.engine.submission import Over
from uma.history import Head, History, HistoryEntry, HistoryFault, default_path
from uma.net.logfmt import log
from uma.protocol.converter import unstructure

logger = logging.getLogger("uma.server")

MAX_WAITING = 256
"""Maximum requests that wait to be written: of more, those that end meanwhile are lost to the history, and the log says
how many."""
MAX_WAITING_TOKENS = 4_000_000
"""Tokens of these from which on no more are taken: a disk that does not answer would have long prompts pile up."""
FLUSH_SEC = 2.0
"""Longest wait at the server's end for what is not written yet."""
_LEFT_OUT = ("id", "stream", "metadata", "media")


@asynccontextmanager
async def recording(engine: Engine, config: RuntimeConfig) -> AsyncIterator[None]:
    """A block in which the history has the generations that end, where `config` asks for one."""
    if not config.history:
        yield
        return
    recorder = _Recorder(engine, config)
    engine.on_request_over(recorder.take)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(recorder.write)
        try:
            yield
        finally:
            with trio.move_on_after(FLUSH_SEC, shield=True):
                recorder.sending.close()
                await recorder.written.wait()
            nursery.cancel_scope.cancel()


class _Recorder:
    def __init__(self, engine: Engine, config: RuntimeConfig) -> None:
        self._vocab, self._model = engine.vocab, engine.info.model.name
        self._path = default_path()
        self._hides = re.compile(config.history_redact) if config.history_redact else None
        self.sending, self._receiving = trio.open_memory_channel[Over](MAX_WAITING)
        self.written = trio.Event()
        self._waiting_tokens = 0
        self._lost = 0

    def take(self, over: Over) -> None:
        """A request is over. Does not wait."""
        if self._waiting_tokens > MAX_WAITING_TOKENS:
            self._lost += 1
            return
        try:
            self.sending.send_nowait(over)
        except trio.WouldBlock:
            self._lost += 1
        except trio.ClosedResourceError:  # it was cancelled by the server's end
            return
        else:
            self._waiting_tokens += len(over.tokens)

    async def write(self) -> None:
        """Write what comes, until the end."""
        async for over in self._receiving:
            some = [over]
            while len(some) < MAX_WAITING:
                try:
                    some.append(self._receiving.receive_nowait())
                except (trio.WouldBlock, trio.EndOfChannel):
                    break
            lost, self._lost = self._lost, 0
            try:
                await trio.to_thread.run_sync(partial(self._add, some), abandon_on_cancel=True)
            except HistoryFault as error:
                lost += len(some)
                log(logger, logging.WARNING, "history.failed", reason=error.message)
            self._waiting_tokens -= sum(len(over.tokens) for over in some)
            if lost:
                log(logger, logging.WARNING, "history.lost", requests=lost)
        self.written.set()

    def _add(self, some: list[Over]) -> None:
        with History(self._path) as history:
            history.add([self._entry(over) for over in some])

    def _entry(self, over: Over) -> HistoryEntry:
        asked = over.asked.with_media(()) if any(over.asked.placed_media()) else over.asked
        fields = unstructure(asked) | {"sampling": unstructure(asked.sampling)}
        pieces = [self._vocab.spelled(token) if token >= 0 else b"" for token in over.tokens]
        count = over.usage.prompt_tokens
        entry = HistoryEntry(
            head=Head(
                id=over.request.id,
                model=self._model,
                origin=over.origin,
                came_at=over.began_at,
                took_ms=round(1000 * (over.ended_at - over.began_at), 1),
                reason=over.error or over.reason,
                prompt_tokens=count,
                cached_tokens=over.usage.cached_tokens,
                completion_tokens=over.usage.completion_tokens,
                ttft_ms=over.metrics.ttft_ms,
                tokens_per_second=over.metrics.tokens_per_second,
            ),
            owner="" if over.owner is None else str(over.owner),
            request={name: value for name, value in fields.items() if name not in _LEFT_OUT},
            prompt=b"".join(pieces[:count]),
            ends=array("I", accumulate(map(len, pieces[:count]))),
            answer=b"".join(pieces[count:]),
        )
        return entry if self._hides is None else entry.redacted(self._hides)
