"""llama.cpp's server tests run against this server: some of them, as `tests/peers/run_peers.py` runs all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from reference import llama_cpp

sys.path.insert(0, str(Path(__file__).with_name("peers")))

from accepted import DIFFERENCES, reason_for
from run_peers import copy_tests, run


def test_a_server_test_of_llama_cpp_passes_against_this_server(tmp_path: Path) -> None:
    llama_cpp()
    found = run(tmp_path, ["unit/test_tokenize.py"])
    assert {each.test: each.outcome for each in found} == {
        f"test_tokenize.py::{name}": "passed"
        for name in ("test_tokenize_detokenize", "test_tokenize_with_bos", "test_tokenize_with_pieces")
    }


def test_tests_of_another_llama_cpp_are_found_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "tools" / "server" / "tests" / "unit").mkdir(parents=True)
    for name in ("conftest.py", "utils.py", "unit/test_chat_completion.py"):
        (source / "tools" / "server" / "tests" / name).write_text("")
    with pytest.raises(ValueError, match="tests of another llama"):
        copy_tests(source, tmp_path / "copy", tmp_path / "copy" / "tests")


def test_each_difference_has_its_reason() -> None:
    assert reason_for("test_slot_save.py::test_slot_erase") == DIFFERENCES[0][1]
    assert reason_for("test_basic.py::test_server_start_simple") is None
