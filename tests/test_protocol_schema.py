"""The JSON Schemas say what the parser does: both take, and both refuse, the same messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_messages import client_messages, prompt_text, server_events

from uma.constraints import hints_of
from uma.errors import BadRequest
from uma.protocol.codec import encode_event, encode_message, message_of, parse_event, read_object
from uma.protocol.frames import HEADER_BYTES
from uma.protocol.messages import Cancel, ClientMessage, ServerEvent
from uma.protocol.schema import schemas
from uma.types import Request, SamplingParams

SCHEMAS = schemas()
VALIDATORS = {name: jsonschema.Draft202012Validator(schema) for name, schema in SCHEMAS.items()}


def body(frame: bytes) -> Any:
    return json.loads(frame[HEADER_BYTES:])


def name_of_message(fields: Mapping[str, Any]) -> str:
    if "type" not in fields and "event" in fields:
        return str(fields["event"])
    return str(fields.get("type", "generate"))


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_schema_is_one_of_2020_12(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    assert SCHEMAS[name]["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_each_field_of_a_request_is_in_its_schema() -> None:
    of_request = (hints_of(Request).keys() - {"sampling"}) | hints_of(SamplingParams).keys()
    assert SCHEMAS["generate"]["properties"].keys() == of_request | {"type", "keep_alive", "sender"}


def test_a_fields_words_default_and_bounds_are_in_its_schema() -> None:
    assert SCHEMAS["generate"]["properties"]["temperature"] == {
        "anyOf": [{"type": "number", "minimum": 0, "maximum": 2}, {"type": "null"}],
        "description": "Randomness of the choice. 0 is greedy: always the likeliest token.",
    }


@given(client_messages)
def test_every_message_a_client_can_make_is_valid(message: ClientMessage) -> None:
    fields = body(encode_message(message))
    assert list(VALIDATORS[name_of_message(fields)].iter_errors(fields)) == []


@given(server_events)
def test_every_event_a_server_can_make_is_valid(event: ServerEvent) -> None:
    fields = body(encode_event(event))
    assert list(VALIDATORS["event." + fields["event"]].iter_errors(fields)) == []


# Values near the edges of what the fields take. No whole number is written with a point: to JSON Schema 1.0 is an
# integer, to the parser it is not.
near = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from(
        [2**32 - 1, 2**32, -0.5, 0.5, 1.5, 2.5, "", "x", "a\0b", "generate", "cancel", "token", "ok", "stop"]
    ),
    st.sampled_from(["x" * 128, "x" * 129, ["x"] * 16, ["x"] * 17, [[]], [{}], {"a": 1}]),
    st.lists(st.integers(-1, 3) | st.sampled_from(["", "x", True]), max_size=2),
    st.lists(st.fixed_dictionaries({}, optional={"role": prompt_text, "content": st.none() | prompt_text}), max_size=2),
    st.fixed_dictionaries({}, optional={"target_ttft_ms": st.sampled_from([None, -1, 0, 0.5, "x"]), "x": st.none()}),
)


def mutate(data: st.DataObject, fields: dict[str, Any], known: list[str]) -> None:
    for _ in range(data.draw(st.integers(0, 2))):
        name = data.draw(st.sampled_from([*known, "strange"]))
        if name in fields and data.draw(st.booleans()):
            del fields[name]
        else:
            fields[name] = data.draw(near)


def is_taken(parse: Any, fields: Any) -> bool:
    try:
        parse(json.dumps(fields).encode())
    except BadRequest:
        return False
    return True


@given(client_messages, st.data())
def test_parser_and_schema_agree_on_damaged_requests(message: ClientMessage, data: st.DataObject) -> None:
    fields = body(encode_message(message))
    name = name_of_message(fields)
    mutate(data, fields, [each for each in SCHEMAS[name]["properties"] if each not in ("type", "event")])
    assert is_taken(lambda payload: message_of(read_object(payload)), fields) == VALIDATORS[name].is_valid(fields)


@given(server_events, st.data())
def test_parser_and_schema_agree_on_damaged_events(event: ServerEvent, data: st.DataObject) -> None:
    fields = body(encode_event(event))
    name = "event." + fields["event"]
    mutate(data, fields, [each for each in SCHEMAS[name]["properties"] if each != "event"])
    assert is_taken(parse_event, fields) == VALIDATORS[name].is_valid(fields)


@pytest.mark.parametrize("fields", [{"event": "x", "id": "a", "prompt": "x"}, {"event": "cancel", "id": "a"}])
def test_a_frame_with_an_event_and_no_type_is_no_generation_to_either(fields: dict[str, Any]) -> None:
    assert not VALIDATORS["generate"].is_valid(fields)
    try:
        assert isinstance(message_of(dict(fields)), Cancel)
    except BadRequest:
        assert not VALIDATORS["cancel"].is_valid(fields)
