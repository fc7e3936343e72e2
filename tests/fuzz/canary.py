"""A client that streams short answers, one after another, and notes each wait for an event and each wrong token."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import attrs

from harness import Raw, ask

PROMPTS = tuple(f"Once upon a time there were {number} canaries" for number in range(4))
MAX_TOKENS = 48


@attrs.define
class Sightings:
    """What the canary saw."""

    answers: int = 0
    waits_ms: list[float] = attrs.field(factory=list)
    """Between two events of an answer, and from asking to the first one."""
    problems: list[str] = attrs.field(factory=list)

    @property
    def longest_ms(self) -> float:
        """The longest wait."""
        return max(self.waits_ms, default=0.0)

    def percentile(self, percent: int) -> float:
        """The wait within which so many of all ended."""
        waits = sorted(self.waits_ms)
        return waits[len(waits) * percent // 100] if waits else 0.0


class Canary:
    """One session. What it gets first, while it is alone, is what it expects from then on."""

    def __init__(self, socket: Path) -> None:
        self._raw = Raw(socket)
        self._raw.hello()
        self._expected: dict[str, list[int]] = {}

    def watch(self, goes_on: Callable[[], bool]) -> Sightings:
        """Ask again and again, and at least once for each prompt."""
        seen = Sightings()
        while goes_on() or seen.answers < len(PROMPTS):
            self._ask(PROMPTS[seen.answers % len(PROMPTS)], seen)
            seen.answers += 1
        return seen

    def _ask(self, prompt: str, seen: Sightings) -> None:
        tokens: list[int] = []
        before = time.perf_counter()
        self._raw.send(ask("canary", prompt=prompt, max_tokens=MAX_TOKENS, priority=1))
        while True:
            event = self._raw.next()
            now = time.perf_counter()
            seen.waits_ms.append((now - before) * 1000)
            before = now
            if event["event"] != "token":
                break
            tokens.append(event["token_id"])
        if event["event"] != "eos":
            seen.problems.append(f"the canary was refused: {event}")
        elif tokens != self._expected.setdefault(prompt, tokens):
            seen.problems.append(f"the canary got other tokens than alone for {prompt!r}: {tokens}")
