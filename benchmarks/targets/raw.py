"""The baseline as a target: a process of `benchmarks.raw`, asked for whole jobs instead of streams."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import orjson
import trio

from benchmarks.models import BenchModel
from benchmarks.raw import N_UBATCH, Job, PieceJob, PieceResult, Result, RowsJob, RowsResult, StormJob, StormResult
from benchmarks.raw_mixed import MixedJob, MixedResult
from benchmarks.targets.base import HUGE_PAGES, free_port, server_process
from benchmarks.targets.llama_server import LlamaServer, is_healthy


class RawError(Exception):
    """The baseline's process ended before it answered."""


@attrs.frozen
class Raw:
    """A running baseline."""

    name: str
    popen: subprocess.Popen[bytes]

    async def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, common: Sequence[int] = ()) -> Result:
        """Read these prompts together, after what they have in `common`, and generate `max_tokens` in each."""
        job = Job([list(prompt) for prompt in prompts], max_tokens, list(common))
        return Result(**await trio.to_thread.run_sync(self._run, job, abandon_on_cancel=True))

    async def run_storm(self, job: StormJob) -> StormResult:
        """Read prompts beside a stream."""
        return StormResult(**await trio.to_thread.run_sync(self._run, job, abandon_on_cancel=True))

    async def run_mixed(self, job: MixedJob) -> MixedResult:
        """Read prompts beside people's answers."""
        return MixedResult(**await trio.to_thread.run_sync(self._run, job, abandon_on_cancel=True))

    async def run_rows(self, job: RowsJob) -> RowsResult:
        """Time decode steps by their number of rows."""
        return RowsResult(**await trio.to_thread.run_sync(self._run, job, abandon_on_cancel=True))

    async def run_piece(self, job: PieceJob) -> PieceResult:
        """Time a piece of a prompt."""
        return PieceResult(**await trio.to_thread.run_sync(self._run, job, abandon_on_cancel=True))

    def _run(self, job: Job | StormJob | MixedJob | RowsJob | PieceJob) -> dict[str, Any]:
        assert self.popen.stdin is not None
        self.popen.stdin.write(orjson.dumps(attrs.asdict(job)) + b"\n")
        self.popen.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """The next line of JSON the process prints. Raises `RawError` where it ended."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise RawError(f"{self.name} ended with {self.popen.wait()}")
        return dict(orjson.loads(line))


@asynccontextmanager
async def raw(
    model: BenchModel,
    *,
    streams: int,
    n_ctx: int,
    layout: str,
    threads: int,
    n_ubatch: int = N_UBATCH,
    in_huge_pages: bool = False,
) -> AsyncIterator[Raw]:
    """Run the baseline for the block. Its weights are mapped from their file, or in memory of huge pages."""
    command = [*_command("raw", model, streams, n_ctx, layout, threads), "--ubatch", str(n_ubatch)]
    popen = _spawn([*command, "--read-weights"], HUGE_PAGES) if in_huge_pages else _spawn(command)
    try:
        target = Raw(f"raw {layout}" + (f" -ub {n_ubatch}" if n_ubatch != N_UBATCH else ""), popen)
        await trio.to_thread.run_sync(target.read, abandon_on_cancel=True)
        yield target
    finally:
        popen.kill()
        popen.wait()
        for pipe in (popen.stdin, popen.stdout):
            if pipe is not None:
                pipe.close()


@asynccontextmanager
async def raw_http(
    model: BenchModel, *, streams: int, n_ctx: int, layout: str, threads: int
) -> AsyncIterator[LlamaServer]:
    """Run the baseline behind HTTP for the block, for bursts of `streams` requests; see `benchmarks.raw_http`."""
    port = free_port()
    command = [*_command("raw_http", model, streams, n_ctx, layout, threads), "--port", str(port)]
    async with server_process(command, lambda: is_healthy(port)) as process:
        yield LlamaServer(f"raw over HTTP {layout}", process, port)


def _command(program: str, model: BenchModel, streams: int, n_ctx: int, layout: str, threads: int) -> list[str]:
    command = [sys.executable, "-m", f"benchmarks.{program}", "--model", str(model.path), "--layout", layout]
    return [*command, "--streams", str(streams), "--n-ctx", str(n_ctx), "--threads", str(threads)]


def _spawn(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **(env or {})})
