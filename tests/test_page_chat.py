"""The chat in a real browser, against a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import HttpServer, new_key, running_http
from page_browser import HURRY, LONG, Visitor, saying, unfold_settings, violations, visitor
from playwright.sync_api import Browser, Page, expect
from script_model import SWITCHED, THOUGHT

from harness import is_settled, short_directory, until
from models import CHATML, write_model

SHARES = {
    **{"temperature": 0.5, "top_p": 0.5, "min_p": 0.05},
    **{"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.5},
}
NUMBERS = {"top_k": 40, "max_tokens": 9, "min_tokens": 2, "seed": 7}
"""Settings of the page, and values that none has by default."""

LESSON = """# Merging two lists

Here is a **small** function of \\(O(n_1 + n_2)\\) steps:

```python
def merge(left: list[int], right: list[int]) -> list[int]:
    return sorted(left + right)  # one line
```

| lists | comparisons |
| --- | ---: |
| 2 of 10 | 19 |

1. It is short.
2. It is not the fastest.
"""

ATTACK = """<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 2">

[click](javascript:window.hacked=3) ![pixel](http://127.0.0.1:9/leak.png) <svg/onload=window.hacked=4>

<a href="data:text/html,<script>parent.hacked=5</script>">data</a> <style>body{display:none}</style>

```html"onmouseover="window.hacked=6
</code></pre><script>window.hacked = 7</script>
```

[a]: javascript:alert(1)

[a] &lt;script&gt;window.hacked=8&lt;/script&gt; <iframe srcdoc="<script>parent.hacked=9</script>"></iframe> the end.
"""


FORMULAS = {
    r"$\frac{-b \pm \sqrt{b^2 - 4ac}}{2a}$": ["mfrac", "msqrt", "msup"],
    r"\[\sum_{i=1}^{n} i^2 = \frac{n(n+1)}{6}\]": ["munderover", "msup", "mfrac"],
    r"$$\lim_{x \to 0} \frac{\sin x}{x} = 1$$": ["munder", "mfrac"],
    r"\(\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}\)": ["mtable", "mtr", "mtd", "mtd", "mtr", "mtd", "mtd"],
    r"$f(x) = \begin{cases} 1 & \text{if } x > 0 \\ 0 & \text{else} \end{cases}$": ["mtable", "mtr", "mtd"],
    r"\[\begin{aligned} a &= b \\ &= c \end{aligned}\]": ["mtable", "mtr", "mtd"],
    r"$\left( \sqrt[3]{x'} \right)_{\mathbb{R}}$": ["msub", "mroot", "msup"],
    r"$n \log n$": ["mi", "mspace", "mi", "mspace", "mi"],
    r"$\hat{\theta} \in \mathbb{R}^{n \times m}$": ["mover", "msup"],
}
"""What is understood, and the elements it must have in this order."""
NO_FORMULAS = (r"$\foo{x}$", r"$\frac{1}$", r"$x_1}$", r"$\begin{tikzpicture}\end{tikzpicture}$", r"$\text{a$",
               r"$\left(x$", "$" + "x^" * 3000 + "$", r"$\constructor$")  # fmt: skip


def check_formulas(page: Page) -> None:
    """What is understood has its parts, and all else stays the text that it is."""
    script = """async (sources) => {
        const { typeset } = await import("/ui/formulas.js");
        return sources.map((source) => {
            const formula = document.createElement("span");
            formula.textContent = source;
            typeset(formula);
            return [...formula.querySelectorAll("*")].map((each) => each.localName);
        });
    }"""
    for names, wanted in zip(page.evaluate(script, list(FORMULAS)), FORMULAS.values(), strict=True):
        structural = iter(names)
        assert all(name in structural for name in wanted), (names, wanted)
    assert page.evaluate(script, list(NO_FORMULAS)) == [[]] * len(NO_FORMULAS)


@pytest.fixture
def lesson(browser: Browser, tmp_path: Path) -> Iterator[Visitor]:
    with saying(browser, tmp_path, LESSON) as one:
        yield one


@pytest.fixture
def attack(browser: Browser, tmp_path: Path) -> Iterator[Visitor]:
    with saying(browser, tmp_path, ATTACK) as one:
        yield one


def test_a_conversation_from_question_to_figures(here: Visitor) -> None:
    page = here.visit().page
    box, view = page.locator("#composer").bounding_box(), page.locator("#chat-view").bounding_box()
    assert box and view
    assert abs(box["y"] + box["height"] / 2 - view["y"] - view["height"] / 2) < view["height"] / 6  # in the middle
    here.ask("What is UMA?")
    first = here.wait_for_answer()
    assert len(first.split()) > 3
    figures = page.locator("article.assistant .figures")
    more = page.locator(".figures-more")
    expect(more).to_be_hidden()
    figures.hover()
    expect(more).to_be_visible()
    told = more.bounding_box()
    assert told and told["y"] >= view["y"]  # below the figures, where the page has no space above them
    name = page.locator("#model").inner_text()
    for word in ("tokens/s", "to the first token", "prompt tokens from the cache", f"{name} · "):
        expect(figures).to_contain_text(word)
    assert name == httpx.get(f"{here.url}/ui/api/info").json()["model"]["called"]
    here.ask("Tell me a story about a fox")
    here.wait_for_answer(2)
    # The model stands above, and is named at the answers of others alone; the time is at each answer.
    made = [each.split(" · ") for each in page.locator(".made-by").all_inner_texts()]
    assert [len(each) for each in made] == [1, 1]
    assert all(re.fullmatch(r"\d\d:\d\d", each[-1]) for each in made)
    # A question stands nearer to its own answer than to the one before.
    first_answer, own_question, own_answer = (page.locator("article").nth(at).bounding_box() for at in (1, 2, 3))
    assert first_answer and own_question and own_answer
    gap_before = own_question["y"] - first_answer["y"] - first_answer["height"]
    assert own_answer["y"] - own_question["y"] - own_question["height"] < gap_before
    # The first turn's tokens are in the cache, and the page says so.
    cached = re.search(r"(\d+) of \d+ prompt tokens from the cache", figures.nth(1).text_content() or "")
    assert cached is not None and int(cached[1]) > 0
    expect(page.locator("#title")).to_have_text("What is UMA?")
    page.get_by_role("button", name="New chat", exact=True).click()
    here.ask("Who are you?")
    here.wait_for_answer()
    expect(page.locator(".conversation")).to_have_count(2)
    page.locator(".conversation", has_text="What is UMA?").click()
    expect(page.locator("article")).to_have_count(4)
    page.reload()
    expect(page.locator("article.assistant .blocks").first).to_have_text(first)


def test_stop_ends_the_answer_at_its_next_token_and_keeps_what_there_is(here: Visitor, http_server: HttpServer) -> None:
    page = here.visit().page
    page.evaluate("settings => localStorage.setItem('uma.new-chats', JSON.stringify(settings))", LONG)
    here.visit()
    here.ask("Tell me a story about a fox")
    page.locator(".is-writing .block").first.wait_for()
    page.get_by_role("button", name="Stop the answer").click()
    text = here.wait_for_answer()
    assert text
    expect(page.locator(".note")).to_contain_text("Stopped.")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    until(http_server.process.metrics, is_settled)


def test_an_answer_goes_on_over_a_reload(here: Visitor, http_server: HttpServer) -> None:
    page = here.visit().page
    page.evaluate("settings => localStorage.setItem('uma.new-chats', JSON.stringify(settings))", LONG)
    here.visit()
    begun = http_server.process.metrics()["requests_total"]
    here.ask("Tell me a story about a fox")
    page.locator(".is-writing .block").first.wait_for()
    blocks = page.locator("article.assistant .blocks")
    before = blocks.inner_text().strip()
    page.reload()
    page.locator(".is-writing .block").first.wait_for()
    expect(blocks).to_have_text(re.compile(f".{{{len(before) + 100}}}", re.DOTALL))
    page.get_by_role("button", name="Stop the answer").click()
    assert here.wait_for_answer().startswith(before[:100])
    assert http_server.process.metrics()["requests_total"] == begun + 1


def test_a_server_that_goes_away_is_waited_for_and_what_was_said_stays(browser: Browser) -> None:
    with short_directory() as sockets, running_http(sockets) as server, visitor(browser, server.url) as one:
        page = one.page
        page.add_init_script(HURRY)
        one.visit()
        page.evaluate("settings => localStorage.setItem('uma.new-chats', JSON.stringify(settings))", LONG)
        one.visit()
        one.ask("Tell me a story about a fox")
        page.locator(".is-writing .block").first.wait_for()
        one.ask("And then?")
        server.process.process.kill()
        expect(page.locator(".status")).to_have_text("Server not reachable. Retrying …")
        expect(page.locator("#model")).to_have_text("Server not reachable")
        expect(page.locator(".fine:visible")).to_contain_text(
            "what you enter waits, or is put back into the box if the answer before it fails."
        )
        expect(page.locator(".failure")).to_contain_text("The server does not answer")
        expect(page.get_by_role("button", name="Try again")).to_be_visible()
        box, why = page.get_by_label("Message", exact=True), page.locator("#given-back")
        expect(why).to_have_text("Not sent: the answer before it failed.")
        expect(box).to_have_value("And then?")
        assert violations(page) == []
        box.fill("")
        expect(why).to_be_empty()
        assert page.locator("article.assistant .blocks").inner_text()
        one.problems.clear()  # the browser's own lines about refused connections


def test_a_server_that_is_away_is_told_where_its_model_stood_until_it_is_back(here: Visitor) -> None:
    page = here.page
    page.add_init_script(HURRY)
    card = here.visit().page.locator("#model")
    expect(card).not_to_be_empty()
    name = card.inner_text()
    page.route("**/ui/api/info", lambda route: route.abort())
    expect(card).to_have_text("Server not reachable")
    expect(page.locator("#announcer p", has_text="The server is not reachable.")).to_have_count(1)
    expect(page.locator("#banner")).to_be_hidden()
    page.unroute("**/ui/api/info")
    expect(card).to_have_text(name)
    here.problems.clear()  # the browser's own lines about what it could not reach


def test_a_server_with_another_model_is_named_as_soon_as_it_is_asked_something(here: Visitor) -> None:
    page = here.visit().page
    card = page.locator("#model")
    expect(card).not_to_be_empty()
    info = httpx.get(f"{here.url}/ui/api/info").json()

    def serve(name: str) -> None:
        other = info | {"model": info["model"] | {"name": name, "called": name, "is_builtin": False}}
        page.route("**/ui/api/info", lambda route: route.fulfill(json=other))

    serve("Second")
    here.ask("What is UMA?")
    expect(card).to_have_text("Second")
    here.wait_for_answer()
    page.get_by_role("button", name="New chat", exact=True).click()
    expect(page.locator(".idea").first).to_have_text("Explain what a KV cache does")
    info["capabilities"]["chat"] = False
    serve("Third")
    page.get_by_role("link", name="Live").click()
    expect(card).to_have_text("Third")
    expect(page.locator("#base")).to_have_text(re.compile("^This is a base model without a chat template: "))


def test_a_base_model_says_so_and_goes_on_with_the_text(browser: Browser, tmp_path: Path) -> None:
    """What it is given is the conversation's text, as a program's prompt: no turns, which it knows nothing of."""
    model = write_model(tmp_path / "base.gguf", chat_template=None)
    sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    with (
        short_directory() as directory,
        running_http(directory, "--model", str(model)) as server,
        visitor(browser, server.url) as one,
    ):
        page = one.visit().page
        expect(page.get_by_placeholder("Begin a text")).to_be_visible()
        expect(page.get_by_role("heading", name="How does the text begin?")).to_be_visible()
        expect(page.locator("#base")).to_be_visible()
        assert violations(page) == []
        with page.expect_request("**/ui/api/answers") as sent:
            one.ask("Once upon a time")
        asked = json.loads(sent.value.post_data or "")["messages"]
        assert asked == [{"role": "user", "content": "Once upon a time"}]
        one.wait_for_answer()
        expect(page.locator("#base")).to_be_visible()
        asked += [{"role": "assistant", "content": " a fox"}, {"role": "user", "content": "And then"}]
        text = "Once upon a time a fox\n\nAnd then"
        said = httpx.post(f"{server.url}/v1/completions", json={"prompt": text, **sampling}, timeout=None).json()
        body = {"messages": asked, "sampling": sampling}
        lines = httpx.post(f"{server.url}/ui/api/answers", json=body, timeout=None).text.splitlines()
    told = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert "".join(each.get("text", "") for each in told) == said["choices"][0]["text"]
    assert told[-1]["usage"]["prompt_tokens"] == said["usage"]["prompt_tokens"]


def test_edit_regenerate_and_switch_between_versions(here: Visitor) -> None:
    page = here.visit().page
    here.ask("What is UMA?")
    here.wait_for_answer()
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("group", name="Version 2 of 2")).to_be_visible()
    here.wait_for_answer()
    page.get_by_role("button", name="Previous version").click()
    expect(page.get_by_role("group", name="Version 1 of 2")).to_be_visible()
    page.locator("article.user").hover()
    page.get_by_role("button", name="Edit and send again").click()
    page.get_by_label("Your question").fill("Who are you?")
    page.get_by_role("button", name="Send again").click()
    here.wait_for_answer()
    expect(page.locator(".bubble")).to_have_text("Who are you?")
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(".bubble")).to_have_text("What is UMA?")
    page.get_by_role("button", name="Branch in a new chat").click()
    expect(page.locator(".conversation")).to_have_count(2)
    expect(page.locator("#title")).to_have_text("What is UMA? (branch)")


def test_code_is_highlighted_and_copied_as_it_was(lesson: Visitor) -> None:
    page = lesson.visit().page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    lesson.ask("How do I merge two lists?")
    lesson.wait_for_answer()
    expect(page.locator(".code .hljs-keyword").first).to_have_text("def")
    expect(page.locator(".code-bar > span")).to_have_text("Code in python")  # the first words for screen readers
    expect(page.locator("#announcer")).to_contain_text("Code in python def merge")
    math = page.locator(".formula math")
    expect(math.locator("msub")).to_have_count(2)
    assert math.text_content() == "O(n1+n2)"
    check_formulas(page)
    assert page.locator(".code code").evaluate("each => getComputedStyle(each).fontSize") == "14px"
    page.get_by_role("button", name="Copy the code").click()
    assert page.evaluate("navigator.clipboard.readText()") == LESSON.split("```python\n")[1].split("```", maxsplit=1)[0]
    expect(page.get_by_role("heading", name="Merging two lists")).to_be_visible()
    expect(page.get_by_role("cell", name="19")).to_be_visible()
    expect(page.locator(".block ol > li")).to_have_count(2)
    page.get_by_role("button", name="Copy the answer").click()
    assert page.evaluate("navigator.clipboard.readText()") == LESSON


def test_what_the_model_says_is_never_run(attack: Visitor) -> None:
    page = attack.visit().page
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    attack.ask("Attack me")
    shown = attack.wait_for_answer()
    assert "<script>window.hacked = 1</script>" in shown
    page.reload()  # and again from what the browser keeps
    attack.wait_for_answer()
    hrefs = page.locator(".blocks a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert all(href is None or href.startswith("http") for href in hrefs)
    assert (
        page.locator(".blocks").locator("script, img, svg[onload], iframe, style, [onmouseover], [onerror]").count()
        == 0
    )
    assert page.evaluate("window.hacked") is None
    assert not [url for url in requested if not url.startswith(attack.url)]


def test_instructions_and_files_reach_the_model(here: Visitor, tmp_path: Path) -> None:
    page = here.visit().page
    note = tmp_path / "note.txt"
    note.write_text("The fox is called Olga.\n" * 3)
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("System prompt", exact=True).fill("You are a fox.")
    page.get_by_label("Max tokens").fill("7")
    page.get_by_role("button", name="Close").click()
    page.locator("#attach-file").set_input_files(note)
    expect(page.locator("#attached")).to_contain_text("note.txt")
    with page.expect_request("**/ui/api/answers") as sent:
        here.ask("What is in the file?")
    body = json.loads(sent.value.post_data or "")
    assert body["messages"][0] == {"role": "system", "content": "You are a fox."}
    assert "note.txt:\n```\nThe fox is called Olga." in body["messages"][1]["content"]
    here.wait_for_answer()
    expect(page.locator(".figures")).to_contain_text("7 tokens")


def test_every_setting_says_what_it_does_and_reaches_the_server(here: Visitor) -> None:
    page = here.visit().page
    page.get_by_role("button", name="Settings", exact=True).click()
    unfold_settings(page)
    sheet = page.locator("#settings")
    fields = sheet.locator("input:not([type=radio], [type=checkbox]), textarea")
    texts = fields.evaluate_all(
        "all => all.map(each => document.getElementById(each.getAttribute('aria-describedby')).textContent)"
    )
    assert len(texts) == len(["preset", "system", "stop", "schema", "answers", "logprobs"]) + len(SHARES) + len(NUMBERS)
    assert len(set(texts)) == len(texts)
    assert min(map(len, texts)) > 20
    for name, value in {**SHARES, **NUMBERS}.items():
        sheet.locator(f"#set-{name}").fill(str(value))
    sheet.locator("#set-stop").fill("zz\nyy")
    sheet.get_by_role("radio", name="Background").check()
    sheet.get_by_role("button", name="Close").click()
    with page.expect_request("**/ui/api/answers") as sent:
        here.ask("What is UMA?")
    body = json.loads(sent.value.post_data or "")
    assert body["sampling"] == {**SHARES, **NUMBERS, "stop": ["zz", "yy"]}
    assert body["priority"] == -1
    here.wait_for_answer()
    assert page.locator(".failure").count() == 0


def test_the_page_sends_what_was_set_and_shows_what_holds_otherwise(browser: Browser, tmp_path: Path) -> None:
    with saying(browser, tmp_path, "A fox.", "--temperature", "0.3", "--max-tokens", "77") as here:
        page = here.visit().page
        with page.expect_request("**/ui/api/answers") as sent:
            here.ask("Tell me of a fox")
        body = json.loads(sent.value.post_data or "")
        assert body.keys() == {"messages", "sampling", "token"}
        assert body["sampling"] == {}
        here.wait_for_answer()
        page.get_by_role("button", name="Settings", exact=True).click()
        shown = {"temperature": "0.3", "top_p": "0.95", "top_k": "0", "max_tokens": "77", "seed": "random"}
        for name, figure in shown.items():
            expect(page.locator(f"#set-{name}")).to_have_attribute("placeholder", figure)
            expect(page.locator(f"#set-{name}")).to_have_value("")


def test_the_chip_tells_how_many_settings_it_does_not_name(here: Visitor) -> None:
    page = here.visit().page
    page.locator("#model").wait_for()
    chip = page.locator("#chips")
    expect(chip).to_have_text("Settings")
    page.get_by_role("button", name="Settings", exact=True).click()
    unfold_settings(page)
    page.locator("#set-seed").fill("7")
    page.locator("#set-top_p").fill("0.5")
    page.locator("#set-stop").fill("zz")
    page.locator("#set-max_tokens").fill("50")
    page.locator("#set-min_p").fill("0.1")
    page.locator("#set-min_p").fill("")  # the server's again
    page.keyboard.press("Escape")
    expect(chip).to_have_text("at most 50 tokens · 3 more")
    page.get_by_role("button", name="Settings", exact=False).first.click()
    page.get_by_role("button", name="Reset to defaults").click()
    page.keyboard.press("Escape")
    expect(chip).to_have_text("Settings")


def test_the_colours_can_be_chosen_and_stay(here: Visitor) -> None:
    page = here.visit().page
    background = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for theme in ("light", "dark"):
        while page.locator("html").get_attribute("data-theme") != theme:
            page.locator("#theme").click()
        page.reload()
        page.wait_for_selector("html[data-ready]", state="attached")
        expect(page.locator("#theme")).to_have_accessible_name(f"Theme: {theme}")
        seen[theme] = page.evaluate(background)
    assert seen["light"] != seen["dark"]


def test_a_server_with_keys_is_asked_with_the_one_that_is_given_once(browser: Browser, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    key = new_key("me", keys)
    with (
        short_directory() as sockets,
        running_http(sockets, "--http-keys", str(keys)) as server,
        visitor(browser, server.url) as one,
    ):
        page = one.visit().page
        page.get_by_label("API key", exact=True).fill("uma-wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_label("API key", exact=True)).to_have_value("")
        assert violations(page) == []
        page.get_by_label("API key", exact=True).fill(key)
        page.keyboard.press("Enter")
        page.locator("#model").wait_for()
        one.problems.clear()  # the browser's own lines about the answers with 401
        one.ask("What is UMA?")
        first = one.wait_for_answer()
        page.reload()
        expect(page.locator("article.assistant .blocks")).to_have_text(first)
        one.ask("Who are you?")
        one.wait_for_answer(2)
        page.get_by_role("link", name="Live").click()
        page.locator("#live-view[data-frames]").wait_for()


def test_export_and_import_bring_a_conversation_back(here: Visitor, tmp_path: Path) -> None:
    page = here.visit().page
    here.ask("What is UMA?")
    said = here.wait_for_answer()
    with page.expect_download() as saving:
        page.get_by_role("button", name="Export all").click()
    assert re.fullmatch(r"uma-conversations \d{4}-\d\d-\d\d\.json", saving.value.suggested_filename)
    file = tmp_path / "saved.json"
    saving.value.save_as(file)
    page.get_by_label("This conversation").click()
    with page.expect_download() as saving:
        page.get_by_role("button", name="Export as Markdown").click()
    name = page.locator("#model").inner_text()
    assert re.fullmatch(r"What is UMA_ \d{4}-\d\d-\d\d\.md", saving.value.suggested_filename)
    assert saving.value.path().read_text() == f"# What is UMA?\n\n## You\n\nWhat is UMA?\n\n## {name}\n\n{said}\n"
    page.get_by_label("This conversation").click()
    page.get_by_role("button", name="Delete").click()
    expect(page.locator(".conversation")).to_have_count(0)
    page.locator("#import-file").set_input_files(file)
    expect(page.locator("article.assistant .blocks")).to_have_text(said)
    expect(page.get_by_role("button", name="Undo")).to_have_count(0)  # it would be there twice
    file.write_text("{}")
    page.locator("#import-file").set_input_files(file)
    expect(page.locator(".toast").last).to_contain_text("It must be an export of this page")


def test_thinking_is_folded_beside_the_answer_and_sent_back_for_the_template_to_decide(
    browser: Browser, tmp_path: Path
) -> None:
    script = (*THOUGHT, "It ", "**rains**", " today.")
    with saying(browser, tmp_path, script, template=SWITCHED) as here:
        page = here.visit().page
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        here.ask("What is the weather?")
        assert here.wait_for_answer() == "It rains today."
        thoughts = page.locator(".thoughts")
        expect(thoughts).to_be_hidden()
        page.locator(".thinking summary", has_text=f"Thinking, {len(THOUGHT)} tokens").focus()
        page.keyboard.press("Enter")
        expect(thoughts).to_be_visible()
        assert thoughts.inner_text() == "Is it wet?\nLook out."
        page.get_by_role("button", name="Copy the answer").click()
        assert page.evaluate("navigator.clipboard.readText()") == "It **rains** today."
        with page.expect_download() as saving:
            page.get_by_role("button", name="Export all").click()
        saving.value.save_as(tmp_path / "saved.json")
        page.get_by_label("This conversation").click()
        page.get_by_role("button", name="Delete", exact=True).click()
        expect(page.locator(".conversation")).to_have_count(0)
        page.locator("#import-file").set_input_files(tmp_path / "saved.json")
        expect(page.locator(".conversation")).to_have_count(1)
        expect(page.locator(".thoughts")).to_have_text("Is it wet?\nLook out.")
        with page.expect_request("**/ui/api/answers") as sent:
            here.ask("And tomorrow?")
        said = json.loads(sent.value.post_data or "")["messages"]
        assert [each["content"] for each in said] == ["What is the weather?", "It **rains** today.", "And tomorrow?"]
        assert [each.get("reasoning") for each in said] == [None, "Is it wet?\nLook out.", None]
        here.wait_for_answer(2)
        page.get_by_role("button", name="Settings", exact=True).click()
        page.get_by_role("group", name="Thinking").get_by_role("radio", name=re.compile("^Off")).check()
        page.get_by_role("button", name="Close").click()
        here.ask("At once?")
        assert here.wait_for_answer(3) == "It rains today."
        expect(page.locator("article.assistant .thinking:visible")).to_have_count(2)
        page.locator(".thinking summary").first.click()
        assert violations(page) == []


def test_thinking_grows_while_the_model_thinks_and_over_a_reload(browser: Browser, tmp_path: Path) -> None:
    script = ["<think>", *(f"{number} sheep, " for number in range(1, 200))]
    endless: dict[str, Any] = {"context_length": 16_384, "is_endless": True, "feed_forward": 4_000}
    template = CHATML + "{# <think></think> #}"
    with saying(browser, tmp_path, script, "--max-tokens", "16000", template=template, **endless) as here:
        page = here.visit().page
        here.ask("Count sheep.")
        summary, thoughts = page.locator(".is-writing .thinking summary"), page.locator(".thoughts")
        expect(summary).to_have_text("Thinking …")
        summary.click()
        expect(thoughts).to_contain_text("9 sheep, ")
        before = thoughts.inner_text().strip()
        page.reload()
        expect(summary).to_have_text("Thinking …")
        expect(thoughts).to_contain_text(re.compile(re.escape(before) + ".*sheep"))
        page.get_by_role("button", name="Stop the answer").click()
        expect(page.locator(".note")).to_contain_text("Stopped.")
        assert page.locator("article.assistant .blocks").inner_text() == ""
        whole = thoughts.text_content() or ""
        page.reload()
        expect(page.locator(".note")).to_contain_text("Stopped.")
        assert thoughts.text_content() == whole
        page.get_by_role("button", name="Settings", exact=True).click()
        unfold_settings(page)
        expect(page.get_by_role("group", name="Priority")).to_be_visible()
        expect(page.get_by_role("group", name="Thinking")).to_have_count(0)  # this template has no switch
        page.keyboard.press("Escape")
        here.ask("Count once more.")
        with page.expect_response("**/ui/api/answers/*/answer") as told:
            page.get_by_role("button", name="Answer now").click()
        assert told.value.status == 204
        expect(page.locator(".thinking summary").last).to_have_text(re.compile(r"^Thinking(, [\d,]+ tokens)?$"))
        page.get_by_role("button", name="Stop the answer").click()
        check_program_in_live_view(here)


def check_program_in_live_view(here: Visitor) -> None:
    """What a program asks without a stream is told to answer, and ended, where one's own requests are seen."""
    page = here.page
    page.get_by_role("link", name="Live").click()
    body = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 15_000}
    headers = {"user-agent": "aider/0.86"}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{here.url}/v1/chat/completions", json=body, headers=headers, timeout=None)
        lane = page.locator(".lane", has_text="aider/0.86")
        expect(lane.locator(".lane-of")).to_have_text(re.compile(r"#\d+"))
        lane.locator("summary").click()
        hurry = lane.get_by_role("button", name="Answer now")
        with page.expect_response("**/v1/requests/*/answer") as told:
            hurry.click()
        assert told.value.status == 200
        expect(hurry).to_be_hidden()
        try:
            assert violations(page) == []
        finally:  # where axe is missing, the request would go on for ever
            lane.get_by_role("button", name="aider/0.86").click()
            asks = page.get_by_role("dialog", name="aider/0.86")
            expect(asks).to_be_visible()
            assert violations(page) == []
            page.keyboard.press("Escape")  # nothing is ended by it
            lane.get_by_role("button", name="aider/0.86").click()
            asks.get_by_role("button", name="End request").click()
        assert asked.result().status_code == 410
        expect(lane.locator(".lane-state")).to_have_text("ended by you")
        expect(lane.get_by_role("button")).to_have_count(0)


def test_thinking_of_a_template_that_declares_none_is_folded_and_stays_the_api_s_text(
    browser: Browser, tmp_path: Path
) -> None:
    said = "<think>\nIs it wet?\nLook out.\n</think>\n\nIt is. A <think> is a tag."
    with saying(browser, tmp_path, said) as here:
        page = here.visit().page
        here.ask("Does it rain?")
        assert here.wait_for_answer() == "It is. A <think> is a tag."
        expect(page.locator(".thinking summary")).to_have_text("Thinking")
        expect(page.locator(".thoughts")).to_have_text("Is it wet?\nLook out.\n")
        body = {"messages": [{"role": "user", "content": "Does it rain?"}]}
        answer = httpx.post(f"{here.url}/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == said
        page.reload()
        expect(page.locator(".thoughts")).to_have_text("Is it wet?\nLook out.\n")
        with page.expect_request("**/ui/api/answers") as sent:
            here.ask("And now?")
        turns = json.loads(sent.value.post_data or "")["messages"]
        assert (turns[1]["content"][:6], turns[1]["reasoning"][:5]) == ("It is.", "Is it")
