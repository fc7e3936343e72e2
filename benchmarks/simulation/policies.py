"""The two policies that are compared: the engine's own scheduler, and the usual one. Both give the engine's `Plan`."""

from __future__ import annotations

from benchmarks.simulation.machines import READ_TOKENS
from benchmarks.simulation.rows import PlainRow
from uma.engine.policy import CostModel, Plan, Scheduler, State, Targets
from uma.engine.policy.order import admission_key


class Greedy:
    """The usual policy: a token for every row, and prompts in order of arrival until the batch is full."""

    is_uma = False

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self.cost = CostModel()

    def place(self, row: PlainRow, now_ms: float) -> tuple[float, ...]:
        """Sorts those that wait."""
        return (row.arrived_ms, row.key)

    def plan(self, state: State, now_ms: float) -> Plan:
        """One batch of everything."""
        decode = tuple(row.key for row in state.decoding)
        left = min(READ_TOKENS - len(decode), state.free_cells - len(decode))
        prefill = []
        for row in sorted(state.prefilling, key=lambda each: each.key):
            count = min(row.prefill_left, left)
            if count <= 0:
                break
            prefill.append((row.key, count))
            left -= count
        return Plan(decode, tuple(prefill))


class Uma:
    """The engine's scheduler."""

    is_uma = True

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self._scheduler = Scheduler(targets)
        self.cost = self._scheduler.cost

    def place(self, row: PlainRow, now_ms: float) -> tuple[float, ...]:
        """Sorts those that wait."""
        return admission_key(row, now_ms)

    def plan(self, state: State, now_ms: float) -> Plan:
        """The plan, whole: decode steps, pace and pieces of prompts."""
        return self._scheduler.plan(state, now_ms)


Policy = Uma | Greedy


def default_targets() -> Targets:
    """The configuration's defaults."""
    return Targets(tick_budget_ms=80.0, batch_tokens=2048, start_tokens=64, solo_tokens=READ_TOKENS)
