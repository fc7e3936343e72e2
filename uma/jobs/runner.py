"""Runs a job: rows are read as there is work for them, asked many at a time, and their results written in order.

What may pass (a server that is overloaded, loading or gone) is asked again, for as long as it takes; what cannot is a
result that tells of the error.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import attrs
import orjson
import trio

from uma import json_bytes
from uma.cgroup import cpu_quota
from uma.jobs.ask import Progress, RowAnswer, RowAsk
from uma.jobs.journal import WINDOW, EndedRow, Entry, JobChanged, Results
from uma.jobs.rows import BadInput, BadRow, JobRow, RowForm, RowRequest
from uma.jobs.tally import Tally
from uma.net.wakeup import Wakeup
from uma.types import Source

T = TypeVar("T")

ROWS_PER_CPU = 8
"""Maximum requests given to a source at once, for each CPU that computes the model: more are no faster."""
OTHERS_PART = 8
"""One in every so many slots is left free for other clients: a chat beside a job waits for no slot."""
MAX_IN_FLIGHT = 128
"""Maximum requests given to a source at once: half of what a session of a server can have by default."""
BLOCK_ROWS = 256
"""Maximum rows that are read at once: among these, rows that begin alike are brought together."""
BLOCK_BYTES = 16_777_216
"""Maximum bytes of these rows."""
ALIKE_BYTES = 512
"""How far rows must be alike, beyond what all of a block have in common, to be brought together."""
SYNC_SEC = 1.0
"""Maximum time for which a result is written and not yet on the disk."""
END_SEC = 1.0
"""Maximum time in which a run that is cancelled writes what has ended: the disk may be what does not answer."""
PASSING = frozenset({408, 429, 503})
"""Statuses that say that the same works later."""
FAULT = 500
"""HTTP status of a fault."""
FAULT_TRIES = 3
"""Maximum number of times that a row is asked which meets a fault."""
FIRST_WAIT_SEC = 0.25
"""Time until a row is retried for the first time; each further wait is twice as long."""
MAX_WAIT_SEC = 30.0
"""Maximum time until a row is retried."""


def in_flight(source: Source, *, has_others: bool = False, per_sequence: int = 1) -> int:
    """Maximum requests that are given to a source at once: memory stays bounded however many there are. They are
    `per_sequence` for each that it computes at once. Of a source that `has_others`, and computes enough at once, some
    are left to these, and none waits there.
    """
    limits = source.info.limits
    at_once = max(limits.max_sequences, 1)
    left = at_once // OTHERS_PART if has_others else 0
    wanted = at_once - left if left else per_sequence * at_once
    if not source.info.model.gpu_bytes:
        wanted = min(wanted, math.ceil(ROWS_PER_CPU * min(os.cpu_count() or 1, cpu_quota())))
    return max(1, min(wanted, limits.max_queue, MAX_IN_FLIGHT))


@attrs.frozen
class RowWork:
    """A row to be run, or one whose result an earlier job has."""

    row: JobRow
    asked: RowRequest | None
    ended: EndedRow | None = None


@attrs.define(eq=False)
class Runner:
    """One run of a job. Belongs to a Trio thread."""

    ask: RowAsk
    rows: Iterator[JobRow]
    """Read in another thread."""
    form: RowForm
    results: Results
    most: int
    """Maximum rows asked at once."""
    in_order: bool = True
    """Results are in the order of the rows; else as they end."""
    is_live: bool = False
    """The input's rows come one by one: none waits for those behind it."""
    prefix: str = ""
    """What the ids of its requests begin with, where other jobs ask the same source."""
    tally: Tally = attrs.field(factory=Tally)
    _asked: dict[str, RowWork] = attrs.field(factory=dict, init=False)
    """Rows whose requests run, by the ids of these."""
    _ready: deque[RowWork] = attrs.field(factory=deque, init=False)
    _open: deque[JobRow] = attrs.field(factory=deque, init=False)
    """Rows that were read, from the first on that has not ended."""
    _is_read: bool = attrs.field(default=False, init=False)
    """The input was read to its end."""
    _ended: dict[int, EndedRow | None] = attrs.field(factory=dict, init=False)
    """Rows of these that have ended, and what still has to be written of them."""
    _due: deque[EndedRow] = attrs.field(factory=deque, init=False)
    """Results that wait for the disk; while they are more than `most`, no more rows begin."""
    _is_due: Wakeup = attrs.field(factory=Wakeup, init=False)
    _is_last: bool = attrs.field(default=False, init=False)
    """No more results come."""
    _disk: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1), init=False)
    """Limiter of the one thread that has `results`."""
    _synced_sec: float = attrs.field(factory=time.monotonic, init=False)
    _stopping: trio.Event = attrs.field(factory=trio.Event, init=False)
    _reading: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _moved: trio.Event = attrs.field(factory=trio.Event, init=False)
    """Set, and replaced, when a row has ended."""
    _bad_input: BadInput | None = attrs.field(default=None, init=False)
    """Why the input cannot be read on, which is raised once the rows before it have ended."""

    async def run(self) -> bool:
        """Run all rows that have no result yet; whether all have one now, which they can after `stop`, too.

        Leaving by an exception loses what runs, and nothing that has ended: what waits for earlier rows is kept. Raises
        `JobChanged` where a row that has a result is another one now, `CannotWrite`, `OSError`, and `BadInput` once the
        rows before it have ended.
        """
        self.tally.rows = self.tally.begun_rows = self.results.rows
        self.tally.failed = self.results.failed
        try:
            async with trio.open_nursery() as writing:
                writing.start_soon(self._keep_writing)
                async with trio.open_nursery() as nursery:
                    while (work := await self._next()) is not None:
                        self.tally.begin()
                        nursery.start_soon(self._finish, work)
                        # Trio runs tasks that were started together in any order; the first result is to come first.
                        await trio.lowlevel.checkpoint()
                self._is_last = True
                self._is_due.ring()
        finally:
            with trio.move_on_after(END_SEC, shield=True):
                await self._write(is_last=True)
                if waiting := list(filter(None, self._ended.values())):
                    await self._on_disk(partial(self.results.keep, waiting))
                    self.tally.kept = len(waiting)
        if self._open or not self._is_read:
            return False
        if self._bad_input is not None:
            raise self._bad_input
        await self._on_disk(self._end)
        return True

    def _end(self) -> None:
        """All rows have results. Runs in a thread."""
        if self.results.finished.left():
            raise JobChanged(
                f"{self.results.path}: has results of more rows than the input has now; --restart begins anew"
            )
        self.results.finish()

    def stop(self) -> None:
        """Begin no more rows: `run` returns when those that run have ended. None is asked again."""
        self._stopping.set()
        self._reading.cancel()
        self._note_move()

    @property
    def asked_rows(self) -> list[int]:
        """Rows that are asked just now, from 1 on."""
        return sorted(work.row.number + 1 for work in self._asked.values())

    async def look(self) -> None:
        """Have the tally know how far the rows are that run, for whoever shows it."""
        found: dict[str, Progress] = {}
        for id, progress in (await self.ask.progress()).items():
            own = id if id in self._asked else id.rpartition("-")[0]  # one of several prompts
            if own in self._asked:
                known = found.get(own, Progress(waits=True))
                found[own] = Progress(
                    known.prompt_tokens + progress.prompt_tokens,
                    known.completion_tokens + progress.completion_tokens,
                    known.waits and progress.waits,
                )
        self.tally.note(found, self.ask.loading())

    async def _next(self) -> RowWork | None:
        """The next row, once there is space for it; None: there is none, or the run is to stop."""
        while not self._stopping.is_set():
            if not self._ready and not await self._read():
                return None
            is_near = self._ready[0].row.number < self._open[0].number + WINDOW
            if is_near and self.tally.running < self.most and len(self._due) <= self.most:
                return self._ready.popleft()
            await self._moved.wait()
        return None

    async def _read(self) -> bool:
        """Read a block of rows; False where there are no more."""
        if self._stopping.is_set():
            return False
        block: list[RowWork] | None = None
        with trio.CancelScope() as self._reading:
            block = await trio.to_thread.run_sync(self._block, abandon_on_cancel=True)
        if not block:
            self._is_read = block is not None
            return False
        self._open.extend(work.row for work in block)
        self._ready.extend(together(block))
        return True

    def _block(self) -> list[RowWork]:
        """The next rows without a result, in their order. Runs in a thread."""
        block: list[RowWork] = []
        n_bytes = 0
        while (row := self._row()) is not None:
            self.tally.passed_rows += 1
            known = self.results.finished.find(row.number)
            if known is not None:
                self._check_row(row, known)
                continue
            block.append(self._work(row))
            n_bytes += len(row.data)
            if len(block) == (1 if self.is_live else BLOCK_ROWS) or n_bytes >= BLOCK_BYTES:
                break
        else:
            self.tally.total_rows = self.tally.passed_rows
        return block

    def _row(self) -> JobRow | None:
        """The next row; None behind the last that can be read."""
        try:
            return next(self.rows, None)
        except BadInput as error:
            self._bad_input = error
            return None

    def _check_row(self, row: JobRow, known: Entry) -> None:
        if known.digest != row.digest:
            raise JobChanged(
                f"{self.results.path}: row {row.number + 1:,} of the input is another one than when its result was "
                "written; --only-failed runs such rows again and keeps the others' results, --restart begins anew"
            )

    def _work(self, row: JobRow) -> RowWork:
        for before in self.results.reusable:
            known = before.find(row.number)
            if known is not None and known.digest == row.digest and not known.is_failed:
                return RowWork(row, None, EndedRow(row.number, row.digest, before.line(known), is_failed=False))
        return work_of(row, self.form)

    async def _finish(self, work: RowWork) -> None:
        ended = work.ended
        used: Progress | None = None
        try:
            if work.asked is not None:
                answer = await self._answer(work, work.asked)
                if answer is None:
                    return
                ended, used, is_cut = _end_of(work.row, work.asked, answer)
                self.tally.cut += is_cut
                self.tally.ignores((*answer.ignored, *work.asked.ignored))
                self.tally.leaves_empty(work.asked.empty)
                if answer.model:
                    self.tally.replaces(str(work.asked.body.get("model")), answer.model)
        finally:
            self.tally.end(used)
            self._note_move()
        assert ended is not None
        self._note_end(ended)

    async def _answer(self, work: RowWork, asked: RowRequest) -> RowAnswer | None:
        """The answer to a row, asked again as often as that can help; None where the run stops meanwhile."""
        body, id = json_bytes.dumps(asked.body), f"{self.prefix}row-{work.row.number + 1}"
        wait_sec, tries = FIRST_WAIT_SEC, 0
        while True:
            self._asked[id] = work
            try:
                answer = await self.ask(asked.path, body, id)
            finally:
                del self._asked[id]
                self.tally.forget(id)
            tries += 1
            if answer.status not in PASSING and (answer.status != FAULT or tries >= FAULT_TRIES):
                return answer
            # Spread out, so that rows which were refused together do not come together again.
            least_sec = (answer.retry_after_ms or 0) / 1000
            self.tally.waiting += 1
            with trio.move_on_after(max(least_sec, wait_sec) * random.uniform(1, 1.5)):
                await self._stopping.wait()
            self.tally.waiting -= 1
            if self._stopping.is_set():
                return None
            wait_sec = min(2 * wait_sec, MAX_WAIT_SEC)

    def _note_end(self, ended: EndedRow) -> None:
        """Have written what can be: the result, or all whose turn it is now."""
        if not self.in_order:
            self._due.append(ended)
        self._ended[ended.number] = ended if self.in_order else None
        while self._open and self._open[0].number in self._ended:
            row = self._open.popleft()
            waited = self._ended.pop(row.number)
            if waited is not None:
                self._due.append(waited)
        self.tally.unwritten += 1
        self.tally.unwritten_failed += ended.is_failed
        self.tally.kept = len(self._ended) if self.in_order else 0
        self.tally.blocking_row = self._open[0].number + 1 if self._open else 0
        self._is_due.ring()
        self._note_move()

    def _note_move(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    async def _keep_writing(self) -> None:
        """Write results as they come, to the last."""
        is_last = False
        while not is_last:
            if not self._due and not self._is_last:
                with trio.move_on_after(SYNC_SEC):
                    await self._is_due.wait()
            is_last = self._is_last
            await self._write(is_last=is_last)

    async def _write(self, *, is_last: bool) -> None:
        """Write what is due, and have it on the disk itself where that is `SYNC_SEC` ago, or where it is the last."""

        def written() -> list[EndedRow]:
            due = [self._due.popleft() for _ in range(len(self._due))]
            if due:
                self.results.append(due)
            if is_last or time.monotonic() - self._synced_sec >= SYNC_SEC:
                self.results.sync()
                self._synced_sec = time.monotonic()
            return due

        due = await self._on_disk(written)
        self.tally.rows += len(due)
        self.tally.unwritten -= len(due)
        for ended in due:
            if ended.is_failed:
                self.tally.unwritten_failed -= 1
                self.tally.fails(_why(ended.line), ended.number + 1)
        self._note_move()

    async def _on_disk(self, work: Callable[[], T]) -> T:
        """Run `work` in the one thread that has the results. A disk that stalls holds up nothing else."""
        return await trio.to_thread.run_sync(work, limiter=self._disk, abandon_on_cancel=True)


def work_of(row: JobRow, form: RowForm) -> RowWork:
    """What is to be done for a row; of a bad one nothing is."""
    try:
        return RowWork(row, form.asked(row))
    except BadRow as error:
        shown = {"code": "invalid_row", "message": str(error)}
        return RowWork(row, None, _ended(row, _line(row, error.custom_id, None, shown)))


def together(block: Sequence[RowWork]) -> list[RowWork]:
    """The rows of a block, with those next to each other that begin alike: the source reads what they share once.

    Groups, and rows within them, keep their order. What all rows of the block share does not count.
    """
    begins = [work.asked.prompt[:65_536] if work.asked is not None else b"" for work in block]
    prompts = [text for text in begins if text]
    ends = zip(min(prompts), max(prompts), strict=False) if prompts else ()
    shared = next((at for at, (one, other) in enumerate(ends) if one != other), 0)
    groups: dict[bytes, list[RowWork]] = {}
    for work, begin in zip(block, begins, strict=True):
        groups.setdefault(begin[shared : shared + ALIKE_BYTES], []).append(work)
    return [work for group in groups.values() for work in group]


def _end_of(row: JobRow, asked: RowRequest, answer: RowAnswer) -> tuple[EndedRow, Progress | None, bool]:
    """A row's result, what it took (None where it was refused), and whether its answer was cut by a bound of tokens."""
    text, usage, is_refused, is_cut = answer.body.decode(), dict[str, int](), answer.status >= 400, False
    body: Any = json_bytes.verbatim(text)
    with suppress(AttributeError):
        try:
            fields = orjson.loads(answer.body)
            usage = fields.get("usage") or {}
            ends = [choice.get("finish_reason") for choice in fields.get("choices", ())]
            is_cut = (
                "length" in ends or fields.get("stop_reason") == "max_tokens" or fields.get("status") == "incomplete"
            )
        except orjson.JSONDecodeError:  # a transcript as a text
            body = text
    used = Progress(
        usage.get("prompt_tokens", usage.get("input_tokens", 0)),
        usage.get("completion_tokens", usage.get("output_tokens", 0)),
    )
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": body}
    ended = _ended(row, _line(row, asked.custom_id, response, None), is_failed=is_refused)
    return ended, None if is_refused else used, is_cut


def _ended(row: JobRow, line: bytes, *, is_failed: bool = True) -> EndedRow:
    return EndedRow(row.number, row.digest, line, is_failed)


def _why(line: bytes) -> str:
    """Why a row failed, by its result; empty where that does not say it."""
    with suppress(orjson.JSONDecodeError, AttributeError, TypeError, KeyError):
        shown = orjson.loads(line)
        return str((shown["error"] or shown["response"]["body"]["error"])["message"])
    return ""


def _line(row: JobRow, custom_id: str | None, response: Any, error: Any) -> bytes:
    """A result as OpenAI's output and error files have it."""
    name = f"row-{row.number + 1}"
    shown = {
        "id": f"batch_req_{row.number + 1}",
        "custom_id": custom_id or name,
        "response": response,
        "error": error,
    }
    return json_bytes.dumps(shown) + b"\n"
