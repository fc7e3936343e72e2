"""Which cache leaves its cells for sequences that have begun: claims about the choice alone."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st

from uma.engine.policy.layout import Layout, PauseCost
from uma.engine.policy.layout_policy import LayoutPolicy
from uma.engine.policy.leaving import MAX_COPYING_MS, MAX_FELT_MS, WAY_BACK, Leaving

POOL = Layout(256, 32_768, is_unified=True)
SMALL = Layout(256, 4_096, is_unified=True, is_plain=True)
COSTS_MS = st.floats(1e-4, 10.0)
TOKENS = st.integers(1, 100_000)


def machine(token_ms: float = 0.012, head_ms: float = 144 / 2 / 1e6) -> LayoutPolicy:
    """One of a model of 100 M parameters on two threads."""
    return LayoutPolicy(POOL, [SMALL], PauseCost(0.005, token_ms), head_ms=head_ms)


def leaves(policy: LayoutPolicy, reads: int, rows: int, tokens: int = 2_000, *, has_snapshot: bool = False) -> bool:
    return policy.leaving(reads, rows).pays(tokens, 0, tokens, has_snapshot=has_snapshot)


def test_a_long_prompt_sends_cache_away_and_a_few_tokens_do_not() -> None:
    assert leaves(machine(), reads=8_192, rows=16)
    assert not leaves(machine(), reads=60, rows=8)


def test_many_decode_steps_send_cache_away_too() -> None:
    assert leaves(machine(), reads=1, rows=64 * 128)


def test_where_copies_are_slow_or_a_masked_cell_costs_nothing_it_stays() -> None:
    assert not leaves(machine(token_ms=2.0), reads=8_192, rows=128)
    assert not leaves(machine(head_ms=0.0), reads=8_192, rows=128)


def test_plain_attention_which_computes_masked_cells_in_full_sends_it_away_sooner() -> None:
    policy = machine()
    assert not leaves(policy, reads=60, rows=16)
    policy.current = SMALL
    assert leaves(policy, reads=60, rows=16)


def test_a_machine_whose_copies_were_seen_to_take_longer_keeps_more() -> None:
    policy = machine()
    assert leaves(policy, reads=200, rows=16)
    for _ in range(20):
        policy.learn_copy(2_000, 2_000 * 0.03)
    assert not leaves(policy, reads=200, rows=16)


@given(passing=COSTS_MS, carrying=COSTS_MS, freed=TOKENS, kept=st.integers(0, 100_000))
def test_what_leaves_spares_more_time_than_its_copies_take(
    passing: float, carrying: float, freed: int, kept: int
) -> None:
    leaving, tokens = Leaving(passing, carrying), freed + kept
    if leaving.pays(freed, kept, tokens, has_snapshot=False):
        assert passing * freed > carrying * tokens
        assert leaving.pays(freed, kept, tokens, has_snapshot=True), "the copy that is spared was the reason to stay"
    if leaving.pays(freed, kept, tokens, has_snapshot=True):
        assert passing * freed > WAY_BACK * carrying * tokens
        assert leaving.pays(freed + kept, 0, tokens, has_snapshot=True), "what is shared is there anyway"


@given(passing=COSTS_MS, carrying=COSTS_MS)
def test_copies_before_one_batch_are_bounded_and_never_none(passing: float, carrying: float) -> None:
    leaving = Leaving(passing, carrying)
    for decodes, most_ms in ((True, MAX_FELT_MS), (False, MAX_COPYING_MS)):
        tokens = leaving.max_tokens(decodes=decodes)
        assert tokens == 1 or (1 - WAY_BACK) * carrying * tokens <= most_ms
    assert leaving.max_tokens(decodes=True) <= leaving.max_tokens(decodes=False)
    assert attrs.evolve(leaving, carrying_ms=0.0).max_tokens(decodes=True) >= 1
