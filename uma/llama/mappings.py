"""What memory this process has, as Linux lists it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs

MAPPINGS = Path("/proc/self/maps")


@attrs.frozen
class Mapping:
    """A piece of memory from `start` to before `end`."""

    start: int
    end: int
    may: str
    """What can be done with it, and whether it is shared: `rw-p`."""
    name: str
    """The file behind it, or a name in brackets; empty where it has neither."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start


def mappings() -> Iterator[Mapping]:
    """All of it, by address; nothing where the system does not tell."""
    try:
        lines = MAPPINGS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        # 7f316eb35000-7f3175409000 rw-p 00000000 00:00 0 [and, if it has one, a name or a file's path]
        where, may, _, _, _, *name = line.split(maxsplit=5)
        start, end = (int(word, 16) for word in where.split("-"))
        yield Mapping(start, end, may, name[0] if name else "")
