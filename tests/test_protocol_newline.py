"""Newline mode: lines out of bytes at any split, and what is no line said at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma.errors import PromptTooLarge
from uma.protocol.newline import LineDecoder

lines_of_text = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n\r"), max_size=10), max_size=6
)


def drain(decoder: LineDecoder) -> list[str]:
    lines = []
    while (line := decoder.next_line()) is not None:
        lines.append(line)
    return lines


@given(lines_of_text, st.sampled_from(["\n", "\r\n"]), st.data())
def test_any_split_of_the_bytes_gives_the_same_lines(sent: list[str], end: str, data: st.DataObject) -> None:
    stream = "".join(line + end for line in sent).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder = LineDecoder(100)
    received = []
    for start, stop in pairwise([0, *cuts, len(stream)]):
        decoder.feed(stream[start:stop])
        received += drain(decoder)
    assert received == sent
    assert not decoder.is_mid_line


def test_a_line_over_the_cap_is_told_before_its_end_comes() -> None:
    decoder = LineDecoder(8)
    decoder.feed(b"x" * 8)
    assert decoder.next_line() is None
    assert decoder.is_mid_line
    decoder.feed(b"x")
    with pytest.raises(PromptTooLarge, match=r"^prompt too large: .*max_prompt_bytes"):
        decoder.next_line()
