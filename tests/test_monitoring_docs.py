"""The dashboard and the alert rules of docs/monitoring ask for what a server really tells."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from http_server import HttpServer, new_key, running_http

from harness import short_directory
from uma.supervisor.residency import UnloadReason

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
PAGE = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
NAME = re.compile(r"\buma_\w+")


@pytest.fixture(scope="module")
def told(http_server: HttpServer, folder: Path) -> str:
    """`/metrics` of a server of one model, and of one of several with keys and a file of users."""
    with short_directory() as place:
        keys, users = place / "keys.toml", place / "users.toml"
        users.write_text("[others]\n")
        key = {"authorization": f"Bearer {new_key('ada', keys)}"}
        bounds = ("--http-keys", str(keys), "--socket-users", str(users))
        with running_http(place, "--models", "all", *bounds, UMA_MODELS=str(folder)) as several:
            several.process.metrics()  # a session of this user
            texts = []
            for server, model in ((http_server, None), (several, "alpha")):
                server.ask("POST", "/v1/completions", {"model": model, "prompt": "a", "max_tokens": 2}, **key)
                texts.append(server.ask("GET", "/metrics", **key).body.decode())
    return "".join(texts)


@pytest.fixture(scope="module")
def kinds(told: str) -> dict[str, str]:
    """The kind of each sample that real servers' `/metrics` have, by name."""
    families = dict(re.findall(r"^# TYPE (\w+) (\w+)$", told, re.MULTILINE))
    samples = set(re.findall(r"^(uma_\w+)", told, re.MULTILINE))
    return {name: families.get(name) or families[re.sub(r"_(bucket|sum|count)$", "", name)] for name in samples}


def test_the_table_has_the_metrics_of_real_servers(told: str) -> None:
    real = re.findall(r"^# HELP (uma_\w+) (.*)\n# TYPE \w+ (\w+)$", told, re.MULTILINE)
    shown = re.findall(r"^\| `(uma_\w+)` \| (\w+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert {(name, kind, meaning) for name, meaning, kind in real} == set(shown)


def test_every_counter_is_named_as_openmetrics_has_it(told: str) -> None:
    counters = re.findall(r"^# TYPE (uma_\w+) counter$", told, re.MULTILINE)
    assert counters
    assert [name for name in counters if not name.endswith("_total")] == []


def test_the_page_has_every_reason_why_a_model_leaves() -> None:
    table = PAGE.partition("| reason | the model left memory because |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(get_args(UnloadReason))


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
    assert all("model" in labels for labels in sums) or "uma_http_" in expression or "uma_key_" in expression


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
    assert len(RULES) == 10
    assert [rule["alert"] for rule in RULES if f"| `{rule['alert']}` |" not in PAGE] == []
