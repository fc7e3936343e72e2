"""Equal shares among clients: none is kept from its turn by how much another asks for."""

from __future__ import annotations

from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_world import Machine, World, make_row

from uma.engine.policy.order import in_order
from uma.engine.policy.state import MAX_PAST, FairShares

BATCH = 512


@settings(max_examples=25)
@given(
    st.lists(st.integers(128, 900), min_size=1, max_size=4),
    st.lists(st.integers(128, 900), min_size=1, max_size=4),
    st.integers(2, 6),
    st.integers(2, 6),
)
def test_two_clients_that_always_have_prompts_waiting_have_had_the_same_but_for_two_prompts_and_batches(
    one: list[int], other: list[int], one_at_once: int, other_at_once: int
) -> None:
    world = World.of_known(Machine())
    asks = {"one": (cycle(one), one_at_once), "other": (cycle(other), other_at_once)}
    shares = {client: world.shares.came(client) for client in asks}
    for _ in range(150):
        for client, (sizes, at_once) in asks.items():
            waiting = [each for each in world.running.values() if each.row.fair_share is shares[client]]
            for _ in range(at_once - len([each for each in waiting if each.row.prefill_left])):
                world.ask(next(sizes), 1, client=client)
        world.tick()
        apart = abs(shares["one"].level - shares["other"].level)
        assert apart <= 2 * (max(*one, *other) + BATCH)


@pytest.mark.parametrize("prompt", [40, 200])
def test_an_editor_waits_for_one_prompt_of_a_program_that_has_fifty(prompt: int) -> None:
    def first_ms(others: int) -> float:
        world = World.of_known(Machine())
        for _ in range(others):
            world.ask(prompt, 1, client="program")
        for _ in range(5 if others else 0):
            world.tick()
        editor = world.ask(100, 1, client="editor")
        world.run([editor])
        return editor.given_ms[0] - editor.row.arrived_ms

    batch_ms = Machine().prefill_ms(BATCH, 0)
    assert first_ms(50) <= 2 * first_ms(0) + batch_ms


@settings(max_examples=25)
@given(st.integers(1_000, 4_000), st.integers(1, 200))
def test_a_long_prompt_is_read_although_new_clients_keep_coming(long: int, short: int) -> None:
    world = World.of_known(Machine())
    asked, others = world.ask(long, 1, client="long"), 0
    while not asked.is_done:
        others += 1
        assert others * short <= 2 * long + BATCH + short * 100, "the long prompt starved"
        world.ask(short, 1, client=f"new {others}")
        world.tick()


def test_what_comes_from_the_cache_costs_nothing_and_an_answer_costs_its_tokens() -> None:
    shares = FairShares()
    cached, fresh = shares.came("cached"), shares.came("fresh")
    fresh.was_read(300)
    cached.was_read(10)
    cached.was_given(100)
    rows = [make_row(key, prefill_left=50, fair_share=share) for key, share in ((1, fresh), (2, cached))]
    assert [row.key for row in in_order(rows, 0.0)] == [2, 1]
    cached.was_given(400)
    assert [row.key for row in in_order(rows, 0.0)] == [1, 2]


def test_a_client_that_comes_anew_does_not_catch_up_on_what_it_did_not_ask_for() -> None:
    shares = FairShares()
    first = shares.came("first")
    first.was_read(5_000)
    new = shares.came("new")
    rows = [make_row(1, prefill_left=100, fair_share=first), make_row(2, prefill_left=200, fair_share=new)]
    assert [row.key for row in in_order(rows, 0.0)] == [1, 2]


def test_lanes_come_before_shares_and_deadlines_after_them() -> None:
    shares = FairShares()
    much, little = shares.came("much"), shares.came("little")
    much.was_read(1_000)
    little.level = 0.0
    rows = [
        make_row(1, lane=0, prefill_left=10, fair_share=little, due_ms=9.0),
        make_row(2, lane=0, prefill_left=10, fair_share=little, due_ms=5.0),
        make_row(3, lane=1, prefill_left=10, fair_share=much),
        make_row(4, lane=-1, prefill_left=10, fair_share=little),
        make_row(5, lane=0, prefill_left=10, fair_share=much),
    ]
    assert [row.key for row in in_order(rows, 0.0)] == [3, 2, 1, 5, 4]


def test_nothing_is_remembered_of_clients_once_nobody_waits() -> None:
    shares = FairShares()
    share = shares.came("one")
    share.was_given(1_000)
    shares.left(share)
    assert shares.came("one").level == 0.0


def test_fifty_thousand_clients_that_come_and_go_beside_a_lasting_stream_leave_little_behind() -> None:
    shares = FairShares()
    lasting = shares.came("lasting")
    for number in range(50_000):
        share = shares.came(("127.0.0.1", number))
        share.was_read(50)
        share.was_given(40)
        shares.left(share)
    assert len(shares) <= MAX_PAST + 1
    shares.left(lasting)
    assert len(shares) == 0


def test_a_client_that_returns_at_once_has_had_what_it_had() -> None:
    shares = FairShares()
    shares.came("lasting").was_read(100)
    greedy = shares.came("greedy")
    greedy.was_given(5_000)
    shares.left(greedy)
    assert shares.came("greedy").level == 5_100
    assert shares.came("new").level == 100
