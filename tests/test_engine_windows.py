"""Models with sliding windows share prefixes at any token, as those with plain attention do, and what is shared is
right whatever other sequences have done with the cells meanwhile.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from engine_world import alone, answer, answers, ask, config_for, settled, tokens_for

from models import WINDOW, write_model
from uma import RuntimeConfig, open_engine

SIBLINGS, COMMON_TOKENS, OWN_TOKENS = 8, 20 * WINDOW, 16


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every second layer attends to `WINDOW` tokens."""
    path = tmp_path_factory.mktemp("windows") / "model.gguf"
    return write_model(path, kind="sliding-window", context_length=2_048)


async def test_siblings_compute_what_they_have_in_common_once(windowed: Path) -> None:
    """Prompts with a common beginning are asked together, then others with it."""
    common, read = tokens_for(1, COMMON_TOKENS), []
    async with open_engine(RuntimeConfig(model=str(windowed), n_ctx=4_096, n_gpu_layers=0, threads=1)) as engine:
        for turn in range(2):
            seeds = range(SIBLINGS * turn + 10, SIBLINGS * (turn + 1) + 10)
            asked = [ask((*common, *tokens_for(seed, OWN_TOKENS)), 2, id=str(seed)) for seed in seeds]
            usages = [each.finished.usage for each in await answers(engine, asked)]
            read.append(sum(usage.prompt_tokens - usage.cached_tokens for usage in usages))
    cold, warm = read
    assert cold <= COMMON_TOKENS + SIBLINGS * (OWN_TOKENS + 2)
    assert warm <= SIBLINGS * (OWN_TOKENS + 2)


async def test_a_prefix_is_shared_and_right_while_others_come_and_go(windowed: Path) -> None:
    talk = tokens_for(1, COMMON_TOKENS)
    branches = [ask((*talk[:length], *tokens_for(length, 9)), 12) for length in (WINDOW + 3, 5 * WINDOW, 15 * WINDOW)]
    others = [ask(tokens_for(seed, 10 * WINDOW), 3 * WINDOW, id=str(seed)) for seed in range(20, 26)]
    async with open_engine(config_for(windowed, max_sequences=1, cache_tokens=0, cache_ram_mb=0)) as engine:
        expected = [each.token_ids for each in await alone(engine, branches)]
    found = []
    config = config_for(windowed, n_ctx=2_048, max_sequences=4, cache_tokens=0, cache_ram_mb=0)
    async with open_engine(config) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(answer, engine, ask(talk, 1_600, id="talk"))
        for branch in branches:
            await answers(engine, others)  # they go through all cells, and take those that nobody guards
            found.append(await answer(engine, branch))
        nursery.cancel_scope.cancel()
    assert [each.token_ids for each in found] == expected
    assert [each.finished.usage.cached_tokens for each in found] == [WINDOW + 3, 5 * WINDOW, 15 * WINDOW]


async def test_a_prefix_comes_back_from_memory_and_is_cut_anywhere(windowed: Path) -> None:
    talk = tokens_for(1, 600)
    branch = ask((*talk[:500], *tokens_for(2, 9)), 12)
    async with open_engine(config_for(windowed, max_sequences=1, cache_tokens=0, cache_ram_mb=0)) as engine:
        expected = (await answer(engine, branch)).token_ids
    async with open_engine(config_for(windowed, cache_tokens=0, cache_ram_mb=64, max_sequences=4)) as engine:
        await answer(engine, ask(talk, 2))
        assert (await settled(engine))["kv_cells_used"] == 0
        got = await answer(engine, branch)
    assert got.token_ids == expected
    assert got.finished.usage.cached_tokens == 500
