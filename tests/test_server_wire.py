"""The protocol as a stranger meets it: frames made by hand, against the real server process and the built-in model.

Each row of the protocol's error table has its test here or beside the setting that causes it (`test_server_limits`).
"""

from __future__ import annotations

import json
import socket
import struct
from itertools import count
from typing import Any

import pytest

from harness import HELLO, Raw, Serve, ServerProcess, ask, frame, until

STORY = "Once upon a time"


def tokens_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "token"]


# Plain sessions


def test_a_client_of_the_first_phase_gets_tokens_one_eos_and_a_closed_socket(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.send({"id": "a", "prompt": STORY, "max_tokens": 8, "metadata": {"user": 7}, "tempratur": 1})
        *tokens, last = raw.rest()
    assert {event["event"] for event in tokens} == {"token"}
    assert all(set(event) == {"id", "event", "text", "token_id", "metadata"} for event in tokens)
    assert all((event["id"], event["metadata"]) == ("a", {"user": 7}) for event in (*tokens, last))
    assert last["event"] == "eos"
    assert last["reason"] in ("length", "stop")
    assert last["usage"]["completion_tokens"] == len(tokens)
    assert last["usage"]["prompt_tokens"] > 0
    assert any("tempratur" in warning for warning in last["warnings"])


def test_a_request_may_come_byte_by_byte(server: ServerProcess) -> None:
    with server.connect() as raw:
        for byte in frame(ask()):
            raw.send_bytes(bytes([byte]))
        assert raw.rest()[-1]["reason"] == "length"


def test_joined_texts_are_the_text_of_an_unstreamed_answer(server: ServerProcess) -> None:
    # An answer that the model knows by heart: in a story two words can be so near that rounding decides.
    asked = {"id": "a", "messages": [{"role": "user", "content": "What is UMA?"}], "max_tokens": 24}
    with server.connect() as raw:
        raw.send(asked)
        streamed = tokens_of(raw.rest())
    with server.connect() as raw:
        raw.send({**asked, "stream": False})
        events = raw.rest()
    assert len(events) == 1
    assert events[0]["text"] == "".join(event["text"] for event in streamed)
    assert events[0]["token_ids"] == [event["token_id"] for event in streamed]


def test_keep_alive_takes_one_request_after_another(server: ServerProcess) -> None:
    with server.connect() as raw:
        for id in ("a", "b"):
            raw.send(ask(id, keep_alive=True))
            assert raw.last_of(id)["reason"] == "length"
        raw.send(ask("c"))
        assert raw.rest()[-1]["id"] == "c"


def test_a_program_can_name_the_client_that_it_asks_for(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.send({"type": "hello", "versions": ["1.1"]})
        raw.expect("hello")
        raw.send(ask(max_tokens=400, sender={"client": "7", "origin": "a robot", "owner": "its owner"}))
        raw.until_token("a")
        raw.send({"type": "activity", "id": "q"})
        while (event := raw.next())["event"] != "activity":
            pass
        assert [each["origin"] for each in event["running"]] == ["a robot"]
        raw.send({"type": "explain", "id": "e", "request": "a", "sender": {"owner": "another"}})
        assert raw.last_of("e")["code"] == "E_PROTO_BAD_REQUEST"
        raw.send({"type": "explain", "id": "f", "request": "a", "sender": {"owner": "its owner"}})
        while (event := raw.next()).get("id") != "f":
            pass
        assert event["request"]["origin"] == "a robot"


def test_a_client_that_has_said_all_still_gets_its_answer(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.send(ask())
        raw.sock.shutdown(socket.SHUT_WR)
        assert raw.rest()[-1]["reason"] == "length"


def test_a_half_closed_hello_session_ends_when_its_requests_have(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.hello()
        raw.send(ask("a"), ask("b"))
        raw.sock.shutdown(socket.SHUT_WR)
        assert sorted(event["id"] for event in raw.rest() if event["event"] == "eos") == ["a", "b"]


def test_a_client_that_has_said_all_and_then_hangs_up_cancels_what_it_had_running(serve: Serve) -> None:
    server = serve("--max-tokens", "30000")
    with server.connect() as raw:
        raw.send(ask(stream=False, max_tokens=30_000, ignore_eos=True))
        raw.sock.shutdown(socket.SHUT_WR)
        until(server.metrics, lambda metrics: metrics["active_sequences"] == 1)
    assert server.settled()["requests_cancelled"] == 1


# Hello sessions


def test_a_cancel_ends_its_request_alone_with_an_eos_that_says_so(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.hello()
        raw.send(ask("long", max_tokens=400), ask("other", max_tokens=30))
        raw.until_token("long")
        raw.send({"event": "cancel", "id": "long"})
        last: dict[str, dict[str, Any]] = {}
        while len(last) < 2:
            event = raw.next()
            if event["event"] != "token":
                last[event["id"]] = event
    assert last["long"]["reason"] == "cancelled"
    assert 1 <= last["long"]["usage"]["completion_tokens"] < 400
    assert last["other"]["reason"] == "length"


# Queries


def test_health_really_generates_a_token(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.hello()
        raw.send({"type": "health", "id": "h"})
        event = raw.expect("health")
        assert (event["id"], event["status"], event["tokens_generated"]) == ("h", "ok", 1)
        assert event["latency_ms"] > 0
        raw.send({"type": "health", "probe": False})
        event = raw.expect("health")
        assert (event["status"], event["tokens_generated"]) == ("ok", 0)


def test_tokenize_gives_the_ids_that_generate_would_use(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.hello()
        raw.send({"type": "tokenize", "id": "t", "prompt": STORY})
        ids = raw.expect("tokenize")["token_ids"]
        raw.send(ask("by-text", stream=False), {"id": "by-ids", "token_ids": ids, "max_tokens": 8, "stream": False})
        last = {event["id"]: event for event in (raw.expect("eos"), raw.expect("eos"))}
    assert last["by-text"]["usage"]["prompt_tokens"] == last["by-ids"]["usage"]["prompt_tokens"] == len(ids)
    assert last["by-ids"]["token_ids"] == last["by-text"]["token_ids"][: len(last["by-ids"]["token_ids"])]


# Errors, in the order of the table


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        *((struct.pack("<I", length), "E_PROTO_FRAME_TOO_LARGE") for length in (0, 2**20 + 1, 2**32 - 1)),
        (struct.pack("<I", 2_000_000) + b"x" * 2_000_000, "E_PROTO_FRAME_TOO_LARGE"),
        *(
            (frame(payload), "E_PROTO_INVALID_JSON")
            for payload in (b"\xff\xfe{}", b"{", b"null", b"[" * 60_000, b'{"a":' * 100_000, b'{"id":"a","prompt":NaN}')
        ),
        (frame({**HELLO, "versions": ["2.0", "9.1"]}), "E_PROTO_VERSION"),
        (frame({"id": "a", "prompt": STORY, "max_tokens": True}), "E_PROTO_BAD_REQUEST"),
    ],
    ids=count(),
)
def test_what_ends_a_session_is_told_in_one_event(server: ServerProcess, sent: bytes, code: str) -> None:
    with server.connect() as raw:
        raw.send_bytes(sent)
        (event,) = raw.rest()
    assert event["code"] == code


@pytest.mark.parametrize("payload", [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000])
def test_a_payload_of_more_lists_than_any_request_needs_is_refused_and_the_session_goes_on(
    server: ServerProcess, payload: bytes
) -> None:
    with server.connect() as raw:
        raw.hello()
        raw.send(payload)
        refused = raw.next()
        raw.send(ask("a", max_tokens=1))
        last = raw.last_of("a")
    assert refused["code"] == "E_PROTO_BAD_REQUEST" and "lists and objects" in refused["message"]
    assert last["event"] == "eos"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": STORY, "top_p": 7}, "E_PROTO_BAD_REQUEST"),
        ({"token_ids": [1, 2**20]}, "E_PROTO_BAD_REQUEST"),
        ({"token_ids": [5] * 2**15}, "E_LIMIT_PROMPT_TOO_LARGE"),
    ],
)
def test_a_request_that_is_refused_leaves_its_hello_session_and_what_runs_there_alone(
    server: ServerProcess, fields: dict[str, Any], code: str
) -> None:
    with server.connect() as raw:
        raw.hello()
        raw.send(ask("good", max_tokens=20), {"id": "bad", **fields})
        assert raw.last_of("bad")["code"] == code
        assert raw.last_of("good")["reason"] == "length"


def test_one_session_s_requests_end_when_it_hangs_up_and_no_other_s(server: ServerProcess) -> None:
    with server.connect() as stays:
        stays.hello()
        stays.send(ask("stays", max_tokens=150))
        stays.until_token("stays")
        before = server.metrics()["requests_cancelled"]
        leaves = Raw(server.socket)
        leaves.hello()
        leaves.send(*(ask(f"leaves{number}", max_tokens=400) for number in range(4)))
        leaves.until_token("leaves0")
        leaves.sock.close()
        assert stays.last_of("stays")["usage"]["completion_tokens"] == 150
    assert server.settled()["requests_cancelled"] == before + 4


def test_metrics_agree_with_what_clients_counted(server: ServerProcess) -> None:
    before = server.settled()
    with server.connect() as raw:
        raw.hello()
        raw.send(*(ask(f"r{number}", max_tokens=10 + number) for number in range(4)))
        events: list[dict[str, Any]] = []
        while sum(event["event"] == "eos" for event in events) < 4:
            event = raw.next()
            events.append(event)
        raw.send(ask("bad", top_p=7))
        assert raw.last_of("bad")["code"] == "E_PROTO_BAD_REQUEST"
    after = server.settled()
    tokens = tokens_of(events)
    assert len(tokens) == 10 + 11 + 12 + 13
    assert after["tokens_generated_total"] - before["tokens_generated_total"] == len(tokens)
    rise = {name: after[name] - before[name] for name in before if name.startswith("requests_")}
    assert {name: by for name, by in rise.items() if by} == {
        "requests_total": 5,
        "requests_length": 4,
        "requests_rejected": 1,
    }
    prompts = sum(event["usage"]["prompt_tokens"] for event in events if event["event"] == "eos")
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == prompts
    assert after["ttft_ms_count"] - before["ttft_ms_count"] == 4
    assert after["inter_token_ms_count"] - before["inter_token_ms_count"] == len(tokens) - 4


def test_what_is_not_ascii_arrives_whole(server: ServerProcess) -> None:
    with server.connect() as raw:
        payload = json.dumps(ask(prompt="Ein Märchen über 狐狸 🦊"), ensure_ascii=False).encode()
        raw.send(payload)
        assert raw.rest()[-1]["reason"] == "length"
