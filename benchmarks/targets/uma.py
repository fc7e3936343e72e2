"""UMA's server, as users run it: `uma run` in a process of its own, asked over its socket with UMA's own client."""

from __future__ import annotations

import base64
import itertools
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, cast

import attrs
import trio

from benchmarks.models import BenchModel
from benchmarks.samples import QUESTION, Ask, Sample
from benchmarks.targets.base import Process, environment, free_port, server_process
from benchmarks.targets.llama_server import LlamaServer
from uma.client import Client, connect
from uma.errors import UmaError
from uma.types import Finished, Grammar, Media, Message, Request, SamplingParams, Slo, Token

IDLE_TIMEOUT_SEC = 3600
"""Its sessions wait while other targets have their turns: with a large model for longer than UMA's default."""


def about(picture: bytes) -> Message:
    """A question about a picture."""
    return Message("user", QUESTION, media=(Media(base64.b64encode(picture).decode()),))


@attrs.frozen
class Uma:
    """A running UMA server and one or more open sessions with it, used in turn."""

    name: str
    process: Process
    socket: Path
    clients: tuple[Client, ...]
    _ids: itertools.count[int] = attrs.field(factory=itertools.count)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ask(self, ask: Ask, sample: Sample) -> None:
        number = next(self._ids)
        request = Request(
            id=f"bench-{number}",
            token_ids=None if ask.picture else ask.prompt,
            messages=None if ask.picture is None else (about(ask.picture),),
            sampling=SamplingParams(
                max_tokens=ask.max_tokens,
                ignore_eos=ask.json_schema is None,
                grammar=None if ask.json_schema is None else Grammar(json_schema=ask.json_schema),
            ),
            priority=cast(Literal[-1, 0, 1], ask.priority),
            slo=Slo(target_ttft_ms=ask.target_ttft_ms, target_tbt_ms=ask.target_tbt_ms),
        )
        try:
            async with self.clients[number % len(self.clients)].generate(request) as stream:
                async for event in stream:
                    if isinstance(event, Finished):
                        sample.cached_tokens = event.usage.cached_tokens
                    elif isinstance(event, Token):
                        sample.add(event.token_id)
        except UmaError as error:
            sample.fail(error.code, error.retry_after_ms)
        finally:
            sample.end()

    async def metrics(self) -> Mapping[str, Any]:
        """The server's own counters."""
        return await self.clients[0].metrics()


@asynccontextmanager
async def uma_server(
    model: BenchModel,
    settings: Mapping[str, object],
    *,
    threads: int | None,
    sessions: int = 1,
    label: str = "",
    tree: Path | None = None,
    module: str = "uma",
) -> AsyncIterator[Uma]:
    """Run `uma run` for the block, with settings by field name, and open `sessions` sessions. `threads` None: as many
    as UMA takes by itself. `tree`: the source tree that the server runs from, if not this one. `module`: what is run
    in UMA's place.
    """
    with tempfile.TemporaryDirectory(prefix="uma-bench-") as folder:
        socket = Path(folder) / "uma.sock"
        command = [sys.executable, "-m", module, "run", "--model", str(model.path), "--socket", str(socket)]
        wanted: dict[str, object] = {"idle_timeout_sec": IDLE_TIMEOUT_SEC}
        wanted |= {} if threads is None else {"threads": threads}
        for name, value in {**wanted, **settings}.items():
            command += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
        env = {**environment(), "XDG_STATE_HOME": folder}
        if tree is not None:
            env["PYTHONPATH"] = str(tree)
        async with (
            server_process(command, lambda: _answers(socket), env=env, cwd=tree) as process,
            AsyncExitStack() as stack,
        ):
            clients = [await stack.enter_async_context(connect(socket)) for _ in range(sessions)]
            yield Uma(f"UMA {label}".strip(), process, socket, tuple(clients))


async def _answers(socket: Path) -> bool:
    try:
        with trio.move_on_after(5):
            async with connect(socket):
                return True
    except (UmaError, OSError):
        return False
    return False


@asynccontextmanager
async def uma_both(
    model: BenchModel, settings: Mapping[str, object], *, threads: int | None, label: str = ""
) -> AsyncIterator[tuple[Uma, LlamaServer]]:
    """Run `uma run --http` for the block: one server, by its socket, and over HTTP by the client of llama-server."""
    port = free_port()
    wanted = {**settings, "http": f"127.0.0.1:{port}"}
    async with uma_server(model, wanted, threads=threads, label=f"socket {label}") as uma:
        yield uma, LlamaServer(f"UMA HTTP {label}".strip(), uma.process, port)
