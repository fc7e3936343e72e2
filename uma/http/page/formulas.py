"""Formulas in Markdown: `\\(…\\)`, `\\[…\\]`, `$…$` and `$$…$$` stay exactly as they are written.

Markdown would take their backslashes and underscores for its own. They are text, in a span; the page typesets them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token

MAX_CHARS = 4_096
"""The end of a formula in brackets is sought no further: there can be thousands that are never closed."""
_INLINE = {"\\(": "\\)", "\\[": "\\]"}
_DISPLAYED = {"\\[": "\\]", "$$": "$$"}
_DOLLARS = re.compile(r"\$\$(?:\\.|[^$\\])+\$\$|\$(?=\S)((?:\\.|[^$\\\n])+)(?<=\S)\$(?![\w$])", re.DOTALL)
_SIGNS = re.compile(r"[\\^_=]")
"""Between two dollars, one of these tells a formula from "$HOME or $" and the like."""
_OPERATION, _WORD = re.compile(r"[-+*/<>]"), re.compile(r"[^\W\d_]{3}")
"""So does the first without the second: `n + m - 1`, which has spaces; `2n` is one too."""
_OTHER_BLOCK = re.compile(r"```|~~~|#{1,6}\s")
"""What begins so ends a formula that was never closed."""


def keep_formulas(parser: MarkdownIt) -> None:
    """Have `parser` leave formulas as they are."""
    parser.inline.ruler.before("escape", "formula", _inline)
    parser.block.ruler.before("table", "formula", _block, {"alt": ["paragraph", "reference", "blockquote", "list"]})
    parser.add_render_rule("formula", _rendered)


def _inline(state: StateInline, silent: bool) -> bool:
    """A formula from here on."""
    end = _end(state.src, state.pos)
    if end is None or end > state.posMax:
        return False
    if not silent:
        state.push("formula", "", 0).content = state.src[state.pos : end]
    state.pos = end
    return True


def _end(text: str, start: int) -> int | None:
    """Where the formula that begins at `start` ends, if one does."""
    closer = _INLINE.get(text[start : start + 2])
    if closer is not None:
        found = text.find(closer, start + 2, start + MAX_CHARS)
        return found + 2 if found > 0 else None
    if text[start] != "$" or text[start - 1 : start].isalnum() or text[start - 1 : start] == "$":
        return None
    match = _DOLLARS.match(text, start)
    return match.end() if match and (match[1] is None or _is_formula(match[1])) else None


def _is_formula(inner: str) -> bool:
    """Whether what stands between two dollars is one, and the dollars no prices or names of variables."""
    if _SIGNS.search(inner) or (_OPERATION.search(inner) and not _WORD.search(inner)):
        return True
    return bool(re.fullmatch(r"\d+[a-z]", inner)) or not (inner[0].isdigit() or re.search(r"\s", inner))


def _block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A paragraph that begins with a formula of several lines, whatever block its lines would begin otherwise.

    It ends with the formula's last line. A formula that is not closed (yet) ends as a paragraph does: what is a block
    of its own does not depend on what comes later.
    """
    first = _line(state, start)
    closer = _DISPLAYED.get(first[:2])
    if closer is None or closer in first[2:] or state.is_code_block(start):
        return False
    if silent:
        return True
    after = start + 1
    while after < end and not _ends_before(state, after):
        after += 1
        if closer in _line(state, after - 1):
            break
    state.line = after
    state.push("formula_open", "p", 1).map = [start, after]  # no "paragraph", which a tight list would run on
    content = state.push("inline", "", 0)
    content.content = state.getLines(start, after, state.blkIndent, False).strip()
    state.push("formula_close", "p", -1)
    return True


def _ends_before(state: StateBlock, line: int) -> bool:
    is_outside = state.sCount[line] < state.blkIndent
    return state.isEmpty(line) or is_outside or bool(_OTHER_BLOCK.match(_line(state, line)))


def _line(state: StateBlock, line: int) -> str:
    return state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]]


def _rendered(_: Any, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
    return f'<span class="formula">{escapeHtml(tokens[index].content)}</span>'
