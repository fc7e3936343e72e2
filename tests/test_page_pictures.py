"""Pictures on the page: how they come, what is sent and kept of them, and what a model that sees none makes of them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import HttpServer, running_http
from page_browser import Visitor, violations, visitor
from playwright.sync_api import Browser, FilePayload, Locator, Page, Request, expect
from projectors import LLAVA_TOKENS, png, write_projector
from script_model import write_script_model

from harness import short_directory
from uma.llama.header import read
from uma.media.files import size_of

SEES, SEES_NOT = "I see a thing.", "I see nothing."
ANSWERS = re.compile(r"/ui/api/answers$")
LARGE = png(2_400, 800, seed=1)
"""Of noise: as a PNG it is large, scaled down too."""
SMALL = png(40, 30, seed=2)
GIVE = """([kind, name, data]) => {
    const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
    const given = new DataTransfer();
    given.items.add(new File([bytes], name, { type: "image/png" }));
    const how = { bubbles: true, cancelable: true };
    const box = document.getElementById("input");
    if (kind === "paste") box.dispatchEvent(new ClipboardEvent("paste", { clipboardData: given, ...how }));
    else document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: given, ...how }));
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Two models, of which the first has a projector beside it."""
    folder = tmp_path_factory.mktemp("models")
    alpha = write_script_model(folder / "alpha.gguf", SEES)
    write_script_model(folder / "beta.gguf", SEES_NOT)
    write_projector(folder / "mmproj-alpha.gguf", embed=read(alpha).metadata["llama.embedding_length"])
    with short_directory() as place, running_http(place, "--models", "alpha,beta", UMA_MODELS=str(folder)) as one:
        yield one


@pytest.fixture
def here(browser: Browser, server: HttpServer) -> Iterator[Visitor]:
    with visitor(browser, server.url) as one:
        yield one


def seeing(one: Visitor) -> Page:
    """The page, once it knows that its model sees."""
    one.visit().page.get_by_role("button", name="Attach pictures or documents", exact=True).wait_for()
    return one.page


def payload(name: str, data: bytes) -> FilePayload:
    return {"name": name, "mimeType": "image/png", "buffer": data}


def attach(page: Page, name: str, data: bytes = SMALL) -> None:
    page.locator("#attach-file").set_input_files(payload(name, data))
    expect(picture(page.locator("#attached"), name)).to_be_visible()


def picture(place: Locator, name: str) -> Locator:
    return place.get_by_role("img", name=f"Picture: {name}", exact=True)


def sizes(asked: Request) -> list[list[tuple[int, int] | None]]:
    """The sizes of each message's pictures, as they are sent."""
    body: Any = asked.post_data_json
    messages: list[dict[str, Any]] = body["messages"]
    return [[size_of(base64.b64decode(each["data"])) for each in one.get("media", ())] for one in messages]


def is_loaded(shown: Locator) -> bool:
    """Whether the browser has the picture: the page's policy lets it in."""
    found: bool = shown.evaluate("async (each) => { await each.decode(); return each.naturalWidth > 0; }")
    return found


def test_pictures_are_chosen_pasted_and_dropped_shown_small_and_sent_scaled_down(here: Visitor) -> None:
    page = seeing(here)
    attach(page, "wide.png", LARGE)
    for kind, name in (("paste", "image.png"), ("drop", "cat.png")):
        page.evaluate(GIVE, [kind, name, base64.b64encode(SMALL).decode()])
        expect(picture(page.locator("#attached"), name)).to_be_visible()
    assert violations(page) == []
    page.get_by_role("button", name="Remove image.png").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#attached li")).to_have_count(2)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    with page.expect_request(ANSWERS) as sent:
        here.ask("What is it?")
    assert sizes(sent.value) == [[(1_536, 512), (40, 30)]]
    assert here.wait_for_answer() == SEES
    thread = page.locator("#thread")
    assert all(is_loaded(picture(thread, name)) for name in ("wide.png", "cat.png"))
    assert page.locator("#attached").is_hidden()
    told = page.locator(".figures-more").text_content() or ""
    assert int(re.findall(r"of (\d+) prompt tokens", told)[0]) > 2 * LLAVA_TOKENS
    assert violations(page) == []

    page.get_by_role("button", name="Picture: wide.png").focus()
    page.keyboard.press("Enter")
    large = page.get_by_role("dialog", name="Picture")
    expect(picture(large, "wide.png")).to_be_visible()
    assert violations(page) == []
    page.keyboard.press("Escape")
    expect(large).to_be_hidden()


def test_pictures_stay_with_their_question_when_it_is_edited_asked_again_and_reloaded(here: Visitor) -> None:
    page = seeing(here)
    attach(page, "one.png")
    attach(page, "two.png", png(50, 20))
    page.get_by_role("button", name="Send", exact=True).click()  # a picture is a question
    assert here.wait_for_answer() == SEES
    expect(page.locator("#title")).to_have_text("one.png")
    page.reload()
    assert is_loaded(picture(page.locator("#thread"), "two.png"))
    with page.expect_request(ANSWERS) as again:
        page.get_by_role("button", name="Regenerate").click()
    assert sizes(again.value) == [[(40, 30), (50, 20)]]
    here.wait_for_answer()
    page.locator("article.user").hover()
    page.get_by_role("button", name="Edit and send again").click()
    page.locator(".editor").get_by_role("button", name="Remove one.png").click()
    page.get_by_label("Your question").fill("And this?")
    with page.expect_request(ANSWERS) as edited:
        page.get_by_role("button", name="Send again").click()
    assert sizes(edited.value) == [[(50, 20)]]
    here.wait_for_answer()
    with page.expect_request(ANSWERS) as later:
        here.ask("Sure?")
    assert sizes(later.value) == [[(50, 20)], [], []]
    here.wait_for_answer(2)


def test_a_draft_keeps_its_pictures_over_a_reload(here: Visitor) -> None:
    page = seeing(here)
    attach(page, "one.png")
    page.reload()
    assert is_loaded(picture(page.locator("#attached"), "one.png"))


def test_pictures_are_exported_and_imported(here: Visitor, tmp_path: Path) -> None:
    page = seeing(here)
    attach(page, "a [cat].png")
    here.ask("What is it?")
    here.wait_for_answer()
    saved = {name: tmp_path / name for name in ("JSON", "Markdown")}
    for name, file in saved.items():
        page.locator("#menu").click()
        with page.expect_download() as begun:
            page.get_by_role("button", name=f"Export as {name}").click()
        begun.value.save_as(file)
    markdown = saved["Markdown"].read_text()
    assert re.search(r"^!\[a  cat \.png\]\(data:image/png;base64,[\w+/=]+\)\n\nWhat is it\?$", markdown, re.MULTILINE)
    page.locator("#menu").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator(".conversation")).to_have_count(0)
    page.locator("#import-file").set_input_files(saved["JSON"])
    expect(page.locator(".conversation")).to_have_count(1)
    assert is_loaded(picture(page.locator("#thread"), "a [cat].png"))
    given = json.loads(saved["JSON"].read_text())
    (question,) = [each for each in given["conversations"][0]["messages"].values() if each["role"] == "user"]
    for image in ("https://example.org/a.png", "data:image/svg+xml;base64,AAAA", 'data:image/png;base64,"onload', 5):
        question["files"][0]["image"] = image
        page.locator("#import-file").set_input_files(payload("x.json", json.dumps(given).encode()))
        expect(page.locator(".toast").last).to_contain_text("an attached file has no name, no text, or is no picture")
    expect(page.locator(".conversation")).to_have_count(1)


def test_what_is_no_picture_and_a_model_that_sees_none_are_told_at_once(here: Visitor) -> None:
    page = seeing(here)
    page.locator("#attach-file").set_input_files(payload("broken.png", b"\x89PNG\r\n\x1a\n"))
    expect(page.locator(".toast")).to_contain_text("Not attached: broken.png. The browser cannot read this picture.")
    attach(page, "one.png")
    here.ask("What is it?")
    here.wait_for_answer()
    page.locator("#model").click()
    expect(page.get_by_role("option", name="alpha")).to_contain_text("sees pictures")
    expect(page.get_by_role("option", name="beta")).not_to_contain_text("sees pictures")
    page.get_by_role("option", name="beta").click()
    page.get_by_role("button", name="Attach a document", exact=True).wait_for()
    page.locator("#attach-file").set_input_files(payload("two.png", SMALL))
    expect(page.locator(".toast").last).to_contain_text(
        "Not attached: two.png. This model cannot see pictures, but alpha can: choose it above."
    )
    here.ask("And now?")
    expect(page.locator(".failure")).to_contain_text(
        "The conversation has pictures. This model cannot see pictures, but alpha can: choose it above. You can"
    )
    page.locator("#model").click()
    page.get_by_role("option", name="alpha").click()
    page.get_by_role("button", name="Try again").click()
    assert here.wait_for_answer(2) == SEES


def test_no_file_of_the_server_s_user_is_read_for_the_page(server: HttpServer, tmp_path: Path) -> None:
    (tmp_path / "own.png").write_bytes(SMALL)
    message = {"role": "user", "content": "What is it?", "media": [{"path": str(tmp_path / "own.png")}]}
    refused = server.ask("POST", "/ui/api/answers", {"messages": [message]})
    assert refused.status == 400
    assert "messages[0].media[0].path: files are not read over HTTP" in refused.json["error"]["message"]


@pytest.mark.parametrize("width", [320, 390])
def test_on_a_phone_nothing_is_too_small_or_too_wide(browser: Browser, server: HttpServer, width: int) -> None:
    viewport: Any = {"width": width, "height": 700}
    context = browser.new_context(viewport=viewport, has_touch=True, is_mobile=True, reduced_motion="reduce")
    one = Visitor(context.new_page(), server.url)
    page = seeing(one)
    for name, data in (("wide.png", png(900, 30)), ("high.png", png(8, 900)), ("dot.png", png(1, 1))):
        attach(page, name, data)
    small = """all => all.filter((each) => each.checkVisibility() && !each.closest("[inert]")).flatMap((each) => {
        const { width, height } = each.getBoundingClientRect();
        return Math.min(width, height) < 44 ? [`${each.id || each.title} ${width} ${height}`] : [];
    })"""
    assert page.locator("button, summary").evaluate_all(small) == []
    page.get_by_role("button", name="Send", exact=True).tap()
    one.wait_for_answer()
    assert page.locator("button, summary").evaluate_all(small) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.get_by_role("button", name="Picture: high.png").tap()
    expect(page.get_by_role("dialog").get_by_role("button", name="Close")).to_be_in_viewport(ratio=1)
    assert page.locator("dialog[open] button").evaluate_all(small) == []
    assert one.problems == []
    context.close()
