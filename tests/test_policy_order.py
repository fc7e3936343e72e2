"""Deadlines and the order they give, and when a request is better told to come back later."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_world import Machine, make_row

from uma.engine.intake.overload import MIN_RETRY_MS, Load, retry_after_ms, wait_ms
from uma.engine.policy.cost import CostModel
from uma.engine.policy.order import due_ms
from uma.engine.policy.tuning import TUNING


def taught() -> CostModel:
    cost = CostModel()
    machine = Machine()
    for _ in range(4):
        for rows in (1, 8):
            cost.observe_decode(rows, 0, machine.decode_ms(rows, 0))
        for tokens in (8, 64, 256, 512):
            cost.observe_prefill(tokens, 0, machine.prefill_ms(tokens, 0))
    return cost


def test_a_wish_for_the_first_token_is_the_deadline() -> None:
    row = make_row(1, arrived_ms=100.0, prompt_tokens=5_000, target_ttft_ms=300.0)
    assert due_ms(row, taught()) == 400.0


def test_without_a_wish_the_deadline_is_a_multiple_of_the_reading_time() -> None:
    cost = taught()
    long, short = (due_ms(make_row(1, prompt_tokens=tokens), cost) for tokens in (512, 1))
    assert long == pytest.approx(TUNING.due_factor * cost.prefill_ms(512, 0))
    assert 0 < short < long


@given(st.integers(1, 4_000), st.integers(1, 4_000))
def test_of_two_that_come_together_the_shorter_is_due_first(one: int, other: int) -> None:
    for cost in (CostModel(), taught()):
        dues = [due_ms(make_row(1, prompt_tokens=tokens), cost) for tokens in sorted((one, other))]
        assert dues == sorted(dues)


IDLE = Load(0, 0, 0, 0, 4, 1_000.0, 0, 80.0)


def test_an_idle_engine_makes_no_request_wait_longer_than_reading_takes() -> None:
    cost = taught()
    assert wait_ms(IDLE, 256, cost) == pytest.approx(cost.prefill_ms(256, 0), rel=0.01)
    assert wait_ms(IDLE, 256, CostModel()) == 0, "what is not known is no reason to refuse"


@given(st.integers(0, 50_000), st.integers(0, 100), st.integers(0, 64))
def test_more_before_a_request_never_makes_its_wait_shorter(tokens: int, waiting: int, decoding: int) -> None:
    cost = taught()
    load = attrs.evolve(IDLE, ahead_tokens=tokens, ahead_waiting=waiting, decoding=decoding, running=4)
    wait = wait_ms(load, 100, cost)
    assert wait_ms(attrs.evolve(load, ahead_tokens=tokens + 100), 100, cost) >= wait
    assert wait_ms(attrs.evolve(load, ahead_waiting=waiting + 1), 100, cost) >= wait
    assert wait_ms(attrs.evolve(load, decoding=decoding + 8), 100, cost) >= 0.9 * wait


def test_a_request_that_finds_all_slots_taken_waits_for_as_many_to_end() -> None:
    load = attrs.evolve(IDLE, running=4, ahead_waiting=7)
    assert wait_ms(load, 1, taught()) >= 8 * 1_000 / 4


def test_when_to_come_back_is_what_the_wait_is_over_the_target_and_never_at_once() -> None:
    assert retry_after_ms(5_000, 2_000) == 3_000
    assert retry_after_ms(2_000, 2_000) == MIN_RETRY_MS
