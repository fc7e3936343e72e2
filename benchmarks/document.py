"""A document of which a part is written by a program, between two marks."""

from __future__ import annotations

from pathlib import Path


def between(path: Path, begin: str, end: str) -> str:
    """What stands between the two marks. Raises `ValueError` where they are missing."""
    text = path.read_text(encoding="utf-8")
    return text[text.index(begin) + len(begin) : text.index(end)]


def replace_between(path: Path, begin: str, end: str, part: str) -> None:
    """Replace what stands between the two marks. Raises `ValueError` where they are missing."""
    text = path.read_text(encoding="utf-8")
    before, after = text.index(begin) + len(begin), text.index(end)
    path.write_text(f"{text[:before]}\n\n{part}\n{text[after:]}", encoding="utf-8")
