"""The queue for slots: which sequence starts next, and which follow one that is computing their prefix.

A sequence starts when its prompt fits beside what is already promised to others. One whose prompt begins like a prompt
that is being prefilled follows it: it waits until that much is computed, then shares it instead of computing it too.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping

from uma.engine.kv.pool import KvPool
from uma.engine.kv.prefix_tree import common_length
from uma.engine.policy.cost import CostModel
from uma.engine.policy.order import due_ms, may_begin, rank
from uma.engine.policy.state import Share
from uma.engine.policy.tuning import TUNING
from uma.engine.worker.sequence import Sequence
from uma.engine.worker.status import Change, Status

MOST_EXAMINED = 32
"""Maximum waiting sequences examined in one tick."""
WORTH_WAITING_TOKENS = 32
"""Minimum length of a prefix worth waiting for while another sequence computes it."""


def lack(with_slot: int, max_active: int) -> str:
    """What the first of the queue waits for, where so many sequences have a slot: `slot`, or `cells` for its prompt."""
    return "slot" if with_slot >= max_active else "cells"


class WaitingRoom:
    """Submitted and preempted sequences, in the order of the policy. Belongs to the decode thread."""

    def __init__(self, pool: KvPool, max_active: int, cost: CostModel) -> None:
        self._pool = pool
        self.max_active = max_active
        """Maximum sequences that run at once."""
        self._cost = cost
        self._members: dict[int, Sequence] = {}
        self._queues: dict[tuple[Share, int], list[tuple[float, int]]] = {}
        """Waiting sequences by client and lane: when one is due, and its key."""
        self._followers: dict[int, list[tuple[int, int]]] = {}
        """Followers by the key of their leader, which computes what they share: the length they wait for, and their own
        key."""

    def __len__(self) -> int:
        """How many wait for a slot and for nothing else."""
        return sum(each.status is Status.WAITING for each in self._members.values())

    @property
    def wants_slot(self) -> bool:
        """Whether any does; at once where the oldest of them does, however long the queue is."""
        return any(each.status is Status.WAITING for each in self._members.values())

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is queued, followers included."""
        return not self._members

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, whose status is `WAITING`."""
        if not sequence.due_ms:
            sequence.due_ms = due_ms(sequence, self._cost)
        self._members[sequence.key] = sequence
        self._push(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence, if it is queued here."""
        self._members.pop(sequence.key, None)

    def _push(self, sequence: Sequence) -> None:
        queue = self._queues.setdefault((sequence.share, sequence.lane), [])
        heapq.heappush(queue, (sequence.due_ms, sequence.key))

    def head(self, active: Mapping[int, Sequence], now: float) -> Sequence | None:
        """The sequence that starts next, as soon as there is a slot for it: of each client the one that is due first,
        and among clients in the order in which prompts are read (`order.in_order`).
        """
        begun = Counter[Share]()
        for each in active.values():
            begun[each.share] += each.remaining
        best: tuple[tuple[int, float, float, int], Sequence] | None = None
        for group in list(self._queues):
            sequence = self._first(self._queues[group])
            if sequence is None:
                del self._queues[group]
                continue
            level = sequence.share.level + begun[sequence.share] + sequence.missing
            place = (rank(sequence, now), level, sequence.due_ms, sequence.key)
            best = min(best, (place, sequence)) if best is not None else (place, sequence)
        return best and best[1]

    def _first(self, queue: list[tuple[float, int]]) -> Sequence | None:
        while queue:
            sequence = self._members.get(queue[0][1])
            if sequence is not None and sequence.status is Status.WAITING:
                return sequence
            heapq.heappop(queue)
        return None

    def next(self, active: Mapping[int, Sequence], now: float) -> Sequence | None:
        """Take the sequence that starts now out of the queue; None if none can. Ask again after starting it."""
        self._release_followers(active)
        # Many sequences with one prefix are sorted over several ticks, so that no stream waits for it.
        for _ in range(MOST_EXAMINED):
            if len(active) >= self.max_active or not self._pool.has_id():
                return None
            sequence = self.head(active, now)
            if sequence is None or not self._may_begin(sequence, active):
                return None
            heapq.heappop(self._queues[sequence.share, sequence.lane])
            ahead = self._find_leader(sequence, active)
            if ahead is None:
                del self._members[sequence.key]
                return sequence
            self._follow(sequence, *ahead)
        return None

    def lacks(self, sequence: Sequence, active: Mapping[int, Sequence]) -> tuple[int, int]:
        """The slots and the cells that others have to give up before `sequence` can start."""
        slots = len(active) + 1 - self.max_active
        unread = sum(each.missing for each in active.values())
        reserve = TUNING.reserve_tokens * len(active)
        cells = self._cells_needed(sequence) + unread + reserve - self._pool.free_cells
        return max(0, slots), max(0, cells)

    def _may_begin(self, sequence: Sequence, active: Mapping[int, Sequence]) -> bool:
        needed, free = self._cells_needed(sequence), self._pool.free_cells
        return may_begin(needed, free, sum(each.missing for each in active.values()), len(active))

    def _cells_needed(self, sequence: Sequence) -> int:
        reusable = sequence.reusable
        return self._pool.cells_needed(reusable) + len(sequence.tokens) - len(reusable)

    def _find_leader(self, sequence: Sequence, active: Mapping[int, Sequence]) -> tuple[Sequence, int] | None:
        """The sequence that computes more of this prompt than is there yet. None follows a sequence of a lower lane."""
        if sequence.unread or not sequence.request.cache_prompt:
            return None
        have = self._pool.match(sequence.tokens)[1]
        best: tuple[Sequence, int] | None = None
        tokens, most = sequence.tokens, have + WORTH_WAITING_TOKENS - 1
        if most >= len(tokens) - 1:
            return None
        for other in active.values():
            # Many sequences are compared in pairs. This tells nearly all pairs apart.
            if len(other.tokens) <= most or other.tokens[most] != tokens[most]:
                continue
            if not other.remaining or other.lane < sequence.lane or other.is_paused:
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

    def _release_followers(self, active: Mapping[int, Sequence]) -> None:
        for leader_key, followers in list(self._followers.items()):
            leader = active.get(leader_key)
            gone = leader is None or leader.is_paused
            if not gone and leader is not None and leader.computed < min(followers)[0]:
                continue
            # Those that share a few tokens more with it, as by chance, begin with the others.
            enough = 0 if gone or leader is None else leader.computed + WORTH_WAITING_TOKENS
            waiting = [] if gone else [each for each in followers if each[0] >= enough]
            for each in followers:
                if each not in waiting and (sequence := self._members.get(each[1])) is not None:
                    sequence.change(Change.UNFOLLOW)
                    self._push(sequence)
            if waiting:
                self._followers[leader_key] = waiting
            else:
                del self._followers[leader_key]
            if leader is not None:
                leader.branch = min(waiting)[0] if waiting else 0
