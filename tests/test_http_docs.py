"""The pages about HTTP are true: every curl line in them works as it stands, and every endpoint is in them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from http_bodies import BODIES
from http_server import HttpServer, running_http
from projectors import wav, write_projector, write_seeing_model
from required import missing, required_command

from harness import run_to_end, short_directory
from models import FILL_IN, write_encoder, write_word_model
from uma import errors
from uma.constraints import hints_of
from uma.errors import UmaError
from uma.http import problem
from uma.http.app import ENDPOINTS
from uma.http.page.endpoints import ENDPOINTS as PAGE_ENDPOINTS
from uma.http.page.endpoints import is_file
from uma.jobs.store import StoreFault, StoreTaken
from uma.kept import KeptFault
from uma.types import SamplingParams

DOCS = Path(__file__).parents[1] / "docs"
NAMES = ("http", "endpoints", "fields", "access")
PAGE = "\n".join((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in NAMES)
PASTED = "\n".join([PAGE, *((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("decisions", "media"))])
LINES = re.findall(r"^curl .*?(?=\n(?:curl |```))", PASTED, re.MULTILINE | re.DOTALL)
SHOWN = re.findall(
    r"^```sh\n(curl [^`]*)\n```\n\n(?:\w[^\n]*:\n\n)?```(json|text)\n(.*?)^```", PASTED, re.MULTILINE | re.DOTALL
)
"""Lines with the answer that is shown below them."""
RANKING = [line for line in LINES if "rerank" in line or "/v1/score" in line]
"""Lines for a model that ranks."""
FILLING = [line for line in LINES if "/infill" in line]
"""Lines for a model with tokens for filling in the middle."""
RUNNING = [line for line in LINES if "chatcmpl-" in line or "/why/" in line]
"""Lines about a request that runs."""
KEPT = [line for line in LINES if "file-" in line or "batch_" in line or "resp_" in line or "/history" in line]
"""Lines about a file, a batch, a response or a request that is kept."""
MANAGING = [line for line in LINES if re.search(r"/api/(pull|delete|copy)|/models/(un)?load", line)]
"""Lines for a server of several models."""
HEARING = [line for line in LINES if "/audio/" in line]
"""Lines for a model that hears."""
OTHERS = [*HEARING, *RANKING, *FILLING, *RUNNING, *KEPT, *MANAGING]


def test_the_client_in_javascript_runs_as_pasted(tmp_path: Path, http_server: HttpServer) -> None:
    folders = map(Path, os.environ.get("NODE_PATH", "").split(os.pathsep))
    folder = next((each for each in folders if (each / "openai").is_dir()), None)
    if folder is None:
        missing("agents", "there is no OpenAI client for JavaScript: npm install openai, and NODE_PATH")
    (tmp_path / "node_modules").symlink_to(folder)
    (code,) = re.findall(r"^```js\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "ask.mjs").write_text(code.replace("http://127.0.0.1:8080", http_server.url))
    done = run_to_end(required_command("node"), str(tmp_path / "ask.mjs"))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 2


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    path = write_encoder(tmp_path_factory.mktemp("model") / "reranker.gguf", pooling="rank")
    with short_directory() as directory, running_http(directory, "--model", str(path)) as process:
        yield process


@pytest.mark.parametrize("line", [line for line in LINES if line not in OTHERS])
def test_every_line_can_be_pasted(line: str, http_server: HttpServer) -> None:
    paste(line, http_server)


@pytest.mark.parametrize(("line", "language", "shown"), SHOWN)
def test_an_answer_that_is_shown_has_the_form_of_the_real_one(
    line: str, language: str, shown: str, http_server: HttpServer
) -> None:
    told, real = (
        events(text) if language == "text" else [json.loads(text)] for text in (shown, pasted(line, http_server).stdout)
    )
    assert members(told) <= members(real)


def test_every_task_shows_its_answer() -> None:
    tasks = (DOCS / "http.md").read_text(encoding="utf-8").partition("## Tasks")[2].partition("\n## ")[0]
    assert len(SHOWN) > tasks.count("```sh") >= 5


def test_the_table_of_errors_is_what_the_code_says() -> None:
    section = (DOCS / "http.md").read_text(encoding="utf-8").partition("## Errors")[2]
    rows = re.findall(r"^\| (\d+|-) \| .* \| `(\w+)` \| (?:`(\w+)`|-) \| (yes|no) \|$", section, re.MULTILINE)
    every: list[type[UmaError]] = [*errors_of(errors), *errors_of(problem), StoreFault, StoreTaken, KeptFault]
    of_python = {each.__name__: each for each in errors_of(errors)}
    of_http = {each.code: each for each in every if each.__name__ not in of_python}
    told = set()
    for status, code, name, again in rows:
        error = (of_python[name] if name else of_http[code])("x")
        if (name, status) == ("ModelUnusable", "503"):
            error.retry_after_ms = 1_000
        found = problem.Problem.of(error)
        assert error.code == code
        assert status in ("-", str(found.status)), code
        assert (again == "yes") == (found.retry_after_ms is not None), code
        told.add(type(error))
    assert told == set(every)


@pytest.mark.parametrize("error", [errors.WrongValues("x"), errors.WrongKind("x")])
def test_what_is_wrong_in_a_class_made_by_hand_is_a_bad_request_over_http(error: UmaError) -> None:
    assert problem.Problem.of(error).status == 400


def errors_of(module: ModuleType) -> list[type[UmaError]]:
    """The classes of errors that a module defines, but their base."""
    classes = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, UmaError)]
    return [each for each in classes if each is not UmaError and each.__module__ == module.__name__]


def events(text: str) -> list[Any]:
    return [json.loads(line) for line in re.findall(r"^data: (\{.*)$", text, re.MULTILINE)]


def members(value: Any, path: str = "") -> set[str]:
    """Paths of all members of a JSON value, without the places in lists."""
    if isinstance(value, list):
        return set().union(*(members(item, path) for item in value))
    if isinstance(value, dict):
        return set().union(*({f"{path}.{name}"} | members(item, f"{path}.{name}") for name, item in value.items()))
    return set()


@pytest.mark.parametrize("line", RANKING)
def test_every_line_about_ranking_can_be_pasted_where_the_model_ranks(line: str, reranker: HttpServer) -> None:
    paste(line, reranker)


@pytest.mark.parametrize("line", FILLING)
def test_every_line_about_filling_in_can_be_pasted_where_the_model_does(line: str, tmp_path: Path) -> None:
    path = write_word_model(tmp_path / "words.gguf", fill_in=FILL_IN)
    with short_directory() as directory, running_http(directory, "--model", str(path)) as process:
        paste(line, process)


@pytest.mark.parametrize("line", HEARING)
def test_every_line_about_sounds_can_be_pasted_where_the_model_hears(line: str, tmp_path: Path) -> None:
    path = write_seeing_model(tmp_path / "model.gguf", "llava")
    write_projector(tmp_path / "mmproj.gguf", None, hears="gemma4ua")
    (tmp_path / "speech.wav").write_bytes(wav(0.2))
    with short_directory() as directory, running_http(directory, "--model", str(path), "--alias", "builtin") as process:
        paste(f"cd {tmp_path}; {line} -F max_tokens=8", process)


@pytest.mark.parametrize("line", RUNNING)
def test_every_line_about_a_running_request_finds_that_it_does_not_run(line: str, http_server: HttpServer) -> None:
    done = pasted(line, http_server)
    assert "request not found" in done.stdout


@pytest.mark.parametrize("line", KEPT)
def test_every_line_about_a_file_or_a_batch_finds_that_it_is_not_kept(line: str, http_server: HttpServer) -> None:
    assert "no such" in pasted(line, http_server).stdout


@pytest.mark.parametrize("line", MANAGING)
def test_every_line_about_managing_models_is_refused_by_name_where_there_is_one(
    line: str, http_server: HttpServer
) -> None:
    assert re.search(r"one model for as long as it runs|a copy would only be", pasted(line, http_server).stdout)


def paste(line: str, server: HttpServer) -> None:
    done = pasted(line, server)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def pasted(line: str, server: HttpServer) -> subprocess.CompletedProcess[str]:
    # In a pipe the exit status is that of the last command, so an error must not print a body there.
    fails = "--fail" if "|" in line else "--fail-with-body"
    curl = f"curl() {{ {required_command('curl')} --silent --show-error {fails} --noproxy '*' \"$@\"; }}"
    command = f"{curl}; UMA={server.url}; {line}"
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)


def test_every_endpoint_is_told_of() -> None:
    shown = {re.sub(r"/v1/models/\S+", "/v1/models/{id:path}", path) for path in re.findall(r"\$UMA(/[^\s?\"]+)", PAGE)}
    shown = {re.sub(r"/ui/api/answers/\w+", "/ui/api/answers/{token}", path) for path in shown}
    shown = {re.sub(r"/v1/requests/[\w-]+", "/v1/requests/{id}", path) for path in shown}
    shown = {re.sub(r"/v1/history/\d+", "/v1/history/{number:int}", path) for path in shown}
    shown = {re.sub(r"/ui/api/why/\w+", "/ui/api/why/{id}", path) for path in shown}
    shown = {re.sub(r"/v1/responses/resp_\w+", "/v1/responses/resp_{id}", path) for path in shown}
    shown = {re.sub(r"/v1/(files|batches)/[\w-]+", r"/v1/\1/{id}", path) for path in shown}
    assert shown == {path for _, path, *_ in [*ENDPOINTS, *PAGE_ENDPOINTS] if is_api(path)}


def is_api(path: str) -> bool:
    """Whether a program asks for it, and not a browser for a file of the page."""
    return path.startswith("/ui/api/") or not is_file(path)


def test_every_path_of_the_page_is_told_of() -> None:
    told = set(re.findall(r"^\| `(GET|POST|DELETE) (/ui/api/\S+)` \|", PAGE, re.MULTILINE))
    served = {(method, path) for method, path, *_ in PAGE_ENDPOINTS if path.startswith("/ui/api/")}
    assert told == served


def test_every_field_of_every_body_is_told_of() -> None:
    table = re.sub(r"^```.*?^```", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    told = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", table))))
    missing = {path: sorted(set(field_names(body)) - told) for path, body in BODIES.items()}
    assert {path: names for path, names in missing.items() if names} == {}


def field_names(body: type[Any]) -> Iterator[str]:
    """The fields of a body, and of the objects in it. Messages and tools are lists, and as each dialect has them."""
    for name, hint in hints_of(body).items():
        yield name
        for inner in getattr(hint, "__args__", ()):
            if attrs.has(inner) and inner is not SamplingParams:
                yield from field_names(inner)
