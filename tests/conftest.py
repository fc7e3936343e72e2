"""Fixtures that more than one test file uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import ServerProcess, running_server, short_directory


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A directory for this test's sockets."""
    with short_directory() as directory:
        yield directory


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """One real `uma run` with the built-in model, for all tests that leave it as they found it."""
    with short_directory() as directory, running_server(directory / "uma.sock") as process:
        yield process
