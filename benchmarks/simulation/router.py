"""A router in front of simulated workers, as Dynamo's KV router decides, and the usual round robin.

Dynamo's router sends a request where prompt blocks that must still be read plus blocks in use are fewest. It knows what
workers hold by their events, which are late, and what it has sent them itself at once.
"""

from __future__ import annotations

import numpy as np

from benchmarks.simulation.conversations import Turn
from benchmarks.simulation.prefix_cache import Node


class KvRouter:
    """Goes by what workers have told of their blocks."""

    def __init__(self, workers: int, block_size: int, seed: int) -> None:
        self._block_size = block_size
        self._rng = np.random.default_rng(seed)
        self._held: dict[Node, dict[int, int]] = {}
        self._to_read = np.zeros(workers)
        """Blocks of prompts that each worker has still to read, as far as the router has sent them."""
        self._in_use = np.zeros(workers)

    def told(self, worker: int, node: Node, tokens: int) -> None:
        """An event is applied."""
        holders = self._held.setdefault(node, {})
        if tokens:
            holders[worker] = tokens
        else:
            holders.pop(worker, None)

    def route(self, turn: Turn) -> int:
        """The worker for a request."""
        size = self._block_size
        overlap = np.zeros(len(self._in_use))
        said = self._held.get(("said", turn.conversation), {})
        for worker, tokens in self._held.get(("prefix", turn.prefix), {}).items():
            whole = tokens + said.get(worker, 0) if tokens == turn.prefix_tokens else tokens
            overlap[worker] = min(whole, turn.prompt_tokens) // size
        blocks = turn.prompt_tokens // size
        cost = self._to_read + (blocks - overlap) + self._in_use
        worker = int(self._rng.choice(np.flatnonzero(cost == cost.min())))
        turn.predicted_tokens = int(overlap[worker]) * size
        self._to_read[worker] += blocks - overlap[worker]
        self._in_use[worker] += blocks
        return worker

    def had_first_token(self, turn: Turn) -> None:
        """Its prompt is read."""
        self._to_read[turn.worker] -= turn.prompt_tokens // self._block_size - turn.predicted_tokens // self._block_size

    def ended(self, turn: Turn) -> None:
        """It is over."""
        self._in_use[turn.worker] -= turn.prompt_tokens // self._block_size


class RoundRobin:
    """One worker after the other."""

    def __init__(self, workers: int, block_size: int, seed: int) -> None:
        self._workers = workers
        self._next = 0

    def told(self, worker: int, node: Node, tokens: int) -> None:
        """It listens to no events."""

    def route(self, turn: Turn) -> int:
        """The next in turn."""
        self._next += 1
        return self._next % self._workers

    def had_first_token(self, turn: Turn) -> None:
        """It counts nothing."""

    def ended(self, turn: Turn) -> None:
        """It counts nothing."""


Router = KvRouter | RoundRobin
ROUTERS: dict[str, type[Router]] = {"kv": KvRouter, "round robin": RoundRobin}
