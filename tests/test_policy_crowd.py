"""Prompts that came together on a machine that cannot serve them in time: all are read before any decodes."""

from __future__ import annotations

import pytest
from policy_world import Asked, Machine, World

from uma.engine.policy.crowd import MOST_READ_ON

SLOW = Machine(base_ms=40.0, row_ms=10.0, token_ms=8.0)
"""As a model of 500 M parameters on two cores: a step of 32 streams takes four targets."""
QUICK = Machine(base_ms=2.0, row_ms=0.4, token_ms=0.8)
MOST_MS = MOST_READ_ON * 2_000.0


def served(machine: Machine, crowd: int, prompt: int, *, tbt: float | None = None) -> list[Asked]:
    """A crowd of such prompts, to their ends."""
    found = World.of_known(machine)
    asked = [found.ask(prompt, 12, tbt=tbt) for _ in range(crowd)]
    found.run()
    return asked


def last_first_ms(asked: list[Asked]) -> float:
    return max(each.given_ms[0] for each in asked)


def first_second_ms(asked: list[Asked]) -> float:
    return min(each.given_ms[1] for each in asked)


@pytest.mark.parametrize(("crowd", "prompt"), [(64, 16), (48, 24), (16, 64)])
def test_where_no_schedule_is_in_time_all_have_their_first_token_before_any_has_its_second(
    crowd: int, prompt: int
) -> None:
    asked = served(SLOW, crowd, prompt)
    assert last_first_ms(asked) <= first_second_ms(asked)
    assert last_first_ms(asked) <= 1.05 * SLOW.prefill_ms(crowd * prompt, 0)


def test_many_do_not_wait_for_few() -> None:
    asked = served(SLOW, 32 + 12, 16)
    assert first_second_ms(asked) < last_first_ms(asked)


def test_nobody_waits_for_others_longer_than_can_be_borne() -> None:
    asked = served(SLOW, 64, 64)
    assert SLOW.prefill_ms(64 * 64 - 512, 0) > MOST_MS
    first_ms = min(each.given_ms[0] for each in asked)
    assert first_second_ms(asked) - first_ms <= MOST_MS + SLOW.prefill_ms(512, 0)
    assert first_second_ms(asked) < last_first_ms(asked)


def test_a_machine_that_is_in_time_serves_the_first_while_it_reads_the_others() -> None:
    asked = served(QUICK, 8, 512)
    assert first_second_ms(asked) < last_first_ms(asked)


def test_a_target_that_a_request_names_is_kept_while_it_can_be() -> None:
    asked = served(SLOW, 20, 64, tbt=250.0)
    assert first_second_ms(asked) < last_first_ms(asked)


def test_streams_of_a_higher_lane_wait_for_none() -> None:
    found = World.of_known(SLOW)
    higher, lower = [found.ask(16, 12, lane=1) for _ in range(32)], [found.ask(16, 12) for _ in range(32)]
    found.run()
    assert last_first_ms(higher) <= first_second_ms(higher) < last_first_ms(lower)


def test_streams_that_were_there_before_go_on() -> None:
    found = World.of_known(SLOW)
    before = [found.ask(16, 400) for _ in range(8)]
    while not all(len(each.given_ms) > 3 for each in before):
        found.tick()
    crowd, began_ms = [found.ask(16, 12) for _ in range(64)], found.now_ms
    found.run(crowd)
    worst_ms = max(
        later - max(earlier, began_ms)
        for each in before
        for earlier, later in zip(each.given_ms, each.given_ms[1:], strict=False)
        if later > began_ms
    )
    assert worst_ms < 2_500.0
    assert last_first_ms(crowd) - began_ms > SLOW.prefill_ms(64 * 16, 0), "nothing came between"
