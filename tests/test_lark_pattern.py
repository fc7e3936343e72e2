"""Grammars in Lark's notation as regular expressions: these hold the texts that llguidance's own Lark parser takes."""

from __future__ import annotations

import re

import pytest
from llguidance import LLMatcher, LLTokenizer

from uma.chat.lark_pattern import NoPatternError, pattern_of

PATCH = r"""
start: begin hunk+ end   // as agents ask for patches
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: add | drop | change
add: "*** Add File: " name LF line+
drop: "*** Delete File: " name LF
change: "*** Update File: " name LF moved? [part+ eof?]
moved: "*** Move to: " name LF
part: ("@@" | "@@ " /(.+)/) LF -> where
    | ("+" | "-" | " ") /(.*)/ LF -> what
eof: "*** End of File" LF
name: /(.+)/
line: "+" /(.*)/ LF

%import common.LF
"""
SUM = """
start: expr
?expr: term (SP ADD SP term)* -> add
    | term
!term: INT ~ 1 | INT "i"i | "x".."z" ~ 2..3   # an imaginary number; a name
SP: " "
ADD: "+"
%import common (INT, WS)
"""
BEGIN, END = "*** Begin Patch\n", "*** End Patch"


@pytest.mark.parametrize(
    ("grammar", "text", "is_taken"),
    [
        (PATCH, f"{BEGIN}*** Add File: a.txt\n+one\n+\n{END}", True),
        (PATCH, f"{BEGIN}*** Update File: a\n*** Move to: b\n@@ f()\n-x\n+y\n*** End of File\n{END}\n", True),
        (PATCH, f"{BEGIN}*** Delete File: a\n*** Update File: b\n{END}", True),
        (PATCH, f"{BEGIN}*** Add File: a.txt\n{END}", False),
        (PATCH, f"{BEGIN}{END}", False),
        (PATCH, f"{BEGIN}*** Delete File: \n{END}", False),
        (PATCH, "x" + f"{BEGIN}*** Delete File: a\n{END}", False),
        (SUM, "12 + 3I + xyz", True),
        (SUM, "12 + xy", True),
        (SUM, "x", False),
        (SUM, "12+3", False),
        (SUM, "12 + ", False),
        ('start: "a\\"\\\\\\n\\x2a" /[a-c]\\/x/i', 'a"\\\n*B/X', True),
        ('start: "a\\"\\\\\\n\\x2a" /[a-c]\\/x/i', 'a"\\\n*d/X', False),
        ("start: /a.b/s", "a\nb", True),
        ("start: /a.b/", "a\nb", False),
        ("%import common.INT -> COUNT\nstart: COUNT\n", "12", True),
    ],
)  # fmt: skip
def test_the_expression_takes_what_the_grammar_takes(grammar: str, text: str, is_taken: bool) -> None:
    assert bool(re.fullmatch(pattern_of(grammar), text)) is is_taken
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(grammar))
    assert (matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()) is is_taken


def test_rules_that_stand_on_the_lines_of_one_alternative_belong_together() -> None:
    assert re.fullmatch(pattern_of('start.2: "a"\n\n  | "b"\n'), "b")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: "(" start? ")"', "start leads back to itself"),
        ('start: a\na: "x" b\nb: a?', "a leads back to itself"),
        ("start: missing", "missing is not defined"),
        ('other: "a"', "start is not defined"),
        ('start: "a"\n%ignore " "', "%ignore is not available"),
        ("%import common.EMOJI\nstart: EMOJI", "common.EMOJI is not known"),
        ("%import python.NAME\nstart: NAME", "only common"),
        ('start: ("a"', r"expected '\)'"),
        ('start: "a" )', r"'\)' is not known here"),
        ("start: 'a'", "is not known"),
        ('start: "a" ~', "cut off"),
        ("start: ~", "not known here"),
        ('start "a"', "colon"),
        ('start: "ab".."z"', "range"),
        ('start: "\\q"', "no string"),
        ("start: a a a a\n" + "\n".join(f"{x}: {y} {y} {y} {y}" for x, y in zip("abcdefgh", "bcdefghi", strict=True))
         + '\ni: "x"', "longer than"),
    ],
)  # fmt: skip
def test_what_is_no_regular_expression_is_told(grammar: str, reason: str) -> None:
    with pytest.raises(NoPatternError, match=reason):
        pattern_of(grammar)
