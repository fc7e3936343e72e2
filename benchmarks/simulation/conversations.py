"""Conversations that begin with one of many common prefixes, as those of agents do: by Zipf's law."""

from __future__ import annotations

import bisect
import itertools
import random

import attrs

from benchmarks.simulation.load import Session

PREFIXES = 1_000
"""Different common prefixes: together some ten times the KV cells of one worker."""
ZIPF = 1.0
"""The k-th most popular prefix is asked for in proportion to 1 / k to this power."""
TURNS = 4
"""Mean turns of a conversation."""
THINK_MS = 2_000.0
"""Mean time from an answer's end to the next turn."""
LONGEST_TOKENS = 8_000


@attrs.define(eq=False)
class Turn(Session):
    """One request of a conversation."""

    prefix: int = 0
    prefix_tokens: int = 0
    conversation: int = 0
    worker: int = 0
    """Where it was routed."""
    predicted_tokens: int = 0
    """Of its prompt, what the router took that worker to hold."""


class Conversations:
    """Makes first turns, and what follows an answer."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._keys = itertools.count(1)
        weights = [1 / rank**ZIPF for rank in range(1, PREFIXES + 1)]
        self._popularity = list(itertools.accumulate(weights))
        self._lengths = [min(4_000, max(64, round(self._rng.lognormvariate(6.6, 0.7)))) for _ in weights]

    def between_ms(self, per_second: float) -> float:
        """Time until the next conversation begins, where so many requests a second are wanted."""
        return self._rng.expovariate(per_second / TURNS / 1_000)

    def begin(self, now_ms: float) -> Turn:
        """The first turn of a new conversation."""
        at = bisect.bisect_left(self._popularity, self._rng.random() * self._popularity[-1])
        return self._turn(now_ms, at, next(self._keys), self._rng.choices((1, 0, -1), (0.3, 0.5, 0.2))[0], 0)

    def after(self, turn: Turn) -> Turn | None:
        """The turn that follows an answer; None at the conversation's end."""
        said = turn.prompt_tokens + turn.generated
        if self._rng.random() < 1 / TURNS or said > LONGEST_TOKENS:
            return None
        assert turn.done_ms is not None
        at_ms = turn.done_ms + self._rng.expovariate(1 / THINK_MS)
        return self._turn(at_ms, turn.prefix, turn.conversation, turn.row.lane, said - turn.prefix_tokens)

    def _turn(self, at_ms: float, prefix: int, conversation: int, lane: int, said: int) -> Turn:
        rng, length = self._rng, self._lengths[prefix]
        asked = min(2_000, max(8, round(rng.lognormvariate(4.1, 0.9))))
        output = min(400, max(4, round(rng.expovariate(1 / 80))))
        plain = Session.make(next(self._keys), lane, at_ms, length + said + asked, output)
        return Turn(
            plain.row,
            plain.prompt_tokens,
            output,
            plain.expected_ttft_ms,
            plain.experience,
            prefix=prefix,
            prefix_tokens=length,
            conversation=conversation,
        )
