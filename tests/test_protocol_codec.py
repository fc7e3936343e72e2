"""Messages: what is sent is what arrives, and whatever else arrives is refused with every reason in one message."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_messages import N_VOCAB, client_messages, finite, json_values, server_events, text

from uma.constraints import MAX_LINES
from uma.errors import BadRequest, InvalidJson, UmaError
from uma.protocol.codec import (
    encode_event,
    encode_message,
    encode_token,
    fragment,
    id_and_metadata_of,
    message_of,
    parse_event,
    read_object,
)
from uma.protocol.frames import HEADER_BYTES
from uma.protocol.messages import (
    Cancel,
    ClientMessage,
    EndThinking,
    EosEvent,
    Generate,
    HealthQuery,
    Hello,
    MetricsQuery,
    ServerEvent,
    TokenEvent,
    TokenizeEvent,
    TokenizeQuery,
    UnknownEvent,
    carried,
    wire_event,
)
from uma.protocol.schema import schemas
from uma.types import Message, Request, SamplingParams, Slo, Token


def body(frame: bytes) -> bytes:
    length = int.from_bytes(frame[:HEADER_BYTES], "little")
    assert length == len(frame) - HEADER_BYTES
    return frame[HEADER_BYTES:]


def parse_message(payload: bytes, **bounds: Any) -> ClientMessage:
    return message_of(read_object(payload), **bounds)


def parse(fields: Any, **bounds: Any) -> ClientMessage:
    return parse_message(json.dumps(fields).encode(), **bounds)


def generate(**fields: Any) -> Generate:
    message = parse({"id": "a", "prompt": "x", **fields})
    assert isinstance(message, Generate)
    return message


def complaint(fields: Any, **bounds: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        parse(fields, **bounds)
    return caught.value.message


# What is sent is what arrives.


@given(client_messages)
def test_every_client_message_arrives_as_it_was_sent(message: ClientMessage) -> None:
    assert parse_message(body(encode_message(message)), strict=True, n_vocab=N_VOCAB) == message


@given(server_events)
def test_every_event_arrives_as_it_was_sent(event: ServerEvent) -> None:
    assert parse_event(body(encode_event(event))) == event


@given(st.dictionaries(text, json_values, max_size=3))
def test_metadata_written_once_is_the_same_in_every_token(metadata: dict[str, Any]) -> None:
    event = TokenEvent("a", "x", 1, metadata)
    assert encode_token(Token("a", "x", 1), fragment(metadata)) == encode_event(event)


def test_a_request_of_the_plainest_kind_is_taken() -> None:
    assert parse({"id": "1", "prompt": "Hi"}) == Generate(Request("1", prompt="Hi"))


def test_a_request_with_every_field_is_taken() -> None:
    fields = {
        "type": "generate",
        "id": "1",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 5,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "min_p": 0.1,
        "top_k": 40,
        "repetition_penalty": 1.1,
        "frequency_penalty": -1,
        "presence_penalty": 1,
        "seed": 2**32 - 1,
        "stop": ["a", "b"],
        "ignore_eos": True,
        "stream": False,
        "priority": -1,
        "slo": {"target_ttft_ms": 150, "target_tbt_ms": 80.5},
        "metadata": {"user": [1, {"deep": None}]},
        "keep_alive": True,
    }
    sampling = SamplingParams(5, 1, 0.5, 0.9, 40, 0.1, 1.1, -1, 1, 2**32 - 1, ("a", "b"), True)
    request = Request(
        "1",
        messages=(Message("user", "Hi"),),
        sampling=sampling,
        stream=False,
        priority=-1,
        slo=Slo(150, 80.5),
        metadata={"user": [1, {"deep": None}]},
    )
    assert parse(fields, strict=True) == Generate(request, keep_alive=True)


def test_queries_hello_and_cancel_are_taken() -> None:
    assert parse({"type": "metrics"}) == MetricsQuery()
    assert parse({"type": "health", "probe": False, "id": "h"}) == HealthQuery(probe=False, id="h")
    assert parse({"type": "tokenize", "id": "t", "prompt": ""}) == TokenizeQuery(Request("t", prompt=""))
    assert parse({"event": "cancel", "id": "a"}) == Cancel("a")
    assert parse({"event": "answer", "id": "a"}) == EndThinking("a")
    hello = parse({"type": "hello", "versions": ["1.0"], "client": "me/1", "strict": True})
    assert hello == Hello(("1.0",), "me/1", True)


def test_one_stop_string_needs_no_list() -> None:
    assert generate(stop="END").request.sampling.stop == ("END",)


@pytest.mark.parametrize("field", ["messages", "token_ids", "max_tokens", "seed", "metadata"])
def test_null_stands_for_a_field_that_is_not_given(field: str) -> None:
    assert generate(**{field: None}) == generate()


def test_of_a_key_that_comes_twice_the_last_counts() -> None:
    message = parse_message(b'{"id": "a", "id": "b", "prompt": "x", "prompt": "y"}')
    assert message == Generate(Request("b", prompt="y"))


# What is refused, and with which words.


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("id", 1, "expected a string, not 1"),
        ("id", "", "must have 1 to 128 characters, not 0"),
        ("id", "x" * 129, "must have 1 to 128 characters, not 129"),
        ("prompt", ["x"], "expected a string, not ['x']"),
        ("prompt", "a\0b", "holds a NUL"),
        ("max_tokens", -1, "-1 must be 0 or more; without it the engine's limit holds, and a number over"),
        ("max_tokens", 1.5, "expected an integer, not 1.5"),
        ("max_tokens", "5", "expected an integer, not '5'"),
        ("max_tokens", True, "expected an integer, not true"),
        ("min_tokens", -1, "-1 must be 0 or more"),
        ("temperature", 2.1, "2.1 must be from 0 to 2"),
        ("temperature", True, "expected a number, not true"),
        ("min_tokens", None, "expected an integer, not null"),
        ("top_p", -0.1, "-0.1 must be from 0 to 1"),
        ("min_p", 1.01, "1.01 must be from 0 to 1"),
        ("top_k", -2, "-2 must be -1 or more"),
        ("top_k", 1.5, "expected an integer, not 1.5"),
        ("repetition_penalty", 0, "0 must be over 0 and at most 2"),
        ("frequency_penalty", 2.5, "2.5 must be from -2 to 2"),
        ("presence_penalty", -3, "-3 must be from -2 to 2"),
        ("seed", 2**32, "4294967296 must be from 0 to 4,294,967,295"),
        ("seed", 2**64, "expected an integer"),
        ("stop", 5, "expected a string or a list of strings, not 5"),
        ("stop", "", "must have 1 to 1,024 characters"),
        ("stop", ["x"] * 17, "must have 0 to 16 strings, not 17"),
        ("ignore_eos", 1, "expected true or false, not 1"),
        ("stream", "yes", "expected true or false, not 'yes'"),
        ("priority", 2, "expected one of -1, 0, 1, not 2"),
        ("priority", True, "expected one of -1, 0, 1, not true"),
        ("slo", 5, "expected an object, not 5"),
        ("metadata", [], "expected an object, not []"),
        ("keep_alive", 0, "expected true or false, not 0"),
        (
            "type",
            "nope",
            "expected one of generate, hello, metrics, activity, explain, trace, end, pause, models, load, unload, "
            "pin, health, tokenize, embed, rerank, decide, not 'nope'",
        ),
        ("type", None, "expected one of"),
        ("type", {}, "expected one of"),
    ],
)
def test_a_wrong_field_is_named_with_what_came_and_what_is_allowed(field: str, value: Any, allowed: str) -> None:
    line = complaint({"id": "a", "prompt": "x", field: value})
    assert line.startswith(f"{field}: ")
    assert allowed in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"slo": {"target_ttft_ms": 0}}, "slo.target_ttft_ms: 0 must be over 0"),
        ({"prompt": None, "messages": []}, "messages: must have 1 or more messages, not 0"),
        ({"prompt": None, "messages": "hi"}, "messages: expected a list of objects, not 'hi'"),
        ({"prompt": None, "messages": [{"role": "u", "content": "x"}, 3]}, "messages[1]: expected an object, not 3"),
        ({"prompt": None, "messages": [{"role": "u"}]}, "messages[0].content: is required (a string)"),
        ({"prompt": None, "messages": [{"role": "u", "content": "\0"}]}, "messages[0].content: holds a NUL"),
        ({"prompt": None, "messages": [{"role": "\0", "content": ""}]}, "messages[0].role: holds a NUL"),
        ({"prompt": None, "token_ids": []}, "token_ids: must have 1 or more tokens, not 0"),
        ({"prompt": None, "token_ids": [1, True]}, "token_ids[1]: expected an integer, not true"),
        ({"prompt": None, "token_ids": [1, -1]}, "token_ids[1]: -1 must be 0 or more"),
        ({"prompt": None, "token_ids": [0, 999, 1000]}, "token_ids[2]: 1000 is not in the vocabulary (0 to 999)"),
        ({"stop": ["x", ""]}, "stop[1]: '' must have 1 to 1,024 characters"),
        ({"prompt": None}, "prompt: give exactly one of prompt, messages, token_ids; none was given"),
        ({"token_ids": [1]}, "prompt: give exactly one of prompt, messages, token_ids; these came: prompt, token_ids"),
    ],
)
def test_a_wrong_part_of_a_field_is_named_with_its_path(fields: dict[str, Any], line: str) -> None:
    assert complaint({"id": "a", "prompt": "x", **fields}, n_vocab=N_VOCAB).startswith(line)


def test_all_wrong_fields_come_in_one_message_a_line_each() -> None:
    fields = {
        "prompt": 1,
        "token_ids": [5000],
        "max_tokens": -1,
        "slo": {"target_tbt_ms": "fast"},
        "stop": ["", 5],
        "priority": 7,
        "strange": 1,
    }
    lines = complaint(fields, n_vocab=N_VOCAB, strict=True).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "id",
        "prompt",
        "priority",
        "slo.target_tbt_ms",
        "max_tokens",
        "stop[0]",
        "stop[1]",
        "prompt",
        "token_ids[0]",
        "strange",
    ]


def test_of_very_many_wrong_items_the_first_are_told() -> None:
    lines = complaint({"id": "a", "token_ids": ["x"] * 100_000}).splitlines()
    assert len(lines) == MAX_LINES + 1
    assert lines[-1] == "and more that are wrong"
    lines = complaint({"id": "a", "messages": [{}] * 10_000}).splitlines()
    assert len(lines) == MAX_LINES + 1


def test_a_long_value_is_quoted_in_short() -> None:
    assert len(complaint({"id": "a", "prompt": "x", "top_p": "y" * 100_000})) < 200


@pytest.mark.parametrize("fields", [{"event": "cancel"}, {"event": "cancel", "id": 5}, {"event": "token", "id": "a"}])
def test_a_cancel_that_is_none_is_refused(fields: dict[str, Any]) -> None:
    assert complaint(fields).startswith(("id:", "event:"))


@pytest.mark.parametrize("versions", [None, "1.0", [], [1], [""]])
def test_a_hello_without_versions_is_refused(versions: Any) -> None:
    assert complaint({"type": "hello", "versions": versions}).startswith("versions")


# What is ignored, and told.


def test_an_unknown_field_is_ignored_and_named() -> None:
    message = generate(beams=3, slo={"soon": 1}, **{"no identifier": 1})
    assert attrs.evolve(message, warnings=()) == generate()
    assert message.warnings == (
        "beams: unknown field, ignored",
        "slo.soon: unknown field, ignored",
        "'no identifier': unknown field, ignored",
    )


def test_an_unknown_field_of_one_message_is_named_with_its_path() -> None:
    message = parse({"id": "a", "messages": [{"role": "user", "content": "x", "mood": "good"}]})
    assert isinstance(message, Generate)
    assert message.warnings == ("messages[0].mood: unknown field, ignored",)


def test_a_session_of_version_1_0_sees_messages_as_it_always_did() -> None:
    call = {"id": "1", "name": "weather", "arguments": "{}"}
    old = {"role": "user", "content": "x"}
    newer = {**old, "tool_calls": [call], "tool_call_id": 5, "name": "Bo"}
    message = message_of({"id": "a", "messages": [old, newer]}, version="1.0")
    assert isinstance(message, Generate)
    assert message.request.messages == (Message("user", "x"),) * 2
    assert {line.partition(":")[0] for line in message.warnings} == {
        f"messages[1].{name}" for name in ("tool_calls", "tool_call_id", "name")
    }


def test_very_many_unknown_fields_make_a_short_list() -> None:
    warnings = generate(**{f"x{number}": 1 for number in range(1000)}).warnings
    assert len(warnings) == MAX_LINES + 1
    assert warnings[-1] == "and more that are unknown"


def test_what_lies_inside_metadata_is_no_field_of_the_protocol() -> None:
    assert generate(metadata={"prompt": 1, "strange": {"x": 1}}).warnings == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "a", "prompt": "x"},
        {"type": "metrics"},
        {"type": "health"},
        {"type": "tokenize", "id": "t", "prompt": "x"},
        {"type": "hello", "versions": ["1.0"]},
        {"event": "cancel", "id": "a"},
    ],
)
def test_a_strict_session_refuses_an_unknown_field(fields: dict[str, Any]) -> None:
    parse(fields, strict=True)
    assert complaint({**fields, "strange": 1}, strict=True) == "strange: unknown field, and the session is strict"


@pytest.mark.parametrize("kind", ["metrics", "health"])
def test_a_query_tells_what_it_ignored_too(kind: str) -> None:
    message = parse({"type": kind, "strange": 1})
    assert isinstance(message, MetricsQuery | HealthQuery)
    assert message.warnings == ("strange: unknown field, ignored",)


# What is no JSON.


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b" ",
        b"[]",
        b"null",
        b'"text"',
        b"5",
        b"{",
        b"{}{}",
        b"\xff\xfe",
        b'{"id": "\xff"}',
        b'{"id": "\\ud800"}',
        b"\xef\xbb\xbf{}",
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": -Infinity}',
        b"{'id': 1}",
        b'{"id": "a",}',
        b'{"id": "a\0"}',
    ],
)
def test_what_is_no_json_object_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidJson, match="the frame is not"):
        parse_message(payload)
    with pytest.raises(InvalidJson):
        parse_event(payload)


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"9" * 5000, b"48102938475610293847561"])
def test_a_number_that_no_field_holds_is_refused_by_name_and_passes_in_metadata(number: bytes) -> None:
    for field in (b"temperature", b"seed"):
        with pytest.raises(BadRequest, match=f"^{field.decode()}: "):
            parse_message(b'{"id": "a", "prompt": "a", "' + field + b'": ' + number + b"}")
    message = parse_message(b'{"id": "a", "prompt": "a", "metadata": {"n": ' + number + b"}}")
    assert b'"metadata":{"n":' + number + b"}" in encode_message(message)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"id":"a","prompt":[', b'{"metadata":{"a":['])
def test_100_000_levels_of_nesting_are_refused(opening: bytes) -> None:
    with pytest.raises(InvalidJson):
        parse_message(opening * 100_000)
    with pytest.raises(InvalidJson):
        parse_message(b'{"id":"a","prompt":"x","metadata":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001)


@pytest.mark.parametrize("field", ["id", "prompt", "messages", "stop", "slo", "metadata", "type", "strange"])
@pytest.mark.parametrize("levels", [100, 1000, 1020])
def test_nesting_that_json_allows_is_no_crash_in_any_field(field: str, levels: int) -> None:
    deep = b'{"a":' * levels + b"[]" + b"}" * levels
    payload = b'{"id":"a","prompt":"x","%s":%s}' % (field.encode(), deep)
    if field in ("slo", "strange"):  # where it is an unknown field
        assert parse_message(payload)
    else:
        with pytest.raises(BadRequest, match=f"^{field}"):
            parse_message(payload)


def test_metadata_nested_64_levels_is_echoed_and_65_refused() -> None:
    def nested(levels: int) -> Any:
        return {"a": nested(levels - 1)} if levels > 1 else {}

    metadata = generate(metadata=nested(64)).request.metadata
    assert parse_event(body(encode_event(TokenEvent("a", "x", 1, metadata)))) == TokenEvent("a", "x", 1, metadata)
    assert "at most 64 levels" in complaint({"id": "a", "prompt": "x", "metadata": nested(65)})


# What a client cannot send.


@pytest.mark.parametrize("field", ["id", "sampling"])
def test_what_utf_8_cannot_tell_is_refused_before_it_is_sent(field: str) -> None:
    lone = "\ud800"
    fields: dict[str, Any] = {"id": lone} if field == "id" else {"id": "a", "sampling": SamplingParams(stop=(lone,))}
    with pytest.raises(BadRequest, match="cannot be written as JSON"):
        encode_message(Generate(Request(**fields, prompt="x")))


@pytest.mark.parametrize("pad", ["x" * 16_400, [0] * 8_200, [[]] * 6_000, {str(n): n for n in range(2_000)}])
def test_metadata_over_16_kib_is_refused(pad: Any) -> None:
    assert "at most 16,384 bytes" in complaint({"id": "a", "prompt": "x", "metadata": {"pad": pad}})
    with pytest.raises(ValueError, match="at most 16,384 bytes"):
        Request("a", prompt="x", metadata={"pad": pad})


def test_what_is_wrong_with_large_metadata_is_found_without_reading_all_of_it() -> None:
    wide: Any = [[object()] * 10**6] * 10**6
    with pytest.raises(ValueError, match="at most 16,384 bytes"):
        Request("a", prompt="x", metadata={"a": wide})


def test_what_the_converter_has_checked_the_constructors_do_not_check_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class CheckedAgainError(Exception):
        pass

    def check_again(cls: type) -> None:
        raise CheckedAgainError(cls)

    monkeypatch.setattr("uma.constraints._quick_checks_of", check_again)
    turn = {"role": "user", "content": "one"}
    parse({"id": "a", "messages": [turn], "top_k": 12, "slo": {"target_ttft_ms": 37}, "metadata": {"m": 1}})
    parse({"type": "tokenize", "id": "a", "messages": [turn]})
    with pytest.raises(CheckedAgainError):
        Message("user", "one")


@pytest.mark.parametrize(
    "metadata", [{"a": {1}}, {1: 2}, {"a": float("nan")}, {"a": 2**64}, {"a": "\ud800"}, {"a": object()}]
)
def test_metadata_that_json_cannot_carry_is_refused_where_the_request_is_made(metadata: Any) -> None:
    with pytest.raises(ValueError, match=r"metadata: .* JSON cannot carry"):
        Request("a", prompt="x", metadata=metadata)


# What a newer or broken server says.


def test_fields_and_events_of_a_newer_server_are_ignored() -> None:
    assert parse_event(b'{"event":"progress","id":"a","percent":5}') == UnknownEvent("progress", "a")
    assert parse_event(b'{"event":"token","id":"a","text":"x","token_id":1,"new":1}') == TokenEvent("a", "x", 1)
    assert parse_event(b'{"event":"tokenize","id":"a","token_ids":[],"new":1}') == TokenizeEvent("a", ())


@pytest.mark.parametrize(
    "payload",
    [
        b"{}",
        b'{"event":5}',
        b'{"event":"token"}',
        b'{"event":"token","id":"a","text":"x","token_id":true}',
        b'{"event":"token","id":"a","text":"x","token_id":1,"metadata":[]}',
        b'{"event":"eos","id":"a","reason":"tired"}',
        b'{"event":"error","code":5,"message":"x"}',
        b'{"event":"metrics","id":5}',
    ],
)
def test_an_event_that_is_wrong_is_refused(payload: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_event(payload)


def test_an_eos_of_an_older_shape_is_refused_by_its_missing_fields() -> None:
    with pytest.raises(BadRequest) as caught:
        parse_event(b'{"event":"eos","id":"a","reason":"stop"}')
    assert [line.partition(":")[0] for line in caught.value.message.splitlines()] == ["usage", "metrics", "seed"]


# Anything at all.


def parsed(parse: Callable[[bytes], Any], payload: bytes) -> Any:
    """What a payload is to a parser: a message or an event, or one of the two errors that a session can answer."""
    try:
        return parse(payload)
    except (InvalidJson, BadRequest) as error:
        assert error.message
        return error


def is_parsed_or_refused(payload: bytes) -> bool:
    message, event = parsed(parse_message, payload), parsed(parse_event, payload)
    # Whose error it is can be asked of anything that was refused.
    return isinstance(message, ClientMessage | UmaError) and isinstance(event, ServerEvent | UmaError)


@given(st.binary(max_size=200))
def test_random_bytes_parse_or_are_refused(payload: bytes) -> None:
    assert is_parsed_or_refused(payload)


FIELDS = [*schemas()["generate"]["properties"], *schemas()["event.eos"]["properties"], "versions", "code", "message"]
WORDS = ("generate", "hello", "metrics", "health", "tokenize", "cancel", "token", "eos", "error")
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**64 - 1) | finite | text | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=6),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(FIELDS), anything, max_size=10))
def test_random_objects_parse_or_are_refused(fields: dict[str, Any]) -> None:
    assert is_parsed_or_refused(json.dumps(fields).encode())


@given(client_messages | server_events, st.data())
def test_damaged_messages_parse_or_are_refused(message: Any, data: st.DataObject) -> None:
    encode: Any = encode_message if isinstance(message, ClientMessage) else encode_event
    payload = bytearray(body(encode(message)))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    assert is_parsed_or_refused(bytes(payload))


@given(st.one_of(st.text(max_size=130), json_values))
def test_the_id_of_a_refused_frame_is_told_where_it_is_one(id: Any) -> None:
    told, _ = id_and_metadata_of({"id": id})
    is_one = isinstance(id, str) and 1 <= len(id) <= 128
    assert told == (id if is_one else None)


def test_the_metadata_of_a_refused_frame_is_told_where_it_could_have_been_accepted() -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"k": deep}
    assert [id_and_metadata_of({"metadata": each})[1] for each in ({"k": [1]}, [1], "x", None, deep)] == [
        {"k": [1]},
        None,
        None,
        None,
        None,
    ]


def test_an_eos_becomes_the_finished_it_was_made_of() -> None:
    event = parse_event(
        b'{"event":"eos","id":"a","reason":"length","usage":{"prompt_tokens":1,"cached_tokens":0,"completion_tokens":2},'
        b'"metrics":{"queue_ms":0,"prefill_ms":1.5,"decode_ms":2,"ttft_ms":1,"batch_size":1,"tokens_per_second":10,'
        b'"decode_iterations":2},"seed":5,"warnings":["w"],"metadata":{"k":1}}'
    )
    assert isinstance(event, EosEvent)
    assert event == wire_event(EosEvent, carried(event), metadata={"k": 1})
