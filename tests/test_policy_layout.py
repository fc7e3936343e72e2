"""Which layout of KV memory serves a crowd: claims about the choice alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policy_world import make_row

from uma.engine.delivery.pacing import reader_ms
from uma.engine.policy import CostModel, Scheduler, State, Targets
from uma.engine.policy.layout import LEAST_SEQUENCES, Crowd, Layout, LayoutPolicy, split_layouts
from uma.engine.policy.lead import MAX_STEPS, max_lead_ms
from uma.engine.policy.pace import HOPELESS, choose_pacing
from uma.engine.worker.relayout import MAX_PREPARATIONS

N_CTX = 32_768
POOL = Layout(256, N_CTX, is_unified=True)
SPLITS = split_layouts(N_CTX, 64)
CELL_MS, PAUSE_MS = 0.001, 300.0
CHANGE_MS = 2 * PAUSE_MS
"""There and back."""
CROWDS = st.builds(
    lambda sequences, longest, more: Crowd(sequences, longest, longest + more),
    st.integers(0, 64),
    st.integers(1, 3_000),
    st.integers(0, 256),
)


def policy() -> LayoutPolicy:
    return LayoutPolicy(POOL, SPLITS, CELL_MS, PAUSE_MS)


def test_the_cells_there_are_are_divided_among_all_sequences_half_and_a_quarter_of_them() -> None:
    assert (Layout(65, 512), Layout(33, 1_024), Layout(17, 2_048)) == SPLITS
    assert split_layouts(2_048, 64) == (), "no share is worth having"


@given(n_ctx=st.integers(512, 200_000), max_sequences=st.integers(1, 255))
def test_shares_are_multiples_of_256_and_take_hardly_more_memory(n_ctx: int, max_sequences: int) -> None:
    for layout in split_layouts(n_ctx, max_sequences):
        assert layout.share % 256 == 0 < layout.share
        assert layout.ids * layout.share <= n_ctx * 17 / 16
        assert layout.ids > LEAST_SEQUENCES


@settings(max_examples=50)
@given(turns=st.lists(st.tuples(CROWDS, st.integers(0, 10**6)), max_size=20))
def test_no_sequence_is_ever_given_a_share_too_short_and_changes_pay_for_themselves(
    turns: list[tuple[Crowd, int]],
) -> None:
    layouts, masked, saved = policy(), 0, 0.0
    for crowd, more in turns:
        masked += more
        before = layouts.current
        if before.is_unified:
            saved += more * CELL_MS
        chosen = layouts.choose(crowd, masked)
        assert chosen.is_unified or (crowd.sequences < chosen.ids and crowd.longest <= chosen.share)
        if chosen != before:
            if before.is_unified:
                assert saved >= CHANGE_MS, "it was changed before staying had cost as much"
                saved = 0.0
            layouts.changed(chosen, PAUSE_MS)


@settings(max_examples=50)
@given(spared=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=200))
def test_changes_that_do_not_pay_grow_rare_and_no_client_brings_about_more_of_them(spared: list[float]) -> None:
    """A client that alternates: a crowd in the pool that loses what one change is worth, then a long prompt."""
    layouts, masked, lost_ms, in_vain = policy(), 0, 0.0, 0
    for share in spared:
        masked += int(CHANGE_MS / CELL_MS)
        lost_ms += CHANGE_MS
        chosen = layouts.choose(Crowd(32, 100, 228), masked)
        if chosen.is_unified:
            continue
        layouts.changed(chosen, PAUSE_MS)
        masked += int(share * CHANGE_MS / CELL_MS)
        layouts.choose(Crowd(32, 100, 228), masked)
        assert layouts.choose(Crowd(32, 1_500, 1_756), masked) == POOL
        layouts.changed(POOL, PAUSE_MS)
        in_vain += share < 0.999
    if max(spared) < 0.999:
        assert in_vain <= 1 + math.log2(len(spared) + 1), "each has to be worth twice the one before"
    assert in_vain * CHANGE_MS <= lost_ms


def test_what_a_change_takes_and_a_masked_cell_costs_is_what_was_seen() -> None:
    layouts = policy()
    for _ in range(10):
        layouts.changed(SPLITS[0], 30.0)
        layouts.changed(POOL, 30.0)
    assert layouts.pause_ms == pytest.approx(30.0, rel=0.01)
    cost = CostModel()
    cost.use(2)
    assert cost.cell_ms() is None
    for cells in [*range(500, 8_000, 100)] * 3:
        cost.observe_decode(32, cells, 20.0 + 32 * cells * CELL_MS)
    assert cost.cell_ms() == pytest.approx(CELL_MS, rel=0.3)
    known = cost.cell_ms()
    cost.use(2, is_split=True)
    cost.observe_decode(32, 1_000, 20.0)
    assert cost.cell_ms() == pytest.approx(known), "in split memory no row goes over the cells of others"


def test_a_sequence_about_to_outgrow_its_share_is_seen_before_it_does() -> None:
    layouts = policy()
    layouts.changed(SPLITS[0], PAUSE_MS)
    going_on = Crowd.of([500, 30], [256, 256], shared=0, most=64)
    assert layouts.choose(going_on, 0) != SPLITS[0]
    ends_before = Crowd.of([500, 30], [10, 256], shared=0, most=64)
    assert layouts.choose(ends_before, 0) == SPLITS[0]


@given(
    count=st.integers(1, 16),
    step_ms=st.floats(1.0, 60.0),
    pause_ms=st.floats(10.0, 500.0),
    lead=st.floats(0.0, 500.0),
    load=st.sampled_from([0.0, 1.0]),
)
@example(count=1, step_ms=20.0, pause_ms=380.0, lead=0.0, load=1.0)
def test_rows_run_ahead_of_a_pause_until_no_reader_feels_it(
    count: int, step_ms: float, pause_ms: float, lead: float, load: float
) -> None:
    scheduler, now = Scheduler(Targets(80.0, 2_048, 64)), 1_000.0
    scheduler.cost.observe_decode(count, 100, step_ms)
    rows = [make_row(key, last_token_ms=now + lead) for key in range(1, count + 1)]
    reading = make_row(99, prompt_tokens=900, remaining=900)
    step_ms = scheduler.cost.decode_ms(count, 100)
    pace = choose_pacing(rows, step_ms, budget_ms=80.0, neighbour_load=load).pace_ms
    plans = 0
    while scheduler.is_felt(pause_ms, rows, 100, now, load):
        plan = scheduler.plan(State(rows, [reading], 10**6, 100, load), now, pause_ms=pause_ms)
        assert set(plan.decode) == {row.key for row in rows} and not plan.prefill
        for _ in range(plan.steps):
            now += scheduler.cost.decode_ms(count, 100)
            for row in rows:
                row.last_token_ms = reader_ms(row.last_token_ms, now, plan.pace_ms)
        plans += 1
        assert plans <= MAX_PREPARATIONS
        if plan.steps < MAX_STEPS:
            assert not scheduler.is_felt(pause_ms, rows, 100, now, load), "the plan was made for this pause"
    if step_ms * HOPELESS < 80.0:
        supplied_ms = min(row.last_token_ms for row in rows) + pace - now
        assert supplied_ms >= min(pause_ms, max_lead_ms(pace))


def test_a_crowd_of_short_sequences_is_split_once_that_would_have_paid() -> None:
    layouts, crowd = policy(), Crowd(32, 100, 228)
    assert layouts.choose(crowd, 599_000) == POOL
    assert layouts.choose(crowd, 601_000) == SPLITS[0]


def test_what_a_crowd_will_probably_lose_counts_as_lost() -> None:
    assert policy().choose(Crowd(32, 16, 144, masked_soon=601_000), 0) == SPLITS[0]
    assert policy().choose(Crowd(32, 16, 144, masked_soon=500_000), 0) == POOL


def test_a_prefix_that_all_share_is_no_loss() -> None:
    tokens, more = [1_000] * 9, [20] * 9
    assert policy().choose(Crowd.of(tokens, more, shared=0, most=64), 0) == SPLITS[1]
    assert policy().choose(Crowd.of(tokens, more, shared=990, most=64), 0) == POOL


def test_few_sequences_and_a_long_one_among_many_stay_in_the_pool() -> None:
    layouts = policy()
    assert layouts.choose(Crowd(LEAST_SEQUENCES - 1, 100, 200), 10**9) == POOL
    assert layouts.choose(Crowd(32, 4_000, 4_256), 2 * 10**9) == POOL
    assert layouts.choose(Crowd(32, 100, 200), 2 * 10**9) == POOL, "what could not be spared is held against the pool"


def test_a_split_memory_is_left_for_one_with_longer_shares_and_else_for_the_pool() -> None:
    layouts = policy()
    layouts.changed(SPLITS[0], PAUSE_MS)
    assert layouts.choose(Crowd(30, 512, 600), 0) == SPLITS[0], "it still fits"
    assert layouts.choose(Crowd(30, 513, 700), 0) == SPLITS[1]
    assert layouts.choose(Crowd(40, 513, 700), 0) == POOL


def test_where_no_other_can_be_had_the_pool_is_all_there_is() -> None:
    layouts = policy()
    assert layouts.give_up() == POOL
    assert not layouts.can_change
