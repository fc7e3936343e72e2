"""Decode rows at once or one by one: what was measured decides, both ways stay known, and nothing else is tried."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_world import make_row

from uma.engine.policy import Scheduler, State, Targets
from uma.engine.policy.cost import CostModel
from uma.engine.policy.rows import MOST_APART, TRY_EVERY, OneByOne

Q8_AVX512 = {1: 3.5, 2: 9.5, 3: 12.0, 4: 13.2}
"""Milliseconds by rows, as measured with a Q8_0 model of 100 M parameters on two cores."""


class Decoding:
    """Rows that decode on a machine which takes `took_ms` for batches of so many rows."""

    def __init__(self, took_ms: dict[int, float]) -> None:
        self.took_ms = took_ms
        self.cost = CostModel()
        self.one_by_one = OneByOne(self.cost)

    def tick(self, rows: int) -> int:
        """Decode rows as the policy wants it; returns how many at once."""
        size = 1 if self.one_by_one.choose(rows, 0) else rows
        for _ in range(rows // size):
            self.cost.observe_decode(size, 0, self.took_ms[size])
        return size

    def ticks(self, rows: int, count: int) -> list[int]:
        return [self.tick(rows) for _ in range(count)]


@pytest.mark.parametrize(("rows", "faster"), [(2, 1), (3, 1), (4, 4)])
def test_both_ways_are_measured_first_and_then_the_faster_is_taken(rows: int, faster: int) -> None:
    assert Decoding(Q8_AVX512).ticks(rows, TRY_EVERY) == [rows, 1] + (TRY_EVERY - 2) * [faster]


def test_what_is_a_little_slower_is_tried_now_and_then_and_taken_once_it_is_faster() -> None:
    machine = Decoding(Q8_AVX512 | {2: 6.0})
    tried = machine.ticks(2, 2 + 10 * TRY_EVERY)[2:]
    assert tried.count(1) == 10
    machine.took_ms = Q8_AVX512
    assert machine.ticks(2, 4 * TRY_EVERY)[-TRY_EVERY + 1 :].count(1) == TRY_EVERY - 2


def test_what_is_tried_is_tried_for_one_tick() -> None:
    machine = Decoding(Q8_AVX512 | {2: 6.0})
    trying = []
    for _ in range(2 + 3 * TRY_EVERY):
        size = machine.tick(2)
        trying.append((size == 1) == machine.one_by_one.is_trying)
    assert all(trying)


def test_a_plan_that_tries_something_is_not_one_to_go_on_with() -> None:
    scheduler = Scheduler(Targets(tick_budget_ms=80.0, batch_tokens=64, start_chunk_tokens=16))
    scheduler.cost.observe_decode(2, 0, 6.0)
    scheduler.cost.observe_decode(1, 0, 3.5)
    state = State([make_row(1), make_row(2)], [], free_cells=1_000, used_cells=0)
    plans = [scheduler.plan(state, 0.0) for _ in range(3 * TRY_EVERY)]
    assert sum(plan.is_one_by_one for plan in plans) == 3
    assert all(plan.is_everyday != plan.is_one_by_one for plan in plans)


def test_what_is_far_slower_is_not_tried_again() -> None:
    machine = Decoding({1: 10.0, 2: 10.5, 3: 11.0, 4: 11.5})
    assert 1 not in machine.ticks(2, 10 * TRY_EVERY)[2:]


def test_batches_so_short_that_one_more_costs_as_much_are_left_as_they_are() -> None:
    machine = Decoding({1: 0.01, 2: 0.15, 3: 0.3, 4: 0.5})
    assert {rows: set(machine.ticks(rows, 40)) for rows in (2, 3, 4)} == {2: {2}, 3: {3}, 4: {4}}


@given(st.integers(1, 64), st.dictionaries(st.integers(1, 64), st.floats(0.001, 1_000), max_size=8))
def test_many_rows_and_one_are_always_computed_at_once(rows: int, seen_ms: dict[int, float]) -> None:
    cost = CostModel()
    for size, took_ms in seen_ms.items():
        cost.observe_decode(size, 0, took_ms)
    assert not OneByOne(cost).choose(rows, 0) or 1 < rows <= MOST_APART


@pytest.mark.parametrize("rows", range(2, MOST_APART + 1))
def test_a_machine_that_is_not_known_yet_is_asked_for_all_at_once(rows: int) -> None:
    assert not OneByOne(CostModel()).choose(rows, 0)
