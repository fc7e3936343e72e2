"""llama-batched-bench: llama.cpp's own figure for how fast many streams can decode, without any server."""

from __future__ import annotations

import json
from collections.abc import Sequence

import attrs
import trio

from benchmarks.cache import peer_binary
from benchmarks.models import BenchModel


@attrs.frozen
class BatchedBench:
    """One line of its output."""

    streams: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float


async def batched_bench(
    model: BenchModel, *, streams: Sequence[int], prompt: int, generated: int, layout: str, threads: int
) -> list[BatchedBench]:
    """Run it once for all numbers of streams. Cancelled, it is ended. Raises `subprocess.CalledProcessError`."""
    # Buffers of one stream are multiples of 256 cells; it also needs room for its warm-up.
    cells = max(streams) * ((prompt + generated + 255) // 256 * 256)
    command = [str(peer_binary("llama-batched-bench")), "--model", str(model.path), "--threads", str(threads)]
    command += ["-c", str(cells), "-npp", str(prompt), "-ntg", str(generated), "-npl", ",".join(map(str, streams))]
    command += ["--output-format", "jsonl", *(["--kv-unified"] if layout == "unified" else [])]
    finished = await trio.run_process(command, capture_stdout=True, capture_stderr=True)
    lines = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith(b"{")]
    return [BatchedBench(line["pl"], line["speed_tg"], line["speed_pp"]) for line in lines]
