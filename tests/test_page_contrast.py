"""The page's contrasts: what is chosen in its own colours, and all in forced colours (high contrast), which replace
those, backgrounds above all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
from http_server import HttpServer
from page_browser import Visitor, violations, visitor
from playwright.sync_api import Browser, Locator

LANE_COLOURS = """async () => {
    const { Lanes } = await import("/ui/lanes.js");
    const lanes = new Lanes(document.querySelector("#live-view .lanes"));
    const request = { id: "a", priority: 0, prompt_tokens: 9, cached_tokens: 0, is_preempted: false };
    const counts = [[0, 0], [9, 0], [9, 40]];
    counts.forEach(([computed_tokens, generated_tokens], at) => {
        const running = [{ ...request, computed_tokens, generated_tokens }];
        lanes.take({ at_ms: 250 * (at + 1), activity: { running }, models: [] });
    });
    const canvas = lanes.list.querySelector("canvas");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const found = new Set();
    for (let at = 0; at < data.length; at += 4)
        if (data[at + 3] === 255) found.add(`rgb(${data[at]}, ${data[at + 1]}, ${data[at + 2]})`);
    return [...found];
}"""
"""The colours of a lane on the screen in which a prompt was read and tokens were written."""


@pytest.fixture
def contrasted(browser: Browser, http_server: HttpServer) -> Iterator[Visitor]:
    """A fresh window in forced colours."""
    with visitor(browser, http_server.url) as one:
        one.page.emulate_media(forced_colors="active", color_scheme="dark")
        yield one


def style(element: Locator, name: str) -> str:
    """A property's value as it is used."""
    value: str = element.evaluate("(each, name) => getComputedStyle(each)[name]", name)
    return value


def test_bars_and_legends_and_lanes_keep_their_colours(contrasted: Visitor) -> None:
    page = contrasted.visit("#live").page
    page.locator("#live-view[data-frames]").wait_for()
    nothing = style(page.locator(".panel").first, "backgroundColor")
    shades = {}
    for kind in ("prefill", "decode"):
        swatch = page.locator(f".swatch.is-{kind}").first
        shades[kind] = style(swatch, "backgroundColor")
        assert style(swatch, "borderTopStyle") == "solid"
    assert len({nothing, *shades.values()}) == 3, shades
    assert {shades["prefill"], shades["decode"]} <= set(page.evaluate(LANE_COLOURS))


def test_where_one_is_can_be_seen(contrasted: Visitor) -> None:
    page = contrasted.visit().page
    for count in (1, 2):
        contrasted.ask("What is UMA?")
        contrasted.wait_for_answer()
        if count == 1:
            page.get_by_role("button", name="New chat", exact=True).click()
    current, other = page.locator(".conversation[aria-current]"), page.locator(".conversation:not([aria-current])")
    assert style(current, "backgroundColor") != style(other, "backgroundColor")
    assert style(page.locator("#tab-chat"), "backgroundColor") != style(page.locator("#tab-live"), "backgroundColor")
    assert style(page.locator(".bubble"), "borderTopStyle") == "solid"
    box, frame = page.get_by_label("Message", exact=True), page.locator("#composer")
    box.focus()
    assert style(frame, "outlineStyle") == "solid"
    box.blur()
    assert style(frame, "outlineStyle") == "none"
    assert violations(page) == []


CONTRAST = """([one, other]) => {
    const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const light = (colour) => {
        context.fillStyle = colour;
        context.fillRect(0, 0, 1, 1);
        const [red, green, blue] = [...context.getImageData(0, 0, 1, 1).data].map((each) =>
            each <= 10.31475 ? each / 3294.6 : ((each / 255 + 0.055) / 1.055) ** 2.4);
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const [high, low] = [light(one), light(other)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
}"""
"""The contrast of two colours, as WCAG 2 has it."""
MIN_CONTRAST = 3.0
"""Of what tells a state, by WCAG 2 (1.4.11)."""
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def test_what_is_chosen_and_who_has_written_is_told_by_a_mark(browser: Browser, http_server: HttpServer) -> None:
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        one.ask("What is UMA?")
        one.wait_for_answer()
        marks = """() => {
            const style = (what, part) => getComputedStyle(document.querySelector(what), part);
            return [
                [style("#tab-chat", "::after").backgroundColor, style("#tab-chat").backgroundColor],
                [style(".conversation[aria-current]", "::before").backgroundColor, style("#sidebar").backgroundColor],
                [style(".bubble").borderRightColor, style("body").backgroundColor],
            ];
        }"""
        grounds = set()
        for theme in THEMES:
            page.emulate_media(color_scheme=theme)
            contrasts = [page.evaluate(CONTRAST, pair) for pair in page.evaluate(marks)]
            assert min(contrasts) >= MIN_CONTRAST, (theme, contrasts)
            grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(grounds) == len(THEMES)
