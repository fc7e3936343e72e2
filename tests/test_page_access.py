"""The page on a narrow screen, by keyboard alone, and by what axe-core knows of screen readers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import httpx
import pytest
from http_server import HttpServer
from page_browser import LONG, end_all, violations, visitor
from playwright.sync_api import Browser, Locator, Page, expect

from harness import is_settled, until

MAX_TABS = 40
"""Nothing of the page is further away than this."""
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def tab_to(page: Page, name: str) -> None:
    """Press Tab until the focus is on the element of this name."""
    seen = []
    for _ in range(MAX_TABS):
        page.keyboard.press("Tab")
        focus = "document.activeElement"
        seen.append(page.evaluate(f"{focus}.getAttribute('aria-label') ?? {focus}.textContent.trim()"))
        if seen[-1] == name:
            return
    raise AssertionError(f"{name!r} cannot be reached by Tab, only {seen}")


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


def test_localhost_leads_to_the_address_that_the_server_prints(http_server: HttpServer) -> None:
    """What a browser keeps for a page belongs to its address: under two of them there would be two lists."""
    printed = http_server.url.removeprefix("http://")
    assert printed.startswith("127.0.0.1:")
    here = httpx.get(f"{http_server.url}/", headers={"Host": printed.replace("127.0.0.1", "localhost")})
    assert (here.status_code, here.headers["location"]) == (307, f"{http_server.url}/")
    for name in (printed, "fox.local"):
        assert httpx.get(f"{http_server.url}/", headers={"Host": name}).status_code != 307
    proxied = {"Host": "localhost", "X-Forwarded-Proto": "https"}
    assert httpx.get(f"{http_server.url}/", headers=proxied).status_code == 200


def theme_violations(page: Page) -> list[str]:
    """What axe-core has against the page as it is now, in either theme."""
    found = []
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        found += [f"{theme}: {each}" for each in violations(page)]
    return found


@pytest.mark.parametrize("width", [360, 1200])
def test_axe_has_nothing_against_any_view(browser: Browser, http_server: HttpServer, width: int) -> None:
    with visitor(browser, http_server.url, width=width) as one:
        page = one.visit().page
        page.locator("#model").wait_for()
        assert theme_violations(page) == []
        one.ask("How do I serve my own model?")
        one.wait_for_answer()
        assert theme_violations(page) == []
        page.get_by_label("This conversation").click()
        assert theme_violations(page) == []
        page.get_by_role("button", name="Rename").click()
        page.get_by_label("Name of the conversation").fill("Own model")
        assert theme_violations(page) == []
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Own model", level=1)).to_be_in_viewport(ratio=1)
        page.locator("#chips").click()
        assert theme_violations(page) == []
        page.keyboard.press("Escape")
        for opener in ("#model", "#menu"):
            page.locator(opener).click()
            assert theme_violations(page) == [], opener
            page.keyboard.press("Escape")
        page.keyboard.press("Control+K")
        page.get_by_role("combobox").fill("model")
        expect(page.get_by_role("option").first).to_be_visible()
        assert theme_violations(page) == []
        page.get_by_role("combobox").fill("decide")
        page.keyboard.press("Enter")
        page.locator("#decided-text").fill("Come to the prize draw now.")
        page.locator("#decided-questions").fill("Is it spam?\nHow urgent? = 1..3")
        page.locator("#decide-now").click()
        expect(page.locator(".decision")).to_have_count(2)
        assert theme_violations(page) == []
        page.keyboard.press("Escape")
        with busy_live_view(page, http_server):
            assert theme_violations(page) == []


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
        page.locator("#chips").click()
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
        tab_to(page, "Edit and send again")
        page.keyboard.press("Enter")
        page.keyboard.press("Control+A")
        page.keyboard.type("Tell me a story about a fox")
        page.keyboard.press("Enter")
        one.wait_for_answer()
        expect(page.locator(".bubble")).to_have_text("Tell me a story about a fox")
        tab_to(page, "Previous version")
        page.keyboard.press("Space")
        expect(page.locator(".bubble")).to_contain_text("What is UMA?")
        page.evaluate("document.activeElement.blur()")
        tab_to(page, "Settings")
        page.keyboard.press("Enter")
        expect(page.locator("#settings")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Settings", exact=True)).to_be_focused()
        tab_to(page, "This conversation")
        page.keyboard.press("Enter")
        tab_to(page, "Rename")
        page.keyboard.press("Enter")
        page.keyboard.type("By keyboard")
        page.keyboard.press("Enter")
        expect(page.locator(".conversation")).to_have_text("By keyboard")
        page.evaluate("document.activeElement.blur()")
        for keys in ("?", "Control+/"):
            page.keyboard.press(keys)
            expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
            assert violations(page) == []
            page.keyboard.press("Escape")
            expect(page.get_by_role("dialog")).to_have_count(0)
        tab_to(page, "Live")
        page.keyboard.press("Enter")
        expect(page.locator("#live-view")).to_be_visible()


def test_an_answer_is_stopped_repeated_branched_and_kept_by_keyboard(
    browser: Browser, http_server: HttpServer, tmp_path: Path
) -> None:
    note, saved = tmp_path / "note.txt", tmp_path / "saved.json"
    note.write_text("The fox is called Olga.\n")
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        page.evaluate("settings => localStorage.setItem('uma.new-chats', JSON.stringify(settings))", LONG)
        one.visit()
        page.keyboard.type("Tell me a story about a fox")
        page.keyboard.press("Enter")
        page.locator(".is-writing .block").first.wait_for()
        tab_to(page, "Stop the answer")
        page.keyboard.press("Enter")
        one.wait_for_answer()
        expect(page.locator(".note")).to_contain_text("Stopped.")
        tab_to(page, "Settings")
        page.keyboard.press("Enter")
        for name, figure in (("Temperature", "0"), ("Max tokens", "9"), ("Min tokens", "9")):
            page.get_by_label(name, exact=True).focus()
            page.keyboard.press("Control+A")
            page.keyboard.type(figure)
        page.keyboard.press("Escape")
        with page.expect_request("**/ui/api/answers") as sent:
            tab_to(page, "Regenerate")
            page.keyboard.press("Enter")
        asked = json.loads(sent.value.post_data or "")["sampling"]
        assert (asked["temperature"], asked["max_tokens"], asked["min_tokens"]) == (0, 9, 9)
        one.wait_for_answer()
        page.get_by_label("Message", exact=True).focus()
        page.keyboard.press("ArrowUp")
        expect(page.get_by_label("Your question")).to_have_value("Tell me a story about a fox")
        page.keyboard.press("Escape")
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        tab_to(page, "Branch in a new chat")
        page.keyboard.press("Enter")
        expect(page.locator("#title")).to_have_text("Tell me a story about a fox (branch)")
        with page.expect_file_chooser() as choosing:
            tab_to(page, "Attach a document")
            page.keyboard.press("Enter")
        choosing.value.set_files(note)
        expect(page.locator("#attached")).to_contain_text("note.txt")
        with page.expect_download() as saving:
            tab_to(page, "Export all")
            page.keyboard.press("Enter")
        saving.value.save_as(saved)
        with page.expect_file_chooser() as choosing:
            tab_to(page, "Import")
            page.keyboard.press("Enter")
        choosing.value.set_files(saved)
        expect(page.locator(".toast").last).to_contain_text("are here already")
        expect(page.locator(".conversation")).to_have_count(2)


def test_what_is_said_aloud(browser: Browser, http_server: HttpServer) -> None:
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        page.evaluate(
            """() => {
                window.said = [];
                const told = (changes) => {
                    for (const { addedNodes } of changes) for (const each of addedNodes) said.push(each.textContent);
                };
                new MutationObserver(told).observe(document.getElementById("announcer"), { childList: true });
            }"""
        )
        one.ask("What is UMA?")
        text = one.wait_for_answer()
        expect(page.locator("#announcer")).to_contain_text("The answer is complete")
        said = page.evaluate("window.said")
        # The answer itself, each part of it once and not at each token; and nothing takes it away before it was heard.
        assert sum(text.split("\n")[0][:40] in each for each in said) == 1
        expect(page.locator("#announcer")).to_contain_text(text.split("\n")[0][:40])


@pytest.mark.parametrize(
    ("most_tokens", "is_stopped", "told"),
    [(9, False, "The answer was cut off at its limit: 9 tokens."), (1_900, True, "The answer was stopped: ")],
)
def test_an_end_that_is_none_of_its_own_is_said_aloud(
    browser: Browser, http_server: HttpServer, most_tokens: int, is_stopped: bool, told: str
) -> None:
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        sampling = {"temperature": 0.7, "min_tokens": most_tokens, "max_tokens": most_tokens}
        settings = {**LONG, "sampling": sampling}
        page.evaluate("settings => localStorage.setItem('uma.new-chats', JSON.stringify(settings))", settings)
        one.visit()
        one.ask("Tell me a story about a fox")
        if is_stopped:
            page.locator(".is-writing .block").first.wait_for()
            page.keyboard.press("Escape")
        expect(page.locator("#announcer")).to_contain_text(told)
        expect(page.locator("#announcer")).not_to_contain_text("is complete")


def test_the_focus_goes_on_from_where_it_was(browser: Browser, http_server: HttpServer) -> None:
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        box = page.get_by_label("Message", exact=True)

        def press(button: Locator) -> None:
            button.focus()
            page.keyboard.press("Enter")

        one.ask("What is UMA?")
        one.wait_for_answer()
        press(page.get_by_role("button", name="Regenerate"))
        expect(page.get_by_role("group", name="Version 2 of 2")).to_be_visible()
        expect(box).to_be_focused()
        one.wait_for_answer()
        press(page.get_by_role("button", name="Edit and send again"))
        press(page.get_by_role("button", name="Send again", exact=True))
        expect(page.locator("article.user .versions")).to_be_visible()
        expect(box).to_be_focused()
        one.wait_for_answer()
        branch = page.get_by_role("button", name="Branch in a new chat")
        press(branch)
        expect(page.locator("#title")).to_contain_text("(branch)")
        expect(branch).to_be_focused()
        other = page.locator(".conversation").last
        press(other)
        expect(other).to_have_attribute("aria-current", "true")
        expect(other).to_be_focused()
        press(page.get_by_role("button", name="Settings", exact=True))
        reset = page.locator("#reset")
        page.get_by_label("Temperature").fill("0.4")
        press(reset)
        expect(page.get_by_label("Temperature")).to_have_value("")
        expect(reset).to_be_focused()
        page.keyboard.press("Escape")
        page.get_by_label("This conversation").click()
        press(page.get_by_role("button", name="Delete"))
        expect(page.locator(".conversation")).to_have_count(1)
        expect(box).to_be_focused()
        press(page.get_by_role("button", name="Undo"))
        expect(page.locator(".conversation")).to_have_count(2)
        expect(box).to_be_focused()


def test_an_answer_that_ends_takes_the_focus_from_nothing(browser: Browser, http_server: HttpServer) -> None:
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        settings = {**LONG, "sampling": {"temperature": 0.7, "min_tokens": 600, "max_tokens": 600}}
        page.evaluate("settings => localStorage.setItem('uma.new-chats', JSON.stringify(settings))", settings)
        one.visit()
        one.ask("Tell me a story about a fox")
        page.locator(".is-writing .block").first.wait_for()
        page.locator(".conversation").focus()
        one.wait_for_answer()
        expect(page.locator(".conversation .pulse:not([hidden])")).to_have_count(0)
        expect(page.locator(".conversation")).to_be_focused()
        page.get_by_role("button", name="Regenerate").click()
        page.locator(".is-writing .block").first.wait_for()
        page.get_by_role("button", name="Stop the answer").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Send", exact=True)).to_be_disabled()
        expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_escape_stops_an_answer_only_where_there_is_nothing_else_to_close(
    browser: Browser, endless_server: HttpServer
) -> None:
    with visitor(browser, endless_server.url) as one:
        page = one.visit().page
        deleted: list[str] = []
        page.on("request", lambda request: deleted.append(request.url) if request.method == "DELETE" else None)
        one.ask("Go on.")
        page.locator(".is-writing .block").first.wait_for()
        page.get_by_label("This conversation").click()
        page.get_by_role("button", name="Rename").click()
        page.keyboard.press("Escape")
        expect(page.get_by_label("Name of the conversation")).to_have_count(0)
        page.get_by_role("link", name="Live").click()
        page.locator("#live-view[data-frames]").wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("link", name="Chat").click()
        page.set_viewport_size({"width": 360, "height": 640})
        page.get_by_role("button", name="Show the list of conversations").click()
        page.keyboard.press("Escape")
        expect(page.locator("#sidebar")).not_to_be_in_viewport()
        page.locator("article.user").hover()
        page.get_by_role("button", name="Edit and send again").click()
        page.get_by_role("button", name="Cancel").focus()
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
        assert deleted == []
        page.keyboard.press("Escape")
        expect(page.locator(".note")).to_contain_text("Stopped.")
        one.problems.clear()  # Chromium notes the live stream that was let go of
    end_all(endless_server)


@pytest.mark.parametrize(("width", "height"), [(1200, 800), (360, 640)])
def test_a_notice_lies_on_no_button_of_the_chat(
    browser: Browser, http_server: HttpServer, width: int, height: int
) -> None:
    with visitor(browser, http_server.url, width=width, height=height) as one:
        page = one.visit().page
        one.ask("What is UMA?")
        one.wait_for_answer()
        page.get_by_label("This conversation").click()
        page.get_by_role("button", name="Delete").click()
        page.get_by_role("button", name="Undo").wait_for()
        for name in ("#send", "#attach", "#chips", "#tab-live", "#model"):
            is_free = "each => { const { x, y, width, height } = each.getBoundingClientRect();"
            is_free += " return each.contains(document.elementFromPoint(x + width / 2, y + height / 2)); }"
            assert page.locator(name).evaluate(is_free), name


def test_code_keeps_its_focus_its_place_and_its_check_mark_while_it_grows(
    browser: Browser, http_server: HttpServer
) -> None:
    """The page's own blocks, as a stream shows them one after the other."""
    grow = """async (lines) => {
        const { Blocks } = await import("/ui/blocks.js");
        if (!window.growing) {
            window.growing = new Blocks();
            const answer = document.createElement("article");
            answer.className = "message assistant";
            answer.append(growing.element);
            document.getElementById("thread").append(answer);
        }
        const code = (name) => `def ${name}(): ${"1 + ".repeat(200)}1\n`;
        growing.show("```python\\n" + lines.map(code).join(""), false);
    }"""
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.evaluate(grow, ["a"])
        code, button = page.locator(".code pre"), page.locator(".copy-code")
        button.click()
        expect(button.locator("use")).to_have_attribute("href", "#i-check")
        code.focus()
        code.evaluate("(code) => getSelection().selectAllChildren(code.querySelector('.function_'))")
        code.evaluate("(code) => { code.scrollLeft = 300; }")
        check_mark = button.locator("use").element_handle()
        page.evaluate(grow, ["a", "b"])
        assert code.inner_text().count("): 1") == 2
        assert check_mark.evaluate("(mark) => mark.isConnected")
        assert page.evaluate("getSelection().toString()") == "a"
        assert code.evaluate("(code) => code.scrollLeft") == 300
        expect(code).to_be_focused()
        button.click()
        assert page.evaluate("navigator.clipboard.readText()").count("): 1") == 2
        expect(button.locator("use")).to_have_attribute("href", "#i-copy")  # also after the second copy


def test_copying_works_without_a_secure_context(browser: Browser, http_server: HttpServer) -> None:
    with visitor(browser, http_server.url) as one:
        page = one.page
        page.add_init_script("Object.defineProperty(Navigator.prototype, 'clipboard', { value: undefined })")
        one.visit()
        one.ask("What is UMA?")
        one.wait_for_answer()
        button = page.get_by_role("button", name="Copy the question")
        button.focus()
        page.keyboard.press("Enter")
        expect(button.locator("[href='#i-check']")).to_have_count(1)
        expect(button).to_be_focused()
        page.get_by_label("Message", exact=True).focus()
        page.keyboard.press("Control+V")
        expect(page.get_by_label("Message", exact=True)).to_have_value("What is UMA?")


def test_a_file_that_is_dropped_anywhere_is_attached(browser: Browser, http_server: HttpServer) -> None:
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        drop = """() => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File(["The fox is called Olga."], "note.txt", { type: "text/plain" }));
            const event = (name) => new DragEvent(name, { dataTransfer, bubbles: true, cancelable: true });
            const at = document.getElementById("sidebar");
            return [at.dispatchEvent(event("dragover")), at.dispatchEvent(event("drop"))];
        }"""
        assert page.evaluate(drop) == [False, False]  # neither is left to the browser
        expect(page.locator("#attached")).to_contain_text("note.txt")


@pytest.mark.parametrize("view", ["chat", "live"])
def test_the_way_to_the_content_leads_to_the_view_that_is_shown(
    browser: Browser, http_server: HttpServer, view: str
) -> None:
    with visitor(browser, http_server.url) as one:
        page = one.visit(f"#{view}").page
        page.get_by_role("link", name="Skip to the content").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#main")).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.locator(f"#{view}-view")).to_be_visible()
        assert page.locator(f"#{view}-view").evaluate("each => each.contains(document.activeElement)")


def test_tab_stays_in_the_list_that_lies_over_the_page(browser: Browser, http_server: HttpServer) -> None:
    with visitor(browser, http_server.url, width=360, height=640) as one:
        page = one.visit().page
        page.emulate_media(reduced_motion="no-preference")  # while it slides in, too, it takes the focus
        opener = page.get_by_role("button", name="Show the list of conversations")
        opener.click()
        drawer = page.get_by_role("dialog", name="Conversations and model")
        expect(drawer.get_by_role("button", name="Close the list of conversations")).to_be_focused()
        # Behind its last control comes the browser's own, which here is none of the page's.
        places = set()
        for _ in range(MAX_TABS):
            page.keyboard.press("Tab")
            places.add(page.evaluate("(document.activeElement.closest('body > *') ?? document.body).id"))
        assert places <= {"sidebar", ""}
        page.keyboard.press("Escape")
        expect(opener).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.locator("#model")).to_be_focused()


def test_the_menu_closes_behind_the_focus(browser: Browser, http_server: HttpServer) -> None:
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        one.ask("What is UMA?")
        one.wait_for_answer()
        page.get_by_label("This conversation").focus()
        page.keyboard.press("Enter")
        tab_to(page, "Delete")
        expect(page.get_by_role("button", name="Delete")).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Delete")).to_be_hidden()
        page.get_by_label("This conversation").focus()
        page.keyboard.press("Enter")
        page.keyboard.press("Shift+Tab")
        expect(page.get_by_role("button", name="Delete")).to_be_hidden()
