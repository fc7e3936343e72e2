"""The dashboard and the alert rules of docs/monitoring ask for what a server really tells."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from http_server import HttpServer

from uma.metrics import is_of_server

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
PAGE = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
NAME = re.compile(r"\buma_\w+")


@pytest.fixture(scope="module")
def kinds(http_server: HttpServer) -> dict[str, str]:
    """The kind of each sample that a real server's `/metrics` has, by name."""
    http_server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})
    text = http_server.ask("GET", "/metrics").body.decode()
    families = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    samples = set(re.findall(r"^(uma_\w+)", text, re.MULTILINE))
    return {name: families.get(name) or families[re.sub(r"_(bucket|sum|count)$", "", name)] for name in samples}


def test_the_table_has_every_metric_of_a_real_server(http_server: HttpServer) -> None:
    http_server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})
    text = http_server.ask("GET", "/metrics").body.decode()
    told = re.findall(r"^# HELP (uma_\w+) (.*)\n# TYPE \w+ (\w+)$", text, re.MULTILINE)
    shown = re.findall(r"^\| `(uma_\w+)` \| (\w+) \| (.*) \|$", PAGE, re.MULTILINE)
    real = {(name, kind, meaning) for name, meaning, kind in told}
    assert real <= set(shown)
    assert all(is_of_server(name.removeprefix("uma_")) for name, *_ in set(shown) - real)  # of the socket, of several


EXPRESSIONS = {
    **{f"{panel['title']} {each['refId']}": each["expr"] for panel in DASHBOARD["panels"] for each in panel["targets"]},
    **{rule["alert"]: rule["expr"] for rule in RULES},
}


@pytest.mark.parametrize("title", EXPRESSIONS)
def test_every_expression_is_of_metrics_that_there_are(title: str, kinds: dict[str, str]) -> None:
    expression = EXPRESSIONS[title]
    names = set(NAME.findall(expression))
    assert names <= kinds.keys()
    assert names or "up{" in expression
    # Counters and histograms only grow: what tells something is how fast. A gauge has no rate.
    for name in names:
        is_rated = bool(re.search(rf"(?:rate|increase)\({name}\b", expression))
        assert is_rated == (kinds[name] != "gauge"), name


@pytest.mark.parametrize("title", EXPRESSIONS)
def test_every_expression_of_a_model_s_figures_tells_the_models_apart(title: str) -> None:
    expression = EXPRESSIONS[title]
    sums = re.findall(r"\bsum (?:by \((.*?)\))?", expression)
    assert all("model" in labels for labels in sums) or "uma_http_" in expression


def test_the_choice_of_servers_is_by_a_metric_that_there_is(kinds: dict[str, str]) -> None:
    asked = [each["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    assert asked
    assert all(set(NAME.findall(each)) <= kinds.keys() for each in asked)


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({each["id"] for each in panels}) == len(panels)
    places = {(each["gridPos"]["x"], each["gridPos"]["y"]) for each in panels}
    assert len(places) == len(panels)
    assert all(each["gridPos"]["x"] + each["gridPos"]["w"] <= 24 for each in panels)


def test_the_page_says_of_each_alert_what_to_do() -> None:
    assert len(RULES) == 4
    assert [rule["alert"] for rule in RULES if f"| `{rule['alert']}` |" not in PAGE] == []
