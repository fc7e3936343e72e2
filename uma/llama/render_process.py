"""The child process that renders conversations, from its parent's side: killed where it takes too long."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from multiprocessing.spawn import get_executable
from typing import Any

from uma.llama import sandbox
from uma.llama.sandbox import HEADER_BYTES, MAX_TEXT_CHARS, UnusableError

DEADLINE_SEC = 2.0
"""Maximum time for one rendering. The longest conversation that a frame holds takes a tenth of it."""
START_SEC = 30.0
"""Maximum time for a child process to start, on a machine that is busy."""
MAX_ANSWER_BYTES = 8 * MAX_TEXT_CHARS

_PROGRAM = "import runpy, sys; sys.path[:] = {path!r}; runpy.run_path({file!r}, run_name='__main__')"


class RenderProcess:
    """One child process, or none at the moment. Belongs to one thread at a time.

    `setup` is the template's source and its tokens for the beginning and the end of text.
    """

    def __init__(self, setup: list[str]) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._is_fresh = True
        self._is_closed = False

    def start(self) -> None:
        """Start the child if there is none. Does not wait for it. Raises `UnusableError` where that is impossible."""
        if self._process is not None:
            return
        if self._is_closed:
            raise UnusableError("cannot be rendered: the model is closed")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # A session of its own: Ctrl-C in the parent's terminal is the parent's to act on.
                self._process = subprocess.Popen(
                    [_executable(), "-c", _PROGRAM.format(path=sys.path, file=sandbox.__file__)],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise UnusableError(f"cannot be rendered: no process can be started for it: {error}") from error
        self._sock, self._is_fresh = ours, True

    def render(self, conversation: dict[str, Any]) -> str:
        """The text of a conversation. Raises `UnusableError`, also for a child that had to be killed, or died."""
        self.start()
        try:
            answer = self._ask(conversation)
        except TimeoutError:
            self._kill()
            raise UnusableError(f"fails: it takes longer than {DEADLINE_SEC:g} s for these messages") from None
        except (OSError, EOFError, ValueError) as error:
            self._kill()
            raise UnusableError(f"fails: its process ended ({error or type(error).__name__})") from None
        if "text" not in answer:
            raise UnusableError(answer["problem"])
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """Kill the child, if there is one, and start no other. Harmless when repeated."""
        self._is_closed = True
        self._kill()

    def _kill(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ask(self, conversation: dict[str, Any]) -> dict[str, Any]:
        if self._is_fresh:
            started_by = time.monotonic() + START_SEC
            self._send(self._setup, started_by)
            self._answer(started_by)  # it is ready
            self._is_fresh = False
        due = time.monotonic() + DEADLINE_SEC
        self._send(conversation, due)
        return self._answer(due)

    def _send(self, message: Any, due: float) -> None:
        payload = json.dumps(message).encode()
        self._until(due).sendall(len(payload).to_bytes(HEADER_BYTES, "little") + payload)

    def _answer(self, due: float) -> dict[str, Any]:
        size = int.from_bytes(self._receive(HEADER_BYTES, due), "little")
        if size > MAX_ANSWER_BYTES:
            raise ValueError("its answer is too long")
        answer: dict[str, Any] = json.loads(self._receive(size, due))
        return answer

    def _receive(self, size: int, due: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            more = self._until(due).recv(min(size - len(data), 2**20))
            if not more:
                raise EOFError("it has closed its end")
            data += more
        return bytes(data)

    def _until(self, due: float) -> socket.socket:
        assert self._sock is not None
        left = due - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        return self._sock


def _executable() -> str:
    found = get_executable()
    return found.decode() if isinstance(found, bytes) else str(found)
