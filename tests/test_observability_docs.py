"""docs/observability.md is true: what it shows is what a server does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import ServerProcess, run_to_end, running_server, short_directory, uma_command
from uma.engine.recorder import MAX_VALUES
from uma.engine.submission import MAX_EXPLAINED
from uma.engine.worker.account import RECORDED_TOKENS
from uma.types import CAUSES

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


def test_the_causes_are_those_of_the_code() -> None:
    section = PAGE.partition("## Why was this slow")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE) == list(CAUSES.items())
    assert f"one of the last {MAX_EXPLAINED:,}" in PAGE
    assert f"some {RECORDED_TOKENS} tokens" in PAGE


def test_uma_explain_tells_of_a_request_by_its_id_and_of_the_newest_one(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.hello()
        for id in ("first\x1b[2J", "second"):
            # Long enough that neither reading nor writing rounds to 0 % beside what a busy machine makes it wait.
            raw.send({"id": id, "prompt": f"{id} was. " * 100, "max_tokens": 32, "ignore_eos": True})
            raw.last_of(id)
        raw.send({"type": "explain", "id": "q", "request": "third"})
        assert raw.last_of("q")["code"] == "E_PROTO_BAD_REQUEST"
    newest, first = (
        run_to_end(*uma_command("explain", "--socket", str(server.socket), *more))
        for more in ([], ["first\x1b[2J", "--json"])
    )
    assert (newest.returncode, newest.stderr) == (0, "")
    head, figures = newest.stdout.splitlines()[0], newest.stdout.splitlines()[2]
    assert head.startswith("request second · normal")
    assert "32 tokens written" in figures
    assert all(CAUSES[cause] in newest.stdout for cause in ("read", "write"))
    assert "Cache: " in newest.stdout
    told = json.loads(first.stdout)
    assert (told["id"], told["reason"], told["generated_tokens"]) == ("first\x1b[2J", "length", 32)
    assert "\x1b" not in first.stdout


def test_a_trace_is_written_by_the_command(server: ServerProcess, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run_to_end(*uma_command("trace", str(out), "--seconds", "0.2", "--socket", str(server.socket)))
    assert (done.returncode, done.stdout) == (0, "")
    assert out.stat().st_mode & 0o777 == 0o600
    trace = json.loads(out.read_text(encoding="utf-8"))
    assert {each["args"]["name"] for each in trace["traceEvents"] if each["ph"] == "M"} >= {"decode", "Trio"}
    nowhere = str(tmp_path / "none" / "out.json")
    told = run_to_end(*uma_command("trace", nowhere, "--seconds", "60", "--socket", str(tmp_path / "no.sock")))
    assert told.returncode == 2
    assert f"{nowhere}: cannot be written" in told.stderr
    assert f"beyond {MAX_VALUES:,}" in PAGE
