"""Which sequences have a slot: admission, preemption, parking, and the end of each.

A slot is a sequence id and KV cells. Every change of a sequence's status except those inside a batch happens here, so
this file and the table in `sequence.py` are the life of a request. Belongs to the decode thread.
"""

from __future__ import annotations

import logging
import math

from uma.engine.clock import now_ms
from uma.engine.delivery.outbox import Outbox
from uma.engine.kv.pool import LAST_TOKENS, LEAST_SHARED_TOKENS, KvPool
from uma.engine.policy.order import gives_way
from uma.engine.policy.state import Row, Shares, State
from uma.engine.policy.tuning import TUNING
from uma.engine.worker.output import Output
from uma.engine.worker.sequence import Sequence
from uma.engine.worker.status import Change, Status
from uma.engine.worker.trace import Instruments
from uma.engine.worker.waiting import WaitingRoom, lack
from uma.errors import InternalError, UmaError
from uma.llama.sampler import Sampler
from uma.llama.vocab import Vocab
from uma.types import CacheUse, Finished, FinishReason

PATIENCE_MS = 250.0
"""Minimum time a paused sequence keeps its slot while others wait for one: a reader can catch up within it."""

_log = logging.getLogger("uma.engine")


class Residency:
    """All sequences between submission and their end, and the slots that some of them have."""

    def __init__(
        self,
        vocab: Vocab,
        pool: KvPool,
        waiting: WaitingRoom,
        output: Output,
        outbox: Outbox,
        instruments: Instruments,
    ) -> None:
        self._vocab = vocab
        self._pool = pool
        self.waiting = waiting
        self._output = output
        self._outbox = outbox
        self._metrics = instruments.metrics
        self._trace = instruments.trace
        self._totals = instruments.totals
        self.active: dict[int, Sequence] = {}
        """Sequences with a slot, by key."""
        self.all: dict[Sequence, None] = {}
        """Every sequence that has not ended, oldest first."""
        self._shares = Shares()
        self._answered_ms = -math.inf
        """See `State.answered_ms`."""

    @property
    def is_decoding(self) -> bool:
        """Whether some sequence is given a token with the next tick."""
        return any(each.status is Status.DECODING for each in self.active.values())

    # In

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.all[sequence] = None
        sequence.share = self._shares.came(sequence.client)
        if not sequence.is_reproducible:
            self.waiting.add(sequence)
        self._trace.queued(sequence)

    def credit(self, sequence: Sequence, events: int) -> None:
        """Count that its reader has space for so many more events. One that has ended needs none."""
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
            sequence = self.waiting.next(self.active, now)
            if sequence is not None:
                self._start(sequence, now)
                continue
            # Usually no row can give way, and then the order does not matter.
            can_give_way = any(each.is_paused or each.lane < 0 for each in self.active.values())
            head = self.waiting.head(self.active, now) if can_give_way else None
            victims = [] if head is None else self._find_victims(head, now)
            if head is None or not victims:
                lacks = lack(len(self.active), self.waiting.max_active) if self.waiting.wants_slot else ""
                self._totals.lacks(lacks, now)
                return
            for victim in victims:
                self.preempt(victim, now)
                victim.account.preempted_by = head.request.id
        self._totals.lacks("", now)

    def state(self, now: float) -> State:
        """What the policy plans with."""
        decoding: list[Row] = []
        prefilling: list[Row] = []
        unreadable: list[int] = []
        for sequence in self.active.values():
            (prefilling if sequence.status is Status.PREFILLING else decoding).append(sequence)
            if sequence.awaits_encoding:
                unreadable.append(sequence.key)
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
            answered_ms=self._answered_ms,
            queued=self.waiting.head(self.active, now) if prefilling and not self.waiting.is_empty else None,
            unreadable=unreadable,
        )

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Take a sequence's slot. It is queued, and continues from a snapshot, or from what is left of its cells. These
        are cache without a snapshot, which is evicted from its end: only what was evicted is computed again.

        Its reader sees a pause, and then exactly the tokens it would have seen.
        """
        assert sequence.holding is not None
        self._metrics.preemptions_total += 1
        sequence.kept = self._pool.save(sequence.holding, now)
        if sequence.kept is not None:
            sequence.kept.is_pinned = True
        self._pool.release(sequence.holding, now, keep=sequence.kept is None)
        self._queue_again(sequence)
        self._trace.preempted(sequence)

    def restart(self, sequence: Sequence) -> None:
        """Queue a sequence whose computed part a failed batch has left in an unknown state: it computes all again."""
        assert sequence.holding is not None
        self._pool.give_up(sequence.holding, now_ms())
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
        paused = [each for each in self.active.values() if each.is_paused and now - each.paused_ms >= PATIENCE_MS]
        lower = gives_way(head, self.active.values(), now)
        victims: list[Sequence] = []
        for each in dict.fromkeys([*paused, *lower]):
            if slots <= 0 and cells <= 0:
                break
            assert each.holding is not None
            victims.append(each)
            slots -= 1
            cells -= self._pool.own_cells(each.holding) + each.missing + TUNING.reserve_tokens
        return victims if slots <= 0 and cells <= 0 else []

    def _start(self, sequence: Sequence, now: float) -> None:
        is_first = sequence.started_ms == 0.0
        known, differs = self._pool.nearest(sequence.tokens) if is_first else (0, False)
        sequence.holding, sequence.computed = self._pool.acquire(sequence.reusable, now)
        self._pool.lay_out(sequence.holding, tuple(each.run for each in sequence.pictures))
        if is_first:
            sequence.account.cache = _cache_use(sequence, known, differs=differs)
        sequence.borders = self._pool.borders(
            sequence.reusable, sequence.prompt_tokens, sequence.computed, sequence.message_ends
        )
        self._unpin(sequence)
        sequence.change(Change.RESTORE if sequence.generated and sequence.missing == 1 else Change.START)
        if sequence.status is Status.PREFILLING:
            sequence.account.meets(each.account for each in self.active.values())
        self.active[sequence.key] = sequence
        self._totals.started[sequence.lane + 1] += 1
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
        sequence.account.cache = CacheUse(why="reproducible")
        self._note_started(sequence, now)

    def _note_started(self, sequence: Sequence, now: float) -> None:
        sequence.started_ms = now
        sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
        if sequence.index == 0:  # a prompt with several answers is one
            cache = self._metrics.cache
            cache.hits, cache.misses = cache.hits + (sequence.computed > 0), cache.misses + (sequence.computed == 0)
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
        """After a fault that ends the engine: give every reader the error, and touch nothing else."""
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
        if is_whole and sequence.has_reader and sequence.lane >= 0:
            self._answered_ms = max(now_ms(), sequence.last_token_ms)
        self._outbox.add(sequence.stream, event, not_before_ms=sequence.last_token_ms if is_due else 0.0)
        reason = event.reason if isinstance(event, Finished) else event.code
        sequence.account.ends(reason, event.metrics if isinstance(event, Finished) else sequence.metrics(now_ms()))
        self._shares.left(sequence.share)
        # Last of all: when the metrics show that nothing runs any more, it is counted and its cells are free.
        del self.all[sequence]
        self._trace.ended(sequence, reason)

    def _give_back(self, sequence: Sequence, event: Finished | UmaError) -> None:
        if sequence.holding is not None:
            self._forget_dropped(sequence)
            # (Kept, each repetition without the cache would lie in other cells, with other last bits.)
            keep = isinstance(event, Finished) and sequence.request.cache_prompt
            self._pool.release(sequence.holding, now_ms(), keep=keep)
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


def _cache_use(sequence: Sequence, known: int, *, differs: bool) -> CacheUse:
    """What a prompt has of the cache that is begun now: of it, `known` tokens are somewhere (`KvPool.nearest`)."""
    cached, whole = sequence.computed, sequence.prompt_tokens - LAST_TOKENS
    tier = sequence.holding.tier.value if sequence.holding is not None and cached else ""
    if len(sequence.reusable) < len(sequence.tokens):
        why = "asked"
    elif cached >= whole:
        why = ""
    elif known < LEAST_SHARED_TOKENS:
        why = "none"
    elif cached < known:
        why = "earlier"
    else:
        why = "differs" if differs else "end"
    following = sequence.tokens[known] if why in ("differs", "end") else -1
    return CacheUse(tier, known, why, None if following < 0 else following)
