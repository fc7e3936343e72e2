"""Texts are rendered where they can be stopped: in a child process, with the result of rendering them here."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from test_page_markdown import LESSON

from uma.http.page.growing import GrowingText, plain
from uma.http.page.markdown import parse, render
from uma.http.page.renderer import Renderer


@contextmanager
def rendering() -> Iterator[tuple[Renderer, psutil.Process]]:
    """A renderer that has rendered, and its child process."""
    renderer, before = Renderer(), set(psutil.Process().children())
    try:
        assert renderer.render("*a*") == ["<p><em>a</em></p>\n"]
        (child,) = set(psutil.Process().children()) - before
        yield renderer, child
    finally:
        renderer.close()


def test_a_child_renders_as_this_process_does() -> None:
    with rendering() as (renderer, _):
        assert renderer.render(LESSON) == render(LESSON)
        here, there = GrowingText(parse, render), GrowingText(renderer.parse, renderer.render)
        for end in range(0, len(LESSON), 7):
            here.update(LESSON[:end])
            there.update(LESSON[:end])
            assert there.blocks == here.blocks
        there.finish(LESSON)
        assert there.blocks == render(LESSON)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_text_whose_rendering_gives_no_answer_is_shown_as_it_is_and_the_next_one_rendered(number: int) -> None:
    with rendering() as (renderer, child):
        child.send_signal(number)
        growing = GrowingText(renderer.parse, renderer.render)
        growing.update("*b* < c")
        assert growing.blocks == [plain("*b* < c")]
        assert not child.is_running()
        growing.update("*b* < c d")
        assert growing.blocks == ["<p><em>b</em> &lt; c d</p>\n"]


def imported_by(statement: str) -> set[str]:
    """Names of all that a new process imports by it."""
    command = [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules)"]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def test_the_server_imports_nothing_of_what_renders_or_tests_and_what_renders_nothing_of_the_server() -> None:
    renders = {"nh3", "markdown_it", "pygments"}
    assert renders < imported_by("import uma.http.page.markdown")
    assert not (renders | {"pytest"}) & imported_by("import uma.server, uma.http.serve")
    assert not {"trio", "starlette", "uma.types"} & imported_by("import uma.http.page.markdown")


def test_no_child_process_is_left_behind() -> None:
    with rendering() as (renderer, child):
        renderer.close()
        assert not child.is_running()
        assert renderer.render("*a*") == [plain("*a*")]


def test_an_answer_that_was_not_read_to_its_end_does_not_answer_the_next_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rendering() as (renderer, _):
        with monkeypatch.context() as patched:
            patched.setattr("uma.child.Child._answer", lambda *_: (_ for _ in ()).throw(MemoryError))
            with pytest.raises(MemoryError):
                renderer.render("*of one reader*")
        assert renderer.render("*of another*") == ["<p><em>of another</em></p>\n"]
