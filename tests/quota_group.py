"""A real control group with a CPU quota that can be changed, where this system lets the tests make one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from uma import cgroup

SetQuota = Callable[[float], None]
"""Takes a number of CPUs; infinite: no quota."""
PERIOD_US = 100_000
"""The kernel's own."""


@contextmanager
def in_a_group_of_its_own() -> Iterator[SetQuota]:
    """Has this process in a new group without a quota meanwhile; skips the test where there can be none."""
    own = [cgroup.groups(cgroup.ROOT, controller)[:1] for controller in ("cpu", "cpuacct")]
    made = _made_group("cpu", "cpu.cfs_quota_us", "cpu.max")
    homes = {made.folder: own[0][0].folder}
    if made.version == 1 and own[1]:  # in the same folder, or in a hierarchy of its own
        homes[own[1][0].folder / made.folder.name] = own[1][0].folder
    try:
        for folder in homes:
            folder.mkdir(exist_ok=True)
            _move_this_process(folder)
        cgroup.groups.cache_clear()
        yield lambda cpus: _set_quota(made, cpus)
    finally:
        for folder, home in homes.items():
            _move_this_process(home)
            with suppress(OSError):  # a thread that ended in it is not gone yet: the group stays, empty
                folder.rmdir()
        cgroup.groups.cache_clear()


@contextmanager
def a_memory_group() -> Iterator[cgroup.Group]:
    """A new group without a limit, which nothing is in; skips the test as above."""
    made = _made_group("memory", "memory.limit_in_bytes", "memory.max")
    try:
        yield made
    finally:
        with suppress(OSError):
            made.folder.rmdir()


def joining(group: cgroup.Group) -> str:
    """Code by which a program goes into a group, with all that it starts from then on."""
    return f"import os, pathlib\npathlib.Path({str(group.folder / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"


def _made_group(controller: str, *files: str) -> cgroup.Group:
    """A new group below this process's own, or with version 2 below one that gives its children the controller."""
    for above in cgroup.groups(cgroup.ROOT, controller):
        name = f"uma-test-{os.getpid()}"
        group = cgroup.Group(above.folder / name, above.version, f"{above.path.rstrip('/')}/{name}")
        with suppress(OSError):
            group.folder.mkdir(exist_ok=True)
            if any((group.folder / file).exists() for file in files):
                return group
            group.folder.rmdir()
    pytest.skip("no control group can be made here: that takes root and a writable /sys/fs/cgroup")


def _quota_file(group: cgroup.Group) -> Path:
    return group.folder / ("cpu.max" if group.version == 2 else "cpu.cfs_quota_us")


def _set_quota(group: cgroup.Group, cpus: float) -> None:
    none = "max" if group.version == 2 else "-1"
    quota = none if cpus == math.inf else str(round(cpus * PERIOD_US))
    _quota_file(group).write_text(f"{quota} {PERIOD_US}" if group.version == 2 else quota)


def _move_this_process(folder: Path) -> None:
    (folder / "cgroup.procs").write_text(str(os.getpid()))
