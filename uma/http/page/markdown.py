"""Markdown as HTML that is safe to show: a program, which `renderer` runs as a child process.

Everything that leaves it has gone through `nh3`, whatever the parser made of it; raw HTML is not even parsed. What a
text costs cannot be told beforehand: a lexer's regular expression can take for ever, and no other thread of the process
runs meanwhile. The server itself imports none of this, which is memory and time at its start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import nh3
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.token import STANDARD_TYPES
from pygments.util import ClassNotFound

from uma.child import serve
from uma.http.page.formulas import keep_formulas
from uma.http.page.growing import MAX_BLOCK_CHARS, MAX_WHOLE_CHARS, Parsed, escaped, plain

MAX_MEMORY_BYTES = 2**30
"""Address space of the child process, where the system bounds that."""
HEADING_OFFSET = 2
"""The page's own headings are of level 1 and 2, so a text's begin at 3."""

_TAGS = {
    *("p", "h3", "h4", "h5", "h6", "blockquote", "hr", "br", "ul", "ol", "li"),
    *("pre", "code", "span", "strong", "em", "s", "a"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}
_SPANS = HtmlFormatter(nowrap=True)
_SANITIZER = nh3.Cleaner(
    tags=_TAGS,
    clean_content_tags={"script", "style"},
    attributes={"a": {"href", "title"}, "ol": {"start"}, "code": {"data-language"}},
    allowed_classes={
        "span": {"formula", *filter(None, STANDARD_TYPES.values())},
        "th": {"align-left", "align-center", "align-right"},
        "td": {"align-left", "align-center", "align-right"},
    },
    set_tag_attribute_values={"a": {"target": "_blank"}},
    url_schemes={"http", "https", "mailto"},
    url_relative="deny",
    link_rel="noopener noreferrer nofollow",
)


def _highlighted(code: str, language: str) -> str:
    """The inside of a code block: with Pygments' spans where it knows the language."""
    if not language or len(code) > MAX_BLOCK_CHARS:
        return escaped(code)
    try:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return escaped(code)
    spans: str = highlight(code, lexer, _SPANS)
    return spans


def _fence(renderer: Any, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
    token = tokens[index]
    words = token.info.split()
    language = words[0] if words else ""
    return f'<pre><code data-language="{escaped(language)}">{_highlighted(token.content, language)}</code></pre>\n'


def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "linkify": True, "maxNesting": 20})
    # No images: one that the model names would tell a stranger's server that it was read.
    parser.enable(["table", "strikethrough", "linkify"]).disable(["image", "html_block", "html_inline"])
    # Addresses with a scheme alone: "main.py" and "node.js" would be links too.
    assert parser.linkify is not None
    parser.linkify.set({"fuzzy_link": False, "fuzzy_email": False, "fuzzy_ip": False})
    parser.linkify.add("ftp:", None).add("//", None)  # the sanitizer leaves no address of these
    keep_formulas(parser)
    parser.add_render_rule("fence", _fence)
    parser.add_render_rule("code_block", _fence)
    return parser


_PARSER = _parser()


def _dressed(tokens: list[Token]) -> None:
    """Headings below the page's own, and a table's alignment as classes, since styles are not allowed."""
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + HEADING_OFFSET)}"
        elif token.type in ("th_open", "td_open") and "style" in token.attrs:
            token.attrs = {"class": "align-" + str(token.attrs["style"]).rpartition(":")[2]}


def _groups(tokens: list[Token]) -> Iterator[list[Token]]:
    """The top-level blocks."""
    group: list[Token] = []
    for token in tokens:
        group.append(token)
        if token.level == 0 and token.nesting <= 0:
            yield group
            group = []


def _render(group: list[Token], env: dict[str, Any]) -> str:
    html: str = _PARSER.renderer.render(group, _PARSER.options, env)
    return _SANITIZER.clean(html)


def render(text: str) -> list[str]:
    """A whole text's blocks."""
    if len(text) > MAX_WHOLE_CHARS:
        return [plain(text)]
    env: dict[str, Any] = {}
    tokens = _PARSER.parse(text, env)
    _dressed(tokens)
    return [_render(group, env) for group in _groups(tokens)]


def parse(text: str, env: dict[str, Any]) -> Parsed:
    """The blocks of a text behind another one, whose references are in `env`."""
    tokens = _PARSER.parse(text, env)
    _dressed(tokens)
    groups = list(_groups(tokens))
    return Parsed([_render(group, env) for group in groups], _starts(text, groups), env)


def _starts(text: str, groups: Sequence[Sequence[Token]]) -> list[int]:
    """Where in `text` each block begins."""
    lines = [0, *accumulate(len(line) + 1 for line in text.split("\n"))]
    return [lines[group[0].map[0] if group[0].map else 0] for group in groups]


def main() -> None:
    """The child: render texts until the parent closes its end. A question is a whole text, or a tail and its `env`."""
    serve(lambda _: _answer, MAX_MEMORY_BYTES)


def _answer(question: dict[str, Any]) -> Any:
    return parse(question["tail"], question["env"]) if "tail" in question else render(question["text"])


if __name__ == "__main__":
    main()
