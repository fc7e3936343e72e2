"""How the page follows its answers: each can be stopped, picked up again and asked again, and none is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import HttpServer
from page_browser import ENDLESS, HURRY, SHEEP, Visitor, end_all, saying, visitor
from playwright.sync_api import Browser, Page, Route, expect

from harness import PATIENCE_SEC, until

ANSWERS = "**/ui/api/answers"
ANSWER = "**/ui/api/answers/*"
KEPT_TEXT = """() => new Promise((resolve) => {
    const opening = indexedDB.open("uma");
    opening.onsuccess = () => {
        const reading = opening.result.transaction("conversations").objectStore("conversations").getAll();
        reading.onsuccess = () => {
            opening.result.close();
            const messages = reading.result.flatMap((each) => Object.values(each.messages));
            resolve(messages.find((each) => each.role === "assistant")?.text);
        };
    };
})"""
"""The first answer's text, as the browser keeps it."""


@pytest.fixture
def endless(browser: Browser, endless_server: HttpServer) -> Iterator[Visitor]:
    """A window on a server whose answers go on until they are stopped."""
    with visitor(browser, endless_server.url) as one:
        yield one
    end_all(endless_server)


class Flaky:
    """A route that aborts the first requests of a method, as where the server cannot be reached."""

    def __init__(self, page: Page, url: str, method: str, times: int) -> None:
        self.method, self.left = method, times
        page.route(url, self._take)

    def _take(self, route: Route) -> None:
        if route.request.method == self.method and self.left:
            self.left -= 1
            route.abort("connectionrefused")
        else:
            route.continue_()


def test_the_view_stays_where_one_reads_as_a_long_answer_ends(endless: Visitor) -> None:
    page = endless.visit().page
    place = "#scroller"
    tall = f"() => {{ const all = document.querySelector('{place}'); return all.scrollHeight > 3 * all.clientHeight; }}"
    for is_at_end in (True, False):
        endless.ask("Count sheep.")
        page.wait_for_function(tall)
        if not is_at_end:
            page.locator(place).evaluate("all => all.scrollTop = 600")
            page.get_by_role("button", name="Go to the end").wait_for()
        page.keyboard.press("Escape")
        expect(page.locator(".note").last).to_have_text("Stopped.")
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        top, left = page.locator(place).evaluate(
            "all => [all.scrollTop, all.scrollHeight - all.scrollTop - all.clientHeight]"
        )
        assert left <= 1 if is_at_end else top == 600, (top, left)
        page.get_by_role("button", name="New chat", exact=True).click()


def test_a_stop_before_the_question_has_arrived_ends_the_answer_here_and_there(endless: Visitor) -> None:
    page = endless.visit().page
    deleted: list[str] = []
    page.on("request", lambda request: deleted.append(request.url) if request.method == "DELETE" else None)
    page.route(ANSWERS, lambda route: None)  # it stays on its way
    with page.expect_request(ANSWERS) as sent:
        endless.ask("Count sheep.")
    expect(page.locator(".status")).to_contain_text("Sending")
    page.keyboard.press("Escape")
    expect(page.locator(".note")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    # It was under way all the same, and arrives only now.
    body = json.loads(sent.value.post_data or "")
    with httpx.stream("POST", f"{endless.url}/ui/api/answers", json=body, timeout=PATIENCE_SEC) as response:
        *_, last = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))
    assert last["reason"] == "cancelled"
    assert {url.rsplit("/", 1)[1] for url in deleted} == {body["token"]}
    endless.problems.clear()  # Chromium's own lines about the 404s before it arrived


def test_a_second_stop_ends_an_answer_whose_first_one_gets_no_answer(endless: Visitor) -> None:
    page = endless.visit().page
    page.route(ANSWER, lambda route: None if route.request.method == "DELETE" else route.continue_())
    endless.ask("Count sheep.")
    page.locator(".is-writing .block").first.wait_for()
    with page.expect_request(lambda request: request.method == "DELETE"):
        page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    expect(page.locator(".note")).to_have_text("Stopped.")
    expect(page.locator(".is-writing")).to_have_count(0)
    endless.problems.clear()  # Chromium notes the stream that was let go of
    assert page.locator(".blocks").inner_text()


def test_eight_answers_at_once_leave_connections_for_everything_else_and_all_end(
    browser: Browser, tmp_path: Path
) -> None:
    many: dict[str, Any] = {"system": "", "priority": 1, "sampling": {"temperature": 0, "max_tokens": 1_200}}
    flags = ("--n-ctx", "32768", "--max-sequences", "8")
    with saying(browser, tmp_path, SHEEP, *flags, **{**ENDLESS, "feed_forward": 12_000}) as here:
        page = here.visit().page
        page.evaluate("settings => localStorage.setItem('uma.new-chats', JSON.stringify(settings))", many)
        here.visit()
        for number in range(8):
            page.get_by_role("button", name="New chat", exact=True).click()
            here.ask(f"Count sheep {number}.")
            page.locator(".is-writing .block").first.wait_for()
        expect(page.locator(".conversation .pulse:not([hidden])")).to_have_count(8)
        page.get_by_role("button", name="Stop the answer").click()
        expect(page.locator(".note")).to_have_text("Stopped.")
        expect(page.locator(".conversation .pulse:not([hidden])")).to_have_count(7)
        page.get_by_role("link", name="Live").click()
        page.locator("#live-view[data-frames]").wait_for()
        page.get_by_role("link", name="Chat").click()
        expect(page.locator(".conversation .pulse:not([hidden])")).to_have_count(0)
        for number in range(7):
            page.locator(".conversation", has_text=f"Count sheep {number}.").click()
            expect(page.locator(".bubble")).to_have_text(f"Count sheep {number}.")
            expect(page.locator(".figures")).to_contain_text("1,200 tokens")
        here.problems.clear()  # Chromium notes each stream that was let go of


def test_of_two_windows_that_queue_behind_one_answer_both_ask_and_neither_question_is_lost(endless: Visitor) -> None:
    page = endless.visit().page
    endless.ask("First?")
    page.locator(".is-writing .block").first.wait_for()
    other = Visitor(page.context.new_page(), endless.url).visit(page.url.removeprefix(f"{endless.url}/"))
    windows, requests = (page, other.page), f"{endless.url}/v1/requests"
    other.page.locator(".is-writing .block").first.wait_for()
    for one, text in ((endless, "Mine?"), (other, "Yours?")):
        one.ask(text)
        expect(one.page.get_by_role("list", name="Queued questions").locator(".what")).to_have_text([text])
    for each in httpx.get(requests).json()["data"]:
        httpx.delete(f"{requests}/{each['id']}")
    for window in windows:
        expect(window.locator("#queued li")).to_have_count(0)
        expect(window.locator("article.user").nth(1).locator(".versions")).to_contain_text("/2")
    for window in windows:
        second = window.locator("article.user").nth(1)
        said = {second.locator(".bubble").inner_text()}
        second.locator(".versions button:not(:disabled)").click()
        assert said | {second.locator(".bubble").inner_text()} == {"Mine?", "Yours?"}


def test_what_the_browser_kept_of_an_answer_is_shown_where_the_server_has_lost_it(endless: Visitor) -> None:
    page = endless.visit().page
    endless.ask("Count sheep.")
    until(lambda: page.evaluate(KEPT_TEXT) or "", lambda text: "9 sheep" in text)
    refusal = {"error": {"message": "no such answer", "code": None}}
    page.route(ANSWER, lambda route: route.fulfill(status=404, json=refusal))
    page.reload()
    expect(page.locator(".failure")).to_contain_text("The rest of this answer is lost")
    expect(page.locator(".blocks")).to_contain_text("9 sheep")
    endless.problems.clear()  # Chromium's own line about the 404
    page.reload()
    expect(page.locator(".blocks")).to_contain_text("9 sheep")


def test_an_answer_is_picked_up_for_as_long_as_the_server_keeps_it(endless: Visitor) -> None:
    page = endless.page
    page.add_init_script(HURRY)
    endless.visit()
    endless.ask("Count sheep.")
    page.locator(".is-writing .block").first.wait_for()
    flaky = Flaky(page, ANSWER, "GET", 9)  # the pauses between these are over 33 seconds
    page.reload()
    expect(page.locator(".status")).to_contain_text("Reconnecting")
    expect(page.locator(".status")).to_be_empty()
    assert flaky.left == 0
    expect(page.locator(".is-writing")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.locator(".note")).to_have_text("Stopped.")
    endless.problems.clear()  # Chromium's own lines about requests that failed


def test_a_question_that_did_not_arrive_is_sent_again(here: Visitor) -> None:
    page = here.page
    page.add_init_script(HURRY)
    here.visit()
    Flaky(page, ANSWERS, "POST", 12)
    here.ask("What is UMA?")
    expect(page.locator(".status")).to_contain_text("The server does not answer. Retrying")
    assert here.wait_for_answer()
    page.unroute(ANSWERS)
    page.route(ANSWERS, lambda route: route.abort("connectionrefused"))
    here.ask("Who are you?")
    expect(page.locator(".status").last).to_contain_text("The server does not answer. Retrying")
    page.reload()
    expect(page.locator(".status").last).to_contain_text("The server does not answer. Retrying")
    page.unroute(ANSWERS)
    here.wait_for_answer(2)
    expect(page.locator(".failure")).to_have_count(0)
    here.problems.clear()  # Chromium's own lines about requests that failed


def test_a_question_whose_acceptance_was_lost_is_not_asked_twice(here: Visitor, http_server: HttpServer) -> None:
    page = here.visit().page
    begun = http_server.process.metrics()["requests_total"]

    def lose_the_answer(route: Route) -> None:
        httpx.post(f"{here.url}/ui/api/answers", content=route.request.post_data or "", timeout=PATIENCE_SEC)
        route.abort("connectionreset")

    page.route(ANSWERS, lose_the_answer, times=1)
    here.ask("What is UMA?")
    assert here.wait_for_answer()
    assert http_server.process.metrics()["requests_total"] == begun + 1
    here.problems.clear()  # Chromium's own lines about what went wrong


def test_a_question_is_asked_again_when_the_model_is_loaded(here: Visitor) -> None:
    page = here.page
    loading = {"x-uma-load": "loading, 7 %", "x-uma-loading-percent": "7"}
    page.route("**/ui/api/info", lambda route: route.fulfill(status=503, headers=loading, json={}))
    here.visit()
    expect(page.locator("#banner.is-neutral progress")).to_have_attribute("value", "7")
    page.unroute("**/ui/api/info")
    expect(page.locator("#banner")).to_be_hidden()
    refusals: list[Route] = []

    def refuse(route: Route) -> None:
        refusals.append(route)
        headers = loading | {"retry-after-ms": "20"}
        error = {"message": "the model is still being loaded (7 %); try again", "code": "service_unavailable"}
        route.fulfill(status=503, headers=headers, json={"error": error})

    page.route(ANSWERS, refuse)
    here.ask("What is UMA?")
    expect(page.locator(".status")).to_contain_text("builtin: loading, 7 %")
    page.unroute(ANSWERS)
    assert here.wait_for_answer()
    assert refusals
    here.problems.clear()  # Chromium's own lines about the 503s


def test_a_server_that_has_lost_an_answer_at_once_was_restarted(endless: Visitor) -> None:
    page = endless.visit().page
    endless.ask("Count sheep.")
    page.locator(".is-writing .block").first.wait_for()
    refusal = {"error": {"message": "no such answer", "code": None}}
    page.route(ANSWER, lambda route: route.fulfill(status=404, json=refusal))
    page.evaluate(
        """async () => {
            const { prototype } = (await import("/ui/silence.js")).Silence;
            const { bounds } = prototype;
            prototype.bounds = () => (Object.assign(prototype, { bounds }), Promise.reject(new TypeError("cut")));
        }"""
    )
    expect(page.locator(".failure")).to_contain_text("The rest of this answer is lost: the server was restarted.")
    endless.problems.clear()  # Chromium's own line about the 404
