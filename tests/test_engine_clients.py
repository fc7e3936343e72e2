"""What one client may do to another's requests: nothing by asking for much."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from engine_world import ask, config_for, tokens_for

from harness import PATIENCE_SEC
from uma import open_engine
from uma.net.client import CLIENT
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
