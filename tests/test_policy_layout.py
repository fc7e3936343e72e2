"""Which layout of KV memory serves a crowd: claims about the choice alone."""

from __future__ import annotations

import math

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policy_world import make_row

from uma.engine.delivery.pacing import reader_ms
from uma.engine.policy import Scheduler, State, Targets
from uma.engine.policy.layout import (
    EXPECTED_TOKENS,
    EXPECTED_TURNS,
    FEW_IDS,
    HEADROOM_TOKENS,
    LEAST_SEQUENCES,
    LEAST_SHARE,
    Attended,
    AttentionCost,
    Crowd,
    Held,
    Layout,
    PauseCost,
    small_pools,
    split_layouts,
)
from uma.engine.policy.layout_policy import LEAST_GAIN_MS, LEAST_OTHER_ATTENTION_GAIN_MS, PUT_OFF, LayoutPolicy
from uma.engine.policy.lead import COMFORT, MAX_STEPS, max_lead_ms
from uma.engine.policy.pace import HOPELESS, choose_pacing
from uma.engine.worker.relayout import MAX_PREPARATIONS

N_CTX = 32_768
POOL = Layout(256, N_CTX, is_unified=True)
FLASH = split_layouts(N_CTX, 64)
HALF_K = Layout(65, 512)
PLAIN = tuple(attrs.evolve(each, is_plain=True) for each in FLASH)
SMALL = small_pools(N_CTX, 2_048, POOL.ids)
CELL_MS, PAUSE_MS = 0.001, 300.0
CHANGE_MS = 2 * PAUSE_MS
"""There and back, whatever the layout."""
EPYC = AttentionCost(11.7, 6.4, 0.94, 3.9, 3.1, 0.41)
"""As `uma.llama.attention` has measured it."""
NO_COST = AttentionCost(0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
"""But for the cells of others."""
CROWDS = st.builds(
    lambda sequences, longest, more: Crowd(sequences, longest, longest + more),
    st.integers(0, 64),
    st.integers(1, 3_000),
    st.integers(0, 256),
)


class EqualPause(PauseCost):
    """Each change takes as long."""

    def __init__(self) -> None:
        super().__init__(0.0, 0.0)

    def ms(self, cells: int, tokens: int) -> float:
        return PAUSE_MS


def policy() -> LayoutPolicy:
    """One in which only the cells of others cost something."""
    return LayoutPolicy(POOL, FLASH, EqualPause(), head_ms=CELL_MS, cost=NO_COST)


def machine(cost: AttentionCost | None = None) -> LayoutPolicy:
    """One of a model of 100 M parameters on two threads; of a Xeon, or of another CPU."""
    return LayoutPolicy(POOL, (*FLASH, *PLAIN, *SMALL), PauseCost(0.005, 0.012), head_ms=144 / 2 / 1e6, cost=cost)


def masked(cells: float) -> Attended:
    return Attended(rows_masked=cells)


def alone(tokens: int, more: int, *, unread: int = 0) -> Crowd:
    return Crowd.of([tokens], [more], shared=0, most=64, unread=[unread], decodes=not unread)


def test_the_cells_there_are_are_divided_among_all_half_and_a_quarter_of_the_sequences_and_among_few() -> None:
    assert {Layout(65, 512), Layout(33, 1_024), Layout(17, 2_048)} < set(FLASH)
    assert {each.ids for each in FLASH} == {65, 33, 17, *FEW_IDS}
    assert Layout(4, 8_704) in FLASH, "one long conversation"
    assert split_layouts(1_024, 64) == (), "no share is worth having"


@given(max_sequences=st.integers(1, 256), most_ids=st.sampled_from((64, 255, 256, 257)))
def test_no_layout_has_more_ids_than_there_are_and_one_of_them_holds_all_sequences(
    max_sequences: int, most_ids: int
) -> None:
    found = split_layouts(131_072, max_sequences, most_ids=most_ids)
    assert all(each.ids <= most_ids for each in found)
    if LEAST_SEQUENCES <= max_sequences <= most_ids:
        assert any(each.holds(max_sequences, 256, 0) for each in found)


@given(n_ctx=st.integers(512, 200_000), max_sequences=st.integers(1, 255), more=st.integers(0, 200_000))
def test_shares_are_multiples_of_256_and_take_hardly_more_memory(n_ctx: int, max_sequences: int, more: int) -> None:
    found = split_layouts(n_ctx, max_sequences, n_ctx + more)
    assert set(split_layouts(n_ctx, max_sequences)) <= set(found)
    assert len(set(found)) == len(found)
    for layout in found:
        assert layout.share % 256 == 0 < layout.share
        assert layout.cells == layout.ids * layout.share <= (n_ctx + more) * 17 / 16
        assert layout.ids <= max_sequences + 1
        assert layout.ids not in FEW_IDS or layout.share >= LEAST_SHARE


def test_a_document_among_short_prompts_is_read_in_buffers_for_each_where_there_is_memory_for_them() -> None:
    prompts, answers = [*[256] * 8, *[64] * 3, 4_000], [*[48] * 11, 32]
    crowd = Crowd.of(prompts, answers, shared=0, most=64, unread=[*[256] * 8, 0, 0, 0, 4_000])
    held, pause = Held(192, 192), PauseCost(0.005, 0.012)
    chosen = []
    for cells in (N_CTX, 2 * N_CTX):
        others = split_layouts(N_CTX, 64, cells)
        layouts = LayoutPolicy(POOL, others, pause, head_ms=144 / 2 / 1e6, cost=EPYC)
        chosen.append(layouts.choose(crowd, Attended(), held))
    assert chosen == [POOL, Layout(13, 4_096)]


@pytest.mark.parametrize(("sequences", "is_split"), [(64, True), (2, False)])
def test_where_a_gpu_attends_masks_decide_and_only_a_crowd_gets_buffers_for_each(
    sequences: int, *, is_split: bool
) -> None:
    pause = PauseCost(0.0012, 0.24)  # 12 KiB a cell, 12 layers: what is assumed before the first change
    layouts = LayoutPolicy(POOL, FLASH, pause, head_ms=1e-6, cost=AttentionCost.on_gpu())
    ahead = Crowd.of([16] * sequences, [128] * sequences, shared=0, most=64, unread=[16] * sequences, decodes=False)
    chosen = layouts.choose(ahead, Attended(), Held())
    assert (chosen != POOL) == is_split
    assert chosen.holds(sequences, 16 + 128, sequences * (16 + 128))


def test_layouts_that_there_is_no_memory_for_are_not_chosen_any_more() -> None:
    others = split_layouts(N_CTX, 64, 2 * N_CTX)
    layouts = LayoutPolicy(POOL, others, EqualPause(), head_ms=CELL_MS, cost=NO_COST)
    large, small = (Crowd(11, longest, longest, masked(1_000_000)) for longest in (4_000, 1_000))
    assert layouts.choose(large, Attended(), Held()).cells > N_CTX
    layouts.give_up_from(11 * 4_000)
    assert layouts.choose(large, Attended(), Held()) == POOL
    assert layouts.choose(Crowd(64, 400, 500, masked(1_000_000)), Attended(), Held()).ids == 65, "as before"
    assert layouts.choose(small, Attended(), Held()) in split_layouts(N_CTX, 64)


@settings(max_examples=50)
@given(turns=st.lists(st.tuples(CROWDS, st.integers(0, 10**6)), max_size=20))
def test_no_sequence_is_ever_given_a_share_too_short_and_changes_pay_for_themselves(
    turns: list[tuple[Crowd, int]],
) -> None:
    layouts, cells, saved = policy(), 0, 0.0
    for crowd, more in turns:
        cells += more
        before = layouts.current
        if before.is_unified:
            saved += more * CELL_MS
        chosen = layouts.choose(attrs.evolve(crowd, soon=masked(1)), masked(cells), Held())
        assert chosen == POOL or chosen.holds(crowd.sequences, crowd.longest, 0)
        if chosen != before:
            if before.is_unified:
                assert saved + CELL_MS >= CHANGE_MS, "it was changed before staying had cost as much"
                saved = 0.0
            layouts.changed(chosen, Held())


@settings(max_examples=50)
@given(spared=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=200))
def test_changes_that_do_not_pay_grow_rare_and_no_client_brings_about_more_of_them(spared: list[float]) -> None:
    """A client that alternates: a crowd in the pool that loses what one change is worth, then a long prompt."""
    layouts, cells, lost_ms, in_vain = policy(), 0, 0.0, 0
    crowd = Crowd(32, 100, 228, masked(1))
    for share in spared:
        cells += int(CHANGE_MS / CELL_MS)
        lost_ms += CHANGE_MS
        chosen = layouts.choose(crowd, masked(cells), Held())
        if chosen.is_unified:
            continue
        layouts.changed(chosen, Held())
        cells += int(share * CHANGE_MS / CELL_MS)
        layouts.choose(crowd, masked(cells), Held())
        assert layouts.choose(Crowd(32, 1_500, 1_756), masked(cells), Held()) == POOL
        layouts.changed(POOL, Held())
        in_vain += share < 0.999
    if max(spared) < 0.999:
        assert in_vain <= 1 + math.log2(len(spared) + 1), "each has to be worth twice the one before"
    assert in_vain * CHANGE_MS <= lost_ms


@given(
    cell_ms=st.floats(1e-4, 0.1),
    token_ms=st.floats(1e-3, 1.0),
    layouts=st.lists(st.sampled_from([POOL, *FLASH]), min_size=24, max_size=40),
)
def test_what_a_change_takes_is_learnt_from_changes(cell_ms: float, token_ms: float, layouts: list[Layout]) -> None:
    pause = PauseCost(0.005, 0.012)
    for layout in layouts:
        pause.learn(layout.cells, cell_ms * layout.cells, 2_000, token_ms * 2_000)
    expected_ms = cell_ms * POOL.cells + token_ms * 3_000
    assert pause.ms(POOL.cells, 3_000) == pytest.approx(expected_ms, rel=0.1)
    pause.learn(POOL.cells, cell_ms * POOL.cells, 0, 50.0)
    assert pause.ms(POOL.cells, 3_000) == pytest.approx(expected_ms, rel=0.1), (
        "nothing was carried, and it says nothing"
    )
    pause.learn(0, 0.0, 2_000, token_ms * 2_000)
    assert pause.ms(POOL.cells, 3_000) == pytest.approx(expected_ms, rel=0.1), "nothing was made, and it says nothing"


def test_one_change_that_took_long_makes_the_next_no_more_than_half_as_dear_again() -> None:
    pause = PauseCost(0.005, 0.012)
    expected_ms = pause.ms(POOL.cells, 3_000)
    pause.learn(SMALL[0].cells, 1e6, 2_000, 1e6)
    assert pause.ms(POOL.cells, 3_000) <= 1.5 * expected_ms


@pytest.mark.parametrize(("most_more", "share"), [(128, 256), (240, 256), (241, 512), (4_000, 512)])
@pytest.mark.parametrize(("size", "ids"), [(64, 65), (32, 33), (14, 17)])
def test_a_crowd_gets_the_shortest_buffers_that_hold_what_it_is_expected_to_write(
    size: int, ids: int, most_more: int, share: int
) -> None:
    # Changes take as long as what they make, so of two layouts that serve as well the smaller is better.
    crowd = Crowd.of([16] * size, [most_more] * size, shared=0, most=64)
    assert machine().choose(crowd, Attended(), Held()) == Layout(ids, share, is_plain=False)


def test_a_crowd_of_short_texts_that_a_longer_one_joins_gets_longer_buffers() -> None:
    layouts = policy()
    layouts.changed(Layout(65, 256), Held())
    joined = Crowd.of([100] * 20 + [300], [100] * 21, shared=0, most=64)
    chosen = layouts.choose(joined, Attended(), Held())
    assert chosen.holds(joined.sequences, joined.longest_soon, joined.cells_soon)
    assert not chosen.is_unified


def test_a_sequence_about_to_outgrow_its_share_is_seen_before_it_does() -> None:
    layouts = policy()
    layouts.changed(HALF_K, Held())
    going_on = Crowd.of([500, 30], [256, 256], shared=0, most=64)
    assert layouts.choose(going_on, Attended(), Held()) != HALF_K
    ends_before = Crowd.of([500, 30], [10, 256], shared=0, most=64)
    assert layouts.choose(ends_before, Attended(), Held()) == HALF_K


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
        assert supplied_ms >= min(COMFORT * pause_ms, max_lead_ms(pace))


def test_readers_are_supplied_for_a_longer_pause_than_expected_until_a_change_was_seen() -> None:
    layouts, held = policy(), Held(100, 100)
    expected_ms = layouts.pause_ms(FLASH[0], held)
    assert layouts.most_pause_ms(FLASH[0], held) == 2 * expected_ms
    layouts.learn(FLASH[0], held, made_ms=expected_ms, carried_ms=0.0)
    assert layouts.most_pause_ms(FLASH[0], held) == layouts.pause_ms(FLASH[0], held)


def test_a_crowd_of_short_sequences_is_split_once_that_would_have_paid() -> None:
    layouts, crowd = policy(), Crowd(32, 100, 228, masked(1))
    assert layouts.choose(crowd, masked(599_000), Held()) == POOL
    assert layouts.choose(crowd, masked(601_000), Held()) == FLASH[0]


def test_what_a_crowd_will_probably_lose_counts_as_lost() -> None:
    assert policy().choose(Crowd(32, 16, 144, masked(601_000)), Attended(), Held()) == FLASH[0]
    assert policy().choose(Crowd(32, 16, 144, masked(500_000)), Attended(), Held()) == POOL


def test_a_prefix_that_all_share_is_no_loss() -> None:
    tokens, more = [1_000] * 9, [20] * 9
    assert not policy().choose(Crowd.of(tokens, more, shared=0, most=64), Attended(), Held()).is_unified
    assert policy().choose(Crowd.of(tokens, more, shared=990, most=64), Attended(), Held()) == POOL
    assert machine().choose(Crowd.of(tokens, [400] * 9, shared=400, most=64), Attended(), Held()).is_plain
    one_prefix = Crowd.of(tokens, [400] * 9, shared=600, most=64)
    assert machine().choose(one_prefix, Attended(rows_own=1e9), Held()).is_unified, "each start would copy it"


def prefix_crowd(own: int, more: int, *, is_read: bool = True) -> Crowd:
    """Eight with 1,024 tokens in common."""
    tokens = [1_024 + own] * 8
    return Crowd.of(tokens, [more] * 8, shared=1_024, most=64, unread=[] if is_read else tokens, decodes=is_read)


def test_a_crowd_with_one_prefix_is_read_in_the_pool_and_decodes_in_a_small_one() -> None:
    layouts, read = machine(), prefix_crowd(16, 16)
    assert layouts.choose(prefix_crowd(16, 16, is_read=False), Attended(), Held()) == POOL
    layout = layouts.choose(read, Attended(), read.held)
    assert layout == SMALL[0]
    layouts.changed(layout, read.held)
    assert layouts.pause_ms(POOL, read.held) < 20.0, "the pool is made anew"
    for own in range(16, 200, 8):
        if layouts.choose(prefix_crowd(own, 400), Attended(), Held()) != SMALL[0]:
            break
    assert 1_024 + 8 * (own + HEADROOM_TOKENS) > SMALL[0].cells >= 1_024 + 8 * (own - 8 + HEADROOM_TOKENS)


def test_a_prompt_beside_a_decode_in_a_small_pool_is_read_in_the_pool_and_a_short_one_where_it_is() -> None:
    layouts = machine()
    layouts.changed(SMALL[1], Held(1_000, 1_000))

    def beside(prompt: int) -> Layout:
        crowd = Crowd.of([1_000, prompt], [400, 400], shared=0, most=64, unread=[0, prompt])
        return layouts.choose(crowd, Attended(), Held(1_000, 1_000))

    assert beside(1_000) == POOL
    assert beside(50) == SMALL[1]


@pytest.mark.parametrize("sequences", [1, 8])
def test_after_a_crowd_an_engine_rests_in_the_pool_where_that_is_at_hand_and_after_a_conversation_where_it_was(
    sequences: int,
) -> None:
    def rest(*layouts: Layout) -> Layout:
        chooser = machine()
        for layout in layouts:
            chooser.changed(layout, Held())
        chooser.choose(Crowd.of([100] * sequences, [100] * sequences, shared=90, most=64), Attended(), Held())
        return chooser.resting(Attended())

    assert rest(SMALL[0]) == (SMALL[0] if sequences == 1 else POOL)
    assert rest(SMALL[0], SMALL[1]) == (SMALL[1] if sequences == 1 else POOL)
    assert rest(PLAIN[0]) == PLAIN[0], "the pool would have to be made"
    assert rest(PLAIN[0], SMALL[0]) == SMALL[0], "it was given up for the buffers"


def test_a_conversation_that_goes_on_is_read_in_its_small_pool_and_a_long_prompt_in_the_pool() -> None:
    layouts, held = machine(), Held(900, 900)
    layouts.changed(SMALL[0], held)
    assert layouts.choose(alone(960, 400, unread=60), Attended(), held) == SMALL[0]
    assert layouts.choose(alone(1_300, 400, unread=400), Attended(), held) == POOL
    assert layouts.choose(alone(1_900, 400, unread=1_000), Attended(), held) == POOL, "where the next pool is as slow"
    assert layouts.choose(alone(4_900, 400, unread=4_000), Attended(), held) == POOL, "where buffers are as slow"
    assert layouts.choose(alone(2_030, 400), Attended(), held) == SMALL[1], "it has outgrown its pool"


def test_a_low_bound_of_the_output_is_reached_and_of_a_high_one_half_of_what_is_expected() -> None:
    assert alone(1_000, 16).soon.rows_own == 16 * (1_000 + 16 / 2)
    steps = EXPECTED_TOKENS / 2
    assert alone(1_000, 5_000).soon.rows_own == steps * (1_000 + steps / 2)


def test_the_way_back_from_buffers_makes_the_pool_and_that_from_a_small_pool_does_not() -> None:
    layouts, held = machine(), Held(100, 700)
    layouts.changed(SMALL[0], held)
    assert layouts.pause_ms(POOL, held) == pytest.approx(0.012 * 100)
    assert layouts.pause_ms(FLASH[0], held) == pytest.approx(0.005 * FLASH[0].cells + 0.012 * 700)
    layouts.changed(FLASH[0], held)
    assert layouts.pause_ms(POOL, held) == pytest.approx(0.005 * POOL.cells + 0.012 * 100)


def test_what_short_answers_lost_one_by_one_is_no_reason_for_a_small_pool() -> None:
    """It serves only until nothing is left to do."""
    small = LayoutPolicy(POOL, SMALL, PauseCost(0.005, 0.012), head_ms=144 / 2 / 1e6)
    crowd, attended = alone(400, 30), Attended()
    for _ in range(100):
        attended = Attended(rows_own=attended.rows_own + 30 * 400)
        assert small.choose(crowd, attended, crowd.held) == POOL
        assert small.resting(attended) == POOL
    attended = Attended(rows_own=attended.rows_own + 300 * 400)
    assert small.choose(alone(700, 300), attended, crowd.held) == SMALL[0], "it goes on and on"


@given(
    turns=st.lists(
        st.tuples(st.lists(st.integers(1, 2_000), min_size=1, max_size=8), st.integers(1, 500), st.floats(0.0, 1.0)),
        max_size=20,
    )
)
def test_with_nothing_new_a_choice_stays(turns: list[tuple[list[int], int, float]]) -> None:
    layouts, rows_own = machine(), 0
    for tokens, more, share in turns:
        crowd = Crowd.of(tokens, [more] * len(tokens), shared=int(share * min(tokens)), most=64)
        rows_own += sum(tokens) * more
        for is_again in (False, False, True, True):
            chosen = layouts.choose(crowd, Attended(rows_own=rows_own), crowd.held)
            if chosen != layouts.current:
                assert not is_again, "it flips"
                layouts.changed(chosen, crowd.held)


@given(
    tokens=st.lists(st.integers(1, 3_000), min_size=1, max_size=12),
    more=st.integers(0, 2_000),
    shared=st.floats(0.0, 1.0),
    attended=st.integers(0, 10**9),
)
def test_a_small_pool_is_chosen_only_for_what_it_holds(
    tokens: list[int], more: int, shared: float, attended: int
) -> None:
    common = int(shared * min(tokens))
    crowd = Crowd.of(tokens, [more] * len(tokens), shared=common, most=64)
    layout = machine().choose(crowd, Attended(rows_own=attended), Held())
    if layout in SMALL:
        assert sum(tokens) - (len(tokens) - 1) * common + len(tokens) * min(more, EXPECTED_TOKENS) <= layout.cells


@given(n_ctx=st.integers(256, 200_000), n_batch=st.integers(1, 8_192))
def test_a_small_pool_holds_a_batch_and_is_smaller_than_the_pool(n_ctx: int, n_batch: int) -> None:
    found = small_pools(n_ctx, n_batch, 256)
    assert [each.cells for each in found if each.is_pool] == [each.cells for each in found if each.is_plain]
    for layout in found:
        assert layout.is_unified and n_batch <= layout.cells == layout.share < n_ctx


def test_behind_buffers_a_prefix_gets_a_small_pool_as_fast_as_the_pool_which_is_not_made_for_it() -> None:
    layouts, arrived = machine(EPYC), prefix_crowd(16, 16, is_read=False)
    layouts.changed(Layout(13, 512), Held())
    chosen = layouts.choose(arrived, Attended(), Held())
    assert chosen.is_pool and chosen in SMALL
    assert layouts.pause_ms(chosen, Held()) < layouts.pause_ms(POOL, Held()) / 8
    layouts.changed(chosen, Held())
    assert layouts.choose(arrived, Attended(), Held()) == chosen
    long = Crowd.of([6_000] * 8, [16] * 8, shared=5_900, most=64, unread=[6_000] * 8, decodes=False)
    assert layouts.choose(long, Attended(), Held()) == POOL, "no small one holds it"


def test_a_small_pool_as_fast_as_the_pool_makes_no_later_change_dearer() -> None:
    def least_loss(*before: Layout) -> int:
        """That for which the pool is left, after these layouts."""
        layouts = machine(EPYC)
        for layout in (*before, POOL):
            layouts.changed(layout, Held())
        losses = range(0, 2_000_000_000, 1_000_000)
        return next(
            each for each in losses if layouts.choose(Crowd(64, 90, 218, masked(each)), Attended(), Held()) != POOL
        )

    assert least_loss(FLASH[0]) == least_loss(FLASH[0], SMALL[-1]) > least_loss()


def test_the_pool_is_gone_back_to_for_a_prompt_that_gains_by_it_all_that_making_it_takes() -> None:
    layouts, held, gone_back = machine(), Held(80, 80), False
    layouts.changed(FLASH[0], Held())
    layouts.choose(Crowd(8, 100, 200), masked(1e9), Held())  # the buffers have paid
    layouts.changed(SMALL[1], held)
    for unread in range(300, 1_500, 4):
        crowd = alone(80 + unread, 200, unread=unread)
        if layouts.choose(crowd, masked(1e9), held) == POOL:
            lost_ms = -AttentionCost().spared_ns(crowd.soon.reads, SMALL[1]) * 144 / 2 / 1e6
            assert lost_ms > layouts.pause_ms(POOL, held)
            gone_back = True
    assert gone_back


def test_what_the_pool_keeps_for_none_of_them_is_a_loss_too() -> None:
    tokens, more, unread = [300] * 4, [8] * 4, [0] * 2 + [256] * 2

    def layout(cached: int) -> Layout:
        return machine().choose(
            Crowd.of(tokens, more, shared=0, most=64, unread=unread, cached=cached), Attended(), Held(600, 600)
        )

    assert layout(0) == POOL and not layout(6_000).is_unified


def test_a_long_one_among_many_stays_in_the_pool() -> None:
    layouts = policy()
    assert layouts.choose(Crowd(32, 4_000, 4_256, masked(1)), masked(2 * 10**9), Held()) == POOL
    assert layouts.choose(Crowd(32, 100, 200, masked(1)), masked(2 * 10**9), Held()) == POOL, (
        "what could not be spared is held against the pool"
    )


def test_a_split_memory_is_left_for_one_with_longer_shares_and_else_for_the_pool() -> None:
    layouts = policy()
    layouts.changed(HALF_K, Held())
    assert layouts.choose(Crowd(30, 512, 600), Attended(), Held()) == HALF_K, "it still fits"
    assert layouts.choose(Crowd(30, 513, 700), Attended(), Held()) == Layout(33, 1_024)
    assert layouts.choose(Crowd(40, 513, 700), Attended(), Held()) == POOL


def test_where_no_other_can_be_had_the_pool_is_all_there_is() -> None:
    layouts = policy()
    assert layouts.give_up() == POOL
    assert not layouts.can_change


def test_a_long_conversation_decodes_with_plain_attention_and_a_short_one_is_not_worth_the_pause() -> None:
    assert machine().choose(alone(900, 400), Attended(), Held(900, 900)).is_plain
    assert machine().choose(alone(60, 100), Attended(), Held(60, 60)) == POOL


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_a_crowd_that_decodes_has_the_least_memory_that_holds_it(size: int) -> None:
    crowd = Crowd.of([16] * size, [128] * size, shared=0, most=64)
    chosen = machine().choose(crowd, Attended(), Held(16 * size, 16 * size))
    holding = [each for each in FLASH if each.holds(size, crowd.longest_soon, crowd.cells_soon)]
    assert chosen.cells == min(each.cells for each in holding)
    assert chosen.cells <= 768 * size, "memory for twice as many, or much longer sequences"


@pytest.mark.parametrize("size", [8, 32])
def test_a_crowd_of_short_sequences_has_flash_attention_and_plain_attention_once_they_are_longer(size: int) -> None:
    def crowd(tokens: int) -> Crowd:
        return Crowd.of([tokens] * size, [128] * size, shared=0, most=64)

    short = machine().choose(crowd(16), Attended(), Held(16 * size, 16 * size))
    assert not short.is_unified and not short.is_plain
    longer = machine().choose(crowd(200), Attended(), Held(200 * size, 200 * size))
    assert not longer.is_unified and longer.is_plain


def test_the_other_attention_takes_a_larger_gain_than_the_same() -> None:
    crowd = Crowd.of([16] * 8, [128] * 8, shared=0, most=64)
    equal = AttentionCost(10.0, 10.0, 2.0, 1.0, 1.0, 1.0, 0.0, 0.0)

    def layouts(*others: Layout) -> LayoutPolicy:
        return LayoutPolicy(POOL, others, PauseCost(0.001, 0.012), head_ms=144 / 2 / 1e6, cost=equal)

    def chosen(*others: Layout) -> Layout:
        gain_ms = layouts(*others)._spared_ms(crowd.soon, others[0])
        assert LEAST_GAIN_MS < gain_ms < LEAST_OTHER_ATTENTION_GAIN_MS
        return layouts(*others).choose(crowd, Attended(), crowd.held)

    assert chosen(*FLASH) in FLASH
    assert chosen(*PLAIN) == POOL
    assert chosen(*PLAIN, *FLASH) in FLASH
    [small], [large] = [[each for each in PLAIN if (each.ids, each.share) == size] for size in ((13, 512), (13, 1_024))]
    least = layouts(*PLAIN, *FLASH)
    least.changed(small, crowd.held)
    assert least._least_gain_ms(large, crowd.held) < LEAST_OTHER_ATTENTION_GAIN_MS, "attention stays the plain one"
    assert least._least_gain_ms(FLASH[0], crowd.held) >= LEAST_OTHER_ATTENTION_GAIN_MS
    assert least._least_gain_ms(small, crowd.held, is_back=True) >= LEAST_OTHER_ATTENTION_GAIN_MS


def test_buffers_that_do_not_pay_put_off_no_others_for_prompts_that_the_pool_would_read_sooner() -> None:
    """Plain attention, which is worth more and does not pay, reads prompts more slowly than changes take."""
    crowd = Crowd.of([200] * 8, [60] * 8, shared=0, most=64, unread=[*[0] * 7, 200])
    cost = AttentionCost(20.0, 10.0, 1.5, 1.0, 30.0, 0.5, 0.0, 0.0)
    layouts = LayoutPolicy(POOL, [*PLAIN, *FLASH], PauseCost(0.0005, 0.001), head_ms=144 / 2 / 1e6, cost=cost)
    worth = [layouts._best(crowd, crowd.held, each) for each in (PLAIN, FLASH)]
    assert layouts._worth_ms(crowd, crowd.held, worth[0]) > layouts._worth_ms(crowd, crowd.held, worth[1])
    assert layouts._reads_first(worth[0], crowd, crowd.held) and not layouts._reads_first(worth[1], crowd, crowd.held)
    assert layouts.choose(crowd, Attended(), crowd.held) == worth[1]


def test_streams_beside_long_prompts_have_buffers_and_flash_attention() -> None:
    storm = Crowd.of([120, *[1_500] * 4], [1_900, *[8] * 4], shared=0, most=64, unread=[0, *[1_500] * 4])
    assert machine().choose(storm, Attended(), Held(120, 120)) == Layout(8, 2_048)


def test_a_prompt_with_nothing_beside_it_is_read_in_the_pool_before_anything_changes() -> None:
    layouts = machine()
    assert layouts.choose(alone(900, 400, unread=900), Attended(), Held()) == POOL
    assert layouts.choose(alone(900, 400), Attended(reads_own=900 * 450), Held(900, 900)).is_plain, (
        "what was read is history"
    )


@pytest.mark.parametrize(("size", "short", "long"), [(8, 200, 800), (32, 32, 200), (64, 16, 100)])
def test_prompts_that_come_together_are_read_before_the_change_where_first_tokens_are_sooner_so(
    size: int, short: int, long: int
) -> None:
    def chosen(prompt: int, *, is_read: bool = False) -> Layout:
        prompts = [prompt] * size
        unread = [0 if is_read else prompt] * size
        crowd = Crowd.of(prompts, [400] * size, shared=0, most=64, unread=unread, decodes=is_read)
        return machine().choose(crowd, Attended(), crowd.held if is_read else Held())

    assert chosen(short) == POOL
    assert not chosen(short, is_read=True).is_unified, "it is the order that changes, and not the layout"
    assert not chosen(long).is_unified, "others are in the way in the pool, for longer than the change takes"


def test_a_reader_s_prompt_is_read_before_a_change_and_prompts_that_follow_each_other_put_it_off_for_a_while() -> None:
    """Beside streams the change then comes while all decode, and rows can run ahead of it."""

    def crowd(*, is_awaited: bool, unread: int = 60) -> Crowd:
        return Crowd.of([200] * 8, [60] * 8, shared=0, most=64, unread=[*[0] * 7, unread], is_awaited=is_awaited)

    def layouts() -> LayoutPolicy:
        return LayoutPolicy(POOL, FLASH, PauseCost(0.01, 0.01), head_ms=CELL_MS, cost=NO_COST)

    held = crowd(is_awaited=True).held
    needed = layouts()._least_gain_ms(layouts()._best(crowd(is_awaited=True), held, FLASH), held)
    lost = masked(1.01 * needed / CELL_MS)
    assert not layouts().choose(crowd(is_awaited=False), lost, held).is_unified
    patient = layouts()
    assert patient.choose(crowd(is_awaited=True), lost, held) == POOL
    assert not patient.choose(crowd(is_awaited=False, unread=0), lost, held).is_unified, "it is read"
    busy, chosen = layouts(), []
    for turn in range(1, 6):
        chosen.append(busy.choose(crowd(is_awaited=True), masked(1.01 * turn * needed / CELL_MS), held))
    assert [each == POOL for each in chosen] == [turn < PUT_OFF for turn in range(1, 6)]
    assert chosen[-1] != POOL


def test_a_conversation_that_goes_on_gets_cells_for_its_next_turns_and_looks_for_them_while_it_decodes() -> None:
    def crowd(tokens: int, *, unread: int = 0, turn: int = 100) -> Crowd:
        sizes, left = [tokens, 300, 300], [30, 30, 30]
        return Crowd.of(sizes, left, shared=0, most=64, unread=[unread, 0, 0], turns=[turn, 0, 0])

    assert crowd(600).longest_soon == 600 + 30 + EXPECTED_TURNS * 100
    assert crowd(600).cells_soon == 1_200 + 3 * 30 + EXPECTED_TURNS * 100
    layouts = policy()
    layouts.changed(Layout(13, 1_024), Held())

    def stays(now: Crowd) -> bool:
        return layouts.choose(now, Attended(), now.held) == layouts.current

    assert stays(crowd(890)), "there is place for another turn"
    assert stays(crowd(990, unread=100)), "its reader waits for a first token"
    assert not stays(crowd(990)), "the next turn would not fit"
    assert stays(crowd(990, turn=0)), "none is expected"


def test_plain_attention_is_left_for_a_prompt_that_takes_longer_with_it_than_changes_take() -> None:
    layouts = machine()
    layouts.changed(Layout(8, 4_352, is_plain=True), Held(2_000, 2_000))
    assert layouts.choose(alone(2_060, 300, unread=60), Attended(), Held(2_000, 2_000)).is_plain
    assert layouts.choose(alone(4_000, 300, unread=3_000), Attended(), Held(1_000, 1_000)) == POOL


@given(
    tokens=st.lists(st.integers(1, 8_000), max_size=12),
    more=st.integers(0, 2_000),
    unread=st.floats(0.0, 1.0),
    shared=st.floats(0.0, 1.0),
)
def test_what_attention_will_go_over_is_never_less_than_nothing(
    tokens: list[int], more: int, unread: float, shared: float
) -> None:
    common = int(shared * min(tokens, default=0))
    left = [int(unread * each) for each in tokens]
    crowd = Crowd.of(tokens, [more] * len(tokens), shared=common, most=64, unread=left)
    assert min(attrs.astuple(crowd.soon)) >= 0
    assert crowd.longest <= crowd.longest_next <= crowd.longest_soon
    if len(tokens) == 1:
        assert crowd.soon.rows_masked == crowd.soon.reads_masked == 0, "there are no others"


@pytest.mark.parametrize(("cells", "common"), [(400, 0), (1_040, 1_024), (900, 0)])
def test_where_flash_attention_is_fast_no_sequence_of_this_length_has_plain_attention(cells: int, common: int) -> None:
    for size in (1, 2, 8, 32):
        crowd = Crowd.of([cells] * size, [400] * size, shared=common if size > 1 else 0, most=64)
        assert not machine(EPYC).choose(crowd, Attended(), crowd.held).is_plain
    assert machine().choose(alone(900, 400), Attended(), Held(900, 900)).is_plain, "a Xeon gives it plain attention"


def test_where_flash_attention_is_fast_a_long_conversation_still_gains_by_plain_attention() -> None:
    conversation = alone(6_000, 400)
    masked_most = Attended(rows_own=6_000 * 3_000)
    found = LayoutPolicy(POOL, PLAIN, PauseCost(0.0, 0.0), head_ms=144 / 2 / 1e6, cost=EPYC)
    assert found.choose(conversation, masked_most, Held(6_000, 6_000)).is_plain


def test_where_passing_cells_by_costs_little_a_crowd_still_has_buffers_of_its_own() -> None:
    crowd = Crowd.of([300] * 32, [400] * 32, shared=0, most=64)
    found = machine(EPYC).choose(crowd, Attended(rows_masked=32 * 31 * 300 * 100), crowd.held)
    assert not found.is_unified and not found.is_plain


def test_cells_are_moved_together_for_a_long_prompt_that_would_lie_between_others() -> None:
    mine, others, holes = 100, 1_000, 400
    held = Held(mine + others, mine + others)
    for cost in (None, EPYC):
        assert machine(cost).moves([(4_000, mine)], held, holes)
        assert not machine(cost).moves([(4_000, mine)], held, 0), "nothing lies scattered"
        assert not machine(cost).moves([(32, mine)], held, holes), "it is read as soon as they are moved"
        assert not machine(cost).moves([(4_000, held.cells)], held, holes), "there are no others"
        assert not machine(cost).moves([(4_000, 0)], Held(), holes)


def test_cells_of_a_gpu_and_of_buffers_of_their_own_are_not_moved() -> None:
    held, reads = Held(1_000, 1_000), [(4_000, 0)]
    assert not LayoutPolicy(POOL, (), PauseCost(0.005, 0.012), head_ms=0.0).moves(reads, held, 400)
    chooser = machine()
    chooser.changed(FLASH[0], held)
    assert not chooser.moves(reads, held, 400)


def test_what_moving_takes_is_learnt() -> None:
    chooser, held = machine(), Held(4_000, 4_000)
    expected_ms = chooser.moving_ms(held)
    for _ in range(20):
        chooser.learn_moving(held, 3 * expected_ms)
    assert chooser.moving_ms(held) == pytest.approx(3 * expected_ms, rel=0.05)
