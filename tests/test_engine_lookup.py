"""Prompt look-up, by itself: what is guessed is what came before, and probabilities follow what was accepted."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from uma.engine.worker.drafts.drafter import Calibration
from uma.engine.worker.drafts.lookup import MAX_AGREED, NGRAM, Lookup

texts = st.lists(st.integers(0, 3), max_size=80)


@given(texts, texts)
def test_taken_in_at_once_or_one_by_one_a_guess_is_what_came_after_the_same_tokens(
    begun: list[int], more: list[int]
) -> None:
    lookup = Lookup(begun)
    for token in more:
        lookup.push(token)
    text = begun + more
    guess = lookup.guess(1)
    places = range(len(text) - NGRAM)
    followers = {text[at + NGRAM] for at in places if text[at : at + NGRAM] == text[-NGRAM:]}
    assert bool(guess) == bool(followers), "only where these tokens came before"
    assert not guess or guess[0] in followers
    probabilities = lookup.probabilities(8)
    assert all(1 >= before >= after >= 0 for before, after in itertools.pairwise(probabilities))


@given(st.lists(st.integers(0, 9), min_size=NGRAM, max_size=9, unique=True), st.integers(1, 30))
def test_what_repeats_at_once_is_guessed_to_go_on(period: list[int], count: int) -> None:
    lookup = Lookup(period * 3)
    assert lookup.guess(count) == (period * 40)[:count]


def test_probabilities_fall_with_guesses_that_are_wrong_and_rise_with_those_that_are_right() -> None:
    good, bad = Lookup([1, 2, 3] * 4), Lookup([1, 2, 3] * 4)
    before = good.probabilities(4)
    for token in [1, 2, 3] * 30:
        good.push(token)
    for number in range(60):
        for token in (1, 2, 10 + number):
            bad.push(token)
    for token in (1, 2, 3):
        bad.push(token)
    assert good.agreed == MAX_AGREED
    assert good.probabilities(4)[3] > before[3] > bad.probabilities(4)[3]


def test_a_new_text_begins_with_what_others_have_shown() -> None:
    of_all = Calibration()
    first = Lookup([1, 2, 3] * 4, of_all)
    before = first.probabilities(4)
    for token in [1, 2, 3] * 30:
        first.push(token)
    assert Lookup([1, 2, 3] * 4, of_all).probabilities(4)[3] > before[3]
    assert Lookup([1, 2, 3] * 4).probabilities(4) == before
