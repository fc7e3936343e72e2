"""A small simulated machine for tests of the policy: a true cost function, requests, and the loop of ticks.

The policy under test is the real one; only the machine is made up. Time is simulated milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from benchmarks.simulation.rows import PlainRow
from uma.engine.delivery.pacing import reader_ms
from uma.engine.policy import Plan, Scheduler, State, Targets
from uma.engine.policy.lead import lead_ms, max_lead_ms, steps_lacking
from uma.engine.policy.order import due_ms
from uma.engine.policy.scheduler import mixed_position
from uma.engine.policy.state import FairShares
from uma.engine.policy.tuning import TUNING

ONE_CLIENT = FairShares().came("one")
GAP_MS = 0.2
"""Between two ticks."""


def make_row(key: int, **fields: object) -> PlainRow:
    """A decoding row of the normal lane, unless `fields` say otherwise."""
    plain: dict[str, object] = {
        "key": key,
        "lane": 0,
        "arrived_ms": 0.0,
        "prompt_tokens": 16,
        "prefill_left": 0,
        "target_ttft_ms": None,
        "target_tbt_ms": 80.0,
        "generated": 0 if fields.get("prefill_left") else 2,
        "fair_share": ONE_CLIENT,
    }
    return PlainRow(**(plain | fields))  # type: ignore[arg-type]


def can_be_covered(piece_ms: float, pace: float, step_ms: float) -> bool:
    """Whether enough steps make a lead that covers such a piece."""
    return TUNING.safety * piece_ms + step_ms <= max_lead_ms(pace)


@attrs.frozen
class Machine:
    """What a batch really takes: decode rows alone, or a chunk of a prompt alone."""

    base_ms: float = 2.0
    row_ms: float = 0.6
    token_ms: float = 0.9
    cell_ms: float = 2e-5
    """For each token of the batch and each token that it attends to."""
    slowdown: float = 1.0
    mixing: float = 1.0
    """What decode rows add to a prompt's piece in the same batch, of what they take alone."""

    def decode_ms(self, rows: int, cells: int) -> float:
        """Milliseconds of a batch of decode rows, with so many cells in use."""
        return (self.base_ms + rows * (self.row_ms + cells * self.cell_ms)) * self.slowdown if rows else 0.0

    def prefill_ms(self, tokens: int, position: float) -> float:
        """Milliseconds of a chunk after `position` tokens of its prompt."""
        attended = position + tokens / 2
        return (self.base_ms + tokens * (self.token_ms + attended * self.cell_ms)) * self.slowdown if tokens else 0.0

    def mixed_ms(self, rows: int, cells: int, tokens: int, position: float) -> float:
        """Milliseconds of a decode step and a chunk in one batch."""
        return self.prefill_ms(tokens, position) + self.mixing * self.decode_ms(rows, cells)


@attrs.define
class Asked:
    """One simulated request, and what came of it."""

    row: PlainRow
    output_tokens: int
    given_ms: list[float] = attrs.field(factory=list)

    @property
    def is_done(self) -> bool:
        """Whether all its tokens were given."""
        return len(self.given_ms) >= self.output_tokens

    @property
    def gaps_ms(self) -> list[float]:
        """Times between tokens."""
        return [after - before for before, after in zip(self.given_ms, self.given_ms[1:], strict=False)]


@attrs.frozen
class Tick:
    """A tick that ran: decode rows, then prefill, or rows and prefill in one batch."""

    plan: Plan
    rows: int
    prefill_tokens: int
    began_ms: float
    decode_ms: float
    took_ms: float


class World:
    """The scheduler and a machine, with as many KV cells as rows want."""

    def __init__(self, machine: Machine, *, tick_budget_ms: float = 80.0, batch_tokens: int = 2048) -> None:
        self.machine = machine
        self.scheduler = Scheduler(Targets(tick_budget_ms, batch_tokens, 64))
        self.now_ms = 1.0
        self.cells = 0
        self.running: dict[int, Asked] = {}
        self.ticks: list[Tick] = []
        self.shares = FairShares()
        self._next_key = 1

    @classmethod
    def of_known(cls, machine: Machine) -> World:
        """A machine that the scheduler has seen decode and prefill, in batches of any size."""
        world = cls(machine)
        for _ in range(4):
            for tokens in (8, 16, 32, 64, 128, 256, 512):
                world.scheduler.cost.observe_prefill(tokens, 0, machine.prefill_ms(tokens, 0))
            for rows in (1, 2, 8, 16, 32, 64):
                world.scheduler.cost.observe_decode(rows, 500, machine.decode_ms(rows, 500))
        return world

    def ask(
        self,
        prompt: int,
        output: int,
        *,
        lane: int = 0,
        tbt: float | None = None,
        ttft: float | None = None,
        client: str = "one",
    ) -> Asked:
        """A request that arrives now. It names the targets that are given."""
        row = make_row(
            self._next_key,
            lane=lane,
            arrived_ms=self.now_ms,
            prompt_tokens=prompt,
            prefill_left=prompt,
            target_tbt_ms=tbt or 80.0,
            has_own_target=tbt is not None,
            target_ttft_ms=ttft,
            fair_share=self.shares.came(client),
        )
        row.due_ms = due_ms(row, self.scheduler.cost)
        self._next_key += 1
        asked = self.running[row.key] = Asked(row, output)
        return asked

    def tick(self) -> Tick:
        """Plan; compute decode rows and hand their tokens out, then prefill. No plan is empty while any row can run."""
        decoding = [each.row for each in self.running.values() if not each.row.prefill_left]
        prefilling = [each.row for each in self.running.values() if each.row.prefill_left]
        plan = self.scheduler.plan(State(decoding, prefilling, 10**9, self.cells), self.now_ms)
        assert plan.decode or plan.prefill, "nothing was planned although there is work"
        began, cost = self.now_ms, self.scheduler.cost
        rows, tokens, decode_ms = len(plan.decode), sum(count for _, count in plan.prefill), 0.0
        step, steps = 0, plan.steps if rows else 0
        while step < steps:
            keys = [key for key in plan.decode if key in self.running]
            if not keys:
                break
            self.cells += len(keys)
            step_ms = self.machine.decode_ms(len(keys), self.cells)
            self.now_ms += step_ms
            decode_ms += step_ms
            cost.observe_decode(len(keys), self.cells, step_ms)
            for key in keys:
                self._give(key, plan.pace_ms)
            step += 1
            if step == plan.steps:
                steps += self._steps_lacking(plan, step_ms)
        if tokens:
            self.cells += tokens
            position = sum(count * self.running[key].row.position for key, count in plan.prefill) / tokens
            keys = [key for key in plan.decode if key in self.running] if plan.is_mixed else []
            if keys:
                self.cells += len(keys)
                took = self.machine.mixed_ms(len(keys), self.cells, tokens, position)
                attended = mixed_position(position, tokens, [self.running[key].row.position for key in keys])
                cost.observe_mixed(len(keys), self.cells, tokens, attended, took)
            else:
                took = self.machine.prefill_ms(tokens, position)
                cost.observe_prefill(tokens, position, took)
            self.now_ms += took
            for key in keys:
                self._give(key, plan.pace_ms)
            for key, count in plan.prefill:
                row = self.running[key].row
                row.prefill_left -= count
                row.fair_share.was_read(count)
                if row.prefill_left == 0:
                    self._give(key, plan.pace_ms)
        tick = Tick(plan, rows, tokens, began, decode_ms, self.now_ms - began)
        self.now_ms += GAP_MS
        self.ticks.append(tick)
        return tick

    def _steps_lacking(self, plan: Plan, step_ms: float) -> int:
        rows = [self.running[key].row for key in plan.decode if key in self.running]
        lead = lead_ms((row for row in rows if row.lane >= 0 and row.has_reader), plan.pace_ms, self.now_ms)
        return steps_lacking(plan.needed_ms, lead, plan.pace_ms, step_ms)

    def _give(self, key: int, pace_ms: float) -> None:
        asked = self.running[key]
        given_ms = reader_ms(asked.row.last_token_ms, self.now_ms, pace_ms)
        asked.given_ms[:] = [min(each, given_ms) for each in asked.given_ms]  # what is due takes along what waits
        asked.given_ms.append(given_ms)
        asked.row.had_token(given_ms)
        asked.row.fair_share.was_given(1)
        if asked.is_done:
            self.cells -= asked.row.prompt_tokens + asked.output_tokens - 1
            self.shares.left(asked.row.fair_share)
            del self.running[key]

    def run(self, until: Iterable[Asked] | None = None, *, most_ticks: int = 5_000) -> None:
        """Tick until these (or all) requests are done."""
        wanted = list(self.running.values()) if until is None else list(until)
        for _ in range(most_ticks):
            if all(each.is_done for each in wanted):
                return
            self.tick()
        raise AssertionError(f"not done after {most_ticks} ticks")
