"""The history in the page's live view: what was sent, sought and compared."""

from __future__ import annotations

from pathlib import Path

import httpx
from http_server import running_http
from page_browser import violations, visitor
from playwright.sync_api import Browser, expect

from harness import short_directory, until


def test_the_history_is_listed_searched_and_says_where_prompts_part(browser: Browser, tmp_path: Path) -> None:
    with (
        short_directory() as place,
        running_http(place, "--history", XDG_STATE_HOME=str(tmp_path)) as server,
        visitor(browser, server.url) as one,
    ):
        for words in ("the fox <b>sleeps</b>", "the fox wakes", "an owl"):
            body = {"prompt": words, "max_tokens": 2}
            httpx.post(f"{server.url}/v1/completions", json=body, headers={"User-Agent": "agent/1"}).raise_for_status()
        until(lambda: httpx.get(f"{server.url}/v1/history").json()["data"], lambda kept: len(kept) == 3)
        page = one.visit("#live").page
        rows = page.locator(".history > li")
        expect(rows).to_have_count(3)
        page.get_by_label("Search the history").fill("fox")
        page.keyboard.press("Enter")
        expect(rows).to_have_count(2)
        rows.first.locator("summary").click()
        expect(rows.first).to_contain_text("in place of")
        expect(rows.first.locator("pre").first).to_contain_text("the fox wakes")
        rows.last.locator("summary").click()
        expect(rows.last.locator("pre").first).to_contain_text("the fox <b>sleeps</b>")
        assert violations(page) == []
