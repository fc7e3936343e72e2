"""Text that is streamed to a terminal."""

from __future__ import annotations

import unicodedata

import pyte
import pytest

from uma.cli.terminal import WordWrap

TEXT = "The fox, 狐狸很聪明而且喜欢鸡, met a cafe\u0301-loving hen in\tthe yard. " + "long" * 12 + " ends it here."
CODE = "```\n" + "for word in words: print(word)\n" * 2 + "```\n"


@pytest.mark.parametrize(("columns", "piece"), [(20, 1), (20, 7), (31, 500)])
def test_words_of_a_stream_are_whole_however_it_is_cut(columns: int, piece: int) -> None:
    wrap, screen = WordWrap(columns), pyte.Screen(columns, 40)
    stream, text = pyte.Stream(screen), TEXT + "\n" + CODE + TEXT
    for at in range(0, len(text), piece):
        stream.feed(wrap(text[at : at + piece]).replace("\n", "\r\n"))
    lines = [line.rstrip() for line in screen.display if line.strip()]
    whole = unicodedata.normalize("NFC", TEXT)  # pyte composes accents
    assert {word for word in whole.split() if len(word) < 12 and word.isascii()} <= set(" ".join(lines).split())
    assert "".join(whole.split()) in "".join("".join(lines).split())
    assert ("for word in words: print(word)" in lines) == (columns > 30)  # code is the terminal's to fold
