"""Decisions about a text on the page: questions one a line, and bars of their probabilities."""

from __future__ import annotations

import json

from page_browser import Visitor, violations
from playwright.sync_api import expect

LINES = "Is it about money?\nWhich team? = billing, shipping\nHow upset? = calm < annoyed < furious\nHow urgent? = 1..3"


def test_questions_of_a_text_are_decided_and_drawn(here: Visitor) -> None:
    page = here.visit().page
    page.set_viewport_size({"width": 360, "height": 800})
    page.get_by_role("button", name="Show the list of conversations").click()
    expect(page.get_by_role("button", name="Decide about a text")).to_be_in_viewport(ratio=1)
    assert page.evaluate("(each => each.scrollWidth - each.clientWidth)(document.getElementById('sidebar'))") <= 0
    page.set_viewport_size({"width": 1200, "height": 800})
    page.get_by_role("button", name="Decide about a text").click()
    sheet = page.locator("#decisions")
    sheet.get_by_label("Text").fill("My card was charged twice.")
    sheet.get_by_label("Questions").fill(LINES)
    with page.expect_response("**/v1/decisions") as answered:
        sheet.get_by_role("button", name="Decide").click()
    asked = json.loads(answered.value.request.post_data or "")
    assert [each["type"] for each in asked["questions"]] == ["predicate", "choice", "score", "score"]
    answers = answered.value.json()["answers"]
    shown = sheet.locator(".decision")
    expect(shown).to_have_count(4)
    expect(shown.locator("h3")).to_have_text([line.partition(" = ")[0] for line in LINES.split("\n")])
    likely = answers[0]["probability"]
    expect(shown.nth(0).locator(".share")).to_have_text([f"{100 * each:.1f} %" for each in (likely, 1 - likely)])
    levels = [each["label"] for each in answers[3]["probabilities"]]
    assert levels == ["1", "2", "3"]
    shares = [each["probability"] for each in answers[2]["probabilities"]]
    expect(shown.nth(2).locator(".is-likeliest")).to_contain_text(
        ["calm", "annoyed", "furious"][shares.index(max(shares))]
    )
    name = page.locator("#model").inner_text()
    expect(sheet.locator("#decides")).to_have_text(name)
    expect(sheet.locator("#decided > .help").last).to_contain_text(f"{name} read ")
    expect(shown.nth(0)).to_be_in_viewport()
    assert violations(page) == []
    wrong = ["Which? = one", "Good?", "How? = 5..1", "Who? = I, you, I", "broken ="]
    sheet.get_by_label("Questions").fill("\n".join(wrong))
    sheet.get_by_role("button", name="Decide").click()
    for line, words in zip(
        wrong,
        ("give two or more options", None, "levels go from low", "“I” is there twice", "give two or more options"),
        strict=True,
    ):
        told = sheet.locator(".fault", has_text=f"“{line}”: {words or ''}")
        expect(told).to_have_count(0 if words is None else 1)
    expect(sheet.locator(".fault")).to_be_in_viewport()
    sheet.get_by_label("Questions").fill("Good?")
    page.route("**/v1/decisions", lambda route: None)  # it is on its way
    button = sheet.locator("#decide-now")
    button.press("Enter")
    expect(sheet.locator("#decided")).to_contain_text("The model reads the text and the question …")
    expect(button).to_have_text("Stop")
    assert violations(page) == []
    button.press("Enter")
    expect(sheet.locator("#decided")).to_have_text("Stopped.")
    expect(button).to_have_text("Decide")
    expect(button).to_be_focused()


def test_one_warning_names_all_questions_that_were_not_understood(here: Visitor) -> None:
    page = here.visit().page
    unsure = {"probability": 0.5, "diagnostics": {"label_mass": 0.1}}
    sure = {"probability": 0.5, "diagnostics": {"label_mass": 0.9}}
    usage = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 0}}
    told = {"answers": [unsure, sure, unsure], "usage": usage, "model": "m"}
    page.route("**/v1/decisions", lambda route: route.fulfill(json=told))
    page.get_by_role("button", name="Decide about a text").click()
    sheet = page.locator("#decisions")
    sheet.get_by_label("Text").fill("My card was charged twice.")
    sheet.get_by_label("Questions").fill("A?\nB?\nC?")
    sheet.get_by_role("button", name="Decide").click()
    amiss = "“A?”, “C?”: most of the probability went to other words. The model may not have understood."
    expect(sheet.locator("#decided .help")).to_have_text([amiss, "m read 9 tokens, 0 of them from the cache."])
