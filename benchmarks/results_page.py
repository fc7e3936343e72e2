"""Everything measured so far as one whole: on the terminal, as files beside the JSON, and as parts of documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
from rich.console import Console

from benchmarks import headlines, plots, report
from benchmarks.document import between, replace_between
from benchmarks.machine import processor
from benchmarks.scenario import Check, Scenario, Summary
from benchmarks.scenarios import ALL
from benchmarks.store import Store

BEGIN, END = "<!-- results: written by `python -m benchmarks --publish` -->", "<!-- end of results -->"


@attrs.frozen
class Results:
    """The scenarios that were measured, each with its medians and its number of rounds."""

    measured: tuple[tuple[Scenario, Summary, int], ...]
    where: str
    """The processor and the model, as each table's caption names them."""
    options: str
    """Of the command that measured them, besides the scenario."""

    @classmethod
    def of(cls, store: Store) -> Results:
        """From the results file, in the order of `scenarios.ALL`."""
        kept = ((scenario, store.rounds(scenario.name)) for scenario in ALL)
        where = f"{processor(store.machine)}, {store.machine['model'].split(',')[0]}"
        shape = store.path.stem.partition("-")[2]
        return cls(
            tuple((scenario, Summary.of(rounds), len(rounds)) for scenario, rounds in kept if rounds),
            where,
            f" --shape {shape}" if shape else "",
        )

    @property
    def checks(self) -> list[Check]:
        """All claims of the scenarios that were measured."""
        return [check for scenario, summary, _ in self.measured for check in scenario.checks(summary)]

    def show(self, console: Console) -> None:
        """Print a table for each scenario, and the claims."""
        for scenario, summary, rounds in self.measured:
            console.print(report.scenario_table(scenario, summary, rounds, self.where))
        if self.measured:
            console.print(report.checks_table(self.checks, self.where))

    def write(self, folder: Path, name: str) -> None:
        """Write the tables as `name.md`, and the figures, into `folder` (those of other than `results` apart)."""
        if not self.measured:
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(self._tables())
        plots.draw(self._summaries(), folder if name == "results" else folder / name)

    def page(self, machine: dict[str, str], figures: str) -> str:
        """Its part of the benchmarks' README.md: machine, claims, figures (from a folder beside it), tables."""
        images = [f"![{name}]({figures}/{name}.png)\n" for name in plots.PLOTS if name in self._summaries()]
        return "\n".join([f"### {self.where}\n", report.machine_markdown(machine), *images, self._tables()])

    def _tables(self) -> str:
        pages = [report.as_markdown(*each, self.where, self.options) for each in self.measured]
        return "\n".join([report.checks_markdown(self.checks, self.where), *pages])

    def _summaries(self) -> dict[str, Summary]:
        return {scenario.name: summary for scenario, summary, _ in self.measured}


def every_store(results: Path) -> list[Store]:
    """What was measured on each processor with each model."""
    return [Store.read(path) for path in sorted(results.glob("*/results*.json"))]


def headlines_of(stores: Sequence[Store]) -> str:
    """The claims that README.md shows, with the smallest model that each machine has figures of."""
    smallest: dict[str, Results] = {}
    for results in sorted(map(Results.of, stores), key=lambda each: each.options):
        smallest.setdefault(results.where.rpartition(", ")[0], results)
    return headlines.markdown({head: smallest[name].checks for name, head in headlines.MACHINES.items()})


def every_page(stores: Sequence[Store]) -> str:
    """All measured figures: the claims side by side, then one machine and model after another."""
    every = [Results.of(store) for store in stores]
    note = "What falls short is bold; what has no figure was not measured there.\n"
    claims = report.side_by_side({each.where: each.checks for each in every})
    pages = [each.page(store.described, _figures(store.path)) for each, store in zip(every, stores, strict=True)]
    return "\n".join(["### Claims, machine by machine\n", note, claims, *pages])


def _figures(results: Path) -> str:
    """The folder of a file's figures, as README.md names it."""
    folder = f"results/{results.parent.name}"
    return folder if results.stem == "results" else f"{folder}/{results.stem}"


def publish(root: Path, results: Path) -> None:
    """Replace the results in the documents of a source tree. Raises `ValueError` where their marks are missing."""
    stores = every_store(results)
    parts = [
        (root / "benchmarks" / "README.md", BEGIN, END, every_page(stores)),
        (root / "README.md", headlines.BEGIN, headlines.END, headlines_of(stores) + "\n"),
    ]
    for document, begin, end, _ in parts:
        between(document, begin, end)  # nothing is written where any mark is missing
    for part in parts:
        replace_between(*part)
