"""Requests that run, as their owner sees them over HTTP: listed, ended, and told to answer, streamed or not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from http_server import Answered, HttpServer, RawHttp, running_http
from script_model import write_script_model

from harness import short_directory, until
from models import CHATML
from uma.client import connect
from uma.errors import Ended
from uma.http.keys import add
from uma.types import Request, SamplingParams

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ASKED = [{"role": "user", "content": "Go."}]
LONG = 6_000
"""Tokens of an answer that nobody waits for."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    return path, add(path, "ada"), add(path, "bob")


@pytest.fixture(scope="module")
def server(keys: tuple[Path, str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Its model thinks for ever."""
    thinks = CHATML + "{# <think></think> #}"
    endless: dict[str, Any] = {"is_endless": True, "context_length": 16_384}
    path = tmp_path_factory.mktemp("model") / "endless.gguf"
    model = write_script_model(path, ("<think>", "hm "), template=thinks, **endless)
    flags = ("--model", str(model), "--http-keys", str(keys[0]), "--threads", "1")
    with short_directory() as directory, running_http(directory, *flags) as server:
        yield server


def ask(server: HttpServer, method: str, path: str, key: str, body: Any = None) -> Answered:
    return server.ask(method, path, body, authorization=f"Bearer {key}")


def listed(server: HttpServer, key: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask(server, "GET", "/v1/requests", key).json["data"]
    return found


def running(server: HttpServer, key: str) -> dict[str, Any]:
    """The one request of this key, as soon as it generates."""
    while not (found := [each for each in listed(server, key) if each.get("generated_tokens")]):
        pass
    (one,) = found
    return one


def test_an_unstreamed_request_is_listed_and_told_to_answer_by_its_owner_alone(
    server: HttpServer, keys: tuple[Path, str, str]
) -> None:
    _, ada, bob = keys
    body = {"messages": ASKED, "max_tokens": 600, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, "POST", CHAT, ada, body)
        told = running(server, ada)
        assert told["object"] == "request" and "key ada" in told["origin"]
        assert listed(server, bob) == []
        path = f"/v1/requests/{told['id']}"
        assert ask(server, "POST", f"{path}/answer", bob).status == 404
        assert ask(server, "DELETE", path, bob).status == 404
        assert ask(server, "POST", f"{path}/answer", ada).status == 200
        message = asked.result().json["choices"][0]["message"]
    assert message["reasoning_content"] and message["content"]
    assert listed(server, ada) == []
    assert ask(server, "DELETE", path, ada).status == 404


def test_a_request_is_explained_to_its_owner_alone_while_it_runs_and_after_its_end(
    server: HttpServer, keys: tuple[Path, str, str]
) -> None:
    _, ada, bob = keys
    body = {"messages": ASKED, "max_tokens": LONG, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, "POST", CHAT, ada, body)
        path = f"/v1/requests/{running(server, ada)['id']}"
        runs = ask(server, "GET", path, ada).json
        assert ask(server, "GET", path, bob).status == 404
        assert ask(server, "DELETE", path, ada).status == 200
        asked.result()
    assert runs["object"] == "request" and runs["now"]["id"] == runs["id"] and "reason" not in runs
    ended = until(lambda: ask(server, "GET", path, ada).json, lambda told: "reason" in told)
    assert ended["reason"] == "cancelled" and "now" not in ended
    assert ended["generated_tokens"] >= runs["generated_tokens"] > 0
    assert ended["spent_ms"]["write"] > 0
    assert ask(server, "GET", path, bob).status == 404
    assert ask(server, "GET", "/v1/requests/" + "0" * 24, ada).status == 404


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_its_owner_ends_an_unstreamed_request_which_is_told_so(
    server: HttpServer, keys: tuple[Path, str, str], path: str
) -> None:
    ada = keys[1]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, "POST", path, ada, {"messages": ASKED, "max_tokens": LONG})
        id = running(server, ada)["id"]
        told = ask(server, "DELETE", f"/v1/requests/{id}", ada)
        assert (told.status, told.json) == (200, {"id": id, "object": "request.deleted", "deleted": True})
        answer = asked.result()
    assert answer.status == 410
    assert "the request was ended" in answer.json["error"]["message"]
    assert listed(server, ada) == []


def test_a_stream_that_is_ended_says_so_by_the_id_that_it_carries(
    server: HttpServer, keys: tuple[Path, str, str]
) -> None:
    ada = keys[1]
    http = RawHttp(server.port)
    http.send("POST", CHAT, {"messages": ASKED, "max_tokens": LONG, "stream": True}, authorization=f"Bearer {ada}")
    assert http.head()[0] == 200
    chunks = http.chunks()
    id = json.loads(next(chunks).removeprefix(b"data: "))["id"]
    assert ask(server, "DELETE", f"/v1/requests/{id}", ada).status == 200
    assert b"the request was ended" in b"".join(chunks)
    http.close()
    server.process.log.wait_for(f'event=request.ended request={id} by="key ada"')


def test_the_page_s_answers_are_their_key_s_and_the_live_view_tells_of_them(
    server: HttpServer, keys: tuple[Path, str, str]
) -> None:
    _, ada, bob = keys
    body = {"messages": ASKED, "sampling": {"max_tokens": LONG}, "token": "t" * 32}
    http = RawHttp(server.port)
    http.send("POST", "/ui/api/answers", body, authorization=f"Bearer {ada}")
    _, headers = http.head()
    id = headers["x-uma-request"]
    assert [each["id"] for each in listed(server, ada)] == [id]
    for key, own in ((ada, [id]), (bob, None)):
        live = RawHttp(server.port)
        live.send("GET", "/ui/api/live", authorization=f"Bearer {key}")
        live.head()
        first = next(live.chunks()).decode()
        assert first.startswith("event: own\ndata: " + json.dumps({"ids": own}, separators=(",", ":"))) == bool(own)
        live.close()
    assert ask(server, "DELETE", f"/v1/requests/{id}", bob).status == 404
    assert ask(server, "DELETE", f"/v1/requests/{id}", ada).status == 200
    assert b'"reason":"cancelled"' in b"".join(http.chunks())
    assert listed(server, ada) == []  # kept for its page, and none that runs
    http.close()


def test_what_other_keys_ask_has_neither_its_id_nor_its_origin_but_for_a_key_that_manages_models(
    server: HttpServer, keys: tuple[Path, str, str]
) -> None:
    path, ada, bob = keys
    chief = add(path, "chief", manages_models=True)
    http = RawHttp(server.port, 4_096, segment_bytes=1_000)  # nothing is read of what cannot end so long
    asked = {"messages": ASKED, "max_tokens": 15_000, "ignore_eos": True, "stream": True}
    http.send("POST", CHAT, asked, authorization=f"Bearer {ada}")
    http.head()
    id = json.loads(next(http.chunks()).removeprefix(b"data: "))["id"].removeprefix("chatcmpl-")
    until(lambda: [each["id"] for each in listed(server, ada)], lambda found: found == [id])
    for key, sees in ((ada, True), (bob, False), (chief, True)):
        (slot,) = (each for each in ask(server, "GET", "/slots", key).json if each["is_processing"])
        live = RawHttp(server.port)
        live.send("GET", "/ui/api/live", authorization=f"Bearer {key}")
        live.head()
        frames = (chunk for chunk in live.chunks() if chunk.startswith(b"event: frame"))
        next(frames)  # another viewer had it taken, a quarter of a second ago at most
        frame = next(frames)
        live.close()
        (shown,) = json.loads(frame.partition(b"data: ")[2])["activity"]["running"]
        assert (slot["request"] == shown["id"] == id, "key ada" in shown["origin"], shown["origin"] != "") == (
            sees,
        ) * 3
        assert (slot["request"] == shown["id"], shown["prompt_tokens"] > 0) == (True, True)
    ask(server, "DELETE", f"/v1/requests/{id}", ada)
    http.close()


async def test_without_keys_a_user_ends_their_own_requests_on_the_socket(
    http_server: HttpServer, server: HttpServer, keys: tuple[Path, str, str]
) -> None:
    async def status(http: HttpServer, path: str, **headers: str) -> int:
        answer = await trio.to_thread.run_sync(partial(http.ask, "DELETE", path, **headers))
        return answer.status

    request = Request(id="mine", prompt="Go.", sampling=SamplingParams(max_tokens=1_800, ignore_eos=True))
    path = "/v1/requests/mine"
    async with connect(http_server.process.socket) as client, client.generate(request) as stream:
        await anext(aiter(stream))
        answer = await trio.to_thread.run_sync(partial(http_server.ask, "GET", "/v1/requests"))
        (told,) = (each for each in answer.json["data"] if each["id"] == "mine")
        assert told["origin"].endswith(f"socket · pid {os.getpid()}")
        # A proxy's user is not the one who asks.
        assert await status(http_server, path, x_forwarded_for="192.0.2.1") == 404
        assert await status(http_server, path) == 200
        with pytest.raises(Ended, match="the request was ended"):
            [event async for event in stream]
    assert await status(http_server, path) == 404
    for why in (path, "/ui/api/why/mine"):
        assert (await trio.to_thread.run_sync(partial(http_server.ask, "GET", why))).json["reason"] == "cancelled"
    # A key tells whose a request over HTTP is, and nothing of users.
    async with connect(server.process.socket) as client, client.generate(request) as stream:
        await anext(aiter(stream))
        assert await status(server, path, authorization=f"Bearer {keys[1]}") == 404


def test_the_timing_of_what_had_no_word_tells_of_none(http_server: HttpServer) -> None:
    body = {"input": "It rains.", "questions": [{"type": "predicate", "instructions": "Is it wet?"}]}
    asked = http_server.ask("POST", "/v1/decisions", body)
    assert asked.status == 200, asked.body
    told = http_server.ask("GET", f"/ui/api/why/{asked.headers['x-request-id']}").json["lines"]
    assert told[0][0].startswith("All of the answer after ")


def test_without_keys_a_machine_s_requests_are_its_own(http_server: HttpServer) -> None:
    body = {"messages": ASKED, "max_tokens": 2_000, "ignore_eos": True}
    # What an earlier test has left can still be on its way out.
    until(lambda: http_server.ask("GET", "/v1/requests").json["data"], lambda found: not found)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(http_server.ask, "POST", CHAT, body)
        while not (found := http_server.ask("GET", "/v1/requests").json["data"]):
            pass
        assert http_server.ask("DELETE", f"/v1/requests/{found[0]['id']}").status == 200
        assert asked.result().status == 410
