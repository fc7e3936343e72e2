"""Which models leave for another: never more in memory than the budget, idle ones first, and everyone's turn comes."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st

from uma.supervisor.residency import Resident, passes, plan

BUDGET = 100
residents = st.lists(
    st.builds(
        Resident,
        name=st.sampled_from("abcdefgh"),
        size_bytes=st.integers(1, 40),
        used_at=st.floats(0, 100),
        stays_until=st.floats(0, 200),
        is_running=st.booleans(),
        is_leaving=st.booleans(),
        is_pinned=st.booleans(),
    ),
    unique_by=lambda each: each.name,
    max_size=6,
).filter(lambda every: sum(each.size_bytes for each in every) <= BUDGET)


@given(residents, st.integers(1, BUDGET), st.floats(0, 200))
def test_what_is_loaded_fits_and_what_leaves_is_needed(every: list[Resident], size: int, now: float) -> None:
    step = plan("x", size, BUDGET, every, now)
    held = sum(each.size_bytes for each in every)
    assert not step.loads or held + size <= BUDGET
    gone = [each for each in every if each.is_leaving or each.name in step.leave]
    if step.leave:
        left = held - sum(each.size_bytes for each in gone)
        assert left + size <= BUDGET
        for name in step.leave:
            one = next(each for each in every if each.name == name)
            assert left + one.size_bytes + size > BUDGET
            assert one.stays_until <= now
            assert not one.is_pinned


@given(residents, st.integers(1, BUDGET), st.floats(0, 200))
def test_none_that_runs_leaves_where_idle_ones_are_enough(every: list[Resident], size: int, now: float) -> None:
    due = [each for each in every if not each.is_running and not each.is_pinned and each.stays_until <= now]
    idle = [each for each in every if each.is_leaving or each in due]
    held = sum(each.size_bytes for each in every)
    if held - sum(each.size_bytes for each in idle) + size <= BUDGET:
        leaving = plan("x", size, BUDGET, every, now).leave
        assert not [each for each in every if each.name in leaving and each.is_running]


@given(residents, st.integers(1, BUDGET))
def test_whatever_fits_beside_what_is_pinned_is_loaded_in_the_end(every: list[Resident], size: int) -> None:
    now = 0.0
    for _ in range(3 * len(every) + 3):
        step = plan("x", size, BUDGET, every, now)
        if step.pinned:
            held = [each.size_bytes for each in every if each.name in step.pinned]
            assert sum(held) + size > BUDGET
            assert len(held) == len([each for each in every if each.is_pinned and not each.is_leaving])
            return
        if step.loads:
            return
        # What leaves ends; else time passes.
        every = [each for each in every if not each.is_leaving]
        every = [attrs.evolve(each, is_leaving=each.name in step.leave) for each in every]
        now = now if step.again_at is None else step.again_at
    raise AssertionError("it never was")


def test_the_one_used_least_recently_leaves_first() -> None:
    every = [Resident("old", 40, 1, 0), Resident("new", 40, 2, 0)]
    assert plan("x", 30, BUDGET, every, 10).leave == ("old",)


def test_a_model_stays_as_long_as_its_load_took_also_where_another_waits() -> None:
    every = [Resident("a", 80, 1, stays_until=20)]
    assert plan("x", 30, BUDGET, every, 10).again_at == 20
    assert plan("x", 30, BUDGET, every, 20).leave == ("a",)


@given(residents, st.integers(1, BUDGET), st.integers(1, BUDGET), st.floats(0, 200))
def test_what_passes_another_that_waits_takes_none_of_its_memory(
    every: list[Resident], size: int, small: int, now: float
) -> None:
    step = plan("x", size, BUDGET, every, now)
    if step.loads or step.pinned:
        return
    every = [attrs.evolve(each, is_leaving=each.is_leaving or each.name in step.leave) for each in every]
    if passes("y", small, size, BUDGET, every):
        assert sum(each.size_bytes for each in every) + small <= BUDGET
        left = [each for each in every if not each.is_leaving]
        assert plan("x", size, BUDGET, [*left, Resident("y", small, now, now)], now).loads
