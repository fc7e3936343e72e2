"""`--protocol newline`, as `nc -U` sees it."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import PATIENCE_SEC, ServerProcess, is_settled, running_server, short_directory, until


@pytest.fixture(scope="module")
def lines() -> Iterator[ServerProcess]:
    """A server in newline mode with the built-in model, and short answers."""
    flags = ("--protocol", "newline", "--max-tokens", "12", "--max-prompt-bytes", "1000")
    with short_directory() as directory, running_server(directory / "s", *flags) as server:
        yield server


def talk(path: Path, data: bytes) -> bytes:
    """All that comes back for `data` from a client that then says no more."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_SEC)
        sock.connect(str(path))
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def test_a_line_in_is_a_prompt_and_its_text_comes_out_with_a_newline(lines: ServerProcess) -> None:
    text = talk(lines.socket, b"Once upon a time\n").decode()
    assert text.endswith("\n")
    assert len(text) > 5
    assert talk(lines.socket, b"Once upon a time\r\n").decode() == text


def test_each_line_s_end_is_logged_with_an_id(lines: ServerProcess) -> None:
    mark = lines.log.mark()
    talk(lines.socket, b"Once upon a time\na\0b\n")
    finished = lines.log.wait_for("event=request.finished", since=mark)
    failed = lines.log.wait_for("event=request.failed", since=mark)
    ids = [re.search(r"session=(s\d+) request=(\1-\d+) ", line) for line in (finished, failed)]
    assert [found and found[2].split("-")[1] for found in ids] == ["1", "2"]


def test_lines_are_answered_in_order(lines: ServerProcess) -> None:
    prompts = [b"Once upon a time", b"The fox", b"A small boat"]
    alone = [talk(lines.socket, prompt + b"\n") for prompt in prompts]
    assert talk(lines.socket, b"\n".join(prompts) + b"\n") == b"".join(alone)


def test_many_lines_at_once_are_all_answered(lines: ServerProcess) -> None:
    assert talk(lines.socket, b"/nothing\n" * 200).count(b"\n") >= 200


def test_metrics_are_one_line_of_json_and_then_the_session_ends(lines: ServerProcess) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_SEC)
        sock.connect(str(lines.socket))
        sock.sendall(b"/metrics\n")
        data = b"".join(iter(lambda: sock.recv(65536), b""))
    assert data.endswith(b"}\n")
    assert json.loads(data)["active_sessions"] == 1


@pytest.mark.parametrize(
    ("line", "code"), [(b"a\0b\n", b"E_PROTO_BAD_REQUEST"), (b"\xff\xfe\n", b"E_PROTO_INVALID_JSON")]
)
def test_a_line_that_is_no_text_is_told_and_the_next_one_is_answered(
    lines: ServerProcess, line: bytes, code: bytes
) -> None:
    first, _, rest = talk(lines.socket, line + b"Once upon a time\n").partition(b"\n")
    assert first.startswith(code)
    assert rest == talk(lines.socket, b"Once upon a time\n")


def test_a_line_that_is_too_long_ends_the_session(lines: ServerProcess) -> None:
    data = talk(lines.socket, b"x" * 1_001)
    assert data.startswith(b"E_LIMIT_PROMPT_TOO_LARGE")
    assert data.count(b"\n") == 1


def test_hanging_up_cancels_and_forgets_the_lines_that_wait(lines: ServerProcess) -> None:
    def metrics() -> dict[str, Any]:
        found = json.loads(talk(lines.socket, b"/metrics\n"))
        assert isinstance(found, dict)
        return found

    before = metrics()["requests_total"]
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_SEC)
        sock.connect(str(lines.socket))
        sock.sendall(b"Once upon a time\n" * 50)
        sock.recv(1)
    after = until(metrics, is_settled)
    assert after["requests_total"] - before < 50
