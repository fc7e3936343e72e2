"""A real Chromium for tests of the page, and a real server with a model that answers what a test needs.

Where no browser is installed these tests are skipped by name; with `TEST_REQUIRED=browser` they fail instead.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from http_server import HttpServer, running_http
from playwright.sync_api import Browser, Page, expect, sync_playwright
from required import missing
from script_model import write_script_model

from harness import PATIENCE_SEC, is_settled, short_directory, until

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--in-process-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MS = 2 * PATIENCE_SEC * 1000
expect.set_options(timeout=PATIENCE_MS)  # for every test that imports this: its own 5 s are too few beside others

LONG = {"system": "", "priority": 1, "sampling": {"temperature": 0.7, "min_tokens": 1900, "max_tokens": 1900}}
"""Settings with which the built-in model goes on for some seconds."""
ENDLESS: dict[str, Any] = {"context_length": 16_384, "is_endless": True, "feed_forward": 4_000}
"""For `saying`: the model says its text again and again, a token in milliseconds."""
SHEEP = [f"{number} sheep, " for number in range(1, 200)]
"""What the model of `endless_server` says, again and again."""
CAN_HURRY = """window.hurry = () => {
    const [later, now, begun] = [window.setTimeout, Date.now, Date.now()];
    window.setTimeout = (run, ms, ...given) => later(run, ms / 10, ...given);
    Date.now = () => begun + 10 * (now() - begun);
};"""
"""For before the page's own script: from `hurry()` on time passes ten times as fast."""
HURRY = CAN_HURRY + "hurry();"
"""The same from the beginning: a server that is slow to begin, beside other tests, counts as lost ten times as soon."""


BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SHELLS = ("chromium-headless-shell", "chrome-headless-shell")
"""The same engine without windows, profiles and extensions: a page takes a third of the processor's time."""


def find_chromium(*names: str) -> str:
    """The path of a browser, or of the first that is there of `names`; skips the test where there is none."""
    for name in names or BROWSERS:
        if found := shutil.which(name):
            return found
    return missing("browser", "no Chromium is installed, so the page is not tested: apt-get install chromium")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser of its own, with a fresh profile."""
    path = find_chromium(*SHELLS, *BROWSERS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """The page in one browser window. Errors of its scripts, and what its policy blocks, fail the test at the end."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.problems: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)

    def visit(self, path: str = "") -> Visitor:
        """Open the page, and wait until it is ready."""
        self.page.goto(f"{self.url}/{path}")
        self.page.wait_for_selector("html[data-ready]", state="attached")
        return self

    def ask(self, text: str) -> None:
        """Type a message and send it with Enter."""
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def wait_for_answer(self, count: int = 1) -> str:
        """Wait until so many answers are complete; the text of the last."""
        answers = self.page.locator("article.assistant[aria-busy=false]:has(.figures)")
        answers.nth(count - 1).wait_for()
        return answers.nth(count - 1).locator(".blocks").inner_text()


def unfold_settings(page: Page) -> None:
    """Open what is folded in the sheet of settings, which is shown."""
    more = page.locator("#more-settings")
    if more.get_attribute("open") is None:
        more.get_by_text("More", exact=True).click()


@contextmanager
def visitor(browser: Browser, url: str, *, width: int = 1200, height: int = 800) -> Iterator[Visitor]:
    """A window with nothing kept from others. Fails where the page's scripts did.

    It asks for little motion: without a graphics card, a browser computes each frame of an animation on the CPU.
    """
    context = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce")
    try:
        one = Visitor(context.new_page(), url)
        yield one
        assert one.problems == [], one.problems
    finally:
        context.close()


@contextmanager
def saying(browser: Browser, directory: Path, text: str | Sequence[str], *flags: str, **how: Any) -> Iterator[Visitor]:
    """A fresh window on the page of a server whose model says just this; `how` as for `write_script_model`."""
    model = write_script_model(directory / "script.gguf", text, **how)
    with (
        short_directory() as sockets,
        running_http(sockets, "--model", str(model), *flags) as server,
        visitor(browser, server.url) as one,
    ):
        yield one


def end_all(server: HttpServer) -> None:
    """End every answer that is still written: a window that is closed leaves its own for a minute."""
    for each in httpx.get(f"{server.url}/v1/requests").json()["data"]:
        httpx.delete(f"{server.url}/v1/requests/{each['id']}")  # it may have ended
    until(server.process.metrics, is_settled)


def node_module(*path: str) -> Path:
    """A file of an npm package in the folder that `NODE_PATH` names; skips the test where it is not installed."""
    folder = os.environ.get("NODE_PATH", "")
    found = Path(folder, *path)
    if folder and found.exists():
        return found
    return missing(
        "browser", f"{path[0]} is not installed: npm install {path[0]}, and name its node_modules in NODE_PATH"
    )


def violations(page: Page) -> list[str]:
    """What axe-core has against the page as it is now."""
    script = node_module("axe-core", "axe.min.js").read_text(encoding="utf-8")
    if page.evaluate("typeof axe === 'undefined'"):  # it is there until the page is left
        # By the debugger: the page's own policy lets no script in.
        page.context.new_cdp_session(page).send("Runtime.evaluate", {"expression": script})
    passes, found = page.evaluate(
        """async () => {
            const { passes, violations } = await axe.run({ resultTypes: ["violations"] });
            const told = ({ id, nodes }) => nodes.map(({ html }) => `${id}: ${html.slice(0, 200)}`);
            return [passes.length, violations.flatMap(told)];
        }"""
    )
    assert passes, "axe has looked at nothing"
    return list(found)
