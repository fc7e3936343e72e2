"""Which layout of KV memory serves a crowd: claims about the choice alone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from uma.engine.policy.layout import LEAST_SEQUENCES, Crowd, Layout, LayoutPolicy, split_layouts

N_CTX = 32_768
POOL = Layout(256, N_CTX, is_unified=True)
SPLITS = split_layouts(N_CTX, 64)
CELL_MS, CHANGE_MS = 0.001, 600.0
CROWDS = st.builds(
    lambda sequences, longest, more: Crowd(sequences, longest, longest + more),
    st.integers(0, 64),
    st.integers(1, 3_000),
    st.integers(0, 256),
)


def policy() -> LayoutPolicy:
    return LayoutPolicy(POOL, SPLITS, CELL_MS, CHANGE_MS)


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
            layouts.changed(chosen)


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
    layouts.changed(SPLITS[0])
    assert layouts.choose(Crowd(30, 512, 600), 0) == SPLITS[0], "it still fits"
    assert layouts.choose(Crowd(30, 513, 700), 0) == SPLITS[1]
    assert layouts.choose(Crowd(40, 513, 700), 0) == POOL


def test_where_no_other_can_be_had_the_pool_is_all_there_is() -> None:
    layouts = policy()
    assert layouts.give_up() == POOL
    assert not layouts.can_change
