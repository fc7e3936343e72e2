"""What the engine tells of the prefixes it could reuse, on the real engine."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
import trio
from engine_world import SMALL_WINDOWS, answer, answers, ask, config_for, settled, tokens_for
from every_kind import write_named

from harness import PATIENCE_SEC
from uma import open_engine
from uma.engine.kv.checkpoints import FIRST_INTERVAL_TOKENS, LAST_TOKENS
from uma.engine.kv.events import Run, Tier
from uma.types import Token

Prefix = tuple[int, ...]


class Book:
    """A listener that counts for each tier how often each prefix is held, and notes the threads it was called on."""

    def __init__(self) -> None:
        self.held: dict[Tier, Counter[Prefix]] = {tier: Counter() for tier in Tier}
        self.threads: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        self.cleared_tiers: list[Tier] = []

    def stored(self, tier: Tier, run: Run) -> None:
        self._count(tier, run, 1)

    def removed(self, tier: Tier, run: Run) -> None:
        self._count(tier, run, -1)

    def cleared(self, tier: Tier) -> None:
        self.held[tier].clear()
        self.cleared_tiers.append(tier)

    def _count(self, tier: Tier, run: Run, change: int) -> None:
        self.threads[tier].add(threading.get_ident())
        tokens = tuple(run.tokens())
        for end in range(run.start + 1, run.end + 1):
            self.held[tier][tokens[:end]] += change
            assert self.held[tier][tokens[:end]] >= 0, "removed what was not stored"
            assert change < 0 or end == 1 or self.held[tier][tokens[: end - 1]] > 0, "stored before its beginning"

    def holds(self, tier: Tier, tokens: Prefix) -> bool:
        """Whether the tier holds all of these tokens."""
        return self.held[tier][tokens] > 0


async def test_a_listener_knows_what_a_request_left_in_the_cells(tiny: Path) -> None:
    book, prompt = Book(), tokens_for(1, 60)
    async with open_engine(config_for(tiny, cache_ram_mb=0)) as engine:
        engine.listen_to_kv(book)
        got = await answer(engine, ask(prompt, 8))
        metrics = await settled(engine)
        assert book.holds(Tier.CELLS, (*prompt, *got.token_ids[:-1])), "its answer is not told of"
        assert len(+book.held[Tier.CELLS]) == metrics["kv_cells_used"]
    assert not +book.held[Tier.CELLS]
    assert set(book.cleared_tiers) == {Tier.CELLS, Tier.MEMORY}
    assert threading.get_ident() not in book.threads[Tier.CELLS]


async def test_under_pressure_books_stay_right_and_a_late_listener_is_told_all(tiny: Path) -> None:
    early, late = Book(), Book()
    requests = [ask(tokens_for(n % 5, 90 + n), 60, id=str(n)) for n in range(12)]
    async with open_engine(config_for(tiny, n_ctx=512, cache_ram_mb=1, max_sequences=4)) as engine:
        engine.listen_to_kv(early)
        await answers(engine, requests)
        await settled(engine)
        engine.listen_to_kv(late)
        metrics = await settled(engine)
        assert metrics["cache_evictions"] > 0, "there was no pressure"
        assert metrics["cache_ram_snapshots"] > 0
        for tier in (Tier.CELLS, Tier.MEMORY):
            assert +early.held[tier] == +late.held[tier]
        assert sum((+early.held[Tier.CELLS]).values()) == metrics["kv_cells_used"]


@pytest.mark.parametrize("kind", ["qwen35", "recurrent", SMALL_WINDOWS])
async def test_where_memory_cannot_be_cut_it_is_told_up_to_where_a_sequence_can_begin(
    tmp_path: Path, kind: str
) -> None:
    book, prompt, end = Book(), tokens_for(1, 400), 400 - LAST_TOKENS
    async with open_engine(config_for(write_named(tmp_path, kind))) as engine:
        engine.listen_to_kv(book)
        with trio.fail_after(PATIENCE_SEC):
            async with engine.generate(ask(prompt, 300)) as stream:
                async for event in stream:
                    if isinstance(event, Token):
                        break
                assert book.holds(Tier.CELLS, prompt[:end])
                assert not book.holds(Tier.CELLS, prompt[: end + 1]), "only the one that runs goes on there"
                got = await answer(engine, ask((*prompt[:end], *tokens_for(2, 9)), 2))
                assert got.finished.usage.cached_tokens == end
                stream.cancel()
        whole = await answer(engine, ask(tokens_for(3, 50), 8))
        await settled(engine)
        said = (*tokens_for(3, 50), *whole.token_ids[:-1])
        assert book.holds(Tier.CELLS, said)
        got = await answer(engine, ask((*said, *tokens_for(4, 9)), 2))
        assert got.finished.usage.cached_tokens == len(said)
        parted = await answer(engine, ask((*prompt[:300], *tokens_for(5, 9)), 2))
        assert parted.finished.usage.cached_tokens == FIRST_INTERVAL_TOKENS, "held for what goes on"
    assert not +book.held[Tier.CELLS]
