"""Child processes: what counts is the time that they have a CPU for."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness import PATIENCE_SEC
from uma import child as module
from uma.child import Child, ChildBusyError, ChildClosedError, ChildEndedError, Children

DEADLINE_SEC = 0.2
PROGRAM = """
import time
from uma.child import serve

def answer(question):
    time.sleep(question["sleeps_sec"])  # as long as nothing runs, as on a machine that is busy
    while question["is_endless"]:
        pass
    return question

serve(lambda setup: answer, 2**33)
"""


CONFINED = """
import os, socket
from uma.child import confine, serve

def prepare(_):
    confine()
    return lambda question: [refused(do) for do in (lambda: open("/dev/null"), socket.socket, os.pipe)] + [secret()]

def refused(do):
    try:
        do()
    except OSError:
        return True

def secret():
    return os.environ.get("HF_TOKEN")

serve(prepare, 2**33)
"""


def test_a_confined_child_opens_nothing_and_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    (tmp_path / "confined.py").write_text(CONFINED)
    child = Child(str(tmp_path / "confined.py"), None, deadline_sec=DEADLINE_SEC, max_answer_bytes=1_000)
    assert child.ask(None) == [True, True, True, None]
    child.close()


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    child = Child(str(program), None, deadline_sec=DEADLINE_SEC, max_answer_bytes=1_000)
    yield child
    child.close()


def asked(sleeps_sec: float = 0.0, *, is_endless: bool = False) -> dict[str, object]:
    return {"sleeps_sec": sleeps_sec, "is_endless": is_endless}


def test_time_without_a_cpu_is_not_the_question_s_fault(child: Child) -> None:
    slow = asked(2 * DEADLINE_SEC)
    assert [child.ask(slow), child.ask(slow)] == [slow, slow]


def test_a_question_that_takes_too_much_cpu_time_ends_alone(child: Child) -> None:
    with pytest.raises(TimeoutError):
        child.ask(asked(is_endless=True))
    assert child.ask(asked()) == asked()


def test_a_child_that_not_even_sigkill_ends_is_left_and_another_is_started(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            super().wait()
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Stuck)
        with pytest.raises(ChildEndedError):
            child.ask(asked(is_endless=True))
    assert child.ask(asked()) == asked()


def test_children_that_are_at_work_are_ended_by_their_close(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    children = Children(2, str(tmp_path / "program.py"), None, deadline_sec=PATIENCE_SEC, max_answer_bytes=1_000)
    begun = threading.Barrier(3)

    def ask() -> object:
        with children.taken() as child:
            assert child.ask(asked()) == asked()
            begun.wait(PATIENCE_SEC)
            return child.ask(asked(is_endless=True))

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask) for _ in range(2)]
        begun.wait(PATIENCE_SEC)
        for closing in [threads.submit(children.close) for _ in range(2)]:
            closing.result(PATIENCE_SEC)
    assert [type(each.exception()) for each in asking] == [ChildClosedError] * 2


def test_a_child_that_has_no_cpu_for_very_long_is_told_apart(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    assert child.ask(asked()) == asked()
    monkeypatch.setattr(module, "STALL_SEC", DEADLINE_SEC)
    with pytest.raises(ChildBusyError):
        child.ask(asked(100.0))
    monkeypatch.undo()
    assert child.ask(asked()) == asked()
