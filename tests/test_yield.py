"""`--yield-memory`: idle models leave where another program needs the memory, and nothing that is used does."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import trio.testing
from http_server import ServeModels
from quota_group import a_memory_group, joining
from several import GREEDY, NAMES, PROMPT
from test_models_life import opened, text, until

from harness import PATIENCE_SEC, run_to_end, uma_command
from harness import until as until_seen
from uma.cgroup import Group
from uma.supervisor.model import LoadedModel
from uma.supervisor.models import YIELD_SEC
from uma.supervisor.pressure import SCARCE, SCARCE_GPU_BYTES, Pressure
from uma.types import Request, SamplingParams, Token

MIB = 2**20
TAKES = """\
import sys
held = []
for line in sys.stdin:
    held.append(b"x" * int(line))
    print("took it", flush=True)
"""
"""Another program: it takes as many bytes as each line of its input says."""

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


def bounded(root: Path, limit: int, used: int, waited_us: int = 0) -> None:
    """A control group of the machine's that bounds this process."""
    folder = root / "sys" / "fs" / "cgroup" / "small"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.pressure").write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={waited_us}\n")


def test_little_memory_of_the_machine_or_of_a_group_is_told(tmp_path: Path) -> None:
    pressure = Pressure(machine(tmp_path, left_mib=200))
    assert pressure.reason(1.0) == ""
    bounded(tmp_path, limit=1_000_000_000, used=900_000_000)
    assert pressure.reason(2.0) == ""
    bounded(tmp_path, limit=1_000_000_000, used=980_000_000)
    assert pressure.reason(3.0) == "the control group /small has 20 MB of memory left"
    machine(tmp_path, left_mib=99)
    assert pressure.reason(4.0) == "the machine has 104 MB of memory left"


def test_tasks_that_wait_for_memory_are_told_by_what_passed_since_the_last_look(tmp_path: Path) -> None:
    pressure = Pressure(machine(tmp_path, left_mib=800, waited_us=5_000_000))
    assert pressure.reason(1.0) == "", "that was before"
    machine(tmp_path, left_mib=800, waited_us=5_090_000)
    assert pressure.reason(2.0) == ""
    machine(tmp_path, left_mib=800, waited_us=5_290_000)
    assert pressure.reason(3.0).startswith("tasks waited for memory during 20% of the time")
    bounded(tmp_path, 10**9, 0)
    assert pressure.reason(4.0) == ""
    bounded(tmp_path, 10**9, 0, waited_us=500_000)
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
            assert models.find("gamma-one").yielded == "left, as the machine has 52.4 MB of memory left"
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


async def test_where_no_model_can_leave_kept_prefixes_do_and_why_is_told_as_long_as_it_is_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock, caplog: Capture
) -> None:
    caplog.set_level("INFO")
    kept = {"cache_ram_mb": 64, "cache_tokens": 0, "cache_dir": ""}
    async with opened(folder, monkeypatch, yield_memory=True, idle_unload=0, **kept) as models:
        models.pressure = Pressure(machine(tmp_path, left_mib=800))
        await models.pin("alpha")

        async def until_kept(snapshots: int, jump_sec: float = 0) -> None:
            give_up = time.monotonic() + PATIENCE_SEC
            while (await models.metrics())["cache_ram_snapshots"] != snapshots:
                assert time.monotonic() < give_up
                mock_clock.jump(jump_sec)
                await trio.testing.wait_all_tasks_blocked(0.01)

        for number in range(2):
            request = Request(f"{number}", prompt=f"{number} " * 120, sampling=SamplingParams(**GREEDY), model="alpha")
            async with models.generate(request) as stream:
                assert [event async for event in stream]
        await until_kept(2)
        machine(tmp_path, left_mib=50)
        await until_kept(0, YIELD_SEC)
        assert models.find("alpha").state == "loaded"
        assert models.find("alpha").yielded == "dropped prefixes, as the machine has 52.4 MB of memory left"
        machine(tmp_path, left_mib=800)
        mock_clock.jump(YIELD_SEC)
        await until(lambda: models.find("alpha").yielded == "")
    assert caplog.text.count("event=prefixes.yielded") >= 2


async def test_idle_models_leave_a_gpu_that_another_program_needs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    free_bytes, asked = {"alpha": SCARCE_GPU_BYTES}, list[str]()

    async def told(held: LoadedModel) -> Mapping[str, Any]:
        name = held.model.file.name
        asked.append(name)
        held.model.metrics = {**await held.client.metrics(), "gpu_free_bytes": free_bytes.get(name, 0)}
        return held.model.metrics

    async with opened(folder, monkeypatch, yield_memory=True, idle_unload=0) as models:
        models.pressure = Pressure(machine(tmp_path, left_mib=800))
        monkeypatch.setattr(LoadedModel, "metrics", told)
        await models.pin("beta")
        await models.load("alpha")
        asked.clear()
        mock_clock.jump(YIELD_SEC)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert models.find("alpha").state == "loaded"
        assert asked == ["alpha"], "one without a GPU is asked nothing"
        free_bytes["alpha"] = 100 * MIB
        mock_clock.jump(YIELD_SEC)
        await until(lambda: models.find("alpha").state == "unloaded")
        assert models.find("alpha").yielded == "left, as a GPU has 105 MB of memory left"


@pytest.fixture
def group() -> Iterator[Group]:
    with a_memory_group() as made:
        yield made


@pytest.mark.slow
def test_another_program_takes_the_memory_of_a_control_group_and_nothing_is_killed(
    group: Group, serve_models: ServeModels
) -> None:
    server = serve_models("--models", ",".join(NAMES), "--yield-memory", "--idle-unload", "0", prelude=joining(group))
    program = [sys.executable, "-c", joining(group) + TAKES]
    other = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def take(size: float) -> None:
        assert other.stdin and other.stdout
        print(int(size), file=other.stdin, flush=True)
        assert other.stdout.readline() == "took it\n", "it was killed"

    def states() -> dict[str, str]:
        return {model["id"]: model["status"]["value"] for model in server.ask("GET", "/v1/models").json["data"]}

    def taken() -> dict[str, str]:
        """What models there are once the other program has taken all but half of what is scarce."""
        if (more := group.memory_left_bytes() - group.memory_limit_bytes() / SCARCE * 0.9) > 0:
            take(more)
        return states()

    try:
        body = {"prompt": PROMPT, "max_tokens": 4}
        for name in NAMES[1:]:
            assert server.ask("POST", "/v1/completions", {**body, "model": name}).status == 200
        with server.connect() as raw:
            endless = {"model": NAMES[0], "max_tokens": 100_000, "ignore_eos": True, "stream": True, "logprobs": 5}
            raw.send("POST", "/v1/completions", {**body, **endless})
            until_seen(states, lambda now: set(now.values()) == {"loaded"})
            limit = group.folder / ("memory.max" if group.version == 2 else "memory.limit_in_bytes")
            used = group.folder / ("memory.current" if group.version == 2 else "memory.usage_in_bytes")
            limit.write_text(str(int(used.read_text()) + 1024 * MIB))
            until_seen(taken, lambda now: list(now.values()) == ["loaded", "unloaded", "unloaded"])
            for command, words in (("ps", "for other programs: left, as"), ("top", "; beta left, as")):
                told = run_to_end(*uma_command(command, "--socket", str(server.process.socket)))
                assert f"{words} the control group" in " ".join(told.stdout.split())
            begun = server.process.metrics()["tokens_generated_total"]
            while server.process.metrics()["tokens_generated_total"] <= begun:
                assert raw.sock.recv(MIB), "the stream has ended"
        assert other.poll() is None
    finally:
        other.kill()
        other.communicate()
