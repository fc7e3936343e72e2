"""A discrete-event simulator that drives the engine's own policy code with cost models of real machines.

    python -m benchmarks.simulate                      # table, and plots in benchmarks/results/
    python -m benchmarks.simulate --sessions 10000
    python -m benchmarks.simulate --workers 1 10 100 1000    # as many workers behind a router

Nothing of the policy is written again here: the scheduler with all of its plan (decode steps ahead, pace), the order of
service, admission and the times at which readers are given tokens are the engine's. What is simulated is the machine
(how long a batch takes), the load (what is asked for, and when) and the KV cells. The same load is run under UMA's
policy and under the usual one, which takes requests as they come, fills each batch with as many prompt tokens as it
holds and refuses no request; so the table shows what the policy buys and what it costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.document import replace_between
from benchmarks.simulation import scale
from benchmarks.simulation.cluster import ROUTER_BLOCKS_PER_SECOND, Setup
from benchmarks.simulation.load import Load
from benchmarks.simulation.machines import MACHINES, Machine
from benchmarks.simulation.outcome import LANES, Outcome, judge, plot, show
from benchmarks.simulation.policies import Greedy, Policy, Uma, default_targets
from benchmarks.simulation.worker import Worker, run
from uma.engine.policy import Targets

HERE = Path(__file__).parent
RESULTS = HERE / "results"
KEPT = RESULTS / "scale.json"
LOADS = (0.6, 0.75, 0.9, 1.5)
MAX_WORKERS = 1_000
POLICIES: dict[str, Callable[[Targets], Policy]] = {"greedy": Greedy, "uma": Uma}


def simulate(machine: Machine, policy: str, load: Load) -> Outcome:
    """One run."""
    worker = Worker(machine, POLICIES[policy](default_targets()))
    sessions = load.make(machine)
    run(worker, sessions)
    end_ms = max((each.done_ms or 0.0 for each in sessions), default=0.0)
    return judge(policy, machine, load.utilization, sessions, end_ms)


def compare(outcomes: Sequence[Outcome], console: Console) -> None:
    """What the policy buys and costs, in a line for each machine and load."""
    for usual, ours in zip(outcomes[::2], outcomes[1::2], strict=True):
        worst = min(ours.attained[lane] - usual.attained[lane] for lane in LANES)
        speed = ours.tokens_per_second / usual.tokens_per_second
        console.print(
            f"{ours.machine}, load {ours.utilization:g}: {speed:.4f} of greedy's tokens/s; attainment by lane at worst "
            f"{100 * worst:+.1f} points"
        )


def _workers(text: str) -> int:
    count = int(text)
    if not 1 <= count <= MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"{count} is not from 1 to {MAX_WORKERS}")
    return count


def scale_out(args: argparse.Namespace) -> None:
    """Many workers: run what earlier runs have not, and print the table or publish it."""
    if args.fresh:
        KEPT.unlink(missing_ok=True)
    base = Setup(
        args.workers[0], "kv", requests_per_second=args.rate, seconds=args.seconds,
        router_blocks_per_second=args.router_blocks,
    )  # fmt: skip
    outcomes = scale.run(MACHINES["gpu"], args.workers, base, KEPT, Console(stderr=True))
    scale.show(outcomes, Console(width=200))
    if args.publish:
        replace_between(HERE / "README.md", scale.BEGIN, scale.END, f"{scale.markdown(outcomes)}\n")
        scale.plot(outcomes, RESULTS / "scale.png")


def main() -> None:
    """Run all, print the table, write the plot."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--sessions", type=int, default=2_000, help="requests of each load (default 2000)")
    parser.add_argument("--machine", choices=sorted(MACHINES), action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--load", type=float, action="append", help="share of capacity asked for (default 0.6, 0.75, 0.9, 1.5)"
    )
    parser.add_argument(
        "--workers", type=_workers, nargs="+", metavar="N", help="instead, so many workers behind a router (1 to 1000)"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="with --workers: simulated time (default 8)")
    parser.add_argument(
        "--rate", type=float, default=20.0, help="with --workers: requests a second for each worker (default 20)"
    )
    parser.add_argument(
        "--router-blocks", type=float, default=ROUTER_BLOCKS_PER_SECOND, metavar="N",
        help=f"with --workers: blocks a second that the router can apply (default {ROUTER_BLOCKS_PER_SECOND:,.0f})",
    )  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="with --workers: forget what earlier runs have found")
    parser.add_argument("--publish", action="store_true", help="with --workers: write table and plot into README.md")
    args = parser.parse_args()
    if args.workers:
        scale_out(args)
        return
    outcomes = [
        simulate(MACHINES[name], policy, Load(args.sessions, utilization))
        for name in args.machine or sorted(MACHINES)
        for utilization in args.load or LOADS
        for policy in POLICIES
    ]
    console = Console(width=200)
    show(outcomes, console)
    compare(outcomes, console)
    plot(outcomes, RESULTS / "simulation.png")


if __name__ == "__main__":
    main()
