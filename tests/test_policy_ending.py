"""Streams that end before a long prompt is read, end first: claims about the policy alone."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st
from policy_world import Machine, make_row

from uma.engine.policy import PlainRow, Scheduler, State, Targets
from uma.engine.policy.ending import BACKGROUND_WAITS_MS, MOST_WAITED

MACHINE = Machine()
TARGETS = Targets(80.0, 2_048, 64)
NOW = 50_000.0
CELLS = 100_000


def scheduler(machine: Machine = MACHINE) -> Scheduler:
    """One that knows its machine."""
    found = Scheduler(TARGETS)
    for _ in range(4):
        for tokens in (64, 128, 256, 512):
            for position in (0, 1_000, 3_000):
                found.cost.observe_prefill(tokens, position, machine.prefill_ms(tokens, position))
        for rows in (1, 2, 3, 4, 8):
            found.cost.observe_decode(rows, 500, machine.decode_ms(rows, 500))
    return found


def stream(key: int, left: int, **fields: object) -> PlainRow:
    return make_row(key, left_tokens=left, last_token_ms=NOW, **fields)


def document(**fields: object) -> PlainRow:
    return make_row(9, **({"prompt_tokens": 4_000, "remaining": 4_000, "arrived_ms": NOW} | fields))


def state(*rows: PlainRow, queued: PlainRow | None = None) -> State:
    reading = [row for row in rows if row.remaining]
    return State([row for row in rows if not row.remaining], reading, CELLS, 500, queued=queued)


def test_a_document_waits_for_streams_that_end_before_it_is_read_and_they_are_not_paced() -> None:
    plan = scheduler().plan(state(stream(1, 30), stream(2, 20), document()), NOW)
    assert not plan.prefill and plan.pace_ms == 0.0
    assert set(plan.decode) == {1, 2} and 1 < plan.steps <= 30


def test_beside_a_stream_that_goes_on_for_longer_it_is_read_at_once() -> None:
    assert scheduler().plan(state(stream(1, 30), stream(2, 2_000), document()), NOW).prefill


def test_a_short_prompt_does_not_wait_for_any() -> None:
    assert scheduler().plan(state(stream(1, 30), document(prompt_tokens=64, remaining=64)), NOW).prefill


def test_a_background_prompt_waits_for_streams_that_end_soon_however_short_it_is() -> None:
    def is_read(left: int, arrived_ms: float = NOW, **fields: object) -> bool:
        job = document(lane=-1, prompt_tokens=128, remaining=128, arrived_ms=arrived_ms)
        return bool(scheduler().plan(state(stream(1, left, **fields), job), NOW).prefill)

    assert not is_read(30) and not is_read(30, lane=1)
    assert is_read(30, lane=-1), "they are of its own lane"
    assert is_read(30, has_reader=False), "nothing is paced"
    assert is_read(2_000), "that takes too long"
    assert is_read(30, NOW - BACKGROUND_WAITS_MS), "it has waited"


def test_a_prompt_waits_for_no_stream_of_a_lower_lane() -> None:
    assert scheduler().plan(state(stream(1, 30), document(lane=1)), NOW).prefill
    assert not scheduler().plan(state(stream(1, 30, lane=1), document()), NOW).prefill


def test_a_short_prompt_is_read_while_a_document_waits() -> None:
    question = make_row(3, lane=1, prompt_tokens=64, remaining=64, arrived_ms=NOW)
    assert [key for key, _ in scheduler().plan(state(stream(1, 30), document(), question), NOW).prefill] == [3]


def test_what_comes_behind_it_waits_with_a_document_that_has_no_slot_yet() -> None:
    job = make_row(8, prompt_tokens=256, remaining=256, arrived_ms=NOW, due_ms=1.0)
    assert scheduler().plan(state(stream(1, 30), job), NOW).prefill
    assert not scheduler().plan(state(stream(1, 30), job, queued=document()), NOW).prefill


@given(
    left=st.integers(1, 100),
    tokens=st.integers(64, 8_000),
    slowdown=st.floats(0.2, 8.0),
    lane=st.sampled_from([-1, 0]),
)
def test_however_many_streams_follow_a_prompt_waits_for_no_longer_than_it_takes_to_be_read(
    left: int, tokens: int, slowdown: float, lane: int
) -> None:
    machine = attrs.evolve(MACHINE, slowdown=slowdown)
    policy, now = scheduler(machine), NOW
    prompt = document(prompt_tokens=tokens, remaining=tokens, lane=lane)
    least_ms = 1.05 * BACKGROUND_WAITS_MS if lane < 0 else 0.0
    read_ms = sum(machine.prefill_ms(min(512, tokens - at), at) for at in range(0, tokens, 512))
    row = stream(1, left)
    while not (plan := policy.plan(state(row, prompt), now)).prefill:
        assert plan.decode == (1,) and plan.pace_ms == 0.0 and plan.steps <= row.left_tokens
        now += plan.steps * machine.decode_ms(1, 500)
        row.left_tokens -= plan.steps
        row.last_token_ms = now
        if not row.left_tokens:
            row = stream(1, left)
        # What the policy takes for the whole is a guess from one piece of it, and a step is one as well.
        assert now - NOW <= max(least_ms, 1.5 * MOST_WAITED * read_ms)


def test_a_trial_of_rows_one_by_one_is_of_one_step() -> None:
    """Where it takes longer, all steps to come would."""
    policy = scheduler()
    for _ in range(8):
        policy.cost.observe_decode(2, 500, 6.0)
        policy.cost.observe_decode(1, 500, 3.5)
    plans = [policy.plan(state(stream(1, 30), stream(2, 30), document()), NOW) for _ in range(64)]
    assert any(plan.is_trial and plan.steps > 1 for plan in plans)
    assert all(plan.is_one_by_one == plan.is_trial for plan in plans), "together is the faster way here"
