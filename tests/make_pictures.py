"""Makes README's pictures anew, with Chromium and the extra `test`, as CONTRIBUTING says.

A script's name would stand in the rows of the live view, and code on the command line has none.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pyte
from http_server import HttpServer, running_http
from page_browser import Visitor, chromium, visitor
from pty_screen import Terminal

from harness import clean_environ, short_directory, uma_command

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
        "max_tokens": 300 + 70 * number % 500,
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


def draw(cell: Any) -> str:
    """A character of a terminal as HTML."""
    colors = {"default": "#d8d8d8", "brightblack": "#8a8a94", "cyan": "#2fd0e0"}
    color = colors.get(cell.fg, cell.fg if cell.fg.isalpha() else f"#{cell.fg}")
    return f'<b style="color: {color}; font-weight: {700 if cell.bold else 400}">{escape(cell.data)}</b>'


def take_terminal(browser: Any, folder: Path) -> None:
    """A conversation in a terminal."""
    columns, lines = 88, 25
    environ = clean_environ(HOME=str(folder), XDG_RUNTIME_DIR=str(folder))
    command = uma_command("chat", "--model", "builtin", "--seed", "7")
    with Terminal(command, environ, columns=columns, lines=lines) as terminal:
        for count, text in enumerate(("Tell me a story about a brave owl", "How do I load my own model?"), 1):
            terminal.type(f"{text}\r")
            terminal.wait_for("tokens/s", count)
        raw = terminal.raw
    screen = pyte.Screen(columns, lines)
    pyte.ByteStream(screen).feed(raw)
    rows = ("".join(draw(screen.buffer[row][column]) for column in range(columns)) for row in range(lines))
    page = browser.new_page(viewport={"width": 900, "height": 500})
    page.set_content(f'<pre style="font: 15px/19px monospace">{"<br>".join(rows)}</pre>')
    page.add_style_tag(content="body {background: #16161e; margin: 8px} pre {margin: 0}")
    page.screenshot(path=DOCS / "chat.png")


def main() -> None:
    """The chat in a terminal, the one in a browser, then the live view in a storm."""
    over = Event()
    with (
        short_directory() as place,
        running_http(place, "--max-sequences", "6") as server,
        chromium() as browser,
        visitor(browser, server.url) as one,
        ThreadPoolExecutor(REQUESTS) as pool,
    ):
        take_terminal(browser, place)
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
