"""The life of a sequence: its table of states, by itself and as the engine really runs through it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from engine_world import Answer, answer, answers, ask, config_for, sequence_for, settled, tokens_for
from hypothesis import given
from hypothesis import strategies as st

from harness import PATIENCE_SEC
from uma import open_engine
from uma.engine.worker.sampling import RowResult, RowSampler, SampledToken
from uma.engine.worker.sequence import Sequence
from uma.engine.worker.status import HAS_SLOT, TRANSITIONS, Change, IllegalTransitionError, Status
from uma.types import Finished


def make_sequence() -> Sequence:
    return sequence_for(ask("x", 4), [1, 2])


# The table


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("change", Change)
def test_a_change_leads_where_the_table_says_or_nowhere(status: Status, change: Change) -> None:
    sequence = make_sequence()
    sequence.status = status
    if change in TRANSITIONS[status]:
        sequence.change(change)
        assert sequence.status is TRANSITIONS[status][change]
    else:
        with pytest.raises(IllegalTransitionError, match=f"{change.name} while {status.name}"):
            sequence.change(change)
        assert sequence.status is status


def test_the_table_names_every_state_and_uses_every_change() -> None:
    assert TRANSITIONS.keys() == set(Status)
    assert {change for row in TRANSITIONS.values() for change in row} == set(Change)


def test_a_life_begins_waiting_and_every_state_can_be_reached_from_there_and_left_by_its_end() -> None:
    reached, new = {make_sequence().status}, {make_sequence().status}
    while new:
        new = {after for status in new for after in TRANSITIONS[status].values()} - reached
        reached |= new
    assert reached == set(Status)
    assert TRANSITIONS[Status.ENDED] == {}
    assert all(row[Change.END] is Status.ENDED for status, row in TRANSITIONS.items() if status is not Status.ENDED)


def test_a_slot_is_gained_by_starting_and_lost_by_preemption_or_the_end_alone() -> None:
    for before, row in TRANSITIONS.items():
        for change, after in row.items():
            if before not in HAS_SLOT:
                assert (after in HAS_SLOT) == (change in {Change.START, Change.RESTORE})
            else:
                assert (after not in HAS_SLOT) == (change in {Change.PREEMPT, Change.END})


@given(st.lists(st.sampled_from(Change), max_size=30))
def test_after_its_end_nothing_happens_to_a_sequence(changes: list[Change]) -> None:
    sequence = make_sequence()
    for change in changes:
        if change in TRANSITIONS[sequence.status]:
            sequence.change(change)
    sequence.status = Status.ENDED
    for change in Change:
        with pytest.raises(IllegalTransitionError):
            sequence.change(change)


# As it runs


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[Status, Change, Status]]]:
    """Every change of every sequence, by its key, in every engine that is opened from now on."""
    found: dict[int, list[tuple[Status, Change, Status]]] = {}
    change = Sequence.change

    def watched(sequence: Sequence, what: Change) -> None:
        before = sequence.status
        change(sequence, what)
        assert (sequence.holding is not None) or sequence.status not in HAS_SLOT
        found.setdefault(sequence.key, []).append((before, what, sequence.status))

    monkeypatch.setattr(Sequence, "change", watched)
    return found


async def test_under_pressure_every_state_is_passed_through_and_every_life_ends(
    tiny: Path, seen: dict[int, list[tuple[Status, Change, Status]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uma.engine.worker.slots.PATIENCE_MS", 0.0)
    common = tokens_for(9, 100)
    async with open_engine(config_for(tiny, n_ctx=1_024, max_sequences=3, tick_budget_ms=1)) as engine:
        with trio.fail_after(PATIENCE_SEC):
            async with engine.generate(ask(tokens_for(8, 10), 300)) as unread:
                # It pauses once its reader has taken nothing for a credit window; others need its slot.
                await answers(engine, [ask(tokens_for(n, 150), 250, id=str(n)) for n in range(4)])
                await answers(engine, [ask((*common, n), 4, id=f"c{n}") for n in range(4)])
                assert isinstance([event async for event in unread][-1], Finished)
        await settled(engine)
    told = {what for life in seen.values() for what in life}
    for life in seen.values():
        assert life[0][0] is Status.WAITING
        assert life[-1][2] is Status.ENDED
        assert all(before[2] is after[0] for before, after in pairwise(life))
    named = {(before, change, after) for before, row in TRANSITIONS.items() for change, after in row.items()}
    assert told <= named
    assert {status for _, _, status in told} == set(Status), "some state was never reached"


# Several tokens in one step


@pytest.mark.parametrize("layout", ["on", "off"])
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_step_that_gives_a_row_several_tokens_gives_the_reader_what_one_by_one_would(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, layout: str, is_streamed: bool
) -> None:
    """As with a grammar that has one continuation: known tokens are given, computed together, and gone on from."""
    requests = [ask(tokens_for(seed, 20), 60 + seed, id=str(seed), stream=is_streamed) for seed in range(3)]
    config = config_for(tiny, kv_unified=layout, n_ctx=4_096, max_sequences=4)
    async with open_engine(config) as engine:
        expected = [await answer(engine, request) for request in requests]
    known = {each.finished.id: ids_of(each) for each in expected}
    extra = 0

    def generous(sequences: Any) -> list[RowResult]:
        nonlocal extra
        given: list[RowResult] = []
        for sequence in sequences:
            ids, at = known[sequence.request.id], sequence.generated
            count = 1 + (at + sequence.key) % 4
            given.append(tuple(SampledToken(token) for token in ids[at : at + count]))
            extra += count - 1
        return given

    plain = RowSampler.sample

    def checked(self: RowSampler, sequences: Any, indices: Any) -> list[RowResult]:
        # What is sampled after several tokens that were computed together is what greedy decoding gives there.
        for sequence, row in zip(sequences, plain(self, sequences, indices), strict=True):
            assert isinstance(row, tuple)
            assert row[0].token == known[sequence.request.id][sequence.generated]
        return generous(sequences)

    monkeypatch.setattr("uma.engine.delivery.pacing.STRIDE_STEPS", 1)
    monkeypatch.setattr(RowSampler, "sample", checked)
    async with open_engine(config) as engine:
        got = await answers(engine, requests)
        metrics = engine.snapshot()
    assert extra > 100
    assert [ids_of(each) for each in got] == [ids_of(each) for each in expected]
    assert [each.text for each in got] == [each.text for each in expected]
    assert [each.finished.usage for each in got] == [
        attrs.evolve(each.finished.usage, cached_tokens=0) for each in expected
    ]
    assert metrics["cache_protected_size"] == 0
    assert metrics["requests_error"] == 0


def ids_of(given: Answer) -> tuple[int, ...]:
    """All tokens of an answer, streamed or not."""
    return given.token_ids if given.finished.token_ids is None else given.finished.token_ids
