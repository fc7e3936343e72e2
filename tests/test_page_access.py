"""The page on a narrow screen, by keyboard alone, and by what axe-core knows of screen readers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from http_server import HttpServer, running_http
from page_browser import Visitor, chromium, violations, visitor
from playwright.sync_api import Browser, Page, expect

from harness import is_settled, short_directory, until
from uma.http import keys


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


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
        page.emulate_media(color_scheme="dark" if theme == "dark" else "light", reduced_motion="reduce")
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
        one.tab_to("Edit and send again")
        page.keyboard.press("Enter")
        page.keyboard.press("Control+A")
        page.keyboard.type("Tell me a story about a fox")
        page.keyboard.press("Enter")
        one.wait_for_answer()
        expect(page.locator(".bubble")).to_have_text("Tell me a story about a fox")
        one.tab_to("Previous version")
        page.keyboard.press("Space")
        expect(page.locator(".bubble")).to_contain_text("What is UMA?")
        page.evaluate("document.activeElement.blur()")
        one.tab_to("Instructions and sampling")
        page.keyboard.press("Enter")
        expect(page.locator("#settings")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Instructions and sampling", exact=True)).to_be_focused()
        one.tab_to("This conversation")
        page.keyboard.press("Enter")
        one.tab_to("Rename")
        page.keyboard.press("Enter")
        page.keyboard.type("By keyboard")
        page.keyboard.press("Enter")
        expect(page.locator(".conversation")).to_have_text("By keyboard")
        page.evaluate("document.activeElement.blur()")
        one.tab_to("Live")
        page.keyboard.press("Enter")
        expect(page.locator("#live-view")).to_be_visible()


def choose(page: Page, file: Path) -> None:
    """Press the button that has the focus, and choose `file` where it asks for one."""
    with page.expect_file_chooser() as choosing:
        page.keyboard.press("Enter")
    choosing.value.set_files(file)


def saved(one: Visitor, button: str, file: Path) -> Path:
    """What the button of this name exports, saved as `file`."""
    one.tab_to(button)
    with one.page.expect_download() as saving:
        one.page.keyboard.press("Enter")
    saving.value.save_as(file)
    return file


def test_settings_and_a_file_reach_the_model_by_keyboard(
    browser: Browser, http_server: HttpServer, tmp_path: Path
) -> None:
    note = tmp_path / "note.txt"
    note.write_text("The fox is called Olga.")
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        one.tab_to("Instructions and sampling")
        page.keyboard.press("Enter")
        one.tab_to("Instructions (system prompt)")
        page.keyboard.type("You are a fox.")
        one.tab_to("Interactive goes before everything else")
        page.keyboard.press("ArrowDown")
        one.tab_to("Temperature")
        page.keyboard.press("ArrowLeft")
        one.tab_to("Most tokens")
        page.keyboard.type("4")
        page.keyboard.press("Escape")
        one.tab_to("Attach a text file")
        choose(page, note)
        expect(page.locator("#attached")).to_contain_text("note.txt")
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        page.keyboard.type("What is in the file?")
        with page.expect_request("**/ui/api/answers") as sent:
            page.keyboard.press("Enter")
        body = json.loads(sent.value.post_data or "")
        assert body["messages"][0] == {"role": "system", "content": "You are a fox."}
        assert "note.txt:\n```\nThe fox is called Olga." in body["messages"][1]["content"]
        sampling = body["sampling"]
        assert (body["priority"], sampling["temperature"], sampling["max_tokens"]) == (0, 0.65, 4)
        one.wait_for_answer()
        expect(page.locator(".figures")).to_contain_text("4 tokens")


def test_conversations_are_answered_again_branched_exported_and_imported_by_keyboard(
    browser: Browser, http_server: HttpServer, tmp_path: Path
) -> None:
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        one.ask("What is UMA?")
        one.wait_for_answer()
        one.tab_to("Answer again")
        page.keyboard.press("Enter")
        expect(page.get_by_role("group", name="Version 2 of 2")).to_be_visible()
        one.tab_to("Branch off into a new chat")
        page.keyboard.press("Enter")
        conversations = page.locator(".conversation")
        expect(conversations).to_have_count(2)
        both = saved(one, "Export all", tmp_path / "both.json")
        one.tab_to("This conversation")
        page.keyboard.press("Enter")
        branch = saved(one, "Export as JSON", tmp_path / "branch.json")
        one.tab_to("This conversation")
        page.keyboard.press("Enter")
        one.tab_to("Delete")
        page.keyboard.press("Enter")
        expect(conversations).to_have_count(1)
        for file, count in ((branch, 2), (both, 4)):
            one.tab_to("Import")
            choose(page, file)
            expect(conversations).to_have_count(count)
        expect(conversations.filter(has_text="(branch)")).to_have_count(2)


def test_a_server_with_keys_asks_for_one_until_it_is_right_and_then_no_more(browser: Browser) -> None:
    with short_directory() as directory:
        key = keys.add(directory / "keys.toml", "me")
        with (
            running_http(directory, "--http-keys", str(directory / "keys.toml")) as server,
            visitor(browser, server.url) as one,
        ):
            page = one.visit().page
            dialog = page.get_by_role("dialog", name="This server needs a key")
            for typed in ("uma-wrong", key):
                expect(dialog.get_by_label("Key")).to_be_focused()
                page.keyboard.type(typed)
                with page.expect_response("**/ui/api/info"):
                    page.keyboard.press("Enter")
            page.locator(".model-card b").wait_for()
            expect(dialog).to_be_hidden()
            page.reload()
            one.ask("What is UMA?")
            assert one.wait_for_answer()
            one.problems.clear()  # the browser's own lines about status 401


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
