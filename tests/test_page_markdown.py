"""Markdown as it grows is what it is as a whole, and nothing that leaves the renderer can do harm."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma.http.page.growing import MAX_BLOCK_CHARS, GrowingText
from uma.http.page.markdown import parse, render

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
)
markdown = st.lists(st.sampled_from(PARTS) | st.text(max_size=5), max_size=40).map("".join)

ALLOWED = {
    *("p", "h3", "h4", "h5", "h6", "blockquote", "hr", "br", "ul", "ol", "li"),
    *("pre", "code", "span", "strong", "em", "s", "a", "table", "thead", "tbody", "tr", "th", "td"),
}
ATTRIBUTES = {"href", "title", "target", "rel", "start", "class", "data-language"}


class Checker(HTMLParser):
    """Fails at any tag, attribute or address that is not among the few allowed ones."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED
        for name, value in attrs:
            assert name in ATTRIBUTES
            if name == "href":
                assert re.match(r"(https?|mailto):", value or "")

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data!r}")


def check(blocks: list[str]) -> None:
    for block in blocks:
        checker = Checker()
        checker.feed(block)
        checker.close()


@given(markdown)
def test_only_harmless_html_comes_out(text: str) -> None:
    check(render(text))


@given(markdown, st.integers(1, 7))
def test_a_text_that_grows_ends_as_the_whole_does(text: str, step: int) -> None:
    growing = GrowingText(parse, render)
    for end in range(0, len(text), step):
        growing.update(text[:end])
        check(growing.blocks)
    growing.finish(text)
    assert growing.blocks == render(text)


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


@pytest.mark.parametrize("step", [1, 2, 5])
def test_what_is_shown_while_a_text_grows_is_final_where_another_block_follows(step: int) -> None:
    growing = GrowingText(parse, render)
    whole = render(LESSON)
    for end in range(0, len(LESSON), step):
        growing.update(LESSON[:end])
        shown = growing.blocks[:-2]
        assert shown == whole[: len(shown)]


def test_only_the_last_block_is_parsed_again() -> None:
    growing = GrowingText(parse, render)
    text = "A paragraph.\n\n" * 2_000
    growing.update(text)
    first = growing.blocks[0]
    growing.update(text + "More.")
    assert growing.blocks[0] is first
    assert growing.blocks[-1] == "<p>More.</p>\n"


def test_a_block_that_never_ends_becomes_plain_text() -> None:
    growing = GrowingText(parse, render)
    text = "```python\n" + "x = [1, 2]\n" * (MAX_BLOCK_CHARS // 8)
    growing.update(text)
    assert growing.blocks == [f"<pre>{text}</pre>"]


def test_a_reference_that_comes_last_holds_for_what_was_before() -> None:
    growing = GrowingText(parse, render)
    text = "See [the page].\n\nMore.\n\n[the page]: https://example.org\n"
    growing.update(text)
    growing.finish(text)
    assert 'href="https://example.org"' in growing.blocks[0]


def test_an_address_is_a_link_and_a_name_with_a_dot_is_none() -> None:
    (block,) = render("See https://example.org/a_b?c=1. Run main.py or node.js, ask a@b.org, not ftp://a.b.")
    assert ">https://example.org/a_b?c=1</a>. Run main.py" in block
    assert block.count("<a ") == 1
    assert "<a " not in render("`https://example.org`")[0]


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
def test_a_formula_stays_as_it_is_written(formula: str) -> None:
    shown = f'<span class="formula">{formula.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}</span>'
    assert render(f"{formula} is *it*") == [f"<p>{shown} is <em>it</em></p>\n"]
    for around in ("So:\n{}\n\nThen.", "> {}", "- So:\n  {}", "| a |\n|---|\n| {} |"):
        if "\n" not in formula or "|" not in around:
            lines = formula.replace("\n", {"> {}": "\n> ", "- So:\n  {}": "\n  "}.get(around, "\n"))
            assert "".join(render(around.format(lines))).count(shown) == 1, around


@pytest.mark.parametrize(
    ("text", "shown"),
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
def test_prices_and_names_and_code_are_no_formulas(text: str, shown: str) -> None:
    assert render(text) == [f"<p>{shown}</p>\n"]


def test_a_formula_that_is_never_closed_swallows_no_code() -> None:
    assert render("$$ is the *PID*\n```\nx\n```")[1] == '<pre><code data-language="">x\n</code></pre>\n'
    assert len(render("\\[ *a*\n\nb")) == 2
