"""The page of a server with keys: how it asks for one, says what is wrong with it, and lets go of it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from http_server import HttpServer, new_key, running_http
from page_browser import Visitor, unfold_settings, violations, visitor
from playwright.sync_api import Browser, Page, expect

from harness import PATIENCE_SEC, is_settled, short_directory, until

KEYS: dict[str, str] = {}
"""Those of `server`, by name."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    KEYS["free"] = new_key("free", file)
    KEYS["normal"] = new_key("normal", file, "max_priority = 0\n")
    with short_directory() as sockets, running_http(sockets, "--http-keys", str(file)) as one:
        yield one


@pytest.fixture
def here(browser: Browser, server: HttpServer) -> Iterator[Visitor]:
    with visitor(browser, server.url) as one:
        yield one
        # The browser's own lines about the answers with 401.
        one.problems = [each for each in one.problems if "401" not in each]


def put_off(page: Page) -> None:
    """Close the question for a key: it comes with the server's first answer, which the page does not wait for."""
    dialog = page.locator("#key-dialog")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def enter_key(page: Page, key: str) -> None:
    page.get_by_label("API key", exact=True).fill(key)
    page.keyboard.press("Enter")


def test_a_wrong_key_is_said_to_be_wrong(here: Visitor) -> None:
    page = here.visit().page
    expect(page.locator("#key-fault")).to_be_empty()
    enter_key(page, "uma-wrong")
    expect(page.locator("#key-fault")).to_contain_text("The server does not accept this key")
    assert violations(page) == []
    enter_key(page, KEYS["free"])
    page.locator("#model").wait_for()
    expect(page.locator("#key-dialog")).to_be_hidden()
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#input")).to_be_focused()


def test_what_can_be_no_key_is_not_kept(here: Visitor) -> None:
    page = here.page
    for key in ("“ключ”", "uma-a b", "uma-é"):
        here.visit()
        enter_key(page, key)
        expect(page.locator("#key-fault"), key).to_contain_text("A key has no ")
        assert page.evaluate("localStorage.getItem('uma.key')") is None, key
    page.evaluate("localStorage.setItem('uma.key', 'ключ')")  # as an earlier page did
    page.reload()
    enter_key(page, KEYS["free"])
    page.locator("#model").wait_for()


def test_a_dialog_that_was_closed_stays_closed_until_the_person_acts(here: Visitor) -> None:
    page = here.visit("#live").page
    dialog = page.locator("#key-dialog")
    put_off(page)
    for _ in range(2):
        with page.expect_response("**/ui/api/live"):
            pass
    expect(page.locator(".live-state")).to_contain_text("Retrying")
    expect(dialog).to_be_hidden()
    assert violations(page) == []
    page.get_by_role("button", name="Enter the key").click()
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Chat").click()
    here.ask("What is UMA?")
    expect(dialog).to_be_visible()
    enter_key(page, "uma-wrong")
    expect(page.locator("#key-fault")).to_contain_text("The server does not accept this key")
    enter_key(page, KEYS["free"])
    here.wait_for_answer()  # what was refused for the key is asked again
    expect(page.locator("article")).to_have_count(2)


@pytest.mark.parametrize(("width", "height"), [(1200, 800), (360, 640)])
def test_the_question_for_a_key_is_as_high_as_its_text_and_can_be_put_off_by_touch(
    browser: Browser, server: HttpServer, width: int, height: int
) -> None:
    context = browser.new_context(viewport={"width": width, "height": height}, has_touch=True, reduced_motion="reduce")
    page = Visitor(context.new_page(), server.url).visit("#live").page
    dialog = page.locator("#key-dialog")
    expect(dialog).to_be_visible()
    assert violations(page) == []
    assert dialog.evaluate("each => each.offsetHeight - each.firstElementChild.offsetHeight") <= 2  # its edges
    page.get_by_role("button", name="Not now").tap()
    expect(dialog).to_be_hidden()
    with page.expect_response("**/ui/api/live"):
        pass
    expect(dialog).to_be_hidden()
    page.get_by_role("button", name="Enter the key").tap()
    expect(dialog).to_be_visible()
    context.close()


def test_a_key_can_be_changed_and_forgotten(here: Visitor) -> None:
    page = here.visit().page
    put_off(page)
    page.get_by_role("button", name="Settings", exact=True).click()
    expect(page.get_by_role("button", name="Delete key")).to_have_count(0)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Enter the key").click()
    enter_key(page, KEYS["free"])
    page.locator("#model").wait_for()
    page.get_by_role("button", name="Settings", exact=True).click()
    assert violations(page) == []
    page.get_by_role("button", name="Change key").click()
    with page.expect_response("**/ui/api/info") as answered:
        enter_key(page, KEYS["normal"])
    assert answered.value.request.headers["authorization"] == f"Bearer {KEYS['normal']}"
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_role("button", name="Delete key").click()
    expect(page.locator("#banner")).to_contain_text("This server needs an API key")
    assert page.evaluate("localStorage.getItem('uma.key')") is None


def test_a_key_that_one_window_is_given_is_good_for_all(here: Visitor) -> None:
    page = here.visit().page
    other = page.context.new_page()
    other.goto(f"{here.url}/")
    expect(other.locator("#key-dialog")).to_be_visible()
    enter_key(page, KEYS["free"])
    page.locator("#model").wait_for()
    other.locator("#model").wait_for()
    expect(other.locator("#key-dialog")).to_be_hidden()
    expect(other.locator("#banner")).to_be_hidden()


def test_an_answer_is_the_proof_that_no_key_is_missing(here: Visitor) -> None:
    page = here.visit().page
    put_off(page)
    expect(page.locator("#banner")).to_be_visible()
    page.evaluate("key => localStorage.setItem('uma.key', key)", KEYS["free"])
    here.ask("What is UMA?")
    here.wait_for_answer()
    expect(page.locator("#banner")).to_be_hidden()
    page.locator("#model").wait_for()


def test_a_key_for_the_normal_lane_can_chat_and_only_what_is_chosen_is_sent(here: Visitor) -> None:
    page = here.visit().page
    enter_key(page, KEYS["normal"])
    page.locator("#model").wait_for()
    with page.expect_request("**/ui/api/answers") as sent:
        here.ask("What is UMA?")
    assert "priority" not in json.loads(sent.value.post_data or "")
    here.wait_for_answer()
    page.get_by_role("button", name="Settings", exact=True).click()
    unfold_settings(page)
    page.get_by_role("radio", name="Background").check()
    page.keyboard.press("Escape")
    with page.expect_request("**/ui/api/answers") as sent:
        here.ask("Who are you?")
    assert json.loads(sent.value.post_data or "")["priority"] == -1
    here.wait_for_answer(2)


def test_an_answer_without_a_priority_is_as_interactive_as_its_key_allows(server: HttpServer) -> None:
    free, normal = ({"Authorization": f"Bearer {KEYS[name]}"} for name in ("free", "normal"))
    body = {"messages": [{"role": "user", "content": "Hi"}], "sampling": {"max_tokens": 1_900, "ignore_eos": True}}
    with httpx.Client(base_url=server.url, timeout=PATIENCE_SEC) as client:
        with (
            client.stream("POST", "/ui/api/answers", json=body, headers=free),
            client.stream("POST", "/ui/api/answers", json=body, headers=normal),
            client.stream("GET", "/ui/api/live", headers=free) as live,
        ):
            frames = (json.loads(line[6:]) for line in live.iter_lines() if line.startswith('data: {"at_ms"'))
            running = next(each for frame in frames if len(each := frame["activity"]["running"]) == 2)
            assert sorted(each["priority"] for each in running) == [0, 1]
        refused = client.post("/ui/api/answers", json={**body, "priority": 1}, headers=normal)
        assert (refused.status_code, "priority" in refused.text) == (403, True)
    until(server.process.metrics, is_settled)
