"""A client that streams short answers, one after another, and notes each wait for an event and each wrong token."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import attrs

from harness import Raw, ask
from uma.errors import IdleTimeout

PROMPTS = tuple(f"Once upon a time there were {number} canaries" for number in range(4))
MAX_TOKENS = 48


IDLE = IdleTimeout.code
"""What a session is told that the server ends because nothing came from it."""
LONG_MS = 10.0
"""Minimum wait (ms) whose cause is looked up in the system's counters."""


class Cores:
    """What a process has had of the cores, as the system counts it for each of its threads."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._main = str(pid)
        self._before = self._read()
        self._stolen_before_ms = _stolen_ms()

    def own_ms(self, wait_ms: float) -> float:
        """How much of a wait since the last call was the process's own doing, and not a wait for a core.

        That is the time in which its decode thread computed, or waited for anything but a core, and the machine under
        this one had not taken the cores away. (The Trio thread is busy with attackers anyway, whatever is waited for.)
        All of it where the system does not tell.
        """
        before, self._before = self._before, self._read()
        stolen_before_ms, self._stolen_before_ms = self._stolen_before_ms, _stolen_ms()
        stolen_ms = self._stolen_before_ms - stolen_before_ms
        others = {thread: now for thread, now in self._before.items() if thread != self._main and thread in before}
        if not others:
            return wait_ms
        busiest = max(others, key=lambda thread: others[thread][0])
        computed_ms, ready_ms = (others[busiest][each] - before[busiest][each] for each in (0, 1))
        return min(wait_ms, max(computed_ms, wait_ms - ready_ms - stolen_ms))

    def _read(self) -> dict[str, tuple[float, float]]:
        threads = {}
        for file in self._tasks.glob("*/schedstat"):
            with suppress(OSError):  # a thread that has ended meanwhile
                computed, ready, _ = map(int, file.read_text().split())
                threads[file.parent.name] = (computed / 1e6, ready / 1e6)
        return threads


def _stolen_ms() -> float:
    """Time in which another virtual machine had this one's cores, all cores together."""
    with suppress(OSError, IndexError):
        ticks = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
        return 1000 * ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


@attrs.define
class Sightings:
    """What the canary saw."""

    answers: int = 0
    waits_ms: list[float] = attrs.field(factory=list)
    """Between two events of an answer, and from asking to the first one."""
    own_waits_ms: list[float] = attrs.field(factory=list)
    """The same, without what of them was a wait for a core."""
    problems: list[str] = attrs.field(factory=list)

    @property
    def longest_ms(self) -> float:
        """The longest wait."""
        return max(self.waits_ms, default=0.0)

    @property
    def longest_own_ms(self) -> float:
        """The longest wait that the server itself caused."""
        return max(self.own_waits_ms, default=0.0)

    def usual_ms(self, percent: int) -> float:
        """Of the server's own part of the waits, the one that so many of all did not exceed."""
        waits = sorted(self.own_waits_ms)
        return waits[len(waits) * percent // 100] if waits else 0.0


class Canary:
    """One session. What it gets first, while it is alone, is what it expects from then on."""

    def __init__(self, socket: Path, pid: int) -> None:
        self._socket = socket
        self._cores = Cores(pid)
        self._expected: dict[str, list[int]] = {}
        self._connect()

    def _connect(self) -> None:
        self._raw = Raw(self._socket)
        self._raw.hello()

    def watch(self, goes_on: Callable[[], bool]) -> Sightings:
        """Ask again and again, and at least once for each prompt."""
        seen = Sightings()
        while goes_on() or seen.answers < len(PROMPTS):
            if self._ask(PROMPTS[seen.answers % len(PROMPTS)], seen):
                seen.answers += 1
        return seen

    def _ask(self, prompt: str, seen: Sightings) -> bool:
        """Whether there was an answer; False where the session was over and is a new one now."""
        tokens: list[int] = []
        self._cores.own_ms(0.0)
        before = time.perf_counter()
        self._raw.send(ask("canary", prompt=prompt, max_tokens=MAX_TOKENS, priority=1))
        while True:
            event = self._raw.receive()
            if event is None or event.get("code") == IDLE:
                # Idle is what this process is to the server while it gets no core; that says nothing of the server.
                if event is None:
                    seen.problems.append(f"the server closed the session of {prompt!r}, without a word")
                self._connect()
                return False
            now = time.perf_counter()
            wait_ms = (now - before) * 1000
            seen.waits_ms.append(wait_ms)
            seen.own_waits_ms.append(self._cores.own_ms(wait_ms) if wait_ms > LONG_MS else wait_ms)
            before = time.perf_counter()
            if event["event"] != "token":
                break
            tokens.append(event["token_id"])
        if event["event"] != "eos":
            seen.problems.append(f"the canary was refused: {event}")
        elif tokens != self._expected.setdefault(prompt, tokens):
            seen.problems.append(f"the canary got other tokens than alone for {prompt!r}: {tokens}")
        return True
