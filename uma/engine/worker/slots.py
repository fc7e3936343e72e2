"""Slots of sequences: the queue for them, admission, preemption, parking, and the end of each sequence.

A slot is a sequence id and KV cells. A sequence is admitted when its prompt fits beside the cells that running ones
still need. If its prompt begins like one that is being prefilled, it follows that sequence: it waits until the common
prefix is computed, then shares it instead of computing it as well.

Every change of a sequence's status except those inside a batch happens here: this file and the table in `status.py` are
the life of a request. Belongs to the decode thread.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import Counter

from uma.engine.adapters import AdapterSet
from uma.engine.clock import now_ms
from uma.engine.delivery.outbox import Outbox
from uma.engine.kv.checkpoints import LAST_TOKENS
from uma.engine.kv.pool import MIN_SHARED_TOKENS, KvPool
from uma.engine.kv.prefix_tree import common_length
from uma.engine.policy.cost import CostModel
from uma.engine.policy.order import due_ms, gives_way, may_begin, rank
from uma.engine.policy.state import FairShare, FairShares, Row, State
from uma.engine.policy.tuning import TUNING
from uma.engine.worker.account import Instruments
from uma.engine.worker.output import Output
from uma.engine.worker.sequence import Sequence
from uma.engine.worker.status import Change, Status
from uma.errors import InternalError, UmaError
from uma.llama.sampler import Sampler
from uma.llama.vocab import Vocab
from uma.types import CacheUse, Finished, FinishReason

PATIENCE_MS = 250.0
"""Minimum time (ms) that a paused sequence keeps its slot while others wait for one: its reader can catch up."""
MAX_ADMIT_MS = 10.0
"""Time (ms) of admissions between two batches after which no more sequences start while others decode: sixteen with a
prefix of 1,000 tokens took 50 ms, in which no stream went on."""
MAX_EXAMINED = 32
"""Maximum queued sequences examined in one tick: with many that share a prefix, streams would wait for all of them."""
MAX_SETS = 2
"""Maximum sets of adapters that take turns. A step of each takes no longer than one of all rows with one set, so
streams wait at most twice as long for a token; with three they waited three times as long."""
WORTH_WAITING_TOKENS = 32
"""Minimum length of a prefix for which a sequence follows the one that computes it."""

_log = logging.getLogger("uma.engine")


def blocking_resource(with_slot: int, max_active: int, sets: int) -> str:
    """What a queued sequence waits for: `slot`, `adapters` or `cells`. `with_slot` sequences have one, and `sets` sets
    of adapters would take turns with its own.
    """
    return "slot" if with_slot >= max_active else "adapters" if sets > MAX_SETS else "cells"


class Slots:
    """All sequences between submission and their end, and the slots that some of them have."""

    def __init__(
        self,
        vocab: Vocab,
        pool: KvPool,
        max_active: int,
        cost: CostModel,
        output: Output,
        outbox: Outbox,
        instruments: Instruments,
        *,
        has_adapters: bool,
    ) -> None:
        """`max_active`: maximum sequences that run at once."""
        self._vocab = vocab
        self._has_adapters = has_adapters
        self._pool = pool
        self._max_active = max_active
        self._cost = cost
        self._output = output
        self._outbox = outbox
        self._metrics = instruments.metrics
        self._totals = instruments.totals
        self.active: dict[int, Sequence] = {}
        """Sequences with a slot, by key."""
        self.all: dict[Sequence, None] = {}
        """Every sequence that has not ended, oldest first."""
        self._queued: dict[int, Sequence] = {}
        """Sequences that wait for a slot or follow a leader, by key."""
        self._heaps: dict[tuple[FairShare, int], list[tuple[float, int]]] = {}
        """Queue by client and lane: deadlines and keys. Entries of sequences that have left it are dropped late."""
        self._followers: dict[int, list[tuple[int, int]]] = {}
        """Followers by the key of their leader: length of the awaited prefix, and the follower's key."""
        self._fair_shares = FairShares()
        self._answered_ms = -math.inf
        """See `State.answered_ms`."""

    @property
    def is_decoding(self) -> bool:
        """Whether some sequence gets a token in the next tick."""
        return any(sequence.status is Status.DECODING for sequence in self.active.values())

    @property
    def wants_slot(self) -> bool:
        """Whether a sequence waits for a slot, and does not follow another."""
        return any(sequence.status is Status.WAITING for sequence in self._queued.values())

    @property
    def has_sets(self) -> bool:
        """Whether sequences with a slot have different sets of adapters."""
        return self._has_adapters and len({sequence.adapters for sequence in self.active.values()}) > 1

    # In

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.all[sequence] = None
        sequence.fair_share = self._fair_shares.came(sequence.client)
        if not sequence.is_reproducible:
            self._queue(sequence)

    def credit(self, sequence: Sequence, events: int) -> None:
        """Add credit for `events` more events. One that has ended needs none."""
        sequence.credits += events
        is_parked = sequence.status is Status.PARKED
        if sequence.credits > 0 and (sequence.is_paused or is_parked):
            sequence.change(Change.CATCH_UP)
            if is_parked:
                self._queue(sequence)

    # The queue

    def _queue(self, sequence: Sequence) -> None:
        sequence.due_ms = sequence.due_ms or due_ms(sequence, self._cost)
        self._queued[sequence.key] = sequence
        heap = self._heaps.setdefault((sequence.fair_share, sequence.lane), [])
        heapq.heappush(heap, (sequence.due_ms, sequence.key))

    def _peek(self, now: float) -> Sequence | None:
        """The queued sequence that starts next, once it gets a slot: of each client the one that is due first, and
        among clients in prefill order (`order.in_order`).
        """
        begun = Counter[FairShare]()
        for sequence in self.active.values():
            begun[sequence.fair_share] += sequence.prefill_left
        firsts: list[Sequence] = []
        for group in list(self._heaps):
            first = self._first_of(self._heaps[group])
            if first is None:
                del self._heaps[group]
            else:
                firsts.append(first)
        second_sets = self._second_sets(firsts)
        best: tuple[tuple[bool, int, float, float, int], Sequence] | None = None
        for first in firsts:
            is_second = first in second_sets
            if is_second and self._sets_with(first) > MAX_SETS:
                continue
            level = first.fair_share.level + begun[first.fair_share] + first.uncomputed
            place = (is_second, rank(first, now), level, first.due_ms, first.key)
            best = min(best, (place, first)) if best is not None else (place, first)
        return best and best[1]

    def _first_of(self, heap: list[tuple[float, int]]) -> Sequence | None:
        while heap:
            sequence = self._queued.get(heap[0][1])
            if sequence is not None and sequence.status is Status.WAITING:
                return sequence
            heapq.heappop(heap)
        return None

    def _take(self, now: float) -> Sequence | None:
        """Take the sequence that can start now out of the queue; None if there is none."""
        self._release_followers()
        for _ in range(MAX_EXAMINED):
            if len(self.active) >= self._max_active or not self._pool.has_id():
                return None
            sequence = self._peek(now)
            if sequence is None:
                return None
            needed, free = self._cells_needed(sequence), self._pool.free_cells
            if self._has_adapters and self._sets_with(sequence) > MAX_SETS:
                return None
            if not may_begin(needed, free, self._promised_cells, len(self.active)):
                return None
            heapq.heappop(self._heaps[sequence.fair_share, sequence.lane])
            found = self._find_leader(sequence)
            if found is None:
                del self._queued[sequence.key]
                return sequence
            self._follow(sequence, *found)
        return None

    def _sets_with(self, sequence: Sequence) -> int:
        """Number of sets of adapters that would take turns if the sequence began."""
        return len({sequence.adapter_set, *(other.adapter_set for other in self.active.values())})

    def _second_sets(self, firsts: list[Sequence]) -> set[Sequence]:
        """Sequences that would begin another set of adapters while some set has rows of their client alone. They begin
        after other clients' sequences, which never wait behind them: otherwise one client would have all turns.
        """
        if not self._has_adapters or len({first.fair_share for first in firsts}) < 2:
            return set()
        by_set = self._by_set()
        users = [{row.fair_share for row in rows} for rows in by_set.values()]
        return {first for first in firsts if first.adapter_set not in by_set and {first.fair_share} in users}

    def _by_set(self) -> dict[AdapterSet, list[Sequence]]:
        """Sequences with a slot by their sets of adapters; the set that began last comes last."""
        by_set: dict[AdapterSet, list[Sequence]] = {}
        for sequence in self.active.values():
            by_set.setdefault(sequence.adapter_set, []).append(sequence)
        return by_set

    @property
    def _promised_cells(self) -> int:
        """Cells that prompts of sequences with a slot have yet to fill."""
        return sum(
            sequence.uncomputed - (sequence.holding.loading_cells if sequence.holding else 0)
            for sequence in self.active.values()
        )

    def _cells_needed(self, sequence: Sequence) -> int:
        cacheable = sequence.cacheable_tokens
        return self._pool.cells_needed(sequence.cache_key(cacheable)) + len(sequence.tokens) - len(cacheable)

    def _find_leader(self, sequence: Sequence) -> tuple[Sequence, int] | None:
        """The sequence to follow, which computes more of this prompt than the cache has, and the common length."""
        if sequence.logprobs_pending or not sequence.request.cache_prompt:
            return None
        have = self._pool.match(sequence.cache_key(sequence.tokens))[1]
        # Not one of a lower lane: a question would wait as long as the background prompt that begins alike.
        best: tuple[Sequence, int] | None = None
        tokens, most = sequence.tokens, have + WORTH_WAITING_TOKENS - 1
        if most >= len(tokens) - 1:
            return None
        for other in self.active.values():
            # One comparison tells nearly all pairs apart, and there are many.
            if len(other.tokens) <= most or other.tokens[most] != tokens[most]:
                continue
            if not other.prefill_left or other.lane < sequence.lane or other.is_paused:
                continue
            if (other.adapter_set, other.adapted_from) != (sequence.adapter_set, sequence.adapted_from):
                continue
            common = min(common_length(tokens, other.tokens), len(tokens) - 1)
            if common > most and other.computed < common:
                best, most = (other, common), common
        return best

    def _follow(self, sequence: Sequence, leader: Sequence, length: int) -> None:
        self._followers.setdefault(leader.key, []).append((length, sequence.key))
        sequence.change(Change.FOLLOW)
        leader.branch = min(leader.branch or length, length)
        # The leader inherits an earlier deadline from its follower.
        leader.due_ms = min(leader.due_ms, sequence.due_ms)

    def _release_followers(self) -> None:
        for leader_key, followers in list(self._followers.items()):
            leader = self.active.get(leader_key)
            is_gone = leader is None or leader.is_paused
            if not is_gone and leader is not None and leader.computed < min(followers)[0]:
                continue
            # Followers that share a few more tokens than these, as by chance, begin with the others.
            enough = 0 if is_gone or leader is None else leader.computed + WORTH_WAITING_TOKENS
            staying = [] if is_gone else [follower for follower in followers if follower[0] >= enough]
            for follower in followers:
                if follower not in staying and (sequence := self._queued.get(follower[1])) is not None:
                    sequence.change(Change.UNFOLLOW)
                    self._queue(sequence)
            if staying:
                self._followers[leader_key] = staying
            else:
                del self._followers[leader_key]
            if leader is not None:
                leader.branch = min(staying)[0] if staying else 0

    # Slots

    def admit(self, now: float) -> None:
        """Start every sequence that can start; while others decode, only those that start within `MAX_ADMIT_MS`. For
        one that cannot start, others are preempted: paused ones first, then background ones.
        """
        began = now_ms()
        has_streams = any(sequence.status is Status.DECODING for sequence in self.active.values())
        while self._queued:
            if (sequence := self._take(now)) is not None:
                self._start(sequence, now)
                if has_streams and now_ms() - began > MAX_ADMIT_MS:
                    return
                continue
            # Usually no row can be preempted, and then the order does not matter.
            can_give_way = self._has_adapters or any(
                sequence.is_paused or sequence.lane < 0 for sequence in self.active.values()
            )
            head = self._peek(now) if can_give_way else None
            victims = [] if head is None else self._find_victims(head, now)
            if head is None or not victims:
                sets = 0 if head is None else self._sets_with(head)
                blocked_on = blocking_resource(len(self.active), self._max_active, sets) if self.wants_slot else ""
                self._totals.set_blocked_on(blocked_on, now)
                return
            for victim in victims:
                self.preempt(victim, now)
                victim.account.preempted_by = head.request.id
        self._totals.set_blocked_on("", now)

    def state(self, now: float) -> State:
        """What the policy plans with."""
        decoding: list[Row] = []
        prefilling: list[Row] = []
        unreadable: list[int] = []
        for sequence in self.active.values():
            (prefilling if sequence.status is Status.PREFILLING else decoding).append(sequence)
            if sequence.awaits_encoding or sequence.is_loading:
                unreadable.append(sequence.key)
        free = self._pool.free_cells
        if free < len(decoding) + len(prefilling):
            # Only now can a preemption be needed, and does it matter how many cells each would free.
            for sequence in self.active.values():
                sequence.cells = self._pool.own_cells(sequence.holding) if sequence.holding else 0
        return State(
            decoding,
            prefilling,
            free,
            self._pool.used_cells,
            answered_ms=self._answered_ms,
            queued=self._peek(now) if prefilling and self._queued else None,
            unreadable=unreadable,
            has_sets=self.has_sets,
        )

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Take a sequence's slot, and queue it. It continues from a snapshot, or without one from its cells: these stay
        as cache, which is evicted from its end, so only evicted tokens are computed again.

        Its reader sees a pause, and then exactly the tokens that it would have seen.
        """
        self._metrics.preemptions_total += 1
        # Not always a snapshot (`save` copies what is small, or while nothing decodes): copying a gigabyte of KV
        # stopped all streams for seconds, to free a slot whose cells could have stayed as cache.
        sequence.kept = self._pool.save(sequence.slot, now)
        if sequence.kept is not None:
            sequence.kept.pins += 1
        self._pool.release(sequence.slot, now, keep=sequence.kept is None)
        self._queue_again(sequence)

    def park(self, sequence: Sequence, now: float) -> None:
        """Take a decoding sequence's slot until its grammar is compiled again, and `credit` is called."""
        sequence.fall_behind(now, "grammar")
        self.preempt(sequence, now)

    def restart(self, sequence: Sequence) -> None:
        """Queue a sequence whose state a failed batch has lost: it is computed again from its last checkpoint."""
        self._pool.release_after_abort(sequence.slot, now_ms())
        self._queue_again(sequence)

    def _queue_again(self, sequence: Sequence) -> None:
        sequence.holding, sequence.computed = None, 0
        del self.active[sequence.key]
        sequence.change(Change.PREEMPT)
        # A parked one is queued again once its reader has caught up.
        if sequence.status is Status.WAITING:
            self._queue(sequence)

    def _find_victims(self, head: Sequence, now: float) -> list[Sequence]:
        """Sequences to preempt for `head`: as few as suffice; none if even all would not suffice."""
        active = self.active.values()
        if self._has_adapters and self._sets_with(head) > MAX_SETS:
            return self._set_to_preempt(head, now)
        slots = len(active) + 1 - self._max_active
        reserved = self._promised_cells + TUNING.reserve_tokens * len(active)
        cells = self._cells_needed(head) + reserved - self._pool.free_cells
        victims: list[Sequence] = []
        for sequence in self._yielding(head, now):
            if slots <= 0 and cells <= 0:
                break
            victims.append(sequence)
            slots -= 1
            cells -= self._pool.own_cells(sequence.slot) + sequence.uncomputed + TUNING.reserve_tokens
        return victims if slots <= 0 and cells <= 0 else []

    def _yielding(self, head: Sequence, now: float) -> dict[Sequence, None]:
        """Sequences that can be preempted for `head`, in preemption order."""
        active = self.active.values()
        paused = [sequence for sequence in active if sequence.is_paused and now - sequence.paused_ms >= PATIENCE_MS]
        return dict.fromkeys([*paused, *gives_way(head, active, now)])

    def _set_to_preempt(self, head: Sequence, now: float) -> list[Sequence]:
        """Sequences of one set of adapters, to preempt for `head`, whose set would be one too many: a set whose rows
        all yield, or the last begun one if another client than that of `head` has all sets.
        """
        sets, yielding = list(self._by_set().values()), self._yielding(head, now)
        others = {row.fair_share for rows in sets for row in rows}
        if len(others) == 1 and head.fair_share not in others and all(row.lane <= head.lane for row in sets[-1]):
            return sets[-1]
        return next((rows for rows in sets if all(row in yielding for row in rows)), [])

    def _start(self, sequence: Sequence, now: float) -> None:
        is_first = sequence.started_ms == 0.0
        known, differs = self._pool.nearest(sequence.cache_key(sequence.tokens)) if is_first else (0, False)
        cacheable = sequence.cache_key(sequence.cacheable_tokens)
        place = sequence.adapter_set.number, sequence.adapted_from
        sequence.holding, sequence.computed = self._pool.acquire(cacheable, now, *place)
        if is_first:
            sequence.account.cache = _cache_use(sequence, known, differs=differs)
        sequence.checkpoint_positions = self._pool.checkpoints.positions(
            cacheable, sequence.prompt_tokens, sequence.computed, sequence.message_ends
        )
        self._unpin(sequence)
        is_loading = sequence.is_loading
        is_whole = sequence.generated > 0 and sequence.uncomputed == 1 and not is_loading
        sequence.change(Change.RESTORE if is_whole else Change.START)
        if sequence.status is Status.PREFILLING:
            sequence.account.meets(other.account for other in self.active.values())
        self.active[sequence.key] = sequence
        self._totals.started[sequence.lane + 1] += 1
        if is_first:
            try:
                self._note_started(sequence, now)
            except Exception as error:  # noqa: BLE001  (whatever it is, it is this request's alone)
                self.fail(sequence, error)
        if is_loading:  # these tokens count as cached already
            sequence.computed = 0

    @property
    def loading(self) -> Sequence | None:
        """The sequence for which `load` loads next: the oldest of the highest lane; None if there is none."""
        loading = (sequence for sequence in self.active.values() if sequence.is_loading)
        return max(loading, key=lambda sequence: sequence.lane, default=None)

    @property
    def load_ms(self) -> float:
        """Expected time of `load`; 0 if there is nothing to load."""
        sequence = self.loading
        return 0.0 if sequence is None else self._pool.load_ms(sequence.slot)

    def load(self) -> bool:
        """Load the next part of a sequence's cached tokens; False if there is nothing to load."""
        sequence = self.loading
        if sequence is None:
            return False
        if not self._pool.load_next(sequence.slot):
            sequence.cached_tokens = 0
            self.restart(sequence)
        elif not sequence.is_loading:
            sequence.computed = sequence.slot.tip.end
            if sequence.generated and sequence.uncomputed == 1:
                sequence.change(Change.PREFILLED)
        return True

    def start_isolated(self, sequence: Sequence, now: float) -> None:
        """Start a reproducible sequence, which has a context of its own and no slot."""
        sequence.change(Change.START)
        sequence.account.cache = CacheUse(why="reproducible")
        self._note_started(sequence, now)

    def _note_started(self, sequence: Sequence, now: float) -> None:
        sequence.started_ms = now
        sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
        if sequence.index == 0:  # several answers have one prompt
            cache = self._metrics.cache
            cache.hits, cache.misses = cache.hits + (sequence.computed > 0), cache.misses + (sequence.computed == 0)
            self._metrics.prompt_tokens_total += sequence.prompt_tokens
            self._metrics.cached_tokens_total += sequence.cached_tokens
        sampling = sequence.request.sampling
        if not sampling.is_greedy:
            sequence.choice.sampler = Sampler(self._vocab, sampling, sequence.choice.seed, sequence.tokens)

    # Out

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence with `Finished`; one that has ended is left as it is."""
        if sequence.status is not Status.ENDED:
            self.end(sequence, self._output.last_event(sequence, reason, now_ms()))

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence whose grammar cannot be followed further, or whose sampling or text raised an exception. Its
        cells are not kept.
        """
        if not isinstance(error, UmaError):
            _log.error("request %r failed: a fault in the engine", sequence.request.id, exc_info=error)
            error = InternalError(
                f"a fault in the engine ended this request ({type(error).__name__}: {error}); "
                "its log has the traceback, please report it"
            )
        if sequence.status is not Status.ENDED:
            self.end(sequence, error)

    def end_all(self, error: UmaError) -> None:
        """End every sequence with an error."""
        for sequence in list(self.all):
            self.end(sequence, error)

    def abandon_all(self, error: UmaError) -> None:
        """After an exception that ends the engine: send every reader the error, and touch nothing else."""
        for sequence in self.all:
            self._outbox.add(sequence.stream, error)
            self._metrics.finished("error")
        self.all.clear()
        self.active.clear()

    def end(self, sequence: Sequence, event: Finished | UmaError) -> None:
        """Send the last event, and free all that the sequence holds."""
        sequence.change(Change.END)
        self.active.pop(sequence.key, None)
        self._queued.pop(sequence.key, None)
        self._unpin(sequence)
        self._give_back(sequence, event)
        self._count_end(sequence, event)
        # The end comes behind tokens that were computed ahead. A cancel or failure does not, nor the end of a
        # background stream, whose program needs all tokens soon rather than at an even pace.
        is_whole = isinstance(event, Finished) and event.reason != "cancelled"
        is_due = is_whole and sequence.is_paced and sequence.lane >= 0
        if is_whole and sequence.has_reader and sequence.lane >= 0:
            self._answered_ms = max(now_ms(), sequence.last_token_ms)
        self._outbox.add(sequence.stream, event, not_before_ms=sequence.last_token_ms if is_due else 0.0)
        reason = event.reason if isinstance(event, Finished) else event.code
        sequence.account.ends(reason, event.metrics if isinstance(event, Finished) else sequence.metrics(now_ms()))
        self._fair_shares.left(sequence.fair_share)
        # Last: metrics that show nothing running must include its end and its free cells.
        del self.all[sequence]

    def _give_back(self, sequence: Sequence, event: Finished | UmaError) -> None:
        if (holding := sequence.holding) is not None:
            if sequence.computed > len(sequence.tokens):
                # Tokens of a draft that were accepted, but lie behind the end of the output, are no part of the text.
                sequence.computed = len(sequence.tokens)
                self._pool.truncate(holding, sequence.computed)
            # Cells of a request without cache are dropped, so that a repeat gets the same cells. While they were kept,
            # each repeat had other cells, and its sums other last bits.
            keep = isinstance(event, Finished) and sequence.request.cache_prompt
            expected, read = sequence.request.expects_more, sequence.choice.labels
            spare_from = None if read is None else read.spare_from
            self._pool.release(holding, now_ms(), keep=keep, is_expected=expected, spare_from=spare_from)
            sequence.holding = None
        if sequence.choice.sampler is not None:
            sequence.choice.sampler.close()
            sequence.choice.sampler = None

    def _count_end(self, sequence: Sequence, event: Finished | UmaError) -> None:
        if sequence.index:  # a request is counted once
            return
        reason = event.reason if isinstance(event, Finished) else "error"
        if sequence.started_ms and reason in ("stop", "length"):
            self._metrics.served(now_ms() - sequence.started_ms)
        self._metrics.finished(reason)

    def _unpin(self, sequence: Sequence) -> None:
        if sequence.kept is not None:
            sequence.kept.pins -= 1
            sequence.kept = None


def _cache_use(sequence: Sequence, known: int, *, differs: bool) -> CacheUse:
    """Cache use of a prompt that starts: `known` of its tokens are cached or running somewhere (`KvPool.nearest`)."""
    cached, whole = sequence.computed, sequence.prompt_tokens - LAST_TOKENS
    tier = sequence.holding.tier.value if sequence.holding is not None and cached else ""
    if len(sequence.cacheable_tokens) < len(sequence.tokens):
        why = "asked"
    elif cached >= whole:
        why = ""
    elif known < MIN_SHARED_TOKENS:
        why = "none"
    elif cached < known:
        why = "earlier"
    else:
        why = "differs" if differs else "end"
    following = sequence.tokens[known] if why in ("differs", "end") else -1
    return CacheUse(tier, known, why, None if following < 0 else following)
