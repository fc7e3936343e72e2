"""Everything measured so far as one whole: on the terminal, as files beside the JSON, and as a part of README.md."""

from __future__ import annotations

from pathlib import Path

import attrs
from rich.console import Console

from benchmarks import plots, report
from benchmarks.scenario import Check, Scenario, Summary
from benchmarks.scenarios import ALL
from benchmarks.store import Store

BEGIN, END = "<!-- results: written by `python -m benchmarks --publish` -->", "<!-- end of results -->"


@attrs.frozen
class Results:
    """The scenarios that were measured, each with its medians and its number of rounds."""

    measured: tuple[tuple[Scenario, Summary, int], ...]

    @classmethod
    def of(cls, store: Store) -> Results:
        """From the results file, in the order of `scenarios.ALL`."""
        kept = ((scenario, store.rounds(scenario.name)) for scenario in ALL)
        return cls(tuple((scenario, Summary.of(rounds), len(rounds)) for scenario, rounds in kept if rounds))

    @property
    def checks(self) -> list[Check]:
        """All claims of the scenarios that were measured."""
        return [check for scenario, summary, _ in self.measured for check in scenario.checks(summary)]

    def show(self, console: Console) -> None:
        """Print a table for each scenario, and the claims."""
        for scenario, summary, rounds in self.measured:
            console.print(report.scenario_table(scenario, summary, rounds))
        if self.measured:
            console.print(report.checks_table(self.checks))

    def write(self, folder: Path, name: str) -> None:
        """Write the tables as `name.md`, and the figures, into `folder` (a quick run's figures apart)."""
        if not self.measured:
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(self._tables())
        plots.draw(self._summaries(), folder if name == "results" else folder / name)

    def page(self, machine: dict[str, str], folder: str) -> str:
        """A processor's part of README.md: machine, claims, figures, tables."""
        images = [f"![{name}](results/{folder}/{name}.png)\n" for name in plots.PLOTS if name in self._summaries()]
        return "\n".join([f"### {machine['cpu']}\n", report.machine_markdown(machine), *images, self._tables()])

    def _tables(self) -> str:
        pages = [report.as_markdown(*each) for each in self.measured]
        return "\n".join([report.checks_markdown(self.checks), *pages])

    def _summaries(self) -> dict[str, Summary]:
        return {scenario.name: summary for scenario, summary, _ in self.measured}


def every_page(results: Path) -> str:
    """What was measured on each processor, one after another."""
    stores = [Store.read(path) for path in sorted(results.glob("*/results.json"))]
    return "\n".join(Results.of(store).page(store.machine, store.path.parent.name) for store in stores)


def publish(readme: Path, page: str) -> None:
    """Replace what stands between the two marks in a document. Raises `ValueError` where they are missing."""
    text = readme.read_text()
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    readme.write_text(f"{text[:before]}\n\n{page}\n{text[after:]}")
