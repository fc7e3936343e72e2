"""A model's own process, and how it ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness import PATIENCE_SEC, until
from uma.config import RuntimeConfig
from uma.supervisor import child
from uma.supervisor.child import child_config, running


async def test_a_process_that_not_even_sigkill_ends_holds_up_nothing_and_is_told_of(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends, stuck = threading.Event(), list[subprocess.Popen[bytes]]()

    class Stuck(subprocess.Popen[bytes]):
        def poll(self) -> int | None:
            return super().poll() if ends.is_set() else None

        def wait(self, timeout: float | None = None) -> int:
            assert ends.wait(PATIENCE_SEC)
            return super().wait(timeout)

    def fails(_: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(subprocess, "Popen", Stuck)
    monkeypatch.setattr(child, "KILL_SEC", 0.01)
    try:
        with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError):
            async with running("tiny", child_config(RuntimeConfig(), str(tiny), 2**30), fails, fails, stuck.append):
                pass
        assert "event=model.not_ended model=tiny" in caplog.text
        assert [process.poll() for process in stuck] == [None]
    finally:
        ends.set()


PARENT = """
import sys
from functools import partial
import trio
from uma.config import RuntimeConfig
from uma.supervisor.child import child_config, running

async def main():
    sys.path.insert(0, sys.argv[1])
    said = partial(print, flush=True)
    async with running("tiny", child_config(RuntimeConfig(), "any", 2**30), said, said, said):
        pass

trio.run(main)
"""
"""A program that starts a model's process, tells its id, and waits for it."""


def test_a_process_that_is_stopped_while_it_imports_ends_with_its_parent(tmp_path: Path) -> None:
    # What it imports in place of Trio stops it.
    (tmp_path / "trio.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n")
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            until(lambda: state(pid), lambda now: now == "T")
            parent.kill()
            until(lambda: state(pid), lambda now: now in ("", "Z"))
        finally:
            parent.kill()
            if state(pid):
                os.kill(pid, signal.SIGKILL)


def state(pid: int) -> str:
    """The letter that Linux has for what a process does; none of one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
