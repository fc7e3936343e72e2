"""What one HTTP client can send, and that the thread which serves all of them is not held up by it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from engine_world import config_for
from http_server import HostedHttp, RawHttp, hosted_http

from harness import until
from uma.http.dialect import dumps
from uma.http.fields import MAX_MESSAGES
from uma.http.logprobs import chat_form
from uma.net.inline import MAX_POSITIONS, SMALL_BYTES
from uma.protocol.converter import structure

LARGE = 'x"' * (SMALL_BYTES // 2)
CHAT = {"messages": [{"role": "user", "content": LARGE}]}
BODIES: dict[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "max_tokens": 1},
    "/v1/completions": {"prompt": LARGE, "max_tokens": 1},
    "/v1/responses": {"input": LARGE, "max_output_tokens": 1},
    "/v1/messages": {**CHAT, "max_tokens": 1},
    "/v1/messages/count_tokens": CHAT,
    "/api/chat": {**CHAT, "stream": False, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": LARGE, "stream": False, "options": {"num_predict": 1}},
    "/api/show": {"name": None, "strange": LARGE},
    "/completion": {"prompt": LARGE, "n_predict": 1},
    "/tokenize": {"content": LARGE},
    "/detokenize": {"tokens": [1] * SMALL_BYTES},
    "/apply-template": CHAT,
    "/ui/api/answers": {**CHAT, "sampling": {"max_tokens": 1}},
}


@pytest.fixture(scope="module")
def hosted(tiny: Path) -> Iterator[HostedHttp]:
    with hosted_http(config_for(tiny, http="127.0.0.1:0", n_ctx=16_384, store_responses=1.0)) as server:
        yield server


def test_no_large_body_is_read_on_the_trio_thread(hosted: HostedHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[int] = []

    def noted(*args: Any) -> Any:
        readers.append(threading.get_ident())
        return structure(*args)

    monkeypatch.setattr("uma.http.reader.structure", noted)
    trio_thread = hosted.call(threading.get_ident)
    for path, body in BODIES.items():
        assert hosted.ask("POST", path, body).status == 200, path
        assert readers, path
        assert trio_thread not in readers, path
        readers.clear()


def test_nor_is_a_stored_conversation_gone_on_with_or_a_long_answer_written_there(
    hosted: HostedHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers: list[int] = []

    def noted(do: Callable[..., Any]) -> Callable[..., Any]:
        def done(*args: Any) -> Any:
            workers.append(threading.get_ident())
            return do(*args)

        return done

    short = {"max_output_tokens": 1}
    id = hosted.ask("POST", "/v1/responses", {"input": LARGE, **short}).json["id"]
    monkeypatch.setattr("uma.http.reader.structure", noted(structure))
    monkeypatch.setattr("uma.http.stored_responses.dumps", noted(dumps))
    monkeypatch.setattr("uma.http.openai_chat.chat_form", noted(chat_form))
    long = {"max_tokens": MAX_POSITIONS + 1, "ignore_eos": True, "logprobs": True}
    for method, path, body in (
        ("POST", "/v1/responses", {"input": "a", "previous_response_id": id, **short}),
        ("GET", f"/v1/responses/{id}/input_items", None),
        ("POST", "/v1/chat/completions", {**CHAT, **long}),
    ):
        workers.clear()
        assert hosted.ask(method, path, body).status == 200, path
        assert workers, path
        assert hosted.call(threading.get_ident) not in workers, path


def test_the_prompts_of_one_body_leave_the_queue_to_others(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uma.http.generation.MAX_AT_ONCE", 4)
    config = config_for(tiny, http="127.0.0.1:0", max_sequences=4, max_queue=4, max_tokens=30_000)
    with hosted_http(config) as server:
        crowd, other = RawHttp(server.port), RawHttp(server.port)
        crowd.send("POST", "/v1/completions", {"prompt": ["Once"] * 40, "max_tokens": 2_000, "ignore_eos": True})
        until(lambda: server.call(server.engine.snapshot), lambda metrics: metrics["active_sequences"] == 4)
        assert other.ask("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 1}).status == 200
        crowd.close()
        other.close()


def test_a_conversation_of_too_many_messages_is_refused_in_every_dialect(hosted: HostedHttp) -> None:
    messages = [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)
    with hosted.connect() as raw:
        for path, body in BODIES.items():
            if "messages" in body or path == "/v1/responses":
                answer = raw.ask("POST", path, {**body, "messages": messages, "input": messages})
                assert answer.status == 400, path
                assert b"messages" in answer.body, path


def test_an_answer_that_is_being_written_when_the_server_stops_is_written_to_its_end(tiny: Path) -> None:
    config = config_for(tiny, http="127.0.0.1:0", max_tx_bytes=4096, max_tokens=2_000)
    with hosted_http(config) as server:
        raw = RawHttp(server.port, receive_buffer=4096)
        raw.send("POST", "/completion", {"prompt": "a", "n_predict": 1_500, "ignore_eos": True, "n_probs": 20})
        status, headers = raw.head()  # now it is being written, and far more than a connection's buffers hold is left
        server.call(server.gateway.abort)
        data = raw.read(int(headers["content-length"]))
        raw.close()
    assert status == 200
    assert len(json.loads(data)["completion_probabilities"]) == 1_500
