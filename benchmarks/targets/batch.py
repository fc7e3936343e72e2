"""`uma batch` as a shell starts it, in a process of its own, and what its result file has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

import attrs
import trio

from benchmarks.targets.base import Process, StartError, environment

POLL_SEC = 0.05
"""Between two looks at a result file."""
MAX_EVENT_BYTES = 4_096


@attrs.frozen
class Job:
    """One run of the command."""

    process: Process
    out: Path
    told: Path
    """Its events, a line of JSON each."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def events(self) -> list[dict[str, Any]]:
        """Those that it has told so far."""
        lines = self.told.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def newest(self) -> dict[str, Any] | None:
        """The last of these; None before the first."""
        with self.told.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_EVENT_BYTES))
            lines = file.read().split(b"\n")[:-1]
        return json.loads(lines[-1]) if lines else None

    async def ended(self) -> int:
        """Its exit code, once it has ended. Raises `StartError` where it could not run to its end."""
        code = await trio.to_thread.run_sync(self.process.popen.wait, abandon_on_cancel=True)
        if code not in (0, 1):
            raise StartError(f"uma batch ended with {code}:\n{self.process.tail()}")
        return code

    async def reached(self, rows: int) -> bool:
        """Wait until the result file has so many lines; False where the job ended before."""
        while (found := lines_of(self.out)) < rows:
            if self.process.popen.poll() is not None:
                return False
            await trio.sleep(POLL_SEC)
        return found >= rows

    def kill(self) -> bool:
        """SIGKILL, and wait until it is gone; whether that was what ended it."""
        self.process.popen.kill()
        return self.process.popen.wait() == -signal.SIGKILL


@asynccontextmanager
async def batch_job(rows: Path, out: Path, *options: str) -> AsyncIterator[Job]:
    """Run the command for the block; killed with it, where it has not ended."""
    command = [sys.executable, "-m", "uma", "batch", str(rows), "-o", str(out), "--json", *options]
    with (
        tempfile.NamedTemporaryFile(prefix="uma-bench-", suffix=".jsonl") as told,
        tempfile.NamedTemporaryFile(prefix="uma-bench-", suffix=".log") as log,
    ):
        popen = _spawn(command, told.file, log.file)
        job = Job(Process(popen, Path(log.name)), out, Path(told.name))
        try:
            yield job
        finally:
            job.kill()


def _spawn(command: Sequence[str], told: IO[bytes], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=told, stderr=log, env=environment())


def lines_of(path: Path) -> int:
    """Lines of a file; 0 where it is not there yet."""
    try:
        with path.open("rb") as file:
            return sum(piece.count(b"\n") for piece in iter(lambda: file.read(2**20), b""))
    except FileNotFoundError:
        return 0


def chat_row(number: int, content: str, **sampling: Any) -> str:
    """A row of a chat with one message, as OpenAI's batch files have it."""
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **sampling}
    row = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(row) + "\n"
