"""The published figures are those of the results files: none is typed in, and none is out of date."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from benchmarks import headlines, results_page
from benchmarks.document import between
from benchmarks.report import value_of
from benchmarks.results_page import Results, every_page, every_store, headlines_of
from benchmarks.scenario import Check
from benchmarks.scenarios import ALL

ROOT = Path(__file__).parent.parent
STORES = every_store(ROOT / "benchmarks" / "results")


def test_the_readme_s_table_is_what_was_measured() -> None:
    published = between(ROOT / "README.md", headlines.BEGIN, headlines.END)
    assert published.strip() == headlines_of(STORES)


def test_the_benchmarks_page_is_what_was_measured() -> None:
    published = between(ROOT / "benchmarks" / "README.md", results_page.BEGIN, results_page.END)
    assert published.strip() == every_page(STORES).strip()


def test_every_claim_of_the_readme_s_table_is_one_that_a_scenario_makes() -> None:
    made = {check.claim for store in STORES for check in Results.of(store).checks}
    # No CPU is measured with as many streams as a GPU, and the other way round.
    assert {*headlines.ROWS.values()} <= made


def test_the_benchmarks_page_says_of_each_scenario_what_happens() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    listed = page.partition("\n## Scenarios\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", listed, re.MULTILINE)) == sorted(each.name for each in ALL)


@pytest.mark.parametrize(
    ("value", "bar", "shown"),
    [
        (0.9166, 0.96, "0.917 x"),
        (1.0, 0.97, "1.00 x"),
        (14.94, 1.0, "14.9 x"),
        (102.4, 18.0, "102 x"),
        (1.0463, 1.05, "1.046 x"),
        (0.99996, 1.0, "0.99996 x"),
        (999.7, 1.0, "1,000 x"),
        (2021.7, 1.0, "2,022 x"),
        (math.nan, 1.0, "n/a"),
    ],
)
def test_a_figure_has_three_digits_and_more_where_it_would_look_like_its_bar(
    value: float, bar: float, shown: str
) -> None:
    assert value_of(Check("a claim", value, "≥", bar, "x")) == shown


def test_a_row_has_what_is_known_and_what_falls_short_is_bold_and_greater_is_better_in_all_ratios(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = {"faster": "a", "slower": "b", "a pause": "c", "more": "d"}
    monkeypatch.setattr(headlines, "ROWS", rows)
    found = {
        "first": [Check("a", 2.0, "≥", 1.0, "x"), Check("b", 1.25, "≤", 1.0, "x"), Check("c", 120.0, "≤", 100.0, "ms")],
        "second": [Check("a", 0.5, "≥", 1.0, "x"), Check("b", 0.5, "≤", 1.0, "x")],
    }
    lines = [re.split(r" *\| *", line)[1:-1] for line in headlines.markdown(found).splitlines()]
    assert lines[0][1:] == ["goal", "first", "second"]
    assert lines[2:] == [
        ["faster", "≥ 1", "2.00", "**0.500**"],
        ["slower", "≥ 1", "**0.800**", "2.00"],
        ["a pause", "≤ 100", "**120**", "-"],
        ["more", "", "-", "-"],
    ]
