"""The list of conversations: search in all of them, and what can be done with each."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from page_browser import Visitor, violations
from playwright.sync_api import FilePayload, Page, expect

MONTHS = {"Fishing": datetime(2024, 3, 5, 12, tzinfo=UTC), "Cooking": datetime(2025, 7, 5, 12, tzinfo=UTC)}


def saved(*conversations: dict[str, Any]) -> str:
    return json.dumps({"format": "uma-conversations", "version": 1, "conversations": conversations})


def conversation(title: str, text: str) -> dict[str, Any]:
    at = round(MONTHS.get(title, MONTHS["Fishing"]).timestamp() * 1000)
    settings = {"system": "", "priority": 1, "sampling": {}}
    files = [{"name": f"{title}.txt", "text": f"Notes of the old man about {title}."}]
    asked = {"id": "a", "parent": None, "role": "user", "text": f"About {title}?", "at": at, "files": files}
    said = {"id": "b", "parent": "a", "role": "assistant", "text": text, "at": at}
    known = {"id": title, "title": title, "updated": at, "settings": settings, "leaf": "b"}
    return known | {"messages": {"a": asked, "b": said}}


def choose(page: Page, text: str) -> None:
    file: FilePayload = {"name": "saved.json", "mimeType": "application/json", "buffer": text.encode()}
    page.locator("#import-file").set_input_files(file)


def act(page: Page, title: str, name: str) -> None:
    """Choose from the menu of a conversation in the list."""
    page.locator(".entry", has_text=title).hover()
    page.get_by_role("button", name=f"More for {title}").click()
    page.locator("#entry-menu").get_by_role("button", name=name).click()


def titles(page: Page) -> list[str]:
    return page.locator("#conversations .list-head, #conversations .name").all_inner_texts()


def test_the_list_is_scrolled_to_the_conversation_that_is_shown(here: Visitor) -> None:
    page = here.visit().page
    page.set_viewport_size({"width": 1200, "height": 500})
    choose(page, saved(*(conversation(title, "Water.") for title in ["First", *map(str, range(38)), "Last"])))
    expect(page.locator(".entry")).to_have_count(40)
    page.locator(".conversation", has_text="Last").click()
    here.visit(page.url.removeprefix(f"{here.url}/"))
    expect(page.locator(".conversation[aria-current]")).to_have_text("Last")
    expect(page.locator(".conversation[aria-current]")).to_be_in_viewport(ratio=1)
    page.get_by_role("button", name="New chat", exact=True).click()
    page.keyboard.press("Control+k")
    page.keyboard.type("About First")
    page.keyboard.press("Enter")
    expect(page.locator(".conversation[aria-current]")).to_have_text("First")
    expect(page.locator(".conversation[aria-current]")).to_be_in_viewport(ratio=1)


def test_conversations_are_found_pinned_renamed_and_deleted_in_the_list(here: Visitor, tmp_path: Path) -> None:
    page = here.visit().page
    both = [
        conversation("Fishing", "A **pike** is a *fish* of\n> still `water`, see [here](http://a/b): 2*3, a_b."),
        conversation("Cooking", "Boil the water."),
    ]
    choose(page, saved(*both))
    expect(page.locator(".entry")).to_have_count(2)
    assert titles(page) == ["July 2025", "Cooking", "March 2024", "Fishing"]

    page.keyboard.press("Control+k")
    expect(page.get_by_role("combobox")).to_be_focused()
    page.keyboard.type("Still PIKE")
    expect(page.get_by_role("option")).to_have_count(1)
    expect(page.locator(".found .snippet")).to_have_text("A pike is a fish of still water, see here: 2*3, a_b.")
    assert violations(page) == []
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("Fishing")
    # What stands in a file is found, too, and can be read.
    page.keyboard.press("Control+k")
    page.keyboard.type("old man cooking")
    expect(page.locator(".found .snippet")).to_contain_text("Notes of the old man about Cooking.")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("Cooking")
    page.get_by_role("button", name="Cooking.txt").click()
    expect(page.locator("#picture pre")).to_have_text("Notes of the old man about Cooking.")
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.locator(".conversation", has_text="Fishing").click()

    act(page, "Fishing", "Pin")
    expect(page.locator(".entry .name").first).to_have_text("Fishing")
    page.locator(".entry", has_text="Cooking").hover()
    page.get_by_role("button", name="More for Cooking").click()
    assert violations(page) == []
    page.keyboard.press("Escape")
    act(page, "Cooking", "Rename")
    page.get_by_label("Name of the conversation").fill("Baking")
    page.keyboard.press("Enter")
    with page.expect_download() as saving:
        act(page, "Baking", "Export as Markdown")
    assert "Boil the water." in saving.value.path().read_text()
    page.reload()
    expect(page.locator(".entry")).to_have_count(2)
    assert titles(page) == ["Pinned", "Fishing", "July 2025", "Baking"]
    act(page, "Baking", "Delete")
    expect(page.locator(".entry")).to_have_count(1)

    # What is here already is not there twice.
    choose(page, saved(*both))
    expect(page.locator(".toast").last).to_contain_text("1 conversation imported. 1 is here already.")
    expect(page.locator(".entry")).to_have_count(2)
    choose(page, saved(both[0]))
    expect(page.locator(".toast").last).to_contain_text("Nothing was imported from saved.json. 1 is here already.")
    expect(page.locator(".entry")).to_have_count(2)


def test_a_search_opens_the_sentence_and_marks_its_words(here: Visitor) -> None:
    page = here.visit().page
    lines = [f"Line {number} says that water is wet." for number in range(300)]
    lines[150] = "Only here a *lonely* heron waits by the water."
    choose(page, saved(conversation("Fishing", "\n\n".join(lines)), conversation("Cooking", "Boil the water.")))
    page.get_by_role("button", name="Search").click()
    search = page.get_by_role("combobox")
    search.fill("water heron")
    expect(page.get_by_role("option")).to_have_count(1)
    expect(page.locator(".found .snippet")).to_contain_text("heron waits by the water")  # where both stand together
    search.press("Enter")
    expect(page.locator(".blocks p", has_text="heron waits")).to_be_in_viewport()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    marked = "[...CSS.highlights.get('found')].map(range => range.toString().toLowerCase())"
    assert set(page.evaluate(marked)) == {"water", "heron"}
    page.keyboard.press("Control+k")
    expect(search).to_have_value("")  # the next search begins with nothing
    search.fill("nowhere")
    expect(page.get_by_text("Nothing found.")).to_be_visible()


def test_the_palette_has_actions_and_goes_by_arrow_keys(here: Visitor) -> None:
    page = here.visit().page
    page.locator("#model").wait_for()
    page.keyboard.press("Control+k")
    search = page.get_by_role("combobox")
    search.fill("view")
    page.keyboard.press("Enter")
    expect(page.locator("#live-view")).to_be_visible()
    page.keyboard.press("Control+k")
    names = page.get_by_role("option").locator(".name").all_inner_texts()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")  # around the end
    expect(page.locator(".found[aria-selected=true] .name")).to_have_text(names[-1])
    assert violations(page) == []
    for words, action in (("settings", "Settings"), ("options", "Settings"), ("dark", "Change theme")):
        search.fill(words)
        expect(page.locator(".found[aria-selected=true] .name")).to_have_text(action)
    search.fill("new chat")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    here.ask("What is UMA?")
    here.wait_for_answer()
    page.keyboard.press("Control+k")
    expect(page.get_by_role("option", name="This conversation: export as JSON")).to_be_visible()


def test_a_click_on_the_title_renames_and_the_menu_goes_by_arrow_keys(here: Visitor) -> None:
    page = here.visit().page
    choose(page, saved(conversation("Fishing", "A pike.")))
    page.locator("#title").click()
    page.get_by_label("Name of the conversation").fill("Angling")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("Angling")
    menu = page.get_by_label("This conversation")
    expect(menu).to_be_focused()
    page.keyboard.press("Enter")
    items = page.locator("#entry-menu button")
    expect(items.first).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(items.last).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(items.first).to_be_focused()
    page.keyboard.press("End")
    expect(items.last).to_be_focused()
    page.keyboard.press("Home")
    expect(items.first).to_be_focused()
    page.keyboard.press("Escape")
    expect(menu).to_be_focused()


def test_common_keys_begin_a_chat_copy_the_answer_and_hide_the_list(here: Visitor) -> None:
    page = here.visit().page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    toast = page.locator(".toast")
    page.keyboard.press("Control+Shift+C")
    expect(toast).to_have_text("There is no answer to copy yet.")
    here.ask("What is UMA?")
    said = here.wait_for_answer()
    page.keyboard.press("Control+Shift+C")
    expect(toast).to_have_text("The last answer is copied.")
    assert page.evaluate("navigator.clipboard.readText()") == said
    page.keyboard.press("Control+Shift+S")
    expect(page.locator("#sidebar")).to_be_hidden()
    assert violations(page) == []
    here.visit()
    expect(page.locator("#sidebar")).to_be_hidden()
    page.get_by_role("button", name="Show the list of conversations").click()
    expect(page.locator("#sidebar")).to_be_visible()
    page.locator(".conversation").click()
    expect(page.locator("article")).to_have_count(2)
    page.keyboard.press("Control+Shift+O")
    expect(page.locator("article")).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.set_viewport_size({"width": 360, "height": 640})
    for shown in (True, False):
        page.keyboard.press("Control+Shift+S")
        expect(page.locator("#sidebar")).to_be_visible(visible=shown)
    # Each is told where what it does is told.
    page.keyboard.press("Control+K")
    page.keyboard.type("chat")
    expect(page.get_by_role("option", name="New chat Ctrl Shift O")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+/")
    keys = page.get_by_role("dialog", name="Keyboard shortcuts")
    for width, height in ((1200, 600), (360, 740)):
        page.keyboard.press("Escape")
        page.set_viewport_size({"width": width, "height": height})
        page.keyboard.press("Control+/")
        expect(keys.get_by_role("heading")).to_be_in_viewport(ratio=1)
    expect(keys.get_by_text("Copy the last answer")).to_be_visible()
    page.keyboard.press("Control+Shift+O")  # a dialog lies over all else
    expect(keys).to_be_visible()


def test_the_palette_begins_with_another_conversation_and_leads_to_each_setting(here: Visitor) -> None:
    page = here.visit().page
    page.locator("#model").wait_for()
    first = page.get_by_role("option", selected=True).locator(".name")
    page.keyboard.press("Control+k")
    expect(first).to_have_text("New chat")
    page.keyboard.press("Escape")
    choose(page, saved(conversation("Fishing", "Warm."), conversation("Cooking", "The temperature of water.")))
    page.locator(".conversation", has_text="Cooking").click()
    page.keyboard.press("Control+k")
    expect(first).to_have_text("Fishing")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("Fishing")
    # What is called so comes before a conversation that has the word.
    for name, label in (("temperature", "Temperature"), ("stop seq", "Stop sequences")):
        page.keyboard.press("Control+k")
        page.keyboard.type(name)
        expect(first).to_have_text(label)
        assert violations(page) == []
        page.keyboard.press("Enter")
        expect(page.get_by_label(label)).to_be_focused()
        expect(page.get_by_label(label)).to_be_in_viewport()
        assert violations(page) == []
        page.keyboard.press("Escape")


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("## **Plan** for [UMA](https://example.org)", "Plan for UMA"),
        ("```python\nprint(1)\n```\nWhat does it say?", "print(1)"),
        ("What is `__init__` in a_b_c, and 2 * 3 * 4?", "What is __init__ in a_b_c, and 2 * 3 * 4?"),
    ],
)
def test_a_title_has_the_words_of_the_question_without_its_marks(here: Visitor, text: str, title: str) -> None:
    page = here.visit().page
    here.ask(text)
    expect(page.locator("#title")).to_have_text(title)
    here.wait_for_answer()


def test_the_settings_that_few_people_change_are_folded_until_one_of_them_is_set(here: Visitor) -> None:
    page = here.visit().page
    page.locator("#chips").click()
    fields = page.locator("#settings .field:visible").locator("label, legend")
    expect(page.locator("#settings").get_by_label("Temperature")).to_be_visible()
    assert "Priority" not in fields.all_inner_texts() and len(fields.all_inner_texts()) <= 5
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_text("More", exact=True).click()
    expect(page.get_by_label("Seed")).to_be_visible()
    page.reload()
    page.locator("#chips").click()
    expect(page.get_by_label("Seed")).to_be_hidden()
    page.get_by_text("More", exact=True).click()
    page.get_by_label("Seed").fill("7")
    page.get_by_role("button", name="Use for new chats").click()
    page.reload()
    page.locator("#chips").click()
    expect(page.get_by_label("Seed")).to_have_value("7")
    expect(page.get_by_label("Seed")).to_be_visible()
