"""The built-in model's file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

BUILTIN_FILE = "uma-story.gguf"


def builtin_path() -> Path:
    """The built-in model's file, as the package was installed."""
    return Path(str(files("uma") / "data" / BUILTIN_FILE))
