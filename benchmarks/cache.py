"""Where the benchmarks keep what is slow to make: the peers' binaries, the random-weight model, an environment."""

from __future__ import annotations

import os
from pathlib import Path

LLAMA_CPP_PYTHON = "0.3.36"
"""The binding UMA is pinned to; the peers are built from the llama.cpp source inside its source package."""


def cache_dir() -> Path:
    """`$UMA_BENCH_CACHE`, else `$XDG_CACHE_HOME/uma-bench`, else `~/.cache/uma-bench`. Created if missing."""
    named = os.environ.get("UMA_BENCH_CACHE")
    base = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "uma-bench"
    base.mkdir(parents=True, exist_ok=True)
    return base


def peer_binary(name: str) -> Path:
    """A program of llama.cpp as `benchmarks.build_peers` builds it; it may not exist yet."""
    return cache_dir() / "build" / "bin" / name


def peer_python() -> Path:
    """The interpreter of the virtual environment that holds `llama_cpp.server`; it may not exist yet."""
    return cache_dir() / "peer-venv" / "bin" / "python"
