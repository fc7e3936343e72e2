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
"""Lanes of requests of which nothing is computed yet."""
FEW = 20
"""Fewer times than these have no percentiles."""
NO_FIGURE = "\N{EN DASH}"
"""What a tile shows where there is nothing to be told yet."""
AT_MOST = " At most 2 run at once (--max-sequences)."
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
        parts: pairs(".bar + .legend li", (part) => [part.textContent.replace(/^[\\d,]+ /, ""), text(part, "b")]),
        lanes: pairs(".lane:not(.is-over)", (lane) => [lane.dataset.id, text(lane, ".lane-figures")]),
        states: pairs(".lane:not(.is-over)", (lane) => [lane.dataset.id, text(lane, ".lane-state")]),
        names: pairs(".lane:not(.is-over)", (lane) => [lane.dataset.id, text(lane, ".lane-name")]),
        more: [...view.querySelectorAll(".lanes > .panel-note")].map((each) => each.textContent),
        layout: text(view, ".panel-head .panel-note"),
        running: text(view, ".live-words"),
    });
    new MutationObserver(look).observe(view, { attributeFilter: ["data-frames"] });
}"""
"""Keeps every figure that the page shows, as it is right after each frame."""


def test_a_storm_is_seen_in_the_browser(browser: Browser, narrow_server: HttpServer) -> None:
    with visitor(browser, narrow_server.url) as one, ThreadPoolExecutor(STORM) as pool:
        one.page.add_init_script(NOTE_FRAMES)
        page = one.visit("#live").page
        page.evaluate(NOTE_WHAT_IS_SHOWN)
        expect(page.locator(".nothing")).to_be_visible()
        asked = [pool.submit(ask, narrow_server, number, "elk") for number in range(STORM)]
        page.locator(".lane").first.wait_for()
        page.locator(".lane-state", has_text="writing").first.wait_for()
        page.locator(".lane.is-over .lane-state", has_text="finished at its length limit").first.wait_for()
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
        page.locator(".nothing").wait_for()  # its lanes linger, and go
        noted, shown = page.evaluate("[noted, shown]")
    assert len(shown) > 4
    for each in shown:
        check_figures(each, noted[: each["frames"]])
    assert any(each["running"].startswith("2 requests running, ") for each in shown)
    assert any(each["more"] for each in shown)
    assert all(re.fullmatch(r"shared by all requests|[\d,]+ tokens per request", each["layout"]) for each in shown)
    assert any(each["running"].endswith(AT_MOST) for each in shown)
    for name in ("used by requests", "cached for later prompts"):
        assert any(each["parts"][name] != "0" for each in shown), name


def test_requests_of_one_program_are_told_apart_by_their_users(browser: Browser, narrow_server: HttpServer) -> None:
    with visitor(browser, narrow_server.url) as one, ThreadPoolExecutor(2) as pool:
        page = one.visit("#live").page
        page.locator(".nothing").wait_for()
        for number, name in enumerate(("alice", "bo\nb")):
            pool.submit(ask, narrow_server, number, "emu", user=name, max_tokens=400)
        lanes = page.locator(".lane")
        expect(lanes).to_have_count(2)
        names = sorted(lanes.locator(".lane-name").all_inner_texts())
        assert names == ["user alice · storm/1.0", "user bob · storm/1.0"]


def check_figures(shown: dict[str, Any], frames: list[dict[str, Any]]) -> None:
    """That what is shown is what the frames say, up to the last digit of each figure."""
    metrics, activity, now = frames[-1]["metrics"], frames[-1]["activity"], frames[-1]["figures"]
    waiting = {name: now[f"waiting_{name}"] for name in ("interactive", "normal", "background")}
    cached = min(metrics["cache_evictable_size"], metrics["kv_cells_used"])
    assert {name: figure(text) for name, text in shown["parts"].items()} == {
        "used by requests": metrics["kv_cells_used"] - cached,
        "cached for later prompts": cached,
        "free": metrics["kv_cells_total"] - metrics["kv_cells_used"],
    }
    everyone = [*activity["running"], *queue_of(activity)]
    told = [each for each in everyone if each["id"] in shown["lanes"]]
    assert shown["lanes"] == {each["id"]: lane_figures(each) for each in told}
    assert shown["states"] == {each["id"]: lane_state(each, activity) for each in told}
    # The program alone: not each time by which endpoint it came.
    assert set(shown["names"].values()) <= {"storm/1.0"}
    assert all(each in told for each in everyone if is_begun(each))
    assert all(each in told for each in [each for each in everyone if not is_begun(each)][:MAX_WAITING])
    hidden = len(everyone) - len(told)
    assert shown["more"] == ([f"and {hidden} more"] if hidden else [])
    total = sum(waiting.values())
    runs = f"{now['running']} request{'s' * (now['running'] != 1)} running" if now["running"] or total else "Idle"
    if total:
        kinds = ", ".join(f"{count} {name}" for name, count in waiting.items() if count)
        runs += f", {total} waiting ({kinds})"
    words = shown["running"].removesuffix(AT_MOST)
    assert re.fullmatch(re.escape(runs) + r"(: the last begins in about [\d,.]+ m?s)?\.", words)
    check_tiles(shown["tiles"], now, metrics)


def queue_of(activity: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that wait for a first slot; defaults are left out of a frame."""
    found: list[dict[str, Any]] = activity.get("waiting", [])
    return found


def is_waiting(request: dict[str, Any]) -> bool:
    return bool(request.get("waits_for")) or bool(request.get("is_preempted"))


def is_begun(request: dict[str, Any]) -> bool:
    """Whether something of it was computed."""
    computed = request["computed_tokens"] > request["cached_tokens"] or request["generated_tokens"]
    return not is_waiting(request) or bool(computed)


def is_writing(request: dict[str, Any]) -> bool:
    return bool(request["generated_tokens"]) or request["computed_tokens"] >= request["prompt_tokens"]


def lane_figures(request: dict[str, Any]) -> str:
    cached = f" ({request['cached_tokens']:,} cached)" if request["cached_tokens"] else ""
    is_begun = request["generated_tokens"] or (is_writing(request) and not is_waiting(request))
    written = f" · answer {request['generated_tokens']:,}" if is_begun else ""
    return f"prompt {request['prompt_tokens']:,}{cached}{written}"


def lane_state(request: dict[str, Any], activity: dict[str, Any]) -> str:
    """What is done for a request, or why nothing is."""
    if not is_waiting(request):
        share = 100 * request["computed_tokens"] // request["prompt_tokens"]
        return "writing" if is_writing(request) else f"reading {share} %"
    if request.get("waits_for") == "prompt":
        (first,) = (each for each in activity["running"] if each["id"] == request["behind"])
        left = first["prompt_tokens"] - first["computed_tokens"]
        program = first["origin"].partition(" · ")[0]
        return f"after the prompt of {program}, {left:,} token{'s' * (left != 1)} to go"
    if request.get("waits_for") == "prefix":
        return "until another request has read the same prompt prefix"
    if request.get("is_preempted"):
        return "paused for a request of higher priority"
    ahead = queue_of(activity)[: [each["id"] for each in queue_of(activity)].index(request["id"])]
    higher = sum(each["priority"] > request["priority"] for each in ahead)
    why = ", until the KV cache has space for its prompt" if request.get("waits_for") == "cells" else ""
    if not ahead:
        return f"next in the queue{why}"
    return f"{len(ahead)} ahead{why}" + (f", {higher} of higher priority" if higher else "")


def check_tiles(tiles: dict[str, list[str]], figures: dict[str, Any], metrics: dict[str, Any]) -> None:
    for tile, name, counter in (
        ("Writing", "written_per_sec", "tokens_generated_total"),
        ("Reading", "read_per_sec", "prefill_tokens_total"),
    ):
        value, unit, note = tiles[tile]
        if figures[name] >= 0.5:
            assert is_rounded(value, figures[name])
            assert (unit, note) == ("tokens/s", f"{metrics[counter]:,} in all")
    for tile, name in (("First token", "first_token_ms"), ("Between tokens", "between_tokens_ms")):
        value, unit, note = tiles[tile]
        if figures[name] is None:
            assert tiles[tile] == [NO_FIGURE, "", "none yet"]
            continue
        if (count := figures[name]["count"]) < FEW:
            assert note == f"the last of {count}"
            continue
        told = re.fullmatch(rf"median of {count:,}, p95 (.+), p99 (.+)", note)
        assert told is not None, note
        # Two digits: more is not known of what lies in a bucket.
        for text, exact in zip((f"{value} {unit}", told[1], told[2]), list(figures[name].values())[2:], strict=True):
            step = 10.0 ** (math.floor(math.log10(exact)) - 1)
            assert is_rounded(text, exact, step), text
    value, unit, _ = tiles["Cache hits"]
    share = figures["cached_share"]
    assert unit == "%" and is_rounded(value, 100 * (share or 0))
    assert tiles["Preemptions"][0] == f"{metrics['preemptions_total']:,}"


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
    first = {"id": "a", "priority": 0, "prompt_tokens": 9, "cached_tokens": 0, "is_preempted": False}
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
            [".lane-state", ".lane-figures"].map((what) => lane.querySelector(what).textContent).join(""));
    }"""
    with visitor(browser, narrow_server.url) as one:
        assert one.visit().page.evaluate(script, running) == ["writingprompt 9 · answer 3"]
        assert one.page.evaluate(script, running[::-1]) == ["writingprompt 9 · answer 3"]


def lanes_after(page: Page, *frames: dict[str, Any]) -> list[list[str]]:
    """The page's own lanes in its live view after these frames, each as its name and its state, below their groups."""
    script = """async (frames) => {
        const { Lanes } = await import("/ui/lanes.js");
        const list = document.querySelector("#live-view .lanes");
        const lanes = new Lanes(list);
        for (const frame of frames) lanes.take(frame);
        const text = (from, what) => from.querySelector(what).textContent.replaceAll("\u00a0", " ");
        return [...list.children].map((lane) =>
            lane.matches(".lane") ? [text(lane, ".lane-name"), text(lane, ".lane-state")] : [lane.textContent]);
    }"""
    found: list[list[str]] = page.evaluate(script, frames)
    return found


def running(*ids: str) -> dict[str, Any]:
    """A snapshot in which these run."""
    figures = {"prompt_tokens": 9, "cached_tokens": 0, "computed_tokens": 12, "generated_tokens": 3}
    return {"running": [{"id": id, "priority": 0, "is_preempted": False, **figures} for id in ids]}


def test_lanes_that_have_ended_stand_below_those_that_run_and_can_be_read(
    browser: Browser, narrow_server: HttpServer
) -> None:
    with visitor(browser, narrow_server.url) as one:
        one.visit("#live")
        one.page.locator("#live-view[data-frames]").wait_for()
        states = ["a", "b", "c"], ["b", "c"], ["b", "d"]
        frames = [{"at_ms": 250 * at, "activity": running(*ids), "models": []} for at, ids in enumerate(states, 1)]
        found = lanes_after(one.page, *frames)
        assert found == [["Writing2"], ["b", "writing"], ["d", "writing"], ["Ended2"], ["c", "ended"], ["a", "ended"]]
        assert violations(one.page) == []


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


def test_what_was_before_the_view_is_said_to_be_not_recorded_and_a_few_times_are_told_of_their_model(
    browser: Browser, narrow_server: HttpServer
) -> None:
    frame = next(frames(narrow_server.url))
    few = {"count": 3, "last": 1_800.0, "p50": None, "p95": None, "p99": None}
    of_models = [("one", frame["figures"] | {"first_token_ms": few}), ("two", frame["figures"])]
    frame["models"] = [{"name": name, "figures": figures, "requests": []} for name, figures in of_models]
    frame["figures"] |= {"running": 2, "first_token_ms": None, "between_tokens_ms": None}
    old = frame["activity"] | running("old", "young")
    old["running"] = [each | {"age_ms": 60_000 if each["id"] == "old" else 100} for each in old["running"]]
    body = f"event: frame\ndata: {json.dumps(frame | {'activity': old})}\n\n"
    drawn = """canvas => {
        const [half, tall] = [Math.floor(canvas.width / 2), canvas.height];
        const { data } = canvas.getContext("2d").getImageData(0, 0, half, tall);
        return data.filter((alpha, at) => at % 4 === 3 && alpha).length;
    }"""
    with visitor(browser, narrow_server.url) as one:
        page = one.page
        page.route("**/ui/api/live", lambda route: route.fulfill(content_type="text/event-stream", body=body))
        one.visit("#live")
        tile = page.locator(".tile", has_text="First token")
        expect(tile.locator(".tile-value")).to_have_text("1.8")
        expect(tile.locator(".tile-note")).to_have_text("the last of 3, one")
        canvas = {each: page.locator(f".lane[data-id={each}] canvas") for each in ("old", "young")}
        assert canvas["old"].evaluate(drawn) > 0
        assert canvas["young"].evaluate(drawn) == 0


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
        figures, bar, state = page.locator(".tile-value").first, page.locator(".bar").first, page.locator(".live-state")
        looks = "each => [getComputedStyle(each).color, getComputedStyle(each).opacity]"
        expect(page.locator(".live-words")).to_have_text("2 requests running.")
        fresh = figures.evaluate(looks), bar.evaluate(looks)
        expect(state).to_have_text(re.compile(r"Retrying … Figures as of \d\d:\d\d:\d\d\.$"))
        expect(page.locator(".live-words")).to_have_text("2 requests running.")
        stale = figures.evaluate(looks), bar.evaluate(looks)
        assert stale[0][0] != fresh[0][0]
        assert float(stale[1][1]) < float(fresh[1][1])
        assert violations(page) == []
        page.unroute("**/ui/api/live")
        expect(state).to_be_hidden()
        assert (figures.evaluate(looks), bar.evaluate(looks)) == fresh
        # The browser's own lines about the streams that were not answered.
        one.problems = [each for each in one.problems if "ERR_FAILED" not in each]


def test_a_view_that_has_heard_nothing_shows_no_figures(browser: Browser, narrow_server: HttpServer) -> None:
    with visitor(browser, narrow_server.url) as one:
        page = one.page
        page.route("**/ui/api/live", lambda route: route.abort())
        one.visit("#live")
        expect(page.locator(".live-state")).to_contain_text("Retrying …")
        assert page.locator(".legend b").all_inner_texts() == [NO_FIGURE] * 3
        assert page.locator(".tile:visible .tile-value").all_inner_texts() == [NO_FIGURE] * 4
        expect(page.locator(".nothing")).to_be_hidden()
        expect(page.locator(".axis")).to_be_hidden()
        page.unroute("**/ui/api/live")
        expect(page.locator(".nothing")).to_be_visible()
        expect(page.locator(".legend b").first).not_to_have_text(NO_FIGURE)
        # Each figure keeps its place and its unit, whether something is done or not.
        names = page.locator(".tile:visible .tile-name").all_inner_texts()[:4]
        assert names == ["Writing", "Reading", "First token", "Between tokens"]
        units = page.locator(".tile:visible .tile-unit")
        assert [units.nth(at).inner_text() for at in (0, 1)] == ["tokens/s"] * 2
        # The browser's own lines about the streams that were not answered.
        one.problems = [each for each in one.problems if "ERR_FAILED" not in each]


COVERED = """[...document.querySelectorAll(".lane")].flatMap((lane) => {
    const end = lane.querySelector(".icon-button svg").getBoundingClientRect();
    return [...lane.querySelectorAll("span:not(:has(svg))")].filter((each) => {
        const { left, right, top, bottom } = each.getBoundingClientRect();
        return left < end.right && right > end.left && top < end.bottom && bottom > end.top;
    }).map((each) => each.textContent);
})"""
"""Words that a lane's button lies on."""


def test_a_question_that_waits_says_what_for_and_the_live_view_can_end_that(browser: Browser, tmp_path: Path) -> None:
    with saying(browser, tmp_path, "again ", "--max-sequences", "1", **ENDLESS) as one:
        page = one.visit().page
        settings = {"system": "", "priority": 1, "sampling": {"max_tokens": 16_000}}
        page.evaluate("settings => localStorage.setItem('uma.settings', JSON.stringify(settings))", settings)
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
        assert lanes.locator(".lane-state").all_inner_texts() == ["writing", "next in the queue"]
        assert page.locator(".lane-group").all_inner_texts() == ["Writing\n1", "Waiting\n1"]
        assert violations(page) == []
        for size in (1440, 1024, 390):
            page.set_viewport_size({"width": size, "height": 844})
            assert page.evaluate(COVERED) == [], size
        page.get_by_role("button", name="End One").press("Enter")
        expect(page.get_by_role("button", name="End Two")).to_be_focused()  # its own is gone
        expect(lanes.filter(has_text="this page: One").locator(".lane-state")).to_have_text("ended by you")
        expect(lanes.filter(has_text="this page: Two").locator(".lane-state")).to_have_text("writing")
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
