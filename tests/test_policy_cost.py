"""The cost model: it starts knowing nothing, learns a machine within a few ticks, and follows it when it changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_world import Machine

from uma.engine.policy.cost import SIZES, CostModel

SIZE = st.integers(1, 4_096)


def taught(machine: Machine, ticks: list[tuple[int, int, int]]) -> CostModel:
    cost = CostModel()
    for rows, tokens, cells in ticks:
        cost.observe(rows, tokens, cells, machine.takes(rows, tokens, cells))
    return cost


def test_nothing_known_is_said_so() -> None:
    cost = CostModel()
    assert not cost.knows_prefill
    assert cost.predict(8, 512, 1_000) == 0
    cost.observe(4, 0, 100, 5.0)
    assert not cost.knows_prefill
    assert cost.decode_ms(4, 100) > 0


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 2_048), st.integers(0, 30_000), st.floats(0, 1e5))))
def test_no_history_makes_a_prediction_negative_or_infinite(history: list[tuple[int, int, int, float]]) -> None:
    cost = CostModel()
    for rows, tokens, cells, ms in history:
        if rows + tokens:
            cost.observe(rows, tokens, cells, ms)
    for rows, tokens in ((0, 0), (1, 0), (0, 1), (64, 2_048)):
        assert 0 <= cost.predict(rows, tokens, 10_000) < 1e12


@given(SIZE, SIZE, st.floats(0.1, 10_000))
def test_one_look_is_never_taken_for_more_than_it_says(seen: int, asked: int, ms: float) -> None:
    # Larger chunks are never assumed cheaper by the token, smaller ones never cheaper than in proportion.
    cost = CostModel()
    cost.observe(0, seen, 0, ms)
    assert cost.prefill_ms(asked, 0) >= 0.5 * ms * asked / seen * min(1.0, seen / 8)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("slow", [1.0, 10.0])
def test_what_was_seen_a_few_times_is_predicted_closely(rows: int, slow: float) -> None:
    machine = Machine(slowdown=slow)
    cost = taught(machine, [(rows, 0, 1_000), (rows, 64, 1_000)] * 6)
    assert cost.decode_ms(rows, 1_000) == pytest.approx(machine.takes(rows, 0, 1_000), rel=0.1)
    assert cost.predict(rows, 64, 1_000) == pytest.approx(machine.takes(rows, 64, 1_000), rel=0.1)


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_machine_that_becomes_three_times_slower_or_faster_is_known_again_within_a_few_ticks(factor: float) -> None:
    ticks = [(4, 0, 1_000), (4, 64, 1_000)]
    cost = taught(Machine(), ticks * 20)
    after = Machine(slowdown=factor)
    for rows, tokens, cells in ticks * 4:
        cost.observe(rows, tokens, cells, after.takes(rows, tokens, cells))
    assert cost.predict(4, 64, 1_000) == pytest.approx(after.takes(4, 64, 1_000), rel=0.25)
    assert cost.decode_ms(4, 1_000) == pytest.approx(after.takes(4, 0, 1_000), rel=0.25)


def test_a_single_hiccup_is_soon_forgotten() -> None:
    machine = Machine()
    ticks = [(4, 64, 1_000), (4, 0, 1_000)]
    cost = taught(machine, ticks * 20)
    cost.observe(4, 64, 1_000, 100 * machine.takes(4, 64, 1_000))
    for rows, tokens, cells in ticks * 12:
        cost.observe(rows, tokens, cells, machine.takes(rows, tokens, cells))
    assert cost.predict(4, 64, 1_000) < 2 * machine.takes(4, 64, 1_000)


@given(st.floats(1, 500), st.integers(1, 8_192))
def test_the_largest_chunk_fits_the_budget_and_is_no_more_than_is_wanted(budget: float, most: int) -> None:
    cost = taught(Machine(), [(0, size, 1_000) for size in SIZES if size <= 2_048] * 3)
    chunk = cost.best_chunk(budget, 0.0, 1_000, most)
    assert 0 <= chunk <= most
    assert cost.prefill_ms(chunk, 1_000) <= budget


def test_a_chunk_size_that_the_machine_likes_is_found_behind_one_that_it_does_not() -> None:
    # As measured: 48 tokens take longer than 64, since kernels have tiles.
    cost = CostModel()
    for _ in range(5):
        for size, ms in ((16, 25.0), (32, 45.0), (48, 85.0), (64, 75.0), (96, 140.0)):
            cost.observe(0, size, 0, ms)
    assert cost.best_chunk(80.0, 0.0, 0, 4_096) == 64


def test_a_fuller_memory_is_expected_to_cost_more() -> None:
    machine = Machine(cell_ms=2e-4)
    cost = taught(machine, [(1, 64, cells) for cells in range(0, 20_000, 500)])
    later = cost.predict(1, 64, 20_000)
    assert later == pytest.approx(machine.takes(1, 64, 20_000), rel=0.3)
    assert later > cost.predict(1, 64, 19_000)


def test_a_chunk_a_little_over_the_budget_is_taken_only_where_it_reads_clearly_faster() -> None:
    steep, even = CostModel(), CostModel()
    for _ in range(5):
        for size, ms in ((32, 56.0), (64, 84.0), (128, 150.0)):
            steep.observe(0, size, 0, ms)
        for size, ms in ((32, 42.0), (64, 84.0), (128, 168.0)):
            even.observe(0, size, 0, ms)
    assert steep.best_chunk(75.0, 16.0, 0, 4_096) == 64
    assert even.best_chunk(75.0, 16.0, 0, 4_096) < 64
    assert steep.best_chunk(75.0, 0.0, 0, 4_096) < 64
