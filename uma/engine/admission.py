"""Requests that wait for a sequence id and KV cells, and when each of them may begin.

A request begins when its prompt fits beside what is already promised to others. One whose prompt begins like a prompt
that is being read right now waits until that much is computed, and then shares it instead of computing it too.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from uma.engine.kv import KvPool
from uma.engine.policy.cost import CostModel
from uma.engine.policy.order import admission_key, due_ms, may_begin
from uma.engine.prefix import common_length
from uma.engine.sequence import Sequence

WORTH_WAITING_TOKENS = 32
"""A prefix that someone else is computing is waited for from this length on."""


class WaitingRoom:
    """Submitted and preempted sequences, in the order of the policy. Belongs to the decode thread."""

    def __init__(self, pool: KvPool, max_active: int, cost: CostModel) -> None:
        self._pool = pool
        self._max_active = max_active
        self._cost = cost
        self._members: dict[int, Sequence] = {}
        self._heap: list[tuple[int, float, int]] = []
        self._followers: dict[int, tuple[int, int]] = {}
        """Those waiting for another to compute what they share: its key, and up to which token."""

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        row = sequence.row
        if not row.due_ms:
            row.due_ms = due_ms(row, self._cost)
        self._members[row.key] = sequence
        self._push(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence, if it waits here."""
        self._members.pop(sequence.row.key, None)
        self._followers.pop(sequence.row.key, None)

    def __len__(self) -> int:
        return len(self._members) - len(self._followers)

    def next(self, active: Mapping[int, Sequence]) -> Sequence | None:
        """The sequence that begins now, no longer waiting; None if none may. Ask again after starting it."""
        self._release_followers(active)
        while self._heap:
            key = self._heap[0][-1]
            sequence = self._members.get(key)
            if sequence is None or key in self._followers:
                heapq.heappop(self._heap)
            elif not self._may_begin(sequence, active):
                return None
            else:
                heapq.heappop(self._heap)
                ahead = self._find_leader(sequence, active)
                if ahead is None:
                    del self._members[key]
                    return sequence
                self._followers[key] = ahead
        return None

    def _push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, admission_key(sequence.row))

    def _may_begin(self, sequence: Sequence, active: Mapping[int, Sequence]) -> bool:
        if not self._pool.has_id():
            return False
        # A probe asks whether generation works, not whether there is a place: it takes one beyond the limit.
        places = self._max_active + sequence.is_probe
        needed = self._pool.cells_needed(sequence.tokens)
        unread = sum(each.missing for each in active.values())
        return may_begin(needed, self._pool.free_cells, unread, len(active), places)

    def _find_leader(self, sequence: Sequence, active: Mapping[int, Sequence]) -> tuple[int, int] | None:
        """Who is computing more of this prompt than is there yet. Nobody waits for someone of a lower lane."""
        if not self._pool.shares:
            return None
        have = self._pool.match(sequence.tokens)[1]
        best: tuple[int, int] | None = None
        most = have + WORTH_WAITING_TOKENS - 1
        for key, other in active.items():
            if not other.row.remaining or other.row.lane < sequence.row.lane or other.row.is_paused:
                continue
            common = min(common_length(sequence.tokens, other.tokens), len(sequence.tokens) - 1)
            if common > most and other.computed < common:
                best, most = (key, common), common
        return best

    def _release_followers(self, active: Mapping[int, Sequence]) -> None:
        for key, (leader_key, length) in list(self._followers.items()):
            leader = active.get(leader_key)
            if leader is None or leader.row.is_paused or leader.computed >= length:
                del self._followers[key]
                self._push(self._members[key])
