"""The protocol as a stranger meets it: frames made by hand, against the real server process and the built-in model.

Each row of the protocol's error table has its test here or beside the setting that causes it (`test_server_limits`).
"""

from __future__ import annotations

import json
import random
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from harness import HELLO, Raw, ServerProcess, ask, frame, running_server, until

STORY = "Once upon a time"


def tokens_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "token"]


# Plain sessions


def test_a_client_of_the_first_phase_gets_tokens_one_eos_and_a_closed_socket(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.send({"id": "a", "prompt": STORY, "max_tokens": 8})
        *tokens, last = raw.rest()
    assert {event["event"] for event in tokens} == {"token"}
    assert all(set(event) == {"id", "event", "text", "token_id"} and event["id"] == "a" for event in tokens)
    assert last["event"] == "eos"
    assert last["reason"] in ("length", "stop")
    assert last["usage"]["completion_tokens"] == len(tokens)
    assert last["usage"]["prompt_tokens"] > 0


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


def test_metadata_comes_back_in_every_event(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.send(ask(metadata={"user": 7}))
        assert all(event["metadata"] == {"user": 7} for event in raw.rest())


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


def test_an_unknown_field_is_named_in_the_warnings(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.send(ask(tempratur=1))
        assert any("tempratur" in warning for warning in raw.rest()[-1]["warnings"])


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


def test_a_client_that_has_said_all_and_then_hangs_up_cancels_what_it_had_running(socket_dir: Path, tiny: Path) -> None:
    flags = ("--model", str(tiny), "--max-tokens", "30000")
    with running_server(socket_dir / "s", *flags) as server:
        with server.connect() as raw:
            raw.send(ask(stream=False, max_tokens=30_000, ignore_eos=True))
            raw.sock.shutdown(socket.SHUT_WR)
            until(server.metrics, lambda metrics: metrics["active_sequences"] == 1)
        assert server.settled()["requests_cancelled"] == 1


# Hello sessions


def test_hello_tells_the_version_the_model_and_the_limits(server: ServerProcess) -> None:
    with server.connect() as raw:
        hello = raw.hello()
    assert hello["version"] == "1.0"
    assert hello["server"].startswith("uma/")
    assert hello["model"]["is_builtin"] is True
    assert hello["limits"]["max_sessions"] == 256


def test_requests_of_one_session_run_at_once_and_are_told_apart_by_id(server: ServerProcess) -> None:
    ids = [f"r{number}" for number in range(8)]
    with server.connect() as raw:
        raw.hello()
        raw.send(*(ask(id, max_tokens=24) for id in ids))
        ended: list[str] = []
        started: list[str] = []
        counts = dict.fromkeys(ids, 0)
        while len(ended) < len(ids):
            event = raw.next()
            if event["event"] == "token":
                counts[event["id"]] += 1
                if event["id"] not in started:
                    started.append(event["id"])
                    assert not ended, "all of them start before the first one ends"
            else:
                assert event["reason"] == "length"
                ended.append(event["id"])
    assert set(counts.values()) == {24}


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


def test_a_cancelled_id_can_be_used_again_after_its_eos(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.hello()
        raw.send(ask("a", max_tokens=400))
        raw.until_token("a")
        raw.send({"event": "cancel", "id": "a"})
        assert raw.last_of("a")["reason"] == "cancelled"
        raw.send(ask("a"))
        assert raw.last_of("a")["reason"] == "length"


def test_cancels_of_unknown_and_finished_ids_are_ignored(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.hello()
        raw.send({"event": "cancel", "id": "never"}, ask("a"))
        raw.last_of("a")
        raw.send({"event": "cancel", "id": "a"}, ask("b"))
        assert raw.last_of("b")["reason"] == "length"


# Queries


def test_metrics_close_a_plain_session(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.send({"type": "metrics"})
        (event,) = raw.rest()
    assert event["event"] == "metrics"
    wanted = {"tokens_generated_total", "batch_calls_total", "last_batch_size", "decode_ms_last", "decode_ms_ewma"}
    assert wanted | {"active_sessions", "kv_cells_used", "kv_cells_total", "ttft_ms_count"} <= set(event)


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


@pytest.mark.parametrize("length", [0, 8_388_609, 2**32 - 1])
def test_a_frame_of_a_bad_length_is_refused_from_its_header_alone(server: ServerProcess, length: int) -> None:
    with server.connect() as raw:
        raw.send_bytes(struct.pack("<I", length))
        (event,) = raw.rest()
    assert event["code"] == "E_PROTO_FRAME_TOO_LARGE"


def test_a_client_that_sends_a_whole_frame_that_is_too_large_still_reads_why(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.send_bytes(struct.pack("<I", 9_000_000) + b"x" * 9_000_000)
        (event,) = raw.rest()
    assert event["code"] == "E_PROTO_FRAME_TOO_LARGE"


@pytest.mark.parametrize(
    "payload", [b"\xff\xfe{}", b"{", b"[]", b"null", b"[" * 60_000, b'{"a":' * 100_000, b'{"id":"a","prompt":NaN}']
)
def test_a_payload_that_is_no_json_object_closes_the_session(server: ServerProcess, payload: bytes) -> None:
    with server.connect() as raw:
        raw.hello()
        raw.send(payload)
        (event,) = raw.rest()
    assert event["code"] == "E_PROTO_INVALID_JSON"


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


def test_every_wrong_field_is_named_and_a_plain_session_closes(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.send({"id": "a", "prompt": STORY, "max_tokens": True, "temperature": 3})
        (event,) = raw.rest()
    assert event["code"] == "E_PROTO_BAD_REQUEST"
    assert event["id"] == "a"
    assert "max_tokens" in event["message"]
    assert "temperature" in event["message"]


def test_a_bad_request_leaves_a_hello_session_and_its_requests_alone(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.hello()
        raw.send(ask("good", max_tokens=20), ask("bad", top_p=7))
        first = raw.last_of("bad")
        assert first["code"] == "E_PROTO_BAD_REQUEST"
        assert raw.last_of("good")["reason"] == "length"


def test_an_id_that_is_running_cannot_be_used_twice(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.hello()
        raw.send(ask("a", max_tokens=200), ask("a"))
        codes = []
        while (event := raw.receive()) is not None:
            if event["event"] == "error":
                codes.append(event["code"])
            if event["event"] == "eos":
                break
    assert codes == ["E_PROTO_BAD_REQUEST"]
    assert event is not None
    assert event["usage"]["completion_tokens"] == 200


def test_strict_sessions_refuse_unknown_fields(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.hello(strict=True)
        raw.send(ask("a", tempratur=1))
        event = raw.last_of("a")
    assert event["code"] == "E_PROTO_BAD_REQUEST"
    assert "tempratur" in event["message"]


def test_token_ids_outside_the_vocabulary_are_a_bad_request(server: ServerProcess) -> None:
    with server.connect() as raw:
        vocab_size = raw.hello()["model"]["vocab_size"]
        raw.send({"id": "a", "token_ids": [1, vocab_size]})
        assert raw.last_of("a")["code"] == "E_PROTO_BAD_REQUEST"


def test_a_second_request_on_a_busy_plain_session_is_refused_and_the_first_goes_on(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.send(ask("first", max_tokens=60), ask("second"))
        events = raw.rest()
    errors = [event for event in events if event["event"] == "error"]
    assert [event["code"] for event in errors] == ["E_PROTO_BUSY"]
    assert events[-1]["id"] == "first"
    assert events[-1]["usage"]["completion_tokens"] == len(tokens_of(events)) == 60


def test_a_version_without_a_common_major_closes_the_session(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.send({**HELLO, "versions": ["2.0", "9.1"]})
        (event,) = raw.rest()
    assert event["code"] == "E_PROTO_VERSION"


def test_a_prompt_over_the_context_is_refused_and_the_session_stays(server: ServerProcess) -> None:
    with server.connect() as raw:
        n_ctx = raw.hello()["limits"]["n_ctx"]
        raw.send({"id": "a", "token_ids": [5] * n_ctx})
        assert raw.last_of("a")["code"] == "E_LIMIT_PROMPT_TOO_LARGE"
        raw.send(ask("b"))
        assert raw.last_of("b")["reason"] == "length"


def test_random_bytes_get_an_error_and_an_end(server: ServerProcess) -> None:
    noise = random.Random(7)
    for _ in range(30):
        with server.connect() as raw:
            raw.send_bytes(noise.randbytes(noise.randrange(4, 200)))
            raw.sock.shutdown(socket.SHUT_WR)
            # (The first four bytes are a length, and none of these is that of a frame.)
            assert [event.get("code") for event in raw.rest()] == ["E_PROTO_FRAME_TOO_LARGE"]
    assert server.metrics()["event"] == "metrics"


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
