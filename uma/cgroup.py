"""What Linux's control groups leave to this process: a container's limits, and a systemd unit's.

A process is in one group of each hierarchy, and every group above it bounds it as well. systemd sets `MemoryMax=` on
the unit or its slice, `docker run --memory` on the container: each limit is read from the own group of the process up
to the top of what is mounted, and the tightest counts. Both versions of the interface are read, mixed ones too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import attrs

ROOT = Path("/")


@attrs.frozen
class Group:
    """One control group, as a folder, of version 1 or 2 of the interface."""

    folder: Path
    version: int

    def memory_left_bytes(self) -> float:
        """Bytes that this group's processes can still have; infinite without a limit.

        Cached files that nothing has used lately count as used, and Linux drops them first: they are left too. Over
        `memory.high` Linux slows the group down until it gives memory back, so that is a limit as well.
        """
        names = ("memory.max", "memory.high") if self.version == 2 else ("memory.limit_in_bytes",)
        limit = min(self._number(name, math.inf) for name in names)
        used = self._number("memory.current" if self.version == 2 else "memory.usage_in_bytes", 0)
        return math.inf if limit == math.inf else max(0, limit - used + self._inactive_file_bytes())

    def cpu_quota(self) -> float:
        """CPUs that this group's processes can use at the same time; infinite without a quota."""
        if self.version == 1:
            quota, period = self._number("cpu.cfs_quota_us", -1), self._number("cpu.cfs_period_us", 0)
            return quota / period if quota > 0 and period > 0 else math.inf
        try:
            quota_us, period_us = (self.folder / "cpu.max").read_text(encoding="ascii").split()
            return int(quota_us) / int(period_us)
        except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max": no quota
            return math.inf

    def cpu_used_ms(self) -> float | None:
        """CPU time that this group's processes have had so far; None where that is not told."""
        if self.version == 1:
            used_ns = self._number("cpuacct.usage", -1)  # where both controllers are mounted together, as is usual
            return used_ns / 1e6 if used_ns >= 0 else None
        used_us = self._field("cpu.stat", "usage_usec")
        return used_us / 1e3 if used_us is not None else None

    def _number(self, name: str, otherwise: float) -> float:
        try:
            return int((self.folder / name).read_text(encoding="ascii"))
        except (OSError, ValueError):  # no such file, or "max": no limit
            return otherwise

    def _inactive_file_bytes(self) -> int:
        return self._field("memory.stat", "inactive_file" if self.version == 2 else "total_inactive_file") or 0

    def _field(self, name: str, key: str) -> int | None:
        """A line's number in a file of names and numbers; None where it is not there."""
        try:
            lines = (self.folder / name).read_text(encoding="ascii").splitlines()
            return next(int(line.split()[1]) for line in lines if line.split()[0] == key)
        except (OSError, ValueError, IndexError, StopIteration):
            return None


@attrs.frozen
class _Mount:
    """A mounted hierarchy of groups."""

    version: int
    options: frozenset[str]
    """Of version 1: its controllers among them."""
    group: str
    """The path of the group that is mounted."""
    point: str
    """Where it is mounted."""


def memory_left_bytes(root: Path = ROOT) -> float:
    """Bytes of memory that the limits on this process leave; infinite without one."""
    return min((group.memory_left_bytes() for group in groups(root, "memory")), default=math.inf)


def cpu_quota(root: Path = ROOT) -> float:
    """CPUs that the quotas on this process pay for at the same time; infinite without one."""
    return min((group.cpu_quota() for group in groups(root, "cpu")), default=math.inf)


def cpu_used_ms(root: Path = ROOT) -> float | None:
    """CPU time that all processes under the tightest quota on this one have had; None without a quota, or untold."""
    bounding = min(groups(root, "cpu"), key=Group.cpu_quota, default=None)
    return bounding.cpu_used_ms() if bounding is not None and bounding.cpu_quota() < math.inf else None


@lru_cache(maxsize=8)
def groups(root: Path, controller: str) -> tuple[Group, ...]:
    """The groups that bound this process by `controller`, its own first; `root` is where `/proc` and the mounts are.

    Looked up once: limits change while a server runs, its group does not.
    """
    return tuple(_groups(root, controller))


def _groups(root: Path, controller: str) -> Iterator[Group]:
    own = list(_own_paths(root))
    for mount in _mounts(root):
        wanted = "" if mount.version == 2 else controller
        path = next((path for controllers, path in own if wanted in controllers), None)
        if path is None or (mount.version == 1 and controller not in mount.options):
            continue
        top = root / mount.point.lstrip("/")
        # A container sees its own part of the hierarchy mounted; without a namespace its path still begins above.
        below = path.removeprefix(mount.group.rstrip("/")) if _is_below(path, mount.group) else ""
        folder = top / below.strip("/")
        yield Group(folder, mount.version)
        yield from (Group(each, mount.version) for each in folder.parents if each.is_relative_to(top))


def _is_below(path: str, mounted: str) -> bool:
    return ".." not in path.split("/") and (path + "/").startswith(mounted.rstrip("/") + "/")


def _own_paths(root: Path) -> Iterator[tuple[set[str], str]]:
    """This process's groups: the controllers of a hierarchy (of version 2 the empty name) and the path there."""
    for line in _lines(root / "proc" / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        yield set(controllers.split(",")), path


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _lines(root / "proc" / "self" / "mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            group, point = map(_unescaped, before.split(" ")[3:5])
            yield _Mount(2 if kind == "cgroup2" else 1, frozenset(options.split(",")), group, point)


def _unescaped(path: str) -> str:
    """A path of `mountinfo`, where the kernel writes spaces, tabs, newlines and backslashes in octal: `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another system than Linux
        return []
