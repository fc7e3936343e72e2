"""docs/observability.md is true: what it shows is what a server does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import ServerProcess, running_server, short_directory

PAGE = (Path(__file__).parents[1] / "docs" / "observability.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[ServerProcess]:
    with (
        short_directory() as folder,
        running_server(folder / "s", "--model", str(tiny), "--log-format", "json") as process,
    ):
        yield process


def test_the_log_has_the_form_shown(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.hello()
        raw.send({"id": "a\n", "prompt": "x", "max_tokens": 1, "ignore_eos": True}, {"id": "b", "prompt": 1})
        raw.last_of("a\n")
    server.log.wait_for("request.finished")
    shown = json.loads(re.findall(r"^({\"time.*),…}$", PAGE, re.MULTILINE)[0] + "}")
    lines = [json.loads(line) for line in server.log.text.splitlines()]
    assert all(line.keys() >= {"time", "level", "logger", "message"} for line in lines)
    (finished,) = (line for line in lines if line.get("event") == "request.finished")
    assert shown | {"time": finished["time"], "request": "a\n"} == {name: finished[name] for name in shown}
    assert isinstance(finished["ttft_ms"], float)
