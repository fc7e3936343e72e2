"""The live view: a storm of requests is watched in a real browser, and its frames are checked as they come."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from engine_world import config_for
from http_server import HttpServer, running_http
from page_browser import chromium, visitor
from playwright.sync_api import Browser, expect
from starlette.types import Message, Scope

from harness import PATIENCE_SEC, short_directory
from uma.engine import open_engine
from uma.http.app import build_app
from uma.http.gateway import Gateway

STORM = 12
TWO_SLOTS = ("--max-sequences", "2", "--http-any-model")


@pytest.fixture(scope="module")
def narrow_server() -> Iterator[HttpServer]:
    """A server with two slots, so that a storm has to wait."""
    with short_directory() as directory, running_http(directory, *TWO_SLOTS) as server:
        yield server


def frames(url: str) -> Generator[dict[str, Any], None, None]:
    """The live view's frames, for as long as they are read."""
    with httpx.stream("GET", f"{url}/ui/api/live", timeout=PATIENCE_SEC) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


def ask(server: HttpServer, number: int, who: str = "owl") -> str:
    """One request of the storm; why it ended."""
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": f"Story {number}. " + f"The fox met an {who}. " * 60}],
        "max_tokens": 120,
        "ignore_eos": True,
        "priority": (1, 0, -1)[number % 3],
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_SEC).raise_for_status()
    return str(answer.json()["choices"][0]["finish_reason"])


def test_frames_tell_of_a_storm_what_happens_in_it(narrow_server: HttpServer) -> None:
    seen: list[dict[str, Any]] = []
    with ThreadPoolExecutor(STORM) as pool:
        asked = [pool.submit(ask, narrow_server, number) for number in range(STORM)]
        for frame in frames(narrow_server.url):
            seen.append(frame)
            if all(each.done() for each in asked) and not frame["activity"]["running"]:
                break
        assert {each.result() for each in asked} == {"length"}
    times = [frame["at_ms"] for frame in seen]
    assert all(later - earlier >= 250 for earlier, later in pairwise(times))
    running = [request for frame in seen for request in frame["activity"]["running"]]
    assert any(request["generated_tokens"] == 0 for request in running)
    assert any(request["generated_tokens"] > 0 for request in running)
    assert max(frame["activity"]["waiting_background"] for frame in seen) >= 1
    assert max(frame["metrics"]["kv_cells_used"] for frame in seen) > 0
    assert seen[-1]["metrics"]["tokens_generated_total"] >= STORM * 120
    ids = {request["id"] for request in running}
    assert len(ids) <= STORM


async def test_a_frame_comes_with_each_quarter_of_a_second(tiny: Path, mock_clock: trio.testing.MockClock) -> None:
    scope: Scope = {"type": "http", "method": "GET", "path": "/ui/api/live", "headers": [(b"host", b"localhost")]}
    said, heard = trio.open_memory_channel[Message](0)

    async def next_frame() -> dict[str, Any]:
        while (message := await heard.receive())["type"] != "http.response.body":
            pass
        frame: dict[str, Any] = json.loads(message["body"].partition(b"data: ")[2])
        return frame

    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        app = build_app(Gateway.of(engine, engine.config))
        nursery.start_soon(app, scope, trio.sleep_forever, said.send)
        first = (await next_frame())["at_ms"]
        for number in range(1, 9):
            mock_clock.jump(0.25 - 1 / 64)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.WouldBlock):
                heard.receive_nowait()
            mock_clock.jump(1 / 64)
            assert (await next_frame())["at_ms"] == first + 250 * number
        nursery.cancel_scope.cancel()


def test_all_viewers_share_one_snapshot(narrow_server: HttpServer) -> None:
    by_time: dict[int, dict[str, Any]] = {}
    with ExitStack() as stack:
        viewers = [stack.enter_context(closing(frames(narrow_server.url))) for _ in range(3)]
        for _ in range(3):
            for viewer in viewers:
                frame = next(viewer)
                assert by_time.setdefault(frame["at_ms"], frame) == frame


def test_a_storm_is_seen_in_the_browser(narrow_server: HttpServer) -> None:
    with chromium() as browser:
        watch(browser, narrow_server)


def watch(browser: Browser, server: HttpServer) -> None:
    with visitor(browser, server.url) as one, ThreadPoolExecutor(STORM) as pool:
        page = one.visit("#live").page
        expect(page.locator(".nothing")).to_be_visible()
        asked = [pool.submit(ask, server, number, "elk") for number in range(STORM)]
        page.locator(".lane").first.wait_for()
        page.locator(".lane-state", has_text="writing").first.wait_for()
        expect(page.locator(".legend b").nth(3)).to_have_text(re.compile(r"\d"))
        for each in asked:
            each.result()
        # What was computed is on the canvas in the colours of the legend.
        colours = page.evaluate(
            """() => {
                const found = new Set();
                for (const canvas of document.querySelectorAll(".lane canvas")) {
                    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                    for (let at = 0; at < data.length; at += 4)
                        if (data[at + 3] === 255) found.add(`rgb(${data[at]}, ${data[at + 1]}, ${data[at + 2]})`);
                }
                const shade = (kind) => getComputedStyle(document.querySelector(`.swatch.is-${kind}`)).backgroundColor;
                return ["prefill", "decode"].map((kind) => found.has(shade(kind)));
            }"""
        )
        assert colours == [True, True]
        expect(page.locator(".tile", has_text="First token")).to_contain_text("median")
        page.locator(".nothing").wait_for()  # its lanes linger, and go


def test_a_viewer_who_looks_away_costs_nothing(narrow_server: HttpServer) -> None:
    with chromium() as browser, visitor(browser, narrow_server.url) as one:
        page = one.visit("#live").page
        expect(page.locator("#live-view")).to_have_attribute("data-frames", re.compile(r"[2-9]|\d\d"))
        with page.expect_event("requestfailed", lambda request: request.url.endswith("/ui/api/live")):
            page.get_by_role("link", name="Chat").click()
        one.problems.clear()  # Chromium notes the stream that was let go of
