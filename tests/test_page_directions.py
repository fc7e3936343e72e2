"""Texts of languages that are written from right to left, on a page whose own words go from left to right."""

from __future__ import annotations

from pathlib import Path

from page_browser import saying
from playwright.sync_api import Browser, Locator, expect
from script_model import SWITCHED

QUESTION = "מה שלומך היום?"
ANSWER = """\
מזג האוויר יפה היום `f(x)`.

This paragraph is English, with [a link](https://example.org).

- ענן ראשון
- ענן שני

> ציטוט קצר

| עיר | מדינה |
| --- | --- |
| חיפה | ישראל |

```python
print("שלום")
```
"""


def direction(element: Locator) -> str:
    """The direction that the element's text has, which is also where its lines begin."""
    found: str = element.first.evaluate("each => getComputedStyle(each).direction")
    return found


def test_each_text_has_its_own_direction(browser: Browser, tmp_path: Path) -> None:
    with saying(browser, tmp_path, ANSWER) as one:
        page = one.visit().page
        box = page.get_by_label("Message", exact=True)
        box.fill(QUESTION)
        assert direction(box) == "rtl"
        page.keyboard.press("Enter")
        one.wait_for_answer()
        assert direction(box) == "ltr"  # it is empty again, and its placeholder is English
        for part in (".bubble", "#title", ".conversation .name"):
            expect(page.locator(part)).to_have_text(QUESTION)
            assert direction(page.locator(part)) == "rtl", part
        blocks = [direction(each) for each in page.locator(".block").all()]
        assert blocks[:5] == ["rtl", "ltr", "rtl", "rtl", "rtl"]
        assert direction(page.locator(".code pre")) == direction(page.locator("p > code")) == "ltr"
        assert direction(page.locator(".assistant .actions")) == "ltr"
        expect(page.locator(".block a")).to_have_css("unicode-bidi", "isolate")
        # What stands at the beginning of a line stands on its right.
        indent = "each => getComputedStyle(each).paddingRight !== '0px' && getComputedStyle(each).paddingLeft === '0px'"
        for part in (".block ul", ".block blockquote"):
            assert page.locator(part).evaluate(indent), part
        assert page.locator(".block th").first.evaluate("each => getComputedStyle(each).textAlign") == "start"
        page.locator("article.user").hover()
        page.get_by_role("button", name="Edit and send again").click()
        assert direction(page.get_by_label("Your question")) == "rtl"
        page.get_by_label("This conversation").click()
        page.get_by_role("button", name="Rename").click()
        assert direction(page.get_by_label("Name of the conversation")) == "rtl"


def test_thinking_has_a_direction_of_its_own(browser: Browser, tmp_path: Path) -> None:
    script = ["<think>", "האם ", "יורד גשם?", "</think>", "No."]
    with saying(browser, tmp_path, script, template=SWITCHED) as one:
        page = one.visit().page
        one.ask("Is it wet?")
        one.wait_for_answer()
        assert direction(page.locator(".thoughts")) == "rtl"
        assert direction(page.locator(".thinking summary")) == "ltr"
