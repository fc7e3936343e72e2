"""Markdown as it grows is what it is as a whole, and nothing that is shown of it can do harm: the page's own script."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pytest
from http_server import HttpServer
from hypothesis import given
from hypothesis import strategies as st
from page_browser import visitor
from playwright.sync_api import Browser, Page, expect

PARTS = (
    "# Head\n",
    "text ",
    "*emphasis*",
    "**bold",
    "`code`",
    "\n",
    "\n\n",
    "- item\n",
    "1. item\n",
    "  ",
    "    ",
    "> quote\n",
    "```python\n",
    "```\n",
    "def f():\n",
    "| a | b |\n",
    "|---|--:|\n",
    "---\n",
    "[x](http://a.b)",
    " https://a.b/c?d=1 ",
    "[x](javascript:alert(1))",
    "![x](http://a.b/c.png)",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "&lt;b&gt;",
    "\r\n",
    "\r",
    "\u2028",
    "\x00",
    "<!--",
    "~~struck~~",
    *("\\(", "\\)", "\\[", "\\]", "$", "$$", "x_1_2", "\\[\n", "\\]\n", "$$\n"),
    '~~~html"onclick=alert(1)\n',
    *("<br>", "<sub>", "</sub>", "<kbd onclick=alert(1)>", "[^1]", "[^1]: note\n", "- [x] done\n", "[a](b.md)"),
    *("<b>", "</b>", "<details>\n", "<summary>more</summary>\n", "</details>\n", "<details><summary>b</summary>\n"),
    *("<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', "\\begin{align}\n", "\\end{align}"),
)
markdown = st.lists(st.sampled_from(PARTS) | st.text(max_size=5), max_size=40).map("".join)

VECTORS = json.loads(Path(__file__).with_name("dompurify_vectors.json").read_text())["vectors"]
TEX = (
    r"\href{javascript:alert(1)}{x}",
    r"\url{javascript:alert(1)}",
    r"\includegraphics{http://127.0.0.1:9/a.png}",
    r"\class{menu}{x}\id{send}{x}\style{position:fixed}{x}\data{a=b}{x}",
    r"\text{<img src=x onerror=alert(1)>}",
    r"\color{red;background:url(http://127.0.0.1:9/a.png)}x",
    r"\def\a{\a\a}\a",
    r"\rule{9999em}{9999em}",
)
HTML_TAGS = {
    *("p", "h3", "h4", "h5", "h6", "blockquote", "hr", "br", "ul", "ol", "li"),
    *("pre", "code", "span", "strong", "em", "s", "a", "table", "thead", "tbody", "tr", "th", "td"),
    *("details", "summary", "sub", "sup", "kbd", "b", "i", "u", "del", "ins", "mark", "small"),
}
OWN_TAGS = {"div", "button", "svg", "use"}
"""What the page itself puts around code and tables."""
ATTRIBUTES = {"href", "title", "target", "rel", "start", "class", "data-language"}
OWN_ATTRIBUTES = {"class", "dir", "tabindex", "role", "aria-label", "aria-hidden", "type", "title", "href"}
SCRIPT = """async () => {
    const { Blocks } = await import("/ui/blocks.js");
    const { Markdown } = await import("/ui/markdown.js");
    const [{ temml }, { highlighter }] = await Promise.all([import("/ui/formulas.js"), import("/ui/colours.js")]);
    await Promise.all([temml.load(), highlighter.load()]);
    window.hacked = 0;
    window.alert = () => (window.hacked += 1);
    window.fresh = () => {
        const blocks = new Blocks();
        document.getElementById("thread").replaceChildren(blocks.element);
        return blocks;
    };
    window.html = (text, ends) => {
        const markdown = new Markdown();
        for (const end of ends) markdown.grow(text.slice(0, end));
        if (!ends.length) markdown.finish(text);
        return markdown;
    };
    const attributes = (element) => Object.fromEntries([...element.attributes].map(({ name, value }) => [name, value]));
    window.told = (element) => [...element.querySelectorAll("*")].map((each) => [
        each.namespaceURI.split("/").at(-1), each.localName, attributes(each),
    ]);
    window.shown = (text) => {
        const blocks = fresh();
        while (!blocks.isFinal) blocks.show(text, true);
        return blocks.element;
    };
}"""


@pytest.fixture(scope="module")
def shown(browser: Browser, http_server: HttpServer) -> Iterator[Page]:
    """A page that asks for nothing but its own files, and runs nothing that is not its own."""
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.evaluate(SCRIPT)
        yield page
        assert page.evaluate("window.hacked") == 0
        assert not [url for url in asked if not url.startswith(one.url)]


def html(page: Page, text: str, *ends: int) -> list[str]:
    """Blocks of a text before they are sanitized; as it is while it grows, where it is told by how much."""
    return list(page.evaluate("([text, ends]) => window.html(text, ends).blocks", [text, ends]))


def check(elements: list[tuple[str, str, dict[str, str]]]) -> None:
    """Fail at any element, attribute or address that is not among the few allowed ones."""
    for space, tag, attributes in elements:
        if space == "MathML":
            assert tag not in ("maction", "annotation-xml", "mglyph", "a"), tag
            assert not [name for name in attributes if re.match("href|src|id|on", name)], attributes
            continue
        is_own = tag in OWN_TAGS or attributes.get("role") == "group"
        assert is_own or tag in HTML_TAGS, tag
        assert attributes.keys() <= (OWN_ATTRIBUTES if is_own else ATTRIBUTES), attributes
        if "href" in attributes:
            assert re.match(r"#i-\w+$" if is_own else r"(https?|mailto):", attributes["href"])
        if tag == "a":
            assert (attributes["target"], attributes["rel"]) == ("_blank", "noopener noreferrer nofollow")


@given(markdown, st.integers(1, 7))
def test_a_text_that_grows_ends_as_the_whole_does_and_is_harmless(shown: Page, text: str, step: int) -> None:
    script = """([text, step]) => {
        const whole = shown(text);
        const growing = fresh();
        const found = [];
        for (let end = 0; end < text.length; end += step) {
            growing.show(text.slice(0, end), false);
            found.push(...told(growing.element));
        }
        while (!growing.isFinal) growing.show(text, true);
        return [growing.element.isEqualNode(whole), [...found, ...told(growing.element)]];
    }"""
    is_same, elements = shown.evaluate(script, [text, step])
    check(elements)
    assert is_same


def test_nothing_of_the_sanitizer_s_own_vectors_comes_through(shown: Page) -> None:
    for vector in VECTORS:
        around = (vector, f"```html\n{vector}\n```", f"[a]({vector})", f"$x_{{{vector}}}$", f'~~~html"{vector}\n~~~')
        for text in around:
            check(shown.evaluate("(text) => told(shown(text))", text))


def test_nothing_of_them_comes_through_the_sanitizer_alone(browser: Browser, http_server: HttpServer) -> None:
    with visitor(browser, http_server.url) as one:
        page = one.visit().page
        page.evaluate(SCRIPT)
        script = """(html) => {
            const to = fresh().element;
            to.append(DOMPurify.sanitize(html));
            return told(to);
        }"""
        for vector in VECTORS:
            check(page.evaluate(script, vector))
        assert page.evaluate("window.hacked") == 0
        one.problems.clear()  # Chromium notes what its policy has kept from running


@pytest.mark.parametrize("source", TEX)
def test_a_formula_runs_and_loads_nothing_and_covers_nothing(shown: Page, source: str) -> None:
    script = "(text) => { const to = shown(text); return [told(to), to.getBoundingClientRect().height]; }"
    elements, height = shown.evaluate(script, f"$x_1 {source}$")
    check(elements)
    assert height < 400
    assert not [attributes for *_, attributes in elements if "url(" in attributes.get("style", "")]


@pytest.mark.parametrize(
    "text",
    [
        "See [the docs](http://a.b/c_(d) 'x') and ![a cat](http://a.b/c.png)!",
        "This is **bold, *both***, ~~struck~~ and __`code()`, too__.",
        "Here it is:\n- one\n- [x] two\n\n1. three\n2. four\n",
        "# Head\n\n> quoted\n\n```python\nx = 1\n```\n\n~~~\ny\n~~~\n",
        "| Name | Age |\n|------|-----|\n| **Ann** | `4` |\n",
        "So \\(x_1\\) is $$y^2$$.\n\n\\[\nz = 1\n\\]\n",
        "H<sub>2</sub>O[^1] is wet.\n\n[^1]: Most of it.\n",
    ],
)
def test_no_mark_is_seen_before_it_is_known_what_it_marks(shown: Page, text: str) -> None:
    seen: list[str] = shown.evaluate(
        """(text) => {
            const blocks = fresh();
            return [...text].map((_, index) => {
                blocks.show(text.slice(0, index + 1), false);
                const copy = blocks.element.cloneNode(true);
                copy.querySelectorAll("math, .code-bar").forEach((each) => each.remove());
                return copy.textContent;
            });
        }""",
        text,
    )
    assert [each for each in seen if re.search(r"[*_`~|#<>\\$]|]\(|^-|\n-|http|\[(?!picture: )[A-Za-z]", each)] == []


def test_signs_that_mark_nothing_are_seen_at_once(shown: Page) -> None:
    for text in ("2 * 3", "2*3", "snake_case", "list[0]", "it costs $5", "a < b", r"\*not this", "Wow!"):
        assert html(shown, text, len(text)) == [f"<p>{escape(text.replace(chr(92), ''))}</p>\n"]


@pytest.mark.parametrize("step", [1, 5])
def test_what_is_shown_while_a_text_grows_is_final_where_another_block_follows(shown: Page, step: int) -> None:
    script = """([text, step]) => {
        const markdown = html(text, [0]);
        const found = [];
        for (let end = 0; end < text.length; end += step) {
            markdown.grow(text.slice(0, end));
            found.push(markdown.blocks.slice(0, -2));
        }
        return [html(text, []).blocks, found];
    }"""
    whole, found = shown.evaluate(script, [LESSON, step])
    for blocks in found:
        assert blocks == whole[: len(blocks)]


def test_only_the_last_block_is_parsed_again(shown: Page) -> None:
    text = "A paragraph.\n\n" * 2_000
    grown: dict[str, Any] = shown.evaluate("(text) => html(text + 'More.', [text.length, text.length + 5])", text)
    assert grown["blocks"][-1] == "<p>More.</p>\n"
    assert len(text) - grown["begin"] <= len("A paragraph.\n\n")


def test_a_block_that_never_ends_becomes_plain_text(shown: Page) -> None:
    text = "```python\n" + "x = [1, 2]\n" * 4_000
    assert html(shown, text, len(text)) == [f"<pre>{text}</pre>"]


@pytest.mark.parametrize("text", ["|a|b|\n|-|-|\n" + "|1|2|\n" * 4_000, "---\n\n" * 4_000, "[^1]: a\n" * 4_000])
def test_a_text_of_too_many_parts_is_plain_from_there_on(shown: Page, text: str) -> None:
    """A browser is frozen for minutes by what a model writes in seconds."""
    count, last = shown.evaluate(
        """text => {
            const element = shown(text);
            return [element.querySelectorAll("*").length, element.lastElementChild.innerHTML];
        }""",
        text,
    )
    assert count <= 10_000
    assert last.startswith("<pre>")
    assert text.strip().endswith(last.removeprefix("<pre>").removesuffix("</pre>").strip()[-1_000:])


def test_a_text_that_takes_long_is_made_in_parts(shown: Page) -> None:
    """The clock goes on by the most that one part can take each time it is looked at."""
    text = "Text $x^2$ here.\n\n" * 5 + "$x$ " * 600
    parts, whole = shown.evaluate(
        """text => {
            const whole = shown(text).innerHTML;
            const [now, blocks, parts] = [performance.now, fresh(), []];
            let time = 0;
            performance.now = () => (time += 201);
            while (!blocks.isFinal) {
                blocks.show(text, true);
                parts.push(blocks.element.childElementCount);
            }
            performance.now = now;
            return [parts, blocks.element.innerHTML === whole];
        }""",
        text,
    )
    assert parts == [1, 2, 3, 4, 5, 6] and whole
    assert shown.evaluate("document.querySelectorAll('#thread math').length") == 505


def test_a_reference_that_comes_last_holds_for_what_was_before(shown: Page) -> None:
    text = "See [the page].\n\nMore.\n\n[the page]: https://example.org\n"
    assert 'href="https://example.org"' in html(shown, text)[0]


@pytest.mark.parametrize(
    ("text", "selector", "words"),
    [
        ("one<br>two H<sub>2</sub>O", "sub", "2"),
        ("Press <kbd>Ctrl</kbd>", "kbd", "Ctrl"),
        ("A <b>bold</b> and <I>slanted</I> word", "b + i", "slanted"),
        ("A Vec<b> of n < b", "p:not(:has(b))", "A Vec<b> of n < b"),
        ("<details>\n\n- one\n\n</details>", "p + ul, .block + .block ul", "one"),
        ("- [ ] buy milk\n- [x] feed the fox", "li.task + li.task", "☑ feed the fox"),
        ("A claim.[^1]\n\n[^1]: https://a.b/c", "p + p, .block + .block p", "1 https://a.b/c"),
        ("See[^x]: it is so.", "p", "Seex: it is so."),
        ("> " * 200 + "deep", "blockquote", "deep"),
        ("A \u202eevil word", "p", "A \ufffdevil word"),
        ("See ![a red fox](http://127.0.0.1:9/fox.png)", "p", "See [picture: a red fox, 127.0.0.1:9]"),
        ("See [the notes](docs/notes.md).", "p:not(:has(a))", "See the notes."),
        (
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
            "summary",
            "Tool call: weather",
        ),
        ('```json\n{"name": "weather", "parameters": {}}\n```', "details.call summary", "Tool call: weather"),
        (r"\begin{align} a &= b \\ c &= d \end{align}", "math mtable", ""),
        (r"\begin{equation} a = b \end{equation}", "math[display=block]", ""),
        (r"$\overline{AB} \xrightarrow{f} C$", "math mover", ""),
    ],
)
def test_what_models_write_beside_markdown_is_shown_as_it_is_meant(
    shown: Page, text: str, selector: str, words: str
) -> None:
    found = shown.evaluate("([text, selector]) => shown(text).querySelector(selector)?.textContent", [text, selector])
    assert found is not None
    assert words in re.sub(r"\s+", " ", found)


def test_footnotes_are_numbered_and_lead_to_their_words_and_back(shown: Page) -> None:
    text = "One[^note], two[^1], one more[^note] and none[^gone].\n\n[^1]: First.\n\n[^note]: Noted.\n"
    shown.evaluate("text => { shown(text); }", text)
    thread = shown.locator("#thread")
    marks = thread.get_by_role("button", name=re.compile("^Footnote "))
    expect(marks).to_have_text(["1", "2", "1"])
    expect(thread.locator(".block").first).to_have_text("One1, two2, one more1 and nonegone.")
    expect(thread.locator(".block").nth(1)).to_have_text("2 First.")
    marks.last.click()
    back = thread.get_by_role("button", name="Back from footnote 1")
    expect(back).to_be_focused()
    shown.keyboard.press("Enter")
    expect(marks.first).to_be_focused()


def test_an_address_is_a_link_and_a_name_with_a_dot_is_none(shown: Page) -> None:
    (block,) = html(shown, "See https://example.org/a_b?c=1. Run main.py or node.js, ask a@b.org, not ftp://a.b.")
    assert ">https://example.org/a_b?c=1</a>. Run main.py" in block
    assert block.count("<a ") == 1
    assert "<a " not in html(shown, "`https://example.org`")[0]


@pytest.mark.parametrize("language", ["python", "js", "html", "c++", "constructor", "no such"])
def test_code_with_colours_is_the_code_as_it_was(shown: Page, language: str) -> None:
    code = """def f(a): return "<b>" + '&amp;' # &lt; </span>\n<span class="x">`${f`1`}`</span>\n"""
    script = "(text) => shown(text).querySelector('code').textContent"
    assert shown.evaluate(script, f"```{language}\n{code}```") == code


LESSON = """# A

Paragraph one,
still one.

- a
- b

  more

```py
x = 1

y = 2
```

| a | b |
|---|---|
| 1 | 2 |

A sum:
\\[
a_1
- b_2
\\]
$$\\begin{aligned}
+ c_3 \\\\
- d
\\end{aligned}$$ is one, $$ is
none.
```sh
$$
```

End.
"""


@pytest.mark.parametrize(
    "formula",
    [
        *(
            r"\(a_1 * b_2 * c\)",
            r"\[ x_1 = \{y_1\} \]",
            "$a_1 + b_2$",
            "$x$",
            "$a*b*c$",
            r"$\alpha$",
            "$10^6$",
            "$n + m - 1$",
            "$2 < n$",
            "$2n$",
            "$$x_1_2$$",
        ),
        *("\\[\na_1 = b\n- c_2\n+ d\n= 3\n  * e\n\\]", "$$\n\\begin{aligned}\na &= <b> \\\\\n---\n\\end{aligned}\n$$"),
    ],
)
def test_a_formula_stays_as_it_is_written(shown: Page, formula: str) -> None:
    kept = f'<span class="formula">{formula.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}</span>'
    assert html(shown, f"{formula} is *it*") == [f"<p>{kept} is <em>it</em></p>\n"]
    for around in ("So:\n{}\n\nThen.", "> {}", "- So:\n  {}", "| a |\n|---|\n| {} |"):
        if "\n" not in formula or "|" not in around:
            lines = formula.replace("\n", {"> {}": "\n> ", "- So:\n  {}": "\n  "}.get(around, "\n"))
            assert "".join(html(shown, around.format(lines))).count(kept) == 1, around


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("It costs $5 and $6, or *$7*-$8.", "It costs $5 and $6, or <em>$7</em>-$8."),
        ("$5-$10, $5 - *6* or $7/month, not $x and y$", "$5-$10, $5 - <em>6</em> or $7/month, not $x and y$"),
        ("**$100** to **$200**", "<strong>$100</strong> to <strong>$200</strong>"),
        ("$HOME *and* $PATH, US$5 *or* US$", "$HOME <em>and</em> $PATH, US$5 <em>or</em> US$"),
        ("$$ is the *PID*", "$$ is the <em>PID</em>"),
        (r"\\(a\\) \$5 \$6 \(*b*", r"\(a\) $5 $6 (<em>b</em>"),
        (r"`\(a_1\)` `$x$`", r"<code>\(a_1\)</code> <code>$x$</code>"),
    ],
)
def test_prices_and_names_and_code_are_no_formulas(shown: Page, text: str, kept: str) -> None:
    assert html(shown, text) == [f"<p>{kept}</p>\n"]


def test_a_formula_that_is_never_closed_swallows_no_code(shown: Page) -> None:
    assert html(shown, "$$ is the *PID*\n```\nx\n```")[1] == '<pre><code data-language="">x\n</code></pre>\n'
    assert len(html(shown, "\\[ *a*\n\nb")) == 2


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("## A\n\ntext\n\n### B\n\n## C\n", [3, 4, 4]),
        ("#### A\n\n# B\n\n### C\n\n###### D\n\n###### E\n", [3, 3, 4, 5, 6]),
    ],
)
def test_no_level_of_headings_is_left_out_below_the_page_s_own(shown: Page, text: str, levels: list[int]) -> None:
    for ends in ((), range(1, len(text) + 1)):
        assert [int(each) for each in re.findall(r"<h(\d)>", "".join(html(shown, text, *ends)))] == levels
