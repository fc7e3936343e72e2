"""Whether readers that were served are expected back: claims about the policy alone."""

from __future__ import annotations

from uma.engine.policy.returns import NEXT_REQUEST_MS, Returns

NOW = 50_000.0


def test_a_reader_that_cancelled_was_served_and_says_nothing_of_readers() -> None:
    returns = Returns()
    returns.ended(NOW, is_whole=False)
    assert returns.next_expected_since_ms(NOW) == NOW, "it was served, and can ask for something else"
    assert returns.next_expected_since_ms(NOW + NEXT_REQUEST_MS + 1) < NOW and returns.are_usual(
        NOW + NEXT_REQUEST_MS + 1
    )


def test_a_reader_is_expected_for_a_while_also_where_it_is_back_already() -> None:
    returns = Returns()
    assert returns.next_expected_since_ms(NOW) < NOW, "none was served"
    returns.ended(NOW)
    returns.came(NOW + 1)
    assert returns.next_expected_since_ms(NOW + NEXT_REQUEST_MS) == NOW
    assert returns.next_expected_since_ms(NOW + NEXT_REQUEST_MS + 1) < NOW


def test_readers_that_do_not_ask_again_soon_are_not_expected_until_others_have() -> None:
    returns, now = Returns(), NOW
    for _ in range(4):
        returns.ended(now)
        now += NEXT_REQUEST_MS + 1
    returns.ended(now)
    assert not returns.are_usual(now) and returns.next_expected_since_ms(now) < now
    for _ in range(4):
        returns.ended(now)
        returns.came(now + NEXT_REQUEST_MS / 2)
        now += NEXT_REQUEST_MS
    returns.ended(now)
    assert returns.are_usual(now) and returns.next_expected_since_ms(now) == now


def test_a_crowd_that_leaves_together_counts_as_one_reader_that_does() -> None:
    returns = Returns()
    for _ in range(64):
        returns.ended(NOW)
    later_ms = NOW + NEXT_REQUEST_MS + 1
    assert returns.are_usual(later_ms)
    returns.ended(later_ms)
    assert returns.next_expected_since_ms(later_ms) == later_ms
