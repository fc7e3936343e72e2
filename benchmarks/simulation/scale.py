"""How hit rate, attainment and events change with the number of workers, the events' delay and the block size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.simulation.cluster import Cluster, ClusterOutcome, Setup
from benchmarks.simulation.machines import Machine

STUDY_WORKERS = 100
"""Workers at which delay and block size are varied."""
DELAYS_MS = (1.0, 10.0, 50.0, 1_000.0)
BLOCK_SIZES = (16, 64, 256)
EVENT_BYTES, BLOCK_BYTES = 85, 73
"""Of an event and of each block in it, in the JSON that Dynamo's indexer takes."""


def setups(workers: Sequence[int], seconds: float) -> Iterator[Setup]:
    """All experiments: each number of workers under both routers, then one thing varied at a time."""
    for count in workers:
        for router in ("kv", "round robin"):
            yield Setup(count, router, seconds=seconds)
    most = min(max(workers), STUDY_WORKERS)
    for delay_ms in DELAYS_MS:
        yield Setup(most, "kv", (delay_ms, delay_ms), seconds=seconds)
    for size in BLOCK_SIZES[1:]:
        yield Setup(most, "kv", block_size=size, seconds=seconds)


def run(machine: Machine, workers: Sequence[int], seconds: float, console: Console) -> list[ClusterOutcome]:
    """Run them all, and tell of each as it ends."""
    outcomes = []
    for setup in setups(workers, seconds):
        outcomes.append(Cluster(machine, setup).run())
        console.print(f"{setup.workers} workers, {setup.router}: hit rate {outcomes[-1].hit_rate:.1%}", style="dim")
    return outcomes


def bytes_per_second(outcome: ClusterOutcome) -> float:
    """What the router receives."""
    return outcome.events_per_second * EVENT_BYTES + outcome.blocks_per_second * BLOCK_BYTES


def show(outcomes: Sequence[ClusterOutcome], console: Console) -> None:
    """The table, as Markdown."""
    table = Table(box=box.MARKDOWN)
    for column in ("workers", "router", "events late by", "block size"):
        table.add_column(column)
    for column in ("requests", "hit rate", "SLO attainment", "TTFT p50", "TTFT p95", "events/s", "blocks/s", "MB/s"):
        table.add_column(column, justify="right")
    for each in outcomes:
        low, high = each.setup.event_delay_ms
        is_kv = each.setup.router == "kv"
        table.add_row(
            str(each.setup.workers), each.setup.router,
            (f"{low:g} ms" if low == high else f"{low:g} to {high:g} ms") if is_kv else "",
            str(each.setup.block_size) if is_kv else "",
            f"{each.requests:,}", f"{each.hit_rate:.1%}", f"{each.attained:.1%}",
            f"{each.ttft_p50_ms:,.0f} ms", f"{each.ttft_p95_ms:,.0f} ms",
            *((f"{each.events_per_second:,.0f}", f"{each.blocks_per_second:,.0f}",
               f"{bytes_per_second(each) / 1e6:.2f}") if is_kv else ("", "", "")),
        )  # fmt: skip
    console.print(table)


def plot(outcomes: Sequence[ClusterOutcome], path: Path) -> None:
    """Hit rate and attainment by number of workers, and what the router receives."""
    import matplotlib  # noqa: PLC0415  (only the plot needs it)

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    plain = [each for each in outcomes if attrs.evolve(each.setup, workers=1, router="kv") == _usual(each)]
    figure, (quality, delay, load) = plt.subplots(1, 3, figsize=(14, 3.8))
    for router in dict.fromkeys(each.setup.router for each in plain):
        group = {each.setup.workers: each for each in plain if each.setup.router == router}
        quality.plot(list(group), [each.hit_rate for each in group.values()], "o-", label=f"hit rate, {router}")
        delay.plot(list(group), [each.ttft_p95_ms for each in group.values()], "o-", label=router)
        quality.plot(list(group), [each.attained for each in group.values()], "s:", label=f"SLO attained, {router}")
    routed = {each.setup.workers: each for each in plain if each.setup.router == "kv"}
    load.plot(list(routed), [each.blocks_per_second for each in routed.values()], "o-", label="blocks a second")
    load.plot(list(routed), [each.events_per_second for each in routed.values()], "o-", label="events a second")
    quality.set(title="Hit rate and attainment", xlabel="workers", xscale="log", ylim=(0, 1.05))
    delay.set(title="First token p95, ms", xlabel="workers", xscale="log", yscale="log")
    load.set(title="What the router takes in", xlabel="workers", xscale="log", yscale="log")
    for axis in (quality, delay, load):
        axis.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _usual(outcome: ClusterOutcome) -> Setup:
    return Setup(1, "kv", seconds=outcome.setup.seconds)
