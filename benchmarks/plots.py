"""The figures that tell the story: throughput, the storm, the shared prefix, and what smoothness costs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.scenario import Summary

COLORS = {
    "UMA": "#0b6e4f",
    "raw": "#888888",
    "llama-server": "#c8553d",
    "llama_cpp.server": "#6b4e9b",
    "llama-batched": "#b8b8b8",
}


def color(target: str) -> str:
    """The same color for a target in every figure."""
    return next((value for name, value in COLORS.items() if target.startswith(name)), "#444444")


def draw(summaries: Mapping[str, Summary], folder: Path) -> list[Path]:
    """Write a PNG for each scenario that has one and was measured; the files written."""
    import matplotlib as mpl  # noqa: PLC0415  (half a second that only this needs)

    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    drawn: list[Path] = []
    for name, plot in PLOTS.items():
        if name in summaries and summaries[name].medians:
            path = folder / f"{name}.png"
            plot(summaries[name], path)
            drawn.append(path)
    return drawn


def _streams(case: str) -> int:
    found = re.match(r"\d+", case)
    return int(found[0]) if found else 0


def _throughput(summary: Summary, path: Path) -> None:
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    shown = dict.fromkeys(target for case in summary.cases for target in summary.targets(case))
    for target in shown:
        points = [
            (_streams(case), summary.get(case, target, "tokens_per_s"))
            for case in summary.cases
            if not math.isnan(summary.get(case, target, "tokens_per_s"))
        ]
        style = "--" if "split" in target else "-"
        width = 2.5 if target.startswith("UMA") else 1.3
        axes.plot(*zip(*points, strict=True), style, marker="o", ms=4, lw=width, color=color(target), label=target)
    axes.set(xscale="log", xlabel="streams", ylabel="generated tokens a second", title="Throughput")
    axes.set_xticks([_streams(case) for case in summary.cases], [str(_streams(case)) for case in summary.cases])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _setting(options: str) -> str:
    """`200 ms` or `200 ms, 5 s to the first` for UMA's options; llama-server's as they are."""
    found = re.match(r"--(?:slo-tbt|tick-budget)-ms (\d+)(?: --slo-ttft-ms (\d+))?", options)
    if found is None:
        return options
    return f"{found[1]} ms" + (f", {int(found[2]) / 1000:g} s to the first" if found[2] else "")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bars(summary: Summary, panels: list[tuple[str, str, str]], title: str, path: Path) -> None:
    """A row of horizontal bar charts; each panel is a case, a measure and its label."""
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, row = plt.subplots(
        1, len(panels), figsize=(3.6 * len(panels) + 1.2, 2.6), layout="constrained", squeeze=False
    )
    for axes, (case, measure, label) in zip(row[0], panels, strict=True):
        targets = [target for target in summary.targets(case) if not math.isnan(summary.get(case, target, measure))][
            ::-1
        ]
        values = [summary.get(case, target, measure) for target in targets]
        bars = axes.barh(targets, values, color=[color(target) for target in targets])
        axes.bar_label(bars, fmt=_short, padding=3, fontsize=8)
        axes.margins(x=0.18)
        axes.set_xlabel(label)
        if axes is not row[0][0]:
            axes.set_yticklabels([])
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _storm(summary: Summary, path: Path) -> None:
    panels = [
        ("storm", "worst_gap_ms", "the stream's worst gap, ms"),
        ("storm", "all_read_s", "all four prompts read, s"),
    ]
    _bars(summary, panels, "One stream decodes, four prompts of 1,500 tokens arrive", path)


def _prefix(summary: Summary, path: Path) -> None:
    panels = [
        ("cold", "all_done_s", "cold: all done, s"),
        ("warm", "ttft_p50_ms", "warm: first token, ms"),
        ("staggered", "all_done_s", "150 ms apart: all done, s"),
    ]
    _bars(summary, panels, "Eight requests with 1,024 tokens in common", path)


def _tradeoff(summary: Summary, path: Path) -> None:
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for prefix in ("UMA", "llama-server"):
        targets = [target for target in summary.targets("storm") if target.startswith(prefix)]
        gaps = [summary.get("storm", target, "worst_gap_ms") for target in targets]
        rates = [summary.get("storm", target, "prompt_tokens_per_s") for target in targets]
        axes.plot(gaps, rates, marker="o", color=color(prefix), label=prefix)
        for target, gap, rate in zip(targets, gaps, rates, strict=True):
            label = _setting(target.removeprefix(prefix).strip())
            axes.annotate(label, (gap, rate), fontsize=7, xytext=(4, 4), textcoords="offset points")
    axes.set(
        xscale="log",
        xlabel="the stream's worst gap, ms",
        ylabel="prompt tokens a second",
        title="What a smooth stream costs",
    )
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


PLOTS = {"throughput": _throughput, "storm": _storm, "prefix": _prefix, "tradeoff": _tradeoff}
"""The scenarios that have a figure."""
