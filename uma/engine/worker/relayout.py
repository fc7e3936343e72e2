"""Recreates the KV memory in another layout, or moves its cells together, with all that is in it, between two ticks.

Sequences with a slot are carried over with their state, what they share once where one buffer takes it. Where rows are
computed faster than their readers want tokens, they first run ahead for as long as the change is expected to take, so
that no reader sees it. Cached prefixes come along into the pool; on the way out of it they become snapshots, as far as
there is place for them. Limits that clients were told are those of the pool, which is always there to return to.

In the pool freed cells come to lie between used ones, and a long prompt in them. llama.cpp skips the cells of others
only where they fill a tile, so that reading it takes a quarter longer (100 M parameters, 1,000 other cells). There all
is carried to the pool's beginning first.
"""

from __future__ import annotations

import logging
import math

import attrs

from uma.engine import sizing
from uma.engine.clock import now_ms
from uma.engine.delivery.outbox import Outbox
from uma.engine.kv.pool import MOST_CARRIED_CACHE, KvPool
from uma.engine.policy import Scheduler
from uma.engine.policy.layout import Attended, Held, Layout
from uma.engine.policy.layout_policy import LayoutPolicy
from uma.engine.policy.lead import MAX_STEPS
from uma.engine.worker.residency import Residency
from uma.engine.worker.sequence import Status
from uma.errors import ModelError
from uma.llama.context import Context
from uma.metrics import EngineMetrics

MAX_PREPARATIONS = 4
"""Maximum plans that decode ahead of one change: rows that cannot run ahead (a reader that is out of credit, the end of
a text) must not put it off for ever."""

MOST_PUT_OFF_MS = 250.0
"""Maximum time for which a change is put off because readers are about to ask again."""
LEAST_HOLES = 64
"""Minimum unused cells between used ones before which cells are moved: fewer take little of any prompt."""

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
        self._skips_masked = context.params.flash_attn != "off"
        """Attention over a prompt skips cells of others, where they lie together."""
        self._preparations = 0
        self._wanted_ms = math.inf
        """Since when the policy has chosen another layout than the current one."""

    def before_plan(self, attended: Attended, now: float, neighbour_load: float) -> float:
        """Change the layout, if another suits the sequences of now better. Between two batches only.

        `neighbour_load` is that of `State`: the pace that readers are given depends on it.
        Returns the pause (ms) that rows have to be decoded ahead of before that; 0 where nothing needs preparing.
        """
        policy = self._policy
        if not policy.can_change:
            return 0.0
        held = self._held
        layout = self._choice(attended, held, now)
        if layout == policy.current:
            self._preparations, self._wanted_ms = 0, math.inf
            return 0.0
        self._wanted_ms = min(self._wanted_ms, now)
        if self._pool.is_copying or self._waits_for_reader(now):
            return 0.0
        pause_ms = policy.most_pause_ms(layout, held)
        if self._prepares(pause_ms, now, neighbour_load):
            return pause_ms
        self._change(layout, now)
        return 0.0

    def _choice(self, attended: Attended, held: Held, now: float) -> Layout:
        """What the policy chooses, of what there is memory for: a layout can be larger than the pool."""
        policy, crowd = self._policy, self._residency.crowd(now)
        while True:
            layout = policy.choose(crowd, attended, held)
            if layout.cells <= policy.pool.cells or sizing.has_memory_for(self._context, layout):
                return layout
            _log.info("KV memory: memory is short: no buffers of %s cells or more from now on", f"{layout.cells:,}")
            policy.give_up_from(layout.cells)

    def before_prompts(self, now: float, neighbour_load: float) -> float | None:
        """A piece of a prompt is to be computed next: where it pays, first move all that is in cells together, so that
        what prompts compute lies in a row.

        None where nothing was done. Else the pause (ms) that rows have to be decoded ahead of before that, or 0 after
        it: what is computed next has to be planned again.
        """
        pool, policy, active = self._pool, self._policy, self._residency.active.values()
        if not self._skips_masked or pool.holes < LEAST_HOLES or not pool.can_move:
            return None
        held, reads = self._held, [(each.missing, each.computed) for each in active if each.status is Status.PREFILLING]
        if not policy.moves(reads, held, pool.holes):
            return None
        pause_ms = policy.moving_ms(held)
        if self._prepares(pause_ms, now, neighbour_load):
            return pause_ms
        self._outbox.flush()
        began, holes = now_ms(), pool.holes
        luggage = self._residency.carry_out(began, shares=True, most_cache=pool.total_cells)
        self._context.clear(overwrites=False)
        pool.attach(is_for_now=pool.is_for_now)
        self._residency.carry_in(luggage, began)
        took_ms = now_ms() - began
        policy.learn_moving(held, took_ms)
        self._metrics.kv_defrags_total += 1
        _log.debug(
            "KV memory: %d cells moved together, of %d holes, before %d tokens are read; in %.0f ms, %.0f expected",
            held.cells, holes, sum(tokens for tokens, _ in reads), took_ms, pause_ms,
        )  # fmt: skip
        return 0.0

    def before_rest(self, attended: Attended) -> None:
        """Nothing is left to compute. If no sequence is there either, go back to the pool where the next prompts would
        have to wait for that.
        """
        policy = self._policy
        if self._residency.all or not policy.can_change:
            return
        layout = policy.resting(attended)
        if layout != policy.current and not self._pool.is_copying:
            self._change(layout, now_ms())

    @property
    def _held(self) -> Held:
        """Tokens of which a change takes or keeps the state."""
        pool = self._pool
        tokens = sum(each.computed for each in self._residency.active.values()) + pool.cached_cells
        # Buffers of their own are read whole.
        return Held(tokens if pool.in_id_order else pool.used_cells, tokens)

    def _waits_for_reader(self, now: float) -> bool:
        """Whether a reader is about to ask again, for which another layout may be better; or it would wait for this.

        In the pool alone, which holds all: other layouts can be too small for what waits.
        """
        is_patient = self._policy.current == self._policy.pool and now < self._wanted_ms + MOST_PUT_OFF_MS
        return is_patient and self._residency.awaits_reader(now)

    def _prepares(self, pause_ms: float, now: float, neighbour_load: float) -> bool:
        """Whether rows run ahead first of a pause that could begin now."""
        if self._preparations < MAX_PREPARATIONS and self._is_felt(pause_ms, now, neighbour_load):
            self._preparations += 1
            return True
        self._preparations = 0
        return False

    def _is_felt(self, pause_ms: float, now: float, neighbour_load: float) -> bool:
        """Whether readers would notice a change that begins now, and not if their rows ran ahead first."""
        if self._residency.has_outgrown:
            return False
        rows = [each for each in self._residency.active.values() if each.status is Status.DECODING and each.is_paced]
        if self._pool.free_cells < len(rows) * MAX_STEPS:
            return False  # they cannot run ahead
        return self._scheduler.is_felt(pause_ms, rows, self._pool.used_cells, now, neighbour_load)

    def _change(self, layout: Layout, now: float) -> None:
        self._outbox.flush()  # it takes longer than any token can wait
        policy, held = self._policy, self._held
        expected_ms = policy.pause_ms(layout, held)
        most_cache = MOST_CARRIED_CACHE if layout == policy.pool else 0
        luggage = self._residency.carry_out(now, shares=layout.is_unified, most_cache=most_cache)
        params = self._base if layout == policy.pool else sizing.layout_params(self._base, layout)
        keep = self._base if layout.is_unified and layout != policy.pool else None
        try:
            self._context.remake(params, keep=keep)
        except ModelError as error:
            if layout == policy.pool:
                raise
            _log.warning("the KV memory keeps its layout: %s", error)
            layout = policy.give_up()
        self._pool.attach(is_for_now=layout != policy.pool)
        self._scheduler.targets = attrs.evolve(
            self._scheduler.targets,
            mixes_prompts=layout.is_unified,
            has_flash_attention=self._base.flash_attn != "off" and not layout.is_plain,
        )
        self._residency.carry_in(luggage, now)
        took_ms = now_ms() - now
        made_ms = self._context.opened_ms
        policy.learn(layout, held, made_ms, took_ms - made_ms)
        policy.changed(layout, held)
        metrics = self._metrics
        metrics.kv_layout_changes_total += 1
        metrics.kv_cells_total = metrics.cache.total_capacity = self._context.n_ctx
        _log.debug(
            "KV memory: %s of %d cells, for %d sequences and %d cached, with %s attention; changed in %.0f ms, "
            "%.0f expected",
            "one buffer" if layout.is_unified else f"{layout.ids} buffers", layout.share, len(luggage.running),
            len(luggage.cached), "plain" if layout.is_plain else "flash", took_ms, expected_ms,
        )  # fmt: skip
