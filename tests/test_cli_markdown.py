"""Live Markdown: what is left on the terminal is the rendered answer, however it came and whatever happened."""

from __future__ import annotations

import io

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from uma.cli.markdown import LiveMarkdown, rendered, settled

TEXT = """# A title

Some **bold** words and `code`, in a paragraph that is long enough to be wrapped on any terminal of a sane width.

- one
- two

  still two

1. first

2. second

```python
def answer():

    return 42
```

The *end*.
"""


class Screen(io.StringIO):
    """A terminal that a `LiveMarkdown` draws on."""

    def __init__(self, columns: int, lines: int) -> None:
        super().__init__()
        self.emulated = pyte.HistoryScreen(columns, lines, history=5000, ratio=0.5)
        self.stream = pyte.Stream(self.emulated)
        self.console = Console(
            file=io.StringIO(),
            force_terminal=True,
            width=columns,
            height=lines,
            color_system="standard",
            highlight=False,
        )
        self.live = LiveMarkdown(self.console, self)

    def write(self, out: str) -> int:
        self.stream.feed(out)
        return len(out)

    def resize(self, columns: int, lines: int) -> None:
        self.emulated.resize(lines, columns)
        self.console.width, self.console.height = columns, lines

    @property
    def text(self) -> str:
        above = ["".join(line[column].data for column in range(len(line))) for line in self.emulated.history.top]
        return "\n".join(line.rstrip() for line in [*above, *self.emulated.display]).rstrip()


def shown(pieces: list[str], columns: int, lines: int) -> str:
    """What is left of an answer that comes in `pieces`, drawn after each."""
    screen = Screen(columns, lines)
    for piece in pieces:
        screen.live.add(piece)
        screen.live.draw()
    screen.live.finish()
    assert not screen.emulated.cursor.hidden
    return screen.text


def in_pieces(text: str) -> list[str]:
    return [text[at : at + 3] for at in range(0, len(text), 3)]


def without_blanks(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


@pytest.mark.parametrize(("columns", "lines"), [(20, 3), (40, 8), (80, 24)])
def test_an_answer_drawn_piece_by_piece_is_left_as_if_drawn_at_once(columns: int, lines: int) -> None:
    assert without_blanks(shown(in_pieces(TEXT), columns, lines)) == without_blanks(shown([TEXT], columns, lines))


@settings(max_examples=30)
@given(st.lists(st.text(st.sampled_from("ab *`-1.\n#~>  |[]()"), max_size=12), max_size=12), st.integers(5, 60))
def test_no_markdown_is_lost_or_left_twice(pieces: list[str], columns: int) -> None:
    assert "".join(shown(pieces, columns, 200).split()) == "".join(shown(["".join(pieces)], columns, 200).split())


@given(st.text(st.sampled_from("ab -1.\n`~"), max_size=60), st.text(st.sampled_from("ab -1.\n`~"), max_size=20))
def test_what_is_settled_stays_settled(text: str, more: str) -> None:
    end = settled(text)
    assert text[:end] == (text + more)[: settled(text + more)][:end]


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("A paragraph.\n\nAnother", "A paragraph.\n\n"),
        ("A paragraph.\nStill", ""),
        ("- one\n\n- two", ""),
        ("- one\n\nAfter", "- one\n\n"),
        ("1. one\n\n2", ""),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n", "```\na\n\nb\n```\n"),
        ("Words\n\n```\na", "Words\n\n"),
        ("~~~~\n~~~\n\nx", ""),
    ],
)
def test_only_whole_blocks_are_settled(text: str, done: str) -> None:
    assert text[: settled(text)] == done


def test_an_answer_taller_than_the_screen_shows_its_end_and_is_left_whole() -> None:
    screen = Screen(40, 6)
    words = " ".join(f"word{number}" for number in range(200))
    screen.live.add(words)
    screen.live.draw()
    assert "word199" in screen.text
    assert "word0 " not in screen.text
    screen.live.finish()
    assert screen.text.split() == words.split()


def test_a_terminal_that_gets_narrower_and_wider_shows_each_word_once() -> None:
    screen = Screen(80, 24)
    words = [f"word{number}" for number in range(60)]
    for index, word in enumerate(words):
        screen.live.add(word + " ")
        screen.live.draw()
        if index in (20, 40):
            screen.resize({20: 40, 40: 100}[index], 24)
    screen.live.finish()
    assert screen.text.split() == words


@pytest.mark.parametrize("columns", [40, 100])
def test_an_answer_that_was_suspended_is_left_once_also_in_another_width(columns: int) -> None:
    screen = Screen(60, 12)
    words = [f"word{number}" for number in range(60)]
    for index, word in enumerate(words):
        screen.live.add(word + " ")
        screen.live.draw()
        if index == 30:
            screen.live.pause()
            assert not screen.emulated.cursor.hidden
            screen.write("[1]+ Stopped\r\n$ fg\r\n")
            screen.resize(columns, 12)
    screen.live.finish()
    assert screen.text.split() == ["[1]+", "Stopped", "$", "fg", *words]


def test_dots_are_shown_until_there_is_something_to_read() -> None:
    screen = Screen(40, 6)
    screen.live.draw()
    assert screen.text == "…"
    screen.live.add("Hello")
    screen.live.draw()
    assert screen.text == "Hello"
    screen.live.finish()
    assert screen.text == "Hello"


def test_thinking_is_seen_while_it_lasts_and_is_one_line_afterwards() -> None:
    screen = Screen(40, 10)
    screen.live.think("The first line.\nA second.\nThe third.\nAnd one more \x1b[2J")
    screen.live.draw()
    seen = screen.text.splitlines()
    assert (len(seen), seen[0]) == (3, "A second.")
    assert all(screen.emulated.buffer[row][0].fg == "default" for row in range(3))
    screen.live.add("The *answer*.")
    screen.live.draw()
    assert screen.text == "(thought for 11 words)\n\nThe answer."
    screen.live.finish()
    assert screen.text == "(thought for 11 words)\n\nThe answer."


def test_an_answer_of_nothing_leaves_nothing() -> None:
    screen = Screen(40, 6)
    screen.live.draw()
    screen.live.finish()
    assert screen.text == ""


def test_a_model_cannot_send_commands_to_the_terminal() -> None:
    screen = Screen(60, 10)
    screen.live.add("before \x1b[2J\x1b]0;owned\x07 after \x9b31m \x7f")
    screen.live.draw()
    screen.live.finish()
    assert "before" in screen.text
    assert screen.emulated.title == ""


def test_no_line_is_filled_with_blanks_that_would_wrap() -> None:
    lines = rendered(TEXT, 60, Screen(60, 24).console)
    assert not [line for line in lines if line.removesuffix("\x1b[0m").endswith(" ")]
