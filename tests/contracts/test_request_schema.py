"""A frontend's request: taken as Dynamo sends it, refused with every wrong field named."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from contract_world import N_VOCAB, request
from hypothesis import given
from hypothesis import strategies as st

from uma.contracts.request import PreprocessedRequest, is_health_check, parse_request
from uma.contracts.schema import contract_schemas
from uma.errors import BadRequest
from uma.protocol.converter import unknown_fields

SCHEMA = jsonschema.Draft202012Validator(contract_schemas()["PreprocessedRequest"])


def parsed(value: Any, *, strict: bool = True) -> PreprocessedRequest:
    return parse_request(value, n_vocab=N_VOCAB, max_stop_sequences=4, strict=strict)


def refusal(value: Any) -> list[str]:
    with pytest.raises(BadRequest) as refused:
        parsed(value)
    return refused.value.message.splitlines()


def test_a_request_as_dynamo_sends_it_is_taken() -> None:
    made = parsed(request())
    assert made.token_ids == (1, 300, 20)
    assert made.stop_conditions.stop == ("\n",)
    assert made.routing is not None
    assert made.routing.priority == 5
    assert SCHEMA.is_valid(request())


def test_a_health_probe_is_told_by_its_mark() -> None:
    probe = request(_HEALTH_CHECK=True)
    assert is_health_check(probe)
    assert parsed(probe) == parsed(request())
    assert not is_health_check(request())


def sampling(**options: Any) -> dict[str, Any]:
    return request(sampling_options=options)


def stops(**conditions: Any) -> dict[str, Any]:
    return request(stop_conditions=conditions)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (sampling(temperature=5.0), "sampling_options.temperature: 5 must be from 0 to 2"),
        (sampling(top_p=1.5), "sampling_options.top_p: 1.5 must be from 0 to 1"),
        (sampling(top_k=-2), "sampling_options.top_k: -2 must be -1 or more"),
        (sampling(min_p="0.1"), "sampling_options.min_p: expected a number, not '0.1'"),
        (sampling(frequency_penalty=-3), "sampling_options.frequency_penalty: -3 must be from -2 to 2"),
        (sampling(repetition_penalty=0), "sampling_options.repetition_penalty: 0 must be over 0 and at most 2"),
        (sampling(seed=True), "sampling_options.seed: expected an integer, not true"),
        (stops(max_tokens=0), "stop_conditions.max_tokens: 0 must be 1 or more"),
        (stops(stop=[""]), "stop_conditions.stop[0]: '' must have 1 or more characters, not 0"),
        (request(token_ids=[]), "token_ids: must have 1 or more tokens, not 0"),
        (request(token_ids=[3, -1]), "token_ids[1]: -1 must be 0 or more"),
        (request(output_options={"logprobs": -1}), "output_options.logprobs: -1 must be 0 or more"),
        (request(colour="blue"), "colour: is not a field of PreprocessedRequest"),
        (sampling(colour="blue"), "sampling_options.colour: is not a field of PreprocessedRequest"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed_and_the_schema_refuses_it(value: Any, line: str) -> None:
    assert refusal(value) == [line]
    assert not SCHEMA.is_valid(value)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (request(token_ids=[1, N_VOCAB]), f"token_ids[1]: {N_VOCAB} is not in the vocabulary of {N_VOCAB} tokens"),
        (stops(stop=list("abcde")), "stop_conditions.stop: 5 strings are over the limit of 4"),
        (stops(min_tokens=9, max_tokens=8), "stop_conditions.min_tokens: 9 must not be over max_tokens, 8"),
        (sampling(n=3, best_of=2), "sampling_options.best_of: 2 must not be under n, 3"),
        (
            sampling(guided_decoding={"regex": "a", "grammar": "b"}),
            "sampling_options.guided_decoding: give one of json, regex, choice, grammar; "
            "these came: ['regex', 'grammar']",
        ),
    ],
)
def test_what_only_the_backend_can_know_is_refused_by_name(value: Any, line: str) -> None:
    assert refusal(value) == [line]


def test_every_wrong_field_comes_in_one_error() -> None:
    value = request(
        token_ids=[-1],
        sampling_options={"temperature": 3, "top_p": "x", "colour": 1},
        stop_conditions={"max_tokens": 0, "ignore_eos": "yes"},
    )
    places = {line.partition(":")[0] for line in refusal(value)}
    assert places == {
        "token_ids[0]",
        "sampling_options.temperature",
        "sampling_options.top_p",
        "sampling_options.colour",
        "stop_conditions.max_tokens",
        "stop_conditions.ignore_eos",
    }


def test_unknown_fields_of_a_newer_frontend_can_be_ignored_and_are_named() -> None:
    newer = request(colour="blue", sampling_options={"sparkle": 1})
    assert parsed(newer, strict=False).token_ids == (1, 300, 20)
    assert tuple(unknown_fields(newer, PreprocessedRequest)) == ("sampling_options.sparkle", "colour")


@pytest.mark.parametrize("value", [None, [], "x", 7, {}])
def test_what_is_no_request_at_all_is_refused(value: Any) -> None:
    assert refusal(value)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-10, 10)
    | st.floats(allow_nan=False, width=16)
    | st.text("aé{\0", max_size=2),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["json", "regex", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)
SAMPLING_NAMES = sorted(SCHEMA.schema["$defs"]["SamplingOptions"]["properties"])
STOP_NAMES = sorted(SCHEMA.schema["$defs"]["StopConditions"]["properties"])


def has_whole_floats(value: Any) -> bool:
    """Whether a number is written as `1.0`, which a schema takes for an integer and the parser does not."""
    if isinstance(value, dict):
        return any(map(has_whole_floats, value.values()))
    if isinstance(value, list):
        return any(map(has_whole_floats, value))
    return isinstance(value, float) and value.is_integer()


@given(
    st.dictionaries(st.sampled_from(SAMPLING_NAMES), ANYTHING), st.dictionaries(st.sampled_from(STOP_NAMES), ANYTHING)
)
def test_the_schema_refuses_nothing_that_the_parser_takes(sampling: dict[str, Any], stop: dict[str, Any]) -> None:
    value = request(sampling_options=sampling, stop_conditions=stop)
    try:
        parsed(value)
    except BadRequest as refused:
        semantic = ("must not be", "limit of", "give one of", "not in the vocabulary", "holds")
        by_type = [line for line in refused.message.splitlines() if not any(word in line for word in semantic)]
        assert not by_type or has_whole_floats(value) or not SCHEMA.is_valid(value), by_type
    else:
        assert SCHEMA.is_valid(value)
