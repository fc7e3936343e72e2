"""Where each request's time goes: what the decode thread spends its time on, and an account for each sequence.

The thread's totals grow by an addition or two a batch. An account is written only when its sequence's status changes:
the growth of the totals since the last change, attributed by the status that the sequence had, is where its time went.
The decode thread writes both; any thread reads them as they are at that moment.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Hashable, Iterable, Mapping
from typing import Protocol

import attrs

from uma.engine.clock import now_ms
from uma.engine.recorder import Recorder
from uma.engine.worker.cores.threads import SAMPLE_MS
from uma.engine.worker.cores.waits import CpuWaits
from uma.engine.worker.status import Status
from uma.metrics import EngineMetrics
from uma.types import CAUSES, Beside, CacheUse, RequestMetrics

MAX_BESIDE = 8
"""Maximum prompts of others that an account lists: with all of them memory grows with the square of the queue."""
RECORDED_TOKENS = 128
"""Tokens of a request's text that are kept at each place, where text is recorded."""


MAX_WAITED = 0.99
"""Maximum share of a computing time that counts as waiting for a CPU: its tokens took some of it."""
RESOURCES = ("slot", "cells", "adapters")
"""What the first sequence of the queue can wait for."""
PAUSED = "paused"
"""Value of `Totals.blocked_on` in a pause, in which nothing runs."""


@attrs.define(slots=True)
class Totals:
    """What the decode thread has spent its time on, in milliseconds, and how many sequences it has started."""

    steps_ms: float = 0.0
    """Time in batches of decode rows."""
    prompts_ms: float = 0.0
    """Time in batches with pieces of prompts."""
    isolated_ms: float = 0.0
    """Time in batches of reproducible requests."""
    sample_ms: float = 0.0
    """Choosing tokens after batches of decode rows."""
    cpu_waits: CpuWaits = attrs.field(factory=CpuWaits)
    """Time for which its compute threads waited for a core."""
    started: list[int] = attrs.field(factory=lambda: [0, 0, 0])
    """Requests that were started, by lane, the lowest first."""
    _blocked_ms: dict[str, float] = attrs.field(factory=lambda: dict.fromkeys(("", PAUSED, *RESOURCES), 0.0))
    """Time for which the first queued sequence waited for each resource, and, under `PAUSED`, time in pauses."""
    blocked_on: str = ""
    _since_ms: float = 0.0

    def set_blocked_on(self, resource: str, now: float) -> None:
        """Set what the first queued sequence waits for: one of `RESOURCES`, `PAUSED`, or nothing (empty)."""
        self._blocked_ms[self.blocked_on] += now - self._since_ms
        self.blocked_on, self._since_ms = resource, now

    def reading(self, now: float) -> tuple[float, ...]:
        """A reading of all counters: the first five, the time in pauses, and that blocked on each of `RESOURCES`."""
        blocked = dict(self._blocked_ms)
        blocked[self.blocked_on] += max(0.0, now - self._since_ms)
        times = self.steps_ms, self.prompts_ms, self.isolated_ms, self.sample_ms, self.cpu_waits.total_ms
        return *times, *(blocked[name] for name in (PAUSED, *RESOURCES))


@attrs.define
class Instruments:
    """Counters and recorder of the decode thread's work."""

    metrics: EngineMetrics
    totals: Totals
    recorder: Recorder | None = None
    """Takes the thread's spans while a trace is recorded. Set by the Trio thread."""


class Served(Protocol):
    """What an account reads of its sequence."""

    generated: int
    cached_tokens: int
    tokens: array[int]

    def metrics(self, now_ms: float) -> RequestMetrics:
        """How it is served."""


@attrs.frozen
class Figures:
    """A sequence's figures, which outlive it."""

    cached_tokens: int
    generated_tokens: int
    metrics: RequestMetrics
    texts: tuple[array[int], ...]
    """Tokens of the prompt's end, of the answer's beginning, and of the prompt before and behind
    `CacheUse.known_tokens`; empty where text is not recorded."""


def _every_cause(spent_ms: Mapping[str, float]) -> dict[str, float]:
    return dict.fromkeys(CAUSES, 0.0) | dict(spent_ms)


@attrs.frozen
class LeftOut:
    """Turns of a conversation that its prompt does not have (`Request.truncation`)."""

    dropped_messages: int = 0
    """See `Finished`."""
    summary: str = ""
    """See `Finished`."""
    summary_tokens: int = 0
    """See `Usage`."""


@attrs.define(slots=True, eq=False)
class Account:
    """Account of one sequence. It outlives the sequence, and keeps no reference to an ended one."""

    id: str
    owner: Hashable
    """`net.client.OWNER`."""
    lane: int
    origin: str
    answers: int
    prompt_tokens: int
    is_isolated: bool
    """Whether it is computed in the context of `worker.reproducer`."""
    records_text: bool
    arrived_ms: float
    spent_ms: dict[str, float] = attrs.field(converter=_every_cause)
    """Time by cause; at first what was spent before it was queued."""
    totals: Totals
    left_out: LeftOut = LeftOut()
    is_decision: bool = False
    served: Served | None = None
    """Sequence of the request, until it ends."""
    own_ms: float = 0.0
    """Time of the batches with a piece of its prompt; of an isolated one, of all its batches."""
    cache: CacheUse = attrs.field(factory=CacheUse)
    final: Figures | None = None
    reason: str = ""
    """How it ended."""
    preemptions: int = 0
    preempted_by: str = ""
    pauses: int = 0
    paused_for: str = "reader"
    """What it waits for where it is paused or parked: its `reader`, or its `grammar`."""
    worst_gap_ms: float = 0.0
    worst_gap_token: int = 0
    came_ms: float = attrs.field(init=False)
    came_at: float = attrs.field(init=False)
    """Seconds since 1970."""
    _status: Status = attrs.field(default=Status.WAITING, init=False)
    _is_preempted: bool = attrs.field(default=False, init=False)
    """Whether it waits for a slot that it had before."""
    _since_ms: float = attrs.field(init=False)
    _marks: tuple[float, ...] = attrs.field(init=False)
    """Reading of the totals at `_since_ms`."""
    _own_mark: float = attrs.field(default=0.0, init=False)
    _started_mark: list[int] = attrs.field(init=False)
    """Sequences that had been started when it came."""
    _started_before: tuple[int, int] | None = attrs.field(default=None, init=False)
    _met: list[tuple[Account, float]] = attrs.field(factory=list, init=False)
    _beside: tuple[Beside, ...] = attrs.field(default=(), init=False)

    def __attrs_post_init__(self) -> None:
        self.came_ms = self.arrived_ms - sum(self.spent_ms.values())
        self.came_at = time.time() - (now_ms() - self.came_ms) / 1000
        self._since_ms, self._marks = self.arrived_ms, self.totals.reading(self.arrived_ms)
        self._started_mark = list(self.totals.started)

    # The decode thread

    def turns_to(self, status: Status) -> None:
        """Attribute the time since the last change to the status that ends now."""
        now = now_ms()
        self.totals.cpu_waits.sample(now)
        self._add(self.spent_ms, now)
        before, self._status = self._status, status
        has_started = self._started_before is not None
        self._is_preempted = status is Status.WAITING and has_started and before is not Status.FOLLOWING
        self.preemptions += self._is_preempted
        self.pauses += status is Status.PAUSED and self.paused_for == "reader"
        if status in (Status.PREFILLING, Status.DECODING) and not has_started:
            self._started_before = self.started_before
        self._since_ms, self._own_mark = now, self.own_ms
        self._marks = self.totals.reading(now)

    def meets(self, others: Iterable[Account]) -> None:
        """Note that the sequence begins to read its prompt beside `others`, which have slots."""
        for other in others:
            if len(other._met) < MAX_BESIDE:
                other._met.append((self, self.own_ms))
            if other._status is Status.PREFILLING and len(self._met) < MAX_BESIDE:
                self._met.append((other, other.own_ms))

    def ends(self, reason: str, metrics: RequestMetrics) -> None:
        """Keep the figures of the sequence, which has ended."""
        assert self.served is not None
        self._beside = self.beside
        self.final = self._figures(self.served, metrics)
        self.reason = reason
        self.served = None
        self._met.clear()

    # Any thread

    @property
    def ended_ms(self) -> float | None:
        """When it ended."""
        return None if self.final is None else self._since_ms

    @property
    def started_before(self) -> tuple[int, int]:
        """Sequences that were started while it waited for its first slot, and how many of them had a higher lane."""
        if self._started_before is not None:
            return self._started_before
        counts = [now - then for now, then in zip(self.totals.started, self._started_mark, strict=True)]
        return sum(counts), sum(counts[self.lane + 2 :])

    @property
    def beside(self) -> tuple[Beside, ...]:
        """Prompts of others that were read in the same time, the longest first."""
        met = list(self._met) if self.final is None else []
        found = [
            Beside(other.id, other.prompt_tokens, round(other.own_ms - before, 3))
            for other, before in met
            if other.own_ms > before
        ]
        return tuple(sorted(found, key=lambda prompt: -prompt.read_ms)) if met else self._beside

    def figures(self, now: float) -> Figures:
        """The sequence's figures now, or at its end."""
        served = self.served
        if served is None:
            assert self.final is not None
            return self.final
        return self._figures(served, served.metrics(now))

    def spent_until(self, now: float) -> dict[str, float]:
        """Time by cause until now, or until it ended."""
        spent = dict(self.spent_ms)
        self._add(spent, now)
        return spent

    def _figures(self, served: Served, metrics: RequestMetrics) -> Figures:
        texts: tuple[array[int], ...] = ()
        if self.records_text:
            tokens, end, known, size = served.tokens, self.prompt_tokens, self.cache.known_tokens, RECORDED_TOKENS
            texts = (
                tokens[max(0, end - size) : end],
                tokens[end : end + size],
                tokens[max(0, known - size) : known],
                tokens[known : min(known + size, end)],
            )
        return Figures(served.cached_tokens, served.generated, metrics, texts)

    def _add(self, spent: dict[str, float], now: float) -> None:
        """Attribute the time since the last change to its causes, in `spent`."""
        left_ms, own = max(0.0, now - self._since_ms), self.own_ms - self._own_mark
        reading = zip(self.totals.reading(now), self._marks, strict=True)
        steps, prompts, isolated, sample, cpu_ms, paused, *blocked = (now - before for now, before in reading)
        paused = min(max(0.0, paused), left_ms)
        spent[PAUSED] += paused
        left_ms -= paused
        waited = {
            "prompt": prompts if self.is_isolated else prompts - own,
            "apart": isolated - own if self.is_isolated else isolated,
        }
        parts, rest = dict[str, float](), "rest"
        match self._status:
            case Status.WAITING if self._is_preempted:
                rest = "preempted"
            case Status.WAITING:
                parts, rest = dict(zip(RESOURCES, blocked, strict=True)), "batch"
            case Status.FOLLOWING:
                rest = "prefix"
            case Status.PREFILLING:
                parts = {"read": own, **waited, "streams": steps}
            case Status.DECODING if self.is_isolated:
                parts = {"write": own, **waited, "streams": steps}
            case Status.DECODING:
                parts = {"write": steps, **waited, "sample": sample}
            case Status.PAUSED | Status.PARKED:
                rest = self.paused_for
            case Status.ENDED:
                return
        # The CPU was waited for in batches and between them: every part is reduced by the same share.
        is_computed = self._status in (Status.PREFILLING, Status.DECODING)
        waited_share = cpu_ms / left_ms if left_ms >= SAMPLE_MS else self.totals.cpu_waits.share
        waited_share = min(waited_share, MAX_WAITED) if is_computed else 0.0
        spent["cpu"] += left_ms * waited_share
        for cause, took_ms in parts.items():
            part_ms = min(max(0.0, took_ms), left_ms)  # a total that is read a moment later can be a batch ahead
            spent[cause] += part_ms * (1 - waited_share)
            left_ms -= part_ms
        spent[rest] += left_ms * (1 - waited_share)
