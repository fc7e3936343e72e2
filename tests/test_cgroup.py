"""The limits that Linux's control groups put on a process, from a folder with the files that the kernel would show."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma import cgroup
from uma.engine.sizing import free_memory_bytes
from uma.llama import backend

GIB = 2**30
UNIT = "/system.slice/uma.service"
V2 = "31 23 0:28 {group} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "30 23 0:27 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n"
    "32 30 0:29 {group} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "33 30 0:30 {group} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "34 30 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
V1_APART = (
    "32 31 0:29 {group} /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "33 31 0:30 {group} /sys/fs/cgroup/cpuacct rw,relatime shared:9 master:2 - cgroup cgroup rw,cpuacct\n"
    "34 31 0:31 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
UNIFIED_FIRST = "40 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"


def machine(root: Path, own: str, mounts: str, files: dict[str, str]) -> Path:
    """A `/proc` and `/sys` with these contents, and 8 GiB of free memory."""
    files = {
        "proc/self/cgroup": own,
        "proc/self/mountinfo": "23 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts,
        "proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemAvailable:   {8 * 2**20} kB\n",
    } | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text.rstrip() + "\n")
    return root


def memory_v2(group: str, limit: str, **more: str) -> dict[str, str]:
    """A group of version 2 that uses 3/4 GiB, of which 1/4 are files that Linux can drop, half of them in use."""
    files = {
        "max": limit,
        "current": str(GIB * 3 // 4),
        "stat": f"anon 1\nfile {GIB}\ninactive_file {GIB // 8}\nactive_file {GIB // 8}",
    } | more
    return {f"{group}/memory.{name}".lstrip("/"): text for name, text in files.items()}


@pytest.mark.parametrize(
    ("limits", "free"),
    [
        ({UNIT: str(GIB)}, GIB // 2),
        ({UNIT: "max", "/system.slice": str(2 * GIB)}, GIB * 3 // 2),  # the slice bounds its units
        ({UNIT: str(4 * GIB), "/system.slice": str(2 * GIB), "": str(GIB)}, GIB // 2),  # the top: a container's own
        ({UNIT: "max", "/system.slice": "max"}, 8 * GIB),
        ({UNIT: str(100 * GIB)}, 8 * GIB),
        ({UNIT: str(GIB // 8)}, 0),
        ({UNIT: "rubbish"}, 8 * GIB),
    ],
)
def test_the_tightest_limit_from_a_unit_up_to_the_top_counts(tmp_path: Path, limits: dict[str, str], free: int) -> None:
    files = {name: text for group, limit in limits.items() for name, text in memory_v2(group, limit).items()}
    assert free_memory_bytes(machine(tmp_path, f"0::{UNIT}", V2.format(group="/"), files)) == free


def test_memory_high_is_a_limit_too(tmp_path: Path) -> None:
    files = memory_v2(UNIT, "max", high=str(GIB))
    assert free_memory_bytes(machine(tmp_path, f"0::{UNIT}", V2.format(group="/"), files)) == GIB // 2


@pytest.mark.parametrize(
    "own",
    [
        "0::/docker/abc",  # without a namespace of its own a container sees its path on the host
        "0::/",
        "0::/../../elsewhere",  # a group that is not below what is mounted here
    ],
)
def test_a_container_s_limit_is_found_where_only_its_part_is_mounted(tmp_path: Path, own: str) -> None:
    group = "/docker/abc" if "docker" in own else "/"
    root = machine(tmp_path, own, V2.format(group=group), memory_v2("", str(GIB)) | {"cpu.max": "50000 100000"})
    assert free_memory_bytes(root) == GIB // 2
    assert backend.core_count(root) == 1


def test_a_path_with_a_space_is_found_although_the_kernel_writes_it_in_octal(tmp_path: Path) -> None:
    group = "/a container\\of mine"
    mount = r"31 23 0:28 /a\040container\134of\040mine /sys/fs/cgroup/my\040groups rw - cgroup2 cgroup2 rw"
    files = {f"my groups/{name}": text for name, text in memory_v2("unit", str(GIB)).items()}
    assert free_memory_bytes(machine(tmp_path, f"0::{group}/unit", mount, files)) == GIB // 2


def test_version_1_has_its_limits_in_other_files(tmp_path: Path) -> None:
    own = f"4:memory:{UNIT}\n2:cpu,cpuacct:{UNIT}\n0::/"
    memory = {
        "limit_in_bytes": str(GIB),
        "usage_in_bytes": str(GIB // 2),
        "stat": f"active_file {GIB}\ntotal_inactive_file {GIB // 16}\ntotal_active_file {GIB // 16}",
    }
    files = {f"memory{UNIT}/memory.{name}": text for name, text in memory.items()}
    files |= {f"memory/memory.{name}": text for name, text in (memory | {"limit_in_bytes": str(2**63 - 4096)}).items()}
    root = machine(tmp_path, own, V1.format(group="/"), files)
    assert cgroup.memory_left_bytes(root) == GIB // 2 + GIB // 8


@pytest.mark.parametrize(
    ("mounts", "own", "cpu", "cpuacct"),
    [
        (V1, f"2:cpu,cpuacct:{UNIT}", "cpu,cpuacct", "cpu,cpuacct"),
        (V1_APART, f"3:name=systemd:/\n2:cpuacct:{UNIT}\n1:cpu:{UNIT}", "cpu", "cpuacct"),
        (V1_APART, f"2:cpuacct:{UNIT}/deeper\n1:cpu:{UNIT}", "cpu", "cpuacct"),
        (V1_APART, f"2:cpuacct:/elsewhere\n1:cpu:{UNIT}", "cpu", None),  # counted with others, as one
        (UNIFIED_FIRST + V1_APART, f"2:cpuacct:{UNIT}\n1:cpu:{UNIT}", "cpu", "cpuacct"),
    ],
)
@pytest.mark.parametrize("bounding", [UNIT, "/system.slice"])
def test_version_1_tells_a_quota_and_what_was_used_of_it_in_one_hierarchy_or_in_two(
    tmp_path: Path, mounts: str, own: str, cpu: str, cpuacct: str | None, bounding: str
) -> None:
    quotas = {"": "-1", "/system.slice": "900000", UNIT: "950000"} | {bounding: "250000"}
    files = {f"{cpu}{group}/cpu.cfs_quota_us": quota for group, quota in quotas.items()}
    files |= {f"{cpu}{group}/cpu.cfs_period_us": "100000" for group in quotas}
    used_ns = {"": 9_000_000, "/elsewhere": 8_000_000, "/system.slice": 7_000_000, UNIT: 6_000_000}
    files |= {f"{cpuacct or 'cpuacct'}{group}/cpuacct.usage": str(ns) for group, ns in used_ns.items()}
    root = machine(tmp_path, f"{own}\n0::{UNIT}", mounts.format(group="/"), files)
    assert cgroup.cpu_quota(root) == 2.5
    used_ms = {UNIT: 6.0, "/system.slice": 7.0}[bounding]
    assert cgroup.quota_use(root) == (
        cgroup.QuotaUse(tmp_path / f"sys/fs/cgroup/{cpu}{bounding}", used_ms) if cpuacct else None
    )


@pytest.mark.parametrize(
    ("own", "mounts", "folders"),
    [
        (
            f"2:cpu,cpuacct:{UNIT}\n0::/",
            V1,
            ["cpu,cpuacct" + UNIT, "cpu,cpuacct/system.slice", "cpu,cpuacct", "unified"],
        ),
        (f"9:cpuacct:/x\n1:cpu:{UNIT}", V1_APART, ["cpu" + UNIT, "cpu/system.slice", "cpu"]),
        ("7:cpuset:/a\n6:name=cpu:/b", V1_APART, []),  # neither is the controller `cpu`
        (f"0::{UNIT}", V2, [UNIT, "/system.slice", ""]),
        ("0::/a:b", V2, ["a:b", ""]),
        ("0::/with\u2028separators\x0b", V2, ["with\u2028separators\x0b", ""]),
        ("", V2, []),
    ],
)
def test_a_process_is_bounded_by_its_own_group_and_those_above_it(own: str, mounts: str, folders: list[str]) -> None:
    found = cgroup.bounding_groups(own, mounts.format(group="/"), "cpu")
    assert [group.folder for group in found] == [Path("/sys/fs/cgroup") / each.lstrip("/") for each in folders]


@pytest.mark.parametrize(
    ("own", "group", "bounding"),
    [
        (
            "/docker/abc/app",
            "/docker/abc",
            [("app", "/docker/abc/app"), ("", "/docker/abc")],
        ),  # no namespace of its own
        ("/app", "/", [("app", "/app"), ("", "/")]),  # a namespace, and what was mounted in it
        ("/", "/..", [("", "/..")]),  # a namespace, and a mount from outside: the own folder has no name in it
        ("/../elsewhere", "/", [("", "/")]),
        ("/docker/abcdef", "/docker/abc", [("", "/docker/abc")]),
    ],
)
@pytest.mark.parametrize(("mounts", "point"), [(V2, ""), (V1_APART, "cpu")])
def test_a_container_is_bounded_by_what_it_sees_of_the_groups(
    own: str, group: str, bounding: list[tuple[str, str]], mounts: str, point: str
) -> None:
    found = cgroup.bounding_groups(
        f"{0 if mounts == V2 else 1}:{'' if mounts == V2 else 'cpu'}:{own}", mounts.format(group=group), "cpu"
    )
    top = Path("/sys/fs/cgroup", point)
    assert [(each.folder, each.path) for each in found] == [(top / folder, path) for folder, path in bounding]


TEXTS = st.text(alphabet="01:/, -acgporw2\\\n", max_size=60)
"""Without `u`: a line that names the controller `cpu` puts that one's hierarchy among those told, and rightly so."""


@given(TEXTS, TEXTS, st.sampled_from(["", "1:cpu:/a\n", "0::/a\n"]), st.sampled_from(["", V1_APART]))
def test_lines_of_any_other_shape_neither_raise_nor_hide_those_before(
    own: str, mountinfo: str, own_before: str, mounts_before: str
) -> None:
    mounts_before = mounts_before.format(group="/")
    told = list(cgroup.bounding_groups(own_before, mounts_before, "cpu"))
    assert list(cgroup.bounding_groups(own_before + own, mounts_before + mountinfo, "cpu"))[: len(told)] == told


@pytest.mark.parametrize(
    ("quotas", "cpus", "used_ms"),
    [
        ({UNIT: "150000 100000"}, 1.5, 1.0),
        ({UNIT: "max 100000", "/system.slice": "50000 100000"}, 0.5, 2.0),
        ({UNIT: "10000 100000", "/system.slice": "50000 100000"}, 0.1, 1.0),
        ({UNIT: "max 100000"}, math.inf, None),
    ],
)
def test_the_tightest_quota_bounds_the_threads_and_tells_what_was_used_of_it(
    tmp_path: Path, quotas: dict[str, str], cpus: float, used_ms: float | None
) -> None:
    files = {f"{group}/cpu.max".lstrip("/"): quota for group, quota in quotas.items()}
    used_us = {UNIT: 1_000, "/system.slice": 2_000, "": 4_000}
    files |= {f"{group}/cpu.stat".lstrip("/"): f"usage_usec {us}\nuser_usec 5" for group, us in used_us.items()}
    root = machine(tmp_path, f"0::{UNIT}", V2.format(group="/"), files)
    assert cgroup.cpu_quota(root) == cpus
    use = cgroup.quota_use(root)
    assert (use and use.used_ms) == used_ms
    everything = backend.core_count(tmp_path / "another system")
    assert backend.core_count(root) == (everything if cpus == math.inf else min(everything, max(1, int(cpus))))


@pytest.mark.parametrize(("quota", "threads"), [(50_000, 1), (150_000, 1), (250_000, 2), (350_000, 3), (900_000, 8)])
def test_no_more_threads_compute_than_a_quota_pays_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: int, threads: int
) -> None:
    monkeypatch.setattr(backend, "affinity", lambda: frozenset(range(8)))
    monkeypatch.setattr(backend, "compute_cores", len)
    root = machine(tmp_path, "0::/", V2.format(group="/"), {"cpu.max": f"{quota} 100000"})
    assert backend.core_count(root) == threads


def test_a_system_without_control_groups_sets_no_limit(tmp_path: Path) -> None:
    assert cgroup.memory_left_bytes(tmp_path) == cgroup.cpu_quota(tmp_path) == math.inf
    assert cgroup.quota_use(tmp_path) is None
    assert free_memory_bytes(tmp_path) > 0


def test_what_was_used_of_a_quota_is_unknown_where_another_group_s_has_become_the_tightest() -> None:
    before, later = cgroup.QuotaUse(Path("/a"), 5.0), cgroup.QuotaUse(Path("/a"), 7.5)
    assert later.since(before) == 2.5
    assert cgroup.QuotaUse(Path("/a/b"), 9.0).since(before) is None
    assert later.since(None) is None
