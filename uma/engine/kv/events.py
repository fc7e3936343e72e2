"""KV events: the prefixes that this engine can reuse, as they change, for routers that send a prompt to the engine that
knows its prefix. What only the disk has must be read first: no reason to route a request here, so it reports nothing.

Each other tier reports runs of tokens: `tokens[start:end]` of a sequence that begins at its first token. A run is
stored after the runs before it and removed before them, so whatever is held at a position is held at every position
before it, within a tier. The same tokens can be stored more than once (two sequences computed them side by side, or two
tiers hold them) and are removed as often; a listener counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import attrs


class Tier(Enum):
    """Where KV is held."""

    CELLS = "cells"
    """The context's own memory, by running sequences and by cache."""
    MEMORY = "memory"
    """Snapshots in host memory."""
    DISK = "disk"
    """Snapshots as files. Not reported."""


@attrs.frozen
class Run:
    """Tokens at the positions from `start` to before `end`, counted from the beginning of their sequence."""

    start: int
    end: int
    tokens: Callable[[], array[int]]
    """All tokens of the sequence from its beginning to `end` or beyond. Only during the call: later they can differ.
    It copies, so a listener that waits for whole blocks calls it only when one is complete."""


class KvListener(Protocol):
    """Called with every change, in order, on the decode thread. Its methods return at once, never raise, and call
    nothing of the engine.
    """

    def stored(self, tier: Tier, run: Run) -> None:
        """Called where these tokens are held now."""

    def removed(self, tier: Tier, run: Run) -> None:
        """Called where these tokens are held once less."""

    def cleared(self, tier: Tier) -> None:
        """The tier holds nothing any more."""


class KvEvents:
    """Passes changes on to all listeners, and builds nothing where there are none."""

    __slots__ = ("listeners",)

    def __init__(self) -> None:
        self.listeners: tuple[KvListener, ...] = ()

    def stored(self, tier: Tier, start: int, end: int, tokens: Callable[[], array[int]]) -> None:
        """A run is held now."""
        for listener in self.listeners:
            listener.stored(tier, Run(start, end, tokens))

    def removed(self, tier: Tier, start: int, end: int, tokens: Callable[[], array[int]]) -> None:
        """A run is about to go."""
        for listener in self.listeners:
            listener.removed(tier, Run(start, end, tokens))

    def cleared(self, tier: Tier) -> None:
        """A tier is empty."""
        for listener in self.listeners:
            listener.cleared(tier)
