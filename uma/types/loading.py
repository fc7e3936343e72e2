"""How far the loading of a model has come, for all that answer meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs

from uma.errors import Loading

MIN_RETRY_MS, MAX_RETRY_MS = 100, 5_000
"""Bounds (ms) of the hint when to try again: an estimate from the first few percent can be far off."""


@attrs.frozen
class LoadState:
    """How far the load of a model is."""

    percent: int = 0
    """How much of its weights is loaded; 0 until its file is open, 99 once what is left is to make its context."""
    waits_for: str = ""
    """What it waits for before it begins, in words; empty: nothing."""

    @property
    def step(self) -> str:
        """`40 %`, what is done before or behind that, or `waits for` something."""
        steps = {0: "opens its file", 99: "makes its context"}
        return self.waits_for or steps.get(self.percent, f"{self.percent} %")

    @property
    def words(self) -> str:
        """`loading, 40 %` and the like: the same wherever people are told of it."""
        return self.step if self.waits_for else f"loading, {self.step}"


@attrs.define(eq=False)
class LoadProgress:
    """How much of a model's weights is in memory. The loading thread reports; any thread reads."""

    on_percent: Callable[[int], None] | None = None
    """Called in the loading thread with each new whole percent. It must not raise."""
    percent: int = attrs.field(default=0, init=False)
    _began_sec: float = attrs.field(factory=time.monotonic, init=False)

    def report(self, fraction: float) -> None:
        """`fraction`, 0 to 1, of all weights is loaded. What comes after the weights takes the last percent."""
        percent = min(99, int(100 * fraction))
        if percent > self.percent:
            self.percent = percent
            if self.on_percent is not None:
                self.on_percent(percent)

    def refusal(self) -> Loading:
        """The error for whatever needs the model now; `retry_after_ms` expects the rest at the rate so far."""
        elapsed_ms = 1000 * (time.monotonic() - self._began_sec)
        left_ms = elapsed_ms * (100 - self.percent) / self.percent if self.percent else MAX_RETRY_MS
        return Loading(
            f"the model is still being loaded ({LoadState(self.percent).step}); try again",
            retry_after_ms=round(min(max(left_ms, MIN_RETRY_MS), MAX_RETRY_MS)),
        )
