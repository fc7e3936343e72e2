"""Whether other programs need the memory, as Linux tells of the machine and of the control groups of this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import attrs

from uma import cgroup
from uma.figures import size

SCARCE = 16
"""Divisor of the memory that there is: with less than that left, of the machine or of a control group, it is scarce."""
WAITED_SHARE = 0.1
"""Part of the time in which some task waits for memory from which on it is scarce."""

SCARCE_GPU_BYTES = 2**29
"""Free bytes of a GPU below which its memory is scarce: half of what is left free there when a model is loaded."""


@attrs.define
class Pressure:
    """Asked again and again, by one thread at a time."""

    root: Path = cgroup.ROOT
    """Where `/proc` and the mounts are."""
    _waited_sec: dict[Path, float] = attrs.field(factory=dict, init=False)
    """How long some task had waited for memory at the last look, by the file that tells it."""
    _looked_at: float = attrs.field(default=0.0, init=False)

    def reason(self, now: float, gpu_free_bytes: int = 0) -> str:
        """Why memory should be given back at this time; empty: nothing asks for it, or the system does not tell.
        `gpu_free_bytes` are those of the fullest GPU; 0: there is none.
        """
        if 0 < gpu_free_bytes < SCARCE_GPU_BYTES:
            return f"a GPU has {size(gpu_free_bytes)} of memory left"
        passed_sec, self._looked_at = now - self._looked_at, now
        reasons = [*self._scarce(), *self._waits(passed_sec)]
        return reasons[0] if reasons else ""

    def _scarce(self) -> Iterator[str]:
        lines = _text(self.root / "proc" / "meminfo")
        total, left = (_field(rf"^{name}: +(\d+) kB", lines) for name in ("MemTotal", "MemAvailable"))
        if left < total / SCARCE:
            yield f"the machine has {size(int(1024 * left))} of memory left"
        for group in cgroup.groups(self.root, "memory"):
            left = group.memory_left_bytes()
            if left < group.memory_limit_bytes() / SCARCE:
                yield f"the control group {group.path} has {size(int(left))} of memory left"

    def _waits(self, passed_sec: float) -> Iterator[str]:
        files = [group.folder / "memory.pressure" for group in cgroup.groups(self.root, "memory")]
        for file in (self.root / "proc" / "pressure" / "memory", *files):
            waited_sec = _field(r"^some .*total=(\d+)", _text(file)) / 1e6
            share = (waited_sec - self._waited_sec.get(file, waited_sec)) / passed_sec
            self._waited_sec[file] = waited_sec
            if share >= WAITED_SHARE:
                yield f"tasks waited for memory during {share:.0%} of the time ({file})"


def _field(pattern: str, lines: str) -> float:
    found = re.search(pattern, lines, re.MULTILINE)
    return float(found[1]) if found else 0.0


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:  # another system, or a kernel without it
        return ""
