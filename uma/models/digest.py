"""A model file's identity by its content, without the minutes that reading all of it takes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

HEAD_BYTES = 2**20
"""Bytes that are hashed of the file's beginning, which holds its metadata."""
SAMPLE_BYTES, SAMPLES = 65_536, 16
"""Pieces that are hashed of the weights, spread over them."""


def warm(files: Iterable[tuple[str, int]]) -> None:
    """Read what `digest` of these paths and sizes needs. For a thread: files are opened."""
    for path, size_bytes in files:
        digest(path, size_bytes)


def digest(path: str, size_bytes: int) -> str:
    """SHA-256 of a model's size, its file's beginning and samples: the same file at another path has the same one, and
    a changed file of the same size another. By path and size where the file cannot be read, as on another machine.
    """
    try:
        return _of_content(path, size_bytes, Path(path).stat().st_mtime_ns)
    except (OSError, ValueError):
        return hashlib.sha256(f"{path}:{size_bytes}".encode("utf-8", "surrogateescape")).hexdigest()


@lru_cache(maxsize=1024)
def _of_content(path: str, size_bytes: int, mtime_ns: int) -> str:
    """`mtime_ns` has a file that changed read again."""
    found = hashlib.sha256(str(size_bytes).encode())
    with Path(path).open("rb") as file:
        found.update(file.read(HEAD_BYTES))
        end = file.seek(0, 2)
        for sample in range(SAMPLES):
            file.seek(max(0, (end - SAMPLE_BYTES) * sample // (SAMPLES - 1)))
            found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()
