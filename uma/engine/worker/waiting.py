"""Requests that wait for a sequence id and KV cells, and when each of them may begin.

A request begins when its prompt fits beside what is already promised to others. One whose prompt begins like a prompt
that is being read right now waits until that much is computed, and then shares it instead of computing it too.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from uma.engine.kv.pool import KvPool
from uma.engine.kv.prefix_tree import common_length
from uma.engine.policy.cost import CostModel
from uma.engine.policy.order import RESERVE_PER_ROW, admission_key, due_ms, may_begin
from uma.engine.worker.sequence import Sequence

MOST_EXAMINED = 32
"""Waiting sequences looked at in one go."""
WORTH_WAITING_TOKENS = 32
"""A prefix that someone else is computing is waited for from this length on."""


class WaitingRoom:
    """Submitted and preempted sequences, in the order of the policy. Belongs to the decode thread."""

    def __init__(self, pool: KvPool, max_active: int, cost: CostModel) -> None:
        self._pool = pool
        self._max_active = max_active
        self._cost = cost
        self._members: dict[int, Sequence] = {}
        self._heap: list[tuple[float, int]] = []
        self._followers: dict[int, list[tuple[int, int]]] = {}
        """By the key of whoever computes what they share: the length they wait for, and their own key."""
        self._following: set[int] = set()

    def __len__(self) -> int:
        """How many could begin if there were room."""
        return len(self._members) - len(self._following)

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits at all."""
        return not self._members

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        row = sequence.row
        if not row.due_ms:
            row.due_ms = due_ms(row, self._cost)
        self._members[row.key] = sequence
        heapq.heappush(self._heap, admission_key(row))

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence, if it waits here."""
        self._members.pop(sequence.row.key, None)
        self._following.discard(sequence.row.key)

    def head(self) -> Sequence | None:
        """Who begins next, as soon as there is room."""
        while self._heap:
            key = self._heap[0][-1]
            if key in self._members and key not in self._following:
                return self._members[key]
            heapq.heappop(self._heap)
        return None

    def next(self, active: Mapping[int, Sequence]) -> Sequence | None:
        """The sequence that begins now, no longer waiting; None if none may. Ask again after starting it."""
        self._release_followers(active)
        # A crowd with one prefix is sorted out over several ticks: nobody's stream waits for that.
        for _ in range(MOST_EXAMINED):
            sequence = self.head()
            if sequence is None or not self._may_begin(sequence, active):
                return None
            heapq.heappop(self._heap)
            ahead = self._find_leader(sequence, active)
            if ahead is None:
                del self._members[sequence.row.key]
                return sequence
            self._follow(sequence, *ahead)
        return None

    def lacks(self, sequence: Sequence, active: Mapping[int, Sequence]) -> tuple[int, int]:
        """The places and the cells that have to be given up before `sequence` may begin."""
        places = len(active) + 1 - self._places_for(sequence)
        unread = sum(each.missing for each in active.values())
        reserve = RESERVE_PER_ROW * len(active)
        cells = self._pool.cells_needed(sequence.tokens) + unread + reserve - self._pool.free_cells
        return max(0, places), max(0, cells)

    def _places_for(self, sequence: Sequence) -> int:
        # A probe asks whether generation works, not whether there is a place: it takes one beyond the limit.
        return self._max_active + sequence.is_probe

    def _may_begin(self, sequence: Sequence, active: Mapping[int, Sequence]) -> bool:
        if len(active) >= self._places_for(sequence) or not self._pool.has_id():
            return False
        needed, free = self._pool.cells_needed(sequence.tokens), self._pool.free_cells
        if sequence.is_probe:
            return needed <= free
        return may_begin(needed, free, sum(each.missing for each in active.values()), len(active))

    def _find_leader(self, sequence: Sequence, active: Mapping[int, Sequence]) -> tuple[Sequence, int] | None:
        """Who is computing more of this prompt than is there yet. Nobody waits for someone of a lower lane."""
        if not self._pool.shares:
            return None
        have = self._pool.match(sequence.tokens)[1]
        best: tuple[Sequence, int] | None = None
        most = have + WORTH_WAITING_TOKENS - 1
        for other in active.values():
            if not other.row.remaining or other.row.lane < sequence.row.lane or other.row.is_paused:
                continue
            common = min(common_length(sequence.tokens, other.tokens), len(sequence.tokens) - 1)
            if common > most and other.computed < common:
                best, most = (other, common), common
        return best

    def _follow(self, sequence: Sequence, leader: Sequence, length: int) -> None:
        self._followers.setdefault(leader.row.key, []).append((length, sequence.row.key))
        self._following.add(sequence.row.key)
        # Whoever hurries makes the one it waits for hurry.
        leader.row.due_ms = min(leader.row.due_ms, sequence.row.due_ms)

    def _release_followers(self, active: Mapping[int, Sequence]) -> None:
        for leader_key, followers in list(self._followers.items()):
            leader = active.get(leader_key)
            gone = leader is None or leader.row.is_paused
            if not gone and leader is not None and leader.computed < min(followers)[0]:
                continue
            waiting = [] if gone or leader is None else [each for each in followers if each[0] > leader.computed]
            for each in followers:
                if each not in waiting and (sequence := self._members.get(each[1])) is not None:
                    self._following.discard(each[1])
                    heapq.heappush(self._heap, admission_key(sequence.row))
            if waiting:
                self._followers[leader_key] = waiting
            else:
                del self._followers[leader_key]
