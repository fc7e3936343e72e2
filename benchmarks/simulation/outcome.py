"""What a simulated run is judged by: a table, and a plot of worst gaps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import attrs
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.simulation.load import Session
from benchmarks.simulation.machines import Machine

LANES = {1: "interactive", 0: "normal", -1: "background"}
IN_TIME = 1.5
"""Times its target that a session's worst gap can be."""


@attrs.frozen
class Outcome:
    """Figures of one run."""

    policy: str
    machine: str
    utilization: float
    refused: int
    attained: dict[int, float]
    """Share of finished sessions whose first token and worst gap met their targets, by lane."""
    ttft_p95_ms: dict[int, float]
    worst_gap_p99_ms: float
    qoe: float
    """Mean quality of experience (Andes) of sessions that are not background."""
    jain: float
    tokens_per_second: float
    gaps: list[float]


def jain_index(values: Sequence[float]) -> float:
    """Jain, Chiu, Hawe 1984: (Σx)² / (n Σx²); 1 where all get the same, 1/n where one gets all."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def is_attained(session: Session) -> bool:
    """Whether its first token and its worst gap met their targets."""
    is_smooth = session.worst_gap_ms <= IN_TIME * session.row.target_tbt_ms
    return is_smooth and ttft_ms(session) <= session.expected_ttft_ms


def judge(name: str, machine: Machine, utilization: float, sessions: list[Session], end_ms: float) -> Outcome:
    """Figures of a finished run. Fairness is over each session's slowdown against having the machine to itself."""
    finished = [each for each in sessions if each.done_ms is not None]
    attained, ttft = {}, {}
    for lane in LANES:
        group = [each for each in finished if each.row.lane == lane]
        attained[lane] = sum(map(is_attained, group)) / max(1, len(group))
        ttft[lane] = percentile([ttft_ms(each) for each in group], 0.95)
    shares = [_alone_ms(each, machine) / max(1e-9, (each.done_ms or 0) - each.row.arrived_ms) for each in finished]
    # Background streams are meant to pause while others are at risk: their gaps say nothing.
    people = [each for each in finished if each.row.lane >= 0]
    gaps = [each.worst_gap_ms for each in people if each.generated > 1]
    tokens = sum(each.generated + each.prompt_tokens for each in finished)
    return Outcome(
        name,
        machine.name,
        utilization,
        refused=sum(each.is_refused for each in sessions),
        attained=attained,
        ttft_p95_ms=ttft,
        worst_gap_p99_ms=percentile(gaps, 0.99),
        qoe=statistics.fmean(each.experience.qoe for each in people) if people else 1.0,
        jain=jain_index(shares),
        tokens_per_second=tokens / (end_ms / 1000),
        gaps=gaps,
    )


def ttft_ms(session: Session) -> float:
    """Time to its first token."""
    assert session.first_ms is not None
    return session.first_ms - session.row.arrived_ms


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of them is below; 0 of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def _alone_ms(session: Session, machine: Machine) -> float:
    prompt = session.prompt_tokens
    return machine.read_ms(prompt) + session.output_tokens * machine.decode_ms(1, prompt)


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """The table, as Markdown."""
    table = Table(box=box.MARKDOWN)
    for column in ("machine", "load", "policy", "refused", "interactive", "normal", "background"):
        table.add_column(column)
    for column in ("TTFT p95 interactive", "worst gap p99", "QoE", "Jain", "tokens/s"):
        table.add_column(column, justify="right")
    for each in outcomes:
        lanes = [f"{each.attained[lane]:.1%}" for lane in LANES]
        table.add_row(
            each.machine, f"{each.utilization:g}", each.policy, str(each.refused), *lanes,
            f"{each.ttft_p95_ms[1]:,.0f} ms", f"{each.worst_gap_p99_ms:,.0f} ms", f"{each.qoe:.3f}",
            f"{each.jain:.2f}", f"{each.tokens_per_second:,.0f}",
        )  # fmt: skip
    console.print(table)
    console.print("By lane: sessions whose first token and worst gap met their targets, of those not refused.")


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Worst gaps of all sessions, as distributions, for each machine and policy."""
    import matplotlib  # noqa: PLC0415  (only the plot needs it)

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    machines = list(dict.fromkeys(each.machine for each in outcomes))
    figure, axes = plt.subplots(1, len(machines), figsize=(5.5 * len(machines), 3.6), squeeze=False)
    for axis, machine in zip(axes[0], machines, strict=True):
        for each in outcomes:
            if each.machine == machine and each.gaps:
                share = [index / len(each.gaps) for index in range(len(each.gaps))]
                axis.plot(sorted(each.gaps), share, label=f"{each.policy}, load {each.utilization:g}")
        axis.set(title=machine, xlabel="a session's worst gap, ms", ylabel="share of sessions", xscale="log")
        axis.axvline(80, color="grey", linestyle=":", linewidth=1)
        axis.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
