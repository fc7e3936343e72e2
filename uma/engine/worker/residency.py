"""Which sequences have a slot: admission, preemption, parking, and the end of each.

A slot is a sequence id and KV cells. Every change of a sequence's status except those inside a batch happens here, so
this file and the table in `sequence.py` are the life of a request. Belongs to the decode thread.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import NamedTuple

from uma.engine.clock import now_ms
from uma.engine.delivery.outbox import Outbox
from uma.engine.kv.carry import Carried
from uma.engine.kv.pool import KvPool
from uma.engine.kv.prefix_tree import common_length
from uma.engine.policy.layout import Crowd
from uma.engine.policy.order import RESERVE_PER_ROW, gives_way
from uma.engine.policy.returns import Returns
from uma.engine.policy.state import Row, State
from uma.engine.worker.output import Output
from uma.engine.worker.sequence import Change, Sequence, Status
from uma.engine.worker.trace import Trace
from uma.engine.worker.waiting import WaitingRoom
from uma.errors import InternalError, UmaError
from uma.llama.sampler import Sampler
from uma.llama.vocab import Vocab
from uma.metrics import EngineMetrics
from uma.types import Finished, FinishReason

PATIENCE_MS = 250.0
"""Minimum time a paused sequence keeps its slot while others wait for one: a reader can catch up within it."""

_log = logging.getLogger("uma.engine")


class Luggage(NamedTuple):
    """What a change of layout carries over."""

    running: dict[Sequence, Carried]
    cached: list[Carried]


class Residency:
    """All sequences between submission and their end, and the slots that some of them have."""

    def __init__(
        self,
        vocab: Vocab,
        pool: KvPool,
        waiting: WaitingRoom,
        output: Output,
        outbox: Outbox,
        metrics: EngineMetrics,
        trace: Trace,
    ) -> None:
        self._vocab = vocab
        self._pool = pool
        self.waiting = waiting
        self._output = output
        self._outbox = outbox
        self._metrics = metrics
        self._trace = trace
        self.active: dict[int, Sequence] = {}
        """Sequences with a slot, by key."""
        self.all: dict[Sequence, None] = {}
        """Every sequence that has not ended, oldest first."""
        self.begun = 0
        """How often a sequence was given a slot."""
        self._returns = Returns()
        self.has_outgrown = False
        """A batch had a row that needs more cells than its share, and the layout must change."""

    @property
    def is_decoding(self) -> bool:
        """Whether some sequence is given a token with the next tick."""
        return any(each.status is Status.DECODING for each in self.active.values())

    # In

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.all[sequence] = None
        if not sequence.is_reproducible:
            self.waiting.add(sequence)
        if sequence.has_reader and sequence.lane >= 0:
            self._returns.came(sequence.arrived_ms)
        self._trace.queued(sequence)

    def credit(self, sequence: Sequence, events: int) -> None:
        """Its reader has space for so many more events. One that has ended needs none."""
        sequence.credits += events
        is_parked = sequence.status is Status.PARKED
        if sequence.credits > 0 and (sequence.is_paused or is_parked):
            sequence.change(Change.CATCH_UP)
            if is_parked:
                self.waiting.add(sequence)

    # Slots

    def admit(self, now: float) -> None:
        """Start every sequence that can start. For one that cannot, others are preempted: paused ones first, then
        background.
        """
        while not self.waiting.is_empty:
            sequence = self.waiting.next(self.active)
            if sequence is not None:
                self._start(sequence, now)
                continue
            head = self.waiting.head()
            if head is None or not (victims := self._find_victims(head, now)):
                return
            for victim in victims:
                self.preempt(victim, now)

    def state(self, now: float) -> State:
        """What the policy plans with."""
        decoding: list[Row] = []
        prefilling: list[Row] = []
        for sequence in self.active.values():
            (prefilling if sequence.status is Status.PREFILLING else decoding).append(sequence)
        self._pool.has_decoding_rows = bool(decoding)
        free = self._pool.free_cells
        if free < len(decoding) + len(prefilling):
            # Only now can a preemption be needed, and only then does it matter how many cells each would free.
            for sequence in self.active.values():
                sequence.cells = self._pool.own_cells(sequence.holding) if sequence.holding else 0
        return State(
            decoding,
            prefilling,
            free,
            self._pool.used_cells,
            reader_ended_ms=self._returns.company_since_ms(now),
            reader_back_ms=self._returns.until_ms(now),
            do_readers_return=self._returns.are_usual(now),
            queued=self.waiting.head(),
        )

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Take a sequence's slot. It is queued, and continues from a snapshot, or computes its tokens again.

        Its reader sees a pause, and then exactly the tokens it would have seen.
        """
        assert sequence.holding is not None
        self._metrics.preemptions_total += 1
        sequence.kept = self._pool.save(sequence.holding, now)
        if sequence.kept is not None:
            sequence.kept.is_pinned = True
        self._vacate(sequence, now)
        self._trace.preempted(sequence)

    def awaits_reader(self, now: float) -> bool:
        """Whether a reader that was just served is about to ask again."""
        return now < self._returns.until_ms(now)

    def crowd(self, now: float) -> Crowd:
        """The sequences that the layout of the KV memory has to suit: those with a slot, and those that come next."""
        head = self.waiting.head()
        coming = (each for each in self.all if not each.is_reproducible)
        near = [*self.active.values(), *islice(coming, self.waiting.max_active), *([head] if head else [])]
        near = [each for each in dict.fromkeys(near) if each.status is not Status.PARKED]
        # What they write they have not in common, even where it is the same.
        shared = min((min(each.prompt_tokens, common_length(near[0].tokens, each.tokens)) for each in near), default=0)
        unread = [self._unread(each) for each in near]
        return Crowd.of(
            [len(each.tokens) for each in near],
            [each.left_tokens for each in near],
            shared=shared,
            cells=self._cells([each for each in near if each.key not in self.active], shared),
            most=self.waiting.max_active,
            unread=unread,
            decodes=self.is_decoding,
            is_awaited=any(map(_is_awaited, near, unread)),
            cached=0 if self._pool.is_for_now else self._pool.cached_cells,
            turns=[_turn(each) for each in near] if self._returns.are_usual(now) else (),
        )

    def _cells(self, waiting: list[Sequence], shared: int) -> int:
        """Cells of those with a slot, when all their tokens are computed, and of these, which share so many tokens."""
        cells = sum(len(each.tokens) - shared for each in waiting)
        if not self.active:
            return cells + shared * bool(waiting)
        if self._pool.in_id_order:
            return cells + sum(len(each.tokens) for each in self.active.values())
        return cells + self._pool.protected_cells + sum(each.missing for each in self.active.values())

    def _unread(self, sequence: Sequence) -> int:
        """Tokens of its prompt that it still has to compute, as far as that is known before it starts."""
        if sequence.holding is not None:
            return sequence.remaining
        if sequence.found_tokens < 0:
            sequence.found_tokens = self._pool.known_tokens(sequence.reusable)
        return len(sequence.tokens) - sequence.found_tokens

    def carry_out(self, now: float, *, shares: bool, most_cache: int) -> Luggage:
        """Empty the cells: `carry_in` has to follow. The sequences with a slot keep their status.

        With `shares` and `most_cache` as `KvPool.carry_out`.
        """
        holdings = []
        for sequence in self.active.values():
            assert sequence.holding is not None
            holdings.append(sequence.holding)
            sequence.holding = None
        running, cached = self._pool.carry_out(holdings, now, shares=shares, most_cache=most_cache)
        return Luggage(dict(zip(self.active.values(), running, strict=True)), cached)

    def carry_in(self, luggage: Luggage, now: float) -> None:
        """The counterpart of `carry_out`. A sequence for which there is no space is queued, and computes all again."""
        self.has_outgrown = False
        for sequence, carried in luggage.running.items():
            sequence.holding = self._pool.carry_in(carried, now)
            if sequence.holding is None:
                self._metrics.preemptions_total += 1
                self._queue_again(sequence)
        self._pool.carry_in_cached(luggage.cached, now)

    def restart(self, sequence: Sequence) -> None:
        """Queue a sequence whose computed part a failed batch has left in an unknown state: it computes all again."""
        self._vacate(sequence, now_ms())

    def _vacate(self, sequence: Sequence, now: float) -> None:
        assert sequence.holding is not None
        self._pool.release(sequence.holding, now, keep=False)
        self._queue_again(sequence)

    def _queue_again(self, sequence: Sequence) -> None:
        sequence.holding, sequence.computed = None, 0
        del self.active[sequence.key]
        sequence.change(Change.PREEMPT)
        # A parked one is queued only when its reader has caught up.
        if sequence.status is Status.WAITING:
            self.waiting.add(sequence)

    def _find_victims(self, head: Sequence, now: float) -> list[Sequence]:
        """Sequences to preempt for `head`: as few as will do, and none if all of them would not do."""
        slots, cells = self.waiting.lacks(head, self.active)
        if self._pool.is_for_now:
            cells = 0  # the layout changes for it
        paused = [each for each in self.active.values() if each.is_paused and now - each.paused_ms >= PATIENCE_MS]
        lower = gives_way(head, self.active.values(), now)
        victims: list[Sequence] = []
        for each in dict.fromkeys([*paused, *lower]):
            if slots <= 0 and cells <= 0:
                break
            assert each.holding is not None
            victims.append(each)
            slots -= 1
            cells -= self._pool.own_cells(each.holding) + each.missing + RESERVE_PER_ROW
        return victims if slots <= 0 and cells <= 0 else []

    def _start(self, sequence: Sequence, now: float) -> None:
        is_first = sequence.started_ms == 0.0
        sequence.holding, sequence.computed = self._pool.acquire(sequence.reusable, now)
        self._unpin(sequence)
        sequence.change(Change.RESTORE if sequence.generated and sequence.missing == 1 else Change.START)
        self.active[sequence.key] = sequence
        self.begun += 1
        if is_first:
            try:
                self._note_started(sequence, now)
            except Exception as error:  # noqa: BLE001  (whatever it is, it is this request's alone)
                self.fail(sequence, error)
                return
        self._trace.started(sequence)

    def start_apart(self, sequence: Sequence, now: float) -> None:
        """A sequence begins that is computed in a context of its own, and has no slot."""
        sequence.change(Change.START)
        self._note_started(sequence, now)

    def _note_started(self, sequence: Sequence, now: float) -> None:
        sequence.started_ms = now
        sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
        if sequence.index == 0:  # a prompt with several answers is one
            self._pool.count_use(sequence.computed)
            self._metrics.prompt_tokens_total += sequence.prompt_tokens
            self._metrics.cached_tokens_total += sequence.cached_tokens
        sampling = sequence.request.sampling
        if not sampling.is_greedy:
            sequence.sampler = Sampler(self._vocab, sampling, sequence.seed, sequence.tokens)

    # Out

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence with `Finished`; one that has ended already stays as it is."""
        if sequence.status is not Status.ENDED:
            self.end(sequence, self._output.last_event(sequence, reason, now_ms()))

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence whose grammar cannot be followed further, or in whose sampling or text the engine has a fault.
        What it computed is not kept.
        """
        if isinstance(error, UmaError):
            if sequence.status is not Status.ENDED:
                self.end(sequence, error)
            return
        _log.error("request %r failed: a fault in the engine", sequence.request.id, exc_info=error)
        if sequence.status is not Status.ENDED:
            self.end(
                sequence,
                InternalError(
                    f"a fault in the engine ended this request ({type(error).__name__}: {error}); "
                    "its log has the traceback, please report it"
                ),
            )

    def end_all(self, error: UmaError) -> None:
        """End every sequence with an error."""
        for sequence in list(self.all):
            self.end(sequence, error)

    def abandon_all(self, error: UmaError) -> None:
        """After a fault that ends the engine: tell every reader, and touch nothing else, whatever state it is in."""
        for sequence in self.all:
            self._outbox.add(sequence.stream, error)
            self._metrics.finished("error")
        self.all.clear()
        self.active.clear()

    def end(self, sequence: Sequence, event: Finished | UmaError) -> None:
        """Give the last event, and take back all that the sequence held."""
        sequence.change(Change.END)
        self.active.pop(sequence.key, None)
        self.waiting.discard(sequence)
        self._unpin(sequence)
        self._give_back(sequence, event)
        self._count_end(sequence, event)
        # The end comes behind tokens that were computed ahead; a cancel or a fault waits for nothing, nor does the
        # end of a background stream: a program reads it, which needs all of it rather than an even pace.
        is_whole = isinstance(event, Finished) and event.reason != "cancelled"
        is_due = is_whole and sequence.is_paced and sequence.lane >= 0
        if sequence.has_reader and sequence.lane >= 0:
            self._returns.ended(max(now_ms(), sequence.last_token_ms), is_whole=is_whole)
        self._outbox.add(sequence.stream, event, not_before_ms=sequence.last_token_ms if is_due else 0.0)
        # Last of all: when the metrics show that nothing runs any more, it is counted and its cells are free.
        del self.all[sequence]
        self._trace.ended(sequence, event.reason if isinstance(event, Finished) else event.code)

    def _give_back(self, sequence: Sequence, event: Finished | UmaError) -> None:
        if sequence.holding is not None:
            self._forget_dropped(sequence)
            self._pool.has_decoding_rows = self.is_decoding
            if isinstance(event, Finished) and not self._pool.shares:
                self._pool.save(sequence.holding, now_ms())
            self._pool.release(sequence.holding, now_ms(), keep=isinstance(event, Finished))
            sequence.holding = None
        if sequence.sampler is not None:
            sequence.sampler.close()
            sequence.sampler = None

    def _forget_dropped(self, sequence: Sequence) -> None:
        """Cut off tokens of a draft that held, but behind the output's end: they are no part of the text."""
        assert sequence.holding is not None
        if sequence.computed > len(sequence.tokens):
            sequence.computed = len(sequence.tokens)
            self._pool.truncate(sequence.holding, sequence.computed)

    def _count_end(self, sequence: Sequence, event: Finished | UmaError) -> None:
        if isinstance(event, Finished) and event.reason != "cancelled" and sequence.has_reader:
            self._metrics.qoe.observe(event.metrics.qoe)
        if sequence.index:  # it is its request that is counted
            return
        reason = event.reason if isinstance(event, Finished) else "error"
        if sequence.started_ms and reason in ("stop", "length"):
            self._metrics.served(now_ms() - sequence.started_ms)
        self._metrics.finished(reason)

    def _unpin(self, sequence: Sequence) -> None:
        if sequence.kept is not None:
            sequence.kept.is_pinned = False
            sequence.kept = None


def _turn(sequence: Sequence) -> int:
    """Tokens of its prompt that were new, where most were in cache: of a conversation that grows. Else 0."""
    is_growing = sequence.has_reader and 2 * sequence.found_tokens >= sequence.prompt_tokens
    return sequence.prompt_tokens - sequence.found_tokens if is_growing else 0


def _is_awaited(sequence: Sequence, unread: int) -> bool:
    """Whether a reader waits for its first token, of a prompt with so many tokens to be read."""
    return unread > 0 and sequence.has_reader and sequence.lane >= 0
