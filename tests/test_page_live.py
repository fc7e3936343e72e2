"""The live view: a storm of requests is watched in a real browser, and its frames are checked as they come."""

from __future__ import annotations

import json
import math
import os
import re
import time
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
from page_browser import ENDLESS, saying, violations, visitor
from playwright.sync_api import Browser, Page, Route, expect
from starlette.types import Message, Scope

from harness import PATIENCE_SEC, short_directory
from uma.engine import open_engine
from uma.http.app import build_app
from uma.http.gateway import Gateway

STORM, LINES, TOKENS = 9, 180, 50
"""Requests; the lines of each prompt, enough that frames, a quarter of a second apart, find some being read; and the
tokens of each answer."""
MAX_WAITING = 5
"""Rows of requests without a slot."""
HELD = {"prompt": "its prompt waits", "prefix": "its prompt waits", "grammar": "prepares", "reader": "waits for client"}
"""What is said of one that has a slot, and waits."""
FEW = 20
"""Fewer times than these have no percentiles."""
NO_FIGURE = "\N{EN DASH}"
"""What a tile shows where there is nothing to be told yet."""
AT_MOST = "At most 2 run at once (--max-sequences)."
TWO_SLOTS = ("--max-sequences", "2", "--alias=*")


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
            if line.startswith('data: {"at_ms"'):
                yield json.loads(line[6:])


def ask(server: HttpServer, number: int, animal: str = "owl", **more: Any) -> str:
    """One request of the storm; why it ended."""
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": f"Story {number}. " + f"The fox met an {animal}. " * LINES}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "priority": (1, 0, -1)[number % 3],
        **more,
    }
    url, named = f"{server.url}/v1/chat/completions", {"user-agent": "storm/1.0"}
    answer = httpx.post(url, json=body, headers=named, timeout=PATIENCE_SEC).raise_for_status()
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
    assert seen[-1]["metrics"]["tokens_generated_total"] >= STORM * TOKENS
    # Whose they are is found while they run, at the latest with the next look.
    assert any(request["origin"].endswith(f"chat/completions · pid {os.getpid()}") for request in running)
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


NOTE_FRAMES = """
window.noted = [];
const parse = JSON.parse;
JSON.parse = (...given) => {
    const value = parse(...given);
    if (value?.metrics) noted.push(value);
    return value;
};
"""
"""For before the page's own script: keeps each frame that the page reads."""

NOTE_WHAT_IS_SHOWN = """() => {
    const text = (from, what) => from.querySelector(what).textContent.replaceAll("\u00a0", " ");
    const pairs = (what, pair) => Object.fromEntries([...document.querySelectorAll(what)].map(pair));
    const view = document.getElementById("live-view");
    window.shown = [];
    const look = () => shown.push({
        frames: Number(view.dataset.frames),
        tiles: pairs(".tile", (tile) => [
            text(tile, "dt"), [text(tile, ".tile-value"), text(tile, ".tile-unit"), text(tile, ".tile-note")],
        ]),
        lanes: pairs(".lane:not(.is-over)", (lane) => [lane.dataset.id, text(lane, ".lane-more")]),
        states: pairs(".lane:not(.is-over)", (lane) => [lane.dataset.id, text(lane, ".lane-state")]),
        names: pairs(".lane:not(.is-over)", (lane) => [lane.dataset.id, text(lane, ".lane-name")]),
        count: text(view, "#lanes-count"),
        words: [text(view, ".live-words"), text(view, "#live-hint")],
    });
    new MutationObserver(look).observe(view, { attributeFilter: ["data-frames"] });
}"""
"""Keeps every figure that the page shows, as it is right after each frame."""


def test_a_storm_is_seen_in_the_browser(browser: Browser, narrow_server: HttpServer) -> None:
    with visitor(browser, narrow_server.url) as one, ThreadPoolExecutor(STORM) as pool:
        one.page.add_init_script(NOTE_FRAMES)
        page = one.visit("#live").page
        page.evaluate(NOTE_WHAT_IS_SHOWN)
        expect(page.locator(".live-words")).to_have_text("Idle")
        asked = [pool.submit(ask, narrow_server, number, "elk") for number in range(STORM)]
        page.locator(".lane").first.wait_for()
        page.locator(".lane-state", has_text="writing").first.wait_for()
        page.locator(".lane.is-over .lane-state", has_text="length limit").first.wait_for()
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
        expect(page.locator(".lane")).to_have_count(0)  # they linger, and go
        noted, shown = page.evaluate("[noted, shown]")
    assert len(shown) > 4
    for each in shown:
        check_figures(each, noted[: each["frames"]])
    assert any(each["words"][0].startswith("2 running, ") for each in shown)
    assert any(each["count"] for each in shown)
    assert any(AT_MOST in each["words"][1] for each in shown)


def test_requests_of_one_program_are_told_apart_by_their_users(browser: Browser, narrow_server: HttpServer) -> None:
    with visitor(browser, narrow_server.url) as one, ThreadPoolExecutor(2) as pool:
        page = one.visit("#live").page
        expect(page.locator(".live-words")).to_have_text("Idle")
        for number, name in enumerate(("alice", "bo\nb")):
            pool.submit(ask, narrow_server, number, "emu", user=name, max_tokens=400)
        lanes = page.locator(".lane")
        expect(lanes).to_have_count(2)
        names = sorted(lanes.locator(".lane-name").all_inner_texts())
        assert [each.partition(" · ")[0] for each in names] == ["user alice", "user bob"]


def check_figures(shown: dict[str, Any], frames: list[dict[str, Any]]) -> None:
    """That what is shown is what the frames say, up to the last digit of each figure."""
    metrics, activity, now = frames[-1]["metrics"], frames[-1]["activity"], frames[-1]["figures"]
    waiting = sum(now[f"waiting_{name}"] for name in ("interactive", "normal", "background"))
    everyone = [*activity["running"], *queue_of(activity)]
    told = [each for each in everyone if each["id"] in shown["lanes"]]
    assert set(shown["lanes"]) == {each["id"] for each in told}
    assert all(lane_figures(each) in shown["lanes"][each["id"]] for each in told)
    assert shown["states"] == {each["id"]: lane_state(each, activity) for each in told}
    # The program, and not each time by which endpoint it came.
    assert all(name.endswith("storm/1.0") for name in shown["names"].values())
    assert all(each in told for each in activity["running"])
    assert len(told) - len(activity["running"]) == min(MAX_WAITING, len(queue_of(activity)))
    hidden = len(everyone) - len(told)
    assert shown["count"] == (f"{len(told)} of {len(everyone)} shown" if hidden else "")
    words = f"{now['running']} running" + (f", {waiting} waiting" if waiting else "")
    assert shown["words"][0] == (words if now["running"] or waiting else "Idle")
    unread = sum(each.get("waits_for") in ("prompt", "prefix") for each in activity["running"])
    prompts = f"{unread} prompt{'s wait' if unread > 1 else ' waits'} to be read."
    assert (prompts in shown["words"][1]) == bool(unread)
    if waiting:
        time, _, rest = shown["words"][1].removesuffix(prompts).strip().rpartition(AT_MOST)
        assert re.fullmatch(
            r"(The last one begins in about [\d,.]+ s\. ?|Each begins once a slot is free\.)?", time or rest
        )
    check_tiles(shown["tiles"], now, metrics)


def queue_of(activity: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that wait for a first slot; defaults are left out of a frame."""
    found: list[dict[str, Any]] = activity.get("waiting", [])
    return found


def is_writing(request: dict[str, Any]) -> bool:
    return bool(request["generated_tokens"]) or request["computed_tokens"] >= request["prompt_tokens"]


def tokens(count: int) -> str:
    return f"{count:,} token{'s' * (count != 1)}"


def lane_figures(request: dict[str, Any]) -> str:
    cached = f", {request['cached_tokens']:,} of them from the cache" if request["cached_tokens"] else ""
    written = f", answer: {tokens(request['generated_tokens'])}" if request["generated_tokens"] else "."
    return f"Prompt: {tokens(request['prompt_tokens'])}{cached}{written}"


def lane_state(request: dict[str, Any], activity: dict[str, Any]) -> str:
    """What is done for a request, or why nothing is."""
    cause = request.get("waits_for", "")
    if cause in HELD:
        return HELD[cause]
    if request.get("is_preempted"):
        return "paused"
    if cause:
        ahead = [each["id"] for each in queue_of(activity)].index(request["id"])
        return f"{ahead} ahead" if ahead else "next in line"
    share = 100 * request["computed_tokens"] // request["prompt_tokens"]
    return f"writing, {tokens(request['generated_tokens'])}" if is_writing(request) else f"reading {share} %"


def check_tiles(tiles: dict[str, list[str]], figures: dict[str, Any], metrics: dict[str, Any]) -> None:
    share = figures["cached_share"]
    cached = f"{100 * share:.0f} % of prompts cached" if share else f"{metrics['prefill_tokens_total']:,} in all"
    notes = {"Writing": f"{metrics['tokens_generated_total']:,} in all", "Reading": cached}
    for tile, name in (("Writing", "written_per_sec"), ("Reading", "read_per_sec")):
        value, unit, note = tiles[tile]
        assert (unit, note) == ("tokens/s", notes[tile])
        if figures[name] >= 0.5:
            assert is_rounded(value, figures[name])
    value, unit, note = tiles["First word after"]
    if (times := figures["first_token_ms"]) is None:
        assert tiles["First word after"] == [NO_FIGURE, "", "none yet"]
    elif times["count"] < FEW:
        assert note == "latest request"
    else:
        told = re.fullmatch(rf"median of {times['count']:,}, one in 20 over (.+)", note)
        assert told is not None, note
        # Two digits: more is not known of what lies in a bucket.
        for text, exact in ((f"{value} {unit}", times["p50"]), (told[1], times["p95"])):
            assert is_rounded(text, exact, 10.0 ** (math.floor(math.log10(exact)) - 1)), text
    used, most = metrics["kv_cells_used"], metrics["kv_cells_total"]
    assert tiles["KV cache"][1:] == ["% full", f"{used:,} of {most:,} tokens"]
    assert is_rounded(tiles["KV cache"][0], 100 * used / most)


def figure(text: str) -> float:
    """What a figure says; times in milliseconds."""
    number, _, unit = text.partition(" ")
    return float(number.replace(",", "")) * (1_000 if unit == "s" else 1)


def is_rounded(text: str, value: float, step: float = 0.0) -> bool:
    """Whether `text` is `value` to its last digit, or to `step` where that is coarser."""
    number, _, unit = text.partition(" ")
    step = max(step, 10.0 ** -len(number.partition(".")[2]) * (1_000 if unit == "s" else 1))
    return abs(figure(text) - value) <= step / 2 + 1e-6


def test_several_answers_of_one_request_have_one_lane(browser: Browser, narrow_server: HttpServer) -> None:
    """The page's own script, given a snapshot in which a request's two answers are at different places."""
    first = {"id": "a", "priority": 0, "prompt_tokens": 9, "cached_tokens": 0, "age_ms": 0, "number": 1}
    running = [
        {**first, "computed_tokens": 12, "generated_tokens": 3},
        {**first, "computed_tokens": 9, "generated_tokens": 0},
    ]
    script = """async (running) => {
        const { Lanes } = await import("/ui/lanes.js");
        const list = document.createElement("ul");
        document.body.append(list);
        const lanes = new Lanes(list);
        lanes.take({ at_ms: 250, activity: { running }, models: [] });
        return [...list.querySelectorAll(".lane")].map((lane) =>
            [".lane-state", ".lane-more"].map((what) => lane.querySelector(what).textContent).join(": "));
    }"""
    with visitor(browser, narrow_server.url) as one:
        one.visit()
        for order in (running, running[::-1]):
            (told,) = one.page.evaluate(script, order)
            assert told.startswith("writing, 3 tokens: Prompt: 9 tokens, answer: 3 tokens. Came 0.00 s ago")


def lanes_after(page: Page, *frames: dict[str, Any]) -> list[list[str]]:
    """The page's own lanes in its live view after these frames, each as its name and its state."""
    script = """async (frames) => {
        const { Lanes } = await import("/ui/lanes.js");
        const list = document.querySelector("#live-view .lanes");
        list.replaceChildren();
        const lanes = new Lanes(list);
        for (const frame of frames) lanes.take(frame);
        const text = (from, what) => from.querySelector(what).textContent.replaceAll("\u00a0", " ");
        return [...list.children].map((lane) => [text(lane, ".lane-name"), text(lane, ".lane-state")]);
    }"""
    found: list[list[str]] = page.evaluate(script, frames)
    return found


def running(*ids: str, waiting: str = "") -> dict[str, Any]:
    """A snapshot in which these run and wait; they came in the order of their letters."""
    figures = {"prompt_tokens": 9, "cached_tokens": 0, "computed_tokens": 12, "generated_tokens": 3}
    figures |= {"number": 1, "priority": 0}
    one = [[{"id": id, **figures, "age_ms": 9_000 - 10 * ord(id[0])} for id in each] for each in (ids, waiting)]
    return {"running": one[0], "waiting": [each | {"waits_for": "slot"} for each in one[1]]}


def test_rows_stand_in_the_order_in_which_their_requests_came_in_every_window(
    browser: Browser, narrow_server: HttpServer
) -> None:
    with visitor(browser, narrow_server.url) as one:
        one.visit("#live")
        one.page.locator("#live-view[data-frames]").wait_for()
        states = {250: ("ac", ""), 500: ("c", "de"), 750: ("ce", "bd"), 3_000: ("eb", "fgd")}
        frames = [
            {"at_ms": at, "activity": running(*now, waiting=queue), "models": []} for at, (now, queue) in states.items()
        ]
        found = lanes_after(one.page, *frames)
        assert [name for name, state in found if state == "ended"] == ["a", "c"]
        assert [name for name, _ in found] == ["a", "b", "c", "d", "e", "f", "g"]
        assert violations(one.page) == []
        assert [name for name, _ in lanes_after(one.page, frames[-1])] == ["b", "d", "e", "f", "g"]
        assert len(lanes_after(one.page, frames[0], {**frames[0], "at_ms": 99_000, "activity": running("z")})) == 3


def test_a_server_that_was_started_again_leaves_no_lane_of_the_one_before(
    browser: Browser, narrow_server: HttpServer
) -> None:
    """The first stream tells of a server whose clock is far ahead; the next one is the real server's."""
    frame = next(frames(narrow_server.url))
    began = frame["at_ms"] + 1_000_000
    before = [
        {**frame, "at_ms": began, "activity": frame["activity"] | running("old")},
        {**frame, "at_ms": began + 250, "activity": frame["activity"] | running()},
    ]
    body = "".join(f"event: frame\ndata: {json.dumps(each)}\n\n" for each in before)
    with visitor(browser, narrow_server.url) as one:
        page = one.page
        page.route("**/ui/api/live", lambda route: route.fulfill(content_type="text/event-stream", body=body), times=1)
        one.visit("#live")
        expect(page.locator(".lane-state")).to_have_text("ended")
        expect(page.locator(".lane")).to_have_count(0)
        expect(page.locator("#live-view")).to_have_attribute("data-frames", re.compile(r"[3-9]|\d\d"))


def test_a_few_times_of_several_models_are_told_of_the_one_that_has_some(
    browser: Browser, narrow_server: HttpServer
) -> None:
    frame = next(frames(narrow_server.url))
    few = {"count": 3, "last": 1_800.0, "p50": None, "p95": None, "p99": None}
    of_models = [("one", frame["figures"] | {"first_token_ms": few}), ("two", frame["figures"])]
    frame["models"] = [{"name": name, "figures": figures, "requests": []} for name, figures in of_models]
    frame["figures"] |= {"running": 2, "first_token_ms": None, "between_tokens_ms": None}
    body = f"event: frame\ndata: {json.dumps(frame | {'activity': frame['activity'] | running('old')})}\n\n"
    with visitor(browser, narrow_server.url) as one:
        page = one.page
        page.route("**/ui/api/live", lambda route: route.fulfill(content_type="text/event-stream", body=body))
        one.visit("#live")
        tile = page.locator(".tile", has_text="First word after")
        expect(tile.locator(".tile-value")).to_have_text("1.8")
        expect(tile.locator(".tile-note")).to_have_text("latest request, one")


def test_a_live_view_that_loses_the_server_tells_the_chat_at_once(browser: Browser, narrow_server: HttpServer) -> None:
    with visitor(browser, narrow_server.url) as one:
        page = one.visit().page
        page.clock.install()  # no look at a fixed time is due
        page.clock.pause_at(page.evaluate("Date.now() + 1_000"))
        page.route("**/ui/api/**", lambda route: route.abort())
        page.get_by_role("link", name="Live").click()
        expect(page.locator(".live-state")).to_contain_text("Retrying …")
        page.get_by_role("link", name="Chat").click()
        expect(page.locator("#model")).to_have_text("Server not reachable")
        one.problems = [each for each in one.problems if "ERR_FAILED" not in each]


def test_a_viewer_that_looks_away_costs_nothing(browser: Browser, narrow_server: HttpServer) -> None:
    with visitor(browser, narrow_server.url) as one:
        page = one.visit("#live").page
        expect(page.locator("#live-view")).to_have_attribute("data-frames", re.compile(r"[2-9]|\d\d"))
        with page.expect_event("requestfailed", lambda request: request.url.endswith("/ui/api/live")):
            page.get_by_role("link", name="Chat").click()
        one.problems.clear()  # Chromium notes the stream that was let go of


def test_what_is_shown_of_a_server_that_is_gone_is_said_to_be_of_before(
    browser: Browser, narrow_server: HttpServer
) -> None:
    """The first stream has a frame in which two requests run, and the next ones are not answered, until one is."""
    frame = next(frames(narrow_server.url))
    figures = frame["figures"] | {"running": 2}
    frame |= {"at_ms": frame["at_ms"] - 1_000, "figures": figures, "activity": frame["activity"] | running("a", "b")}
    with visitor(browser, narrow_server.url) as one:
        page = one.page
        page.route("**/ui/api/live", lambda route: route.abort())
        body = f"event: frame\ndata: {json.dumps(frame)}\n\n"
        page.route("**/ui/api/live", lambda route: route.fulfill(content_type="text/event-stream", body=body), times=1)
        one.visit("#live")
        figures, bar, state = (
            page.locator(".tile-value").first,
            page.locator("canvas").first,
            page.locator(".live-state"),
        )
        looks = "each => [getComputedStyle(each).color, getComputedStyle(each).opacity]"
        expect(page.locator(".live-words")).to_have_text("2 running")
        fresh = figures.evaluate(looks), bar.evaluate(looks)
        expect(state).to_have_text(re.compile(r"Retrying … Figures as of \d\d:\d\d:\d\d\.$"))
        expect(page.locator(".live-words")).to_be_hidden()
        stale = figures.evaluate(looks), bar.evaluate(looks)
        assert stale[0][0] != fresh[0][0]
        assert float(stale[1][1]) < float(fresh[1][1])
        assert violations(page) == []
        page.unroute("**/ui/api/live")
        expect(state).to_be_hidden()
        assert figures.evaluate(looks) == fresh[0]
        # The browser's own lines about the streams that were not answered.
        one.problems = [each for each in one.problems if "ERR_FAILED" not in each]


def test_a_view_that_has_heard_nothing_shows_no_figures(browser: Browser, narrow_server: HttpServer) -> None:
    with visitor(browser, narrow_server.url) as one:
        page = one.page
        page.route("**/ui/api/live", lambda route: route.abort())
        one.visit("#live")
        expect(page.locator(".live-state")).to_contain_text("Retrying …")
        assert page.locator(".tile:visible .tile-value").all_inner_texts() == [NO_FIGURE] * 4
        expect(page.locator(".live-words")).to_be_hidden()
        page.unroute("**/ui/api/live")
        expect(page.locator(".live-words")).to_have_text("Idle")
        # Each figure keeps its place and its unit, whether something is done or not.
        names = page.locator(".tile:visible .tile-name").all_inner_texts()[:4]
        assert names == ["Writing", "Reading", "First word after", "KV cache"]
        units = page.locator(".tile:visible .tile-unit")
        assert [units.nth(at).inner_text() for at in (0, 1)] == ["tokens/s"] * 2
        # The browser's own lines about the streams that were not answered.
        one.problems = [each for each in one.problems if "ERR_FAILED" not in each]


def test_a_question_that_waits_says_what_for_and_the_live_view_can_end_that(browser: Browser, tmp_path: Path) -> None:
    with saying(browser, tmp_path, "again ", "--max-sequences", "1", **ENDLESS) as one:
        page = one.visit().page
        settings = {"system": "", "priority": 1, "sampling": {"max_tokens": 16_000}}
        page.evaluate("settings => localStorage.setItem('uma.new-chats', JSON.stringify(settings))", settings)
        one.visit()
        one.ask("One")
        page.locator(".is-writing .block").first.wait_for()
        page.get_by_role("button", name="New chat", exact=True).click()
        one.ask("Two")
        expect(page.locator(".status")).to_contain_text("Waiting: next in the queue.")
        page.locator(".status a").click()
        lanes = page.locator(".lane")
        expect(lanes).to_have_count(2)
        assert lanes.locator(".lane-name").all_inner_texts() == ["this page: One", "this page: Two"]
        expect(lanes.locator(".lane-state")).to_have_text([re.compile("writing, [0-9,]+ tokens"), "next in line"])
        assert violations(page) == []
        page.get_by_role("button", name="End One").press("Enter")
        expect(lanes.first.locator("summary")).to_be_focused()  # its button is gone
        expect(lanes.filter(has_text="this page: One").locator(".lane-state")).to_have_text("ended by you")
        expect(lanes.filter(has_text="this page: Two").locator(".lane-state")).to_contain_text("writing")
        page.get_by_role("link", name="Chat").click()
        page.locator(".is-writing .block").first.wait_for()
        held: list[Route] = []

        def hold(route: Route) -> None:
            held.append(route)

        page.route("**/ui/api/answers/*", hold)
        page.get_by_role("button", name="Stop the answer").click()
        expect(page.locator(".status")).to_have_text("Stopping …")  # at once: the server has not been told
        began = time.monotonic()
        while not held:  # what the browser asks comes here during calls
            assert time.monotonic() - began < PATIENCE_SEC
            page.evaluate("null")
        held.pop().continue_()
        expect(page.locator(".note")).to_contain_text("Stopped.")
