"""LoRA adapters: gaps of streams while two sets of adapters take turns, beside those of as many streams with one set.

    python -m benchmarks.reference                # fetches the models
    python -m benchmarks.adapters                 # eight streams; the exit code is 1 where the bar is missed

Both run in turn in this process, through the engine that every server has, with random adapters of every matrix. On a
machine that does other things only the ratio counts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import get_args

import gguf
import numpy as np
import trio
from rich.console import Console
from rich.table import Table

from benchmarks.reference import RealModel, fetch_model
from uma import Request, RuntimeConfig, SamplingParams, open_engine
from uma.engine import Engine
from uma.llama import header
from uma.types import Token

STREAMS, TOKENS, ROUNDS, RANK = 8, 100, 3, 8
SKIPPED = 20
"""First tokens of each stream, which come while the others' prompts are read."""
MAX_GAP = 2.0
"""Worst gap of a stream with two sets, of that with one."""


def write_adapter(path: Path, model: Path, seed: int) -> None:
    """An adapter of every matrix of the model's layers."""
    read, rng = header.whole_header(model), np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, str(read.metadata["general.architecture"]))
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    for tensor in read.tensors:
        if len(tensor.shape) == 2 and tensor.name.startswith("blk."):
            columns, rows = tensor.shape
            for side, shape in (("lora_a", (RANK, columns)), ("lora_b", (rows, RANK))):
                values = rng.standard_normal(shape) * (0.01 if side == "lora_b" else columns**-0.5)
                writer.add_tensor(f"{tensor.name}.{side}", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


async def gaps(engine: Engine, names: Sequence[str]) -> list[float]:
    """Gaps (ms) of streams at once, one for each of the names."""
    found = list[float]()

    async def follow(index: int, name: str) -> None:
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0)
        at = list[float]()
        async with engine.generate(Request(f"{index}", prompt=f"{index}.", sampling=sampling, model=name)) as events:
            async for event in events:
                if isinstance(event, Token):
                    at.append(1_000 * time.perf_counter())
        found.extend(later - earlier for earlier, later in pairwise(at[SKIPPED:]))

    async with trio.open_nursery() as nursery:
        for index, name in enumerate(names):
            nursery.start_soon(follow, index, name)
    return found


async def measured(model: RealModel, threads: int) -> tuple[Table, bool]:
    """A table of both, and whether the bar is met by the median of the rounds."""
    path, shown = fetch_model(model), Table("", "median gap, ms", "p99", "worst, median of the rounds")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{name}.gguf" for name in ("one", "two")]
        for seed, file in enumerate(files):
            write_adapter(file, path, seed)
        lora = ",".join(f"{file.stem}={file}" for file in files)
        config = RuntimeConfig(model=str(path), lora=lora, threads=threads, n_ctx=8_192)
        ways = {"one set": ["m+one"] * STREAMS, "two sets in turn": ["m+one", "m+two"] * (STREAMS // 2)}
        rounds: dict[str, list[list[float]]] = {way: [] for way in ways}
        async with open_engine(config) as engine:
            for _ in range(ROUNDS):
                for way, names in ways.items():
                    rounds[way].append(await gaps(engine, names))
    worst = {way: median(map(max, every)) for way, every in rounds.items()}
    for way, every in rounds.items():
        together = np.concatenate(every)
        shown.add_row(way, f"{np.median(together):.1f}", f"{np.percentile(together, 99):.1f}", f"{worst[way]:.1f}")
    one, two = worst.values()
    shown.title = f"{STREAMS} streams of {model}: worst gap with two sets {two / one:.2f} of that with one"
    return shown, two <= MAX_GAP * one


def main() -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.adapters", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2", choices=get_args(RealModel), help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: the engine's choice")
    options = parser.parse_args()
    shown, is_met = trio.run(measured, options.model, options.threads)
    Console().print(shown)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
