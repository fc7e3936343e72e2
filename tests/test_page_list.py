"""The list of conversations: search in all of them, and what can be done with each."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from page_browser import Visitor, violations
from playwright.sync_api import FilePayload, Page, expect

MONTHS = {"Fishing": datetime(2024, 3, 5, 12, tzinfo=UTC), "Cooking": datetime(2025, 7, 5, 12, tzinfo=UTC)}


def saved(*conversations: dict[str, Any]) -> str:
    return json.dumps({"format": "uma-conversations", "version": 1, "conversations": conversations})


def conversation(title: str, text: str) -> dict[str, Any]:
    at = round(MONTHS[title].timestamp() * 1000)
    settings = {"system": "", "priority": 1, "sampling": {}}
    asked = {"id": "a", "parent": None, "role": "user", "text": f"About {title}?", "at": at}
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


def test_conversations_are_found_pinned_renamed_and_deleted_in_the_list(here: Visitor, tmp_path: Path) -> None:
    page = here.visit().page
    both = [conversation("Fishing", "A pike is a *fish* of still water."), conversation("Cooking", "Boil the water.")]
    choose(page, saved(*both))
    expect(page.locator(".entry")).to_have_count(2)
    assert titles(page) == ["July 2025", "Cooking", "March 2024", "Fishing"]

    page.keyboard.press("Control+k")
    search = page.get_by_label("Search in all conversations")
    expect(search).to_be_focused()
    page.keyboard.type("Still PIKE")
    expect(page.locator(".entry")).to_have_count(1)
    expect(page.locator(".entry .snippet")).to_contain_text("A pike is a *fish* of still")
    assert violations(page) == []
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("Fishing")
    search.fill("nowhere")
    expect(page.locator(".list-empty")).to_have_text("Nothing found.")
    search.press("Escape")
    expect(page.locator(".entry")).to_have_count(2)

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

    # What is here already is not there twice unless one says so.
    choose(page, saved(*both))
    dialog = page.get_by_role("dialog", name="Import once more?")
    expect(dialog).to_contain_text("1 of these 2 conversations are here already.")
    assert violations(page) == []
    dialog.get_by_role("button", name="Only what is new").click()
    expect(page.locator(".entry")).to_have_count(2)
    choose(page, saved(both[0]))
    dialog.get_by_role("button", name="Import again").click()
    expect(page.locator(".entry")).to_have_count(3)
    choose(page, saved(both[0]))
    dialog.get_by_role("button", name="Cancel").click()
    expect(page.locator(".entry")).to_have_count(3)
