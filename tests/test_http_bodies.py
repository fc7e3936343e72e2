"""What the bodies of all requests take together, and those of one key: bounded, however many connections send them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio
from engine_world import config_for
from http_server import HostedHttp, RawHttp, hosted_http

from harness import PATIENCE_SEC, until
from uma import Engine
from uma.http.body_budget import CLIENTS, MAX_BODIES_BYTES
from uma.http.keys import add

MIB = 2**20
BODY_BYTES = 7 * MIB
SMALL = {"prompt": "Once", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}], "stream": False}
PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/completion", "/tokenize"]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two keys, the second of which can have one request; under `file` where their hashes are."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    made = {"free": add(file, "free"), "single": add(file, "single"), "file": str(file)}
    with file.open("a") as text:
        text.write("max_concurrent = 1\n")
    return made


@pytest.fixture(scope="module")
def open_to_all(tiny: Path) -> Iterator[HostedHttp]:
    with hosted_http(config_for(tiny, http="127.0.0.1:0")) as hosted:
        yield hosted


@pytest.fixture(scope="module")
def locked(tiny: Path, keys: dict[str, str]) -> Iterator[HostedHttp]:
    with hosted_http(config_for(tiny, http="127.0.0.1:0", http_keys=keys["file"])) as hosted:
        yield hosted


def held(hosted: HostedHttp) -> int:
    return hosted.call(lambda: hosted.gateway.bodies.held_bytes)


def until_held(hosted: HostedHttp, size: int) -> None:
    until(lambda: held(hosted), lambda found: found == size)


def begin_whole(raw: RawHttp, path: str, **headers: str) -> None:
    """The head of a request, its length told, and most of its body."""
    raw.send("POST", path, b" " * BODY_BYTES, **{"content-length": str(BODY_BYTES + 1), **headers})


def begin_chunked(raw: RawHttp, path: str, **headers: str) -> None:
    """The same without a length."""
    told = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{told}transfer-encoding: chunked\r\n\r\n{BODY_BYTES:x}\r\n"
    raw.sock.sendall(head.encode() + b" " * BODY_BYTES + b"\r\n")


@pytest.mark.parametrize("begin", [begin_whole, begin_chunked])
def test_unfinished_bodies_of_many_connections_take_no_more_than_all_are_given(
    open_to_all: HostedHttp, begin: Callable[..., None]
) -> None:
    fitting = MAX_BODIES_BYTES // BODY_BYTES
    with ExitStack() as stack:
        for number in range(fitting):
            begin(stack.enter_context(open_to_all.connect()), "/v1/completions")
            until_held(open_to_all, (number + 1) * BODY_BYTES)
        for path in PATHS:
            raw = stack.enter_context(open_to_all.connect())
            begin(raw, path)
            refused = raw.answer()
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert f"{MAX_BODIES_BYTES:,} bytes" in str(refused.json)
            assert raw.is_closed()
        assert held(open_to_all) == fitting * BODY_BYTES
    until_held(open_to_all, 0)


def test_unfinished_bodies_of_one_key_take_its_part(locked: HostedHttp, keys: dict[str, str]) -> None:
    fitting = MAX_BODIES_BYTES // CLIENTS // BODY_BYTES
    mine, theirs = ({"authorization": f"Bearer {keys[name]}"} for name in ("free", "single"))
    with ExitStack() as stack:
        for number in range(fitting):
            begin_whole(stack.enter_context(locked.connect()), "/v1/completions", **mine)
            until_held(locked, (number + 1) * BODY_BYTES)
        for path in PATHS:
            raw = stack.enter_context(locked.connect())
            begin_whole(raw, path, **mine)
            assert raw.answer().status == 503
        with locked.connect() as other:
            assert other.ask("POST", "/v1/completions", SMALL, **theirs).status == 200
    until_held(locked, 0)


@pytest.mark.parametrize("path", PATHS)
def test_a_key_has_as_many_unfinished_bodies_as_it_can_have_requests(
    locked: HostedHttp, keys: dict[str, str], path: str
) -> None:
    mine = {"authorization": f"Bearer {keys['single']}"}
    fields = {**SMALL, "input": "Once", "content": "Once"}
    if path == "/v1/responses":  # its `prompt` is something else
        del fields["prompt"]
    body = json.dumps(fields).encode()
    with locked.connect() as first, locked.connect() as second:
        first.send("POST", path, body[:-1], **mine, **{"content-length": str(len(body))})
        until_held(locked, len(body) - 1)
        second.send("POST", path, b"", **mine, **{"content-length": str(8 * MIB)})
        refused = second.answer()
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert "max_concurrent" in str(refused.json)
        with locked.connect() as other:
            theirs = {"authorization": f"Bearer {keys['free']}"}
            assert other.ask("POST", "/v1/completions", SMALL, **theirs).status == 200
        first.sock.sendall(body[-1:])
        assert first.answer().status == 200
    until_held(locked, 0)


def test_a_key_has_as_many_texts_tokenized_at_once_as_it_can_have_requests(
    locked: HostedHttp, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, known = threading.Event(), locked.gateway.keys
    assert known is not None
    account = known.named("single")
    assert account is not None

    async def endless(*_: object, **__: object) -> None:
        begun.set()
        await trio.sleep_forever()

    monkeypatch.setattr(Engine, "tokenize", endless)
    mine = {"authorization": f"Bearer {keys['single']}"}
    body = {**SMALL, "content": "Once"}
    for path in ("/tokenize", "/apply-template", "/v1/messages/count_tokens"):
        with locked.connect() as first, locked.connect() as second:
            first.send("POST", path, body, **mine)
            assert begun.wait(PATIENCE_SEC)
            refused = second.ask("POST", path, body, **mine)
            assert (refused.status, "max_concurrent" in str(refused.json)) == (429, True)
        until(lambda: locked.call(lambda: account.sending), lambda sending: sending == 0)
        begun.clear()


def test_a_body_counts_until_its_answer_begins(open_to_all: HostedHttp) -> None:
    body = json.dumps({**SMALL, "stream": True, "ignore_eos": True, "max_tokens": 1500}).encode()
    with open_to_all.connect() as raw:
        raw.send("POST", "/v1/completions", body[:-1], **{"content-length": str(len(body))})
        until_held(open_to_all, len(body) - 1)
        raw.sock.sendall(body[-1:])
        assert raw.head()[0] == 200
        assert held(open_to_all) == 0


@pytest.mark.parametrize("path", PATHS)
def test_a_body_whose_client_has_gone_waits_for_no_thread(open_to_all: HostedHttp, path: str) -> None:
    body = json.dumps({**SMALL, "input": ["a"] * 5_000, "content": ["a"] * 5_000}).encode()
    parsing, takers = open_to_all.gateway.parsing, [object(), object()]
    assert parsing.total_tokens == len(takers)
    for taker in takers:
        open_to_all.call(partial(parsing.acquire_on_behalf_of_nowait, taker))
    try:
        with open_to_all.connect() as raw:
            raw.send("POST", path, body)
            until_held(open_to_all, len(body))
        until_held(open_to_all, 0)
    finally:
        for taker in takers:
            open_to_all.call(partial(parsing.release_on_behalf_of, taker))


def test_one_client_can_always_send_the_longest_body(tiny: Path) -> None:
    most = MAX_BODIES_BYTES + MIB
    config = attrs.evolve(config_for(tiny, http="127.0.0.1:0"), max_frame_bytes=most)
    with hosted_http(config) as hosted, hosted.connect() as raw:
        refused = raw.ask("POST", "/tokenize", b'{"content": ""' + b" " * (most - 15) + b"}")
        assert refused.status == 200
