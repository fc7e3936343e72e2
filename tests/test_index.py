"""The index of token sequences against a plain list that is searched from end to end."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from uma.engine.kv.prefix_index import PrefixIndex
from uma.engine.kv.prefix_tree import common_length

TOKENS = st.lists(st.sampled_from((0, 1, 255, 256, 70_000)), min_size=1, max_size=6).map(tuple)
"""Ids that sort differently as numbers, as big-endian and as little-endian bytes."""
Tokens = tuple[int, ...]


def made_of(every: list[Tokens], gone: list[Tokens]) -> tuple[PrefixIndex[Tokens], set[Tokens]]:
    index: PrefixIndex[Tokens] = PrefixIndex()
    for tokens in every:
        index.put(array("i", tokens), tokens)
    for tokens in gone:
        index.discard(array("i", tokens))
    return index, set(every) - set(gone)


def common(left: Tokens, right: Tokens) -> int:
    return common_length(array("i", left), array("i", right))


@given(st.lists(TOKENS), st.lists(TOKENS), TOKENS)
def test_it_answers_as_a_search_through_all_would(every: list[Tokens], gone: list[Tokens], asked: Tokens) -> None:
    index, kept = made_of(every, gone)
    key = array("i", asked)
    assert len(index) == len(kept)
    assert set(index) == kept
    assert index.get(key) == (asked if asked in kept else None)
    is_covered = index.covering(key, lambda _, common: common) is not None
    assert is_covered == any(each[: len(asked)] == asked for each in kept)
    beginnings = sorted((each for each in kept if asked[: len(each)] == each), key=len, reverse=True)
    assert list(index.beginnings(key)) == [(each, len(each)) for each in beginnings]


@given(st.lists(TOKENS), TOKENS)
def test_what_is_most_useful_leaves_the_last_token_to_be_computed(every: list[Tokens], asked: Tokens) -> None:
    index, kept = made_of(every, [])
    key, most = array("i", asked), len(asked) - 1
    found = index.most_useful(key, lambda _, common: common)
    assert (found[1] if found else 0) == max((min(common(each, asked), most) for each in kept), default=0)
    whole = index.most_useful(key, lambda item, common: len(item) if common == len(item) else 0)
    fitting = [len(each) for each in kept if len(each) <= most and asked[: len(each)] == each]
    assert (whole[1] if whole else 0) == max(fitting, default=0)
    assert whole is None or len(whole[0]) == whole[1]


def test_an_item_put_again_takes_the_place_of_the_old_one() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.put(array("i", [1, 2]), "old")
    index.put(array("i", [1, 2]), "new")
    assert list(index) == ["new"]
    assert index.most_useful(array("i", [1, 2, 3]), lambda _, common: common) == ("new", 2)
