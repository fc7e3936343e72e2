"""The order in which the suite's files run, and which of them are quick."""

from __future__ import annotations

from pathlib import Path

from conftest import LONG_FILES, QUICK_FILES


def test_every_file_that_comes_first_is_there() -> None:
    """One that was renamed would run among the others."""
    assert [name for name in LONG_FILES if not [*Path(__file__).parent.rglob(f"{name}.py")]] == []


def test_every_pattern_of_quick_files_has_a_file() -> None:
    assert [pattern for pattern in QUICK_FILES if not [*Path(__file__).parent.rglob(f"{pattern}.py")]] == []
