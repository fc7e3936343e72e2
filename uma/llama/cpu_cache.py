"""What was found out about this llama.cpp library on this CPU, kept in `$XDG_CACHE_HOME/uma`.

Two processes that start at the same moment both find it out; either leaves a complete file. A cache that cannot be
written costs finding it out at each start, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uma.llama import library

logger = logging.getLogger("uma.llama.cpu_cache")


def key(version: int) -> list[Any]:
    """Names the library and the CPU, and the version of what finds out."""
    return [version, library.library_identity(), library.cpu_identity()]


def cache_file(what: str, key: list[Any]) -> Path:
    """Where this is kept for this key, or would be."""
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return folder() / f"{what}-{digest[:16]}.json"


def folder() -> Path:
    """UMA's folder for what can be found out again."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has a relative path ignored.
    return (Path(named) if Path(named).is_absolute() else _home() / ".cache") / "uma"


def has_folder() -> bool:
    """Whether there can be such a folder: `XDG_CACHE_HOME` names one, or this user has a home."""
    return Path(os.devnull) not in folder().parents


def _home() -> Path:
    """This user's folder; one that there cannot be where the system knows of none (a container's nameless user)."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.devnull)


def read(path: Path, key: list[Any]) -> dict[str, Any] | None:
    """The fields in this file; None where there is none, it is broken, or of another key."""
    try:
        kept = json.loads(path.read_bytes())
        return kept if kept.pop("key") == key else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write(path: Path, key: list[Any], fields: Mapping[str, Any]) -> None:
    """Keep these fields. A failure is logged and costs nothing now."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            json.dump({"key": key, **fields}, file, indent=2)
        Path(file.name).replace(path)
    except OSError as error:
        logger.debug("%s: cannot be kept: %s", path, error.strerror)
