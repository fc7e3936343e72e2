"""Clicks: a double click does one thing, and none is lost where the page changes between its press and its release."""

from __future__ import annotations

from http_server import HttpServer
from page_browser import LONG, Visitor
from playwright.sync_api import Locator, Page, expect


def press(page: Page, what: Locator) -> None:
    """Put the mouse's button down on it."""
    box = what.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()


def two_conversations(here: Visitor) -> Page:
    """Two with an answer each; the second is shown."""
    page = here.visit().page
    for question in ("What is UMA?", "Who are you?"):
        page.get_by_role("button", name="New chat", exact=True).click()
        here.ask(question)
        here.wait_for_answer()
    return page


def test_a_double_click_on_send_asks_and_leaves_the_answer_to_be_stopped_later(
    here: Visitor, http_server: HttpServer
) -> None:
    page = here.visit().page
    page.evaluate("settings => localStorage.setItem('uma.new-chats', JSON.stringify(settings))", LONG)
    here.visit()
    begun = http_server.process.metrics()["requests_total"]
    page.get_by_label("Message", exact=True).fill("Tell me a story about a fox")
    page.locator("#send").dblclick(delay=20)
    page.locator(".is-writing .block").first.wait_for()
    expect(page.locator(".figures")).to_contain_text("1,900 tokens")
    assert http_server.process.metrics()["requests_total"] == begun + 1
    expect(page.locator(".note")).to_contain_text("Cut off at the limit of 1,900 tokens")


def test_a_pointer_reaches_the_buttons_of_a_question_on_a_slanting_way(here: Visitor) -> None:
    page = here.visit().page
    here.ask("Tell me a story about a fox")
    here.wait_for_answer()
    question = page.locator(".bubble").bounding_box()
    edit = page.get_by_role("button", name="Edit and send again").bounding_box()
    assert question is not None and edit is not None
    for part in (0.1, 0.5):  # of the question's width, from where the pointer goes to the button's middle
        page.mouse.move(question["x"] + part * question["width"], question["y"] + question["height"] / 2)
        page.mouse.move(edit["x"] + edit["width"] / 2, edit["y"] + edit["height"] / 2, steps=25)
        page.mouse.down()
        page.mouse.up()
        expect(page.get_by_label("Your question")).to_be_focused()
        page.keyboard.press("Escape")


def test_a_double_click_on_branch_off_makes_one_branch(here: Visitor) -> None:
    page = here.visit().page
    here.ask("What is UMA?")
    here.wait_for_answer()
    page.get_by_role("button", name="Branch in a new chat").dblclick()
    expect(page.locator("#title")).to_have_text("What is UMA? (branch)")
    expect(page.locator(".conversation")).to_have_count(2)


def test_a_click_in_the_list_counts_where_the_list_changes_meanwhile(here: Visitor) -> None:
    page = two_conversations(here)
    first = page.locator(".conversation", has_text="What is UMA?")
    other = Visitor(page.context.new_page(), here.url).visit(page.url.removeprefix(f"{here.url}/"))
    press(page, first)
    other.ask("And an owl?")
    expect(page.locator(".bubble")).to_have_count(2)
    other.wait_for_answer(2)  # so the list has shown that it is being written, and that it is complete
    page.mouse.up()
    expect(page.locator(".bubble")).to_have_text("What is UMA?")


def test_a_click_that_ends_a_renaming_opens_what_it_hits(here: Visitor) -> None:
    page = two_conversations(here)
    page.get_by_label("This conversation").click()
    page.get_by_role("button", name="Rename").click()
    page.keyboard.type("Of somebody")
    press(page, page.locator(".conversation", has_text="What is UMA?"))
    expect(page.locator(".conversation", has_text="Of somebody")).to_have_count(1)
    page.mouse.up()
    expect(page.locator(".bubble")).to_have_text("What is UMA?")


def test_the_list_keeps_its_order_and_the_focus_while_it_changes(here: Visitor) -> None:
    page = two_conversations(here)
    entries = page.locator(".conversation .name")
    expect(entries).to_have_text(["Who are you?", "What is UMA?"])
    last = page.locator(".conversation").last
    last.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".bubble")).to_have_text("What is UMA?")
    other = Visitor(page.context.new_page(), here.url).visit(page.url.removeprefix(f"{here.url}/"))
    other.ask("And an owl?")
    expect(entries).to_have_text(["What is UMA?", "Who are you?"])
    expect(page.locator(".conversation").first).to_be_focused()
    expect(page.locator(".conversation[aria-current]")).to_have_text("What is UMA?")
    other.wait_for_answer(2)
