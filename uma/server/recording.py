"""Requests on their way to the history (`uma.history`), where `--history` keeps one."""

from __future__ import annotations

import logging
import re
import sqlite3
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import accumulate

import trio

from uma.config import RuntimeConfig
from uma.engine import Engine
from uma.engine.submission import Over
from uma.history import Head, History, HistoryEntry, default_path
from uma.kept import KeptFault
from uma.net.logfmt import log
from uma.protocol.converter import unstructure

logger = logging.getLogger("uma.server")

MAX_WAITING_TOKENS = 4_000_000
"""Maximum tokens of requests that wait to be written: with a disk that does not answer long prompts would pile up. More
are lost to the history, and the log says how many."""
REQUEST_TOKENS = 1_000
"""Tokens that a request which waits counts beside its own."""
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
        nursery.start_soon(recorder.run)
        try:
            yield
        finally:
            with trio.move_on_after(FLUSH_SEC, shield=True):
                await recorder.write()
            nursery.cancel_scope.cancel()


class _Recorder:
    def __init__(self, engine: Engine, config: RuntimeConfig) -> None:
        self._vocab, self._model = engine.vocab, engine.info.model.name
        self._hides = re.compile(config.history_redact) if config.history_redact else None
        self._waiting: list[Over] = []
        self._waiting_tokens = self._lost = 0
        self._has_some = trio.Event()
        self._turn = trio.Lock()

    def take(self, over: Over) -> None:
        """A request is over. Does not wait."""
        if self._waiting_tokens > MAX_WAITING_TOKENS:
            self._lost += 1
            return
        self._waiting.append(over)
        self._waiting_tokens += len(over.tokens) + REQUEST_TOKENS
        self._has_some.set()

    async def run(self) -> None:
        """Write what comes. Its file is there from the start, so that it can be read before the first request."""
        while True:
            await self.write()
            await self._has_some.wait()

    async def write(self) -> None:
        """Write what has come."""
        async with self._turn:
            some, self._waiting, self._has_some = self._waiting, [], trio.Event()
            lost, self._lost = self._lost, 0
            try:
                faults = await trio.to_thread.run_sync(self._add, some, abandon_on_cancel=True)
            except KeptFault as error:
                lost += len(some)
                log(logger, logging.WARNING, "history.failed", reason=error.message)
            else:
                lost += len(faults)
                if faults:
                    log(logger, logging.WARNING, "history.failed", reason=faults[0])
            self._waiting_tokens -= sum(len(over.tokens) + REQUEST_TOKENS for over in some)
        if lost:
            log(logger, logging.WARNING, "history.lost", requests=lost)

    def _add(self, some: list[Over]) -> list[str]:
        """Write these; why some of them could not be. Raises `KeptFault` where the file is at fault."""
        with History(default_path()) as history:
            faults = self._faults(history, some)
            return [why for over in some for why in self._faults(history, [over])] if faults else []

    def _faults(self, history: History, some: list[Over]) -> list[str]:
        """Why none of these could be written; empty: all are."""
        try:
            history.keep(map(self._entry, some))
        except KeptFault as error:
            if isinstance(error.__cause__, OSError | sqlite3.OperationalError):
                raise  # it would hold for each row again, and each would wait for it
            return [error.message]
        return []

    def _entry(self, over: Over) -> HistoryEntry:
        asked = over.asked.with_media(()) if any(over.asked.placed_media()) else over.asked
        fields = unstructure(asked) | {"sampling": unstructure(asked.sampling)}
        count, decode = over.usage.prompt_tokens, getincrementaldecoder("utf-8")("replace").decode
        pieces = [decode(self._vocab.spelled(token)) if token >= 0 else "" for token in over.tokens]
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
            prompt="".join(pieces[:count]),
            ends=list(accumulate(map(len, pieces))),
            answer="".join(pieces[count:]),
        )
        return entry if self._hides is None else entry.redacted(self._hides)
