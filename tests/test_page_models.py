"""The page of a server with several models: which one answers, what is told of them, what a conversation keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from http_server import HttpServer, running_http
from page_browser import Visitor, violations, visitor
from playwright.sync_api import Browser, expect
from script_model import write_script_model

from harness import short_directory
from models import write_encoder

SAYING = {"alpha": "I am the first of them.", "beta": "I am the second one."}
MEMORY_MIB = 180


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Two that fit, one that embeds, and one that is larger than the server's memory."""
    folder = tmp_path_factory.mktemp("models")
    for name, text in SAYING.items():
        write_script_model(folder / f"{name}.gguf", text)
    write_encoder(folder / "encoder.gguf")
    write_script_model(folder / "huge.gguf", "I am too large.", feed_forward=200_000)
    flags = ("--models", "alpha,beta,encoder,huge", "--memory", str(MEMORY_MIB))
    with short_directory() as place, running_http(place, *flags, UMA_MODELS=str(folder)) as one:
        yield one


@pytest.fixture
def here(browser: Browser, server: HttpServer) -> Iterator[Visitor]:
    with visitor(browser, server.url) as one:
        yield one


def groups(one: Visitor) -> dict[str, list[str]]:
    """What the picker lists, by the groups it stands in."""
    found = one.page.locator("#model optgroup").evaluate_all(
        "groups => groups.map(each => [each.label, [...each.children].map(option => option.value)])"
    )
    return dict(found)


def test_a_conversation_keeps_the_model_that_it_began_with(here: Visitor) -> None:
    page = here.visit().page
    picker = page.get_by_label("Model", exact=True)
    expect(picker).to_have_value("alpha")
    assert groups(here)["Too large for this server"] == ["huge"]
    assert all("encoder" not in each for each in groups(here).values())
    assert violations(page) == []
    picker.select_option("beta")
    expect(page.locator("#model-card b")).to_have_text("beta")
    here.ask("Which one are you?")
    assert here.wait_for_answer() == SAYING["beta"]
    expect(page.locator(".made-by .model")).to_have_text("beta · ")
    expect(page.locator("#model optgroup[label=Loaded] option[value=beta]")).to_have_count(1)

    page.get_by_role("button", name="New chat", exact=True).click()
    expect(picker).to_have_value("beta")  # the last that was chosen
    picker.select_option("alpha")
    here.ask("And you?")
    assert here.wait_for_answer() == SAYING["alpha"]

    page.get_by_role("button", name="Which one are you?", exact=True).click()
    expect(picker).to_have_value("beta")
    expect(page.locator("#model-card b")).to_have_text("beta")
    page.reload()
    expect(picker).to_have_value("beta")
    here.ask("Still the same?")
    assert here.wait_for_answer(2) == SAYING["beta"]
    assert violations(page) == []


def test_a_model_that_is_gone_is_told_and_another_one_goes_on(here: Visitor) -> None:
    page = here.visit().page
    page.get_by_label("Model", exact=True).select_option("beta")
    here.ask("Which one are you?")
    here.wait_for_answer()
    page.evaluate(
        """async () => {
            const { load, save } = await import("/ui/store.js");
            const [one] = (await load()).conversations;
            await save({ ...one, model: "omega" });
        }"""
    )
    page.reload()
    picker = page.get_by_label("Model", exact=True)
    expect(picker.locator("option:checked")).to_have_text("omega (not here)")
    here.ask("Are you there?")
    expect(page.locator(".failure")).to_contain_text("The server has no model of this name any more")
    here.problems = [each for each in here.problems if "404" not in each]
    assert violations(page) == []
    picker.select_option("alpha")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("article.assistant .blocks").last).to_have_text(SAYING["alpha"])


def test_the_picker_fits_where_the_models_name_stood(here: Visitor) -> None:
    page = here.page
    for width, height in ((390, 844), (1440, 900)):
        page.set_viewport_size({"width": width, "height": height})
        here.visit()
        picker = page.get_by_label("Model", exact=True)
        expect(picker).to_be_in_viewport(ratio=1)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.get_by_role("link", name="Live").click()
        expect(picker).to_be_hidden()
