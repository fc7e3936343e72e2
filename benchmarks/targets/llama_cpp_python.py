"""`python -m llama_cpp.server`, the server that comes with the binding UMA uses. One request at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import orjson
import trio

from benchmarks.cache import peer_python
from benchmarks.http_stream import ending, post
from benchmarks.models import BenchModel
from benchmarks.samples import Ask, Sample
from benchmarks.targets.base import Process, free_port, server_process


def is_built() -> bool:
    """Whether `python -m benchmarks.build_peers` made its environment."""
    return peer_python().exists()


@attrs.frozen
class LlamaCppPython:
    """A running `llama_cpp.server`."""

    name: str
    process: Process
    port: int
    model: BenchModel

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ask(self, ask: Ask, sample: Sample) -> None:
        body = {
            # It takes no token ids; the text is made so that it tokenizes to exactly the same.
            "prompt": self.model.text(ask.prompt),
            "max_tokens": ask.max_tokens,
            "stream": True,
            "temperature": 0,
            "top_k": 1,
            "repeat_penalty": 1.0,
        }
        with ending(sample):
            async with post(self.port, "/v1/completions", body) as events:
                async for payload in events:
                    choice = orjson.loads(payload)["choices"][0]
                    if choice["text"]:
                        sample.add(-1)


@asynccontextmanager
async def llama_cpp_python(model: BenchModel, *, n_ctx: int, threads: int) -> AsyncIterator[LlamaCppPython]:
    """Run `llama_cpp.server` for the block. Requests wait for each other instead of ending each other, its default."""
    port = free_port()
    command = [str(peer_python()), "-m", "llama_cpp.server", "--model", str(model.path), "--port", str(port)]
    command += ["--n_ctx", str(n_ctx), "--n_threads", str(threads), "--n_threads_batch", str(threads)]
    command += ["--interrupt_requests", "False"]
    async with server_process(command, lambda: _listens(port)) as process:
        yield LlamaCppPython("llama_cpp.server", process, port, model)


async def _listens(port: int) -> bool:
    try:
        await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
    except OSError:
        return False
    return True
