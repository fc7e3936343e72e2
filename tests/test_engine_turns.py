"""What programs that take turns on one engine read again: their own conversations stay, in cells or in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from engine_world import answer, answers, ask, config_for, settled, tokens_for

from uma.engine import open_engine

PROGRAMS, TURNS = 3, 6
SYSTEM_TOKENS, TURN_TOKENS = 400, 60


@pytest.mark.parametrize(
    "settings",
    [{}, {"cache_tokens": 1_024}, {"cache_tokens": 0}, {"cache_ram_mb": 0}, {"kv_unified": "on"}],
    ids=["by default", "with few cells for cache", "in memory alone", "in cells alone", "in one buffer"],
)
async def test_programs_with_one_system_prompt_read_none_of_their_own_turns_again(
    tiny: Path, settings: dict[str, Any]
) -> None:
    """Each program asks its next question once the others have had their answers."""
    talks = [tokens_for(0, SYSTEM_TOKENS)] * PROGRAMS
    read, new = 0, SYSTEM_TOKENS
    async with open_engine(config_for(tiny, **({"n_ctx": 8_192, "cache_ram_mb": 256} | settings))) as engine:
        for turn in range(TURNS):
            for program in range(PROGRAMS):
                prompt = (*talks[program], *tokens_for(1 + TURNS * program + turn, TURN_TOKENS))
                got = await answer(engine, ask(prompt, 40))
                usage = got.finished.usage
                read += usage.prompt_tokens - usage.cached_tokens
                new += TURN_TOKENS
                talks[program] = (*prompt, *got.token_ids)
    # The last token of an answer is given and not computed, and a beginning in common by chance is found.
    assert read <= new + PROGRAMS * TURNS + 8, f"{read} tokens read where {new} are new"


@pytest.mark.parametrize("layout", ["on", "off"])
async def test_a_cache_that_is_switched_off_keeps_nothing(tiny: Path, layout: str) -> None:
    config = config_for(tiny, cache_tokens=0, cache_ram_mb=0, kv_unified=layout, max_sequences=2)
    async with open_engine(config) as engine:
        for _ in range(2):
            got = await answer(engine, ask(tokens_for(1, 300)))
            assert got.finished.usage.cached_tokens == 0
            assert (await settled(engine))["kv_cells_used"] == 0


@pytest.mark.parametrize("layout", ["on", "off"])
async def test_a_prompt_that_asks_for_no_cache_is_computed_whole(tiny: Path, tmp_path: Path, layout: str) -> None:
    config = config_for(tiny, kv_unified=layout, max_sequences=2, cache_dir=str(tmp_path / "kv"), cache_ram_mb=16)
    request = ask(tokens_for(1, 300))
    apart = attrs.evolve(request, id="b", cache_prompt=False)
    async with open_engine(config) as engine:
        await answer(engine, request)
        found = (await answer(engine, request)).finished.usage.cached_tokens
        assert found > 200
        alone = await answer(engine, apart)
        beside = await answers(engine, [request, apart])
        assert [each.finished.usage.cached_tokens for each in (alone, beside[1])] == [0, 0]
        assert beside[0].finished.usage.cached_tokens > 200
    async with open_engine(config) as engine:
        assert (await answer(engine, apart)).finished.usage.cached_tokens == 0, "nor from the disk"
