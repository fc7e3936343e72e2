"""llama-server, the peer that matters most: same library, same kernels, another scheduler.

It runs with its own defaults (continuous batching, prompt cache and host-memory prompt cache on) apart from what a
scenario is about: the number of slots, the context, the KV layout and the batch sizes.
"""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import orjson
import trio

from benchmarks.cache import peer_binary
from benchmarks.http_stream import ending, post
from benchmarks.models import BenchModel
from benchmarks.samples import QUESTION, Ask, Sample
from benchmarks.targets.base import HUGE_PAGES, Process, free_port, server_process

LAYOUTS = {"unified": "--kv-unified", "split": "--no-kv-unified"}


def is_built() -> bool:
    """Whether `python -m benchmarks.build_peers` made it."""
    return peer_binary("llama-server").exists()


@attrs.frozen
class LlamaServer:
    """A running llama-server, or another server that speaks its native API."""

    name: str
    process: Process
    port: int

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ask(self, ask: Ask, sample: Sample) -> None:
        if ask.picture is not None:
            await self._ask_about(ask.picture, ask.max_tokens, sample)
            return
        body: dict[str, Any] = {
            "prompt": list(ask.prompt),
            "n_predict": ask.max_tokens,
            "stream": True,
            "return_tokens": True,
            "ignore_eos": ask.json_schema is None,
            "temperature": 0,
            # Greedy needs no more than the likeliest token; its default of 40 would only cost it time.
            "top_k": 1,
            "cache_prompt": True,
        }
        if ask.json_schema is not None:
            body["json_schema"] = ask.json_schema
        with ending(sample):
            async with post(self.port, "/completion", body) as events:
                async for payload in events:
                    event = orjson.loads(payload)
                    for token in event["tokens"]:
                        sample.add(token)
                    if event["stop"]:
                        sample.cached_tokens = event["timings"]["cache_n"]

    async def _ask_about(self, picture: bytes, max_tokens: int, sample: Sample) -> None:
        url = f"data:image/bmp;base64,{base64.b64encode(picture).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
        message = {"role": "user", "content": content}
        body = {"messages": [message], "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
        with ending(sample):
            async with post(self.port, "/v1/chat/completions", body) as events:
                async for payload in events:
                    if payload == b"[DONE]":
                        break
                    for choice in orjson.loads(payload)["choices"]:
                        if choice["delta"].get("content"):
                            sample.add(0)  # a text, of which it tells no token


@asynccontextmanager
async def llama_server(
    model: BenchModel,
    *,
    slots: int,
    n_ctx: int,
    layout: str,
    threads: int,
    extra: Sequence[str] = (),
    in_huge_pages: bool = False,
    label: str = "",
) -> AsyncIterator[LlamaServer]:
    """Run llama-server for the block. `n_ctx` is for all slots together, whatever the layout.

    Its weights are mapped from their file, as it has it by itself, or in memory of huge pages.
    """
    port = free_port()
    command = [str(peer_binary("llama-server")), "--model", str(model.path), "--port", str(port)]
    command += ["--parallel", str(slots), "--ctx-size", str(n_ctx), LAYOUTS[layout], "--threads", str(threads)]
    command += ["--load-mode", "none", *extra] if in_huge_pages else extra
    env = {**os.environ, **HUGE_PAGES} if in_huge_pages else None
    async with server_process(command, lambda: is_healthy(port), env=env) as process:
        yield LlamaServer(f"llama-server {label or layout}", process, port)


async def is_healthy(port: int) -> bool:
    """Whether a server answers 200 when asked for its health."""
    try:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b" 200 " in await stream.receive_some(64)
    except OSError:
        return False
