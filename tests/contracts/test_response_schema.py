"""A backend's output: consistent with itself and with all before it, or it does not leave the backend."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from contract_world import N_VOCAB, last_output
from hypothesis import given
from hypothesis import strategies as st

from uma.contracts.parse import parse
from uma.contracts.response import BackendOutput, CompletionUsage, OutputChecker, problems_of
from uma.contracts.schema import contract_schemas
from uma.errors import BadRequest, ContractViolation
from uma.protocol.converter import unstructure

SCHEMA = jsonschema.Draft202012Validator(contract_schemas()["BackendOutput"])


def parse_output(value: Any) -> BackendOutput:
    output = parse(value, BackendOutput)
    if wrong := list(problems_of(output)):
        raise BadRequest(*wrong)
    return output


def usage(prompt: int, completion: int) -> CompletionUsage:
    return CompletionUsage(prompt, completion, prompt + completion)


def end(reason: Any, completion: int, prompt: int = 3) -> BackendOutput:
    return BackendOutput((), finish_reason=reason, completion_usage=usage(prompt, completion))


def checked(*outputs: BackendOutput) -> tuple[BackendOutput, ...]:
    checker = OutputChecker(N_VOCAB, prompt_tokens=3)
    return tuple(map(checker.check, outputs))


def violation(*outputs: BackendOutput) -> str:
    checker = OutputChecker(N_VOCAB, prompt_tokens=3)
    for output in outputs[:-1]:
        checker.check(output)
    with pytest.raises(ContractViolation) as broken:
        checker.check(outputs[-1])
    return broken.value.message


def test_an_answer_whose_parts_add_up_passes() -> None:
    in_pieces = BackendOutput((5,), text="a"), BackendOutput((6,), text="b"), end("stop", 2)
    whole = BackendOutput((5, 6), text="ab", finish_reason="length", completion_usage=usage(3, 2))
    assert checked(*in_pieces) == in_pieces
    assert checked(whole) == (whole,)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"token_ids": [-1]}, "token_ids[0]: -1 must be 0 or more"),
        ({"token_ids": "12"}, "token_ids: expected a list of integers, not '12'"),
        ({"log_probs": [-1.0]}, "log_probs: 1 entries for 0 token_ids"),
        (
            {"completion_usage": {"prompt_tokens": 3, "completion_tokens": -2, "total_tokens": 1}},
            "completion_usage.completion_tokens: -2 must be 0 or more",
        ),
        (
            {"completion_usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 6}},
            "completion_usage.total_tokens: 6 is not 3 + 2",
        ),
        (
            {"finish_reason": "bored"},
            "finish_reason: expected one of 'stop', 'length', 'eos', 'cancelled', 'error', 'content_filter', "
            "not 'bored'",
        ),
        ({"finish_reason": None}, "completion_usage: comes before the finish_reason"),
    ],
)
def test_a_wrong_output_is_refused_by_name(wrong: dict[str, Any], line: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_output(last_output(**wrong))
    assert refused.value.message == line


def test_more_cached_tokens_than_prompt_tokens_are_refused() -> None:
    output = last_output()
    output["completion_usage"]["prompt_tokens_details"] = {"cached_tokens": 4}
    with pytest.raises(BadRequest, match="cached_tokens: 4 of 3 prompt tokens"):
        parse_output(output)


def test_a_token_beyond_the_vocabulary_does_not_leave() -> None:
    assert f"{N_VOCAB} is not in the vocabulary" in violation(BackendOutput((N_VOCAB,), text="?"))


def test_length_without_a_token_does_not_leave() -> None:
    assert "length, but no token was generated" in violation(end("length", 0))


def test_usage_that_does_not_match_what_came_does_not_leave() -> None:
    assert "3, but 1 token_ids came" in violation(BackendOutput((5,)), end("stop", 3))
    assert "4, but the prompt has 3" in violation(BackendOutput((5,)), end("stop", 1, prompt=4))
    assert "is required" in violation(BackendOutput((5,), finish_reason="stop"))


def test_nothing_comes_after_the_end() -> None:
    assert "after the finish_reason" in violation(BackendOutput((5,)), end("stop", 1), BackendOutput((6,)))


def test_an_output_that_was_refused_counts_for_nothing() -> None:
    checker = OutputChecker(N_VOCAB, prompt_tokens=3)
    with pytest.raises(ContractViolation):
        checker.check(BackendOutput((N_VOCAB, 1)))
    checker.check(BackendOutput((5,)))
    checker.check(end("stop", 1))


@given(st.lists(st.lists(st.integers(0, N_VOCAB - 1), max_size=3), max_size=4), st.sampled_from(["stop", "length"]))
def test_any_true_answer_passes_and_comes_back_from_json(parts: list[list[int]], reason: Any) -> None:
    count = sum(map(len, parts))
    outputs = [BackendOutput(tuple(part), text="x" * len(part)) for part in parts]
    if reason == "length" and count == 0:
        reason = "stop"
    outputs.append(end(reason, count))
    checked(*outputs)
    for output in outputs:
        fields = {"token_ids": list(output.token_ids), **unstructure(output)}
        assert SCHEMA.is_valid({**fields, "token_ids": list(output.token_ids)})
        assert parse_output(fields | {"token_ids": list(output.token_ids)}) == output
