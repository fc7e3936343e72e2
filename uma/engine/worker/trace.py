"""The scheduler's trace: one line for each decision, with the keys and ids of the requests it is about.

It is written where the logger `uma.engine.scheduler` is at DEBUG when the engine opens; otherwise every method returns
at once. The `recorder`, where there is one, takes the thread's spans. Belongs to the decode thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from uma.engine.policy import CostModel, Plan, State
from uma.engine.recorder import Recorder
from uma.engine.worker.account import Totals
from uma.engine.worker.sequence import Sequence
from uma.metrics import EngineMetrics


class Trace:
    """Writes lines with `write`; None turns the trace off."""

    __slots__ = ("_write", "is_on", "recorder")

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        self._write = write
        self.is_on = write is not None
        self.recorder: Recorder | None = None
        """Where spans go while a trace is recorded. Set by the Trio thread."""

    def queued(self, sequence: Sequence) -> None:
        """A request came."""
        if self._write:
            self._write(f"queue {_name(sequence)} lane={sequence.lane} tokens={len(sequence.tokens)}")

    def started(self, sequence: Sequence) -> None:
        """Record that it got a slot, for the first time or again."""
        if self._write:
            self._write(f"start {_name(sequence)} tokens={len(sequence.tokens)} cached={sequence.computed}")

    def preempted(self, sequence: Sequence) -> None:
        """Record that it lost its slot."""
        if self._write:
            kept = sequence.kept is not None
            self._write(f"preempt {_name(sequence)} tokens={len(sequence.tokens)} kept={kept}")

    def ended(self, sequence: Sequence, how: str) -> None:
        """Record its end: a finish reason, or an error's code."""
        if self._write:
            self._write(f"end {_name(sequence)} reason={how} generated={sequence.generated}")

    def batch(self, kind: str, tokens: int, sequences: int, took_ms: float, cells: int) -> None:
        """A batch was computed."""
        if self._write:
            self._write(f"batch {kind}={tokens} sequences={sequences} ms={took_ms:.2f} cells={cells}")

    def planned(
        self, plan: Plan, state: State, active: Mapping[int, Sequence], waiting: int, cost: CostModel, budget_ms: float
    ) -> None:
        """The decision, row by row: which decode, which are prefilled and by how much, which wait or are preempted."""
        if not self._write or not active:
            return

        def name(key: int) -> str:
            return f"{key}={active[key].request.id!r}"

        chunks = [(tokens, active[key].computed) for key, tokens in plan.prefill]
        decode_ms = cost.decode_ms(len(plan.decode), state.used_cells)
        tokens = sum(count for count, _ in chunks)
        position = sum(count * position for count, position in chunks) / max(1, tokens)
        expected_ms = plan.steps * decode_ms + cost.prefill_ms(tokens, position)
        self._write(
            f"plan decode=[{', '.join(map(name, plan.decode))}]"
            f" prefill=[{', '.join(f'{name(key)}:{tokens}' for key, tokens in plan.prefill)}]"
            f" steps={plan.steps} unread={len(state.prefilling)} held={plan.held}"
            f" preempted=[{', '.join(map(name, plan.preempt))}]"
            f" waiting={waiting} budget_ms={budget_ms:g} expected_ms={expected_ms:.2f}"
            f" cells={state.used_cells} free={state.free_cells}"
        )


@attrs.frozen
class Instruments:
    """What the decode thread counts and writes down of its work."""

    metrics: EngineMetrics
    totals: Totals
    trace: Trace


def _name(sequence: Sequence) -> str:
    """The engine's key, which plans name, and the request's own id."""
    return f"key={sequence.key} request={sequence.request.id!r}"
