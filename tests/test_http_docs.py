"""docs/http.md is true: every curl line in it works as it stands, and every endpoint is in it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import HttpServer, running_http

from harness import short_directory
from models import write_encoder
from uma.cli.parser import build_parser
from uma.http.app import ENDPOINTS
from uma.http.page.endpoints import ENDPOINTS as PAGE_ENDPOINTS

PAGE = (Path(__file__).parents[1] / "docs" / "http.md").read_text(encoding="utf-8")
LINES = re.findall(r"^curl .*$", PAGE, re.MULTILINE)
RANKING = [line for line in LINES if "rerank" in line]
"""Lines for a model that ranks."""


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    path = write_encoder(tmp_path_factory.mktemp("model") / "reranker.gguf", pooling="rank")
    with short_directory() as directory, running_http(directory, "--model", str(path)) as process:
        yield process


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("line", [line for line in LINES if line not in RANKING])
def test_every_line_can_be_pasted(line: str, http_server: HttpServer) -> None:
    paste(line, http_server)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("line", RANKING)
def test_every_line_about_ranking_can_be_pasted_where_the_model_ranks(line: str, reranker: HttpServer) -> None:
    paste(line, reranker)


def paste(line: str, server: HttpServer) -> None:
    command = f"UMA={server.url}; {line} --silent --fail-with-body --noproxy '*'"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_every_endpoint_is_told_of() -> None:
    shown = {re.sub(r"/v1/models/\S+", "/v1/models/{id:path}", path) for path in re.findall(r"\$UMA(/\S+)", PAGE)}
    assert shown == {path for _, path, _ in ENDPOINTS}


def test_every_path_of_the_page_is_told_of() -> None:
    told = set(re.findall(r"^\| `(GET|POST|DELETE) (/ui/api/\S+)` \|", PAGE, re.MULTILINE))
    served = {(method, path) for method, path, _ in PAGE_ENDPOINTS if path.startswith("/ui/api/")}
    assert told == served


def test_every_option_named_exists() -> None:
    parser = build_parser()
    commands = next(action for action in parser._actions if action.choices)
    known = {word for each in dict(commands.choices or {}).values() for word in each._option_string_actions}
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) <= known
