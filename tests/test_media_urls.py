"""Pictures by their URLs (`--media-urls`): bounded, never from this machine or its networks, whatever leads there."""

from __future__ import annotations

import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import attrs
import pytest
import trio
from engine_world import answer, config_for
from projectors import png, write_projector, write_seeing_model

from harness import PATIENCE_SEC
from uma import Message, Request, open_engine
from uma.errors import BadRequest, Overloaded
from uma.http.ignored import Ignored
from uma.http.media import MediaReader
from uma.media import fetch
from uma.media.fetch import MAX_FETCHING, MAX_REDIRECTS, Fetcher, is_public
from uma.net.client import CLIENT
from uma.types import Media

FILE = png(40, 30, seed=1)


def ok(body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{each}\r\n" for each in headers or (f"Content-Length: {len(body)}",))
    return f"HTTP/1.1 200 OK\r\n{lines}\r\n".encode() + body


def to(url: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {url}\r\nContent-Length: 0\r\n\r\n".encode()


@attrs.frozen
class Web:
    """A server that answers a path with these bytes; what it is asked is kept."""

    url: str
    asked: list[bytes]


@asynccontextmanager
async def web(pages: Callable[[str], Mapping[str, bytes]]) -> AsyncIterator[Web]:
    """`pages` gives the answers by their path, once the server's own address is known."""
    asked: list[bytes] = []
    found: dict[str, bytes] = {}

    async def serve(stream: trio.SocketStream) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            if not (more := await stream.receive_some(4_096)):
                return
            head += more
            if head.startswith(b"\x16"):  # TLS, which it does not speak
                await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                return
        asked.append(head)
        try:
            await stream.send_all(found[head.split()[1].decode()])
            if b"/slow" in head:
                await trio.sleep_forever()
        except trio.BrokenResourceError:
            pass
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        found.update(pages(url))
        yield Web(url, asked)
        nursery.cancel_scope.cancel()


ANYWHERE = Fetcher(is_allowed=lambda _: True)


async def test_a_file_is_fetched_with_nothing_but_its_url() -> None:
    def pages(url: str) -> dict[str, bytes]:
        chunked = f"{len(FILE):x}\r\n".encode() + FILE + b"\r\n0\r\n\r\n"
        return {
            "/a.png?size=1": ok(FILE),
            "/b": ok(FILE, "Connection: close"),
            "/c": ok(chunked, "Transfer-Encoding: chunked"),
            "/moved": to("/near"),
            "/near": to(f"{url}/b"),
        }

    async with web(pages) as server:
        for path in ("/a.png?size=1", "/b", "/c", "/moved"):
            assert await ANYWHERE.fetch(server.url + path, "url") == FILE
    first = server.asked[0].decode().lower()
    assert first.startswith("get /a.png?size=1 http/1.1\r\nhost: 127.0.0.1:")
    assert "accept-encoding: identity" in first
    assert not {"cookie", "authorization", "referer"} & {line.partition(":")[0] for line in first.splitlines()}


async def test_what_is_no_file_is_refused_and_nothing_of_it_told() -> None:
    secret = b"the other side's secret"
    pages = {
        "/none": b"HTTP/1.1 404 Not Found\r\nContent-Length: 23\r\n\r\n" + secret,
        "/empty": ok(b""),
        "/large": ok(bytes(5_000)),
        "/endless": ok(bytes(5_000), "Connection: close"),
        "/cut": ok(FILE[:50], f"Content-Length: {len(FILE)}"),
        "/noise": secret,
        "/circle": to("/circle"),
        "/ftp": to("ftp://example.org/a.png"),
        "/nowhere": to(""),
        "/odd": to("http://127.0.0.1/\x7f"),
        "/torn": to("http://[::1"),
    }
    async with web(lambda _: pages) as server:
        for path, problem in (
            ("/none", "answers with status 404"),
            ("/empty", "answers with nothing"),
            ("/large", "all files of a request .* are over the limit"),
            ("/endless", "all files of a request .* are over the limit"),
            ("/cut", "cannot be fetched from 127.0.0.1"),
            ("/noise", "cannot be fetched from 127.0.0.1"),
            ("/circle", f"leads on more than {MAX_REDIRECTS} times"),
            ("/ftp", "expected an http or https URL"),
            ("/nowhere", f"leads on more than {MAX_REDIRECTS} times"),
            ("/odd", "(expected an http or https URL|cannot be fetched)"),
            ("/torn", "leads on to what is no URL"),
        ):
            with pytest.raises(BadRequest, match=f"url: .*{problem}") as refused:
                await ANYWHERE.fetch(server.url + path, "url", left=4_096)
            assert "secret" not in str(refused.value)
        with pytest.raises(BadRequest, match=r"cannot be fetched from 127.0.0.1: .*SSL"):
            await ANYWHERE.fetch(server.url.replace("http", "https") + "/none", "url")
    with pytest.raises(BadRequest, match=r"cannot be fetched from 127.0.0.1: "):
        await ANYWHERE.fetch(server.url + "/a", "url")  # nobody listens any more


@pytest.mark.parametrize(
    "url",
    [
        *(
            "ftp://example.org/a",
            "file:///etc/passwd",
            "http://",
            "http:///a",
            "//example.org/a",
            "https://me:x@a.org/",
        ),
        *("http://a.org:99999/", "http://a.org/\r\nHost: b", "http://a.org/ b", "http://bücher.de/", "http://[::1/"),
        *("http://a.org/\x7f", "http://a.org/\x01", "http://a.org/?\x00"),
    ],
)
async def test_what_is_no_url_of_the_web_is_refused(url: str) -> None:
    with pytest.raises(BadRequest, match=r"url: expected an http or https URL in ASCII"):
        await ANYWHERE.fetch(url, "url")


NOT_PUBLIC = """
127.0.0.1 127.8.8.8 0.0.0.0 10.1.2.3 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254 100.64.0.1 192.0.0.8
192.0.2.1 198.18.0.1 224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255
:: ::1 fe80::1 fec0::1 fc00::1 fd12::1 ff02::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::127.0.0.1 64:ff9b::a00:1
64:ff9b:1::1 2002:7f00:1::1 2001:0:7f00:1::1 2001:db8::1 ::ffff:0:7f00:1 2a00:1450::5efe:7f00:1
2a00:1450::200:5efe:a00:1 4000::1
""".split()  # noqa: SIM905  (an address a line would be a page)


def test_which_addresses_are_public() -> None:
    assert not any(is_public(ip_address(each)) for each in NOT_PUBLIC)
    assert all(is_public(ip_address(each)) for each in ("1.1.1.1", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"))
    assert is_public(ip_address("2a00:1450::1:5efe:0:1"))


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "0", "127.1", "2130706433", "0x7f000001", "017700000001", "169.254.169.254"],
)
async def test_no_name_leads_to_this_machine_or_its_networks(host: str) -> None:
    with pytest.raises(BadRequest, match=r"url: (.*an address of this machine or a private|cannot be fetched)"):
        await Fetcher().fetch(f"http://{host}:9/a.png", "url")


async def test_nor_does_a_redirect() -> None:
    """The first address is allowed, another of the same machine is not: nothing is sent there."""
    only = ip_address("127.0.0.1")
    async with web(lambda url: {"/a": to(url.replace("127.0.0.1", "127.0.0.2") + "/b")}) as server:
        with pytest.raises(BadRequest, match=r"127\.0\.0\.2 is an address of this machine"):
            await Fetcher(is_allowed=lambda address: address == only).fetch(f"{server.url}/a", "url")
    assert len(server.asked) == 1


async def test_a_slow_file_ends_its_request_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "DEADLINE_SEC", 0.05)
    async with web(lambda _: {"/slow": ok(b"", "Content-Length: 9")}) as server:
        message = Message("user", "What?", media=(Media(url=f"{server.url}/slow"),))
        with pytest.raises(BadRequest, match=r"messages\[0\].media\[0\].url: timeout: not fetched within"):
            await ANYWHERE.fetched(Request("a", messages=(message,)))


def asking(url: str) -> Request:
    return Request("a", messages=(Message("user", "What?", media=(Media(url=url),)),))


async def test_files_that_never_come_take_turns_from_no_other_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's requests that get no turn are told, in a bounded time."""
    monkeypatch.setattr(fetch, "TURN_SEC", 0.05)
    fetcher, told = Fetcher(is_allowed=lambda _: True), trio.Event()

    async def greedy(url: str) -> None:
        CLIENT.set("greedy")
        try:
            await fetcher.fetched(asking(f"{url}/slow"))
        except Overloaded as error:
            assert "timeout after" in str(error)
            assert error.retry_after_ms
            told.set()

    with trio.fail_after(PATIENCE_SEC):
        async with (
            web(lambda _: {"/slow": ok(b"", "Content-Length: 9"), "/a": ok(FILE)}) as server,
            trio.open_nursery() as nursery,
        ):
            for _ in range(MAX_FETCHING + 1):
                nursery.start_soon(greedy, server.url)
            await told.wait()
            CLIENT.set("other")
            other = await fetcher.fetched(asking(f"{server.url}/a"))
            assert [bool(each.data) for _, each in other.placed_media()] == [True]
            nursery.cancel_scope.cancel()


async def test_certificates_are_read_once_and_not_on_the_trio_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    made, threads = ssl.create_default_context, list[int]()

    def counted() -> ssl.SSLContext:
        threads.append(threading.get_ident())
        return made()

    monkeypatch.setattr(ssl, "create_default_context", counted)
    fetcher = Fetcher(is_allowed=lambda _: True)
    async with web(lambda _: {}) as server:
        for _ in range(3):
            with pytest.raises(BadRequest, match="SSL"):
                await fetcher.fetch(server.url.replace("http", "https"), "url")
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_all_files_of_a_request_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_REQUEST_BYTES", 2 * len(FILE) + 9)
    async with web(lambda _: {"/a": ok(FILE)}) as server:
        media = tuple(Media(url=f"{server.url}/a") for _ in range(3))
        some = await ANYWHERE.fetched(Request("a", messages=(Message("user", "What?", media=media[:2]),)))
        assert [bool(each.data) for message in some.messages or () for each in message.media] == [True, True]
        with pytest.raises(BadRequest, match=r"media\[2\].url: all files of a request .* are over the limit"):
            await ANYWHERE.fetched(Request("a", messages=(Message("user", "What?", media=media),)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("seeing")
    write_projector(folder / "mmproj.gguf")
    yield write_seeing_model(folder / "model.gguf", "llava")


@pytest.mark.parametrize("fetches", [False, True])
async def test_an_engine_fetches_only_where_it_is_told_to(model: Path, fetches: bool) -> None:
    async with web(lambda _: {"/a": ok(FILE)}) as server, open_engine(config_for(model, media_urls=fetches)) as engine:
        assert engine.info.capabilities.media_urls is fetches
        message = Message("user", "What?", media=(Media(url=f"{server.url}/a"),))
        problem = "is an address of this machine" if fetches else r"this server fetches nothing \(--media-urls\)"
        with pytest.raises(BadRequest, match=rf"messages\[0\].media\[0\].url: .*{problem}"):
            await answer(engine, Request("a", messages=(message,)))
        for url in ("ftp://example.org/a", "file:///etc/passwd", "AAAA"):
            expected = "an http, https or data URL" if fetches else "a data URL"
            with pytest.raises(BadRequest, match=f"u.image_url: expected {expected}, not '{url}'"):
                MediaReader(engine.info.capabilities).read({"type": "image_url", "image_url": url}, "u", Ignored())
        many = tuple(Message("user", "What?", media=40 * message.media) for _ in range(2))
        with pytest.raises(BadRequest, match="messages: 80 pictures and sounds are over the limit of 64"):
            await answer(engine, Request("a", messages=many))
        by_path = Message("user", "What?", media=(Media(path="/etc/hosts"),))
        with pytest.raises(BadRequest, match=r"media\[0\].path: only a client of the server's socket"):
            await answer(engine, Request("a", messages=(by_path,)))
    assert not server.asked
