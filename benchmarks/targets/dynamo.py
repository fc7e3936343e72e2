"""UMA behind NVIDIA Dynamo: `uma worker` processes and Dynamo's own frontend, asked over OpenAI's completions.

They find each other through files in a temporary folder, as on one machine without etcd.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal

import attrs
import orjson
import trio

from benchmarks.http_stream import ending, post
from benchmarks.models import BenchModel
from benchmarks.samples import Ask, Sample
from benchmarks.targets.base import Process, free_port, server_process

MODEL = "bench"
BUILT_IN = "builtin"
BLOCK_SIZE = 16
GRACE_SEC = 1
"""Dynamo's pause between leaving the routing and the drain."""

Router = Literal["kv", "round-robin"]


def is_installed() -> bool:
    """Whether Dynamo is there (docs/many-machines.md)."""
    return importlib.util.find_spec("dynamo") is not None


@attrs.frozen
class Dynamo:
    """A frontend with workers behind it."""

    name: str
    process: Process
    """The frontend's."""
    port: int
    workers: list[Process]
    started_ms: list[float]
    """From each worker's start until its card was published."""
    folder: Path
    add_worker: Callable[[], Awaitable[None]]
    """Start one more, and wait until its card is published."""
    answered_by: Counter[int] = attrs.field(factory=Counter)
    """Answers by Dynamo's id of the worker that began them."""

    @property
    def pid(self) -> int:
        """The frontend's process."""
        return self.process.pid

    async def ask(self, ask: Ask, sample: Sample) -> None:
        """See `Target`. Tokens come as text, several in a chunk: they are counted when the usage is known."""
        body = {
            "model": MODEL, "prompt": list(ask.prompt), "max_tokens": ask.max_tokens, "temperature": 0.0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
            "nvext": {"extra_fields": ["worker_id"]},
        }  # fmt: skip
        tokens, is_whole, worker = 0, False, None
        with ending(sample):
            async with post(self.port, "/v1/completions", body) as events:
                async for payload in events:
                    event = orjson.loads(payload)
                    choices = event.get("choices") or [{}]
                    is_whole = is_whole or choices[0].get("finish_reason") == "length"
                    if choices[0].get("text"):
                        sample.add(-1)
                    if found := (event.get("nvext") or {}).get("worker_id"):
                        worker = found["decode_worker_id"]
                    if usage := event.get("usage"):
                        tokens = usage["completion_tokens"]
                        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if worker is not None:
                self.answered_by[worker] += 1
            if not is_whole:
                sample.fail("the stream ended before its last token")
            # What came together counts as it came: the last chunk's time is that of the tokens in it.
            sample.token_s += [sample.token_s[-1]] * max(0, tokens - len(sample.token_s)) if sample.token_s else []

    def listed(self) -> int:
        """Workers that can be routed to now."""
        return _cards(self.folder / "kv")

    async def fewer_than(self, workers: int) -> None:
        """Wait until fewer than so many can be routed to."""
        while self.listed() >= workers:  # noqa: ASYNC110  (files of another process)
            await trio.sleep(0.01)


def _cards(folder: Path) -> int:
    """Workers that are listed. Each has other endpoints beside the one that generates."""
    files = (path.as_posix() for path in folder.rglob("*") if path.is_file())
    return sum("v1/instances" in path and "generate" in path for path in files)


@asynccontextmanager
async def dynamo(
    model: BenchModel | None,
    settings: Mapping[str, object],
    *,
    threads: int | None,
    workers: int,
    router: Router,
    migration_limit: int = 3,
) -> AsyncIterator[Dynamo]:
    """Run a frontend and so many workers for the block, of the built-in model where `model` is None.

    With a `migration_limit` of 0 no stream goes on with another worker: one that ends whole was finished by its own.
    """
    with tempfile.TemporaryDirectory(prefix="uma-bench-") as name:
        folder = Path(name)
        (folder / "kv").mkdir()
        port = free_port()
        env = {key: value for key, value in os.environ.items() if not key.startswith(("UMA_", "DYN_"))}
        env |= {
            "DYN_FILE_KV": str(folder / "kv"), "DYN_TCP_RPC_HOST": "127.0.0.1", "HF_HUB_OFFLINE": "1",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": str(GRACE_SEC), "XDG_CACHE_HOME": str(folder / "cache"),
        }  # fmt: skip
        command = [sys.executable, "-m", "uma", "worker", "--served-name", MODEL]
        command += ["--model", str(model.path) if model else BUILT_IN]
        command += ["--discovery-backend", "file", "--block-size", str(BLOCK_SIZE)]
        named = {} if threads is None else {"threads": threads}
        for key, value in {**named, **settings}.items():
            command += ["--" + key.replace("_", "-"), str(value)]
        frontend = [
            *(sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)),
            *(
                "--router-mode",
                router,
                "--kv-cache-block-size",
                str(BLOCK_SIZE),
                "--migration-limit",
                str(migration_limit),
            ),
            *("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"),
        ]
        async with AsyncExitStack() as stack:
            running: list[Process] = []
            started: list[float] = []

            async def add_worker() -> None:
                count = _cards(folder / "kv") + 1

                async def is_registered() -> bool:
                    return _cards(folder / "kv") >= count

                began = time.perf_counter()
                running.append(await stack.enter_async_context(server_process(command, is_registered, env=env)))
                started.append((time.perf_counter() - began) * 1000)

            for _ in range(workers):
                await add_worker()
            front = await stack.enter_async_context(server_process(frontend, lambda: _lists(port), env=env))
            yield Dynamo(f"Dynamo, {workers} x UMA, {router}", front, port, running, started, folder, add_worker)


async def _lists(port: int) -> bool:
    try:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            data = b""
            with trio.move_on_after(2):
                while chunk := await stream.receive_some(4_096):
                    data += chunk
            return MODEL.encode() in data
    except OSError:
        return False
