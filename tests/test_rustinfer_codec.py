"""RustInfer's messages, byte for byte: what its structs say, in all three forms that serde writes them in."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest
import rustinfer_fixture as rust
from hypothesis import given
from hypothesis import strategies as st

from uma.bridges.pieces import TokenFollower
from uma.bridges.rustinfer.codec import (
    BadMessageError,
    RustInferMetricsQuery,
    WireForm,
    decode,
    encode,
    refuse_oversized,
)
from uma.bridges.rustinfer.messages import (
    Answer,
    InferenceMetrics,
    InferenceRequest,
    InferenceResponse,
    RustInferMetrics,
    StreamChunk,
)
from uma.constraints import hints_of
from uma.contracts.load import CacheStats, EngineStats
from uma.types import Token

METRICS = InferenceMetrics(45, 123, 0, 1, 14.5, 7)
RESPONSE = InferenceResponse("a", "Success", "Hello!", (12345, 67890), 7, None, METRICS)
CHUNK = StreamChunk("a", "Token", "Hel", 12345, None, None)
STATS = RustInferMetrics(EngineStats(9, 8, 1, 70, 1.5, 2.5, 3.5, 0, 1024, 2), CacheStats(0.5, 4, 4, 5, 6, 11, 99, 0, 3))


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (InferenceRequest, rust.REQUEST_FIELDS),
        (InferenceMetrics, rust.METRICS_FIELDS),
        (InferenceResponse, rust.RESPONSE_FIELDS),
        (StreamChunk, rust.CHUNK_FIELDS),
        (EngineStats, rust.ENGINE_FIELDS),
        (CacheStats, rust.CACHE_FIELDS),
    ],
)
def test_each_class_has_the_fields_of_its_struct_in_their_order(cls: type, fields: tuple[str, ...]) -> None:
    assert tuple(hints_of(cls)) == fields


@pytest.mark.parametrize(
    ("data", "form"),
    [
        (rust.json_bytes({"Inference": rust.inference()}), WireForm.JSON),
        (b" \n" + rust.json_bytes({"Inference": rust.inference()}), WireForm.JSON),
        (rust.named_bytes({"Inference": rust.inference()}), WireForm.NAMED),
        (rust.compact_bytes(rust.inference()), WireForm.COMPACT),
    ],
)
def test_a_request_is_the_same_in_each_form(data: bytes, form: WireForm) -> None:
    request, found = decode(data)
    assert found is form
    assert isinstance(request, InferenceRequest)
    assert request.prompt == "Once upon a time"
    assert request.max_tokens == 8


@pytest.mark.parametrize("data", [rust.json_bytes("MetricsQuery"), rust.named_bytes("MetricsQuery")])
def test_a_variant_without_data_is_its_name(data: bytes) -> None:
    assert isinstance(decode(data)[0], RustInferMetricsQuery)


def test_json_answers_are_the_bytes_that_serde_writes() -> None:
    metrics = (
        '{"prefill_ms":45,"decode_ms":123,"queue_ms":0,"batch_size":1,"tokens_per_second":14.5,"decode_iterations":7}'
    )
    assert encode(RESPONSE, WireForm.JSON).decode() == (
        '{"Inference":{"request_id":"a","status":"Success","text":"Hello!","tokens":[12345,67890],"num_tokens":7,'
        f'"error":null,"metrics":{metrics}}}}}'
    )
    assert encode(CHUNK, WireForm.JSON).decode() == (
        '{"request_id":"a","chunk_type":"Token","token":"Hel","token_id":12345,"finish_reason":null,"metrics":null}'
    )


@pytest.mark.parametrize("answer", [RESPONSE, CHUNK, STATS])
def test_the_forms_of_an_answer_say_the_same(answer: Answer) -> None:
    as_json = json.loads(encode(answer, WireForm.JSON))
    assert msgpack.unpackb(encode(answer, WireForm.NAMED)) == as_json
    assert rust.from_compact(encode(answer, WireForm.COMPACT)) == as_json


def test_fields_of_a_newer_peer_are_ignored_in_each_form() -> None:
    newer = rust.inference(colour="blue")
    assert (
        decode(rust.json_bytes({"Inference": newer}))[0] == decode(rust.json_bytes({"Inference": rust.inference()}))[0]
    )
    longer = msgpack.packb({"Inference": [*rust.inference().values(), "blue"]})
    assert decode(longer)[0] == decode(rust.compact_bytes(rust.inference()))[0]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"temperature": 3.0}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stream": 1}, "stream"),
        ({"prompt": None}, "prompt"),
    ],
)
def test_a_wrong_field_is_named_and_the_request_s_id_is_told(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(BadMessageError) as refused:
        decode(rust.json_bytes({"Inference": rust.inference(**fields)}))
    assert refused.value.reason.startswith(place)
    assert refused.value.request_id == rust.inference()["request_id"]


def test_a_missing_field_is_named() -> None:
    with pytest.raises(BadMessageError, match="top_p: is required"):
        decode(rust.json_bytes({"Inference": {k: v for k, v in rust.inference().items() if k != "top_p"}}))


def test_an_unknown_variant_is_refused_with_the_id_inside() -> None:
    with pytest.raises(BadMessageError, match="MetricsQuery") as refused:
        decode(rust.named_bytes({"Telepathy": {"request_id": "t-1"}}))
    assert (refused.value.request_id, refused.value.form) == ("t-1", WireForm.NAMED)


@pytest.mark.parametrize("write", [rust.json_bytes, rust.named_bytes])
@pytest.mark.parametrize("order", [1, -1])
def test_an_oversized_message_is_refused_by_its_id_unparsed(write: Any, order: int) -> None:
    fields = rust.inference(prompt="x" * 5_000)
    ordered = dict(list(fields.items())[::order])
    refused = refuse_oversized(write({"Inference": ordered}), 1_000)
    assert refused.request_id == fields["request_id"]
    assert "at most 1,000" in refused.reason


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_refusal(data: bytes) -> None:
    try:
        decode(data)
    except BadMessageError as refused:
        assert refused.reason


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.text("aé", max_size=3),
        lambda i: st.lists(i) | st.dictionaries(st.sampled_from(["Inference", "request_id", "prompt"]), i),
        max_leaves=8,
    )
)
def test_any_value_is_a_message_or_a_refusal(value: Any) -> None:
    for data in (rust.json_bytes(value), rust.named_bytes(value)):
        try:
            decode(data)
        except BadMessageError as refused:
            assert refused.reason


@given(st.lists(st.integers(1, 2), max_size=12), st.booleans())
def test_held_text_is_told_from_a_token_that_repeats(ids: list[int], has_held: bool) -> None:
    events = [Token("a", f"<{index}>", id) for index, id in enumerate(ids)]
    if has_held and ids:
        events.append(Token("a", "held", ids[-1]))
    follower = TokenFollower()
    tokens = [token for event in events for token in follower.take(event)]
    last, rest = follower.finish(len(ids))
    tokens += [last] if last is not None else []
    assert [token.token_id for token in tokens] == ids
    assert rest == ("held" if has_held and ids else "")
    assert "".join(token.text for token in tokens) + rest == "".join(event.text for event in events)
