"""docs/http.md is true: every curl line in it works as it stands, and every endpoint is in it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from http_server import HttpServer

from uma.cli.parser import build_parser
from uma.http.app import ENDPOINTS

PAGE = (Path(__file__).parents[1] / "docs" / "http.md").read_text(encoding="utf-8")
LINES = re.findall(r"^curl .*$", PAGE, re.MULTILINE)
REFUSED = set(re.findall(r"`POST (\S+)` is refused", PAGE))


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("line", LINES)
def test_every_line_can_be_pasted(line: str, http_server: HttpServer) -> None:
    command = f"UMA={http_server.url}; {line} --silent --fail-with-body --noproxy '*'"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_every_endpoint_is_told_of() -> None:
    shown = {re.sub(r"/v1/models/\S+", "/v1/models/{id:path}", path) for path in re.findall(r"\$UMA(/\S+)", PAGE)}
    assert shown | REFUSED == {path for _, path, _ in ENDPOINTS}


@pytest.mark.parametrize("path", sorted(REFUSED))
def test_what_is_said_to_be_refused_is(path: str, http_server: HttpServer) -> None:
    answer = http_server.ask("POST", path, {"input": "x"})
    assert answer.status == 400
    assert "this server cannot" in str(answer.json)


def test_every_option_named_exists() -> None:
    parser = build_parser()
    commands = next(action for action in parser._actions if action.choices)
    known = {word for each in dict(commands.choices or {}).values() for word in each._option_string_actions}
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) <= known
