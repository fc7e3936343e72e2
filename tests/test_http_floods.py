"""What a client can have logged at no cost of its own: a few lines, however much it sends, and none of them long."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from http_server import running_http

from uma.http.keys import add
from uma.net.throttle import LINES_OF_ONE, LINES_OF_ONE_PER_SEC, MAX_LOGGED_CHARS

BODIES = {"/tokenize": {"content": ""}, "/apply-template": {"messages": [{"role": "user", "content": "a"}]}}
REQUESTS = 300
LONGEST_LINE = 2 * MAX_LOGGED_CHARS
"""Of plain characters, with all that stands beside what the client has written."""


@pytest.mark.parametrize(
    ("method", "path", "status", "lines_of_each"),
    [
        ("GET", "/" + "a" * 60_000, 404, 2),
        ("A" * 60_000, "/v1/models", 405, 2),
        ("POST", "/v1/completions", 400, 2),
        ("POST", "/tokenize", 200, 1),
        ("POST", "/apply-template", 200, 1),
    ],
)
def test_a_flood_is_a_few_short_lines_in_the_log_which_say_how_many_there_were(
    socket_dir: Path, tiny: Path, method: str, path: str, status: int, lines_of_each: int
) -> None:
    with running_http(socket_dir, "--model", str(tiny)) as server:
        began_sec = time.monotonic()
        with server.connect() as raw:
            for _ in range(REQUESTS):
                assert raw.ask(method, path, BODIES.get(path, b"{")).status == status
        most_lines = LINES_OF_ONE + LINES_OF_ONE_PER_SEC * (time.monotonic() - began_sec)
        assert server.process.stop() == 0
        _check_flood(server.process.log.join(), most_lines, REQUESTS * lines_of_each)


def test_a_flood_without_a_key_is_a_few_lines(socket_dir: Path, tiny: Path) -> None:
    add(socket_dir / "keys.toml", "a")
    with running_http(socket_dir, "--model", str(tiny), "--http-keys", str(socket_dir / "keys.toml")) as server:
        began_sec = time.monotonic()
        with server.connect() as raw:
            for number in range(REQUESTS):
                assert raw.ask("POST", "/v1/completions", b"{", **{"x-api-key": f"uma-{number}"}).status == 401
        most_lines = LINES_OF_ONE + LINES_OF_ONE_PER_SEC * (time.monotonic() - began_sec)
        assert server.process.stop() == 0
        _check_flood(server.process.log.join(), most_lines, REQUESTS * 2)


def _check_flood(log: str, most_lines: float, events: int) -> None:
    lines = [line for line in log.splitlines() if "event=http.request" in line or "event=http.failed" in line]
    told = sum(int(line.partition("suppressed=")[2] or 0) for line in log.splitlines())
    assert len(lines) <= most_lines
    assert len(lines) + told == events
    assert max(map(len, lines)) <= LONGEST_LINE


def test_requests_that_the_engine_computed_are_all_in_the_log(socket_dir: Path, tiny: Path) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    with running_http(socket_dir, "--model", str(tiny)) as server:
        with server.connect() as raw:
            for _ in range(2 * LINES_OF_ONE):
                assert raw.ask("POST", "/v1/completions", body).status == 200
        assert server.process.stop() == 0
        assert server.process.log.join().count("path=/v1/completions status=200") == 2 * LINES_OF_ONE
