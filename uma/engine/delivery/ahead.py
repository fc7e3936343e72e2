"""Events that were computed ahead of their time: kept for one reader, in order, until they are due."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import attrs

from uma.errors import UmaError
from uma.types import Event, Finished, Token


@attrs.define(eq=False)
class Ahead:
    """What waits for its time. Belongs to the Trio thread."""

    deliver: Callable[[Event | UmaError, float], None]
    """Takes an event that is due, and what time it is."""
    on_drop: Callable[[int], None]
    """Is told how many tokens were dropped."""
    waiting: deque[tuple[float, Event | UmaError]] = attrs.field(factory=deque, init=False)
    dropped: int = attrs.field(default=0, init=False)
    """Tokens that the reader was not given, because it cancelled before they were due."""
    _is_left: bool = attrs.field(default=False, init=False)

    def take(self, event: Event | UmaError, not_before_ms: float, now_ms: float) -> bool:
        """Deliver the next event, or keep it where it has come before its time: then the result is True.

        One that is due waits for nothing, and nothing waits longer: what came before it goes out with it. That is so
        for a failure, and for a token behind the last prompt, as nothing is paced then. After `leave` tokens that would
        have to wait are dropped, and all behind one that was.
        """
        is_due = not_before_ms <= now_ms
        if self._is_left and (self.dropped or not is_due) and self._drop(event):
            return False
        if is_due or self._is_left:
            self.release(math.inf, now_ms)
            self.deliver(event, now_ms)
            return False
        self.waiting.append((not_before_ms, event))
        return True

    def release(self, until_ms: float, now_ms: float) -> None:
        """Deliver what was kept until then."""
        while self.waiting and self.waiting[0][0] <= until_ms:
            self.deliver(self.waiting.popleft()[1], now_ms)

    def leave(self) -> None:
        """The reader has cancelled: tokens that wait are dropped, and what else waits is delivered."""
        self._is_left = True
        waiting, self.waiting = self.waiting, deque()
        for _, event in waiting:
            if not self._drop(event):
                self.deliver(event, math.inf)

    def without_dropped(self, last: Finished) -> Finished:
        """The last event, less the tokens that were never given: with such a request was cancelled."""
        if not self.dropped:
            return last
        usage = attrs.evolve(last.usage, completion_tokens=max(0, last.usage.completion_tokens - self.dropped))
        return attrs.evolve(last, reason="cancelled", usage=usage)

    def _drop(self, event: Event | UmaError) -> bool:
        """Leave out a token that the reader did not wait for; False for anything else."""
        if not isinstance(event, Token):
            return False
        self.dropped += 1
        self.on_drop(1)
        return True
