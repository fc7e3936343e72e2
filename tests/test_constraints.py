"""Constraints: the fast test and the thorough one agree, and errors quote any value in short."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma.config import RuntimeConfig
from uma.constraints import MAX_LINES, Json, hints_of, problems, quick_check, show
from uma.types import Message, Request, SamplingParams, Slo

HINTS = [hint for cls in (Message, Request, SamplingParams, Slo, RuntimeConfig) for hint in hints_of(cls).values()]

values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from(
        [2**32, 10**40, "", "x", "a\0b", "\ud800", "x" * 200, "auto", (), ("",), ("x",), (1, True), {}, {1: 2}]
    ),
    st.floats(-3, 3),
    st.lists(st.integers(-1, 40_000) | st.sampled_from([1.0, True, 2**70])).map(tuple),
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    st.sampled_from([Message("user", "x"), (Message("user", "x"),), Slo(), SamplingParams()]),
)


@given(st.sampled_from(HINTS), values)
def test_what_passes_the_sieve_has_no_problem(hint: Any, value: Any) -> None:
    if quick_check(hint)(value):
        assert list(problems(value, hint, "field")) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("token_ids", (1, 31_999)), ("token_ids", None), ("messages", (Message("user", "x"),)), ("priority", -1)],
)
def test_what_most_requests_have_passes_the_sieve(name: str, value: Any) -> None:
    assert quick_check(hints_of(Request)[name])(value)


@given(st.sampled_from(HINTS), values)
def test_every_problem_begins_with_its_path(hint: Any, value: Any) -> None:
    assert all(line.startswith("field") for line in problems(value, hint, "field"))


def test_of_very_many_wrong_token_ids_no_more_are_looked_for_than_are_told() -> None:
    assert len(list(problems((-1,) * 100_000, hints_of(Request)["token_ids"], "token_ids"))) == MAX_LINES + 1


def test_all_wrong_fields_come_in_one_error() -> None:
    with pytest.raises(ValueError, match="top_p") as caught:
        SamplingParams(max_tokens=-1, temperature=3, top_p=float("nan"), seed=True)
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
    ]


def test_among_very_many_token_ids_the_wrong_ones_are_found() -> None:
    with pytest.raises(ValueError, match="token_ids") as caught:
        Request("a", token_ids=[*range(100_000), -1, True])
    assert str(caught.value).splitlines() == [
        "token_ids[100000]: -1 must be 0 or more",
        "token_ids[100001]: expected an integer, not true",
    ]


@pytest.mark.parametrize("value", ["x" * 10**6, list(range(10**5)), tuple(range(10**5)), {"a": "x" * 10**6}])
def test_a_value_is_quoted_in_short(value: Any) -> None:
    assert len(show(value)) <= 60


def test_a_value_nested_deeper_than_python_can_follow_is_quoted_and_judged() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert show(deep) == "[[[[...]]]]"
    assert Json(64).problem({"a": deep}) == "must be nested at most 64 levels deep"


@given(st.recursive(st.none() | st.integers(-5, 5), lambda inner: st.lists(inner, max_size=2), max_leaves=5))
def test_json_counts_levels_of_lists_and_objects(value: Any) -> None:
    def depth(each: Any) -> int:
        return 1 + max(map(depth, each), default=0) if isinstance(each, list) else 0

    assert (Json(2).problem(value) is None) == (depth(value) <= 2)


def test_an_object_with_too_many_members_is_told_with_its_place() -> None:
    crowd = dict.fromkeys("abc", 1)
    assert Json(members=3).problem({"x": [crowd]}) is None
    assert Json(members=2).problem({"x": [{}, crowd]}) == (
        "must have at most 2 members in each object, but .x[1] has 3"
    )
    assert Json(members=2).problem(crowd) == "must have at most 2 members in each object, but it has 3"
