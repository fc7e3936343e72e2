"""What a simulated worker holds of common prefixes and conversations, and what it tells the router of it.

Least recently used first, as in the engine: a prefix is used with every conversation that begins with it, so it goes
after all of them. Events count whole blocks.

A model with recurrent states begins only where a copy of its state is: at the end of a common prefix, and of what a
conversation has said. Memory holds so many copies; what has none any more is of no use, and is not told of as held.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs

from benchmarks.simulation.conversations import Turn
from benchmarks.simulation.load import Session

Node = tuple[str, int]
"""A common prefix, or what a conversation has said after it."""
Tell = Callable[[Node, int, int], None]
"""Takes a node, how many of its tokens are held from now on, and how many blocks that stores or removes."""


@attrs.define
class _Held:
    tokens: int
    pins: int = 0


class PrefixCache:
    """A worker's `Cache` of prefixes in its KV cells, with at most so many checkpoints, where there are any; 0: memory
    can be cut.
    """

    def __init__(self, block_size: int, tell: Tell, checkpoints: int = 0) -> None:
        self._block_size = block_size
        self._tell = tell
        self._most_ends = checkpoints or math.inf
        self._ends = 0
        """Nodes that are held, behind each of which a sequence can begin."""
        self._held: dict[Node, _Held] = {}
        """In order of use, the latest last."""
        self.tokens = 0
        self.pinned_tokens = 0

    def begin(self, session: Session) -> int:
        """See `Cache`."""
        assert isinstance(session, Turn)
        prefix, said = self._pin(("prefix", session.prefix)), self._pin(("said", session.conversation))
        is_whole = prefix == session.prefix_tokens
        return min(prefix + (said if is_whole else 0), session.prompt_tokens - 1)

    def read(self, session: Session) -> int:
        """See `Cache`: other conversations can begin with the prefix as soon as it is computed."""
        assert isinstance(session, Turn)
        return self._keep(("prefix", session.prefix), session.prefix_tokens)

    def end(self, session: Session) -> None:
        """See `Cache`."""
        assert isinstance(session, Turn)
        prefix, said = ("prefix", session.prefix), ("said", session.conversation)
        if session.row.prefill_left == 0:
            self._keep(said, session.prompt_tokens + session.generated - session.prefix_tokens)
        self._unpin(said)
        self._unpin(prefix)

    def shrink(self, tokens: int) -> None:
        """See `Cache`."""
        if self._is_small(tokens):
            return
        for node in [node for node, held in self._held.items() if not held.pins]:
            if self._is_small(tokens):
                return
            gone = self._held.pop(node)
            self._ends -= 1
            self.tokens -= gone.tokens
            self._tell(node, 0, -self._blocks(gone.tokens))

    def _is_small(self, tokens: int) -> bool:
        return self.tokens <= tokens and self._ends <= self._most_ends

    def _pin(self, node: Node) -> int:
        held = self._held.pop(node, None) or _Held(0)
        self._held[node] = held
        held.pins += 1
        if held.pins == 1:
            self.pinned_tokens += held.tokens
        return held.tokens

    def _unpin(self, node: Node) -> None:
        held = self._held[node]
        held.pins -= 1
        if held.pins == 0:
            self.pinned_tokens -= held.tokens
            if not held.tokens:
                del self._held[node]

    def _keep(self, node: Node, tokens: int) -> int:
        held = self._held[node]
        more = tokens - held.tokens
        if more <= 0:
            return 0
        blocks = self._blocks(tokens) - self._blocks(held.tokens)
        self._ends += held.tokens == 0
        held.tokens = tokens
        self.tokens += more
        self.pinned_tokens += more
        self._tell(node, tokens, blocks)
        return more

    def _blocks(self, tokens: int) -> int:
        return tokens // self._block_size
