"""The browser's Back and Forward: they lead through the conversations in the order in which they were shown."""

from __future__ import annotations

from page_browser import Visitor
from playwright.sync_api import Page, expect


def shows(page: Page, *questions: str) -> None:
    """Wait until this conversation is shown; without questions, an empty one."""
    expect(page.locator(".bubble")).to_have_text(list(questions))
    expect(page.locator("#empty")).to_be_visible(visible=not questions)


def test_back_and_forward_lead_through_the_conversations(here: Visitor) -> None:
    page = here.visit().page
    here.ask("What is UMA?")
    here.wait_for_answer()
    page.get_by_role("button", name="New chat", exact=True).click()
    here.ask("Who are you?")
    here.wait_for_answer()
    page.get_by_role("link", name="Live").click()
    expect(page.locator("#live-view")).to_be_visible()
    page.get_by_role("button", name="New chat", exact=True).click()
    shows(page)
    page.locator(".conversation", has_text="What is UMA?").click()
    shows(page, "What is UMA?")
    page.go_back()
    shows(page)
    page.go_back()
    expect(page.locator("#live-view")).to_be_visible()
    page.go_back()
    shows(page, "Who are you?")
    page.go_back()
    shows(page, "What is UMA?")
    page.go_forward()
    shows(page, "Who are you?")
    page.reload()
    shows(page, "Who are you?")


def test_back_leads_to_where_a_branch_came_from(here: Visitor) -> None:
    page = here.visit().page
    here.ask("What is UMA?")
    here.wait_for_answer()
    page.get_by_role("button", name="Branch in a new chat").click()
    expect(page.locator("#title")).to_have_text("What is UMA? (branch)")
    page.go_back()
    expect(page.locator("#title")).to_have_text("What is UMA?")


def test_back_leads_to_nothing_that_was_deleted(here: Visitor) -> None:
    page = here.visit().page
    here.ask("What is UMA?")
    here.wait_for_answer()
    first = page.url
    page.get_by_role("button", name="New chat", exact=True).click()
    here.ask("Who are you?")
    here.wait_for_answer()
    page.get_by_label("This conversation").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    shows(page)
    assert page.url.endswith("/#chat")
    page.go_back()
    shows(page, "What is UMA?")
    assert page.url == first
