"""The next question while an answer is written, and why one that is there took so long."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from page_browser import ENDLESS, Visitor, saying, unfold_settings, violations
from playwright.sync_api import Browser, Page, expect

from harness import until


def test_enter_while_an_answer_is_written_sends_the_question_next(browser: Browser, tmp_path: Path) -> None:
    with saying(browser, tmp_path, "Again and again. ", "--max-tokens", "16000", **ENDLESS) as here:
        page = here.visit().page
        box, bubbles = page.get_by_label("Message", exact=True), page.locator(".bubble")
        hint = page.locator(".fine:visible")
        here.ask("First?")
        page.locator(".is-writing .block").first.wait_for()
        here.ask("Second?")
        queued = page.get_by_role("list", name="Queued questions").locator(".what")
        expect(queued).to_have_text(["Second?"])
        expect(hint).to_have_text("Enter queues your next question, Escape stops the answer.")
        here.ask("More?")
        expect(queued).to_have_text(["Second?", "More?"])
        assert violations(page) == []
        page.reload()
        expect(queued).to_have_text(["Second?", "More?"])
        page.get_by_role("button", name="Do not send “More?”").press("Enter")
        expect(box).to_be_focused()
        page.keyboard.press("ArrowUp")
        expect(box).to_have_value("Second?")
        expect(queued).to_have_count(0)
        page.keyboard.press("Enter")
        # A stop leaves what was entered before it in the box, and sends what is entered after it, however soon.
        page.keyboard.press("Escape")
        expect(page.locator(".note")).to_contain_text("Stopped.")
        expect(hint).to_contain_text("Enter to send, Shift+Enter for a new line")
        expect(box).to_have_value("Second?")
        page.keyboard.press("Enter")
        page.locator(".is-writing .block").first.wait_for()
        page.keyboard.press("Escape")
        here.ask("Third?")
        expect(bubbles).to_have_text(["First?", "Second?", "Third?"])
        page.locator(".is-writing .block").first.wait_for()
        page.keyboard.press("Escape")
        page.locator("#chips").click()
        page.get_by_label("Max tokens").fill("400")
        page.keyboard.press("Escape")
        for text in ("Fourth?", "Fifth?", "Sixth?"):
            here.ask(text)
        expect(box).to_have_value("")
        # What waits is sent although another conversation is shown, and what is in its box stays there.
        page.get_by_role("button", name="New chat", exact=True).click()
        expect(page.locator("#empty")).to_be_visible()
        expect(queued).to_have_count(0)
        box.fill("Elsewhere")
        expect(page.locator("#live-dot")).to_be_hidden()  # all have been answered
        expect(box).to_have_value("Elsewhere")
        page.locator(".conversation").click()
        expect(bubbles).to_have_text(["First?", "Second?", "Third?", "Fourth?", "Fifth?", "Sixth?"])
        expect(box).to_have_value("")


def test_the_server_explains_where_an_answer_s_time_went(here: Visitor) -> None:
    page = here.visit().page
    here.ask("What is UMA?")
    here.wait_for_answer()
    page.set_viewport_size({"width": 1200, "height": 360})
    why = page.get_by_role("button", name="Timing")
    why.click()
    whole = r"^First word after [\d.]+ m?s, all of the answer after [\d.]+ m?s. Of that:"
    expect(page.locator(".why > li").first).to_have_text(re.compile(whole))
    spent = re.compile(r"[\d.]+ m?s (reading its prompt, \d+ tokens|writing its answer)")
    expect(page.locator(".why > li:first-child > ul > li")).to_contain_text([spent])
    bottoms = "['#scroller', '.why'].map(one => document.querySelector(one).getBoundingClientRect().bottom)"
    scroller, list_of_why = page.evaluate(bottoms)
    assert list_of_why <= scroller + 1  # of its last pixel a part can be shown
    expect(page.locator(".why")).to_contain_text("prompt tokens")
    assert violations(page) == []
    why.click()
    expect(page.locator(".why")).to_have_count(0)
    why.click()
    page.reload()  # it is known of answers that the browser keeps, too
    page.get_by_role("button", name="Timing").click()
    expect(page.locator(".why > li")).to_contain_text(
        [
            "Of that:",
            re.compile(r"^(All \d+ prompt tokens were read|[1-9]\d* of \d+ prompt tokens were cached)\.$"),
        ]
    )


def test_names_in_an_explanation_are_code_and_its_last_line_stands_clear_of_the_box(here: Visitor) -> None:
    page = here.visit().page
    told = {"lines": [*[["1.0 s reading"]] * 30, ["The system's `top` shows it."]], "reason": "stop"}
    page.route("**/ui/api/why/*", lambda route: route.fulfill(json=told))
    here.ask("What is UMA?")
    here.wait_for_answer()
    page.get_by_role("button", name="Timing").click()
    expect(page.locator(".why code")).to_have_text("top")
    expect(page.locator(".why li").last).to_have_text("The system's top shows it.")
    bottoms = "['#scroller', '.why'].map(one => document.querySelector(one).getBoundingClientRect().bottom)"
    scroller, last = page.evaluate(bottoms)
    assert scroller - last >= 8


def test_code_in_a_question_is_shown_as_code(here: Visitor) -> None:
    page = here.visit().page
    here.ask("What does *this* do?\n```python\nx = [1]\n```\n```python\ny = 2\n```\nBe short.")
    expect(page.locator(".bubble .code code")).to_have_text(["x = [1]\n", "y = 2\n"])
    expect(page.locator(".bubble")).to_contain_text("What does *this* do?")
    expect(page.locator(".bubble")).to_contain_text("Be short.")
    here.wait_for_answer()
    assert violations(page) == []  # two of one language are two of one name


def test_a_button_beside_stop_queues_what_is_in_the_box(browser: Browser, tmp_path: Path) -> None:
    with saying(browser, tmp_path, "Again and again. ", "--max-tokens", "16000", **ENDLESS) as here:
        page = here.visit().page
        queue = page.get_by_role("button", name="Queue", exact=True)
        box, stop = page.get_by_label("Message", exact=True), page.get_by_role("button", name="Stop the answer")
        box.fill("First?")
        expect(queue).to_be_hidden()  # it would be a second way to send
        page.keyboard.press("Enter")
        expect(stop).to_be_visible()
        expect(queue).to_be_hidden()
        box.fill("Second?")
        expect(stop).to_be_visible()
        assert violations(page) == []
        queue.click()
        expect(page.locator("#queued .what")).to_have_text(["Second?"])
        expect(box).to_have_value("")
        expect(box).to_be_focused()
        expect(queue).to_be_hidden()
        stop.click()


def asked_twice(here: Visitor) -> Page:
    """The page with a question that two answers are written for, side by side."""
    page = here.visit().page
    page.locator("#chips").click()
    unfold_settings(page)
    page.get_by_label("Answers at once").fill("2")
    page.keyboard.press("Escape")
    here.ask("Twice?")
    return page


def test_escape_stops_all_answers_that_are_written_side_by_side(browser: Browser, tmp_path: Path) -> None:
    with saying(browser, tmp_path, "Again and again. ", "--max-tokens", "16000", **ENDLESS) as here:
        page = asked_twice(here)
        cards = page.locator(".compared article")
        expect(cards.locator(".block").nth(1)).to_be_visible()
        page.get_by_label("Message", exact=True).press("Escape")
        expect(cards.locator(".note")).to_have_text(["Stopped.", "Stopped."])
        expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def test_the_choice_of_one_answer_or_another_question_ends_those_that_are_not_shown_any_more(
    browser: Browser, tmp_path: Path
) -> None:
    with saying(browser, tmp_path, "Again and again. ", "--max-tokens", "16000", **ENDLESS) as here:

        def running() -> list[str]:
            return [each["id"] for each in httpx.get(f"{here.url}/v1/requests").json()["data"]]

        page = asked_twice(here)
        expect(page.locator(".compared .block").nth(1)).to_be_visible()
        httpx.delete(f"{here.url}/v1/requests/{running()[0]}")
        page.get_by_role("button", name=re.compile("Use this one|Stop comparing")).click()
        assert until(running, lambda ids: not ids) == []
        expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
        page.get_by_label("Message", exact=True).press("ArrowUp")
        page.get_by_role("button", name="Send again", exact=True).click()
        expect(page.locator(".compared .block").nth(1)).to_be_visible()
        before = running()
        page.get_by_role("button", name="Edit and send again").click()
        page.get_by_role("button", name="Send again", exact=True).click()
        until(running, lambda ids: len(ids) == 2 and not {*ids} & {*before})
        page.keyboard.press("Escape")
