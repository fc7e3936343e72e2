"""Cells that are moved together before a long prompt is read: readers notice it by the clock alone.

Every output is compared with that of the same request alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
import trio
from engine_world import Answer, alone, answer, ask, config_for, settled, tokens_for
from test_engine_layout import Ledger

from models import write_model
from uma import Request, RuntimeConfig, open_engine
from uma.engine import Engine
from uma.engine.policy.layout import AttentionCost
from uma.types import Token

LONG = ask(tokens_for(90, 700), 12, id="long")
STREAMS = [ask(tokens_for(seed, 40), 400, id=f"stream {seed}") for seed in range(2)]
"""They go on while all else happens; one is sampled with a memory of what it wrote."""
STREAMS[1] = ask(tokens_for(1, 40), 400, id="stream 1", seed=7, temperature=0.9, repetition_penalty=1.2)
SHORT = [ask(tokens_for(seed + 10, 60), 20, id=f"short {seed}") for seed in range(4)]
"""They end, and leave their cells to whatever comes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that attends."""
    return write_model(tmp_path_factory.mktemp("defrag") / "attention.gguf", context_length=2_048)


def config(model: Path) -> RuntimeConfig:
    return config_for(model, kv_unified="on", max_sequences=12)


def engine_skips(engine: Engine) -> None:
    """A scattered cell costs a prompt so much that moving all of them always pays, although this engine's attention is
    the plain one, whose results do not depend on where cells lie.
    """
    relayout = engine.worker._relayout
    relayout._skips_masked = True
    relayout._policy._cost = attrs.evolve(AttentionCost(), flash_read_ns=1e9)


async def beside_streams(engine: Engine, *rounds: Sequence[Request]) -> dict[str, Answer]:
    """Read these requests, one round after another, while the streams are written."""
    got: dict[str, Answer] = {}

    async def read(request: Request) -> None:
        got[request.id] = await answer(engine, request)

    async with trio.open_nursery() as nursery:
        for request in STREAMS:
            nursery.start_soon(read, request)
        while engine.worker.active_count < len(STREAMS):
            await trio.lowlevel.checkpoint()
        for requests in rounds:
            async with trio.open_nursery() as several:
                for request in requests:
                    several.start_soon(read, request)
    return got


async def test_a_long_prompt_has_its_cells_in_a_row_and_all_say_what_each_says_alone(model: Path) -> None:
    book = Counter[tuple[int, ...]]()
    async with open_engine(config(model)) as engine:
        engine_skips(engine)
        engine.listen_to_kv(Ledger(book))
        got = await beside_streams(engine, SHORT, [LONG])
        metrics = await settled(engine)
        assert metrics["kv_defrags_total"] >= 1
        assert metrics["kv_layout_changes_total"] == 0 and metrics["preemptions_total"] == 0
        assert book.total() == metrics["kv_cells_used"], "what listeners were told is not what there is"
    async with open_engine(config(model)) as engine:
        requests = [*STREAMS, *SHORT, LONG]
        expected = await alone(engine, requests)
        assert engine.snapshot()["kv_defrags_total"] == 0, "there was no other sequence"
    assert [got[each.id].token_ids for each in requests] == [each.token_ids for each in expected]


async def test_prefixes_stay_shared_and_cached(model: Path) -> None:
    common = tokens_for(5, 150)
    first, again = (ask((*common, *tokens_for(seed, 20)), 30, id=str(seed)) for seed in (6, 7))
    async with open_engine(config(model)) as engine:
        engine_skips(engine)
        got = await beside_streams(engine, [first], SHORT, [LONG], [again])
        assert engine.snapshot()["kv_defrags_total"] >= 1
        assert got[again.id].finished.usage.cached_tokens >= len(common)
    async with open_engine(config(model)) as engine:
        assert got[again.id].token_ids == (await answer(engine, again)).token_ids


async def test_attention_that_computes_masked_cells_in_full_gains_nothing_by_it(model: Path) -> None:
    async with open_engine(config(model)) as engine:
        await beside_streams(engine, SHORT, [LONG])
        assert engine.snapshot()["kv_defrags_total"] == 0


async def test_a_cancelled_stream_leaves_cells_that_are_moved_over(model: Path) -> None:
    async with open_engine(config(model)) as engine:
        engine_skips(engine)
        async with engine.generate(STREAMS[0]) as kept:
            async with engine.generate(ask(tokens_for(33, 300), 400, id="gone")) as gone:
                async for event in gone:
                    if isinstance(event, Token):
                        break
            long = await answer(engine, LONG)
            assert engine.snapshot()["kv_defrags_total"] >= 1
            ids = [event.token_id async for event in kept if isinstance(event, Token)]
    async with open_engine(config(model)) as engine:
        expected = await alone(engine, [STREAMS[0], LONG])
    assert [tuple(ids), long.token_ids] == [each.token_ids for each in expected]
