"""A model's own process, and how it ends."""

from __future__ import annotations

import logging
import subprocess
import threading
from pathlib import Path

import pytest

from harness import PATIENCE_SEC
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
