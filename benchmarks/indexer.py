"""How many blocks a second Dynamo's indexer takes in: what one router can know of, by one thread.

    python -m benchmarks.indexer            # needs Dynamo (docs/many-machines.md)

Workers tell of conversations as `uma worker` does: the blocks of a prompt as one event, those of an answer one by one.
What this prints is the `--router-blocks` of `python -m benchmarks.simulate --workers`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator
from random import Random
from statistics import median
from typing import Any

import orjson

PROMPT_BLOCKS, ANSWER_BLOCKS = 45, 8
"""Of a turn: 720 tokens that are often common, 128 of an answer, in blocks of 16."""
REPEATS = 5


def events(workers: int, turns: int, rng: Random) -> Iterator[tuple[int, int, bytes]]:
    """Worker, number of blocks, and the event as the indexer reads it."""
    for number in range(turns):
        parent, worker = None, number % workers
        for count in (PROMPT_BLOCKS, *[1] * ANSWER_BLOCKS):
            blocks = [
                {"block_hash": rng.getrandbits(63), "tokens_hash": rng.getrandbits(63), "mm_extra_info": None}
                for _ in range(count)
            ]
            stored: dict[str, Any] = {"parent_hash": parent, "blocks": blocks}
            parent = blocks[-1]["block_hash"]
            yield worker, count, orjson.dumps({"event_id": number, "data": {"stored": stored}, "dp_rank": 0})


def blocks_per_second(told: list[tuple[int, int, bytes]]) -> float:
    """Apply all events to a new tree, and wait until it has."""
    from dynamo.llm import RadixTree  # noqa: PLC0415  (only where Dynamo is installed)

    tree = RadixTree()
    began = time.perf_counter()
    for worker, _, event in told:
        tree.apply_event(worker, event)
    tree.find_matches([0])
    return sum(count for _, count, _ in told) / (time.perf_counter() - began)


def main() -> int:
    """Print the median of some runs. Exit code 1 with one sentence where Dynamo is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.indexer", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--workers", type=int, default=100, help="workers that tell of their blocks (default 100)")
    parser.add_argument("--turns", type=int, default=4_000, help="turns of conversations (default 4000)")
    args = parser.parse_args()
    if importlib.util.find_spec("dynamo") is None:
        print("indexer: Dynamo is not installed; docs/many-machines.md says how", file=sys.stderr)
        return 1
    told = list(events(args.workers, args.turns, Random(0)))
    rates = [blocks_per_second(told) for _ in range(REPEATS)]
    size = sum(len(event) for _, _, event in told) / len(told)
    print(f"{median(rates):,.0f} blocks a second ({min(rates):,.0f} to {max(rates):,.0f}) by one thread, "
          f"{len(told):,} events of {size:,.0f} bytes from {args.workers} workers")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
