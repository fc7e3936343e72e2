"""Ways on from an answer: more of it, other words in it, and a conversation that outgrows the context."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from page_browser import Visitor, saying, unfold_settings, violations
from playwright.sync_api import Browser, Page, Request, expect

COUNT = "one two three four five six seven eight nine ten " * 6


def messages(request: Request) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(request.post_data or "")["messages"]
    return found


def test_a_cut_answer_goes_on_and_one_that_is_edited_too(here: Visitor) -> None:
    page = here.visit().page
    settings = {"system": "", "priority": 1, "sampling": {"temperature": 0, "max_tokens": 8}}
    page.evaluate("settings => localStorage.setItem('uma.new-chats', JSON.stringify(settings))", settings)
    here.visit()
    here.ask("Tell me a story about a fox")
    begun = here.wait_for_answer()
    with page.expect_request("**/ui/api/answers") as sent:
        page.get_by_role("button", name="Continue").click()
    assert [each["role"] for each in messages(sent.value)] == ["user", "assistant"]
    expect(page.get_by_role("group", name="Version 2 of 2")).to_be_visible()
    longer = here.wait_for_answer()
    assert longer.startswith(begun) and len(longer) > len(begun)
    page.reload()
    assert here.wait_for_answer() == longer

    page.get_by_role("button", name="Edit the answer").click()
    page.get_by_label("The answer").fill("Once a hen met")
    assert violations(page) == []
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".blocks")).to_have_text("Once a hen met")
    expect(page.locator(".note")).to_have_text("Edited.")
    page.get_by_role("button", name="Edit the answer").click()
    page.get_by_role("button", name="Save and continue").click()
    expect(page.get_by_role("group", name="Version 4 of 4")).to_be_visible()
    hen = here.wait_for_answer()
    assert hen.startswith("Once a hen met") and len(hen) > len("Once a hen met")
    with page.expect_request("**/ui/api/answers") as sent:
        here.ask("And then?")
    assert messages(sent.value)[1]["content"].strip() == hen.strip()
    here.wait_for_answer(2)


def test_a_conversation_that_nears_the_end_of_the_context_goes_on_with_what_the_server_leaves_of_it(
    browser: Browser, tmp_path: Path
) -> None:
    """The server chooses what goes and has it summarised: what the page sends stays whole."""
    with saying(browser, tmp_path, COUNT * 4, context_length=1024) as here:
        page = here.visit().page
        gauge, notice, note = page.locator("#gauge"), page.locator("#nearly-full"), page.locator(".note").last
        here.ask("First?")
        here.wait_for_answer()
        expect(gauge).to_be_hidden()
        count = until_nearly_full(here, 1)
        expect(gauge).to_contain_text("% of context used")
        assert violations(page) == []
        notice.get_by_role("button", name="Drop the oldest messages").click()
        expect(notice).to_be_hidden()
        expect(page.locator("#chips")).to_have_text("drops old messages")
        with page.expect_request("**/ui/api/answers") as sent:
            here.ask("More?")
        body = json.loads(sent.value.post_data or "")
        assert (body["truncation"], body["messages"][0]["content"]) == ("auto", "First?")
        here.wait_for_answer(count + 1)
        page.locator("#chips").click()
        unfold_settings(page)
        page.get_by_label("Summarize the oldest messages").check()
        page.keyboard.press("Escape")
        expect(page.locator("#chips")).to_have_text("summarizes old messages")
        for more in (2, 3):
            here.ask("More?")
            here.wait_for_answer(count + more)
        expect(note).to_contain_text("messages of the oldest turns were replaced by a summary")
        summary = page.locator(".summary").last
        summary.get_by_text("Summary").click()
        expect(summary.locator("p")).to_contain_text("one two three")
        assert violations(page) == []
        page.reload()
        expect(summary.locator("p")).to_contain_text("one two three")


def until_nearly_full(here: Visitor, count: int) -> int:
    """Ask until the page says that the conversation is; how many answers there are then."""
    while not here.page.locator("#nearly-full").is_visible():
        count += 1
        here.ask("More?")
        here.wait_for_answer(count)
        here.page.get_by_role("button", name="Send", exact=True).wait_for()  # all that is shown of it has been
    return count


def set_sampling(page: Page, **values: str) -> None:
    """Fill fields of the settings, which have these labels with underlines for spaces."""
    page.get_by_role("button", name="Settings", exact=True).click()
    unfold_settings(page)
    for label, value in values.items():
        page.get_by_label(label.replace("_", " ")).fill(value)
    page.keyboard.press("Escape")


def test_tokens_are_marked_by_their_probability_with_what_was_likely_instead(here: Visitor) -> None:
    page = here.visit().page
    set_sampling(page, Token_probabilities="3", Max_tokens="24", Seed="1")  # no text of empty tokens
    with page.expect_request("**/ui/api/answers") as sent:
        here.ask("Tell me a story about a fox")
    assert json.loads(sent.value.post_data or "")["sampling"]["logprobs"] == 3
    page.locator("article.assistant[aria-busy=false] .figures").wait_for()
    tokens, told = page.locator(".tokens .token"), page.locator(".token-told")
    whole = page.locator(".tokens").text_content() or ""
    assert 1 < tokens.count() <= 24
    tokens.first.focus()
    expect(told.locator("td:first-child")).to_have_count(3)
    assert re.fullmatch(r".+ (under )?[\d.]+ %", told.locator("p").inner_text())
    likelihoods = [
        float(each.rstrip(" %").removeprefix("under ")) for each in told.locator("td + td").all_inner_texts()
    ]
    assert likelihoods == sorted(likelihoods, reverse=True) and sum(likelihoods) <= 101
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    page.keyboard.press("End")
    expect(tokens.last).to_be_focused()
    assert violations(page) == []
    page.get_by_role("button", name="Probabilities", exact=True).click()
    expect(page.locator(".tokens")).to_be_hidden()
    assert (page.locator(".blocks").text_content() or "").split() == whole.split()
    page.reload()
    expect(page.locator(".tokens .token").first).to_be_visible()
    tokens.nth(1).hover()
    expect(told).to_be_visible()
    # On a phone what is told stands within the window, wherever its token does.
    page.set_viewport_size({"width": 390, "height": 844})
    right = "each => Math.max(...[...each.querySelectorAll('p, td')].map((part) => part.getBoundingClientRect().right))"
    for at in range(tokens.count()):
        tokens.nth(at).hover()
        assert told.evaluate(right) <= 390, at
    chips = page.locator("#chips")
    page.locator("#chips").click()
    page.get_by_label("System prompt", exact=True).fill("You are a fox.")
    page.keyboard.press("Escape")
    cut = "each => each.scrollWidth > each.clientWidth && getComputedStyle(each).textOverflow === 'ellipsis'"
    assert chips.locator("span").evaluate(cut)
    chips_box, send_box = chips.bounding_box(), page.locator("#send").bounding_box()
    assert chips_box and send_box and chips_box["x"] + chips_box["width"] <= send_box["x"]


def test_a_preset_that_is_saved_changes_nothing_and_a_reset_can_be_undone(here: Visitor) -> None:
    page = here.visit().page
    page.get_by_role("button", name="Settings", exact=True).click()
    unfold_settings(page)
    answers, chosen = page.get_by_label("Answers at once"), page.get_by_label("Preset", exact=True)
    named, save = page.get_by_label("Name of the preset"), page.get_by_role("button", name="Save", exact=True)
    answers.fill("2")
    named.fill("Fox")
    save.click()
    expect(page.locator("#preset-told")).to_have_text("Saved.")
    expect(answers).to_have_value("2")
    expect(chosen).to_have_value("Fox")
    page.get_by_role("button", name="Reset to defaults").click()
    expect(answers).to_have_value("")
    page.get_by_role("button", name="Undo the reset").click()
    expect(answers).to_have_value("2")
    page.get_by_role("button", name="Reset to defaults").click()
    chosen.select_option("Fox")
    expect(answers).to_have_value("2")
    expect(chosen).to_have_value("Fox")
    expect(page.get_by_role("button", name="Reset to defaults")).to_be_visible()
    named.fill("Wolf")
    save.click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator("#preset-told")).to_have_text("Deleted.")
    expect(chosen.get_by_role("option")).to_have_text(["Choose a preset …", "Fox"])
    expect(answers).to_have_value("2")


def test_settings_are_of_one_conversation_until_they_are_made_those_of_new_chats(here: Visitor) -> None:
    page = here.visit().page
    settings = page.get_by_role("button", name="Settings", exact=True)
    new_chat = page.get_by_role("button", name="New chat", exact=True)
    system, temperature = page.locator("#system"), page.locator("#set-temperature")
    scope, button = page.locator("#scope"), page.get_by_role("button", name="Use for new chats")
    same, other = "for this conversation, and new chats begin with the same.", "New chats begin with other settings."
    for is_kept in (False, True):
        settings.click()
        expect(scope).to_contain_text(same)
        expect(button).to_be_hidden()
        system.fill("You are a fox.")
        temperature.fill("0.5")
        expect(scope).to_contain_text(other)
        if is_kept:
            button.click()
            expect(scope).to_be_focused()  # the button is gone
            expect(scope).to_contain_text(same)
        page.keyboard.press("Escape")
        here.visit()
        new_chat.click()
        settings.click()
        expect(system).to_have_value("You are a fox." if is_kept else "")
        expect(temperature).to_have_value("0.5" if is_kept else "")
        expect(scope).to_contain_text(same)
        page.keyboard.press("Escape")
    settings.click()
    system.fill("")
    assert violations(page) == []
    page.keyboard.press("Escape")
    new_chat.click()
    settings.click()
    expect(system).to_have_value("You are a fox.")  # what one conversation changes is its own


def test_answers_side_by_side_have_one_legend_of_probabilities(here: Visitor) -> None:
    page = here.visit().page
    set_sampling(page, Token_probabilities="3", Answers_at_once="2", Max_tokens="24")
    here.ask("Tell me a story about a fox")
    here.wait_for_answer(2)
    shown, legend = page.locator(".compared article").all(), page.locator(".token-key:visible")
    expect(legend).to_have_count(1)
    for card in shown:
        card.get_by_role("button", name="Probabilities", exact=True).click()
        expect(legend).to_have_count(0 if card is shown[-1] else 1)


def test_a_schema_that_is_no_json_is_kept_with_its_line(here: Visitor) -> None:
    page = here.visit().page
    field, fault = page.get_by_label("JSON Schema"), page.locator("#set-json_schema-fault")
    page.get_by_role("button", name="Settings", exact=True).click()
    unfold_settings(page)
    for text, words in (
        ('{"type": "object",\n "required": }', "Not set: line 2 is no JSON: Unexpected token '}'."),
        ('{"type": "object",\n\n "required": [}', "Not set: line 3 is no JSON: Unexpected token '}'."),
        ('{"type":\n 1,}', "Not set: line 2 is no JSON: Expected double-quoted property name."),
        ('{"type":\n', "Not set: line 2 is no JSON: Unexpected end of JSON input."),
        ("[]", "Not set: it must be an object, as {“type”: …}."),
    ):
        field.fill(text)
        expect(fault).to_have_text(words)
    field.fill('{"type":\n}')
    page.keyboard.press("Escape")
    expect(page.locator("#chips")).to_have_text("schema not set")
    here.ask("What is UMA?")
    here.wait_for_answer()
    page.reload()
    page.locator("#chips").click()
    expect(field).to_have_value('{"type":\n}')
    expect(fault).to_have_text("Not set: line 2 is no JSON: Unexpected token '}'.")
    field.fill("")
    page.keyboard.press("Escape")
    expect(page.locator("#chips")).to_have_text("Settings")


def test_a_queued_question_waits_until_one_of_several_answers_is_chosen(here: Visitor) -> None:
    page = here.visit().page
    page.get_by_role("button", name="Settings", exact=True).click()
    unfold_settings(page)
    page.get_by_label("Answers at once").fill("2")
    page.get_by_label("Max tokens").fill("30")
    page.keyboard.press("Escape")
    queued = page.get_by_role("list", name="Queued questions")
    here.ask("Tell me a story about a fox")
    here.ask("And then?")
    here.wait_for_answer(2)
    cards = page.locator(".compared article")
    expect(queued).to_contain_text("Waits until you choose an answer And then?")
    expect(cards.locator(".goes-on")).to_have_text("The chat goes on from here.")
    expect(cards.last.locator(".goes-on")).to_be_visible()
    assert violations(page) == []
    page.get_by_label("Message", exact=True).focus()
    first = cards.first.locator(".blocks").inner_text()
    with page.expect_request("**/ui/api/answers") as sent:
        cards.first.get_by_role("button", name="Use this one").click()
    assert messages(sent.value)[1]["content"].strip() == first.strip()
    assert messages(sent.value)[2]["content"] == "And then?"
    expect(queued).to_be_hidden()
    expect(page.get_by_role("group", name="Version 1 of 2")).to_be_visible()


def test_presets_several_answers_and_a_schema_reach_the_server(here: Visitor) -> None:
    page = here.visit().page
    page.get_by_role("button", name="Settings", exact=True).click()
    unfold_settings(page)
    page.get_by_label("System prompt", exact=True).fill("You are a fox.")
    page.get_by_label("Answers at once").fill("2")
    page.get_by_label("Max tokens").fill("60")
    page.get_by_label("JSON Schema").fill("{")
    expect(page.locator("#set-json_schema-fault")).to_contain_text("Not set: line 1 is no JSON: Expected property name")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    page.get_by_label("JSON Schema").fill(json.dumps(schema))
    page.get_by_label("Name of the preset").fill("Fox")
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_role("button", name="Reset to defaults").click()
    page.get_by_label("System prompt", exact=True).fill("")
    page.get_by_label("Preset", exact=True).select_option("Fox")
    expect(page.get_by_label("Answers at once")).to_have_value("2")
    assert violations(page) == []
    page.keyboard.press("Escape")
    sent: list[Request] = []
    page.on("request", lambda request: sent.append(request) if request.method == "POST" else None)
    here.ask("What is UMA?")
    said = re.compile(r'^\{\s*"a"\s*:\s*(true|false)\s*\}\s*$')
    answers = page.locator("article.assistant[aria-busy=false]:has(.figures)")
    expect(answers.locator(".blocks")).to_have_text([said, said])
    boxes = [each.bounding_box() for each in answers.all()]
    assert boxes[0] and boxes[1] and boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]  # side by side
    assert violations(page) == []
    answers.first.get_by_role("button", name="Use this one").click()
    expect(page.get_by_role("group", name="Version 1 of 2")).to_be_visible()
    page.get_by_role("button", name="Compare").click()
    expect(answers).to_have_count(2)
    expect(answers.locator(".versions > :first-child")).to_have_text(["1 of 2", "2 of 2"])
    answers.first.get_by_role("button", name="Stop comparing").click()
    expect(page.get_by_role("group", name="Version 1 of 2")).to_be_visible()
    page.get_by_role("button", name="Compare").click()
    answers.last.get_by_role("button", name="Use this one").click()
    bodies = [json.loads(each.post_data or "") for each in sent if each.url.endswith("/answers")]
    assert [each["sampling"]["grammar"]["json_schema"] for each in bodies] == [schema, schema]
    assert all(each["messages"][0]["content"] == "You are a fox." for each in bodies)
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(".blocks")).to_have_text(said)


def test_cards_side_by_side_fill_their_rows_and_close_as_the_chat_goes_on(here: Visitor) -> None:
    page = here.visit().page
    page.set_viewport_size({"width": 800, "height": 900})
    page.get_by_role("button", name="Settings", exact=True).click()
    unfold_settings(page)
    page.get_by_label("Answers at once").fill("3")
    page.get_by_label("Max tokens").fill("30")
    page.keyboard.press("Escape")
    here.ask("Tell me a story about a fox")
    here.wait_for_answer(3)
    widths, lefts = page.locator(".compared").evaluate(
        """row => {
            const left = (each) => Math.round(each.getBoundingClientRect().left);
            const parts = [".block", ".versions span"];
            const inside = [...row.children].map((card) => parts.map((part) => left(card.querySelector(part))));
            return [[...row.children].map((each) => each.offsetWidth / row.offsetWidth), inside];
        }"""
    )
    assert widths[0] < 0.5 and widths[1] < 0.5 and widths[2] == 1  # alone in the second row
    assert all(words == place for words, place in lefts)
    cards = page.locator(".compared article")
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("Answers at once").fill("1")
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    page.get_by_label("Search conversations, models").fill("regenerate")
    expect(page.get_by_role("option", name="Regenerate the last answer")).to_be_visible()
    page.keyboard.press("Escape")
    cards.first.get_by_role("button", name="Edit the answer").click()
    page.get_by_role("button", name="Save and continue").click()
    expect(cards).to_have_count(0)
    here.wait_for_answer()
    page.keyboard.press("Control+k")
    page.get_by_label("Search conversations, models").fill("compare")
    page.get_by_role("option", name="Compare the versions of the last answer").click()
    expect(cards).to_have_count(4)
    here.ask("And then?")
    expect(cards).to_have_count(0)
