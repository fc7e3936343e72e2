"""The number of compute threads follows the cores that other programs leave."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma.engine.worker.cores.threads import HOLD_MS, SAMPLE_MS, CpuSample, ThreadPolicy

WINDOW_MS = 120.0


@attrs.define
class Cores:
    """A machine whose scheduler gives every runnable thread the same share, but for those of programs that yield."""

    cores: float = 2.0
    most: int = 2
    load: float = 0.0
    yields: bool = False
    """The load is of the lowest priority: it has what other threads leave of the cores."""
    stolen: float = 0.0
    """Share of each busy core's time that the host of this virtual machine takes."""
    tells_idle: bool = True
    idle_cpus: float = 0.0
    """CPUs that nothing uses beyond `cores`, which then are what a quota pays for, for this process and the load."""

    def sample(self, threads: int, wall_ms: float = WINDOW_MS) -> CpuSample:
        share = min(1.0, self.cores / max(self.cores, threads + (0.0 if self.yields else self.load)))
        idle = (self.idle_cpus + max(0.0, self.cores - threads - self.load)) * wall_ms
        waiting = threads * (1 - share) * wall_ms
        running = threads * share * wall_ms * (1 - self.stolen)
        cpus = round(self.cores + self.idle_cpus)
        stolen = (cpus * wall_ms - idle) * self.stolen
        idle_ms = idle if self.tells_idle else None
        quota_used = (threads + self.load) * share * wall_ms if self.idle_cpus else None
        return CpuSample(wall_ms, self.cores, self.most, running, waiting, idle_ms, stolen, quota_used, cpus)


def run(policy: ThreadPolicy, machine: Cores, for_ms: float = WINDOW_MS) -> list[int]:
    """The number of threads after each sample."""
    return [policy.observe(machine.sample(policy.threads)) for _ in range(max(1, round(for_ms / WINDOW_MS)))]


@pytest.mark.parametrize("idle_cpus", [0.0, 14.0])
def test_the_share_that_the_host_takes_is_of_the_cpus_that_are_busy_whatever_a_quota_pays_for(idle_cpus: float) -> None:
    sample = Cores(stolen=0.3, idle_cpus=idle_cpus).sample(2)
    assert sample.stolen == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("threads", "machine", "for_ms", "computing"),
    [
        (2, Cores(), 5_000, {2}),  # alone
        (2, Cores(load=0.2), 5_000, {2}),  # clients that read tokens
        (2, Cores(load=1.0), WINDOW_MS, {1}),  # a busy program, from the first sample on
        (2, Cores(load=1.0, tells_idle=False), WINDOW_MS, {1}),
        (16, Cores(cores=16, most=16, load=1.0), 2_000, {15}),
        (4, Cores(cores=2, most=2), WINDOW_MS, {2}),  # CPUs that were taken away
    ],
)
def test_as_many_threads_compute_as_have_a_core(
    threads: int, machine: Cores, for_ms: float, computing: set[int]
) -> None:
    seen = run(ThreadPolicy(threads), machine, for_ms)
    assert set(seen if threads < 16 else seen[-1:]) == computing


@pytest.mark.parametrize("load", [1.0, 4.0])
def test_a_neighbour_that_stays_keeps_its_core_but_for_a_sample_now_and_then(load: float) -> None:
    policy, machine = ThreadPolicy(2), Cores(load=load)
    first, then = run(policy, machine, 60_000), run(policy, machine, 300_000)
    assert set(first) == {1, 2}
    assert first.count(2) <= 4
    assert 1 <= then.count(2) <= 4


def test_beside_a_program_that_yields_all_threads_compute_also_where_it_once_had_a_core() -> None:
    policy = ThreadPolicy(2)
    assert run(policy, Cores(load=1.0)) == [1]
    seen = run(policy, Cores(load=1.0, yields=True), 20_000)
    assert seen[-1] == 2
    assert seen.count(1) <= 50


def test_when_the_neighbour_has_left_every_core_computes_again_within_a_second() -> None:
    policy, machine = ThreadPolicy(2), Cores(load=1.0)
    run(policy, machine, 3_000)
    machine.load = 0.0
    seen = run(policy, machine, 1_000)
    assert seen[0] == 1
    assert seen[-1] == 2


def test_what_others_do_while_nothing_is_computed_takes_no_thread_and_can_give_one_back() -> None:
    policy, quiet, crowded = ThreadPolicy(2), Cores(), Cores(load=2.0)
    # Programs that take turns with this one.
    for _ in range(20):
        policy.observe_idle(crowded.sample(0, 2_000))
        assert set(run(policy, quiet, 1_000)) == {2}
    # A neighbour that was there before the rest and may have stayed.
    assert run(policy, crowded)[-1] == 1
    assert policy.observe_idle(crowded.sample(0, 2_000)) == 1
    # A rest that is too short to say anything leaves what was seen before it.
    policy.observe_idle(quiet.sample(0, 60))
    assert policy.observe(quiet.sample(1, 120)) == 1
    # One that has left.
    assert policy.observe_idle(quiet.sample(0, 2_000)) == 2


@pytest.mark.parametrize("tells_idle", [True, False])
def test_a_program_that_shares_the_quota_is_a_neighbour_while_other_cpus_are_idle(tells_idle: bool) -> None:
    policy, machine = ThreadPolicy(2), Cores(load=1.0, idle_cpus=6.0, tells_idle=tells_idle)
    assert set(run(policy, machine, 4_000)) == {1}
    machine.load = 0.0
    assert run(policy, machine, 1_000)[-1] == 2


def test_a_neighbour_that_comes_and_goes_is_not_followed_at_every_turn() -> None:
    policy, machine = ThreadPolicy(2), Cores()
    seen = []
    for turn in range(100):
        machine.load = 1.0 if turn % 2 else 0.0
        seen += run(policy, machine, HOLD_MS / 2)
    assert seen[10:].count(2) <= 0.1 * len(seen)


def test_what_the_host_of_a_virtual_machine_takes_is_no_reason_to_leave_a_core_unused() -> None:
    policy = ThreadPolicy(2)
    assert set(run(policy, Cores(stolen=0.4), 5_000)) == {2}
    assert (policy.load, round(policy.stolen, 3)) == (0.0, 0.4)
    # Two halves of cores that are seldom there together are less than one of them.
    assert set(run(policy, Cores(stolen=0.6), 5_000)[5:]) == {1}
    # A neighbour counts beside it.
    assert run(policy, Cores(stolen=0.2, load=1.0), 5_000)[-1] == 1


def test_a_quota_that_shrinks_while_the_engine_runs_is_kept() -> None:
    policy, machine = ThreadPolicy(4), Cores(cores=4, most=4)
    assert run(policy, machine) == [4]
    machine.cores = 2
    assert run(policy, machine, 1_000)[-1] == 2


def test_a_sample_too_short_to_say_anything_changes_nothing() -> None:
    policy = ThreadPolicy(2)
    assert policy.observe(Cores(load=3.0).sample(2, wall_ms=20.0)) == 2


samples = st.builds(
    CpuSample,
    wall_ms=st.floats(0, 1e5),
    cores=st.floats(0.1, 64),
    most=st.integers(1, 64),
    running_ms=st.floats(0, 1e6),
    waiting_ms=st.floats(0, 1e6),
    idle_ms=st.none() | st.floats(0, 1e6),
    stolen_ms=st.floats(0, 1e6),
    quota_used_ms=st.none() | st.floats(0, 1e6),
)


@given(st.lists(samples, max_size=30))
def test_whatever_the_kernel_says_from_one_to_all_useful_threads_compute(seen: list[CpuSample]) -> None:
    policy = ThreadPolicy(4)
    for sample in seen:
        before, threads = policy.threads, policy.observe(sample)
        assert 1 <= threads <= sample.most if sample.wall_ms >= SAMPLE_MS else threads == before
        assert policy.load >= 0
