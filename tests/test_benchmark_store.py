"""Results of the benchmarks on disk: whole rounds of one machine, one system and one Python."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.scenario import Row
from benchmarks.store import ForeignResults, Store

MACHINE = {"cpu": "a CPU", "model": "a model", "system": "Linux 1", "python": "3.11"}


def kept(path: Path, *scenarios: str, **changed: str) -> Store:
    """A file with a round of each scenario, measured on the machine with these entries changed."""
    store = Store.open(path, MACHINE | changed)
    for scenario in scenarios:
        store.begin(scenario)
        store.add_round(scenario, "a command", [Row("case", "target", {"wall_s": 1.5, "gap_ms": math.nan})])
    return store


def test_a_round_is_on_disk_when_it_was_added_with_what_was_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "results.json"
    kept(path, "storm", "storm")
    rounds = Store.open(path, MACHINE).rounds("storm")
    assert [[(row.case, row.target) for row in each] for each in rounds] == [[("case", "target")]] * 2
    assert rounds[0][0].measures["wall_s"] == 1.5
    assert math.isnan(rounds[0][0].measures["gap_ms"])
    assert json.loads(path.read_text())["scenarios"]["storm"]["rounds"][0]["rows"][0]["measures"]["gap_ms"] is None
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("changed", [{"cpu": "another CPU"}, {"model": "another model"}, {"gpu": "a GPU"}])
def test_results_of_another_machine_are_refused_with_what_is_other(tmp_path: Path, changed: dict[str, str]) -> None:
    kept(tmp_path / "results.json", "storm")
    with pytest.raises(ForeignResults, match=rf"other {next(iter(changed))}; move it away"):
        Store.open(tmp_path / "results.json", MACHINE | changed)


@pytest.mark.parametrize("updated", [{"system": "Linux 2"}, {"python": "3.12"}])
def test_after_an_update_a_scenario_begins_anew_and_the_others_keep_their_rounds(
    tmp_path: Path, updated: dict[str, str]
) -> None:
    path, [name] = tmp_path / "results.json", updated
    kept(path, "storm", "mixed")
    store = kept(path, "storm", **updated)
    assert (len(store.rounds("storm")), len(store.rounds("mixed"))) == (1, 1)
    assert store.described[name] == f"{MACHINE[name]}: mixed; {updated[name]}: storm"
    assert len(kept(path, "storm", **updated).rounds("storm")) == 2


def test_forgotten_rounds_are_gone_and_a_whole_file_can_be_read_on_any_machine(tmp_path: Path) -> None:
    store = kept(tmp_path / "results.json", "storm", "mixed")
    store.forget("storm")
    store.save()
    found = Store.read(tmp_path / "results.json")
    assert (found.machine, list(found.scenarios)) == (MACHINE, ["mixed"])
