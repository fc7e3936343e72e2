"""The page on paper: the whole conversation, and nothing that only a screen can do."""

from __future__ import annotations

import re
from pathlib import Path

from page_browser import Visitor, saying
from playwright.sync_api import Browser, Page, expect

PARAGRAPHS = 60
TEXT = "".join(f"Paragraph {number} of a long answer.\n\n" for number in range(PARAGRAPHS)) + "The end.\n"
WIDE = f"```python\nprint('{'wide ' * 60}')\n```\n\n"
CUT_OFF = """each => {
    const found = [];
    const { right, bottom } = each.getBoundingClientRect();
    for (let frame = each.parentElement; frame; frame = frame.parentElement) {
        const box = frame.getBoundingClientRect();
        if (getComputedStyle(frame).overflow !== "visible" && (right > box.right + 1 || bottom > box.bottom + 1))
            found.push(frame.id || frame.className || frame.tagName);
    }
    return found;
}"""
"""What cuts an element off."""


def sheets(page: Page) -> int:
    """How many sheets of paper the page takes."""
    return len(re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4")))


def test_the_whole_conversation_is_printed_and_no_controls(browser: Browser, tmp_path: Path) -> None:
    with saying(browser, tmp_path, f"{WIDE}{TEXT}") as one:
        page = one.visit().page
        one.ask("Go on.")
        one.wait_for_answer()
        assert sheets(page) >= 3
        page.get_by_role("button", name="Settings", exact=True).click()
        page.emulate_media(media="print", color_scheme="dark")
        for part in (".bubble", ".code code", ".block:last-child p", ".figures"):
            expect(page.locator(part)).to_be_visible()
            assert page.locator(part).evaluate(CUT_OFF) == [], part
        expect(page.locator("#title")).to_have_text("Go on.")
        for part in ("button", "a[href^='#']", "textarea", "#sidebar", "summary", "dialog"):
            expect(page.locator(part).filter(visible=True)).to_have_count(0)
        ink = page.locator(".block:last-child p").evaluate("each => getComputedStyle(each).color")
        assert max(int(part) for part in re.findall(r"\d+", ink)) < 64  # dark, as paper needs it


def test_the_live_view_is_printed_whole(here: Visitor) -> None:
    page = here.visit("#live").page
    page.locator("#live-view[data-frames]").wait_for()
    page.set_viewport_size({"width": 1200, "height": 200})
    page.emulate_media(media="print")
    panel = page.locator("#live-view :is(.tile, .tiles > *, .panel):visible").last
    expect(panel).to_be_visible()
    assert panel.evaluate(CUT_OFF) == []
