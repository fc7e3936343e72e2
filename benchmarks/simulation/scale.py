"""How hit rate, attainment and events change with the number of workers, and with delay, block size, load and the
router's own speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.simulation.cluster import Cluster, ClusterOutcome, Setup
from benchmarks.simulation.machines import Machine
from benchmarks.simulation.router import ROUTERS

STUDY_WORKERS = 100
"""Workers at which all else is varied."""
RATES = (2.0, 3.0)
"""Times the requests a second."""
ROUTER_RATES = (0.1, 0.05)
"""Of the router's speed: as if it were slower, or as many times more workers sent their events to it."""
DELAYS_MS = (1.0, 10.0, 50.0, 1_000.0)
BLOCK_SIZES = (16, 64, 256)
EVENT_BYTES, BLOCK_BYTES = 85, 73
"""Of an event and of each block in it, in the JSON that Dynamo's indexer takes."""


def setups(workers: Sequence[int], base: Setup) -> Iterator[Setup]:
    """All experiments: each number of workers under both routers, then one thing varied at a time."""
    for count in workers:
        for router in ROUTERS:
            yield attrs.evolve(base, workers=count, router=router)
    most = attrs.evolve(base, workers=min(max(workers), STUDY_WORKERS))
    for delay_ms in DELAYS_MS:
        yield attrs.evolve(most, event_delay_ms=(delay_ms, delay_ms))
    for size in BLOCK_SIZES[1:]:
        yield attrs.evolve(most, block_size=size)
    for times in RATES:
        for router in ROUTERS:
            yield attrs.evolve(most, router=router, requests_per_second=times * base.requests_per_second)
    for share in ROUTER_RATES:
        yield attrs.evolve(most, router_blocks_per_second=share * base.router_blocks_per_second)


def run(machine: Machine, workers: Sequence[int], base: Setup, console: Console) -> list[ClusterOutcome]:
    """Run them all, as `base` but for what each varies, and tell of each as it ends."""
    outcomes = []
    for setup in setups(workers, base):
        outcomes.append(Cluster(machine, setup).run())
        console.print(f"{setup.workers} workers, {setup.router}: hit rate {outcomes[-1].hit_rate:.1%}", style="dim")
    return outcomes


def bytes_per_second(outcome: ClusterOutcome) -> float:
    """What the router receives."""
    return outcome.events_per_second * EVENT_BYTES + outcome.blocks_per_second * BLOCK_BYTES


def show(outcomes: Sequence[ClusterOutcome], console: Console) -> None:
    """The table, as Markdown."""
    table = Table(box=box.MARKDOWN)
    for column in ("workers", "requests/s each", "router", "its blocks/s", "events late by", "block size"):
        table.add_column(column)
    for column in ("requests", "refused", "hit rate", "SLO attainment", "TTFT p50", "TTFT p95", "events/s", "blocks/s",
                   "MB/s", "router behind p99"):  # fmt: skip
        table.add_column(column, justify="right")
    for each in outcomes:
        low, high = each.setup.event_delay_ms
        is_kv = each.setup.router == "kv"
        table.add_row(
            str(each.setup.workers), f"{each.requests_per_second:.1f}", each.setup.router,
            f"{each.setup.router_blocks_per_second:,.0f}" if is_kv else "",
            (f"{low:g} ms" if low == high else f"{low:g} to {high:g} ms") if is_kv else "",
            str(each.setup.block_size) if is_kv else "",
            f"{each.requests:,}", f"{each.refused:,}", f"{each.hit_rate:.1%}", f"{each.attained:.1%}",
            f"{each.ttft_p50_ms:,.0f} ms", f"{each.ttft_p95_ms:,.0f} ms",
            *((f"{each.events_per_second:,.0f}", f"{each.blocks_per_second:,.0f}",
               f"{bytes_per_second(each) / 1e6:.2f}", f"{each.router_behind_p99_ms:,.1f} ms") if is_kv else [""] * 4),
        )  # fmt: skip
    console.print(table)


def plot(outcomes: Sequence[ClusterOutcome], path: Path) -> None:
    """Hit rate and attainment by number of workers, and what the router receives."""
    import matplotlib  # noqa: PLC0415  (only the plot needs it)

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    base = outcomes[0].setup
    plain = [each for each in outcomes if attrs.evolve(each.setup, workers=base.workers, router=base.router) == base]
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
