"""The cost model: it starts knowing nothing, learns a machine within a few ticks, and follows it when it changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_world import Machine

from uma.engine.policy.cost import DRIFT_LIMIT, SIZES, CostModel


def standing_at(position: float) -> Callable[[int], float]:
    """A chunk of any size, after so many tokens of its prompt."""
    return lambda _: position


SIZE = st.integers(1, 4_096)
POSITION = st.integers(0, 8_000)


def see(cost: CostModel, machine: Machine, *, rows: int = 0, cells: int = 0, tokens: int = 0, at: float = 0) -> None:
    """Run a batch of each kind asked for on the machine."""
    if rows:
        cost.observe_decode(rows, cells, machine.decode_ms(rows, cells))
    if tokens:
        cost.observe_prefill(tokens, at, machine.prefill_ms(tokens, at))


def read_prompt(cost: CostModel, machine: Machine, until: int, chunk: int) -> None:
    """Read a prompt from its begin, in even chunks."""
    for position in range(0, until, chunk):
        see(cost, machine, tokens=chunk, at=position)


def seen(sizes_ms: dict[int, float]) -> CostModel:
    """A model that has seen these chunk sizes a few times, at the begin of a prompt."""
    cost = CostModel()
    for _ in range(5):
        for size, ms in sizes_ms.items():
            cost.observe_prefill(size, 0, ms)
    return cost


def test_nothing_known_is_said_so() -> None:
    cost = CostModel()
    assert not cost.knows_prefill
    assert cost.decode_ms(8, 1_000) == cost.prefill_ms(512, 1_000) == 0
    cost.observe_decode(4, 100, 5.0)
    assert not cost.knows_prefill
    assert cost.decode_ms(4, 100) > 0
    cost.observe_prefill(4, 100, 5.0)
    assert cost.knows_prefill


OBSERVED = st.tuples(st.booleans(), SIZE, st.integers(0, 30_000), st.floats(0, 1e5))


@given(st.lists(OBSERVED))
def test_no_history_makes_a_prediction_negative_or_infinite(history: list[tuple[bool, int, int, float]]) -> None:
    cost = CostModel()
    for is_decode, size, before, ms in history:
        observe = cost.observe_decode if is_decode else cost.observe_prefill
        observe(size, before, ms)
    for size, before in ((0, 0), (1, 0), (64, 10_000), (2_048, 100_000)):
        assert 0 <= cost.decode_ms(size, before) < 1e12
        assert 0 <= cost.prefill_ms(size, before) < 1e12


@given(SIZE, SIZE, st.floats(0.1, 10_000))
def test_one_look_is_never_taken_for_more_than_it_says(first: int, asked: int, ms: float) -> None:
    # Larger chunks are never assumed cheaper by the token, smaller ones never cheaper than in proportion.
    cost = CostModel()
    cost.observe_prefill(first, 0, ms)
    assert cost.prefill_ms(asked, 0) >= 0.5 * ms * asked / first * min(1.0, first / 8)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("slow", [1.0, 10.0])
def test_what_was_seen_a_few_times_is_predicted_closely(rows: int, slow: float) -> None:
    machine, cost = Machine(slowdown=slow), CostModel()
    for _ in range(6):
        see(cost, machine, rows=rows, cells=1_000, tokens=64, at=500)
    assert cost.decode_ms(rows, 1_000) == pytest.approx(machine.decode_ms(rows, 1_000), rel=0.05)
    assert cost.prefill_ms(64, 500) == pytest.approx(machine.prefill_ms(64, 500), rel=0.05)


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_machine_that_becomes_three_times_slower_or_faster_is_known_again_within_a_few_ticks(factor: float) -> None:
    cost, after = CostModel(), Machine(slowdown=factor)
    for tick in range(24):
        see(cost, Machine() if tick < 20 else after, rows=4, cells=1_000, tokens=64)
    assert cost.decode_ms(4, 1_000) == pytest.approx(after.decode_ms(4, 1_000), rel=0.25)
    assert cost.prefill_ms(64, 0) == pytest.approx(after.prefill_ms(64, 0), rel=0.25)


def test_sizes_not_seen_since_the_machine_became_slower_are_expected_to_be_slower_too() -> None:
    cost, after = CostModel(), Machine(slowdown=3)
    for tokens in (64, 256) * 10:
        see(cost, Machine(), tokens=tokens)
    for _ in range(6):
        see(cost, after, tokens=64)
    assert cost.prefill_ms(256, 0) > 1.25 * Machine().prefill_ms(256, 0)


def test_a_single_hiccup_is_soon_forgotten() -> None:
    machine, cost = Machine(), CostModel()
    for tick in range(33):
        see(cost, machine, rows=4, cells=1_000, tokens=64)
        if tick == 20:
            cost.observe_prefill(64, 0, 100 * machine.prefill_ms(64, 0))
    assert cost.prefill_ms(64, 0) < 2 * machine.prefill_ms(64, 0)


@pytest.mark.parametrize("interrupted", [{40}, set(range(40, 400, 15))])
def test_beside_a_prompt_a_stream_that_grows_is_expected_to_take_what_it_takes_after_interruptions(
    interrupted: set[int],
) -> None:
    cost, machine = CostModel(), Machine()
    expected = []
    for step in range(400):
        cells, real_ms = 4_000 + 6 * step, machine.decode_ms(1, 4_000)
        if step > 60 and interrupted.isdisjoint(range(step - 5, step)):
            expected.append(cost.decode_ms(1, cells) / real_ms)
        cost.observe_decode(1, cells, real_ms * (1.75 if step in interrupted else 1.0))
        if step % 15 == 14:
            cost.observe_prefill(64, 1_000, machine.prefill_ms(64, 1_000))
    assert min(expected) > 0.7
    assert max(expected) < 1.4


def test_what_attention_costs_is_still_known_after_hundreds_of_pieces_at_about_one_place() -> None:
    """As of questions on one state, beside which a prompt is read, or a row decodes, that stands deeper."""
    machine, cost = Machine(base_ms=15.0, cell_ms=4.5e-3), CostModel()
    read_prompt(cost, machine, 1_000, 64)
    for step in range(400):
        at = 1_000 + step * 17 % 48
        cost.observe_prefill(64, at, machine.prefill_ms(64, at) * (1.1 if step % 3 else 0.8))
    for at in (0, 2_000):
        assert cost.prefill_ms(64, at) == pytest.approx(machine.prefill_ms(64, at), rel=0.3)


def test_that_decode_steps_take_half_as_long_says_nothing_of_pieces() -> None:
    """A stream of 4,000 tokens has ended, and another begun."""
    machine, cost = Machine(), CostModel()
    piece_ms = machine.prefill_ms(64, 1_000)
    for step in range(150):
        cost.observe_decode(1, 4_000, 30.0 if step < 135 else 15.0)
        if step % 15 == 14:
            found_ms = cost.prefill_ms(64, 1_000)
            cost.observe_prefill(64, 1_000, piece_ms)
    assert found_ms == pytest.approx(piece_ms, rel=0.15)


@given(st.floats(1, 500), st.integers(1, 8_192), POSITION)
def test_the_chunk_chosen_fits_the_budget_and_is_no_more_than_is_wanted(budget: float, most: int, at: int) -> None:
    cost = CostModel()
    for size in [size for size in SIZES if size <= 2_048] * 3:
        see(cost, Machine(), tokens=size, at=1_000)
    chunk = cost.best_size(most, standing_at(at), budget)
    assert 0 <= chunk <= most
    assert cost.prefill_ms(chunk, at) <= budget


def test_a_chunk_size_that_the_machine_likes_is_found_behind_one_that_it_does_not() -> None:
    # As measured where kernels have tiles: more tokens may take less time.
    cost = seen({32: 45.0, 64: 85.0, 128: 75.0, 192: 140.0})
    assert cost.best_size(4_096, standing_at(0), 80.0) == 128


def test_of_chunks_that_read_equally_fast_the_smallest_is_taken() -> None:
    even = seen({size: 1.0 + 1.28 * size for size in SIZES[:9]})
    steep = seen({size: 60.0 + size for size in SIZES[:9]})
    assert even.best_size(4_096, standing_at(0), 400.0) == 64
    assert steep.best_size(4_096, standing_at(0), 330.0) == 256


# What lies before a chunk


def test_a_fuller_memory_is_expected_to_make_decoding_slower() -> None:
    machine, cost = Machine(cell_ms=2e-4), CostModel()
    for cells in range(0, 20_000, 500):
        see(cost, machine, rows=8, cells=cells)
    assert cost.decode_ms(8, 20_000) > cost.decode_ms(8, 19_000)
    assert cost.decode_ms(8, 25_000) == pytest.approx(machine.decode_ms(8, 25_000), rel=0.2)


MACHINES = st.builds(
    Machine, token_ms=st.floats(0.05, 5), cell_ms=st.floats(1e-5, 1e-3), slowdown=st.sampled_from((0.1, 1.0, 10.0))
)


@given(MACHINES, st.sampled_from((8, 16, 32, 64, 128, 256)))
def test_later_in_a_prompt_a_chunk_is_expected_to_cost_more(machine: Machine, chunk: int) -> None:
    cost = CostModel()
    read_prompt(cost, machine, 3_000, chunk)
    expected = [cost.prefill_ms(chunk, position) for position in (0, 1_000, 3_000, 10_000)]
    assert expected == sorted(set(expected))


@given(MACHINES, st.sampled_from((8, 16, 32, 64, 128)), st.sampled_from((2_000, 4_000)))
def test_positions_that_were_never_seen_are_predicted_from_those_that_were(
    machine: Machine, chunk: int, until: int
) -> None:
    cost = CostModel()
    read_prompt(cost, machine, until, chunk)
    for position in (until + 500, until * 2):
        attention = chunk * machine.cell_ms * machine.slowdown * position
        if attention < 0.7 * machine.prefill_ms(chunk, position):
            assert cost.prefill_ms(chunk, position) == pytest.approx(machine.prefill_ms(chunk, position), rel=0.2)


def test_the_begin_of_the_next_prompt_is_predicted_after_the_end_of_a_long_one() -> None:
    machine, cost = Machine(cell_ms=2e-4), CostModel()
    read_prompt(cost, machine, 4_000, 64)
    assert cost.prefill_ms(64, 0) == pytest.approx(machine.prefill_ms(64, 0), rel=0.2)


@given(st.permutations([64, 64, 64, 128, 128, 192, 192, 256, 256]))
def test_the_first_prompt_that_is_read_tells_what_attention_costs_pieces_of_any_size_anywhere_in_it(
    sizes: list[int],
) -> None:
    # As measured with 100 M parameters on two cores: at 1,500 tokens a piece takes nearly twice as long as at none.
    machine, cost, position = Machine(base_ms=15.0, cell_ms=4.5e-4), CostModel(), 0
    for size in sizes:
        see(cost, machine, tokens=size, at=position)
        position += size
    for size, at in itertools.product((64, 128, 192, 256), (0, 600, 1_200)):
        assert cost.prefill_ms(size, at) == pytest.approx(machine.prefill_ms(size, at), rel=0.2)


@pytest.mark.parametrize("size", [16, 256])
def test_what_attention_costs_is_known_of_sizes_seen_only_at_the_begin(size: int) -> None:
    """Also below a tile, where attention costs more: what is too small there is not taken for the fastest."""
    machine, cost = Machine(base_ms=0.0, cell_ms=3e-4), CostModel()
    for _ in range(3):
        read_prompt(cost, machine, 4_000, 64)
    see(cost, machine, tokens=size)
    assert cost.prefill_ms(size, 2_000) == pytest.approx(machine.prefill_ms(size, 2_000), rel=0.2)


def test_deep_in_a_prompt_fewer_tokens_fit_the_same_time() -> None:
    machine, cost = Machine(base_ms=30.0, cell_ms=3e-4), CostModel()
    for size in (16, 32, 64, 128):
        read_prompt(cost, machine, 4_000, size)
    chunks = [cost.best_size(8_192, standing_at(position), 180.0) for position in (0, 2_000, 6_000)]
    assert chunks == sorted(set(chunks), reverse=True)


# Tiles


@given(st.integers(33, 63))
def test_a_rest_that_fills_no_tile_is_predicted_from_the_smaller_size(rest: int) -> None:
    cost = seen({32: 25.0, 64: 30.0})
    assert cost.prefill_ms(rest, 0) == pytest.approx(25.0 * rest / 32, rel=0.05)
    assert cost.prefill_ms(64, 0) == pytest.approx(30.0, rel=0.05)


@given(st.integers(33, 63), st.floats(1, 200))
def test_what_a_part_of_a_tile_took_does_not_spoil_what_is_known_of_the_tile(rest: int, ms: float) -> None:
    cost = seen({32: 25.0, 64: 43.0})
    for _ in range(3):
        cost.observe_prefill(rest, 0, ms)
        for _ in range(4):
            cost.observe_prefill(64, 0, 43.0)
    assert cost.prefill_ms(64, 0) == pytest.approx(43.0, rel=0.15)


def test_one_interrupted_batch_is_not_believed_for_long() -> None:
    cost = seen({64: 80.0})
    cost.observe_prefill(64, 0, 8_000.0)
    assert cost.prefill_ms(64, 0) < 2 * 80.0
    for _ in range(8):
        cost.observe_prefill(64, 0, 80.0)
    assert cost.prefill_ms(64, 0) < 1.1 * 80.0


def test_a_machine_that_became_slower_for_good_is_believed_within_a_few_batches() -> None:
    cost = seen({64: 80.0})
    for _ in range(8):
        cost.observe_prefill(64, 0, 320.0)
    assert cost.prefill_ms(64, 0) > 0.8 * 320.0


@pytest.mark.parametrize(("known", "asked"), [(1, 64), (64, 1)])
def test_what_other_numbers_of_rows_promise_says_nothing_of_the_machine(known: int, asked: int) -> None:
    cost, machine = CostModel(), Machine(row_ms=1.6)
    see(cost, machine, rows=known, cells=100)
    before = cost.decode_ms(known, 100)
    see(cost, machine, rows=asked, cells=100)
    assert cost.decode_ms(known, 100) == pytest.approx(before)


def test_each_number_of_threads_has_its_own_costs() -> None:
    cost = CostModel()
    cost.use(2)
    for _ in range(5):
        cost.observe_prefill(64, 0, 80.0)
        cost.observe_decode(1, 0, 10.0)
    cost.use(1)
    assert cost.prefill_ms(64, 0) == pytest.approx(160.0)
    assert cost.decode_ms(1, 0) == pytest.approx(20.0)
    for _ in range(20):
        cost.observe_prefill(64, 0, 140.0)
    cost.use(2)
    assert cost.prefill_ms(64, 0) == pytest.approx(80.0)
    cost.use(1)
    assert cost.prefill_ms(64, 0) == pytest.approx(140.0, rel=0.05)


def test_one_slow_batch_bounds_what_rows_are_believed_to_add_to_a_piece() -> None:
    cost = CostModel()
    cost.observe_decode(1, 100, 1.0)
    cost.observe_prefill(512, 0, 1_000.0)
    cost.observe_mixed(1, 100, 511, 0, 60_000.0)
    assert cost.mixed_ms(1, 100, 511, 0) == pytest.approx(1_000.0 + DRIFT_LIMIT * 1.0, rel=0.01)


def test_a_mixture_whose_batches_touch_more_experts_the_more_rows_they_have_is_learnt_as_it_is() -> None:
    experts, used, layer_ms, expert_ms = 128, 8, 4.0, 0.25

    def takes(rows: int) -> float:
        return layer_ms + expert_ms * experts * (1 - (1 - used / experts) ** rows)

    assert takes(8) > 2 * takes(1), "most of what a few rows take is their own experts'"
    assert takes(256) < 1.2 * takes(32), "until all are touched"
    cost = CostModel()
    for rows in (1, 2, 3, 4, 5, 7, 10, 14, 20, 28, 40, 60, 90, 120, 180, 250):
        for _ in range(5):
            cost.observe_decode(rows, 0, takes(rows))
    for rows in (1, 2, 3, 4, 5, 7, 10, 14, 20, 28, 40, 60, 90, 120, 180, 250):
        assert cost.decode_ms(rows, 0) == pytest.approx(takes(rows), rel=0.05)
