"""Results on disk, a round at a time, so that a run broken off goes on where it was.

The file keeps every row of every round. It belongs to one machine and model: results of another are never mixed in. A
machine whose system or Python was updated is the same: each scenario's rounds are all of one of each, and begin anew on
another.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs

from benchmarks.scenario import Row

SOFTWARE = ("system", "python")
"""The machine's entries that tell what an update changes, and a scenario's."""


class ForeignResults(Exception):
    """The results file is from another machine, library or model."""


@attrs.define
class Store:
    """The results file, read at the start and written after each round."""

    path: Path
    machine: dict[str, str]
    scenarios: dict[str, dict[str, Any]] = attrs.field(factory=dict)

    @classmethod
    def open(cls, path: Path, machine: dict[str, str]) -> Store:
        """Read what is there. Raises `ForeignResults` where it is not this machine's."""
        store = cls(path, machine)
        if path.exists():
            kept = json.loads(path.read_text())
            before = kept["machine"]
            names = [name for name in before | machine if name not in SOFTWARE]
            wrong = [name for name in names if before.get(name) != machine.get(name)]
            if wrong:
                raise ForeignResults(f"{path}: other {', '.join(wrong)}; move it away or name another with --out")
            for entry in kept["scenarios"].values():
                for name in SOFTWARE:
                    entry.setdefault(name, before[name])
            store.scenarios = kept["scenarios"]
        return store

    @classmethod
    def read(cls, path: Path) -> Store:
        """Whatever is in the file, of this machine or another."""
        kept = json.loads(path.read_text())
        return cls(path, kept["machine"], kept["scenarios"])

    @property
    def described(self) -> dict[str, str]:
        """The machine, with each system and each Python that scenarios were measured on, and which."""
        return self.machine | {name: self._told(name) for name in SOFTWARE}

    def _told(self, name: str) -> str:
        found: dict[str, list[str]] = {}
        for scenario, entry in self.scenarios.items():
            found.setdefault(entry.get(name, self.machine[name]), []).append(scenario)
        if len(found) < 2:
            return next(iter(found), self.machine[name])
        return "; ".join(f"{each}: {', '.join(scenarios)}" for each, scenarios in found.items())

    def begin(self, scenario: str) -> None:
        """Before its rounds: forget those of another system or Python."""
        if (entry := self.scenarios.get(scenario)) and any(
            entry[name] != told for name, told in self._software.items()
        ):
            self.forget(scenario)

    def rounds(self, scenario: str) -> list[list[Row]]:
        """All rounds of a scenario so far."""
        kept = self.scenarios.get(scenario, {}).get("rounds", [])
        return [[Row(row["case"], row["target"], _with_nan(row["measures"])) for row in each["rows"]] for each in kept]

    def add_round(self, scenario: str, command: str, rows: list[Row]) -> None:
        """Keep a round, on disk when this returns."""
        entry = self.scenarios.setdefault(scenario, {"command": command, **self._software, "rounds": []})
        at = datetime.now(UTC).isoformat(timespec="seconds")
        entry["rounds"].append({"at": at, "rows": [_without_nan(attrs.asdict(row)) for row in rows]})
        self.save()

    @property
    def _software(self) -> dict[str, str]:
        return {name: self.machine[name] for name in SOFTWARE}

    def forget(self, scenario: str) -> None:
        """Drop a scenario's rounds."""
        self.scenarios.pop(scenario, None)

    def save(self) -> None:
        """Write the file, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({"machine": self.machine, "scenarios": self.scenarios}, indent=1) + "\n")
        partial.replace(self.path)


def _without_nan(row: dict[str, Any]) -> dict[str, Any]:
    # JSON has no NaN: what was not measured is null.
    measures = {name: None if math.isnan(value) else round(value, 4) for name, value in row["measures"].items()}
    return {**row, "measures": measures}


def _with_nan(measures: dict[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in measures.items()}
