"""Connections that die without a word, as where a proxy carries no more bytes and closes nothing: the page notices."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from http_server import HttpServer
from page_browser import CAN_HURRY, Visitor, end_all, visitor
from playwright.sync_api import Browser, Page, expect

from harness import until
from uma.http.page.endpoints import HEARTBEAT_SEC

HEARTBEAT_MS = round(1_000 * HEARTBEAT_SEC)
STREAM = """() => new Promise((begun) => {
    const plain = window.fetch;
    window.fetch = async (asked) => {
        if (!asked.url.endsWith("answers/x")) return plain(asked);
        const body = new ReadableStream({
            start(given) {
                window.say = (text) => given.enqueue(new TextEncoder().encode(text));
                asked.signal.addEventListener("abort", () => given.error(asked.signal.reason));
            },
        });
        begun();
        return new Response(body);
    };
    window.heard = [];
    import("/ui/api.js").then(async ({ stream }) => {
        try {
            for await (const { data } of stream("answers/x")) heard.push(data);
        } catch (error) {
            heard.push(error.message);
        }
    });
})"""
"""The page's own reader of streams, on a stream that only `say` writes to; what it reads is in `heard`."""


class Proxy:
    """Carries bytes between browsers and a server, until what is connected is frozen: nothing comes, nothing closes."""

    def __init__(self, port: int) -> None:
        self.url = ""
        self._server_port = port
        self._frozen = threading.Event()
        self._sockets: list[socket.socket] = []

    def freeze(self) -> None:
        """Carry no more bytes over the connections that there are; new ones are as ever."""
        self._frozen.set()
        self._frozen = threading.Event()

    @contextmanager
    def listening(self) -> Iterator[Proxy]:
        """A port of its own, until the block ends."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            try:
                yield self
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                for each in self._sockets:
                    with suppress(OSError):  # closed by the other side
                        each.shutdown(socket.SHUT_RDWR)  # to close it alone wakes no thread that reads from it
                    each.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                here, _ = listener.accept()
            except OSError:  # the block has ended
                return
            there = socket.create_connection(("127.0.0.1", self._server_port))
            self._sockets += here, there
            for pair in ((here, there), (there, here)):
                threading.Thread(target=self._carry, args=(*pair, self._frozen), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket, frozen: threading.Event) -> None:
        try:
            while data := source.recv(65_536):
                if frozen.is_set():
                    return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # closed on the other side, or at the end
            return


@pytest.fixture
def endless(browser: Browser, endless_server: HttpServer) -> Iterator[tuple[Visitor, Proxy]]:
    """A window on a server whose answers go on until they are stopped, and the proxy between them."""
    with visitor(browser, endless_server.url) as one:
        with Proxy(endless_server.port).listening() as proxy:
            one.url = proxy.url
            one.page.add_init_script(CAN_HURRY)
            yield one, proxy
            one.page.close()
        one.problems.clear()  # Chromium notes each stream that was let go of
    end_all(endless_server)


def frames(page: Page) -> int:
    return int(page.locator("#live-view").get_attribute("data-frames") or 0)


def letters(page: Page) -> int:
    return len(page.locator(".is-writing .blocks").inner_text())


def hurry(page: Page, shown: Callable[[Page], int]) -> None:
    """Let time pass faster, also for the wait that begins with the last of what comes."""
    page.evaluate("hurry()")
    before = shown(page)
    until(lambda: shown(page), lambda now: now > before)


def test_an_answer_whose_connection_dies_silently_is_picked_up_where_it_was(endless: tuple[Visitor, Proxy]) -> None:
    here, proxy = endless
    page = here.visit().page
    here.ask("Count sheep.")
    page.locator(".is-writing .block", has_text="9 sheep").wait_for()
    hurry(page, letters)
    proxy.freeze()
    with page.expect_request("**/ui/api/answers/*") as again:
        expect(page.locator(".status")).to_contain_text("Connection lost. Reconnecting")
    assert int(again.value.headers["last-event-id"].split(".")[0]) > 0  # characters that are there
    expect(page.locator(".status")).to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator(".note")).to_have_text("Stopped.")
    counted = [int(number) for number in re.findall(r"(\d+) sheep", page.locator(".blocks").inner_text())]
    assert counted == [1 + at % 199 for at in range(len(counted))]  # nothing is lost, and nothing there twice


def test_the_live_view_says_that_its_connection_died_and_goes_on(endless: tuple[Visitor, Proxy]) -> None:
    here, proxy = endless
    page = here.visit("#live").page
    expect(page.locator("#live-view")).to_have_attribute("data-frames", re.compile(r"[2-9]|\d\d"))
    state = page.locator(".live-state")
    expect(state).to_be_hidden()
    hurry(page, frames)
    proxy.freeze()
    expect(state).to_contain_text("The connection to the server was lost. Retrying")
    before = frames(page)
    expect(state).to_be_hidden()
    assert frames(page) > before


def test_a_stream_lives_for_as_long_as_its_heartbeats_come(here: Visitor) -> None:
    page = here.page
    page.clock.install()
    here.visit()
    page.evaluate(STREAM)
    for _ in range(5):
        page.clock.run_for(HEARTBEAT_MS)
        page.evaluate("say(': still here\\n\\n')")
    page.evaluate("say('data: 7\\n\\n')")
    until(lambda: page.evaluate("heard"), bool)
    page.clock.run_for(2 * HEARTBEAT_MS)
    assert page.evaluate("heard") == [7]
    page.clock.run_for(HEARTBEAT_MS)
    heard = until(lambda: page.evaluate("heard"), lambda each: len(each) > 1)
    assert heard == [7, "The connection to the server was lost."]


def test_the_page_and_its_server_speak_of_the_same_heartbeat(here: Visitor) -> None:
    found = here.visit().page.evaluate("import('/ui/silence.js').then(({ HEARTBEAT_MS }) => HEARTBEAT_MS)")
    assert found == HEARTBEAT_MS
