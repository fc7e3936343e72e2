"""`/openapi.json` is OpenAPI, has every route, and takes the bodies that the docs and the tests send."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_world import config_for
from http_server import hosted_http
from jsonschema import Draft202012Validator
from test_http_promises import ELSE, GENERATING

from uma.http.app import description
from uma.http.page.endpoints import is_file

DOCS = Path(__file__).parents[1] / "docs"
DESCRIBED: dict[str, Any] = json.loads(description())


def wrong(path: str, body: Any) -> list[str]:
    """What the description says against a body that is sent to a path as JSON."""
    (operation,) = [found for found in DESCRIBED["paths"][path].values() if "requestBody" in found]
    content = operation["requestBody"]["content"]["application/json"]
    validator = Draft202012Validator({**content["schema"], "components": DESCRIBED["components"]})
    return [error.message for error in validator.iter_errors(body)]


def bodies_of_the_docs() -> Iterator[tuple[str, Any]]:
    """Path and body of each line of the docs that sends JSON."""
    for page in sorted(DOCS.glob("*.md")):
        for line in re.findall(r"^curl (?:.*\\\n)*.*$", page.read_text(encoding="utf-8"), re.MULTILINE):
            url, body = re.search(r"(?:\$UMA|http://[^/ ]+)(/[^ ?]*)", line), re.search(r"-d '(\{.*?\})'", line)
            if url and body:
                yield url[1], json.loads(body[1])


@pytest.mark.slow
def test_a_library_finds_it_valid() -> None:
    pytest.importorskip("openapi_spec_validator").validate(DESCRIBED)


def test_every_route_of_a_server_is_in_it_and_the_server_shows_it(tiny: Path) -> None:
    with hosted_http(config_for(tiny, http="127.0.0.1:0")) as hosted:
        routes = {
            (method.lower(), re.sub(r":\w+}", "}", route.path))
            for route in getattr(hosted.gateway.app, "inner").routes  # noqa: B009  (the app is any ASGI app to its types)
            for method in route.methods - {"HEAD"}
            if not is_file(route.path)
        }
        with hosted.connect() as raw:
            shown = raw.ask("GET", "/openapi.json")
    assert {(method, path) for path, methods in DESCRIBED["paths"].items() for method in methods} == routes
    assert (shown.status, shown.json) == (200, DESCRIBED)


def test_bodies_that_the_docs_and_the_tests_send_are_valid() -> None:
    sent = [*bodies_of_the_docs(), *GENERATING.items(), *ELSE.items()]
    assert len({path for path, _ in sent}) > 30
    assert {(path, *found) for path, body in sent if path != "/api/copy" and (found := wrong(path, body))} == set()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_p": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}),
        ("/api/generate", {"prompt": "a", "options": {"seed": "1"}}),
        ("/detokenize", {"tokens": [-1]}),
    ],
)
def test_a_body_that_is_refused_is_not(path: str, body: Any) -> None:
    assert wrong(path, body) != []


def test_the_page_is_what_it_describes() -> None:
    make = runpy.run_path(str(DOCS / "make_openapi.py"))
    assert make["page"]() == (DOCS / "openapi.md").read_text(encoding="utf-8"), "run `python docs/make_openapi.py`"
