"""Compute threads give way to other programs: what the kernel says is read right, and the engine follows it."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jsonschema
import pytest
import trio
from engine_world import alone, answers, ask, config_for, tokens_for
from quota_group import SetQuota, in_a_group_of_its_own

from harness import PATIENCE_SEC, run_to_end
from uma import cgroup
from uma.engine import Engine, open_engine
from uma.engine.clock import now_ms
from uma.engine.worker.cores import counters
from uma.engine.worker.cores import watch as cores
from uma.engine.worker.cores.counters import TICK_MS, Counters, unused_ms, waiting_ms
from uma.engine.worker.cores.threads import CpuSample
from uma.engine.worker.cores.watch import ComputeThreads, StallWatch, is_starved
from uma.llama import backend
from uma.llama.batch import Batch
from uma.llama.context import ABORTED, DONE, Context, ContextParams
from uma.llama.model import Model
from uma.metrics import EngineMetrics
from uma.types import Grammar


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """So many other programs that want a core all the time."""
    programs = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a thread waited for a core")
@pytest.mark.skipif(len(backend.affinity()) < 2, reason="with one CPU there is no thread to give up")
async def test_beside_busy_programs_fewer_threads_compute(tiny: Path) -> None:
    config = config_for(tiny, threads=2)
    with busy_programs(2 * len(backend.affinity())), trio.fail_after(PATIENCE_SEC):
        async with open_engine(config) as engine:
            while engine.snapshot()["compute_threads"] > 1:
                async with engine.generate(ask(max_tokens=64)) as stream:
                    async for _ in stream:
                        pass
            assert engine.snapshot()["neighbour_load"] > 0


@contextmanager
def pinned(cpus: set[int]) -> Iterator[None]:
    """Every thread of this process, and all that they start, on these CPUs, as `taskset -ap` has it."""
    before = os.sched_getaffinity(0)
    _pin_all(cpus)
    try:
        yield
    finally:
        _pin_all(before)


def _pin_all(cpus: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread.name), cpus)


async def _generate_until(engine: Engine, threads: int) -> None:
    with trio.fail_after(PATIENCE_SEC):
        while engine.snapshot()["compute_threads"] != threads:
            # Without a rest: what happens while nothing is computed counts for little.
            async with engine.generate(ask(max_tokens=1_000)) as stream:
                async for _ in stream:
                    if engine.snapshot()["compute_threads"] == threads:
                        break


@pytest.fixture
def by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other program wants the cores, whatever runs beside this test."""
    monkeypatch.setattr(CpuSample, "load", 0.0)
    monkeypatch.setattr(CpuSample, "stolen", 0.0)


class Kernel:
    """What a kernel counts whose cores are never idle, of this process and its one thread."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.ran_ms = self.waited_ms = 0.0
        self.add(1.0)

    def add(self, ran_ms: float, waited_ms: float = 0.0) -> None:
        """The thread ran and waited for so long more."""
        self.ran_ms, self.waited_ms = self.ran_ms + ran_ms, self.waited_ms + waited_ms
        schedstat = self.proc / "self" / "task" / "1" / "schedstat"
        schedstat.parent.mkdir(parents=True, exist_ok=True)
        schedstat.write_text(f"{int(self.ran_ms * 1e6)} {int(self.waited_ms * 1e6)} 1\n")
        cpus = range(max(backend.affinity()) + 1)
        (self.proc / "stat").write_text("".join(f"cpu{cpu} 0 0 0 0 0 0 0 0\n" for cpu in cpus))


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Counters that change as a test says, and no others."""
    found = Kernel(tmp_path)
    monkeypatch.setattr(time, "process_time", lambda: found.ran_ms / 1000)
    return found


@pytest.fixture
def told_quota(monkeypatch: pytest.MonkeyPatch) -> SetQuota:
    """The quota is what this is told, whatever that of the control groups is; at first there is none."""

    def set_quota(cpus: float) -> None:
        monkeypatch.setattr(cgroup, "cpu_quota", lambda root: cpus)

    set_quota(math.inf)
    return set_quota


@pytest.fixture
def real_quota() -> Iterator[SetQuota]:
    """The quota of a control group that this process is in; at first there is none."""
    with in_a_group_of_its_own() as set_quota:
        yield set_quota


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins threads to CPUs")
@pytest.mark.usefixtures("by_itself", "told_quota")
async def test_cpus_that_taskset_takes_away_from_a_running_engine_take_their_threads_along_and_bring_them_back(
    tiny: Path,
) -> None:
    async with open_engine(config_for(tiny, threads=0)) as engine:
        with pinned({min(backend.affinity())}):
            await _generate_until(engine, 1)
        await _generate_until(engine, backend.core_count())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has control groups")
@pytest.mark.usefixtures("by_itself")
@pytest.mark.parametrize("quota", ["told_quota", "real_quota"])
async def test_a_quota_that_changes_under_a_running_engine_bounds_its_threads(
    tiny: Path, quota: str, request: pytest.FixtureRequest
) -> None:
    set_quota: SetQuota = request.getfixturevalue(quota)
    async with open_engine(config_for(tiny, threads=0)) as engine:
        threads = backend.core_count()
        set_quota(1.0)
        await _generate_until(engine, 1)
        set_quota(math.inf)
        await _generate_until(engine, threads)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has control groups")
def test_what_this_process_uses_of_a_real_quota_is_told(real_quota: SetQuota) -> None:
    cpus = min(0.5, cgroup.cpu_quota() / 2)
    real_quota(cpus)
    assert cgroup.cpu_quota() == pytest.approx(cpus, abs=0.001)
    began, give_up = cgroup.quota_use(), time.monotonic() + PATIENCE_SEC
    assert began is not None
    while (now := cgroup.quota_use()) is None or (now.since(began) or 0.0) < 20.0:
        assert time.monotonic() < give_up, (began, now)


def test_under_a_quota_others_are_seen_by_what_they_use_of_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = tmp_path / "self" / "task" / "1"
    thread.mkdir(parents=True)
    clock = iter((0.0, 0.0, 1_000.0))
    monkeypatch.setattr(cores, "now_ms", lambda: next(clock))
    monkeypatch.setattr(backend, "affinity", lambda: frozenset(range(8)))
    monkeypatch.setattr(cgroup, "cpu_quota", lambda root: 2.0)

    def after_a_second(seconds: int) -> None:
        """Two threads that ran for two thirds of it, another program as well, and six of eight CPUs without work."""
        monkeypatch.setattr(time, "process_time", lambda: seconds * 4 / 3)
        thread.joinpath("schedstat").write_text(f"{1 + seconds * 4 * 10**9 // 3} {seconds * 2 * 10**9 // 3} 1")
        idle = round(seconds * 6_000 / TICK_MS / 8)
        (tmp_path / "stat").write_text("".join(f"cpu{cpu} 0 0 0 {idle} 0\n" for cpu in range(8)))
        monkeypatch.setattr(cgroup, "quota_use", lambda: cgroup.QuotaUse(tmp_path, 2_000.0 * seconds))

    after_a_second(0)
    with Model.load(tiny) as model, Context(model, ContextParams(n_ctx=256, n_threads=2)) as context:
        watched = ComputeThreads(context, EngineMetrics(), proc=tmp_path)
        after_a_second(1)
        assert watched.before_batch() == 1
        assert watched.load == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("n_gpu_layers", "offload_kqv", "is_read"), [(-1, True, False), (-1, False, True), (2, True, True), (0, True, True)]
)
def test_where_a_gpu_computes_everything_no_counters_are_read(
    tiny: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, *, n_gpu_layers: int, offload_kqv: bool, is_read: bool
) -> None:
    monkeypatch.setattr(backend, "has_gpu", lambda: True)
    params = ContextParams(n_ctx=256, offload_kqv=offload_kqv)
    with Model.load(tiny, n_gpu_layers=n_gpu_layers) as model, Context(model, params) as context:
        watched = ComputeThreads(context, EngineMetrics(), proc=kernel.proc)
        samples, take = list[float](), Counters.take

        def noted(proc: Path, now: float) -> Counters | None:
            samples.append(now)
            return take(proc, now)

        monkeypatch.setattr(Counters, "take", noted)
        watched.was_idle(1_000.0)
        assert bool(samples) == is_read
        samples.clear()
        watched.sample_next()
        watched.before_batch()
        assert bool(samples) == is_read


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells each thread's priority")
def test_every_thread_of_a_nice_process_is_as_nice() -> None:
    script = (
        "import os; os.nice(5); from contextlib import suppress; from uma import LLM, SamplingParams\n"
        "llm, found = LLM(), set()  # kept, or its threads end\n"
        "llm.generate(['Once'], SamplingParams(max_tokens=4))\n"
        "for name in os.listdir('/proc/self/task'):\n"
        "    with suppress(ProcessLookupError): found.add(os.getpriority(os.PRIO_PROCESS, int(name)))\n"
        "print(found)"
    )
    done = run_to_end(sys.executable, "-c", script)
    assert done.stdout == f"{{{min(os.nice(0) + 5, 19)}}}\n", done.stderr


async def test_batches_that_are_broken_off_are_computed_again_and_readers_see_no_difference(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{4}$"}, "minItems": 4, "maxItems": 4}
    requests = [ask(tokens_for(seed, 300), 40, id=str(seed)) for seed in range(4)]
    requests.append(ask(tokens_for(4, 20), 60, id="words", grammar=Grammar(json_schema=words), temperature=1, seed=1))
    async with open_engine(config_for(tiny)) as engine:
        undisturbed = await alone(engine, requests)
    begin, calls = Context.begin, itertools.count()

    def disturbed(context: Context, batch: Batch) -> int:
        if next(calls) % 3 == 0:
            context.request_retry()
        return begin(context, batch)

    monkeypatch.setattr(Context, "begin", disturbed)
    async with open_engine(config_for(tiny)) as engine:
        got = await answers(engine, requests)
        assert engine.snapshot()["stalls_total"] > 10
    assert [each.token_ids for each in got] == [each.token_ids for each in undisturbed]
    jsonschema.validate(json.loads(got[-1].text), words)


def test_a_batch_whose_threads_wait_for_cores_is_broken_off_and_others_compute(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = itertools.count()
    monkeypatch.setattr(cores, "LOOK_SEC", 0.001)
    monkeypatch.setattr(cores, "MIN_MS", 0.0)
    monkeypatch.setattr(counters, "waiting_ms", lambda _: {"1": 1e6 * next(counts)})
    params = ContextParams(n_ctx=16_384, n_batch=16_384, n_ubatch=64)
    with Model.load(tiny) as model, Context(model, params) as context:
        watch = StallWatch(context)
        batch = Batch(16_384)
        batch.add([1] * 16_384, 0, 0, last_logits=True)
        with watch.watching():
            watch.begin(now_ms(), expected_ms=0.0, threads=2)
            assert context.decode(batch) == ABORTED
            watch.end()
        context.resume()
        context.clear()
        batch.clear()
        batch.add([1] * 64, 0, 0, last_logits=True)
        assert context.decode(batch) == DONE


async def test_the_first_batch_of_all_is_broken_off_too_where_its_threads_wait_for_cores(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = itertools.count()
    monkeypatch.setattr(cores, "LOOK_SEC", 0.0001)
    monkeypatch.setattr(cores, "MIN_MS", 0.0)
    monkeypatch.setattr(cores, "TOO_LONG", 1e9)  # what has a prediction never takes too long
    monkeypatch.setattr(counters, "waiting_ms", lambda _: {"1": 1e6 * next(counts)})
    async with open_engine(config_for(tiny, threads=2)) as engine:
        (answer,) = await answers(engine, [ask(tokens_for(1, 900), 1)])
        assert engine.snapshot()["stalls_total"] >= 1
    assert len(answer.token_ids) == 1


class Looks(threading.Event):
    """What wakes the watching thread. Tells how long it waits before each look, and when it rests."""

    def __init__(self) -> None:
        super().__init__()
        self.intervals_sec = list[float]()
        self.rests = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            self.rests.set()
            return super().wait()
        self.intervals_sec.append(timeout)
        return super().wait(timeout)


@pytest.fixture
def starving(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StallWatch, Looks, threading.Event]]:
    """A watch that sees every batch wait for cores as soon as it looks twice; its looks; and whether it has aborted."""
    counts, aborted = itertools.count(), threading.Event()
    monkeypatch.setattr(cores, "LOOK_SEC", 0.001)
    monkeypatch.setattr(cores, "MIN_MS", 0.0)
    monkeypatch.setattr(counters, "waiting_ms", lambda _: {"1": 1e6 * next(counts)})
    monkeypatch.setattr(Context, "request_retry", lambda _: aborted.set())
    with Model.load(tiny) as model, Context(model, ContextParams(n_ctx=256)) as context:
        watch = StallWatch(context)
        looks = watch._called = Looks()
        yield watch, looks, aborted


def test_an_abort_that_comes_too_late_is_not_meant_for_the_next_batch(
    starving: tuple[StallWatch, Looks, threading.Event],
) -> None:
    watch, _, aborted = starving
    with watch.watching():
        watch.begin(now_ms(), expected_ms=0.0, threads=2)
        assert aborted.wait(PATIENCE_SEC)
        assert watch.end()
        watch.begin(now_ms(), expected_ms=0.0, threads=2)
        assert not watch.end()


def test_without_batches_the_watch_stops_to_look_until_one_begins(
    starving: tuple[StallWatch, Looks, threading.Event],
) -> None:
    watch, looks, aborted = starving
    with watch.watching():
        assert looks.rests.wait(PATIENCE_SEC)
        assert not looks.intervals_sec
        watch.begin(now_ms(), expected_ms=0.0, threads=2)
        assert aborted.wait(PATIENCE_SEC), "the rest goes on beside a batch"
        looks.rests.clear()
        watch.end()
        assert looks.rests.wait(PATIENCE_SEC), "it rests once only"


def test_only_threads_that_wait_for_cores_are_starved() -> None:
    before = Counters(0.0, 10.0, {"1": 10.0}, stolen_ms=10.0)
    assert not is_starved(before, Counters(100.0, 110.0, {"1": 12.0}, stolen_ms=10.0))
    assert not is_starved(before, before), "nothing ran and nothing waited"
    assert is_starved(before, Counters(100.0, 60.0, {"1": 60.0}, stolen_ms=10.0))
    host_took = Counters(100.0, 60.0, {"1": 60.0}, stolen_ms=40.0)
    assert not is_starved(before, host_took), "the host took the core, not another program"


async def test_named_threads_are_the_most_that_compute(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        assert engine.snapshot()["compute_threads"] == 1


def test_how_long_each_thread_waited_is_what_the_kernel_counts(tmp_path: Path) -> None:
    for thread, counts in {"11": "3000000 1000000 5", "12": "2000000 500000 7"}.items():
        (tmp_path / "self" / "task" / thread).mkdir(parents=True)
        (tmp_path / "self" / "task" / thread / "schedstat").write_text(counts + "\n")
    (tmp_path / "self" / "task" / "13").mkdir()  # it ended while we looked
    assert waiting_ms(tmp_path) == {"11": 1.0, "12": 0.5}


def test_a_thread_that_ends_is_no_other_program(kernel: Kernel) -> None:
    ended = kernel.proc / "self" / "task" / "2" / "schedstat"
    ended.parent.mkdir()
    ended.write_text("400000000 300000000 1")
    before = Counters.take(kernel.proc, 0.0)
    assert before is not None
    ended.unlink()
    kernel.add(100.0 * len(backend.affinity()))  # every core all the time
    now = Counters.take(kernel.proc, 100.0)
    assert now is not None
    sample = now.since(before, wanted=2)
    assert (sample.load, sample.cpu_fraction) == (0.0, 1.0)
    assert not is_starved(before, now)


def test_what_a_thread_has_run_still_counts_when_it_has_ended() -> None:
    def run() -> None:
        began = time.thread_time()
        while time.thread_time() < began + 0.02:
            pass

    before = Counters.take(counters.PROC, 0.0)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    now = Counters.take(counters.PROC, 100.0)
    assert (before is None) == (now is None)
    assert before is None or now is None or now.since(before, wanted=1).running_ms >= 20.0


def test_without_the_kernels_counts_nothing_is_assumed(tmp_path: Path) -> None:
    assert waiting_ms(tmp_path / "missing") is None
    assert unused_ms(tmp_path / "missing", frozenset({0})) is None
    (tmp_path / "stat").write_text("cpu  1 2 3 4 5\nintr 7\n")
    assert unused_ms(tmp_path / "stat", frozenset({0})) is None


def test_idle_and_stolen_time_is_that_of_the_cpus_this_process_may_use(tmp_path: Path) -> None:
    cpus = ["cpu  0 0 0 999 0 0 0 99", "cpu0 9 9 9 100 1 0 0 1", "cpu1 9 9 9 200 2 0 0 7", "cpu10 9 9 9 400 4 0"]
    (tmp_path / "stat").write_text("\n".join([*cpus, "intr 1"]))
    assert unused_ms(tmp_path / "stat", frozenset({1, 10})) == ((200 + 2 + 400 + 4) * TICK_MS, 7 * TICK_MS)


def describe(sysfs: Path, cpus: dict[int, tuple[str, int | None]]) -> None:
    """A folder as the kernel has it: each CPU with its core's siblings and, on Arm, its capacity."""
    for cpu, (siblings, capacity) in cpus.items():
        (sysfs / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (sysfs / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(siblings + "\n")
        if capacity is not None:
            (sysfs / f"cpu{cpu}" / "cpu_capacity").write_text(f"{capacity}\n")


def test_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    sysfs = tmp_path / "system" / "cpu"
    describe(sysfs, {0: ("0,2", None), 1: ("1,3", None), 2: ("0,2", None), 3: ("1,3", None)})
    assert backend.compute_cores(frozenset(range(4)), sysfs) == 2
    assert backend.compute_cores(frozenset({0, 2}), sysfs) == 1


def test_of_a_hybrid_processor_the_fast_cores_compute(tmp_path: Path) -> None:
    sysfs = tmp_path / "intel" / "system" / "cpu"
    describe(sysfs, {cpu: (str(cpu), None) for cpu in range(8)})
    (tmp_path / "intel" / "cpu_core").mkdir()
    (tmp_path / "intel" / "cpu_core" / "cpus").write_text("0-3\n")
    assert backend.compute_cores(frozenset(range(8)), sysfs) == 4
    assert backend.compute_cores(frozenset({6, 7}), sysfs) == 2  # pinned to slow ones: these, then
    arm = tmp_path / "arm" / "system" / "cpu"
    describe(arm, {cpu: (str(cpu), 1024 if cpu < 2 else 400) for cpu in range(6)})
    assert backend.compute_cores(frozenset(range(6)), arm) == 2


def test_a_machine_that_does_not_describe_its_cpus_computes_on_all_of_them(tmp_path: Path) -> None:
    assert backend.compute_cores(frozenset({0, 1, 5}), tmp_path / "system" / "cpu") == 3
    assert 1 <= backend.core_count() <= (os.cpu_count() or 1)


@pytest.mark.skipif(len(backend.affinity()) < 2, reason="with one CPU there is no thread to give up")
def test_programs_that_take_turns_with_the_engine_take_no_thread_from_it(
    tiny: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_ms = 0.0
    monkeypatch.setattr(cores, "now_ms", lambda: clock_ms)
    metrics = EngineMetrics()

    def pass_by(wall_ms: float, *, computes: bool) -> None:
        """A time in which every core has something to run: this process's threads, or other programs."""
        nonlocal clock_ms
        clock_ms += wall_ms
        ran_ms = wall_ms * len(backend.affinity()) if computes else 0.0
        kernel.add(ran_ms)

    with Model.load(tiny) as model, Context(model, ContextParams(n_ctx=256, n_threads=0)) as context:
        watched = ComputeThreads(context, metrics, proc=kernel.proc)
        most = metrics.compute_threads
        for _ in range(5):
            pass_by(2_000, computes=False)
            watched.was_idle(2_000)
            pass_by(200, computes=True)
            assert watched.before_batch() == most
