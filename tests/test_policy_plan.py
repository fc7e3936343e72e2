"""One tick's plan, for any state of the world: which rows must be in it, its bounds, which rows give way first."""

from __future__ import annotations

import math
from random import Random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_world import can_be_covered, make_row

from benchmarks.simulation.rows import PlainRow
from uma.engine.policy import Plan, Scheduler, State, Targets
from uma.engine.policy.cost import ROWS, SIZES, TILE_TOKENS, CostModel
from uma.engine.policy.lead import is_kept
from uma.engine.policy.order import gives_way
from uma.engine.policy.tuning import TUNING

SMALLEST_CHUNK = SIZES[0]

NOW = 10_000.0
DUE_MS = st.integers(0, 40_000).map(lambda halves: halves / 2)
"""Deadlines on a grid: one of 1e-100 ms would be no other than 0 beside the delay of its lane."""


@st.composite
def rows(draw: st.DrawFn) -> list[PlainRow]:
    """Some rows of all lanes, prefilling and decoding, a few of them paused, each with cells of its own."""
    found = []
    for key in range(1, draw(st.integers(1, 8)) + 1):
        remaining = draw(st.one_of(st.just(0), st.integers(1, 3_000)))
        prompt_tokens = max(remaining, 1) + draw(st.sampled_from((0, 0, 100)))
        found.append(
            make_row(
                key,
                lane=draw(st.sampled_from((-1, 0, 1))),
                arrived_ms=float(key),
                prompt_tokens=prompt_tokens,
                prefill_left=remaining,
                target_tbt_ms=draw(st.sampled_from((20.0, 80.0, 1e6))),
                has_own_target=draw(st.booleans()),
                has_reader=draw(st.sampled_from((True, True, True, False))),
                due_ms=draw(DUE_MS),
                last_token_ms=draw(st.floats(NOW - 5_000, NOW)),
                cells=draw(st.integers(1, 500)) if not remaining else draw(st.integers(0, 500)),
                is_paused=draw(st.sampled_from((False, False, False, True))),
                branch=draw(st.one_of(st.just(0), st.integers(0, prompt_tokens))),
                generated=0 if remaining else draw(st.sampled_from((1, 1, 2, 100))),
            )
        )
    return found


@st.composite
def schedulers(draw: st.DrawFn, mixes_prompts: bool | None = None) -> Scheduler:
    """A scheduler with any settings but those given that has seen anything from nothing to a slow machine."""
    if mixes_prompts is None:
        mixes_prompts = draw(st.booleans())
    budget_ms, batch_tokens = draw(st.sampled_from((10.0, 80.0, 1e6))), draw(st.sampled_from((16, 64, 2048)))
    scheduler = Scheduler(Targets(budget_ms, batch_tokens, 64, mixes_prompts=mixes_prompts))
    took = st.floats(0.01, 5_000)
    for rows, ms in draw(st.lists(st.tuples(st.integers(1, 16), took), max_size=3)):
        scheduler.cost.observe_decode(rows, 100, ms)
    chunks = st.tuples(st.integers(1, 2_048), st.integers(0, 4_000), took)
    for tokens, position, ms in draw(st.lists(chunks, max_size=5)):
        scheduler.cost.observe_prefill(tokens, position, ms)
    for rows, tokens, ms in draw(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 600), took), max_size=2)):
        scheduler.cost.observe_mixed(rows, 100, tokens, 0, ms)
    return scheduler


def state_of(every: list[PlainRow], free_cells: int) -> State:
    decoding = [row for row in every if not row.prefill_left]
    return State(decoding, [row for row in every if row.prefill_left], free_cells, 1_000)


def by_key(every: list[PlainRow]) -> dict[int, PlainRow]:
    return {row.key: row for row in every}


@given(schedulers(), rows(), st.integers(12, 5_000))
def test_every_interactive_and_normal_stream_is_in_every_plan(
    scheduler: Scheduler, every: list[PlainRow], free: int
) -> None:
    plan = scheduler.plan(state_of(every, free), NOW)
    must = {row.key for row in every if row.lane >= 0 and not row.prefill_left and not row.is_paused}
    assert must <= set(plan.decode)


@given(schedulers(), rows(), st.integers(0, 5_000))
def test_a_plan_keeps_within_the_batch_the_cells_and_what_there_is_to_do(
    scheduler: Scheduler, every: list[PlainRow], free: int
) -> None:
    plan = scheduler.plan(state_of(every, free), NOW)
    known = by_key(every)
    rows, tokens = len(plan.decode), sum(count for _, count in plan.prefill)
    assert (rows + tokens if plan.is_mixed else max(rows, tokens)) <= scheduler.targets.batch_tokens
    assert rows * (plan.steps + plan.is_mixed) + tokens <= free + sum(known[key].cells for key in plan.preempt)
    is_covered = plan.is_mixed or (plan.lead_ms > 0 and plan.pace_ms > TUNING.longest_pace_ms)
    waits = all(known[key].generated == 1 for key in plan.decode)  # for the prompts that came with them
    assert plan.steps >= 1 or ((is_covered or waits) and plan.decode and plan.prefill), "rows are left out"
    in_plan = [*plan.decode, *(key for key, _ in plan.prefill), *plan.preempt]
    assert len(in_plan) == len(set(in_plan)), "a row is in the plan twice"
    assert all(not known[key].prefill_left and not known[key].is_paused for key in plan.decode)
    assert all(0 < count <= known[key].prefill_left for key, count in plan.prefill)
    assert not any(known[key].is_paused for key, _ in plan.prefill)


@given(schedulers(), rows(), st.one_of(st.just(0), st.integers(0, 600)))
def test_a_row_that_can_run_keeps_the_engine_running(scheduler: Scheduler, every: list[PlainRow], free: int) -> None:
    # Nothing suspends prefill for longer than a few ticks, and memory that a row holds can always be taken back.
    can_run = [row for row in every if not row.is_paused]
    can_get_room = free > 0 or sum(row.cells for row in every) > max(row.cells for row in every)
    plans = [scheduler.plan(state_of(every, free), NOW) for _ in range(5)]
    if can_run and can_get_room:
        assert any(plan.decode or plan.prefill or plan.preempt for plan in plans)


@given(schedulers(mixes_prompts=True), rows(), st.integers(0, 5_000))
def test_prefill_goes_by_lane_then_by_deadline(scheduler: Scheduler, every: list[PlainRow], free: int) -> None:
    known = by_key(every)
    plan = scheduler.plan(state_of(every, free), NOW)
    order = [(-known[key].lane, known[key].due_ms) for key, _ in plan.prefill]
    assert order == sorted(order)
    if not plan.prefill:
        return
    left_out = [
        row for row in every
        if row.prefill_left and not row.is_paused and row.key not in plan.preempt and row.key not in dict(plan.prefill)
    ]  # fmt: skip
    assert all((-row.lane, row.due_ms) >= order[-1] for row in left_out), "a row was overtaken"
    served_in_part = [key for key, count in plan.prefill if count < known[key].prefill_left and not is_cut(known[key])]
    assert served_in_part in ([], [plan.prefill[-1][0]])


def is_cut(row: PlainRow) -> bool:
    """Whether a piece of the row ends at its branch."""
    return row.branch - row.position >= TILE_TOKENS


@given(schedulers(mixes_prompts=True), rows(), st.integers(0, 5_000))
def test_no_piece_goes_beyond_what_others_wait_for_but_where_less_than_a_tile_is_missing(
    scheduler: Scheduler, every: list[PlainRow], free: int
) -> None:
    known = by_key(every)
    for key, count in scheduler.plan(state_of(every, free), NOW).prefill:
        row = known[key]
        assert not is_cut(row) or row.position + count <= row.branch


def test_what_others_wait_for_is_read_in_whole_tiles_and_then_the_rests_of_all_in_one_batch() -> None:
    scheduler = Scheduler(Targets(80.0, 2048, 64, solo_tokens=512))
    scheduler.cost.observe_prefill(512, 0, 60.0)
    leader, read = make_row(1, prefill_left=1_040, prompt_tokens=1_040, branch=1_024), list[tuple[int, int]]()
    while leader.position < leader.branch:
        read += scheduler.plan(State([], [leader], 5_000, 100), NOW).prefill
        leader.prefill_left -= read[-1][1]
    leader.branch = 0
    crowd = [leader, *(make_row(key, prefill_left=16, prompt_tokens=1_040) for key in range(2, 9))]
    assert read == [(1, 512), (1, 512)]
    assert scheduler.plan(State([], crowd, 5_000, 100), NOW).prefill == tuple((row.key, 16) for row in crowd)


@given(schedulers(mixes_prompts=False), rows(), st.integers(0, 5_000))
def test_where_prompts_do_not_mix_a_piece_of_one_goes_alone_and_whole_ones_only_go_with_their_like(
    scheduler: Scheduler, every: list[PlainRow], free: int
) -> None:
    known = by_key(every)
    plan = scheduler.plan(state_of(every, free), NOW)
    pieces = [key for key, count in plan.prefill if count < known[key].prefill_left]
    assert not pieces or len(plan.prefill) == 1, "a piece beside another prompt"
    if not plan.prefill:
        return
    head, *others = (known[key] for key, _ in plan.prefill)
    for row in others:
        assert row.prefill_left == head.prefill_left or row.position == head.position == 0
    waiting = [row for row in every if row.prefill_left and not row.is_paused and row.key not in plan.preempt]
    first = min(waiting, key=lambda row: (-row.lane, row.due_ms, row.key))
    assert head is first, "the first in order was passed over"


def test_where_prompts_do_not_mix_none_is_cut_where_others_wait_for_it() -> None:
    every = [make_row(key, prefill_left=200, prompt_tokens=200, branch=branch) for key, branch in ((1, 100), (2, 0))]
    scheduler = Scheduler(Targets(80.0, 2048, 64, mixes_prompts=False))
    scheduler.cost.observe_prefill(512, 0, 60.0)
    assert scheduler.plan(State([], every, 5_000, 0), NOW).prefill == ((1, 200), (2, 200))


def test_where_prompts_do_not_mix_a_second_one_waits_for_the_next_tick_instead_of_filling_the_first_ones_up() -> None:
    every = [make_row(key, prefill_left=size, prompt_tokens=400) for key, size in ((1, 256), (2, 320))]
    apart = Scheduler(Targets(80.0, 2048, 64, solo_tokens=512, mixes_prompts=False))
    mixed = Scheduler(Targets(80.0, 2048, 64, solo_tokens=512))
    stream = make_row(3, last_token_ms=NOW, target_tbt_ms=1_000.0)
    for scheduler in (apart, mixed):
        scheduler.cost.observe_prefill(512, 0, 60.0)
    assert apart.plan(state_of([stream, *every], 10_000), NOW).prefill == ((1, 256),)
    assert mixed.plan(state_of([stream, *every], 10_000), NOW).prefill == ((1, 256), (2, 320))


@given(schedulers(), rows())
def test_without_room_the_youngest_of_the_lowest_lane_give_way_and_never_the_oldest_of_the_highest(
    scheduler: Scheduler, every: list[PlainRow]
) -> None:
    plan = scheduler.plan(state_of(every, 0), NOW)
    known = by_key(every)

    def place(row: PlainRow) -> tuple[bool, int, int]:
        return (not row.is_paused, row.lane, -row.key)

    victims = [place(known[key]) for key in plan.preempt]
    assert victims == sorted(victims)
    assert max(every, key=place).key not in plan.preempt
    if victims:
        spared = [row for row in every if row.key not in plan.preempt and row.cells > 0]
        assert all(place(row) > victims[-1] for row in spared), "an older one gave way before a younger one"


def test_streams_that_wait_for_their_readers_give_way_before_a_prompt_that_is_being_read() -> None:
    slow = make_row(1, lane=1, cells=300, is_paused=True)
    prompt = make_row(2, prefill_left=200, prompt_tokens=400, cells=200)
    scheduler = Scheduler(Targets(80.0, 2048, 64))
    scheduler.cost.observe_prefill(512, 0, 60.0)
    plan = scheduler.plan(state_of([slow, prompt], 0), NOW)
    assert plan.preempt == (1,)
    assert plan.prefill == ((2, 200),)


@given(schedulers(), rows(), st.integers(12, 5_000))
def test_no_row_gives_way_while_there_are_free_cells(scheduler: Scheduler, every: list[PlainRow], free: int) -> None:
    assert scheduler.plan(state_of(every, free), NOW).preempt == ()


def test_no_more_gives_way_than_is_needed() -> None:
    every = [make_row(key, cells=10) for key in range(1, 9)]
    plan = Scheduler(Targets(80.0, 2048, 64)).plan(state_of(every, 0), NOW)
    assert plan.preempt == (8,)
    assert len(plan.decode) == 7


def test_with_no_row_decoding_prefill_takes_the_whole_batch() -> None:
    scheduler = Scheduler(Targets(80.0, 512, 64))
    for size in SIZES[:8]:
        scheduler.cost.observe_prefill(size, 512, 100.0 + size / 4)
    plan = scheduler.plan(state_of([make_row(1, prefill_left=4_096, prompt_tokens=4_096)], 10_000), NOW)
    assert plan.prefill == ((1, 512),)


@given(schedulers(), st.integers(1, 4_096), st.integers(0, 4_000), st.sampled_from((-1, 0, 1)))
def test_a_prompt_that_is_read_alone_is_read_in_pieces_of_a_quarter_of_the_target_at_most(
    scheduler: Scheduler, left: int, position: int, lane: int
) -> None:
    targets, cost = scheduler.targets, scheduler.cost
    row = make_row(1, lane=lane, prefill_left=left, prompt_tokens=position + left)
    ((_, tokens),) = scheduler.plan(state_of([row], 10_000), NOW).prefill
    if not cost.knows_prefill:
        assert tokens < targets.start_tokens + TILE_TOKENS
    elif tokens > SMALLEST_CHUNK:
        most_ms = targets.slo_ttft_ms / 4
        # (Cut so that whole tiles are left, a piece has fewer tokens than one that was predicted to take so long.)
        larger = [size for size in (tokens, *SIZES, left) if size >= tokens]
        took_ms = min(cost.prefill_ms(size, position) for size in larger)
        is_tile = tokens <= TILE_TOKENS or tokens == left < 2 * TILE_TOKENS
        # (A tile is believed to be too slow once it was seen three times.)
        assert took_ms <= (2 * most_ms if is_tile else most_ms) or not cost.is_sure_of(TILE_TOKENS)


def test_a_machine_on_which_most_of_a_batch_s_time_is_fixed_reads_a_lone_prompt_in_large_pieces_soon() -> None:
    scheduler, left, pieces = Scheduler(Targets(80.0, 2_048, 64)), 4_096, list[int]()
    while left:
        row = make_row(1, prefill_left=left, prompt_tokens=4_096)
        ((_, tokens),) = scheduler.plan(state_of([row], 10_000), NOW).prefill
        took_ms = 300.0 + tokens / 2 + 1_000.0 * (not pieces)  # the first touches memory
        scheduler.cost.observe_prefill(tokens, 4_096 - left, took_ms)
        pieces.append(tokens)
        left -= tokens
    assert max(pieces) >= 256
    assert len(pieces) <= 32


@pytest.mark.parametrize("ms_a_token", [4.0, 11.0, 14.0, 16.0, 18.0, 25.0])
def test_a_lone_prompt_is_read_in_tiles_or_in_parts_of_them_and_so_each_time(ms_a_token: float) -> None:
    """Attention of fewer rows than a tile adds up otherwise, so the way must not change with the machine's speed."""
    scheduler, random, ways = Scheduler(Targets(80.0, 2_048, 64)), Random(1), list[set[bool]]()
    for _ in range(12):
        left, ways = 300, [*ways, set()]
        while left:
            row = make_row(1, prefill_left=left, prompt_tokens=300, cells=300 - left)
            ((_, tokens),) = scheduler.plan(state_of([row], 10_000), NOW).prefill
            scheduler.cost.observe_prefill(tokens, 300 - left, 5.0 + tokens * ms_a_token * random.uniform(0.85, 1.15))
            ways[-1].add(tokens >= TILE_TOKENS)
            left -= tokens
    # (Until enough was seen of a tile, one is tried.)
    assert len(set.union(*ways[4:])) == 1, ways


def test_with_no_row_decoding_no_first_token_waits_for_a_piece_of_another_prompt() -> None:
    scheduler = Scheduler(Targets(80.0, 2_048, 64))
    scheduler.cost.observe_prefill(512, 0, 60.0)

    def read(*rows: tuple[int, int]) -> list[tuple[int, int]]:
        every = [
            make_row(key, lane=lane, prefill_left=size, prompt_tokens=size, arrived_ms=NOW, due_ms=NOW + key)
            for key, (lane, size) in enumerate(rows, start=1)
        ]
        return list(scheduler.plan(state_of(every, 10_000), NOW).prefill)

    assert read((0, 100), (0, 200), (0, 4_096)) == [(1, 100), (2, 200)]
    assert read((0, 4_096), (0, 100)) == [(1, 512)]
    assert read((1, 100), (0, 100), (-1, 100)) == [(1, 100)], "nor for one that can wait"


def test_background_streams_slow_down_no_prompts_but_their_own() -> None:
    scheduler = Scheduler(Targets(80.0, 2_048, 64))
    for size in SIZES[:8]:
        scheduler.cost.observe_prefill(size, 0, 100.0 + size * 0.25)
    beside = make_row(1, lane=-1, last_token_ms=NOW)

    def read(lane: int, left: int) -> list[int]:
        row = make_row(2, lane=lane, arrived_ms=NOW, prefill_left=left, prompt_tokens=left)
        own = make_row(3, lane=-1, prefill_left=1_000, prompt_tokens=1_000, due_ms=NOW)
        plan = scheduler.plan(state_of([beside, row, own], 10_000), NOW)
        assert plan.decode == (1,)
        return [] if plan.pace_ms else [count for _, count in plan.prefill]

    assert read(0, 4_096) == [512]
    assert read(1, 200) == [200]
    assert read(-1, 4_096) == [], "its tokens come at a pace"


def test_the_piece_that_ends_a_prompt_comes_before_the_next_tokens_of_lower_lanes() -> None:
    scheduler = Scheduler(Targets(80.0, 2_048, 64))
    for size in SIZES[:8]:
        scheduler.cost.observe_prefill(size, 0, size * 1.0)
    scheduler.cost.observe_decode(1, 1_000, 20.0)

    def steps(lane: int, left: int, *others: PlainRow, since_ms: float = 1.0) -> int:
        row = make_row(9, lane=lane, arrived_ms=NOW, prefill_left=left, prompt_tokens=left)
        background = make_row(1, lane=-1, last_token_ms=NOW - since_ms)
        plan = scheduler.plan(state_of([background, *others, row], 10_000), NOW)
        assert set(plan.decode) == {1, *(each.key for each in others)} and plan.prefill
        return plan.steps + plan.is_mixed  # before the piece, and with it

    assert steps(0, 200) == steps(1, 200) == 0
    assert steps(0, 4_096) == 1, "its first token comes with a later piece"
    assert steps(0, 200, since_ms=250.0) == 0
    assert steps(0, 200, since_ms=TUNING.held_ms) >= 1, "prompts that follow each other keep no stream waiting"
    assert steps(-1, 200) >= 1
    assert steps(1, 200, make_row(2, lane=0, has_reader=True, last_token_ms=NOW)) >= 1, "its reader waits for tokens"


def test_background_rows_decode_several_steps_on_one_plan_only_while_they_are_among_themselves() -> None:
    scheduler = Scheduler(Targets(80.0, 2_048, 64))
    background = [make_row(key, lane=-1, last_token_ms=NOW) for key in (1, 2)]
    assert scheduler.plan(state_of(background, 10_000), NOW).is_decode_only
    assert not scheduler.plan(state_of([*background, make_row(3, last_token_ms=NOW)], 10_000), NOW).is_decode_only


def test_a_machine_that_is_not_known_yet_begins_with_a_small_chunk() -> None:
    every = [make_row(1, last_token_ms=NOW), make_row(2, prefill_left=4_096, prompt_tokens=4_096)]
    plan = Scheduler(Targets(80.0, 2048, 64)).plan(state_of(every, 10_000), NOW)
    assert (plan.decode, plan.prefill, plan.steps) == ((1,), ((2, 64),), 1)


def reading_beside_a_stream(position: int = 0) -> State:
    stream = make_row(1, last_token_ms=NOW, target_tbt_ms=80.0)
    return state_of([stream, make_row(2, prefill_left=4_096, prompt_tokens=position + 4_096)], 100_000)


def test_a_chunk_larger_than_any_seen_is_tried_as_soon_as_it_promises_to_fit() -> None:
    scheduler = Scheduler(Targets(80.0, 2048, 64))
    state = reading_beside_a_stream()
    assert scheduler.plan(state, NOW).prefill == ((2, 64),)
    scheduler.cost.observe_prefill(64, 0, 40.0)
    # 384 tokens promise 240 ms, 512 promise 320, which no new request should have to wait.
    (larger,) = (count for _, count in scheduler.plan(state, NOW).prefill)
    assert 64 < larger <= 384
    scheduler.cost.observe_prefill(larger, 0, 40.0 * larger / 64 * 4)
    tried = [scheduler.plan(state, NOW).prefill[0][1] for _ in range(40)]
    assert tried.count(larger) <= 3, "what has turned out to be slow is tried again and again"


@given(schedulers(), rows(), st.integers(12, 5_000))
def test_no_piece_outlasts_what_was_computed_ahead(scheduler: Scheduler, every: list[PlainRow], free: int) -> None:
    plan = scheduler.plan(state_of(every, free), NOW)
    known = by_key(every)
    readers = [known[key] for key in plan.decode if known[key].lane >= 0 and known[key].has_reader]
    if not plan.prefill or not readers or not scheduler.cost.knows_prefill:
        return
    step_ms = scheduler.cost.decode_ms(len(plan.decode), 1_000)
    if not plan.pace_ms:
        assert plan.steps == 0, "these wait for the prompts that came with them, see test_policy_loop"
        return
    kept = [row for row in readers if row.has_own_target and is_kept(row.target_tbt_ms, step_ms)]
    assert all(step_ms <= plan.pace_ms <= row.target_tbt_ms for row in kept)
    if len(plan.prefill) > 1:
        return
    ((key, tokens),) = plan.prefill
    piece_ms = scheduler.cost.prefill_ms(tokens, known[key].position)
    if tokens <= SMALLEST_CHUNK and not can_be_covered(piece_ms, plan.pace_ms, step_ms):
        return  # prompts must be read even where no schedule meets the target
    if tokens <= SMALLEST_CHUNK and 2 * (plan.steps + 1) * len(plan.decode) > free - len(every):
        return  # nor can more steps come before: half of the free cells are for the prompts
    if tokens >= min(free - plan.steps * len(plan.decode), scheduler.targets.batch_tokens):
        return  # cells cut it, and a part of what was chosen can be predicted to take longer than all of it
    rows, cells = len(plan.decode), 1_000
    # The choice was of up to a tile more, of which only whole tiles are left; a part can be predicted to take longer.
    chosen = range(tokens, min(tokens + TILE_TOKENS + plan.steps * rows, known[key].prefill_left + 1))
    piece_ms = min(scheduler.cost.prefill_ms(size, known[key].position) for size in chosen)
    if plan.is_mixed:
        piece_ms = scheduler.cost.mixed_ms(rows, cells, tokens, known[key].position) or 0.0
    supplied_ms = plan.lead_ms + plan.steps * plan.pace_ms
    assert plan.lead_ms >= 0
    assert supplied_ms >= 0.99 * (plan.steps * step_ms + piece_ms)


def beside(step_ms: float, *, neighbour_load: float = 0.0, **stream: object) -> tuple[Plan, float]:
    """The plan for a prompt beside one stream on a slow machine, and what the piece takes."""
    scheduler = Scheduler(Targets(80.0, 2048, 64))
    for _ in range(20):
        scheduler.cost.observe_decode(1, 0, step_ms)
        for tokens in (8, 16, 32, 64, 128):
            scheduler.cost.observe_prefill(tokens, 0, tokens * 4.0)
    row = make_row(1, last_token_ms=NOW, **stream)
    state = state_of([row, make_row(2, prefill_left=4_096, prompt_tokens=4_096)], 100_000)
    plan = scheduler.plan(attrs.evolve(state, neighbour_load=neighbour_load), NOW)
    return plan, sum(scheduler.cost.prefill_ms(count, 0) for _, count in plan.prefill)


@pytest.mark.parametrize("step_ms", [20.0, 40.0, 60.0])
def test_on_a_slow_machine_streams_leave_two_fifths_of_the_time_to_prompts(step_ms: float) -> None:
    plan, piece_ms = beside(step_ms)
    assert piece_ms >= 0.35 * (piece_ms + plan.steps * step_ms)
    # At the pace they ask for, as long as decoding leaves so much of it.
    assert plan.pace_ms == pytest.approx(max(72.0, step_ms / 0.6))


@pytest.mark.parametrize("step_ms", [100.0, 200.0])
def test_a_stream_that_is_late_anyway_leaves_half_of_the_time_to_one_prompt(step_ms: float) -> None:
    plan, piece_ms = beside(step_ms)
    assert piece_ms >= 0.4 * (piece_ms + plan.steps * step_ms)
    assert plan.pace_ms == pytest.approx(2 * step_ms)


@pytest.mark.parametrize("lane", [-1, 0])
def test_late_streams_have_the_same_pace_before_a_pause_as_beside_the_prompts_that_wait(lane: int) -> None:
    scheduler = Scheduler(Targets(80.0, 2048, 64))
    for _ in range(20):
        scheduler.cost.observe_decode(1, 0, 150.0)
        scheduler.cost.observe_prefill(64, 0, 300.0)
    prompts = [make_row(key, lane=lane, prefill_left=500, prompt_tokens=500) for key in range(2, 5)]
    state = state_of([make_row(1, last_token_ms=NOW), *prompts], 100_000)
    paces = [scheduler.plan(state, NOW, pause_ms=pause_ms).pace_ms for pause_ms in (0.0, 300.0)]
    assert paces == [pytest.approx(150.0 / (0.8 if lane < 0 else 0.25))] * 2


@pytest.mark.parametrize(
    ("step_ms", "neighbour_load", "named_ms", "pace_ms"),
    [
        (5.0, 1.0, None, 72.0),
        (20.0, 0.0, None, 72.0),
        (20.0, 1.0, None, 160.0),
        (40.0, 1.0, None, TUNING.neighbour_pace_ms),
        (150.0, 1.0, None, 300.0),
        (20.0, 1.0, 80.0, 72.0),
        (60.0, 0.0, 80.0, 72.0),
        (70.0, 0.0, 80.0, 70.0 / 0.9),
        (75.0, 0.0, 80.0, 75.0 / 0.53125),
    ],
)
def test_a_pace_by_default_is_given_up_beside_a_busy_program_and_one_that_is_named_only_where_it_starves_prompts(
    step_ms: float, neighbour_load: float, named_ms: float | None, pace_ms: float
) -> None:
    named = {} if named_ms is None else {"target_tbt_ms": named_ms, "has_own_target": True}
    plan, _ = beside(step_ms, neighbour_load=neighbour_load, **named)
    assert plan.pace_ms == pytest.approx(pace_ms)
    assert plan.prefill


def test_no_pace_is_given_up_beside_a_busy_program_for_prompts_of_lower_lanes() -> None:
    scheduler = Scheduler(Targets(80.0, 2048, 64))
    for _ in range(20):
        scheduler.cost.observe_decode(1, 0, 20.0)
        scheduler.cost.observe_prefill(64, 0, 300.0)
    prompt = make_row(2, lane=-1, prefill_left=500, prompt_tokens=500)
    state = state_of([make_row(1, last_token_ms=NOW), prompt], 100_000)
    assert scheduler.plan(attrs.evolve(state, neighbour_load=1.0), NOW).pace_ms == pytest.approx(72.0)


def test_on_a_machine_as_measured_no_piece_reads_at_half_the_rate_for_a_few_milliseconds() -> None:
    scheduler = Scheduler(Targets(80.0, 2_048, 64))
    for _ in range(5):
        scheduler.cost.observe_decode(1, 0, 5.0)
        for tokens, ms in ((32, 67.0), (64, 94.0), (128, 160.0), (512, 628.0)):
            scheduler.cost.observe_prefill(tokens, 0, ms)
    plans = [scheduler.plan(reading_beside_a_stream(), NOW) for _ in range(40)]
    assert min(plan.prefill[0][1] + plan.is_mixed for plan in plans) >= 128


@pytest.mark.parametrize(("lane", "longest_ms"), [(1, 250.0), (0, 250.0), (-1, 250.0)])
@pytest.mark.parametrize("is_next_expected", [False, True])
def test_how_long_a_piece_takes_depends_on_what_may_come_meanwhile(
    lane: int, longest_ms: float, is_next_expected: bool
) -> None:
    scheduler = Scheduler(Targets(80.0, 2_048, 64))
    scheduler.cost.observe_decode(1, 0, 5.0)
    for tokens in SIZES[:9] * 5:
        scheduler.cost.observe_prefill(tokens, 0, 16.0 + tokens)  # reads the faster the larger it is
    stream = make_row(1, last_token_ms=NOW, target_tbt_ms=80.0)
    prompt = make_row(2, lane=lane, prefill_left=4_096, prompt_tokens=4_096)
    state = state_of([stream, prompt], 100_000)
    if is_next_expected:
        state, longest_ms = attrs.evolve(state, answered_ms=NOW - 1), 150.0
    ((_, tokens),) = scheduler.plan(state, NOW).prefill
    assert longest_ms / 2 < 16.0 + tokens <= longest_ms


@pytest.mark.parametrize("has_reader", [True, False])
def test_only_rows_that_are_read_as_they_come_slow_down_prompts(has_reader: bool) -> None:
    scheduler = Scheduler(Targets(80.0, 2_048, 64))
    scheduler.cost.observe_decode(1, 0, 5.0)
    for tokens in SIZES[:9] * 5:
        scheduler.cost.observe_prefill(tokens, 0, tokens * 0.9)
    row = make_row(1, last_token_ms=NOW - 10_000, has_reader=has_reader)
    prompt = make_row(2, prefill_left=4_096, prompt_tokens=4_096)
    plan = scheduler.plan(state_of([row, prompt], 100_000), NOW)
    read = sum(tokens for _, tokens in plan.prefill)
    if has_reader:
        assert read == 0, "a late stream suspends prefill"
    else:
        assert read + plan.is_mixed >= TILE_TOKENS
        assert (plan.steps + plan.is_mixed, plan.pace_ms) == (1, 0.0), "more steps than the one that each tick has"


def test_a_prompt_is_read_in_whole_tiles_but_for_its_first_piece() -> None:
    scheduler = Scheduler(Targets(80.0, 2_048, 64))
    for _ in range(5):
        for size in SIZES:
            # As measured: deep in a prompt what fills no tile costs several times what a tile does.
            scheduler.cost.observe_prefill(size, 0, size * 2.5)
            scheduler.cost.observe_prefill(size, 1_000, size * (3.0 if size >= TILE_TOKENS else 15.0))
    position, left, pieces = 0, 1_500, []
    while left:
        row = make_row(2, prefill_left=left, prompt_tokens=1_500, cells=position)
        stream = make_row(1, last_token_ms=NOW, target_tbt_ms=80.0)
        ((_, tokens),) = scheduler.plan(state_of([stream, row], 10_000), NOW).prefill
        pieces.append(tokens)
        position, left = position + tokens, left - tokens
    assert all(tokens >= TILE_TOKENS for tokens in pieces[1:]), pieces
    assert sum(-(-tokens // TILE_TOKENS) for tokens in pieces) == -(-1_500 // TILE_TOKENS), "a tile more than it needs"


def test_whole_tiles_are_not_judged_by_what_a_part_of_one_seems_to_take() -> None:
    scheduler = Scheduler(Targets(80.0, 2_048, 64))
    scheduler.cost.observe_decode(1, 0, 9.0)
    # As measured in a process that has just begun: its first whole tile touches memory for the first time.
    for tokens, position, ms in ((32, 0, 42.6), (64, 0, 92.5), (28, 0, 34.2), (32, 28, 43.8), (32, 60, 51.4)):
        scheduler.cost.observe_prefill(tokens, position, ms)
    stream = make_row(1, last_token_ms=NOW, target_tbt_ms=80.0)
    row = make_row(2, prefill_left=1_408, prompt_tokens=1_500)
    sizes = []
    for _ in range(8):
        plan = scheduler.plan(state_of([stream, row], 100_000), NOW)
        tokens = plan.prefill[0][1] + plan.is_mixed
        scheduler.cost.observe_prefill(tokens, row.position, 15.0 + tokens * 1.25)
        sizes.append(tokens)
    assert sizes[0] > TILE_TOKENS, "a size that was never seen is tried"
    assert sorted(sizes)[2] > TILE_TOKENS, "larger pieces, which read faster, are taken"


@pytest.mark.parametrize(("ended_ms", "is_whole"), [(-math.inf, True), (NOW - 10, False)])
def test_a_slow_model_reads_deep_in_a_prompt_in_whole_tiles_unless_readers_are_about_to_ask_again(
    ended_ms: float, *, is_whole: bool
) -> None:
    scheduler = Scheduler(Targets(80.0, 2_048, 64))
    for _ in range(5):
        scheduler.cost.observe_decode(1, 1_000, 40.0)  # half of its reader's target
        for size in SIZES[:9]:
            scheduler.cost.observe_prefill(size, 1_000, size * (9.5 if size >= TILE_TOKENS else 12.5))
    stream = make_row(1, last_token_ms=NOW - 60.0, target_tbt_ms=80.0)
    row = make_row(2, prefill_left=1_000, prompt_tokens=2_000, cells=1_000, arrived_ms=NOW - 20)
    state = attrs.evolve(state_of([stream, row], 100_000), answered_ms=ended_ms)
    plan = scheduler.plan(state, NOW)
    assert (plan.prefill[0][1] + plan.is_mixed >= TILE_TOKENS) == is_whole
    assert plan.lead_ms + plan.steps * (plan.pace_ms - 40.0) >= 0.99 * plan.needed_ms > 0, "the reader waits"


def test_a_chunk_is_smaller_the_deeper_in_its_prompt_it_is_read() -> None:
    scheduler = Scheduler(Targets(80.0, 2048, 64))
    for size in SIZES[:9] * 3:
        for position in (0, 1_000, 2_000):
            scheduler.cost.observe_prefill(size, position, 20 + size * (0.5 + position / 2_000))
    chunks = [scheduler.plan(reading_beside_a_stream(position), NOW).prefill[0][1] for position in (0, 1_000, 4_000)]
    assert chunks == sorted(set(chunks), reverse=True)


def test_more_streams_than_a_batch_holds_take_turns() -> None:
    scheduler = Scheduler(Targets(80.0, 4, 64))
    every = [make_row(key, last_token_ms=0.0) for key in range(1, 11)]
    for tick in range(1, 31):
        for key in scheduler.plan(state_of(every, 1_000), float(tick)).decode:
            by_key(every)[key].last_token_ms = float(tick)
        assert all(tick - row.last_token_ms <= 3 for row in every), "a row was passed over"


def test_a_background_row_that_sorts_before_the_head_keeps_its_place() -> None:
    # Else it would begin again at once, give way again, and so on for ever.
    now_ms = 2 * TUNING.lane_delay_ms
    head = make_row(9, lane=0, arrived_ms=now_ms - TUNING.give_way_ms)
    before, behind = make_row(1, lane=-1), make_row(2, lane=-1, arrived_ms=now_ms - 1_000.0)
    assert gives_way(head, [before, behind], now_ms) == [behind]


@given(st.floats(0, 10_000), st.floats(0, 1_000), st.sampled_from([None, 400.0, 1e6]))
def test_background_keeps_its_place_for_a_moment_in_which_another_can_come_free(
    arrived: float, waited: float, target_ms: float | None
) -> None:
    head = make_row(9, lane=1, arrived_ms=arrived, due_ms=arrived + 100.0, target_ttft_ms=target_ms)
    background = make_row(1, lane=-1, arrived_ms=0.0, due_ms=arrived)
    gives = gives_way(head, [background], now_ms=arrived + waited)
    patience_ms = 100.0 if target_ms == 400.0 else TUNING.give_way_ms
    assert gives == ([background] if arrived + waited >= arrived + patience_ms else [])


@pytest.mark.parametrize("has_flash_attention", [True, False])
@pytest.mark.parametrize("has_stream", [True, False])
def test_without_flash_attention_the_cells_of_others_make_a_piece_smaller(
    has_stream: bool, has_flash_attention: bool
) -> None:
    scheduler = Scheduler(Targets(80.0, 2048, 64, has_flash_attention=has_flash_attention))
    for size in SIZES[:9] * 3:
        for attended in (0, 8_000, 16_000):
            scheduler.cost.observe_prefill(size, attended, 10.0 + size * (0.3 + attended / 20_000))
    decoding = [make_row(1, last_token_ms=NOW)] if has_stream else []
    prompt = make_row(2, prefill_left=4_096, prompt_tokens=4_096)

    def piece(used_cells: int) -> int:
        plan = scheduler.plan(State(decoding, [prompt], 10_000, used_cells), NOW)
        return sum(count for _, count in plan.prefill)

    if has_flash_attention:
        assert piece(16_000) == piece(0)
    else:
        assert SMALLEST_CHUNK <= piece(16_000) < piece(0)


def piece_alone(
    lane: int, ms_a_token: float, fixed_ms: float, *, arrived_ms: float = 0.0, answered_ms: float = -math.inf
) -> int:
    """What is read at once of a prompt beside which nothing decodes, on a machine that is known well."""
    scheduler = Scheduler(Targets(80.0, 2_048, 64))
    for tokens in SIZES[:9] * 5:
        scheduler.cost.observe_prefill(tokens, 0, fixed_ms + tokens * ms_a_token)
    prompt = make_row(1, lane=lane, prefill_left=4_096, prompt_tokens=4_096, arrived_ms=arrived_ms)
    state = attrs.evolve(state_of([prompt], 100_000), answered_ms=answered_ms)
    ((_, tokens),) = scheduler.plan(state, NOW).prefill
    return tokens


@given(st.floats(0, NOW), st.floats(0, NOW), st.sampled_from((-1, 0, 1)), st.floats(0.05, 20), st.floats(0, 500))
def test_a_prompt_is_read_in_short_pieces_while_a_reader_was_served_beside_it_of_late(
    arrived_ms: float, ended_ms: float, lane: int, ms_a_token: float, fixed_ms: float
) -> None:
    tokens = piece_alone(lane, ms_a_token, fixed_ms, arrived_ms=arrived_ms, answered_ms=ended_ms)
    longest_ms = TUNING.patience * TUNING.piece_share * TUNING.shorter * Targets(80.0, 2_048, 64).slo_ttft_ms
    if arrived_ms < ended_ms and NOW - ended_ms <= TUNING.expected_ms:
        assert fixed_ms + tokens * ms_a_token <= 1.05 * longest_ms or tokens <= TILE_TOKENS


@given(schedulers(), rows(), st.integers(12, 5_000))
def test_first_tokens_wait_for_no_more_of_a_lower_lane_than_fills_a_tile(
    scheduler: Scheduler, every: list[PlainRow], free: int
) -> None:
    known = by_key(every)
    plan = scheduler.plan(state_of(every, free), NOW)
    if not plan.prefill:
        return
    lane = known[plan.prefill[0][0]].lane
    lower = sum(count for key, count in plan.prefill if known[key].lane < lane)
    others = sum(count for _, count in plan.prefill) - lower
    assert not lower or others + lower <= TILE_TOKENS


def test_a_question_s_first_token_waits_only_for_those_background_rows_that_have_waited_long() -> None:
    scheduler = Scheduler(Targets(80.0, 2_048, 64))
    for size in ROWS[:12]:
        scheduler.cost.observe_decode(size, 0, 10.0 * size)
    scheduler.cost.observe_prefill(64, 0, 200.0)
    question = make_row(100, lane=1, prefill_left=64, prompt_tokens=64, arrived_ms=NOW)

    def first(late: int) -> list[int]:
        waits_ms = [TUNING.held_ms + key if key <= late else 300.0 for key in range(1, 41)]
        jobs = [make_row(key, lane=-1, last_token_ms=NOW - wait) for key, wait in enumerate(waits_ms, start=1)]
        plan = scheduler.plan(state_of([*jobs, question], 10_000), NOW)
        assert plan.prefill == ((100, 64),)
        return [*plan.decode] if plan.steps else []

    assert first(0) == []
    assert first(2) == [2, 1], "that which has waited longest first"
    assert first(40) == [40, 39, 38, 37, 36, 35, 34, 33], "as many as a tick has time for"


def test_a_question_s_first_token_waits_for_no_background_prompt_but_for_what_fills_its_tile() -> None:
    scheduler = Scheduler(Targets(80.0, 2_048, 64))
    scheduler.cost.observe_decode(1, 0, 5.0)
    for size in SIZES[:9] * 5:
        scheduler.cost.observe_prefill(size, 0, 20.0 + size / 4)
    stream = make_row(1, last_token_ms=NOW, target_tbt_ms=80.0)
    job = make_row(3, lane=-1, prefill_left=4_096, prompt_tokens=4_096)

    def read(tokens: int, lane: int) -> int:
        question = make_row(2, lane=lane, prefill_left=tokens, prompt_tokens=tokens)
        plan = scheduler.plan(state_of([stream, job, question], 100_000), NOW)
        assert plan.prefill[0] == (2, tokens)
        return sum(count for _, count in plan.prefill) + plan.is_mixed

    assert read(100, 1) in (100, 101)
    assert read(100, 0) in (100, 101)
    assert read(10, 1) == TILE_TOKENS
    assert read(100, -1) > 128, "prompts of one lane share a piece"


def test_a_piece_takes_a_moment_longer_where_it_reads_clearly_faster() -> None:
    scheduler = Scheduler(Targets(80.0, 2_048, 64))
    scheduler.cost.observe_decode(1, 0, 5.0)
    for tokens, ms in ((64, 170.0), (128, 260.0), (256, 520.0)) * 5:
        scheduler.cost.observe_prefill(tokens, 0, ms)
    stream = make_row(1, last_token_ms=NOW, target_tbt_ms=80.0)
    prompt = make_row(2, prefill_left=4_096, prompt_tokens=4_096)
    assert scheduler.plan(state_of([stream, prompt], 100_000), NOW).prefill[0][1] >= 127


def test_what_a_size_takes_is_not_guessed_from_sizes_that_attention_computes_in_another_way() -> None:
    cost = CostModel()
    for tokens, ms in ((512, 1_500.0), (32, 500.0)):
        cost.observe_prefill(tokens, 1_400, ms)
    for _ in range(4):
        cost.observe_prefill(64, 1_400, 200.0)
    assert cost.prefill_ms(40, 1_400) > 500.0
    assert cost.prefill_ms(64, 1_400) < 300.0
