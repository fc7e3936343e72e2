"""How hit rate, attainment and events change with the number of workers, and with delay, block size, load, the router's
own speed and the number of checkpoints.

Each outcome is on disk as soon as it is there: a run broken off goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import cattrs
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.simulation.cluster import Cluster, ClusterOutcome, Setup
from benchmarks.simulation.machines import Machine
from benchmarks.simulation.router import ROUTERS

BEGIN, END = "<!-- scale: written by `python -m benchmarks.simulate --workers N --publish` -->", "<!-- end of scale -->"
STUDY_WORKERS = 100
"""Workers at which all else is varied."""
RATES = (2.0, 3.0)
"""Times the requests a second."""
ROUTER_RATES = (0.1, 0.05)
"""Of the router's speed: as if it were slower, or as many times more workers sent their events to it."""
DELAYS_MS = (1.0, 10.0, 50.0, 1_000.0)
BLOCK_SIZES = (16, 64, 256)
CHECKPOINTS = (80, 20)
"""Of a model whose state takes 50 MiB, as that of Qwen 3.5 9B does, in 4 GiB of memory and in 1."""
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
    for count in CHECKPOINTS:
        yield attrs.evolve(most, checkpoints=count)


def read(path: Path) -> dict[Setup, ClusterOutcome]:
    """The outcomes that a file keeps; none where there is no file."""
    kept = cattrs.structure(json.loads(path.read_text()) if path.exists() else [], list[ClusterOutcome])
    return {each.setup: each for each in kept}


def run(machine: Machine, workers: Sequence[int], base: Setup, kept: Path, console: Console) -> list[ClusterOutcome]:
    """Run all that `kept` does not have, as `base` but for what each varies; keep and tell each as it ends."""
    outcomes = read(kept)
    wanted = list(setups(workers, base))
    for setup in wanted:
        if setup not in outcomes:
            outcomes[setup] = found = Cluster(machine, setup).run()
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(cattrs.unstructure(list(outcomes.values())), indent=1) + "\n")
            console.print(f"{setup.workers} workers, {setup.router}: hit rate {found.hit_rate:.1%}", style="dim")
    return [outcomes[setup] for setup in wanted]


def bytes_per_second(outcome: ClusterOutcome) -> float:
    """What the router receives."""
    return outcome.events_per_second * EVENT_BYTES + outcome.blocks_per_second * BLOCK_BYTES


WORDS = ("workers", "requests/s each", "router", "its blocks/s", "events late by", "block size", "checkpoints")
FIGURES = (
    "requests", "refused", "hit rate", "SLO attainment", "TTFT p50", "TTFT p95", "events/s", "blocks/s", "MB/s",
    "router behind p99",
)  # fmt: skip


def cells(outcome: ClusterOutcome) -> tuple[str, ...]:
    """An outcome's row of the table: `WORDS`, then `FIGURES`. What a router without events does not have is empty."""
    setup, is_kv = outcome.setup, outcome.setup.router == "kv"
    low, high = setup.event_delay_ms
    late = f"{low:g} ms" if low == high else f"{low:g} to {high:g} ms"
    told = (f"{outcome.events_per_second:,.0f}", f"{outcome.blocks_per_second:,.0f}",
            f"{bytes_per_second(outcome) / 1e6:.2f}", f"{outcome.router_behind_p99_ms:,.1f} ms")  # fmt: skip
    return (
        str(setup.workers), f"{outcome.requests_per_second:.1f}", setup.router,
        *((f"{setup.router_blocks_per_second:,.0f}", late, str(setup.block_size)) if is_kv else [""] * 3),
        str(setup.checkpoints or ""),
        f"{outcome.requests:,}", f"{outcome.refused:,}", f"{outcome.hit_rate:.1%}", f"{outcome.attained:.1%}",
        f"{outcome.ttft_p50_ms:,.0f} ms", f"{outcome.ttft_p95_ms:,.0f} ms", *(told if is_kv else [""] * 4),
    )  # fmt: skip


def markdown(outcomes: Sequence[ClusterOutcome]) -> str:
    """The table, for the published page."""
    rules = ["---"] * len(WORDS) + ["---:"] * len(FIGURES)
    rows = [(*WORDS, *FIGURES), rules, *map(cells, outcomes)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def show(outcomes: Sequence[ClusterOutcome], console: Console) -> None:
    """Print the table."""
    table = Table(box=box.MARKDOWN)
    for column in WORDS:
        table.add_column(column)
    for column in FIGURES:
        table.add_column(column, justify="right")
    for each in outcomes:
        table.add_row(*cells(each))
    console.print(table)


def plot(outcomes: Sequence[ClusterOutcome], path: Path) -> None:
    """Hit rate, attainment and first tokens by number of workers, what the router receives, and what blocks change."""
    import matplotlib  # noqa: PLC0415  (only the plot needs it)

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    base = outcomes[0].setup
    plain = [each for each in outcomes if attrs.evolve(each.setup, workers=base.workers, router=base.router) == base]
    figure, ((quality, delay), (load, blocks)) = plt.subplots(2, 2, figsize=(11, 7.6))
    for router in dict.fromkeys(each.setup.router for each in plain):
        group = {each.setup.workers: each for each in plain if each.setup.router == router}
        quality.plot(list(group), [each.hit_rate for each in group.values()], "o-", label=f"hit rate, {router}")
        delay.plot(list(group), [each.ttft_p95_ms for each in group.values()], "o-", label=router)
        quality.plot(list(group), [each.attained for each in group.values()], "s:", label=f"SLO attained, {router}")
    routed = {each.setup.workers: each for each in plain if each.setup.router == "kv"}
    load.plot(list(routed), [each.blocks_per_second for each in routed.values()], "o-", label="blocks a second")
    load.plot(list(routed), [each.events_per_second for each in routed.values()], "o-", label="events a second")
    study = max(each.setup.workers for each in outcomes if each.setup.workers <= STUDY_WORKERS)
    sizes = {
        each.setup.block_size: each
        for each in outcomes
        if attrs.evolve(each.setup, block_size=base.block_size) == attrs.evolve(base, workers=study)
    }
    blocks.plot(list(sizes), [each.hit_rate for each in sizes.values()], "o-", label="hit rate")
    most = max(each.blocks_per_second for each in sizes.values())
    blocks.plot(
        list(sizes),
        [each.blocks_per_second / most for each in sizes.values()],
        "s:",
        label="blocks a second, of the most",
    )
    blocks.set(title=f"{study} workers, by block size", xlabel="tokens of a block", xscale="log", ylim=(0, 1.05))
    blocks.set_xticks(list(sizes), [str(size) for size in sizes])
    blocks.minorticks_off()
    quality.set(title="Hit rate and attainment", xlabel="workers", xscale="log", ylim=(0, 1.05))
    delay.set(title="First token p95, ms", xlabel="workers", xscale="log", yscale="log")
    load.set(title="What the router takes in", xlabel="workers", xscale="log", yscale="log")
    for axis in (quality, delay, load, blocks):
        axis.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
