"""Makes README's pictures of the page anew: `python tests/make_pictures.py`, with Chromium and the extra `test`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import httpx
from http_server import HttpServer, running_http
from page_browser import Visitor, chromium, visitor

from harness import short_directory

DOCS = Path(__file__).parent.parent / "docs"
PROGRAMS = (("claude-cli/2.1.197", 1), ("aider/0.86", 0), ("OpenAI/Python 1.99.2", 0), ("notes-indexer/2.1", -1))
REQUESTS = 14
SHOWN_SEC = 20.0
"""Time that lanes have been drawn for when their picture is taken."""


def ask(server: HttpServer, number: int, over: Event) -> None:
    """One program of a storm: a request after the other, whatever the others do."""
    program, priority = PROGRAMS[number % len(PROGRAMS)]
    body = {
        "messages": [{"role": "user", "content": f"Tell me story {number} about a fox. " * (10 + 7 * number % 60)}],
        "max_tokens": 60 + 40 * number % 200,
        "ignore_eos": True,
        "priority": priority,
    }
    url = f"{server.url}/v1/chat/completions"
    while not over.is_set():
        httpx.post(url, json=body, headers={"User-Agent": program}, timeout=None)


def take(one: Visitor, name: str) -> None:
    """Both themes, one after the other."""
    for theme in ("light", "dark"):
        one.page.emulate_media(color_scheme="light" if theme == "light" else "dark")
        one.page.wait_for_timeout(600)  # the lanes are drawn again with the next frames
        one.page.screenshot(path=DOCS / f"page-{name}-{theme}.png")


def main() -> None:
    """The chat, then the live view in a storm."""
    over = Event()
    with (
        short_directory() as place,
        running_http(place, "--max-sequences", "6") as server,
        chromium() as browser,
        visitor(browser, server.url) as one,
        ThreadPoolExecutor(REQUESTS) as pool,
    ):
        one.visit()
        one.ask("What is UMA?")
        one.wait_for_answer()
        one.page.get_by_role("button", name="New chat", exact=True).click()
        for count, text in enumerate(("How do I serve my own model?", "Tell me a story about a fox"), 1):
            one.ask(text)
            one.wait_for_answer(count)
        take(one, "chat")
        one.page.get_by_role("link", name="Live").click()
        for number in range(REQUESTS):
            pool.submit(ask, server, number, over)
        one.page.wait_for_timeout(1_000 * SHOWN_SEC)
        take(one, "live")
        over.set()
        for each in httpx.get(f"{server.url}/v1/requests").json()["data"]:
            httpx.delete(f"{server.url}/v1/requests/{each['id']}")
        one.problems.clear()


if __name__ == "__main__":
    main()
