"""A decode step and a piece of the prompts in one batch: taken where it was seen to be faster, and no reader waits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_world import Asked, Machine, World, make_row
from test_policy_plan import NOW

from uma.engine.policy import Scheduler, State, Targets
from uma.engine.policy.cost import FORGET_AFTER, SIZES
from uma.engine.policy.scheduler import mixed_position

BUDGET = 80.0


def storm(machine: Machine) -> tuple[World, Asked, float]:
    """A stream while prompts are read, on a machine that was seen before; also how long the prompts took."""
    world = World(machine, tick_budget_ms=BUDGET)
    first = world.ask(20, 60)
    world.ask(900, 2)
    world.run([first])
    world.run()
    world.ticks.clear()
    stream = world.ask(16, 5_000, lane=1)
    world.tick()
    began = world.now_ms
    world.run([world.ask(1_500, 1) for _ in range(4)])
    return world, stream, world.now_ms - began


def mixed_share(world: World) -> float:
    reading = [tick for tick in world.ticks if tick.prefill_tokens]
    return sum(tick.plan.is_mixed for tick in reading) / len(reading)


@settings(max_examples=25)
@given(st.floats(0.0, 3.0), st.sampled_from((0.1, 1.0, 3.0)))
def test_no_reader_waits_whatever_a_mixed_batch_takes(mixing: float, slowdown: float) -> None:
    _, stream, _ = storm(Machine(mixing=mixing, slowdown=slowdown))
    assert max(stream.gaps_ms[1:]) <= BUDGET


def test_what_is_faster_in_one_batch_is_computed_in_one_and_prompts_are_read_sooner() -> None:
    world, _, took_ms = storm(Machine(row_ms=30.0, mixing=0.1))
    assert mixed_share(world) > 0.8, "each size is read alone once"
    apart, _, apart_ms = storm(Machine(row_ms=30.0, mixing=1.5))
    assert mixed_share(apart) < 0.1
    assert took_ms < 0.95 * apart_ms


def test_rows_and_piece_fill_what_the_piece_alone_would_fill() -> None:
    world, _, _ = storm(Machine(row_ms=30.0, mixing=0.1))
    sizes = {tick.rows + tick.prefill_tokens for tick in world.ticks if tick.plan.is_mixed}
    assert sizes & {64, 128, 192, 256}, "another tile was begun for the rows"


@pytest.mark.parametrize("mixes_prompts", [True, False])
def test_with_a_buffer_for_each_sequence_nothing_is_mixed(mixes_prompts: bool) -> None:
    scheduler = Scheduler(Targets(BUDGET, 2_048, 64, mixes_prompts=mixes_prompts))
    scheduler.cost.observe_decode(1, 100, 10.0)
    for size in SIZES:
        scheduler.cost.observe_prefill(size, 0, size / 2)
    decoding, reading = make_row(1, last_token_ms=2_000.0), make_row(2, prompt_tokens=900, prefill_left=900)
    plan = scheduler.plan(State([decoding], [reading], 10**6, 100), 1_000.0)
    assert plan.is_mixed is mixes_prompts
    alone = scheduler.plan(State([], [reading], 10**6, 100), 1_000.0)
    assert not alone.is_mixed and alone.prefill, "there is no decode step to share a batch with"


@pytest.mark.parametrize("rows", [1, 3])
def test_of_questions_that_are_read_together_the_last_is_read_whole_beside_rows(rows: int) -> None:
    scheduler = Scheduler(Targets(1e6, 2_048, 64))
    scheduler.cost.observe_decode(rows, 100, 5.0)
    for size in SIZES[:9]:
        scheduler.cost.observe_prefill(size, 0, size / 2)
    streams = [make_row(key, last_token_ms=NOW, target_tbt_ms=1_000.0) for key in range(rows)]
    questions = [make_row(key, lane=1, prompt_tokens=64, prefill_left=64) for key in (11, 12, 13)]
    job = make_row(20, lane=-1, prompt_tokens=900, prefill_left=900)
    plan = scheduler.plan(State(streams, [job, *questions], 10**6, 100), NOW)
    assert plan.is_mixed
    assert plan.prefill == ((11, 64), (12, 64), (13, 64))


def test_a_row_deep_in_a_document_is_in_no_batch_in_which_a_whole_tile_would_attend_to_the_document() -> None:
    scheduler = Scheduler(Targets(1e6, 2_048, 64))
    for position in (0, 1_000, 2_000, 3_000, 4_000) * 10:
        for size in SIZES[3:9]:
            scheduler.cost.observe_prefill(size, position, size * (1.0 + position / 2_000))
        scheduler.cost.observe_decode(1, position, 20.0)
    scheduler.cost.observe_mixed(1, 0, 63, 0, 74.0)

    def is_mixed(position: int) -> bool:
        stream = make_row(1, prompt_tokens=position, last_token_ms=NOW, target_tbt_ms=1_000.0)
        prompt = make_row(2, prompt_tokens=640, prefill_left=640)
        return scheduler.plan(State([stream], [prompt], 10**6, position), NOW).is_mixed

    assert is_mixed(100), "a batch that is shared takes less"
    assert not is_mixed(4_000)
    for _ in range(FORGET_AFTER):  # what was learnt of mixed batches is forgotten, and would be tried again
        scheduler.cost.considered_mixed()
    assert is_mixed(100)
    assert not is_mixed(4_000), "for a trial too it is known to be slower"


@given(st.floats(0.0, 4_000), st.integers(1, 512), st.lists(st.integers(0, 8_000), min_size=1, max_size=64))
def test_a_batch_is_predicted_to_take_the_longer_the_deeper_the_rows_in_it_stand(
    position: float, tokens: int, rows: list[int]
) -> None:
    shared = mixed_position(position, tokens, rows)
    assert shared >= position
    deeper = [max(rows) + 1, *rows[1:]]
    assert sum(deeper) <= sum(rows) or mixed_position(position, tokens, deeper) > shared
