"""llama-batched-bench: llama.cpp's own figure for how fast many streams can decode, without any server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

import attrs

from benchmarks.cache import peer_binary
from benchmarks.models import BenchModel


@attrs.frozen
class BatchedBench:
    """One line of its output."""

    streams: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float


def batched_bench(
    model: BenchModel, *, streams: Sequence[int], prompt: int, generated: int, layout: str, threads: int
) -> list[BatchedBench]:
    """Run it once for all numbers of streams. Blocks; call it from a worker thread."""
    cells = max(streams) * (prompt + generated)
    command = [str(peer_binary("llama-batched-bench")), "--model", str(model.path), "--threads", str(threads)]
    command += ["-c", str(cells), "-npp", str(prompt), "-ntg", str(generated), "-npl", ",".join(map(str, streams))]
    command += ["--output-format", "jsonl", *(["--kv-unified"] if layout == "unified" else [])]
    output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [BatchedBench(line["pl"], line["speed_tg"], line["speed_pp"]) for line in lines]
