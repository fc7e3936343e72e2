"""The page of a server with several models: which one answers, what is told of them, what a conversation keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import HttpServer, running_http
from page_browser import ENDLESS, Visitor, violations, visitor
from playwright.sync_api import Browser, FilePayload, Page, Route, expect
from script_model import write_script_model

from harness import PATIENCE_SEC, short_directory
from models import CHATML, write_encoder
from uma.supervisor.model import MAX_MODELS

SAYING = {"alpha": "I am the first of them.", "beta": "I am the second one."}
MEMORY_MB = 300
SLOW = {"beta": "loading, 40 %", "gamma": "waits for memory"}
"""Models that are being loaded, and what the load of each does."""
LONG_NAME = "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M"
REQUEST: dict[str, Any] = {
    "priority": 1,
    "prompt_tokens": 3_400,
    "cached_tokens": 1_024,
    "age_ms": 9_000,
    "is_preempted": False,
}
REQUEST |= {"computed_tokens": 3_400, "generated_tokens": 111, "origin": "claude-cli/2.1.197 · messages · pid 4711"}
WAITING = REQUEST | {"computed_tokens": 0, "cached_tokens": 0, "generated_tokens": 0, "waits_for": "slot"}
NUMBERED = 12 * MAX_MODELS
"""The numbers of each model's twelfth request begin here."""
LOAD = {
    "running": [REQUEST | {"id": f"run-{number}", "number": NUMBERED + number} for number in range(6)],
    "waiting": [WAITING | {"id": "wait-6", "number": NUMBERED + 6}],
    **{f"waiting_{name}": int(name == "interactive") for name in ("interactive", "normal", "background")},
}
"""Six requests that answer and one that waits, of two models."""
BEYOND = "all => all.map((each) => each.scrollWidth - each.clientWidth)"
"""By how much words are wider than their place."""
READABLE = {360: (88, 230), 800: (55, 150), 1200: (55, 250), 1600: (55, 320), 1920: (55, 400)}
"""By the window's width: the most height of a request, and the least width of its ticks, in pixels."""
MEASURES = """[
    Math.max(...[...document.querySelectorAll(".lane")].map(({ offsetHeight }) => offsetHeight)),
    Math.min(...[...document.querySelectorAll(".lane canvas")].map(({ clientWidth }) => clientWidth)),
]"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Two that fit, one that embeds, and one that is larger than the server's memory."""
    folder = tmp_path_factory.mktemp("models")
    for name, text in SAYING.items():
        write_script_model(folder / f"{name}.gguf", text, template=CHATML + "{# <think></think> #}")
    write_encoder(folder / "encoder.gguf")
    write_script_model(folder / "huge.gguf", "I am too large.", feed_forward=200_000, template=None)
    flags = ("--models", "alpha,beta,encoder,huge", "--memory", str(MEMORY_MB))
    with short_directory() as place, running_http(place, *flags, UMA_MODELS=str(folder)) as one:
        yield one


@pytest.fixture
def here(browser: Browser, server: HttpServer) -> Iterator[Visitor]:
    with visitor(browser, server.url) as one:
        yield one


def listed(page: Page) -> dict[str, list[str]]:
    """What the list of models shows, by its groups; it is left open."""
    page.locator("#model").click()
    found = page.locator("#palette-list [role=group]").evaluate_all(
        "all => all.map(each => [each.ariaLabel, [...each.querySelectorAll('.name')].map(name => name.textContent)])"
    )
    return dict(found)


def choose(page: Page, name: str) -> None:
    page.locator("#model").click()
    page.get_by_role("option").filter(has=page.get_by_text(name, exact=True)).click()


def test_a_conversation_keeps_the_model_that_it_began_with(here: Visitor) -> None:
    page = here.visit().page
    picker = page.locator("#model")
    expect(picker).to_have_text("alpha")
    groups = listed(page)
    assert groups["Too large for this server"] == ["huge"]
    assert all("encoder" not in each for each in groups.values())
    expect(page.get_by_role("option", name="huge")).to_be_disabled()
    expect(page.get_by_role("option", name="huge")).to_contain_text("base model")
    expect(page.get_by_role("option", name="beta")).to_contain_text(re.compile("F32.*thinks"))  # before it is loaded
    assert violations(page) == []
    page.keyboard.press("Escape")
    choose(page, "beta")
    expect(picker).to_have_text("beta")
    listed(page)
    page.keyboard.press("Enter")  # the one that it is, though another one stands before it
    expect(picker).to_have_text("beta")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()  # for what is typed next
    page.locator("#attach-file").set_input_files({"name": "a.txt", "mimeType": "text/plain", "buffer": b"word " * 80})
    expect(page.locator("#attached .file")).to_contain_text("a.txt400 bytes · about 100 tokens")
    here.ask("Which one are you?")
    assert here.wait_for_answer() == SAYING["beta"]
    expect(page.locator(".made-by .model")).to_have_text("beta · ")
    page.get_by_role("button", name="Timing").click()
    expect(page.locator(".why li").first).to_contain_text(re.compile(r" m?s: the model was loaded first$"))
    assert "beta" in listed(page)["Loaded"]
    page.keyboard.press("Escape")
    asked = {"model": "alpha", "messages": [{"role": "user", "content": "And you?"}]}
    httpx.post(f"{here.url}/v1/chat/completions", json=asked, timeout=PATIENCE_SEC).raise_for_status()
    page.get_by_role("link", name="Live").click()  # which lists models where more than one is loaded
    expect(page.get_by_role("list", name="Models").get_by_role("listitem").filter(has_text="beta")).to_contain_text(
        re.compile(r"beta idle\s+(\S+ tokens/s\s+)?first word")
    )
    page.get_by_role("link", name="Chat").click()

    page.get_by_role("button", name="New chat", exact=True).click()
    expect(picker).to_have_text("beta")  # the last that was chosen
    choose(page, "alpha")
    here.ask("And you?")
    assert here.wait_for_answer() == SAYING["alpha"]

    page.get_by_role("button", name="Which one are you?", exact=True).click()
    expect(picker).to_have_text("beta")
    page.reload()
    expect(picker).to_have_text("beta")
    here.ask("Still the same?")
    assert here.wait_for_answer(2) == SAYING["beta"]
    assert violations(page) == []


def test_a_base_model_is_told_before_it_is_loaded(here: Visitor) -> None:
    page = here.visit().page
    expect(page.locator("#model")).to_have_text("alpha")
    expect(page.locator("#base")).to_be_hidden()
    page.evaluate("localStorage.setItem('uma.model', 'huge')")  # as one that was chosen last
    here.visit()
    expect(page.locator("#model")).to_have_text("huge")
    expect(page.locator("#base")).to_contain_text("it continues your text instead of answering it")
    expect(page.get_by_role("heading", name="How does the text begin?")).to_be_visible()
    choose(page, "alpha")
    expect(page.locator("#base")).to_be_hidden()


def test_a_model_that_is_gone_is_told_and_another_one_goes_on(here: Visitor) -> None:
    page = here.visit().page
    choose(page, "beta")
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
    picker = page.locator("#model")
    expect(picker).to_have_text("omega (not available)")
    here.ask("Are you there?")
    expect(page.locator(".failure")).to_contain_text("This model is not on the server any more")
    here.problems = [each for each in here.problems if "404" not in each]
    assert violations(page) == []
    choose(page, "alpha")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("article.assistant .blocks").last).to_have_text(SAYING["alpha"])


def test_the_picker_fits_where_the_models_name_stood(here: Visitor) -> None:
    page = here.page
    for width, height in ((390, 844), (1440, 900)):
        page.set_viewport_size({"width": width, "height": height})
        here.visit()
        picker = page.locator("#model")
        expect(picker).to_be_in_viewport(ratio=1)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.get_by_role("link", name="Live").click()
        expect(picker).to_be_hidden()


def test_a_model_is_pulled_from_the_list_with_its_percent(here: Visitor) -> None:
    page = here.visit().page
    names: list[str] = []

    def pull(route: Route) -> None:
        names.append((route.request.post_data_json or {})["model"])
        route.fulfill(content_type="application/x-ndjson", body=json.dumps({"error": "the hub is not there"}) + "\n")

    page.route("**/api/pull", pull)
    listed(page)
    page.get_by_role("combobox").fill("owner/some-model")
    page.get_by_role("option", name="Pull owner/some-model").click()
    expect(page.locator(".toast").last).to_contain_text("owner/some-model could not be pulled. the hub is not there")
    expect(page.locator(".toast")).to_have_count(1)  # nothing is said any more to be pulled
    assert names == ["owner/some-model"]
    page.get_by_role("button", name="New chat", exact=True).click()
    expect(page.locator(".toast")).to_have_count(0)


def test_the_list_tells_how_far_a_model_is_loaded_and_what_it_can(here: Visitor) -> None:
    def answer(route: Route) -> None:
        told = route.fetch().json()
        beta = next(each for each in told["models"] if each["name"] == "beta")
        beta |= {"state": "loading", "load": "loading, 40 %", "vision": True}
        route.fulfill(json=told)

    page = here.page
    page.route(re.compile(r"/ui/api/info\b"), answer)
    here.visit()
    assert "beta" in listed(page)["Loaded"]
    beta = page.get_by_role("option", name="beta")
    expect(beta.locator(".state")).to_have_text("loading, 40 %")
    expect(beta).to_contain_text("sees pictures · thinks")


def test_a_question_to_a_model_that_loads_names_it_and_tells_its_percent(here: Visitor) -> None:
    page = here.visit().page
    headers = {"x-uma-load": "loading, 40 %", "x-uma-loading-percent": "40", "retry-after-ms": "60000"}
    page.route("**/ui/api/answers", lambda route: route.fulfill(status=503, headers=headers))
    choose(page, "beta")
    here.ask("Are you there?")
    expect(page.locator(".status")).to_have_text(re.compile("^beta: loading, 40 % … [1-9] s$"))
    here.problems = [each for each in here.problems if "503" not in each]


def test_the_time_of_a_load_begins_with_it_not_with_the_question(here: Visitor) -> None:
    page = here.visit().page
    page.clock.install()
    load = {"x-uma-load": "loading, opens its file", "x-uma-loading-percent": "0"}
    page.route(
        "**/ui/api/answers",
        lambda route: route.fulfill(status=503, headers=load | {"retry-after-ms": "20000"}),
    )
    choose(page, "beta")
    here.ask("Are you there?")
    status = page.locator(".status")
    expect(status).to_have_text("beta: loading, opens its file …")
    page.clock.run_for(15_000)
    expect(status).to_have_text("beta: loading, opens its file …")
    load |= {"x-uma-load": "loading, 40 %", "x-uma-loading-percent": "40"}
    page.clock.run_for(8_000)
    expect(status).to_have_text(re.compile("^beta: loading, 40 % … [0-9] s$"))
    here.problems = [each for each in here.problems if "503" not in each]


def test_the_live_view_names_a_model_that_is_waited_for(here: Visitor) -> None:
    with httpx.stream("GET", f"{here.url}/ui/api/live", timeout=PATIENCE_SEC) as stream:
        frame = json.loads(next(line for line in stream.iter_lines() if line.startswith('data: {"at_ms"'))[6:])
    numbers = {"alpha": [NUMBERED + each for each in range(3)], LONG_NAME: [NUMBERED + each for each in range(3, 7)]}
    loaded = [{"name": name, "requests": each, "figures": frame["figures"]} for name, each in numbers.items()]
    loading: list[dict[str, Any]] = [
        {"name": name, "requests": [], "load": far, "waiting": 2} for name, far in SLOW.items()
    ]
    frame["models"] = [*loaded, *loading]
    times = dict.fromkeys(("last", "p50", "p95", "p99"), 480.5) | {"count": 688}
    frame["figures"] |= {"running": 999, "waiting_normal": 4}  # no bound of several models' slots is told
    frame["figures"] |= {"written_per_sec": 210.0, "read_per_sec": 410.0, "cached_share": 0.4}
    frame["figures"] |= {"first_token_ms": times, "between_tokens_ms": times}
    frame["metrics"] |= {"kv_cells_total": 0, "preemptions_total": 3}
    frame["activity"] = LOAD
    body = f"event: frame\ndata: {json.dumps(frame)}\n\n"
    page = here.page
    page.route("**/ui/api/live", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    here.visit("#live")
    told = ["alpha", LONG_NAME, "beta loading, 40 % 2 waiting", "gamma waits for memory 2 waiting"]
    expect(page.get_by_role("list", name="Models").get_by_role("listitem")).to_contain_text(told)
    expect(page.locator("#live-words")).to_have_text("999 running, 4 waiting: loading beta, gamma")
    expect(page.locator("#live-hint")).to_have_text("4 for a model to load.")
    expect(page.locator(".lane-of").first).to_have_text("#12 · alpha")
    expect(page.locator(".tile", has_text="KV cache")).to_contain_text("no model is loaded")
    # At any width each request is told in lines that do not fold, beside or above ticks that can be told apart.
    for width, (most, canvas) in READABLE.items():
        page.set_viewport_size({"width": width, "height": 800})
        page.evaluate("() => new Promise(requestAnimationFrame)")
        highest, narrowest = page.evaluate(MEASURES)
        assert highest <= most and narrowest >= canvas, (width, highest, narrowest)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator(".lane-of").first.evaluate_all(BEYOND) == [0]  # its number and its model are read
        beyond = page.locator(".tile :is(dt, dd)").evaluate_all(BEYOND)
        assert len(beyond) == 16 and max(beyond) <= 0, (width, beyond)
    assert violations(page) == []


def test_a_question_that_waits_for_its_model_has_a_row_and_can_be_ended_there(browser: Browser, tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        write_script_model(tmp_path / f"{name}.gguf", "again ", **ENDLESS)
    flags = ("--models", "alpha,beta", "--memory", "130", "--cache-ram-mb", "0")  # for one of them
    with (
        short_directory() as place,
        running_http(place, *flags, UMA_MODELS=str(tmp_path)) as server,
        visitor(browser, server.url) as one,
    ):
        page = one.visit().page
        settings = {"system": "", "priority": 1, "sampling": {"max_tokens": 16_000}}
        page.evaluate("settings => localStorage.setItem('uma.new-chats', JSON.stringify(settings))", settings)
        one.visit().ask("One")
        page.locator(".is-writing .block").first.wait_for()
        page.get_by_role("button", name="New chat", exact=True).click()
        choose(page, "beta")
        one.ask("Two")
        expect(page.locator(".status")).to_contain_text("beta: waits for memory, which alpha has")
        page.locator("#tab-live").click()
        words = page.locator("#live-words")
        expect(words).to_have_text("1 running, 1 waiting: loading beta")
        row = page.locator(".lane").filter(has_text="this page: Two")
        expect(row.locator(".lane-state")).to_have_text("its model loads")
        row.get_by_role("button", name="End Two").click()
        expect(row.locator(".lane-state")).to_have_text("ended by you")
        expect(words).to_have_text("1 running")


def test_a_file_that_cannot_fit_is_told_before_its_model_is_loaded(here: Visitor) -> None:
    page = here.visit().page
    choose(page, "beta")
    expect(page.locator("#model")).to_have_text("beta")
    long: FilePayload = {"name": "long.txt", "mimeType": "text/plain", "buffer": b"Olga " * 20_000}
    page.locator("#attach-file").set_input_files(long)
    expect(page.locator("#attached .extent")).to_contain_text("about")  # no model is there to count
    expect(page.locator("#attached .fault")).to_contain_text("Too long")
    expect(page.locator("#unsendable")).to_have_text("Remove “long.txt” to send.")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_disabled()
