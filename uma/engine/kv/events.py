"""KV events: prefixes that this engine can reuse, as they change, for routers that send a prompt to the engine that has
its prefix. The disk tier reports nothing: its files must be read first, which is no reason to route a request here.

Every other tier reports runs of tokens: `tokens[start:end]` of a sequence, from its first token on. A run is stored
after the runs before it and removed before them, so within a tier whatever is held at a position is held at every
position before it. The same tokens can be stored more than once (computed by two sequences side by side, or held by two
tiers), and are then removed as often; a listener counts.
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
    """Memory of the context, held by running sequences and by cache."""
    MEMORY = "memory"
    """Snapshots in host memory."""
    DISK = "disk"
    """Snapshots as files. Not reported."""


@attrs.frozen
class Run:
    """Tokens at the positions from `start` to before `end` of their sequence."""

    start: int
    end: int
    tokens: Callable[[], array[int]]
    """All tokens of the sequence up to `end` or beyond. To be called within the event only: later they can differ. It
    copies, so a listener that waits for whole blocks calls it only when one is complete."""


class KvListener(Protocol):
    """Called for every change, in order, on the decode thread. Its methods return at once, never raise, and call
    nothing of the engine.
    """

    def stored(self, tier: Tier, run: Run) -> None:
        """Called when these tokens are held from now on, or once more."""

    def removed(self, tier: Tier, run: Run) -> None:
        """Called when these tokens are held once less."""

    def cleared(self, tier: Tier) -> None:
        """Called when the tier holds nothing any more."""


class KvEvents:
    """Passes changes to all listeners; without listeners nothing is built."""

    __slots__ = ("listeners",)

    def __init__(self) -> None:
        self.listeners: tuple[KvListener, ...] = ()

    def stored(self, tier: Tier, start: int, end: int, tokens: Callable[[], array[int]]) -> None:
        """Report that a run is held from now on."""
        for listener in self.listeners:
            listener.stored(tier, Run(start, end, tokens))

    def removed(self, tier: Tier, start: int, end: int, tokens: Callable[[], array[int]]) -> None:
        """Report that a run is about to be removed."""
        for listener in self.listeners:
            listener.removed(tier, Run(start, end, tokens))

    def cleared(self, tier: Tier) -> None:
        """Report that a tier is empty."""
        for listener in self.listeners:
            listener.cleared(tier)
