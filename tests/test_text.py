"""From bytes to text that may be shown, at any split of characters and stop strings over tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from uma.engine.delivery.detokenize import TextStream


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """`data` in pieces, as if each were a token; pieces may be empty."""
    edges = [0, *sorted(min(at, len(data)) for at in cuts), len(data)]
    return [data[start:stop] for start, stop in pairwise(edges)]


def shown(pieces: Sequence[bytes], stops: Sequence[str] = ()) -> tuple[str, bool]:
    """All text that a stream gives out for these pieces, and whether a stop string ended it."""
    stream = TextStream(stops)
    text = ""
    for piece in pieces:
        text += stream.push(piece)
        if stream.stopped:
            return text, True
    return text + stream.finish(), stream.stopped


def until_first_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The plain definition: read character by character; whichever stop string is complete first ends the text."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


CUTS = st.lists(st.integers(0, 60), max_size=20)
FEW_LETTERS = st.text(alphabet="abé", max_size=30)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=4)


@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode), CUTS)
@example(b"\xc3", [1])
@example(b"\xe2\x82", [1])
@example(b"\xf0\x9f\xa6a", [1, 2, 3])
@example(b"\xc3\xe2\x82\xac", [1])
def test_any_split_of_bytes_gives_their_text_with_replacement_characters_for_malformed_ones(
    data: bytes, cuts: list[int]
) -> None:
    assert shown(cut(data, cuts)) == (data.decode("utf-8", "replace"), False)


@given(st.text(max_size=40), CUTS)
def test_every_character_is_shown_with_the_token_that_completes_it(text: str, cuts: list[int]) -> None:
    stream, so_far = TextStream(), b""
    given_out = ""
    for piece in cut(text.encode(), cuts):
        so_far += piece
        given_out += stream.push(piece)
        assert given_out == so_far.decode("utf-8", "ignore")


@given(FEW_LETTERS, STOPS, CUTS)
@example("xabc", ["abc", "xabcd", "ab"], [1, 2, 3])
@example("xabc", ["ab", "xabc"], [3])
@example("xabc", ["ab", "xabc"], [])
@example("aaab", ["aab"], [1, 2, 3])
@example("abc", ["abcd"], [1, 2])
def test_stop_strings_end_the_text_as_if_it_were_read_at_once(text: str, stops: list[str], cuts: list[int]) -> None:
    assert shown(cut(text.encode(), cuts), stops) == until_first_stop(text, stops)


@given(FEW_LETTERS, STOPS, CUTS)
def test_nothing_that_may_become_a_stop_string_is_shown_and_nothing_else_is_held(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    stream, so_far, given_out = TextStream(stops), b"", ""
    for piece in cut(text.encode(), cuts):
        so_far += piece
        given_out += stream.push(piece)
        if stream.stopped:
            return
        whole = so_far.decode("utf-8", "ignore")
        ends = (whole[len(whole) - size :] for size in range(len(whole) + 1))
        longest = max(len(end) for end in ends if any(stop.startswith(end) for stop in stops))
        assert given_out == whole[: len(whole) - longest]


@given(FEW_LETTERS, STOPS, CUTS)
def test_the_stop_string_that_ended_the_text_is_told(text: str, stops: list[str], cuts: list[int]) -> None:
    stream, given_out = TextStream(stops), ""
    for piece in cut(text.encode(), cuts):
        given_out += stream.push(piece)
        if stream.stopped:
            break
    assert (stream.stopped_by in stops) == stream.stopped
    assert not stream.stopped or text.startswith(given_out + (stream.stopped_by or ""))


@pytest.mark.parametrize("stop", ["\ufffd", "a\ufffd"])
def test_a_stop_string_that_the_end_completes_still_ends_the_text(stop: str) -> None:
    stream = TextStream([stop])
    assert stream.push(b"xa\xc3") == ("x" if stop == "a\ufffd" else "xa")
    assert stream.finish() == ""
    assert stream.stopped


def test_a_token_costs_the_same_however_long_the_stop_strings_and_however_much_of_them_has_come() -> None:
    stops = ["ab" * size + "c" for size in range(496, 512)]
    stream, calls = TextStream(stops), 0

    def count_call(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        for _ in range(1_000):  # the text ends with nearly all of each stop string, and never has its last character
            stream.push(b"ab")
    finally:
        sys.setprofile(None)
    assert not stream.stopped
    assert calls <= 6 * len(stops) * 2_000
