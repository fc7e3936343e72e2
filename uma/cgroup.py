"""Limits of Linux's control groups on this process: those of containers and systemd units.

A process is in one group of each hierarchy, and is bounded by every group above it as well. systemd sets `MemoryMax=`
on the unit or its slice, `docker run --memory` on the container. So each limit is read from the process's own group up
to the top of what is mounted, and the tightest counts. Both versions of the interface are read, also mixed.

`bounding_groups` finds these folders in two texts of the kernel, `/proc/self/cgroup` and `/proc/self/mountinfo`,
without accessing a file.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import attrs

ROOT = Path("/")


@attrs.frozen
class Group:
    """Folder of a control group, of version 1 or 2 of the interface."""

    folder: Path
    version: int
    path: str
    """Path in its hierarchy. With version 1 a process is usually in groups of equal path in all hierarchies."""

    def memory_left_bytes(self) -> float:
        """Bytes that this group's processes can still allocate; infinite without a limit.

        Cached files count as used in the kernel's figure, but also as left here, because Linux drops them before it
        refuses memory. Above `memory.high` Linux throttles the group until it frees memory, so that counts as a limit,
        too.
        """
        limit = self.memory_limit_bytes()
        used = self._number("memory.current" if self.version == 2 else "memory.usage_in_bytes", 0)
        return math.inf if limit == math.inf else max(0, limit - used + self._file_cache_bytes())

    def memory_limit_bytes(self) -> float:
        """Bytes that this group's processes can allocate together; infinite without a limit."""
        names = ("memory.max", "memory.high") if self.version == 2 else ("memory.limit_in_bytes",)
        return min(self._number(name, math.inf) for name in names)

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
        """CPU time that this group's processes have used; None where it is unknown.

        Version 1 reports it in the hierarchy of the controller `cpuacct`, which is often that of `cpu`.
        """
        if self.version == 1:
            used_ns = self._number("cpuacct.usage", -1)
            return used_ns / 1e6 if used_ns >= 0 else None
        used_us = self._field("cpu.stat", "usage_usec")
        return used_us / 1e3 if used_us is not None else None

    def _number(self, name: str, otherwise: float) -> float:
        try:
            return int((self.folder / name).read_text(encoding="ascii"))
        except (OSError, ValueError):  # no such file, or "max": no limit
            return otherwise

    def _file_cache_bytes(self) -> int:
        # Not the field `file`: that includes tmpfs and shared memory, which cannot be dropped.
        total = "" if self.version == 2 else "total_"
        return sum(self._field("memory.stat", f"{total}{name}_file") or 0 for name in ("inactive", "active"))

    def _field(self, name: str, key: str) -> int | None:
        """A line's number in a file of names and numbers; None without such a line."""
        try:
            lines = (self.folder / name).read_text(encoding="ascii").splitlines()
            return next(int(line.split()[1]) for line in lines if line.split()[0] == key)
        except (OSError, ValueError, IndexError, StopIteration):
            return None


@attrs.frozen
class QuotaUse:
    """CPU time used of a CPU quota."""

    group: Path
    """Folder of the group with the quota."""
    used_ms: float
    """CPU time of all its processes, since an arbitrary start."""

    def since(self, earlier: QuotaUse | None) -> float | None:
        """Milliseconds used since `earlier`; None where another group had the tightest quota then, or none had."""
        if earlier is None or earlier.group != self.group:
            return None
        return max(0.0, self.used_ms - earlier.used_ms)


@attrs.frozen
class _Mount:
    """Mount of a hierarchy of groups."""

    version: int
    options: frozenset[str]
    """Mount options; with version 1 they include its controllers."""
    group: str
    """Path of the mounted group."""
    point: str
    """Mount point."""


def memory_left_bytes(root: Path = ROOT) -> float:
    """Bytes of memory that the limits of this process leave; infinite without a limit."""
    return min((group.memory_left_bytes() for group in groups(root, "memory")), default=math.inf)


def cpu_quota(root: Path = ROOT) -> float:
    """CPUs that the quotas of this process allow it to use at the same time; infinite without a quota."""
    return min((group.cpu_quota() for group in groups(root, "cpu")), default=math.inf)


def quota_use(root: Path = ROOT) -> QuotaUse | None:
    """CPU time that all processes under this process's tightest quota have used; None without a quota, or where it is
    unknown.
    """
    bounding = min(groups(root, "cpu"), key=Group.cpu_quota, default=None)
    if bounding is None or bounding.cpu_quota() == math.inf:
        return None
    if bounding.version == 2:
        used_ms = bounding.cpu_used_ms()
    else:
        alike = (group for group in groups(root, "cpuacct") if group.version == 1 and group.path == bounding.path)
        used_ms = next((ms for line in alike if (ms := line.cpu_used_ms()) is not None), None)
    return None if used_ms is None else QuotaUse(bounding.folder, used_ms)


@lru_cache(maxsize=8)
def groups(root: Path, controller: str) -> tuple[Group, ...]:
    """Groups that bound this process by `controller`, its own first; `root` contains `/proc` and the mounts.

    Cached: limits change while a server runs, its group does not.
    """
    proc = root / "proc" / "self"
    return tuple(bounding_groups(_text(proc / "cgroup"), _text(proc / "mountinfo"), controller, root))


def bounding_groups(own: str, mountinfo: str, controller: str, root: Path = ROOT) -> Iterator[Group]:
    """Groups of a process, given the texts of its `/proc/self/cgroup` and `/proc/self/mountinfo`; pure.

    Its own group comes first, then those above it up to the top of what is mounted. Every hierarchy of version 2 is
    included: its folders have the files of the controllers that it has.
    """
    paths = list(_own_paths(own))
    for mount in _mounts(mountinfo):
        wanted = "" if mount.version == 2 else controller
        path = next((path for controllers, path in paths if wanted in controllers), None)
        if path is None or (mount.version == 1 and controller not in mount.options):
            continue
        # In a container only its part of the hierarchy is mounted; without a namespace the path begins above that.
        below = path[len(mount.group.rstrip("/")) :] if _is_below(path, mount.group) else ""
        names = [name for name in below.split("/") if name]
        for depth in range(len(names), -1, -1):
            inside = "/".join(names[:depth])
            folder = root / mount.point.lstrip("/") / inside
            yield Group(folder, mount.version, f"{mount.group.rstrip('/')}/{inside}".rstrip("/") or "/")


def _is_below(path: str, mounted: str) -> bool:
    return ".." not in path.split("/") and (path + "/").startswith(mounted.rstrip("/") + "/")


def _own_paths(text: str) -> Iterator[tuple[set[str], str]]:
    """Groups of a process: the controllers of a hierarchy (the empty name for version 2) and the path in it."""
    for line in text.split("\n"):
        _, *rest = line.split(":", 2)
        if len(rest) == 2 and rest[1].startswith("/"):
            yield set(rest[0].split(",")), rest[1]


def _mounts(text: str) -> Iterator[_Mount]:
    for line in text.split("\n"):
        before, _, after = line.partition(" - ")
        place, kind = before.split(" "), after.split(" ", 2)
        if len(place) >= 5 and len(kind) == 3 and kind[0] in ("cgroup", "cgroup2"):
            group, point = map(_unescaped, place[3:5])
            yield _Mount(2 if kind[0] == "cgroup2" else 1, frozenset(kind[2].split(",")), group, point)


def _unescaped(path: str) -> str:
    """Path in `mountinfo`, where the kernel writes spaces, tabs, newlines and backslashes in octal: `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _text(file: Path) -> str:
    try:
        return os.fsdecode(file.read_bytes())
    except OSError:  # not Linux
        return ""
