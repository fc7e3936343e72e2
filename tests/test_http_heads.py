"""Heads that no proper client sends and bodies that no endpoint reads: no fault of the server, and no hold-up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from engine_world import config_for
from http_server import HostedHttp, hosted_http
from hypothesis import example, given
from hypothesis import strategies as st

from harness import until
from uma.http.app import ENDPOINTS
from uma.http.page.endpoints import ENDPOINTS as PAGE_ENDPOINTS


@pytest.fixture(scope="module")
def hosted(tiny: Path) -> Iterator[HostedHttp]:
    with hosted_http(config_for(tiny, http="127.0.0.1:0", max_tokens=3_000)) as server:
        yield server


def living_tasks(hosted: HostedHttp) -> int:
    return hosted.call(lambda: trio.lowlevel.current_statistics().tasks_living)


def test_a_client_that_hangs_up_before_it_has_read_a_large_answer_leaves_nothing(hosted: HostedHttp) -> None:
    tasks = living_tasks(hosted)
    with hosted.connect(receive_buffer=4_096) as raw:
        raw.send("POST", "/v1/embeddings", {"input": ["Once"] * 1_000})
        assert raw.read(65_535)
    until(lambda: living_tasks(hosted), lambda count: count <= tasks)


def test_head_ends_at_once_on_every_path_that_takes_get(hosted: HostedHttp) -> None:
    token, form = "t" * 16, b"multipart/form-data; boundary=b"
    part = b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    upload = part % (b"purpose", b"batch") + part % (b'file"; filename="a', b"{}") + b"--b--\r\n"
    with hosted.connect() as writing, hosted.connect() as raw:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "token": token}
        asked["sampling"] = {"max_tokens": 3_000, "ignore_eos": True}
        writing.send("POST", "/ui/api/answers", asked)
        assert writing.head()[0] == 200
        file = raw.ask("POST", "/v1/files", upload, content_type=form.decode()).json["id"]
        streams = {f"/ui/api/answers/{token}", "/ui/api/live", f"/v1/files/{file}/content"}
        paths = {path for method, path, *_ in (*ENDPOINTS, *PAGE_ENDPOINTS) if method == "GET"}
        for path in {path.replace("{token}", token).replace("{id}", file) for path in paths} | streams:
            raw.send("HEAD", path.replace("{id:path}", "x").replace("{name}", "x"))
            assert raw.head()[0] in ((200,) if path in streams else (200, 404)), path
        assert raw.ask("GET", "/health").status == 200
        raw.ask("DELETE", f"/ui/api/answers/{token}")


def test_a_websocket_that_is_no_ascii_is_refused(hosted: HostedHttp) -> None:
    with hosted.connect() as raw:
        answer = raw.ask("GET", "/", connection="upgrade", upgrade="websocket", **{"sec-websocket-protocol": "\xff"})
        assert (answer.status, raw.is_closed()) == (403, True)
    assert answer.headers["x-request-id"]


def test_the_preface_of_http_2_is_refused_by_its_version(hosted: HostedHttp) -> None:
    with hosted.connect() as raw:
        raw.sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"))
        assert (raw.answer().status, raw.is_closed()) == (505, True)


values = st.binary(max_size=20) | st.sampled_from(
    [
        *(b"websocket", b"h2c", b"upgrade", b"13", b"close", b"trailers", b"*", b"chunked", b"100-continue"),
        *(b"http://[", b"[", b"[::1", b"[::1]x", b"http://[::1", b"http://]", b"//", b"null", b"://", b"http://a:b:c"),
        *(b"\xb2", b"9" * 5_000, b"-1", b"+1", b"1_0", b"nan", b"inf", b"1e999", b"0x1", b"Bearer ", b"Bearer \xe9"),
    ]
)
names = st.sampled_from(
    [
        *(b"connection", b"upgrade", b"te", b"host", b"origin", b"expect", b"content-length", b"transfer-encoding"),
        *(b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-protocol", b"sec-websocket-extensions"),
        *(b"authorization", b"x-api-key", b"http2-settings", b":path"),
        *(b"x-uma-priority", b"x-uma-target-ttft-ms", b"x-uma-target-tbt-ms", b"x-uma-pace", b"x-uma-protocol-version"),
        *(b"access-control-request-method", b"access-control-request-headers", b"content-encoding", b"last-event-id"),
        *(b"anthropic-version", b"cookie", b"forwarded", b"x-forwarded-for", b"x-request-id", b"accept"),
    ]
)
heads = st.lists(st.tuples(names, values), max_size=6)
methods = st.sampled_from([b"GET", b"HEAD", b"POST", b"OPTIONS", b"CONNECT", b"PRI", b"x"])


@given(methods, st.lists(st.tuples(names, values), max_size=6), st.binary(max_size=8))
@example(b"GET", [(b"transfer-encoding", b"")], b"")
@example(b"GET", [(b"origin", b"http://[")], b"health")
def test_no_head_is_a_fault_of_the_server(
    hosted: HostedHttp, method: bytes, head: list[tuple[bytes, bytes]], path: bytes
) -> None:
    # What the fixture finds in the log at its end would fail this test too.
    with hosted.connect() as raw:
        lines = [b"%s: %s" % field for field in head]
        raw.sock.sendall(b"\r\n".join([b"%s /%s HTTP/1.1" % (method, path), b"host: localhost", *lines, b"", b""]))
        first = raw.read(12)
    # 501 is the answer to a transfer coding that is not known (RFC 9112, 6.1).
    assert not first or int(first[9:12]) < 500 or int(first[9:12]) == 501


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("POST", "/nothing"), ("DELETE", "/v1/models")])
def test_a_body_that_nothing_reads_holds_up_nothing(hosted: HostedHttp, method: str, path: str) -> None:
    tasks = living_tasks(hosted)
    for _ in range(20):
        with hosted.connect() as raw:
            raw.sock.sendall(b"%s %s HTTP/1.1\r\nhost: localhost\r\n" % (method.encode(), path.encode()))
            raw.sock.sendall(b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 40 + b"0\r\n\r\n")
            assert raw.answer().status in (200, 404, 405)
    until(lambda: living_tasks(hosted), lambda count: count <= tasks)
