"""What one client may do to another's requests: nothing by asking for much, and it is forgotten once it has gone."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import trio
import trio.testing
from engine_world import answer, ask, config_for, tokens_for

from harness import PATIENCE_SEC
from uma import open_engine
from uma.client import connect
from uma.net.client import CLIENT
from uma.server.connection import Connection
from uma.server.server import Server
from uma.types import Token

PROMPT_TOKENS = 200


@pytest.mark.parametrize("max_sequences", [1, 16])
async def test_a_program_s_prompts_do_not_stand_before_another_client_s_one(tiny: Path, max_sequences: int) -> None:
    began = list[str]()
    config = config_for(tiny, n_batch=64, n_ubatch=64, max_sequences=max_sequences, n_ctx=8_192, kv_unified="on")
    async with open_engine(config) as engine:

        async def read(client: str, name: str, seed: int) -> None:
            CLIENT.set(client)
            async with engine.generate(ask(tokens_for(seed, PROMPT_TOKENS), 1, id=name)) as stream:
                async for event in stream:
                    if isinstance(event, Token):
                        began.append(name)

        with trio.fail_after(PATIENCE_SEC):
            async with trio.open_nursery() as nursery:
                for number in range(10):
                    nursery.start_soon(read, "program", f"program {number}", number)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(read, "editor", "editor", 99)
    assert len(began) == 11
    assert began.index("editor") <= 3, began


async def test_connections_that_have_gone_are_no_longer_in_memory_while_another_s_stream_runs(
    tiny: Path, socket_dir: Path
) -> None:
    config = config_for(tiny, socket=str(socket_dir / "s"))
    async with open_engine(config) as engine, trio.open_nursery() as nursery:
        await nursery.start(Server(engine, config).serve)
        with trio.fail_after(PATIENCE_SEC):
            async with engine.generate(ask(tokens_for(1, 20), 1_900, id="lasting")):
                for number in range(5):
                    async with connect(config.socket) as client:
                        await answer(client, ask(tokens_for(number, 20), 3))
                while any(isinstance(each, Connection) for each in gc.get_objects()):
                    await trio.testing.wait_all_tasks_blocked()
                    gc.collect()
        nursery.cancel_scope.cancel()
