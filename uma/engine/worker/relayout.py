"""Recreates the KV memory in another layout, with all that is in it, between two ticks.

Sequences with a slot are carried over with their state. Where rows are computed faster than their readers want tokens,
they first run ahead for as long as the change is expected to take, so that no reader sees it. Cached prefixes become
snapshots, as far as there is place for them. Limits that clients were told are those of the pool, which is always there
to return to.
"""

from __future__ import annotations

import logging

import attrs

from uma.engine import sizing
from uma.engine.clock import now_ms
from uma.engine.delivery.outbox import Outbox
from uma.engine.kv.pool import KvPool
from uma.engine.policy import Scheduler
from uma.engine.policy.layout import Attended, Crowd, Layout, LayoutPolicy
from uma.engine.worker.residency import Residency
from uma.engine.worker.sequence import Status
from uma.errors import ModelError
from uma.llama.context import Context
from uma.metrics import EngineMetrics

MAX_PREPARATIONS = 4
"""Maximum plans that decode ahead of one change: rows that cannot run ahead (a reader that is out of credit, the end of
a text) must not put it off for ever."""

_log = logging.getLogger("uma.engine")


class Relayout:
    """Changes the layout as its policy says. Belongs to the decode thread."""

    def __init__(
        self,
        context: Context,
        pool: KvPool,
        scheduler: Scheduler,
        residency: Residency,
        outbox: Outbox,
        metrics: EngineMetrics,
        policy: LayoutPolicy,
    ) -> None:
        self._context = context
        self._pool = pool
        self._scheduler = scheduler
        self._residency = residency
        self._outbox = outbox
        self._metrics = metrics
        self._policy = policy
        self._base = context.params
        self._preparations = 0

    def before_plan(self, attended: Attended, now: float, neighbour_load: float) -> float:
        """Change the layout, if another suits the sequences of now better. Between two batches only.

        `neighbour_load` is that of `State`: the pace that readers are given depends on it.
        Returns the pause (ms) that rows have to be decoded ahead of before that; 0 where nothing needs preparing.
        """
        policy = self._policy
        if not policy.can_change:
            return 0.0
        tokens = self._tokens
        layout = policy.choose(self._crowd(now, neighbour_load), attended, tokens)
        if layout == policy.current:
            self._preparations = 0
            return 0.0
        if self._pool.is_copying:
            return 0.0
        pause_ms = policy.pause.ms(layout, tokens)
        if self._preparations < MAX_PREPARATIONS and self._is_felt(pause_ms, now, neighbour_load):
            self._preparations += 1
            return pause_ms
        self._preparations = 0
        self._change(layout, now)
        return 0.0

    def _crowd(self, now: float, neighbour_load: float) -> Crowd:
        rows = [each for each in self._residency.active.values() if each.status is Status.DECODING]
        used_cells = self._pool.used_cells
        return self._residency.crowd(
            lambda each: self._scheduler.comes_after(each, rows, used_cells, now, neighbour_load)
        )

    @property
    def _tokens(self) -> int:
        """Tokens of which a change takes or keeps the state: what several sequences share, it takes for each."""
        carried = sum(each.computed for each in self._residency.active.values())
        return carried + self._pool.cached_cells

    def _is_felt(self, pause_ms: float, now: float, neighbour_load: float) -> bool:
        """Whether readers would notice a change that begins now, and not if their rows ran ahead first."""
        if self._residency.has_outgrown:
            return False
        rows = [each for each in self._residency.active.values() if each.status is Status.DECODING and each.is_paced]
        return self._scheduler.is_felt(pause_ms, rows, self._pool.used_cells, now, neighbour_load)

    def _change(self, layout: Layout, now: float) -> None:
        self._outbox.flush()  # it takes longer than any token can wait
        tokens = self._tokens
        expected_ms = self._policy.pause.ms(layout, tokens)
        carried = self._residency.carry_out(now)
        self._pool.clear_cells()
        try:
            self._context.remake(sizing.layout_params(self._base, layout))
        except ModelError as error:
            if layout.is_unified:
                raise
            _log.warning("the KV memory keeps its layout: %s", error)
            layout = self._policy.give_up()
        self._pool.attach(is_for_now=not layout.is_unified)
        self._scheduler.targets = attrs.evolve(self._scheduler.targets, mixes_prompts=layout.is_unified)
        self._residency.carry_in(carried, now)
        took_ms = now_ms() - now
        made_ms = self._context.opened_ms
        self._policy.pause.learn(layout, made_ms, tokens, took_ms - made_ms)
        self._policy.changed(layout, tokens)
        metrics = self._metrics
        metrics.kv_layout_changes_total += 1
        metrics.kv_cells_total = metrics.cache.total_capacity = self._context.n_ctx
        _log.debug(
            "KV memory: %s of %d cells, for %d sequences, with %s attention; changed in %.0f ms, %.0f expected",
            "one buffer" if layout.is_unified else f"{layout.ids} buffers", layout.share, len(carried),
            "plain" if layout.is_plain else "flash", took_ms, expected_ms,
        )  # fmt: skip
