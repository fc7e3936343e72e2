"""The engine as the live view sees it: one snapshot every quarter of a second, shared by all viewers.

There is no task behind it: the first viewer of each quarter takes the snapshot, the others are given the same one.
Without viewers it costs nothing. Speeds, shares and percentiles are `metrics.LiveFigures`; counters go along as they
are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import trio

from uma.http.exchange import Exchange
from uma.http.page.answers import event
from uma.http.page.processes import Processes
from uma.metrics import LiveSeries
from uma.protocol.converter import unstructure
from uma.types import Activity, Source

INTERVAL_SEC = 0.25

METRICS = (
    "tokens_generated_total",
    "prefill_tokens_total",
    "preemptions_total",
    "requests_total",
    "kv_cells_used",
    "kv_cells_total",
    "cache_evictable_size",
    "cache_ram_bytes",
)
"""What of the engine's metrics goes along as it is."""


@attrs.define(eq=False)
class LiveFeed:
    """The frames of one source. Trio thread."""

    source: Source
    processes: Processes
    activity: Activity = attrs.field(default=Activity((), 0, 0, 0), init=False)
    """Activity of the newest frame."""
    _slot: int = attrs.field(default=-1, init=False)
    _series: LiveSeries = attrs.field(factory=LiveSeries, init=False)
    _series_of: dict[str, LiveSeries] = attrs.field(factory=dict, init=False)
    """Series of each of several models, by its name."""
    _told: Mapping[str, Any] = attrs.field(factory=dict, init=False)
    """Members of the frame that all viewers see."""
    _frame: bytes = attrs.field(default=b"", init=False)
    """The frame of viewers that see all."""
    _taking: trio.Lock = attrs.field(factory=trio.Lock, init=False)

    async def look(self) -> None:
        """Have the `activity` of this quarter of a second."""
        async with self._taking:
            slot = _slot_now()
            if slot != self._slot:
                metrics = await self.source.metrics()
                self.activity = self.processes.named(await self.source.activity())
                slots = 0 if self.processes.gateway.models else self.source.info.limits.max_sequences
                figures = self._series.figures(slot * INTERVAL_SEC, metrics, self.activity, slots)
                self._told = {
                    "at_ms": round(slot * INTERVAL_SEC * 1000),
                    "figures": attrs.asdict(figures),
                    "metrics": {name: metrics[name] for name in METRICS if name in metrics},
                    "models": await self._of_models(slot * INTERVAL_SEC, metrics.get("models", {})),
                }
                self._frame, self._slot = self._event(self.activity), slot

    async def _of_models(self, at_sec: float, of_each: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The figures of each of several models that is loaded, by its metrics, and the numbers of its requests; of one
        that is waited for, how far it is.
        """
        models, told = self.processes.gateway.models, dict[str, dict[str, Any]]()

        async def tell(name: str, source: Source) -> None:
            activity, metrics = await source.activity(), of_each.get(name, {})
            series = self._series_of.setdefault(name, LiveSeries())
            figures = series.figures(at_sec, metrics, activity, source.info.limits.max_sequences)
            numbers = [each.number for each in (*activity.running, *activity.waiting)]
            cells = {gauge: metrics.get(gauge, 0) for gauge in ("kv_cells_used", "kv_cells_total")}
            told[name] = {"name": name, "figures": attrs.asdict(figures), "requests": numbers, **cells}

        listed = () if models is None else models.listed()
        async with trio.open_nursery() as nursery:
            for each in listed:
                if models is not None and (source := models.loaded(each.name)) is not None:
                    nursery.start_soon(tell, each.name, source)
                elif each.waiting or each.state == "loading":
                    far = {"load": each.load.words, "waiting": each.waiting}
                    told[each.name] = {"name": each.name, "requests": [], **far}
        return [told[each.name] for each in listed if each.name in told]

    async def frame(self, http: Exchange) -> bytes:
        """The frame of this quarter of a second, as an event, with what this viewer can see of others' requests."""
        await self.look()
        activity = self.processes.gateway.shown(self.activity, http)
        return self._frame if activity is self.activity else self._event(activity)

    def _event(self, activity: Activity) -> bytes:
        return event("frame", {**self._told, "activity": unstructure(activity)})

    async def next_frame(self, http: Exchange) -> bytes:
        """The frame of the next quarter of a second."""
        await trio.sleep_until((_slot_now() + 1) * INTERVAL_SEC)
        return await self.frame(http)


def _slot_now() -> int:
    return int(trio.current_time() / INTERVAL_SEC + 1e-6)
