"""Times how long a context takes to have KV memory of another layout: `python -m benchmarks.remake MODEL THREADS`.

In a process of its own, where `--as-it-comes` leaves out what UMA does about it. Prints a line of JSON for each change.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from uma.engine.sizing import POOL_SEQUENCE_IDS
from uma.llama import hugepages
from uma.llama.batch import Batch
from uma.llama.context import DONE, Context, ContextParams
from uma.llama.model import Model

LAYOUTS = {
    "12 buffers of 512": (12, 512, False),
    "33 buffers of 256": (33, 256, False),
    "one buffer of 32,768": (POOL_SEQUENCE_IDS, 32_768, True),
}
"""Sequence ids, cells of each, and whether all share them: some of what UMA changes between with its defaults."""
ROWS = 4


def main() -> None:
    """Change to each layout in turn, so often, and decode a few rows there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("threads", type=int)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--as-it-comes", action="store_true")
    args = parser.parse_args()
    if args.as_it_comes:
        hugepages.KV_TAKEN = "no line says so"
    wanted = {name: _params(*layout, args.threads) for name, layout in LAYOUTS.items()}
    with Model.load(args.model) as model, Context(model, wanted["one buffer of 32,768"]) as context:
        _decode(context)
        for _ in range(args.turns):
            for name, params in wanted.items():
                began_sec = time.perf_counter()
                context.remake(params)
                made_sec = time.perf_counter()
                _decode(context)
                first_sec = time.perf_counter()
                figures = {"made_ms": 1000 * (made_sec - began_sec), "first_batch_ms": 1000 * (first_sec - made_sec)}
                print(json.dumps({"layout": name, **figures}))


def _params(ids: int, share: int, is_unified: bool, threads: int) -> ContextParams:
    return ContextParams(
        n_ctx=share if is_unified else ids * share,
        n_seq_max=ids,
        n_threads=threads,
        n_threads_batch=threads,
        kv_unified=is_unified,
    )


def _decode(context: Context) -> None:
    batch = Batch(ROWS)
    for row in range(ROWS):
        batch.add([row], 0, row, last_logits=True)
    code = context.decode(batch)
    if code != DONE:
        raise RuntimeError(f"llama_decode: {code}")


if __name__ == "__main__":
    main()
