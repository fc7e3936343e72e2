"""The rows of the live view: where they stand, by keyboard and by ear, in a real browser that is given its frames."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from http_server import HttpServer
from page_browser import Visitor, violations, visitor
from playwright.sync_api import Browser, Page, expect

from uma.net.peer import script_of

FEED = """
const real = fetch;
window.begun = new Promise((begin) => { window.begin = begin; });
window.fetch = (url, how) => {
    if (!url.url?.endsWith("/live")) return real(url, how);
    const coder = new TextEncoder();
    const start = (control) => {
        window.feed = async (name, data) => {
            control.enqueue(coder.encode(`event: ${name}\\ndata: ${JSON.stringify(data)}\\n\\n`));
            for (let left = 3; left > 0; left--) await new Promise(requestAnimationFrame);
        };
        begin();
    };
    const headers = { "content-type": "text/event-stream" };
    return Promise.resolve(new Response(new ReadableStream({ start }), { headers }));
};
window.shifts = [];
new PerformanceObserver((list) => shifts.push(...list.getEntries().map(({ value }) => value)))
    .observe({ type: "layout-shift", buffered: true });
"""
"""For before the page's own script: frames are what the test gives, and layout shifts are kept."""
MAX_SHIFT = 0.01
"""A tenth of what counts as good on the web."""
FIGURES: dict[str, Any] = {
    **dict.fromkeys(("running", "waiting_interactive", "waiting_normal", "waiting_background"), 0),
    **dict.fromkeys(("written_per_sec", "read_per_sec"), 12.0),
    **dict.fromkeys(("cached_share", "first_token_ms", "between_tokens_ms", "slot_every_ms")),
}
METRICS = {"tokens_generated_total": 40, "prefill_tokens_total": 900, "kv_cells_used": 90, "kv_cells_total": 900}


def frame(at: int, running: str, waiting: str = "", **figures: Any) -> dict[str, Any]:
    """A frame in which these requests run and wait, each named by a letter; capitals are written, others are read."""

    def request(name: str) -> dict[str, Any]:
        done = 5 if name.isupper() else 0
        number = ord(name.lower())
        tokens = {
            "prompt_tokens": 50,
            "cached_tokens": 0,
            "computed_tokens": 50 if done else 9,
            "generated_tokens": done,
        }
        origin = f"report.py · Python-urllib/3.11 · chat/completions · pid {number}"
        return {
            "id": f"id-{name.lower()}",
            "number": number,
            "priority": 0,
            "age_ms": 9_000.0,
            "origin": origin,
            **tokens,
        }

    counts = {"running": len(running), "waiting_normal": len(waiting)}
    queue = [request(each) | {"waits_for": "slot", "computed_tokens": 0} for each in waiting]
    return {
        "at_ms": 250 * at,
        "figures": FIGURES | counts | figures,
        "metrics": METRICS | {"requests_total": at},
        "models": [],
        "activity": {"running": [request(each) for each in running], "waiting": queue, "waiting_normal": len(waiting)},
    }


def feed(page: Page, *frames: dict[str, Any]) -> None:
    """Show these, one after the other, each for as long as the browser takes to draw it."""
    for each in frames:
        page.evaluate("frame => feed('frame', frame)", each)


@pytest.fixture
def fed(browser: Browser, http_server: HttpServer) -> Iterator[Visitor]:
    """The live view in a window whose frames are given by `feed`."""
    with visitor(browser, http_server.url, height=900) as one:
        one.page.add_init_script(FEED)
        one.visit("#live")
        one.page.evaluate("begun")
        yield one
        # The browser's own lines about requests that the server knows nothing of.
        one.problems = [each for each in one.problems if "404" not in each]


@pytest.mark.parametrize("width", [360, 768, 1200])
def test_nothing_moves_while_requests_come_and_go(fed: Visitor, width: int) -> None:
    page = fed.page
    page.set_viewport_size({"width": width, "height": 900})
    feed(page, frame(1, ""))
    page.evaluate("() => { shifts.length = 0; }")
    times = {"first_token_ms": {"count": 900, "last": 9_000.0, "p50": 3_100.0, "p95": 12_000.0, "p99": 14_000.0}}
    feed(page, frame(2, "a"), frame(3, "abc"), frame(4, "ABc", "defg", slot_every_ms=4_000.0))
    feed(page, frame(5, "BCd", "efgh", **times), frame(15, "CDe", "fgh", cached_share=0.4), frame(20, "De", "fg"))
    assert page.locator(".lane").count() > 5
    assert page.evaluate("shifts.reduce((sum, each) => sum + each, 0)") <= MAX_SHIFT
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert violations(page) == []


def test_rows_are_walked_by_keys_and_a_row_that_ends_keeps_the_focus(fed: Visitor) -> None:
    page = fed.page
    feed(page, frame(1, "ab", "c"))
    page.evaluate("feed('own', { ids: ['id-a', 'id-b', 'id-c'] })")
    feed(page, frame(2, "ab", "c"))
    row = page.locator(".lane")
    row.first.locator("summary").focus()
    page.keyboard.press("ArrowDown")
    expect(row.nth(1).locator("summary")).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")  # there is none below the last
    expect(row.nth(2).locator("summary")).to_be_focused()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    expect(row.nth(1).locator(".lane-more")).to_be_visible()
    expect(row.nth(1).locator(".lane-more")).to_contain_text("request id-b")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="End report.py · Python-urllib/3.11 #98")).to_be_focused()
    assert row.nth(1).locator(".icon-button").evaluate("each => getComputedStyle(each).outlineStyle") != "none"
    feed(page, frame(3, "a", "c"), frame(30, "acde"), frame(400, "acde"))
    # It is looked at, so no other request has its place.
    expect(row.nth(1).locator("summary")).to_be_focused()
    expect(row.nth(1).locator(".lane-of")).to_have_text("#98")
    assert violations(page) == []


def test_what_happens_is_told_to_screen_readers_and_not_each_time_that_it_changes(fed: Visitor) -> None:
    page = fed.page
    feed(page, frame(1, "ab", "c"), frame(2, "abc"), frame(3, "ab", "cd"), frame(4, "a"))
    expect(page.locator("#live-hint")).to_have_text("")
    expect(page.locator("#live-words")).to_have_text("1 running")
    assert page.locator("#announcer p").all_inner_texts() == ["2 running, 1 waiting"]


def test_the_heading_counts_the_prompts_whose_rows_say_that_they_wait(fed: Visitor) -> None:
    page = fed.page
    storm = frame(1, "abc")
    for each, cause in zip(storm["activity"]["running"], ("", "prompt", "prefix"), strict=True):
        each["waits_for"] = cause
    feed(page, storm)
    expect(page.locator(".lane-state")).to_have_text(["reading 18 %", "its prompt waits", "its prompt waits"])
    expect(page.locator("#live-words")).to_have_text("3 running")
    expect(page.locator("#live-hint")).to_have_text("2 prompts wait to be read.")


@pytest.mark.parametrize("models", [0, 2])
@pytest.mark.parametrize("width", [360, 1200])
def test_the_button_stands_at_the_middle_of_its_row_and_the_ring_is_off_the_details(
    fed: Visitor, width: int, models: int
) -> None:
    page = fed.page
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("feed('own', { ids: ['id-a'] })")
    names = [{"name": f"model {at}", "figures": FIGURES, "requests": [97]} for at in range(models)]
    feed(page, frame(1, "a") | {"models": names})
    summary = page.locator(".lane summary")
    for _ in range(2):  # closed, then open
        row, button = summary.bounding_box(), page.locator(".lane > .icon-button").bounding_box()
        assert row is not None and button is not None
        assert abs(row["y"] + row["height"] / 2 - button["y"] - button["height"] / 2) <= 1
        summary.press("Enter")
    assert summary.evaluate("each => parseFloat(getComputedStyle(each).outlineOffset)") < 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_request_that_never_wrote_has_ended_after_a_time(fed: Visitor) -> None:
    feed(fed.page, frame(1, "a"))
    expect(fed.page.locator(".lane-speed")).to_have_text("for 9.0 s")
    feed(fed.page, frame(2, ""))
    expect(fed.page.locator(".lane.is-over .lane-speed")).to_have_text("after 9.0 s")


def test_lines_of_models_are_for_several_or_one_that_loads(fed: Visitor) -> None:
    page, lines = fed.page, fed.page.locator("#live-models")
    figures = FIGURES | {"running": 1, "waiting_normal": 1, "slot_every_ms": 220.0}
    one: dict[str, Any] = {"name": "one", "figures": figures, "requests": []}
    feed(page, frame(1, "a") | {"models": [one]})
    expect(lines).to_be_hidden()
    feed(page, frame(2, "a") | {"models": [{"name": "one", "figures": None, "load": "loading 9 %", "requests": []}]})
    expect(lines).to_contain_text("loading 9 %")
    feed(page, frame(3, "a") | {"models": [one, one | {"name": "two"}]})
    expect(lines.locator("li").first).to_contain_text("1 waiting, starts in about 0.2 s")


def test_of_several_models_the_one_with_the_latest_first_word_is_told(fed: Visitor) -> None:
    page, note = fed.page, fed.page.locator(".tile", has_text="First word after").locator(".tile-note")
    few = {"last": 900.0, "p50": None, "p95": None, "p99": None}
    for number, counts in enumerate(([2, 1], [2, 2], [1, 2]), 1):
        timed = [FIGURES | {"first_token_ms": few | {"count": count}} for count in counts]
        models = [{"name": name, "figures": own, "requests": []} for name, own in zip("ab", timed, strict=True)]
        none = {"figures": FIGURES | {"first_token_ms": None}}
        feed(page, frame(number, "a") | none | {"models": models})
        expect(note).to_have_text(f"latest request, {'a' if number == 1 else 'b'}")


def test_of_several_models_the_one_with_the_fullest_cache_is_told(fed: Visitor) -> None:
    page, tile = fed.page, fed.page.locator(".tile", has_text="KV cache")
    cells = ({"kv_cells_used": 10, "kv_cells_total": 1_000}, {"kv_cells_used": 90, "kv_cells_total": 100})
    models = [{"name": name, "figures": FIGURES, "requests": [], **own} for name, own in zip("ab", cells, strict=True)]
    feed(page, frame(1, "a") | {"models": models})
    expect(tile.locator(".tile-value")).to_have_text("90")
    expect(tile.locator(".tile-note")).to_have_text("b: 90 of 100 tokens")
    expect(page.locator("#live-models li")).to_contain_text(["KV cache 1 % full", "KV cache 90 % full"])
    models[0]["figures"] = FIGURES | {"running": 1}  # a full one that is idle keeps nobody waiting
    models[1]["figures"] = FIGURES | {"running": 0}
    feed(page, frame(2, "a") | {"models": models})
    expect(tile.locator(".tile-note")).to_have_text("a: 10 of 1,000 tokens")
    feed(page, frame(3, "a"))
    expect(tile.locator(".tile-note")).to_have_text("90 of 900 tokens")


def test_each_tile_draws_its_last_minute_and_forgets_it_with_the_server(fed: Visitor) -> None:
    page = fed.page
    columns = "() => document.querySelector('.tile polygon').points.length - 2"
    for at in range(1, 5):
        feed(page, frame(at, "a", written_per_sec=100.0 * at))
        assert page.evaluate(columns) == at
    tops = "() => [...document.querySelector('.tile polygon').points].slice(1, -1).map(({ y }) => y)"
    assert page.evaluate(tops) == [18, 12, 6, 0]  # the highest is as high as there is space
    feed(page, frame(1, "a"))  # a server that was started again
    assert page.evaluate(columns) == 1


def test_at_any_width_no_figure_lies_on_the_words_above_it(fed: Visitor) -> None:
    page = fed.page
    loading = [
        {"name": f"a-model-with-a-long-name-{each}", "load": "loading 9 %", "waiting": 9, "requests": []}
        for each in "abc"
    ]
    for width in (320, 360, 800, 1440):
        page.set_viewport_size({"width": width, "height": 640})
        feed(page, frame(1, "abc", "defghij") | {"models": loading})
        boxes = [page.locator(each).bounding_box() for each in ("#live-words", "#live-hint", "#tiles", "#live-models")]
        edges = [(box["y"], box["y"] + box["height"]) for box in boxes if box]
        assert len(edges) == 4
        assert all(below >= end for (_, end), (below, _) in pairwise(edges)), (width, edges)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_end_of_a_request_that_has_ended_meanwhile_is_said(fed: Visitor) -> None:
    page = fed.page
    page.evaluate("feed('own', { ids: ['id-a', 'id-b'] })")
    feed(page, frame(1, "ab"))
    end = page.get_by_role("dialog").get_by_role("button", name="End request")
    page.get_by_role("button", name="#97").click()
    end.click()  # the server knows none of this id
    expect(page.locator(".toast")).to_contain_text("#97 had already ended.")
    page.get_by_role("button", name="Dismiss").click()
    page.get_by_role("button", name="#98").click()
    feed(page, frame(2, "a"))
    end.click()
    expect(page.locator(".toast")).to_contain_text("#98 had already ended.")
    expect(page.locator(".lane.is-over .lane-state")).not_to_have_text("ended by you")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_script_is_named_by_its_file_and_code_on_the_command_line_by_nothing(tmp_path: Path) -> None:
    file = tmp_path / "nightly_report.py"
    file.write_text("print('ready', flush=True); input()\n")
    for words, name in (([str(file)], file.name), (["-c", file.read_text()], "")):
        with subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            assert script_of(process.pid) == name
            process.communicate(b"\n")
