"""Results as people read them: a table for each scenario, and the claims with what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.table import Table

from benchmarks.scenario import Check, Scenario, Summary

UNITS = {
    "_ms": ("ms", 1),
    "_us": ("µs", 0),
    "_mb": ("MiB", 0),
    "_per_s": ("1/s", 1),
    "_s": ("s", 2),
    "_percent": ("%", 1),
    "_share": ("", 3),
    "_qoe": ("", 3),
}
"""A measure's unit and decimals, by the end of its name; anything else is a count."""


def head(name: str) -> str:
    """`ttft p50 (ms)` for `ttft_p50_ms`."""
    for ending, (unit, _) in UNITS.items():
        if name.endswith(ending):
            words = name.removesuffix(ending).replace("_", " ")
            return f"{words} ({unit})" if unit else name.replace("_", " ")
    return name.replace("_", " ")


def figure(name: str, value: float) -> str:
    """A value with as many decimals as its unit is worth."""
    if math.isnan(value):
        return "n/a"
    decimals = next((digits for ending, (_, digits) in UNITS.items() if name.endswith(ending)), 0)
    return f"{value:,.{decimals}f}"


def machine_table(machine: dict[str, str]) -> Table:
    """What everything was measured on."""
    table = Table(title="Machine", show_header=False)
    for name, value in machine.items():
        table.add_row(name.replace("_", " "), value)
    return table


def scenario_table(scenario: Scenario, summary: Summary, rounds: int, where: str) -> Table:
    """Medians over the rounds; the title says on what processor and model."""
    measured = {name for measures in summary.medians.values() for name in measures}
    columns = [name for name in scenario.columns if name in measured]
    if any(measures.get("failed") for measures in summary.medians.values()):
        columns.append("failed")
    title = f"{scenario.name}: {scenario.about} {where}: medians of {rounds} round{'s' if rounds > 1 else ''}."
    table = Table(title=title, title_justify="left")
    table.add_column("case")
    table.add_column("target")
    for name in columns:
        table.add_column(head(name), justify="right")
    for case in summary.cases:
        for number, target in enumerate(summary.targets(case)):
            cells = [figure(name, summary.get(case, target, name)) for name in columns]
            table.add_row(case if number == 0 else "", target, *cells, end_section=target == summary.targets(case)[-1])
    return table


def checks_table(checks: list[Check], where: str) -> Table:
    """Claims, measured values, bars."""
    table = Table(title=f"Claims: {where}")
    for name in ("claim", "measured", "bar", "", "beside it"):
        table.add_column(name, justify="left" if name in {"claim", "beside it"} else "right")
    for check in checks:
        verdict = "not measured" if not check.is_known else "[green]holds[/]" if check.holds else "[red]falls short[/]"
        table.add_row(check.claim, value_of(check), bar_of(check), verdict, check.beside)
    return table


def value_of(check: Check) -> str:
    """What was measured, with its unit: three digits, or as many as show that it falls short of its bar."""
    if not check.is_known:
        return "n/a"
    if abs(check.value) >= 999.5:
        return f"{check.value:,.0f} {check.unit}".strip()
    # A ratio keeps its zeros: 1.00 says that it was measured to be so.
    zeros = "#" if check.unit == "x" else ""
    texts = (f"{check.value:{zeros}.{digits}g}".removesuffix(".") for digits in range(3, 9))
    text = next((text for text in texts if check.holds or float(text) != check.bar), repr(check.value))
    return f"{text} {check.unit}".strip()


def marked(check: Check) -> str:
    """What was measured, for a table of claims: bold where it falls short."""
    return value_of(check) if check.holds else f"**{value_of(check)}**"


def bar_of(check: Check) -> str:
    """The bar, and on which side of it the claim holds."""
    return f"{check.relation} {check.bar:g} {check.unit}".strip()


def as_markdown(scenario: Scenario, summary: Summary, rounds: int, where: str, options: str) -> str:
    """The scenario's table for a document; its caption says on what processor and model."""
    measured = {name for measures in summary.medians.values() for name in measures}
    columns = [name for name in scenario.columns if name in measured]
    lines = [
        f"#### {scenario.name}",
        "",
        f"{scenario.about} {where}: medians of {rounds} round{'s' if rounds > 1 else ''} of",
        f"`python -m benchmarks{options} -s {scenario.name}`:",
        "",
        "| " + " | ".join(["case", "target", *map(head, columns)]) + " |",
        "| --- | --- |" + " ---: |" * len(columns),
    ]
    for case in summary.cases:
        for target in summary.targets(case):
            cells = [figure(name, summary.get(case, target, name)) for name in columns]
            lines.append("| " + " | ".join([case, target, *cells]) + " |")
    return "\n".join(lines) + "\n"


def checks_markdown(checks: list[Check], where: str) -> str:
    """The claims for a document."""
    lines = [
        f"Claims, on {where}:",
        "",
        "| claim | measured | bar | | beside it |",
        "| --- | ---: | ---: | --- | --- |",
    ]
    for check in checks:
        verdict = "not measured" if not check.is_known else "holds" if check.holds else "**falls short**"
        lines.append(f"| {check.claim} | {value_of(check)} | {bar_of(check)} | {verdict} | {check.beside} |")
    return "\n".join(lines) + "\n"


def side_by_side(found: Mapping[str, Sequence[Check]]) -> str:
    """The claims of several machines in one table, each machine a column; what falls short there is bold."""
    by_machine = [{check.claim: check for check in checks if check.is_known} for checks in found.values()]
    claims = {claim: check for checks in by_machine for claim, check in checks.items()}
    lines = ["| claim | bar | " + " | ".join(found) + " |", "| --- | ---: |" + " ---: |" * len(found)]
    for claim, any_check in claims.items():
        known = [checks.get(claim) for checks in by_machine]
        cells = ["" if each is None else marked(each) for each in known]
        lines.append(f"| {claim} | {bar_of(any_check)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def machine_markdown(machine: dict[str, str]) -> str:
    """The machine for a document."""
    lines = ["| | |", "| --- | --- |", *(f"| {name.replace('_', ' ')} | {value} |" for name, value in machine.items())]
    return "\n".join(lines) + "\n"
