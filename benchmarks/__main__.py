"""The one command: runs scenarios round by round, keeps every round, and shows tables, claims and figures."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import trio
from rich.console import Console

from benchmarks.machine import describe, folder_name
from benchmarks.models import REAL, SHAPES, named_model, parameters
from benchmarks.report import machine_table
from benchmarks.results_page import Results, publish
from benchmarks.scenario import Bench, Row, Scenario
from benchmarks.scenarios import ALL
from benchmarks.store import ForeignResults, Store
from benchmarks.targets import llama_cpp_python, llama_server
from benchmarks.targets.base import StartError
from benchmarks.targets.raw import RawError
from uma.errors import UmaError

RESULTS = Path(__file__).parent / "results"
FAULTS = (StartError, RawError, UmaError, OSError, subprocess.CalledProcessError)
"""What a broken target looks like from here: its scenario is given up for the round, the others go on."""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [scenario.name for scenario in ALL]
    parser.add_argument("--scenario", "-s", action="append", choices=names, help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=None, help="rounds of each scenario (default 3, quick 1)")
    parser.add_argument("--quick", action="store_true", help="less of everything, to see that it runs")
    parser.add_argument("--fresh", action="store_true", help="forget earlier rounds of the scenarios to run")
    parser.add_argument("--report", action="store_true", help="run nothing, show what is there")
    parser.add_argument("--publish", action="store_true", help="run nothing, write the tables into both README.md")
    parser.add_argument("--no-peers", action="store_true", help="UMA and raw only")
    parser.add_argument(
        "--threads",
        type=int,
        help="compute threads of every target (default: all CPUs; UMA with its defaults chooses by itself)",
    )
    parser.add_argument(
        "--shape",
        choices=[*SHAPES, *REAL],
        default="100m",
        help="which model (default 100m)",
    )
    parser.add_argument("--out", type=Path, help=f"folder of results (default: one for each processor in {RESULTS})")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run and report. Exit code 0, also where a claim falls short: the table says so. 2: the results are not ours."""
    args = build_parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 180)
    model = named_model(args.shape)
    threads: int = args.threads or os.cpu_count() or 1
    machine = describe(model, threads)
    out: Path = args.out or RESULTS / folder_name(machine)
    name = ("quick" if args.quick else "results") + ("" if model.shape == SHAPES["100m"] else f"-{args.shape}")
    try:
        store = Store.open(out / f"{name}.json", machine)
    except ForeignResults as error:
        console.print(str(error), style="red")
        return 2
    wanted = [scenario for scenario in ALL if not args.scenario or scenario.name in args.scenario]
    bench = Bench(
        model=model,
        threads=threads,
        is_quick=args.quick,
        has_llama_server=llama_server.is_built() and not args.no_peers,
        has_llama_cpp_python=llama_cpp_python.is_built() and not args.no_peers,
        has_gpu="gpu" in machine,
        has_named_threads=args.threads is not None,
    )
    console.print(machine_table(store.described))
    if not (args.report or args.publish):
        if not (llama_server.is_built() or args.no_peers):
            console.print("The peers are not built: `python -m benchmarks.build_peers` makes them.", style="yellow")
        if args.fresh:
            for scenario in wanted:
                store.forget(scenario.name)
        trio.run(_run_until_terminated, console, store, bench, wanted, args.rounds or bench.pick(3, 1))
    results = Results.of(store)
    results.show(console)
    results.write(out, name)
    if args.publish:
        publish(RESULTS.parent.parent, RESULTS)
    return 0


async def _run_until_terminated(
    console: Console, store: Store, bench: Bench, wanted: list[Scenario], rounds: int
) -> None:
    # A signal that ends this command must not leave its servers behind; Ctrl-C unwinds by itself.
    async with trio.open_nursery() as nursery:

        async def end_on_sigterm() -> None:
            with trio.open_signal_receiver(signal.SIGTERM) as signals:
                async for _ in signals:
                    nursery.cancel_scope.cancel()

        nursery.start_soon(end_on_sigterm)
        await _run(console, store, bench, wanted, rounds)
        nursery.cancel_scope.cancel()


async def _run(console: Console, store: Store, bench: Bench, wanted: list[Scenario], rounds: int) -> None:
    # Round by round through all scenarios, not scenario by scenario: a machine's slow minutes hit them all alike, and
    # a run broken off has a little of everything.
    for scenario in wanted:
        store.begin(scenario.name)
    for index in range(rounds):
        for scenario in wanted:
            if len(store.rounds(scenario.name)) > index:
                continue
            console.print(f"round {index + 1} of {rounds}: {scenario.name}", style="dim")
            rows = await _one_round(console, scenario, bench, index)
            if rows:
                store.add_round(scenario.name, f"python -m benchmarks --scenario {scenario.name}", rows)


async def _one_round(console: Console, scenario: Scenario, bench: Bench, index: int) -> list[Row]:
    rows: list[Row] = []
    is_whole = True
    # Limits are those of the smallest shape.
    limit_s = scenario.round_limit_s * parameters(bench.model.shape) / parameters(SHAPES["100m"])
    try:
        with trio.move_on_after(limit_s) as limit:
            await scenario.measure(bench, index, lambda *row: rows.append(Row(*row)))
    except* FAULTS as faults:
        for line in _lines(faults):
            console.print(f"{scenario.name}: {line}", style="red", markup=False)
        is_whole = False
    if limit.cancelled_caught:
        console.print(f"{scenario.name}: broken off after {limit_s:.0f} s", style="yellow")
    # Part of a round would pass for a whole one: it is run again next time.
    return rows if is_whole else []


def _lines(fault: BaseException) -> list[str]:
    if isinstance(fault, BaseExceptionGroup):
        return [line for each in fault.exceptions for line in _lines(each)]
    return [f"{type(fault).__name__}: {fault}"]


if __name__ == "__main__":
    sys.exit(main())
