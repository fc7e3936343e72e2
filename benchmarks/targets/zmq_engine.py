"""UMA as RustInfer's engine: `uma engine-zmq`, asked in MessagePack over a DEALER socket as its server does."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import msgpack
import trio
import zmq

from benchmarks.models import BenchModel
from benchmarks.samples import Ask, Sample
from benchmarks.targets.base import Process, server_process


@attrs.define
class ZmqEngine:
    """A running engine, and the socket that asks it."""

    name: str
    process: Process
    _socket: zmq.Socket[bytes]
    _model: BenchModel
    _running: dict[str, tuple[Sample, trio.Event]] = attrs.field(factory=dict)
    _ids: itertools.count[int] = attrs.field(factory=itertools.count)

    @property
    def pid(self) -> int:
        """The server's process."""
        return self.process.pid

    async def ask(self, ask: Ask, sample: Sample) -> None:
        """See `Target`. RustInfer sends text, so the prompt goes as its words; its end of text is never forced."""
        name, ended = f"bench-{next(self._ids)}", trio.Event()
        self._running[name] = (sample, ended)
        request = {
            "request_id": name, "prompt": self._model.text(ask.prompt), "max_tokens": ask.max_tokens,
            "temperature": 0.0, "top_p": 1.0, "top_k": 0, "stop_sequences": [], "stream": True,
            "priority": ask.priority,
        }  # fmt: skip
        self._socket.send(msgpack.packb({"Inference": request}))
        await ended.wait()

    async def read(self) -> None:
        """Give what comes to its samples, until cancelled."""
        while True:
            while self._socket.poll(0):
                self._take(msgpack.unpackb(self._socket.recv_multipart()[-1]))
            await trio.lowlevel.wait_readable(self._socket.fileno())

    def _take(self, message: dict[str, Any]) -> None:
        chunk = message.get("Inference", message)
        sample, ended = self._running[chunk["request_id"]]
        if chunk.get("chunk_type") == "Token":
            if chunk["token_id"] is not None:
                sample.add(chunk["token_id"])
            return
        if chunk.get("chunk_type") != "Done":
            sample.fail(str(chunk.get("finish_reason") or chunk.get("error")))
        sample.end()
        ended.set()


@asynccontextmanager
async def zmq_engine(
    model: BenchModel, settings: Mapping[str, object], *, threads: int, label: str = "ZMQ engine"
) -> AsyncIterator[ZmqEngine]:
    """Run `uma engine-zmq` for the block, asked over a Unix socket of ZeroMQ's."""
    with tempfile.TemporaryDirectory(prefix="uma-bench-") as folder, zmq.Context() as context:
        endpoint = f"ipc://{folder}/infer.ipc"
        command = [sys.executable, "-m", "uma", "engine-zmq", "--bind", endpoint, "--model", str(model.path)]
        for name, value in {"threads": threads, **settings}.items():
            command += ["--" + name.replace("_", "-"), str(value)]
        env = {name: value for name, value in os.environ.items() if not name.startswith("UMA_")}
        env["UMA_SOCKET"] = f"{folder}/uma.sock"
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(endpoint)

            async def answers() -> bool:
                return await trio.Path(folder, "infer.ipc").exists()

            async with server_process(command, answers, env=env) as process, trio.open_nursery() as nursery:
                engine = ZmqEngine(label, process, dealer, model)
                nursery.start_soon(engine.read)
                yield engine
                nursery.cancel_scope.cancel()
