"""Health probes on the decode thread: whether a token really comes out of the engine.

A probe is no request. The next token that any sequence samples answers it; where none is decoding, one token is
computed for it, between two ticks, in a sequence id that is empty again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

from uma.engine.worker.runner import ModelRunner
from uma.metrics import EngineMetrics

Answer = Callable[[bool], None]
"""Called on the decode thread: whether a token was generated."""


class Probes:
    """Probes that wait for their answer. Belongs to the decode thread."""

    def __init__(self, runner: ModelRunner, metrics: EngineMetrics) -> None:
        self._runner = runner
        self._metrics = metrics
        self.waiting: list[Answer] = []

    def add(self, answer: Answer) -> None:
        """Take a probe on."""
        self.waiting.append(answer)

    def run(self) -> None:
        """Compute a token for the probes that wait. Without a free KV cell they wait for a sequence's token."""
        if self._runner.probe():
            self.answer(is_alive=True)

    def answer(self, *, is_alive: bool) -> None:
        """A token was generated, or none will be any more."""
        waiting, self.waiting = self.waiting, []
        self._metrics.health_probes_total += len(waiting)
        for answer in waiting:
            answer(is_alive)
