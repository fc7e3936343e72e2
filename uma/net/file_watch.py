"""Detects that a file has changed, so that a server reads its keys and users again without a signal."""

from __future__ import annotations

from pathlib import Path

import attrs

FileState = tuple[int, int, int]
"""Modification time, size and inode of a file. Differs once the file has been written or replaced."""


def state_of(path: Path) -> FileState | None:
    """`FileState` of a file; None where there is no file."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino


@attrs.define(eq=False)
class FileWatch:
    """Change detection for one file, from the time just before the file is read for the first time."""

    path: Path
    _seen: FileState | None = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._seen = state_of(self.path)

    def has_changed(self) -> bool:
        """Whether the file has been written or replaced since the last call."""
        before, self._seen = self._seen, state_of(self.path)
        return self._seen != before
