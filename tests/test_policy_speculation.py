"""Draft lengths: what was measured decides, what was not is tried, and no reader waits longer than it may."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma.engine.policy.cost import CostModel
from uma.engine.worker.drafts.policy import HOPELESS, MAX_TOKENS, SLOWER, STEP_MS, Candidate, DraftPolicy

CHEAP = {1: 10.0, 2: 10.5, 3: 11.0, 4: 11.5, 6: 12.0, 8: 13.0, 12: 15.0, 16: 17.0}
"""Milliseconds by tokens of a batch, where weights are read once for all of them."""
DEAR = {size: 3.5 * size for size in CHEAP}
"""Where each token costs as much as the first."""
STEEP = {1: 3.5, 2: 9.5, 3: 12.0, 4: 13.2, 6: 14.0, 8: 15.0, 12: 16.5, 16: 18.0}
"""Q8_0 with AVX-512: the second token costs more than all others."""
CERTAIN, USUAL, HOPELESS_GUESS = [1.0] * 15, [0.8**n for n in range(1, 16)], [0.1**n for n in range(1, 16)]


def measured(took_ms: dict[int, float], rows: int = 1, *, needs_equal: bool = False) -> DraftPolicy:
    """The policy on a machine that it knows."""
    cost = CostModel()
    for _ in range(5):
        cost.observe_decode(rows, 0, rows * took_ms[1] if rows > 1 else took_ms[1])
        for size, ms in took_ms.items():
            if size > rows:
                cost.observe_decode(size, 0, ms)
    return DraftPolicy(cost, needs_equal=needs_equal)


def lengths(policy: DraftPolicy, *rows: list[float], target_ms: float = 80.0, free: int = 10_000) -> tuple[int, ...]:
    found = policy.choose([Candidate(likelihoods, target_ms) for likelihoods in rows], 0, free)
    return found.lengths if found else (0,) * len(rows)


@pytest.mark.parametrize(
    ("took_ms", "likelihoods", "fewest", "most"),
    [
        (CHEAP, CERTAIN, 15, 15),
        (CHEAP, USUAL, 3, 11),
        (CHEAP, HOPELESS_GUESS, 0, 0),
        (STEEP, CERTAIN, 15, 15),
        (STEEP, USUAL, 0, 0),
        (DEAR, CERTAIN, 0, 0),
    ],
)
def test_a_draft_is_as_long_as_it_pays_here(
    took_ms: dict[int, float], likelihoods: list[float], fewest: int, most: int
) -> None:
    assert fewest <= lengths(measured(took_ms), likelihoods)[0] <= most


def test_where_nothing_can_pay_no_text_is_followed() -> None:
    assert not measured(DEAR).can_pay(1, 0, 80.0)
    assert measured(STEEP).can_pay(1, 0, 80.0)


def test_sizes_that_were_never_seen_are_tried_a_few_times_and_then_known() -> None:
    cost, tried = CostModel(), []
    policy = DraftPolicy(cost)
    assert lengths(policy, CERTAIN) == (0,), "nothing is known of this machine"
    for _ in range(3):
        cost.observe_decode(1, 0, DEAR[1])
    for _ in range(100):
        (length,) = lengths(policy, CERTAIN)
        if length:
            tried.append(length)
            cost.observe_decode(1 + length, 0, DEAR[1 + length])
        else:
            cost.observe_decode(1, 0, DEAR[1])
    assert 3 <= len(tried) <= 3 * (len(DEAR) - 1)
    assert lengths(policy, CERTAIN) == (0,)


def test_a_row_without_a_draft_hardly_waits_for_those_with_one() -> None:
    policy = measured(STEEP, rows=2)
    assert lengths(policy, CERTAIN, []) == (0, 0)
    assert lengths(measured(CHEAP), CERTAIN)[0] > 0


def test_a_guess_that_takes_as_long_as_it_saves_is_shorter_or_not_made() -> None:
    def wanted(step_ms: float, target_ms: float = 80.0) -> int:
        found = measured(CHEAP).choose([Candidate(CERTAIN, target_ms)], 0, 1_000, step_ms=step_ms)
        return found.lengths[0] if found else 0

    assert wanted(0.0) == 15
    assert wanted(CHEAP[1]) == 0
    assert wanted(1.0) > 0
    assert wanted(1.0, target_ms=20.0) * 1.0 + CHEAP[8] <= 20.0, "guessing counts into a reader's gap"


def test_where_each_length_takes_a_pass_of_its_own_all_drafts_are_of_one_length() -> None:
    unequal = CERTAIN[:3], CERTAIN[:7]
    assert lengths(measured(CHEAP, rows=2), *unequal) == (3, 7)
    assert lengths(measured(CHEAP, rows=2, needs_equal=True), *unequal) == (3, 3), "7 and 0 are two passes"
    assert lengths(measured(CHEAP, rows=2, needs_equal=True), CERTAIN, CERTAIN) == (15, 15)


rows_strategy = st.lists(
    st.tuples(st.integers(0, 15), st.floats(0.0, 1.0), st.floats(1.0, 1_000.0)), min_size=1, max_size=6
)


@given(
    rows=rows_strategy,
    first_ms=st.floats(0.5, 200.0),
    more=st.floats(0.0, 1.5),
    free=st.integers(0, 200),
)
def test_whatever_the_machine_no_bound_is_broken(
    rows: list[tuple[int, float, float]], first_ms: float, more: float, free: int
) -> None:
    """The chosen batch is expected to be faster a token, to fit cells and targets, and to slow no row down."""
    count, cost = len(rows), CostModel()
    for _ in range(4):
        cost.observe_decode(count, 0, first_ms)
        for size in range(count + 1, 17):
            cost.observe_decode(size, 0, first_ms * (1 + more * (size - count) / count))
    candidates = [Candidate([chance**n for n in range(1, most + 1)], target) for most, chance, target in rows]
    found = DraftPolicy(cost).choose(candidates, 0, free)
    if found is None:
        return
    drafted = sum(found.lengths)
    assert 0 < drafted <= min(free, MAX_TOKENS - count)
    assert all(length <= len(each.likelihoods) for length, each in zip(found.lengths, candidates, strict=True))
    gained = [1 + sum(each.likelihoods[:length]) for length, each in zip(found.lengths, candidates, strict=True)]
    target_ms = min(each.target_tbt_ms for each in candidates)
    plain_ms = cost.decode_ms(count, 0)
    assert found.batch_ms <= (target_ms if plain_ms <= target_ms else HOPELESS * plain_ms) * (1 + 1e-9)
    if count + drafted < 17:
        assert sum(gained) / (found.batch_ms + STEP_MS) > count / plain_ms
        assert min(gained) * SLOWER * plain_ms >= found.batch_ms * (1 - 1e-9)
    assert math.isfinite(found.batch_ms)
