"""The pytest plugin with which llama.cpp's server tests run: no downloads, and what is only looks is not asserted.

It takes the place of their own `conftest.py`. Flags that UMA has for a request only (a seed, a temperature of 0,
thinking) are put into the requests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_server import Server

RESULTS = "PEERS_RESULTS"
"""The variable with the path of the results: a line of JSON for each test."""
GENERATING = ("completion", "completions", "infill", "messages", "responses", "apply-template")
"""Last parts of the paths whose bodies get what the flags say."""

BOUNDS = ("n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens")
"""How a body says how many tokens it wants. `--n-predict` is how many where it does not."""

_unlike: list[str] = []
"""What looks otherwise in the running test."""


def pytest_configure(config: pytest.Config) -> None:
    """Prepare `utils`, before the tests take all names from it."""
    sys.modules["wget"] = ModuleType("wget")  # nothing is downloaded
    import utils  # type: ignore[import-not-found]  # llama.cpp's, in the folder of the tests

    utils.match_regex = lambda regex, text: _is_like(f"text like {regex!r}")
    utils.looks = _Looks
    utils.looks_empty = _is_empty
    utils.download_file = _no_download
    utils.subprocess = SimpleNamespace(Popen=Server, TimeoutExpired=subprocess.TimeoutExpired)
    for name in ("make_request", "make_stream_request"):
        setattr(utils.ServerProcess, name, _with_flags(getattr(utils.ServerProcess, name)))


def _is_like(what: str) -> bool:
    _unlike.append(what)
    return True


class _Looks(int):
    """A number that depends on the model: equal to any other."""

    def __eq__(self, other: object) -> bool:
        return _is_like(f"the number {int(self)}")

    __hash__ = int.__hash__


def _is_empty(text: str | None) -> bool:
    if text == "":
        _is_like("an empty text")
    return not text


def _no_download(url: str, output_file_path: str | None = None) -> str:
    pytest.fail(f"needs a download: {url}")


def _with_flags(method: Any) -> Any:
    def with_flags(self: Any, verb: str, path: str, data: Any = None, *more: Any, **named: Any) -> Any:
        endpoint = path.rsplit("/", 1)[-1]
        if isinstance(data, dict) and endpoint in GENERATING:
            data = {**_flags(self), **data}
            if (self.n_predict or -1) > 0 and not any(name in data for name in BOUNDS):
                data["max_output_tokens" if endpoint == "responses" else "max_tokens"] = self.n_predict
        return method(self, verb, path, data, *more, **named)

    return with_flags


def _flags(server: Any) -> dict[str, Any]:
    flags = {"seed": server.seed}
    if server.debug:
        flags["verbose"] = True
    if server.temperature == 0:
        flags["temperature"] = 0.0
    if server.reasoning is not None:  # `auto` is on for llama-server, where a template has a switch
        flags["chat_template_kwargs"] = {"enable_thinking": server.reasoning != "off"}
    return flags


@pytest.fixture(autouse=True)
def stop_server_after_each_test() -> Iterator[None]:
    """As llama.cpp's own."""
    import utils

    _unlike.clear()
    yield
    for server in set(utils.server_instances):
        server.stop()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how a test ended."""
    if report.when != "call" and report.passed:
        return
    why = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else _complaint(report)
    line = {"test": report.nodeid, "outcome": report.outcome, "why": why, "unlike": list(_unlike)}
    with Path(os.environ[RESULTS]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _complaint(report: pytest.TestReport) -> str:
    """The line that failed, and pytest's first words about it."""
    lines = [line for line in report.longreprtext.splitlines() if line.startswith(("E ", "> "))]
    return " | ".join(line[1:].strip() for line in lines[:6])[:500]
