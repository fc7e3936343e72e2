"""`--yield-memory`: idle models leave where another program needs the memory, and nothing that is used does."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio.testing
from several import GREEDY, NAMES, PROMPT
from test_models_life import opened, text, until

from uma.supervisor.models import YIELD_SEC
from uma.supervisor.pressure import Pressure
from uma.types import Request, SamplingParams, Token

Capture = pytest.LogCaptureFixture
GROUP = "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def machine(root: Path, left_mib: int, waited_us: int = 0) -> Path:
    """A machine of 1,600 MiB, as Linux tells of it."""
    for file, lines in {
        "proc/meminfo": f"MemTotal: {1_600 * 1024} kB\nMemAvailable: {left_mib * 1024} kB\n",
        "proc/pressure/memory": f"some avg10=0.00 avg60=0.00 avg300=0.00 total={waited_us}\nfull total=0\n",
        "proc/self/cgroup": "0::/small\n",
        "proc/self/mountinfo": GROUP,
    }.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(lines)
    return root


def group(root: Path, limit: int, used: int, waited_us: int = 0) -> None:
    """A control group of the machine's that bounds this process."""
    folder = root / "sys" / "fs" / "cgroup" / "small"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.pressure").write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={waited_us}\n")


def test_little_memory_of_the_machine_or_of_a_group_is_told(tmp_path: Path) -> None:
    pressure = Pressure(machine(tmp_path, left_mib=200))
    assert pressure.reason(1.0) == ""
    group(tmp_path, limit=1_000_000_000, used=900_000_000)
    assert pressure.reason(2.0) == ""
    group(tmp_path, limit=1_000_000_000, used=980_000_000)
    assert pressure.reason(3.0) == "the control group /small has 19 MiB of memory left"
    machine(tmp_path, left_mib=99)
    assert pressure.reason(4.0) == "the machine has 99 MiB of memory left"


def test_tasks_that_wait_for_memory_are_told_by_what_passed_since_the_last_look(tmp_path: Path) -> None:
    pressure = Pressure(machine(tmp_path, left_mib=800, waited_us=5_000_000))
    assert pressure.reason(1.0) == "", "that was before"
    machine(tmp_path, left_mib=800, waited_us=5_090_000)
    assert pressure.reason(2.0) == ""
    machine(tmp_path, left_mib=800, waited_us=5_290_000)
    assert pressure.reason(3.0).startswith("tasks waited for memory during 20% of the time")
    group(tmp_path, 10**9, 0)
    assert pressure.reason(4.0) == ""
    group(tmp_path, 10**9, 0, waited_us=500_000)
    assert "50%" in pressure.reason(5.0)


def test_a_system_that_tells_nothing_asks_for_nothing(tmp_path: Path) -> None:
    assert Pressure(tmp_path).reason(1.0) == ""


async def test_idle_models_leave_the_largest_first_and_one_that_is_used_goes_on(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mock_clock: trio.testing.MockClock,
    caplog: Capture,
) -> None:
    caplog.set_level("INFO")
    async with opened(folder, monkeypatch, yield_memory=True, idle_unload=0) as models:
        models.pressure = Pressure(machine(tmp_path, left_mib=800))
        for name in NAMES:
            await models.load(name)
        await models.pin("beta")
        long = SamplingParams(**GREEDY | {"max_tokens": 100_000})
        async with models.generate(Request("a", prompt=PROMPT, sampling=long, model="alpha")) as stream:
            await anext(stream)
            machine(tmp_path, left_mib=50)
            mock_clock.jump(YIELD_SEC)
            await until(lambda: models.find("gamma-one").state == "unloaded")
            assert models.find("gamma-one").yielded == "the machine has 50 MiB of memory left"
            for _ in range(3):
                mock_clock.jump(YIELD_SEC)
                assert isinstance(await anext(stream), Token)
            assert [models.find(name).state for name in NAMES] == ["loaded", "loaded", "unloaded"]
        mock_clock.jump(YIELD_SEC)
        await until(lambda: models.find("alpha").state == "unloaded")
        machine(tmp_path, left_mib=800)
        await text(models, "gamma-one")
        assert models.find("gamma-one").yielded == ""
        assert models.find("beta").state == "loaded"
    assert caplog.text.count("event=model.yielded") == 2


async def test_of_several_idle_models_the_one_that_takes_most_leaves_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    async with opened(folder, monkeypatch, yield_memory=True, idle_unload=0) as models:
        models.pressure = Pressure(machine(tmp_path, left_mib=50))
        taken = {name: (await models.load(name)).taken_bytes for name in NAMES}
        mock_clock.jump(YIELD_SEC)
        await until(lambda: any(models.find(name).state == "unloaded" for name in NAMES))
        (left,) = [name for name in NAMES if models.find(name).yielded]
        assert taken[left] == max(taken.values())
