"""The page on a narrow screen, by keyboard alone, and by what axe-core knows of screen readers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from http_server import HttpServer
from page_browser import LONG, chromium, violations, visitor
from playwright.sync_api import Browser, Page, expect

from harness import is_settled, until

MAX_TABS = 40
"""Nothing of the page is further away than this."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


def tab_to(page: Page, name: str) -> None:
    """Press Tab until the focus is on the element of this name."""
    seen = []
    for _ in range(MAX_TABS):
        page.keyboard.press("Tab")
        focus = "document.activeElement"
        seen.append(page.evaluate(f"{focus}.getAttribute('aria-label') ?? {focus}.textContent.trim()"))
        if seen[-1] == name:
            return
    raise AssertionError(f"{name!r} cannot be reached by Tab, only {seen}")


@contextmanager
def busy_live_view(page: Page, server: HttpServer) -> Iterator[None]:
    """The live view with a request of each lane, all of which end with the block."""
    page.get_by_role("link", name="Live").click()
    page.locator("#live-view[data-frames]").wait_for()  # it watches, and so sees each that comes
    with ExitStack() as stack:
        for priority in (1, 0, -1):
            raw = stack.enter_context(server.connect())
            body = {"prompt": f"{priority} fox", "max_tokens": 1_900, "ignore_eos": True, "logprobs": 5}
            raw.send("POST", "/v1/completions", {**body, "stream": True, "priority": priority})
        page.locator(".lane").nth(2).wait_for()
        yield
    until(server.process.metrics, is_settled)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_has_nothing_against_any_view(browser: Browser, http_server: HttpServer, theme: str) -> None:
    with visitor(browser, http_server.url) as one:
        page = one.page
        page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
        one.visit()
        page.locator(".model-card b").wait_for()
        assert violations(page) == []
        one.ask("How do I serve my own model?")
        one.wait_for_answer()
        assert violations(page) == []
        page.get_by_label("This conversation").click()
        page.get_by_role("button", name="Instructions and sampling", exact=True).click()
        assert violations(page) == []
        page.keyboard.press("Escape")
        with busy_live_view(page, http_server):
            assert violations(page) == []


def test_360_pixels_are_enough(browser: Browser, http_server: HttpServer) -> None:
    with visitor(browser, http_server.url, width=360, height=640) as one:
        page = one.visit().page
        one.ask("What is UMA?")
        one.wait_for_answer()
        assert violations(page) == []
        sideways = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(sideways) == 0
        expect(page.locator("#sidebar")).not_to_be_in_viewport()
        page.get_by_role("button", name="Show the list of conversations").click()
        expect(page.locator("#sidebar")).to_be_in_viewport()
        assert violations(page) == []
        page.locator(".conversation").click()
        expect(page.locator("#sidebar")).not_to_be_in_viewport()
        wide = "all => all.filter(each => each.getBoundingClientRect().right > innerWidth + 1).length"
        page.get_by_role("button", name="Instructions and sampling", exact=True).click()
        assert violations(page) == []
        assert page.evaluate(sideways) == 0
        assert page.locator("#settings, #settings *").evaluate_all(wide) == 0
        page.keyboard.press("Escape")
        with busy_live_view(page, http_server):
            assert violations(page) == []
            assert page.evaluate(sideways) == 0
            assert page.locator("#live-view *").evaluate_all(wide) == 0


def test_everything_can_be_done_by_keyboard(browser: Browser, http_server: HttpServer) -> None:
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        page.keyboard.type("What is UMA?")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("And who are you?")
        page.keyboard.press("Enter")
        one.wait_for_answer()
        expect(page.locator(".bubble")).to_have_text("What is UMA?\nAnd who are you?")
        page.keyboard.press("Control+Home")
        tab_to(page, "Edit and send again")
        page.keyboard.press("Enter")
        page.keyboard.press("Control+A")
        page.keyboard.type("Tell me a story about a fox")
        page.keyboard.press("Enter")
        one.wait_for_answer()
        expect(page.locator(".bubble")).to_have_text("Tell me a story about a fox")
        tab_to(page, "Previous version")
        page.keyboard.press("Space")
        expect(page.locator(".bubble")).to_contain_text("What is UMA?")
        page.evaluate("document.activeElement.blur()")
        tab_to(page, "Instructions and sampling")
        page.keyboard.press("Enter")
        expect(page.locator("#settings")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Instructions and sampling", exact=True)).to_be_focused()
        tab_to(page, "This conversation")
        page.keyboard.press("Enter")
        tab_to(page, "Rename")
        page.keyboard.press("Enter")
        page.keyboard.type("By keyboard")
        page.keyboard.press("Enter")
        expect(page.locator(".conversation")).to_have_text("By keyboard")
        page.evaluate("document.activeElement.blur()")
        tab_to(page, "Live")
        page.keyboard.press("Enter")
        expect(page.locator("#live-view")).to_be_visible()


def test_an_answer_is_stopped_repeated_branched_and_kept_by_keyboard(
    browser: Browser, http_server: HttpServer, tmp_path: Path
) -> None:
    note, saved = tmp_path / "note.txt", tmp_path / "saved.json"
    note.write_text("The fox is called Olga.\n")
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        page.evaluate("settings => localStorage.setItem('uma.settings', JSON.stringify(settings))", LONG)
        one.visit()
        page.keyboard.type("Tell me a story about a fox")
        page.keyboard.press("Enter")
        page.locator(".is-writing .block").first.wait_for()
        tab_to(page, "Stop the answer")
        page.keyboard.press("Enter")
        one.wait_for_answer()
        expect(page.locator(".note")).to_contain_text("Stopped.")
        tab_to(page, "Instructions and sampling")
        page.keyboard.press("Enter")
        page.get_by_label("Temperature", exact=True).focus()
        page.keyboard.press("Home")
        for name in ("Most tokens", "Fewest tokens"):
            page.get_by_label(name).focus()
            page.keyboard.press("Control+A")
            page.keyboard.type("9")
        page.keyboard.press("Escape")
        with page.expect_request("**/ui/api/answers") as sent:
            tab_to(page, "Answer again")
            page.keyboard.press("Enter")
        asked = json.loads(sent.value.post_data or "")["sampling"]
        assert (asked["temperature"], asked["max_tokens"], asked["min_tokens"]) == (0, 9, 9)
        one.wait_for_answer()
        tab_to(page, "Branch off into a new chat")
        page.keyboard.press("Enter")
        expect(page.locator("#title")).to_have_text("Tell me a story about a fox (branch)")
        with page.expect_file_chooser() as choosing:
            tab_to(page, "Attach a text file")
            page.keyboard.press("Enter")
        choosing.value.set_files(note)
        expect(page.locator("#attached")).to_contain_text("note.txt")
        with page.expect_download() as saving:
            tab_to(page, "Export all")
            page.keyboard.press("Enter")
        saving.value.save_as(saved)
        with page.expect_file_chooser() as choosing:
            tab_to(page, "Import")
            page.keyboard.press("Enter")
        choosing.value.set_files(saved)
        expect(page.locator(".conversation")).to_have_count(4)


def test_what_is_said_aloud(browser: Browser, http_server: HttpServer) -> None:
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        page.evaluate(
            """() => {
                window.said = [];
                const told = () => window.said.push(document.getElementById("announcer").textContent);
                new MutationObserver(told).observe(document.getElementById("announcer"), { childList: true });
            }"""
        )
        one.ask("What is UMA?")
        text = one.wait_for_answer()
        expect(page.locator("#announcer")).to_have_text(re.compile("^The answer is complete"))
        said = page.evaluate("window.said")
        # The answer itself, each part of it once and not at each token.
        assert sum(text.split("\n")[0][:40] in each for each in said) == 1
