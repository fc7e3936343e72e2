"""Claims about llama.cpp's log: kept, quiet, and shown where asked for."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path

import pytest

from harness import clean_environ, run_to_end
from models import write_model
from uma.llama.log import CONTINUED, DEBUG, ERROR, INFO, KEPT_LINES, LOG, LlamaLog
from uma.llama.model import Model

LOAD = "import sys; from pathlib import Path; from uma.llama.model import Model; Model.load(Path(sys.argv[1])).close()"
LOAD_UNCHECKED = """
import sys
import llama_cpp as lib
from uma.llama import log
log.install()
lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params())
"""
"""Past UMA's own checks of the file, which refuse what is known to end the process."""


def test_lines_are_put_together_from_their_pieces() -> None:
    log = LlamaLog()
    log.write(INFO, "loading")
    log.write(CONTINUED, ".")
    log.write(CONTINUED, ".\n")
    log.write(ERROR, "two\nlines\n\n")
    assert log.last(9) == ["loading..", "two", "lines"]
    assert [line.is_problem for line in log.since(0)] == [False, True, True]


def test_only_the_last_lines_are_kept() -> None:
    log = LlamaLog()
    for number in range(KEPT_LINES + 50):
        log.write(DEBUG, f"{number}\n")
    assert log.last(2) == [f"{KEPT_LINES + 48}", f"{KEPT_LINES + 49}"]
    assert len(log.last(10**6)) == KEPT_LINES


def test_an_error_quotes_its_own_threads_lines() -> None:
    log = LlamaLog()
    mark = log.mark
    other = threading.Thread(target=lambda: log.write(ERROR, "another thread's trouble\n"))
    other.start()
    other.join()
    log.write(ERROR, "mine\n")
    assert [line.text for line in log.since(mark)] == ["mine"]


def test_loading_is_logged_for_any_listener(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    mark = LOG.mark
    with caplog.at_level(logging.DEBUG, logger="uma.llama"), Model.load(path):
        pass
    assert any(str(path) in line.text for line in LOG.since(mark))
    assert any(str(path) in record.getMessage() for record in caplog.records)
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


@pytest.mark.parametrize("debug", [True, False])
def test_llama_is_heard_only_where_asked_for(tmp_path: Path, debug: bool) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    environ = clean_environ(UMA_DEBUG="1") if debug else clean_environ()
    result = run_to_end(sys.executable, "-c", LOAD, str(path), environ=environ)
    assert (result.returncode, result.stdout) == (0, "")
    assert (str(path) in result.stderr) == debug
    assert debug or result.stderr == ""


def test_where_llama_ends_the_process_its_reason_is_told(tmp_path: Path) -> None:
    path = write_model(tmp_path / "doubled.gguf")
    length = (2).to_bytes(8, "little")
    once, twice = b"in" + length + b"an", b"in" + length + b"in"
    path.write_bytes(path.read_bytes().replace(once, twice))
    result = run_to_end(sys.executable, "-c", LOAD_UNCHECKED, str(path))
    assert result.returncode == -signal.SIGABRT
    first, *others = result.stderr.splitlines()
    assert first.startswith("uma: error: llama.cpp gave up and ended the process: ")
    assert "id_to_token.size() == token_to_id.size()" in first
    assert len(others) < 20
