"""Makes the KV memory anew in another layout, with all that is in it, between two ticks.

Sequences with a slot are carried over with their state, and no reader sees more than a pause. Cached prefixes become
snapshots, as far as there is place for them. Limits that clients were told are those of the pool, which is always there
to return to.
"""

from __future__ import annotations

import logging

import attrs

from uma.engine import sizing
from uma.engine.clock import now_ms
from uma.engine.kv.pool import KvPool
from uma.engine.policy import Scheduler
from uma.engine.policy.layout import Layout, LayoutPolicy
from uma.engine.worker.residency import Residency
from uma.errors import ModelError
from uma.llama.context import Context
from uma.metrics import EngineMetrics

_log = logging.getLogger("uma.engine")


class Relayout:
    """Changes the layout as its policy says. Belongs to the decode thread."""

    def __init__(
        self,
        context: Context,
        pool: KvPool,
        scheduler: Scheduler,
        residency: Residency,
        metrics: EngineMetrics,
        policy: LayoutPolicy,
    ) -> None:
        self._context = context
        self._pool = pool
        self._scheduler = scheduler
        self._residency = residency
        self._metrics = metrics
        self._policy = policy
        self._base = context.params

    def before_plan(self, masked_cells: int, now: float) -> None:
        """Change the layout, if another suits the sequences of now better. Between two batches only."""
        policy = self._policy
        if not policy.can_change:
            return
        layout = policy.choose(self._residency.crowd(), masked_cells)
        if layout != policy.current and not self._pool.is_copying:
            self._change(layout, now)

    def _change(self, layout: Layout, now: float) -> None:
        carried = self._residency.carry_out(now)
        self._pool.clear_cells()
        try:
            self._context.remake(sizing.layout_params(self._base, layout))
        except ModelError as error:
            if layout.is_unified:
                raise
            _log.warning("the KV memory keeps its layout: %s", error)
            layout = self._policy.give_up()
        self._policy.changed(layout)
        self._pool.attach(is_for_now=not layout.is_unified)
        self._scheduler.targets = attrs.evolve(self._scheduler.targets, mixes_prompts=layout.is_unified)
        self._residency.carry_in(carried, now)
        metrics = self._metrics
        metrics.kv_layout_changes_total += 1
        metrics.kv_cells_total = metrics.cache.total_capacity = self._context.n_ctx
        _log.debug(
            "KV memory: %s of %d cells, for %d sequences; changed in %.0f ms",
            "one buffer" if layout.is_unified else "buffers", layout.share, len(carried), now_ms() - now,
        )  # fmt: skip
