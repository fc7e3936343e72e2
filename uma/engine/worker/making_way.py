"""Makes way for sequences that have begun: cache that they have no use for leaves its cells.

Once for each tick in which any has begun, after all of that tick have what they share; where more is to be copied than
readers and newcomers can wait for, the rest follows before the next batches. Belongs to the decode thread.
"""

from __future__ import annotations

from uma.engine.clock import now_ms
from uma.engine.kv.pool import KvPool
from uma.engine.policy.layout import expected_steps
from uma.engine.policy.layout_policy import LayoutPolicy
from uma.engine.worker.residency import Residency
from uma.engine.worker.sequence import Status


class MakingWay:
    """Asks the pool for it, with what the policy expects of the sequences of now."""

    def __init__(self, pool: KvPool, residency: Residency, policy: LayoutPolicy) -> None:
        self._pool = pool
        self._residency = residency
        self._policy = policy
        self._begun = 0
        self.has_more = False
        """More is to leave before the next batch."""

    def go_on(self) -> None:
        """After admission, before the next batch."""
        residency, pool = self._residency, self._pool
        if residency.begun == self._begun and not self.has_more:
            return
        self._begun, self.has_more = residency.begun, False
        if not pool.cached_cells:
            return
        active = residency.active.values()
        reads = sum(each.missing for each in active if each.status is Status.PREFILLING)
        rows = sum(expected_steps(each.left_tokens) for each in active)
        leaving = self._policy.leaving(reads, rows)
        most_tokens = leaving.max_tokens(decodes=residency.is_decoding)
        began = now_ms()
        left = pool.make_way(leaving.pays, most_tokens, [each.tokens for each in active])
        if left.copied:
            self._policy.learn_copy(left.copied, now_ms() - began)
        self.has_more = left.has_more
