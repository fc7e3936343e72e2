"""Cache that leaves its cells for a prompt that has no use for it: no batch of that prompt passes it by, and what has
left is found again, token for token.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from engine_world import Answer, answer, ask, config_for, tokens_for

from uma import Request, RuntimeConfig, open_engine
from uma.engine import Engine
from uma.engine.delivery.pacing import STRIDE_STEPS
from uma.engine.kv import leaving
from uma.engine.policy.layout import AttentionCost
from uma.engine.policy.leaving import Leaving
from uma.llama.batch import Batch
from uma.llama.context import Context
from uma.types import Token

FEW_TOKENS = 100
"""Prompts shorter than half of that send no cache away, those of several times as many all of it."""
EARLIER, LONG, SHORT = ask(tokens_for(1, 300), 8), ask(tokens_for(2, 600), 8), ask(tokens_for(3, 40), 8)
LONG_WITH_A_LONG_ANSWER = ask(tokens_for(2, 600), 200)
"""There are many batches between its beginning and its end."""
MOST_COPIED = 50
"""Maximum tokens copied before one batch, where a test bounds them."""


@attrs.define
class Watch:
    """What each batch went over, and what was copied before it."""

    engine: Engine | None = None
    cached: list[int] = attrs.field(factory=list)
    """Cells of cache."""
    copied: list[int] = attrs.field(factory=list)
    """Bytes."""
    copied_now: int = 0

    def begin(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, rows_cost: bool = False) -> None:
        """Watch this engine, in which masked cells cost prompts of `FEW_TOKENS` what copies do, and rows nothing, or as
        much as a prompt's tokens.
        """
        self.engine = engine
        policy = engine.worker._relayout._policy
        read_ns = policy.leaving(0, 0).carrying_ms / policy._head_ms / FEW_TOKENS
        row_ns = read_ns if rows_cost else 0.0
        costs = dict.fromkeys(attrs.fields_dict(AttentionCost), 0.0)
        costs |= {"masked_read_ns": read_ns, "cached_row_ns": row_ns}
        monkeypatch.setattr(policy, "_cost", AttentionCost(**costs))
        monkeypatch.setattr(policy, "learn_copy", lambda tokens, took_ms: None)

    def batch(self) -> None:
        """One is computed now."""
        if self.engine is not None:
            self.cached.append(self.engine.worker._pool.cached_cells)
            self.copied.append(self.copied_now)
            self.copied_now = 0

    def clear(self) -> None:
        """Forget what was."""
        self.cached.clear()
        self.copied.clear()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Watches an engine in which no cached sequence is small enough to leave whatever begins."""
    found = Watch()

    class WatchedContext(Context):
        def state_get(self, seq: int) -> bytes:
            data = super().state_get(seq)
            found.copied_now += len(data)
            return data

        def begin(self, batch: Batch) -> int:
            found.batch()
            return super().begin(batch)

    monkeypatch.setattr("uma.engine.open.Context", WatchedContext)
    monkeypatch.setattr(leaving, "MOST_QUICK_BYTES", 0)
    # Copies of idle times come later than anything here.
    monkeypatch.setattr("uma.engine.worker.loop.IDLE_SEC", 3_600.0)
    return found


def config(model: Path, **settings: object) -> RuntimeConfig:
    return config_for(model, **({"kv_unified": "on", "cache_ram_mb": 64} | settings))


async def expected(model: Path, request: Request) -> tuple[int, ...]:
    """What it says alone."""
    async with open_engine(config(model, cache_tokens=0, cache_ram_mb=0)) as engine:
        return (await answer(engine, request)).token_ids


def assert_found(again: Answer, first: Answer) -> None:
    assert again.token_ids == first.token_ids
    assert again.finished.usage.cached_tokens >= 290


async def assert_stays(engine: Engine, watch: Watch, request: Request, first: Answer) -> None:
    """No cell of what `EARLIER` left leaves for this request."""
    watch.clear()
    await answer(engine, request)
    assert min(watch.cached) >= 300 and not any(watch.copied)
    assert_found(await answer(engine, EARLIER), first)


async def test_a_long_prompt_passes_no_cache_by_and_the_cache_is_found_afterwards(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    async with open_engine(config(tiny)) as engine:
        watch.begin(engine, monkeypatch)
        first = await answer(engine, EARLIER)
        assert engine.snapshot()["kv_cells_used"] >= 300
        watch.clear()
        long = await answer(engine, LONG)
        assert set(watch.cached) == {0}
        assert_found(await answer(engine, EARLIER), first)
        assert engine.snapshot()["cache_ram_hits"] == 1
    assert long.token_ids == await expected(tiny, LONG)


async def test_cache_stays_where_few_tokens_pass_it_by(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    async with open_engine(config(tiny)) as engine:
        watch.begin(engine, monkeypatch)
        first = await answer(engine, EARLIER)
        await assert_stays(engine, watch, SHORT, first)
        assert engine.snapshot()["cache_ram_hits"] == 0


async def test_cache_leaves_for_the_tokens_that_a_short_answer_can_have(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    async with open_engine(config(tiny)) as engine:
        watch.begin(engine, monkeypatch, rows_cost=True)
        first = await answer(engine, EARLIER)
        watch.clear()
        await answer(engine, ask(tokens_for(3, 40), FEW_TOKENS - 20))
        assert set(watch.cached) == {0}
        assert_found(await answer(engine, EARLIER), first)


async def test_cache_stays_where_memory_has_no_place_for_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    async with open_engine(config(tiny)) as engine:
        watch.begin(engine, monkeypatch)
        first = await answer(engine, EARLIER)
        monkeypatch.setattr(engine.worker._pool.store, "has_place_for", lambda *_: False)
        await assert_stays(engine, watch, LONG, first)


async def test_it_leaves_in_parts_as_small_as_the_policy_says_and_a_stream_writes_the_same_beside_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    # Whether the stream decodes or is paused: it is not read while the others are.
    monkeypatch.setattr(Leaving, "max_tokens", lambda self, *, decodes: MOST_COPIED)
    streamed, written = ask(tokens_for(4, 20), 300, id="stream"), list[int]()
    async with open_engine(config(tiny)) as engine:
        # While it leaves, less and less of the prompt is unread: what pays at first has to pay to the end.
        watch.begin(engine, monkeypatch, rows_cost=True)
        async with engine.generate(streamed) as stream:
            async for event in stream:
                if not isinstance(event, Token):
                    continue
                written.append(event.token_id)
                if len(written) == 1:
                    first = await answer(engine, EARLIER)
                    watch.clear()
                    await answer(engine, LONG_WITH_A_LONG_ANSWER)
                    token_bytes = engine.worker._pool.cells.bytes_per_token
                    # A state has a few bytes of each cell's place too.
                    assert 0 < max(watch.copied) < 2 * MOST_COPIED * token_bytes
                    assert sum(each > 0 for each in watch.copied) >= 300 // MOST_COPIED
                    assert watch.cached[-1] == 0
                    assert_found(await answer(engine, EARLIER), first)
    assert tuple(written) == await expected(tiny, streamed)


async def test_while_nothing_else_changes_the_next_part_leaves_after_each_stride(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    monkeypatch.setattr(Leaving, "max_tokens", lambda self, *, decodes: MOST_COPIED)
    async with open_engine(config(tiny)) as engine:
        watch.begin(engine, monkeypatch, rows_cost=True)
        await answer(engine, EARLIER)
        watch.clear()
        await answer(engine, ask(tokens_for(3, 40), 400))
        copies = [batch for batch, copied in enumerate(watch.copied) if copied]
        assert len(copies) >= 300 // MOST_COPIED
        assert copies[-1] <= len(copies) * STRIDE_STEPS
        assert watch.cached[-1] == 0
