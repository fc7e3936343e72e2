"""The next question while an answer is written, and why one that is there took so long."""

from __future__ import annotations

from pathlib import Path

from page_browser import ENDLESS, Visitor, saying, violations
from playwright.sync_api import Browser, expect


def test_enter_while_an_answer_is_written_sends_the_question_next(browser: Browser, tmp_path: Path) -> None:
    with saying(browser, tmp_path, "Again and again. ", "--max-tokens", "400", **ENDLESS) as here:
        page = here.visit().page
        here.ask("First?")
        page.locator(".is-writing .block").first.wait_for()
        here.ask("Second?")
        hint = page.locator("#hint")
        expect(hint).to_have_text("This is sent as soon as the answer is complete. Enter takes it back.")
        page.keyboard.press("Enter")
        expect(hint).to_have_text("Enter sends this once the answer is complete, Escape stops the answer.")
        page.keyboard.press("Enter")
        assert page.locator(".bubble").all_inner_texts() == ["First?"]
        expect(page.locator(".bubble")).to_have_text(["First?", "Second?"])
        expect(page.get_by_label("Message", exact=True)).to_have_value("")


def test_what_waits_behind_an_answer_that_is_stopped_stays_in_the_box(browser: Browser, tmp_path: Path) -> None:
    with saying(browser, tmp_path, "Again and again. ", "--max-tokens", "16000", **ENDLESS) as here:
        page = here.visit().page
        here.ask("First?")
        page.locator(".is-writing .block").first.wait_for()
        here.ask("Second?")
        page.keyboard.press("Escape")
        expect(page.locator(".note")).to_contain_text("Stopped.")
        expect(page.locator("#hint")).to_contain_text("Enter sends, Shift and Enter begin a new line")
        expect(page.get_by_label("Message", exact=True)).to_have_value("Second?")
        expect(page.locator(".bubble")).to_have_count(1)


def test_the_server_explains_where_an_answer_s_time_went(here: Visitor) -> None:
    page = here.visit().page
    here.ask("What is UMA?")
    here.wait_for_answer()
    page.set_viewport_size({"width": 1200, "height": 360})
    why = page.get_by_role("button", name="Why so long?")
    why.click()
    expect(page.locator(".why li").first).to_contain_text(" ms: ")
    bottoms = "['#scroller', '.why'].map(one => document.querySelector(one).getBoundingClientRect().bottom)"
    scroller, list_of_why = page.evaluate(bottoms)
    assert list_of_why <= scroller + 1  # of its last pixel a part can be shown
    expect(page.locator(".why")).to_contain_text("prompt tokens")
    assert violations(page) == []
    why.click()
    expect(page.locator(".why")).to_have_count(0)
    why.click()
    page.reload()  # it is known of answers that the browser keeps, too
    page.get_by_role("button", name="Why so long?").click()
    expect(page.locator(".why")).to_contain_text("Cache:")
