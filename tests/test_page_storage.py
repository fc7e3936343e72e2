"""What the page keeps in the browser: without room for it, in two windows at once, and from files of any content."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from http_server import HttpServer
from page_browser import FLAGS, LONG, Visitor, find_chromium, unfold_settings, violations
from playwright.sync_api import FilePayload, Page, expect, sync_playwright

FILL = """() => {
    for (let size = 1 << 20, count = 0; size >= 1; )
        try { localStorage.setItem(`fill${count++}`, "x".repeat(size)); } catch { size >>= 1; }
}"""
"""Leaves no room in localStorage."""

FIGURES: dict[str, Any] = {
    "reason": "stop",
    "usage": {"prompt_tokens": 9, "cached_tokens": 0, "completion_tokens": 3},
    "metrics": {"queue_ms": 0, "ttft_ms": 1, "decode_ms": 2, "tokens_per_second": 3, "batch_size": 1},
    "seed": 1,
    "warnings": [],
}


def beside(one: Visitor) -> Visitor:
    """A second window of the same browser; its scripts' errors count as the first one's."""
    other = Visitor(one.page.context.new_page(), one.url)
    other.problems = one.problems
    return other


def question(id: str, parent: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": id, "parent": parent, "role": "user", "text": f"Question {id}", "at": 1, **more}


def answer(id: str, parent: str, **more: Any) -> dict[str, Any]:
    return {"id": id, "parent": parent, "role": "assistant", "text": f"Answer {id}", "at": 2, "done": FIGURES, **more}


def conversation(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    by_id = {each["id"]: each for each in messages}
    leaf = messages[-1]["id"] if messages else None
    settings = {"system": "", "priority": 1, "sampling": {"temperature": 0.7}}
    known = {"id": "x", "title": "Of a file", "updated": 1, "settings": settings}
    return {**known, "messages": by_id, "leaf": leaf, **more}


def choose_file(page: Page, *conversations: Any) -> None:
    """Import an export with these conversations."""
    file = json.dumps({"format": "uma-conversations", "version": 1, "conversations": conversations})
    choose_text(page, file)


def choose_text(page: Page, text: str) -> None:
    page.locator("#import-file").set_input_files(payload("given.json", text))


def payload(name: str, text: str) -> FilePayload:
    """A file that is nowhere on the disk."""
    return {"name": name, "mimeType": "application/octet-stream", "buffer": text.encode()}


def set_temperature(page: Page, value: str, *, for_new: bool = False) -> None:
    page.get_by_role("button", name="Settings", exact=True).click()
    page.locator("#set-temperature").fill(value)
    if for_new:
        page.get_by_role("button", name="Use for new chats").click()
    page.keyboard.press("Escape")


def test_a_browser_that_keeps_nothing_can_still_chat(http_server: HttpServer, tmp_path: Path) -> None:
    preferences = tmp_path / "Default" / "Preferences"
    preferences.parent.mkdir()
    preferences.write_text(json.dumps({"profile": {"default_content_setting_values": {"cookies": 2}}}))
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path, executable_path=find_chromium(), args=list(FLAGS)
        )
        try:
            one = Visitor(context.new_page(), http_server.url)
            page = one.visit().page
            set_temperature(page, "0.5", for_new=True)
            expect(page.locator("#chips")).to_contain_text("temperature 0.5")
            page.locator("#theme").click()
            expect(page.locator(".toast", has_text="blocked: settings are lost")).to_have_count(1)
            expect(page.locator("html")).to_have_attribute("data-theme", "light")
            one.ask("What is UMA?")
            one.wait_for_answer()
            page.get_by_role("button", name="New chat", exact=True).click()
            expect(page.locator("#chips")).to_contain_text("temperature 0.5")
            one.ask("Who are you?")
            one.wait_for_answer()
            page.locator(".conversation", has_text="What is UMA?").click()
            expect(page.locator(".bubble")).to_have_text("What is UMA?")
            expect(page.locator("#loss")).to_contain_text("saves no conversations: this one is lost")
            assert one.problems == []
        finally:
            context.close()


BLOCK = """name => Object.defineProperty(window, name, { get() { throw new DOMException("no", "SecurityError"); } })"""
"""Takes a kind of storage away from the page."""


@pytest.mark.parametrize(("blocked", "lost"), [("localStorage", "settings"), ("indexedDB", "conversations")])
def test_a_browser_that_keeps_one_kind_of_data_says_which_it_does_not_keep(
    here: Visitor, blocked: str, lost: str
) -> None:
    page = here.page
    page.add_init_script(f"({BLOCK})({json.dumps(blocked)})")
    here.visit()
    here.ask("What is UMA?")
    here.wait_for_answer()
    page.locator("#theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    expect(page.locator(".toast", has_text="settings are lost")).to_have_count(1 if lost == "settings" else 0)
    expect(page.locator("#loss")).to_be_visible(visible=lost == "conversations")
    page.reload()
    expect(page.locator(".conversation")).to_have_count(1 if lost == "settings" else 0)


def test_a_browser_without_room_for_settings_applies_them_and_says_so_once(here: Visitor) -> None:
    page = here.visit().page
    page.evaluate(FILL)
    set_temperature(page, "0.55")
    expect(page.locator("#chips")).to_contain_text("temperature 0.55")
    page.locator("#theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    expect(page.locator(".toast", has_text="storage is full or blocked: settings")).to_have_count(1)
    page.reload()
    page.wait_for_selector("html[data-ready]", state="attached")
    here.ask("What is UMA?")
    here.wait_for_answer()


def test_a_browser_without_room_for_conversations_says_so(here: Visitor) -> None:
    page = here.visit().page
    quota = {"origin": here.url, "quotaSize": 10_000}
    page.context.new_cdp_session(page).send("Storage.overrideQuotaForOrigin", quota)
    here.ask(f"Summarize\n{' '.join(map(str, range(3_000)))}")  # the store compresses what repeats itself
    told = page.get_by_role("status").filter(has_text="storage is full: this conversation is lost")
    expect(told).to_be_visible()
    page.locator("article.assistant[aria-busy=false]").wait_for()
    with page.expect_download() as saved:
        told.get_by_role("button", name="Export").click()
    assert json.loads(saved.value.path().read_text())["conversations"][0]["title"] == "Summarize"
    assert violations(page) == []
    page.get_by_role("link", name="Live").click()
    expect(told).to_be_hidden()
    page.get_by_role("link", name="Chat").click()
    expect(told).to_be_visible()
    page.get_by_role("button", name="New chat", exact=True).click()
    expect(told).to_be_hidden()
    page.locator(".conversation").click()
    expect(told).to_be_visible()
    page.context.new_cdp_session(page).send("Storage.overrideQuotaForOrigin", {"origin": here.url})
    set_temperature(page, "0.5")  # which saves it
    expect(told).to_be_hidden()


def test_two_windows_see_each_others_messages_and_lose_none(here: Visitor) -> None:
    page = here.visit().page
    here.ask("Tell me a story about a fox")
    here.wait_for_answer()
    other = beside(here).visit(page.url.removeprefix(f"{here.url}/"))
    expect(other.page.locator("article.user")).to_have_count(1)
    here.ask("And an owl?")
    here.wait_for_answer(2)
    other.wait_for_answer(2)
    expect(other.page.locator("article.user").last).to_contain_text("And an owl?")
    other.ask("What is UMA?")
    other.wait_for_answer(3)
    here.wait_for_answer(3)
    page.reload()
    for each in ("Tell me a story about a fox", "And an owl?", "What is UMA?"):
        expect(page.locator(".bubble", has_text=each)).to_have_count(1)


def test_a_window_that_hears_nothing_of_the_other_overwrites_nothing(here: Visitor) -> None:
    page = here.visit().page
    here.ask("Tell me a story about a fox")
    here.wait_for_answer()
    deaf = beside(here)
    deaf.page.add_init_script("BroadcastChannel = class { postMessage() {} }")
    deaf.visit(page.url.removeprefix(f"{here.url}/"))
    expect(deaf.page.locator("article.user")).to_have_count(1)
    here.ask("And an owl?")
    here.wait_for_answer(2)
    deaf.ask("What is UMA?")
    deaf.wait_for_answer(2)
    page.reload()
    expect(page.locator(".bubble")).to_have_count(2)
    expect(page.get_by_role("group", name="Version 2 of 2")).to_have_count(1)
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(".bubble").last).to_have_text("And an owl?")
    page.get_by_label("This conversation").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    set_temperature(deaf.page, "0.5")
    deaf.ask("Are you there?")
    deaf.wait_for_answer(3)
    page.reload()
    page.wait_for_selector("html[data-ready]", state="attached")
    expect(page.locator(".conversation")).to_have_count(0)


def test_an_answer_is_followed_in_the_other_window_also_when_the_first_is_closed(here: Visitor) -> None:
    page = here.visit().page
    choose_file(page, conversation(question("a"), answer("b", "a"), settings=LONG))
    expect(page.locator("article.user")).to_have_count(1)
    other = beside(here).visit(page.url.removeprefix(f"{here.url}/"))
    here.ask("Tell me a story about a fox")
    other.page.locator(".is-writing .block").first.wait_for()
    page.close()
    other.wait_for_answer(2)
    expect(other.page.locator(".figures").last).to_contain_text("1,900")


def test_what_is_edited_in_one_window_outlives_what_is_said_in_the_other(here: Visitor) -> None:
    page = here.visit().page
    choose_file(page, conversation(question("a"), answer("b", "a")))
    expect(page.locator("article.user")).to_have_count(1)
    other = beside(here).visit(page.url.removeprefix(f"{here.url}/"))
    other.page.locator("article.user").hover()
    other.page.get_by_role("button", name="Edit and send again").click()
    other.page.get_by_label("Your question").fill("What is UMA?")
    here.ask("Who are you?")
    here.wait_for_answer(2)
    page.get_by_label("This conversation").click()
    page.get_by_role("button", name="Rename").click()
    page.keyboard.type("Said in both")
    page.keyboard.press("Enter")
    expect(other.page.locator("#title")).to_have_text("Said in both")  # so what was said before has come, too
    expect(other.page.get_by_label("Your question")).to_have_value("What is UMA?")
    other.page.get_by_role("button", name="Send again", exact=True).click()
    expect(other.page.get_by_role("group", name="Version 2 of 2")).to_be_visible()
    other.wait_for_answer()
    other.page.get_by_role("button", name="Previous version").click()
    expect(other.page.locator(".bubble")).to_have_text(["Question a", "Who are you?"])


def test_a_conversation_that_is_deleted_in_one_window_is_gone_from_the_other_until_undone(here: Visitor) -> None:
    page = here.visit().page
    here.ask("What is UMA?")
    here.wait_for_answer()
    other = beside(here).visit(page.url.removeprefix(f"{here.url}/"))
    expect(other.page.locator(".conversation")).to_have_count(1)
    page.get_by_label("This conversation").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(other.page.locator(".conversation")).to_have_count(0)
    expect(other.page.locator(".toast")).to_contain_text("was deleted in another window")
    page.get_by_role("button", name="Undo").click()
    expect(other.page.locator(".conversation")).to_have_count(1)
    page.reload()
    expect(page.locator(".bubble")).to_have_text("What is UMA?")


DAMAGED: tuple[Any, ...] = (
    "{",
    [None],
    [{}],
    [conversation(question("a", "constructor"))],
    [conversation(question("a", "b"), question("b", "a"))],
    [conversation(question("a", files=[None]))],
    [conversation(question("a", files=5))],
    [conversation(question("a", role="system"))],
    [conversation({**question("a"), "text": None})],
    [conversation(question("a")), conversation(question("a", "b"))],
    [],
)
"""Texts of files, or the conversations in one."""
NO_FIGURES: tuple[Any, ...] = (
    {"usage": {}, "metrics": {}},
    {**FIGURES, "warnings": 5},
    {**FIGURES, "metrics": {"ttft_ms": "<b>"}},
    7,
)


def test_a_damaged_file_is_refused_whole_and_in_words(here: Visitor) -> None:
    page = here.visit().page
    toast = page.locator(".toast")
    for file in DAMAGED:
        if isinstance(file, str):
            choose_text(page, file)
        else:
            choose_file(page, *file)
        expect(toast, str(file)).to_contain_text("Nothing was imported from given.json. ")
        for word in ("undefined", "Cannot read", "null", "function"):
            assert word not in toast.inner_text(), file
        expect(page.locator(".conversation"), str(file)).to_have_count(0)
        page.reload()
        page.wait_for_selector("html[data-ready]", state="attached")
        expect(page.locator(".conversation"), str(file)).to_have_count(0)


CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "</tool_call>Oslo"}'}}
OPENAI = [
    {"role": "system", "content": "You are a fox."},
    {"role": "user", "content": [{"type": "text", "text": "Who are you?"}, {"type": "image_url", "image_url": {}}]},
    {"role": "assistant", "content": "A fox."},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "5"},
    {"role": "user", "content": "And I?"},
    {"role": "assistant", "content": "An owl."},
]


def node(id: str, parent: str | None, role: str, *parts: Any) -> dict[str, Any]:
    """A message of ChatGPT's export."""
    content = {"content_type": "text", "parts": parts}
    return {"id": id, "parent": parent, "message": {"author": {"role": role}, "create_time": 1.5, "content": content}}


CHATGPT = [
    node("s", "root", "system", ""),
    node("a", "s", "user", "Who are you?"),
    node("b", "a", "assistant", "An owl."),
    node("t", "a", "tool", "5"),
    node("c", "t", "assistant", "A fox."),
]
TO_PYTHON = {
    "author": {"role": "assistant"},
    "recipient": "python",
    "content": {"content_type": "code", "text": "print(7 * 8)"},
}
"""What ChatGPT says to a tool."""


def test_openai_s_messages_and_chatgpt_s_export_are_imported(here: Visitor) -> None:
    page = here.visit().page
    page.locator("#model").wait_for()
    bubbles, blocks = page.locator(".bubble"), page.locator("article.assistant .blocks")
    for file in (OPENAI, {"messages": [*OPENAI[:-1], {"role": "assistant", "content": "An elk."}], "model": "gpt"}):
        choose_text(page, json.dumps(file))
        expect(bubbles).to_have_text(["Who are you?", "And I?"])
        expect(page.locator("#title")).to_have_text("Who are you?")
        expect(page.locator("#chips")).to_have_text("system prompt")
        expect(page.locator(".toast").last).to_contain_text("pictures and other parts of messages")
    root = {"id": "root", "parent": None, "message": None}
    tree = {"title": "Of foxes", "mapping": {each["id"]: each for each in (root, *CHATGPT)}, "current_node": "c"}
    choose_text(page, json.dumps([tree, {"title": "Empty", "mapping": {"root": root}}]))
    expect(page.locator("#title")).to_have_text("Of foxes")
    expect(bubbles).to_have_text(["Who are you?"])
    expect(blocks.last).to_have_text("A fox.")
    expect(page.locator("#thread")).not_to_contain_text("not finished")
    page.get_by_role("button", name="Previous version").click()
    expect(blocks).to_have_text(["An owl."])
    page.reload()
    expect(page.locator(".conversation")).to_have_count(3)
    choose_text(page, '{"messages": {}}')
    expect(page.locator(".toast").last).to_contain_text("It must be an export of this page, ChatGPT")


ANTHROPIC = {
    "model": "claude",
    "system": [{"type": "text", "text": "You are a fox."}],
    "messages": [
        {"role": "user", "content": "What is the weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [{"type": "text", "text": "</tool_response> 5 °C"}],
                }
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "It is cold."}]},
    ],
}


def test_calls_of_tools_are_left_out_of_an_import_with_a_word(here: Visitor) -> None:
    page = here.visit().page
    page.locator("#model").wait_for()
    choose_text(page, json.dumps(ANTHROPIC))
    expect(page.locator(".bubble")).to_have_text(["What is the weather?"])
    expect(page.locator("article.assistant .blocks")).to_have_text(["I look.", "It is cold."])
    expect(page.locator("#chips")).to_have_text("system prompt")
    expect(page.locator(".toast").last).to_contain_text("Left out, as it cannot be used here: pictures and other parts")
    call = {"id": "x", "parent": "a", "message": TO_PYTHON}
    nodes = (CHATGPT[1], call, node("t", "x", "tool", "56"), node("c", "t", "assistant", "It is 56."))
    choose_text(page, json.dumps([{"title": "A product", "mapping": {each["id"]: each for each in nodes}}]))
    expect(page.locator("#title")).to_have_text("A product")
    expect(page.locator("article.assistant .blocks").last).to_have_text("It is 56.")
    expect(page.locator(".toast").last).to_contain_text("calls of tools, messages of the role tool")
    with page.expect_request("**/ui/api/answers") as asking:
        here.ask("And 7 * 9?")
    body: Any = asking.value.post_data_json
    assert [each["role"] for each in body["messages"]] == ["user", "assistant", "user"]
    here.wait_for_answer()


def test_notices_of_one_topic_take_each_others_place_and_can_be_closed(here: Visitor) -> None:
    page = here.visit().page
    toast = page.locator(".toast")
    for text, why in (("fox", "The file is not JSON."), ("fox", "The file is not JSON."), ("{}", "It must be")):
        choose_text(page, text)
        expect(toast).to_have_count(1)
        expect(toast).to_contain_text(f"Nothing was imported from given.json. {why}")
    assert violations(page) == []
    toast.get_by_role("button", name="Dismiss").click()
    expect(toast).to_have_count(0)
    choose_text(page, "fox")
    expect(toast).to_have_count(1)
    choose_file(page, conversation(question("a"), answer("b", "a")))
    expect(toast).to_have_text(["1 conversation imported."])
    page.locator("#attach-file").set_input_files(payload("a.bin", "\0" * 9))
    expect(toast.last).to_contain_text("Not attached: a.bin.")
    page.locator("#attach-file").set_input_files(payload("a.txt", "a fox"))
    expect(page.locator("#attached")).to_contain_text("a.txt")
    expect(toast.filter(has_text="Not attached")).to_have_count(0)


def test_figures_that_are_none_are_left_out_with_a_word(here: Visitor) -> None:
    page = here.visit().page
    for number, done in enumerate(NO_FIGURES):
        text = f"Answer {number}"
        choose_file(page, conversation(question("a"), answer("b", "a", done=done, text=text), id=str(number)))
        expect(page.locator("article.assistant .blocks"), str(done)).to_have_text(text)
        expect(page.locator(".toast"), str(done)).to_contain_text("1 conversation imported. Left out")
        expect(page.locator(".toast"), str(done)).to_contain_text("figures of an answer")
        page.reload()
        expect(page.locator("article.assistant .blocks"), str(done)).to_have_text(text)


def test_a_speed_that_would_be_none_is_told_as_a_count_of_tokens(here: Visitor) -> None:
    page = here.visit().page
    slow = FIGURES | {"metrics": FIGURES["metrics"] | {"tokens_per_second": 0.04}}
    choose_file(page, conversation(question("a"), answer("b", "a", done=slow)))
    expect(page.locator(".figures > span")).to_have_text(re.compile(r"^\d+ tokens?$"))


def test_settings_out_of_their_range_are_left_out_with_a_word(here: Visitor) -> None:
    page = here.visit().page
    page.locator("#model").wait_for()
    sampling = {"temperature": 99, "max_tokens": -4, "seed": 7, "n": 7, "stop": [5], "top_k": 1.5}
    choose_file(page, conversation(question("a"), settings={"system": {}, "priority": 5, "sampling": sampling}))
    for word in ("system prompt", "priority", "temperature", "max_tokens", "n, ", "stop", "top_k"):
        expect(page.locator(".toast")).to_contain_text(word)
    expect(page.locator(".toast")).not_to_contain_text("seed")
    page.get_by_role("button", name="Settings", exact=True).click()
    for field, value in (("system", ""), ("set-max_tokens", ""), ("set-seed", "7"), ("set-temperature", "")):
        expect(page.locator(f"#{field}")).to_have_value(value)


def test_a_file_without_a_shown_branch_shows_the_newest(here: Visitor) -> None:
    page = here.visit().page
    for number, leaf in enumerate(("constructor", "toString", None, 5)):
        said = answer("b", "__proto__", text=f"Answer {number}")
        choose_file(page, conversation(question("__proto__"), said, leaf=leaf, id=str(number)))
        expect(page.locator("article.assistant .blocks"), str(leaf)).to_have_text(f"Answer {number}")
        expect(page.locator(".bubble"), str(leaf)).to_have_text("Question __proto__")


def test_what_an_earlier_page_stored_wrongly_breaks_nothing(here: Visitor) -> None:
    page = here.visit().page
    wrong = [
        {"id": "1", "title": "No messages"},
        conversation(question("a"), answer("b", "a", done={"usage": {}, "metrics": {}}), id="2", leaf="gone", title={}),
        conversation(question("a", "b"), id="3"),
        conversation(question("a"), answer("b", "a", failure={"message": 5}), id="4", title="Failed"),
    ]
    put = """stored => new Promise(done => {
        indexedDB.open("uma").onsuccess = ({ target: { result } }) => {
            const transaction = result.transaction("conversations", "readwrite");
            for (const each of stored) transaction.objectStore("conversations").put(each);
            transaction.oncomplete = () => { result.close(); done(); };
        };
    })"""
    page.evaluate(put, wrong)
    page.evaluate("localStorage.setItem('uma.new-chats', '{\"sampling\": 5, \"priority\": {}}')")
    page.reload()
    page.wait_for_selector("html[data-ready]", state="attached")
    expect(page.locator(".toast")).to_contain_text("damaged")
    for number in range(2):
        page.locator(".conversation").nth(number).click()
        expect(page.locator("article.assistant .blocks")).to_have_text("Answer b")
    here.ask("What is UMA?")
    here.wait_for_answer(2)


def test_an_answer_says_the_seed_that_it_was_drawn_with(here: Visitor) -> None:
    page = here.visit().page
    choose_file(page, conversation(question("a"), answer("b", "a", done={**FIGURES, "seed": 4_711})))
    expect(page.locator(".figures")).to_contain_text("4711 seed")


def test_a_long_conversation_is_rendered_to_its_beginning(here: Visitor) -> None:
    page = here.visit().page
    messages: list[dict[str, Any]] = []
    for number in range(520):
        messages.append(question(f"q{number}", f"a{number - 1}" if number else None))
        messages.append(answer(f"a{number}", f"q{number}", text=f"Answer **{number}**"))
    choose_file(page, conversation(*messages))
    expect(page.locator("article.assistant strong")).to_have_count(520)


def test_a_look_at_the_live_view_leaves_the_conversation_as_it_is(here: Visitor) -> None:
    page = here.visit().page
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("System prompt", exact=True).fill("You are a pirate.")
    page.keyboard.press("Escape")

    def look_away() -> None:
        page.get_by_role("link", name="Live").click()
        page.locator("#live-view[data-frames]").wait_for()
        page.get_by_role("link", name="Chat").click()
        expect(page.locator("#chat-view")).to_be_visible()

    look_away()
    expect(page.locator("#chips")).to_contain_text("system prompt")
    choose_file(page, conversation(*(question(f"q{n}", f"q{n - 1}" if n else None) for n in range(60))))
    expect(page.locator("article.user")).to_have_count(60)
    page.locator("article.user").first.scroll_into_view_if_needed()
    page.locator("article.user").first.hover()
    page.get_by_role("button", name="Edit and send again").first.click()
    page.get_by_label("Your question").fill("Half a tho")
    before = page.evaluate("document.getElementById('scroller').scrollTop = 7")
    look_away()
    expect(page.get_by_label("Your question")).to_have_value("Half a tho")
    assert page.evaluate("document.getElementById('scroller').scrollTop") == before


def test_a_draft_stays_with_its_conversation(here: Visitor) -> None:
    page = here.visit().page
    message = page.get_by_label("Message", exact=True)
    message.fill("For a new chat")
    choose_file(page, conversation(question("a")))
    expect(message).to_have_value("")
    page.locator("#attach-file").set_input_files(payload("note.txt", "Olga"))
    expect(page.locator("#attached")).to_contain_text("note.txt")
    page.get_by_role("button", name="New chat", exact=True).click()
    expect(message).to_have_value("For a new chat")
    expect(page.locator("#attached")).to_be_hidden()
    page.locator(".conversation").click()
    expect(page.locator("#attached")).to_contain_text("note.txt")


def test_a_message_that_is_not_sent_outlives_a_reload_and_is_no_other_windows(here: Visitor) -> None:
    page = here.visit().page
    message = page.get_by_label("Message", exact=True)
    message.fill("For a new chat")
    choose_file(page, conversation(question("a")))
    expect(page.locator("article.user")).to_have_count(1)
    message.fill("Half a tho")
    page.locator("#attach-file").set_input_files(payload("note.txt", "Olga"))
    expect(page.locator("#attached")).to_contain_text("note.txt")
    page.reload()
    expect(message).to_have_value("Half a tho")
    expect(page.locator("#attached")).to_contain_text("note.txt")
    other = beside(here).visit(page.url.removeprefix(f"{here.url}/"))
    expect(other.page.locator("article.user")).to_have_count(1)
    expect(other.page.get_by_label("Message", exact=True)).to_have_value("")
    page.get_by_role("button", name="New chat", exact=True).click()
    expect(message).to_have_value("For a new chat")
    page.keyboard.press("Enter")
    here.wait_for_answer()
    page.get_by_role("button", name="New chat", exact=True).click()
    expect(page.locator("#empty")).to_be_visible()
    expect(message).to_have_value("")  # it was sent
    page.reload()
    expect(message).to_have_value("")


def test_the_text_of_a_draft_outlives_a_reload_where_its_files_are_too_large(here: Visitor) -> None:
    page = here.visit().page
    page.evaluate(FILL.replace("localStorage", "sessionStorage"))
    page.evaluate("sessionStorage.setItem('fill0', sessionStorage.getItem('fill0').slice(1000))")
    page.get_by_label("Message", exact=True).fill("Half a tho")
    page.locator("#attach-file").set_input_files(payload("long.txt", "Olga " * 10_000))
    expect(page.locator("#attached")).to_contain_text("long.txt")
    expect(page.locator("#attached .fault")).to_contain_text("Too long: the context window is ")
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_have_value("Half a tho")
    expect(page.locator("#attached")).to_be_hidden()


def test_an_edit_that_is_cancelled_leaves_the_focus_where_it_began(here: Visitor) -> None:
    page = here.visit().page
    choose_file(page, conversation(question("a"), answer("b", "a")))
    for name, box in (("Edit and send again", "Your question"), ("Edit the answer", "The answer")):
        button = page.get_by_role("button", name=name)
        button.press("Enter")
        page.get_by_label(box).press("Escape")
        expect(button).to_be_focused()
    # Of a view that is built again the button that began it is gone.
    button = page.get_by_role("button", name="Edit and send again")
    button.press("Enter")
    page.get_by_role("button", name="New chat", exact=True).click()
    page.locator(".conversation").click()
    page.get_by_label("Your question").focus()
    page.keyboard.press("Escape")
    expect(page.locator(":focus")).to_be_visible()


def test_an_edit_that_was_begun_goes_on_when_its_conversation_is_shown_again(here: Visitor) -> None:
    page = here.visit().page
    choose_file(page, conversation(question("a", files=[{"name": "note.txt", "text": "Olga"}]), answer("b", "a")))
    page.locator("article.user").hover()
    page.get_by_role("button", name="Edit and send again").click()
    page.get_by_label("Your question").fill("Half a tho")
    page.get_by_role("button", name="Remove note.txt").click()
    page.get_by_role("button", name="New chat", exact=True).click()
    expect(page.locator("#empty")).to_be_visible()
    page.locator(".conversation").click()
    expect(page.get_by_label("Your question")).to_have_value("Half a tho")
    expect(page.locator(".editor .attached")).to_be_hidden()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".bubble")).to_have_text("Question a")
    page.get_by_role("button", name="New chat", exact=True).click()
    page.locator(".conversation").click()
    expect(page.locator(".bubble")).to_have_text("Question a")


def test_versions_stand_in_the_order_of_their_making_also_where_the_clock_was_set_back(here: Visitor) -> None:
    page = here.visit().page
    here.ask("What is UMA?")
    here.wait_for_answer()
    page.evaluate("Date.now = () => 1_000")
    page.get_by_role("button", name="Regenerate").click()
    here.wait_for_answer()
    expect(page.get_by_role("group", name="Version 2 of 2")).to_be_visible()


def test_a_question_builds_nothing_again_that_stands_before_it(here: Visitor) -> None:
    page = here.visit().page
    messages: list[dict[str, Any]] = []
    for number in range(30):
        messages.append(question(f"q{number}", f"a{number - 1}" if number else None))
        messages.append(answer(f"a{number}", f"q{number}"))
    choose_file(page, conversation(*messages))
    expect(page.locator("article")).to_have_count(60)
    page.evaluate("for (const each of document.querySelectorAll('article')) each.wasThere = true")
    here.ask("What is UMA?")
    here.wait_for_answer(31)
    found = page.evaluate("[...document.querySelectorAll('article')].map((each) => Boolean(each.wasThere))")
    assert found == [True] * 60 + [False] * 2


def test_a_number_that_is_not_taken_is_said_to_be_none(here: Visitor) -> None:
    page = here.visit().page
    page.locator("#model").wait_for()
    page.get_by_role("button", name="Settings", exact=True).click()
    most = page.get_by_label("Max tokens")
    most.press_sequentially("99999")
    expect(page.locator("#set-max_tokens-fault")).to_contain_text("Not set: it must be a whole number from 1 to ")
    assert violations(page) == []
    page.keyboard.press("Escape")
    expect(page.locator("#chips")).not_to_contain_text("tokens")
    page.get_by_role("button", name="Settings", exact=True).click()
    most.fill("50")
    expect(page.locator("#set-max_tokens-fault")).to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator("#chips")).to_contain_text("50 tokens")


@pytest.mark.parametrize("top_k", ["1e30", "1.5"])
def test_what_is_no_whole_number_of_its_range_is_told_at_its_field(here: Visitor, top_k: str) -> None:
    page = here.visit().page
    page.get_by_role("button", name="Settings", exact=True).click()
    unfold_settings(page)
    wrong = {"top_k": top_k, "min_tokens": "1e30", "max_tokens": "2.5", "seed": "-1"}
    for field, value in wrong.items():
        page.locator(f"#set-{field}").fill(value)
        expect(page.locator(f"#set-{field}")).to_have_attribute("aria-invalid", "true")
        expect(page.locator(f"#set-{field}-fault")).to_contain_text("Not set: it must be a whole number from ")
    page.keyboard.press("Escape")
    with page.expect_request("**/ui/api/answers") as sent:
        here.ask("What is UMA?")
    assert not wrong.keys() & json.loads(sent.value.post_data or "")["sampling"].keys()
    here.wait_for_answer()


def test_the_boxes_of_numbers_are_in_line_also_beside_one_with_a_fault(here: Visitor) -> None:
    page = here.visit().page
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("Max tokens").fill("1.5")
    expect(page.locator("#set-max_tokens-fault")).not_to_be_empty()
    boxes = page.locator(".numbers input").evaluate_all("all => all.map((each) => each.getBoundingClientRect().top)")
    assert boxes[0] == boxes[1]
    assert boxes[2] == boxes[3]


def test_more_stop_strings_than_can_be_set_are_told_and_stay_in_their_field(here: Visitor) -> None:
    page = here.visit().page
    page.get_by_role("button", name="Settings", exact=True).click()
    unfold_settings(page)
    stops = [f"stop {number}" for number in range(20)]
    field = page.get_by_label("Stop sequences")
    field.fill("\n".join(stops))
    expect(page.locator("#set-stop-fault")).to_have_text("Only the first 16 of these 20 stop sequences are set.")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_value("\n".join(stops))
    assert violations(page) == []
    page.keyboard.press("Escape")
    with page.expect_request("**/ui/api/answers") as sent:
        here.ask("What is UMA?")
    assert json.loads(sent.value.post_data or "")["sampling"]["stop"] == stops[:16]
    here.wait_for_answer()
    page.get_by_role("button", name="Settings", exact=True).click()
    field.fill("\n".join(stops[:16]))
    expect(page.locator("#set-stop-fault")).to_be_empty()
    expect(field).to_have_attribute("aria-invalid", "false")
