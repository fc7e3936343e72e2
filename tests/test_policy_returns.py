"""Whether a reader is waited for that was served a moment ago: claims about the policy alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_world import Machine, make_row

from uma.engine.policy import PlainRow, Plan, Scheduler, State, Targets
from uma.engine.policy.ending import BACKGROUND_WAITS_MS, MOST_WAITED
from uma.engine.policy.returns import COMPANY_MS, RETURN_MS, Returns

MACHINE = Machine()
TARGETS = Targets(80.0, 2_048, 64)
NOW = 50_000.0
AT_ONCE_MS = 4.0


def served(returns: Returns, at_ms: float, *, is_back: bool) -> float:
    """A reader's answer ends, and it asks again at once, or much later; returns the time after that."""
    returns.ended(at_ms)
    returns.came(at_ms + (AT_ONCE_MS if is_back else 50 * RETURN_MS))
    return at_ms + 100 * RETURN_MS


def test_the_first_reader_is_waited_for_and_not_for_longer_than_it_takes_to_ask_again() -> None:
    returns = Returns()
    assert returns.until_ms(NOW) < NOW, "none was served"
    returns.ended(NOW)
    assert returns.until_ms(NOW + 1) == NOW + RETURN_MS
    assert returns.until_ms(NOW + RETURN_MS + 1) < NOW


def test_a_reader_that_is_back_is_not_waited_for_but_those_that_ended_with_it_are() -> None:
    returns = Returns()
    for _ in range(3):
        returns.ended(NOW)
    for back in range(3):
        assert returns.until_ms(NOW + back) > NOW + back
        returns.came(NOW + back)
    assert returns.until_ms(NOW + 3) < NOW


def test_a_reader_that_cancelled_is_not_waited_for() -> None:
    returns = Returns()
    returns.ended(NOW, is_whole=False)
    assert returns.until_ms(NOW) < NOW
    assert returns.company_since_ms(NOW) == NOW, "it was served, and can ask for something else"
    assert returns.company_since_ms(NOW + COMPANY_MS + 1) < NOW and returns.are_usual(NOW + COMPANY_MS + 1)


def test_readers_that_take_their_time_are_not_waited_for_until_others_have_come_back_at_once() -> None:
    returns, now = Returns(), NOW
    for _ in range(4):
        now = served(returns, now, is_back=False)
    returns.ended(now)
    assert returns.until_ms(now) < now
    for _ in range(4):
        now = served(returns, now + 100 * RETURN_MS, is_back=True)
    returns.ended(now)
    assert returns.until_ms(now) == now + RETURN_MS


def test_a_reader_is_expected_for_a_while_also_where_it_is_back_already() -> None:
    returns = Returns()
    assert returns.company_since_ms(NOW) < NOW, "none was served"
    returns.ended(NOW)
    returns.came(NOW + 1)
    assert returns.company_since_ms(NOW + COMPANY_MS) == NOW
    assert returns.company_since_ms(NOW + COMPANY_MS + 1) < NOW


def test_readers_that_do_not_ask_again_soon_are_not_expected_until_others_have() -> None:
    returns, now = Returns(), NOW
    for _ in range(4):
        returns.ended(now)
        now += COMPANY_MS + 1
    returns.ended(now)
    assert not returns.are_usual(now) and returns.company_since_ms(now) < now
    for _ in range(4):
        returns.ended(now)
        returns.came(now + COMPANY_MS / 2)  # not at once
        now += COMPANY_MS
    returns.ended(now)
    assert returns.are_usual(now) and returns.company_since_ms(now) == now
    assert returns.until_ms(now) < now, "they take longer than a piece is put off for"


def test_a_crowd_that_leaves_together_counts_as_one_reader_that_does() -> None:
    returns = Returns()
    for _ in range(64):
        returns.ended(NOW)
    later_ms = NOW + COMPANY_MS + 1
    assert returns.are_usual(later_ms)
    returns.ended(later_ms)
    assert returns.until_ms(later_ms) > later_ms and returns.company_since_ms(later_ms) == later_ms


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=60))
def test_whatever_comes_no_reader_is_waited_for_beyond_its_moment(events: list[tuple[float, bool]]) -> None:
    returns, now, last_ms = Returns(), 0.0, float("-inf")
    for later_ms, is_end in events:
        now += later_ms
        if is_end:
            returns.ended(now)
            last_ms = now
        else:
            returns.came(now)
        assert returns.until_ms(now) <= last_ms + RETURN_MS


def planned(prompt: PlainRow, *streams: PlainRow, until_ms: float = NOW + 10, ended_ms: float = NOW - 5) -> Plan:
    """What is done with a prompt where a reader's answer has just ended and it may be back until then."""
    scheduler = Scheduler(TARGETS)
    for tokens in (64, 128, 256, 512) * 4:
        scheduler.cost.observe_prefill(tokens, 0, MACHINE.prefill_ms(tokens, 0))
    scheduler.cost.observe_decode(1, 500, MACHINE.decode_ms(1, 500))
    state = State([*streams], [prompt], 100_000, 500, reader_ended_ms=ended_ms, reader_back_ms=until_ms)
    return scheduler.plan(state, NOW)


def document(**fields: object) -> PlainRow:
    return make_row(9, **({"prompt_tokens": 4_000, "remaining": 4_000, "arrived_ms": NOW - 100} | fields))


def test_a_long_prompt_leaves_a_reader_the_moment_in_which_it_asks_again() -> None:
    plan = planned(document())
    assert not plan.prefill and plan.rest_ms == 10


@pytest.mark.parametrize(
    "plan",
    [
        planned(document(), until_ms=NOW - 1),
        planned(document(arrived_ms=NOW)),
        planned(document(prompt_tokens=64, remaining=64)),
        planned(document(), make_row(1, last_token_ms=NOW)),
        planned(document(arrived_ms=NOW - MOST_WAITED * 2 * MACHINE.prefill_ms(4_000, 2_000))),
    ],
    ids=["none is expected", "came after the reader", "short", "beside another reader's stream", "waited enough"],
)
def test_it_is_read_at_once(plan: Plan) -> None:
    assert plan.prefill and not plan.rest_ms


def test_a_background_prompt_leaves_readers_their_moment_for_longer_however_short_it_is() -> None:
    def rests(waited_ms: float, lane: int = -1, tokens: int = 64) -> bool:
        prompt = document(lane=lane, prompt_tokens=tokens, remaining=tokens, arrived_ms=NOW - waited_ms)
        plan = planned(prompt)
        assert bool(plan.prefill) == (plan.rest_ms == 0)
        return plan.rest_ms > 0

    assert MACHINE.prefill_ms(64, 0) > RETURN_MS
    assert rests(100) and not rests(100, lane=0)
    assert rests(1.9 * BACKGROUND_WAITS_MS), "by now it is read beside streams"
    assert not rests(2.1 * BACKGROUND_WAITS_MS)
    assert not rests(100, tokens=8), "it takes no longer than they do"


def test_beside_background_answers_they_go_on_meanwhile() -> None:
    plan = planned(document(), make_row(1, lane=-1, last_token_ms=NOW))
    assert plan.decode == (1,) and not plan.prefill and not plan.rest_ms
