"""What the page makes of questions that are refused or cut short: in the reader's words, with a way on from there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
from page_browser import ENDLESS, Visitor, saying, violations
from playwright.sync_api import Browser, FilePayload, Page, expect
from playwright.sync_api import Request as PageRequest

from uma.net.quota import Bounds, ClientAccount, Excess
from uma.types import Message, Request, SamplingParams, Usage

ANSWERS = "**/ui/api/answers"
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
ENDS = {"context_length": 256, "is_endless": True}


def set_sampling(here: Visitor, **sampling: Any) -> None:
    """Open the page with these settings."""
    settings = {"system": "", "priority": 1, "sampling": {"temperature": 0, **sampling}}
    here.visit().page.evaluate("settings => localStorage.setItem('uma.new-chats', JSON.stringify(settings))", settings)
    here.visit()


def attach(page: Page, name: str, text: str) -> None:
    page.locator("#attach-file").set_input_files({"name": name, "mimeType": "text/plain", "buffer": text.encode()})
    expect(page.locator("#attached")).to_contain_text(name)


def payload(name: str, text: str) -> FilePayload:
    """A file that is nowhere on the disk."""
    return {"name": name, "mimeType": "application/octet-stream", "buffer": text.encode()}


def info(here: Visitor) -> dict[str, Any]:
    """What the page is told of its server."""
    found: dict[str, Any] = httpx.get(f"{here.url}/ui/api/info").json()
    return found


def contents(request: PageRequest) -> list[str]:
    """What the model is given with this question, without instructions."""
    return [each["content"] for each in json.loads(request.post_data or "")["messages"]]


def test_a_file_that_is_too_long_spoils_no_later_question_and_can_be_taken_away(here: Visitor) -> None:
    page = here.visit().page
    page.route("**/tokenize", lambda _: None)  # it is sent before its tokens are known
    attach(page, "long.txt", "é" * 6_000)  # more tokens than characters
    here.ask("Sum this up.")
    expect(page.locator(".failure")).to_contain_text("context window. Shorten the question, remove a file")
    expect(page.locator(".failure")).to_contain_text(re.compile(r"There are [\d,]+ tokens, and at most [\d,]+ fit\."))
    expect(page.locator(".failure")).not_to_contain_text("The server said")
    with page.expect_request(ANSWERS) as sent:
        here.ask("What is UMA?")
    assert contents(sent.value) == ["What is UMA?"]
    here.wait_for_answer()
    page.get_by_role("button", name="Edit the question").click()
    expect(page.get_by_label("Your question")).to_be_focused()
    page.get_by_role("button", name="Remove long.txt").click()
    with page.expect_request(ANSWERS) as sent:
        page.get_by_role("button", name="Send again", exact=True).click()
    assert contents(sent.value) == ["Sum this up."]
    here.wait_for_answer()


def test_a_conversation_that_is_full_is_told_apart_from_a_question_that_is_too_long(
    browser: Browser, tmp_path: Path
) -> None:
    with saying(browser, tmp_path, "Again and again. ", **ENDS) as here:
        page = here.visit().page
        here.ask("Go on.")
        here.wait_for_answer()
        here.ask("And then?")
        failure = page.locator(".failure")
        expect(failure).to_contain_text("This conversation is longer than")
        ways = ("Drop the oldest messages", "Summarize them", "New chat")
        expect(failure).to_contain_text(f"{ways[0]}, have the model summarize them, or start a new chat.")
        expect(failure.get_by_role("button")).to_have_text(ways)
        page.set_viewport_size({"width": 1440, "height": 900})
        boxes = failure.locator("p, button").evaluate_all(
            "all => all.map(each => each.getBoundingClientRect().toJSON())"
        )
        words, first, *others = boxes
        assert {each["y"] for each in others} == {first["y"]} and first["y"] >= words["bottom"]
        assert words["width"] > 600
        assert violations(page) == []
        expect(failure).not_to_contain_text("remove a file")
        assert page.get_by_role("button", name="Try again").count() == 0
        failure.get_by_role("button", name="New chat").click()
        expect(page.locator("article")).to_have_count(0)
        here.ask("Go on.")
        here.wait_for_answer()


def test_files_that_are_refused_are_named_in_one_notice_that_can_be_put_away(here: Visitor) -> None:
    page = here.visit().page
    page.locator("#model").wait_for()
    binary = [payload(f"{number}.bin", "\0") for number in range(6)]
    page.locator("#attach-file").set_input_files([*binary, payload("note.txt", "Olga")])
    expect(page.locator("#attached .file")).to_contain_text(["note.txt"])
    toast = page.locator(".toast")
    expect(toast).to_have_count(1)
    expect(toast).to_contain_text("Not attached: 0.bin, 1.bin, 2.bin and 3 more. Only text, PDF, Word")
    toast.get_by_role("button", name="Dismiss").click()
    expect(toast).to_have_count(0)
    page.locator("#attach-file").set_input_files(payload("empty.txt", ""))
    expect(toast).to_have_text("Not attached: empty.txt. It is empty.")
    words = "Grüße aus Köln,\nçà et là"
    encoded = {name: words.encode(name) for name in ("latin-1", "utf-16", "utf-8-sig")}
    files: list[FilePayload] = [
        {"name": name, "mimeType": "text/plain", "buffer": data} for name, data in encoded.items()
    ]
    page.locator("#attach-file").set_input_files(files)
    expect(page.locator("#attached .file")).to_have_count(4)
    page.get_by_label("Message", exact=True).evaluate(
        """box => {
            const clipboardData = new DataTransfer();
            clipboardData.items.add(new File(["\\x89PNG\\0"], "image.png", { type: "image/png" }));
            box.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
        }"""
    )
    expect(toast).to_have_text(
        re.compile(r"^Not attached: image\.png\. This model cannot see pictures, and no model here can\.")
    )
    with page.expect_request(ANSWERS) as sent:
        here.ask("What is in them?")
    expect(toast).to_have_count(0)  # it goes with what it was about
    assert contents(sent.value)[0].count(f"```\n{words}\n```") == 3
    here.wait_for_answer()
    large = payload("large.txt", "x" * (info(here)["limits"]["max_prompt_bytes"] + 1))
    page.locator("#attach-file").set_input_files([binary[0], large])
    expect(toast).to_contain_text(
        re.compile(r"Not attached: 0\.bin, large\.txt\. Only text.* attached\. A file can have at most [\d,]+ KB\.")
    )


def test_a_question_that_is_only_a_file_is_sent_again(here: Visitor) -> None:
    page = here.visit().page
    attach(page, "note.txt", "Who is UMA?")
    page.get_by_role("button", name="Send", exact=True).click()
    here.wait_for_answer()
    page.locator("article.user").hover()
    page.get_by_role("button", name="Edit and send again").click()
    with page.expect_request(ANSWERS) as sent:
        page.get_by_role("button", name="Send again", exact=True).click()
    assert contents(sent.value) == ["note.txt:\n```\nWho is UMA?\n```"]
    here.wait_for_answer()


def test_a_question_without_an_answer_is_not_sent_along(browser: Browser, tmp_path: Path) -> None:
    with saying(browser, tmp_path, "Well, this is it.", template=ALTERNATING) as here:
        page = here.visit().page
        error = {"message": "something is wrong", "code": "E_RUNTIME_INTERNAL"}
        page.route(ANSWERS, lambda route: route.fulfill(status=500, json={"error": error}), times=1)
        here.ask("First?")
        page.locator(".failure").wait_for()
        here.ask("Second?")
        assert here.wait_for_answer() == "Well, this is it."
        here.ask("Third?")
        assert here.wait_for_answer(2) == "Well, this is it."
        here.problems.clear()  # Chromium's own line about the 500


def test_a_question_to_a_full_queue_waits_and_is_asked_again(browser: Browser, tmp_path: Path) -> None:
    flags = ("--max-sequences", "1", "--max-queue", "1", "--max-tokens", "16000")
    with saying(browser, tmp_path, "Again and again. ", *flags, **ENDLESS) as here:
        page = here.visit().page
        for number in range(4):  # one is answered, one waits, and one more, as none of its connection's waits
            page.get_by_role("button", name="New chat", exact=True).click()
            here.ask(f"Question {number}")
            page.locator(".is-writing .block, .status:text('Waiting'), .status:text('Retrying')").first.wait_for()
        expect(page.locator(".status")).to_contain_text(re.compile(r"The server is busy\. Retrying in [\d,]+ s\."))
        for title in ("Question 0", "Question 1", "Question 2"):
            page.locator(".conversation", has_text=title).click()
            page.keyboard.press("Escape")
            expect(page.locator("article.assistant")).to_have_attribute("aria-busy", "false")
        page.locator(".conversation", has_text="Question 3").click()
        page.locator(".is-writing .block").first.wait_for()  # now there is a place
        here.problems.clear()  # Chromium notes each stream that was let go of


def test_a_setting_that_the_server_refuses_is_told_with_where_it_can_be_mended(
    browser: Browser, tmp_path: Path
) -> None:
    with saying(browser, tmp_path, "Well, this is it.", "--max-tokens", "50") as here:
        set_sampling(here, max_tokens=100)  # as it was allowed by another server at this address
        here.ask("What is UMA?")
        failure = here.page.locator(".failure")
        expect(failure).to_contain_text("Correct it in the settings")
        expect(failure.locator(".detail")).to_contain_text("100")
        here.problems.clear()  # Chromium's own line about the 400


def test_how_long_to_wait_is_told(here: Visitor) -> None:
    page = here.visit().page
    error = {"message": "too many requests a minute", "code": "rate_limit_exceeded"}
    refusal = {"status": 429, "headers": {"retry-after-ms": "6100"}, "json": {"error": error}}
    page.route(ANSWERS, lambda route: route.fulfill(**refusal))
    here.ask("What is UMA?")
    expect(page.locator(".status")).to_contain_text(re.compile(r"Retrying in [67] s\."))
    expect(page.locator(".status")).to_contain_text(re.compile(r"Retrying in [1-5] s\."))
    page.keyboard.press("Escape")
    expect(page.locator(".note")).to_contain_text("Stopped.")
    here.problems.clear()  # Chromium's own line about the 429


def over(bounds: Bounds, running: int = 0, used_tokens: int = 0) -> Excess:
    """What the key `bob` is told where it is over a bound."""
    account = ClientAccount("bob", bounds)
    account.begin(running)
    account.charge(Usage(used_tokens, 0, 0), 0.0)
    sampling = SamplingParams(max_tokens=100)
    request = Request(id="r", messages=(Message("user", "Hi"),), sampling=sampling, priority=1)
    found = account.objection(1, 0.0) or account.fit(request, has_priority=True, default_max_tokens=50)
    assert isinstance(found, Excess)
    return found


BEYOND = (
    (over(Bounds(max_concurrent=1), 1), "Your key allows no more answers at once", "bob has 1 request running and"),
    (over(Bounds(max_concurrent=2), 2), "Your key allows no more answers at once", "bob has 2 requests running"),
    (
        over(Bounds(max_tokens_per_minute=9), used_tokens=9),
        "Your key has used its tokens for this minute. Retrying in ",
        "bob has used 9 tokens",
    ),
    (over(Bounds(max_tokens=9)), "Your key allows shorter answers only", "max_tokens: bob may generate 9"),
    (over(Bounds(max_priority=0)), "Your key allows no such priority", "priority: bob may use 0"),
)
"""A key that is over a bound, and what its owner is told of it: in the page's words, and in the server's."""


def test_the_bounds_of_a_key_are_not_taken_for_a_busy_server(here: Visitor) -> None:
    page = here.visit().page
    refusals: list[dict[str, Any]] = []
    page.route(ANSWERS, lambda route: route.fulfill(**refusals[-1]))
    for excess, told, said in BEYOND:
        status = 403 if excess.retry_after_ms is None else 429
        headers = {} if excess.retry_after_ms is None else {"retry-after-ms": str(excess.retry_after_ms)}
        code = "rate_limit_exceeded" if status == 429 else None
        error = {"message": excess.message, "code": code}
        refusals.append({"status": status, "headers": headers, "json": {"error": error}})
        here.ask("What is UMA?")
        last = page.locator("article.assistant").last
        expect(last.locator(".status, .failure").filter(has_text=told)).to_be_visible()
        expect(last).not_to_contain_text("server is busy")
        if status == 403:
            expect(last.locator(".detail")).to_contain_text(f"The server said: {said}")
        page.keyboard.press("Escape")
    here.problems.clear()  # Chromium's own lines about the refusals


def test_why_an_answer_was_cut_short(browser: Browser, tmp_path: Path) -> None:
    with saying(browser, tmp_path, "Again and again. ", **ENDS) as here:
        page = here.visit().page
        here.ask("Go on.")
        here.wait_for_answer()
        expect(page.locator(".note")).to_contain_text("Start a new chat for more space.")
        expect(page.locator(".note")).not_to_contain_text("settings")
        set_sampling(here, max_tokens=9)
        here.ask("Go on.")
        here.wait_for_answer()
        expect(page.locator(".note")).to_contain_text("“Max tokens” in the settings")


def test_a_double_click_asks_once(here: Visitor) -> None:
    page = here.visit().page
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.method == "POST" else None)
    page.get_by_role("button", name="What is UMA?").dblclick()
    here.wait_for_answer()
    expect(page.locator("article")).to_have_count(2)
    page.get_by_role("button", name="Regenerate").dblclick()
    expect(page.get_by_role("group", name="Version 2 of 2")).to_be_visible()
    here.wait_for_answer()
    assert sum(url.endswith("/answers") for url in asked) == 2


def test_a_model_here_with_a_longer_context_is_named(here: Visitor) -> None:
    refusal = "prompt too large: 9,000 tokens do not fit the context of 8,192 tokens, which must also hold the answer"
    failure = {"code": "E_LIMIT_PROMPT_TOO_LARGE", "message": refusal}
    info = "{ limits: { n_ctx: 8192 }, models: [{ name: 'gemma', fits: true, context_length: 9000 }] }"
    words = here.visit().page.evaluate(
        "async failure => (await import('/ui/failures.js')).explain(failure, false, INFO).words".replace("INFO", info),
        failure,
    )
    assert words.endswith(" There are 9,000 tokens, and at most 8,192 fit. More fit into gemma.")
