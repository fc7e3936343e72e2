"""Everything at once: more requests than there is memory for, shared prefixes, lanes, slow readers, cancels, snapshots.

Whatever is read to its end must be what the same request gives alone, and in the end nothing may be held. Models are
not loud here: in loud ones the order of cells moves logits by up to 4e-3, and what a request draws that is alone in its
context depends on it, where the number drawn lies between two unlikely tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from engine_world import alone, ask, config_for, settled, tokens_for
from every_kind import kinds, write_named

from harness import PATIENCE_SEC
from uma import Request, open_engine
from uma.engine import Engine
from uma.engine.kv import pool
from uma.types import Finished, Token

COMMON = [tokens_for(seed, 60) for seed in range(3)]


def some_requests(rng: random.Random, count: int) -> list[Request]:
    """Requests of every kind, many with a beginning in common."""
    found = []
    for index in range(count):
        start = rng.choice(COMMON)[: rng.choice((0, 20, 45, 60))]
        prompt = (*start, *tokens_for(rng.randrange(40), rng.randrange(1, 60)))
        sampling: dict[str, Any] = {"seed": index, "temperature": 0.9} if rng.random() < 0.2 else {}
        tokens = rng.choice((1, 5, 30, 90))
        found.append(ask(prompt, tokens, id=str(index), priority=rng.choice((-1, 0, 0, 1)), **sampling))
    return found


async def read(engine: Engine, request: Request, patience: int, reads: int | None) -> tuple[int, ...] | None:
    """Read a request, after `patience` turns of the loop; give up after `reads` events if that is a number."""
    tokens: list[int] = []
    async with engine.generate(request) as stream:
        for _ in range(patience):
            await trio.lowlevel.checkpoint()
        while reads is None or len(tokens) < reads:
            event = await stream.__anext__()
            if isinstance(event, Finished):
                assert event.reason == "length"
                return tuple(tokens)
            assert isinstance(event, Token)
            tokens.append(event.token_id)
    return None


SMALL_POOL = {"n_ctx": 256, "n_batch": 48, "n_ubatch": 32, "max_sequences": 12}
SETTINGS: dict[str, dict[str, Any]] = {
    "no second tier": {**SMALL_POOL, "cache_ram_mb": 0},
    "snapshots": {**SMALL_POOL, "cache_ram_mb": 1, "cache_tokens": 64},
    "split": {"kv_unified": "off", "n_ctx": 1_024, "n_batch": 48, "n_ubatch": 32, "max_sequences": 3},
    "one at a time": {"n_ctx": 256, "n_batch": 16, "n_ubatch": 16, "max_sequences": 1},
}


CASES = [
    *(("attention", name, 1) for name in SETTINGS),
    *(pytest.param("attention", name, 2, marks=pytest.mark.slow) for name in SETTINGS),
    *(
        (kind, name, 3)
        for kind in kinds("sliding-window", "recurrent", "hybrid")
        for name in ("no second tier", "snapshots")
    ),
    ("sliding-window", "split", 3),
]


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, int], list[tuple[int, ...]]]:
    """By model and seed, what the requests give alone, once it was computed."""
    return {}


async def given_alone(model: Path, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """What each request gives alone: none begins with what is left of those before it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "MIN_SHARED_TOKENS", 1_000)
        async with open_engine(config_for(model, n_ctx=256, max_sequences=1, cache_ram_mb=0)) as engine:
            found = [each.token_ids for each in await alone(engine, requests)]
            assert engine.snapshot()["cached_tokens_total"] == 0
    return found


@pytest.mark.parametrize(("kind", "name", "seed"), CASES)
async def test_whatever_happens_to_others_a_reader_gets_what_it_would_get_alone(
    kind: str, name: str, seed: int, tmp_path: Path, known: dict[tuple[str, int], list[tuple[int, ...]]]
) -> None:
    model = write_named(tmp_path, kind, 1_024, most_gain=1)
    rng = random.Random(seed)
    requests = some_requests(rng, 60)
    found: dict[int, tuple[int, ...] | None] = {}
    if (kind, seed) not in known:
        known[kind, seed] = await given_alone(model, requests)
    expected = known[kind, seed]
    async with open_engine(config_for(model, **SETTINGS[name])) as engine:

        async def live(index: int, patience: int, reads: int | None) -> None:
            found[index] = await read(engine, requests[index], patience, reads)

        with trio.fail_after(PATIENCE_SEC):
            async with trio.open_nursery() as nursery:
                for index in range(len(requests)):
                    reads = rng.choice((None, None, None, 0, 2, 20))
                    nursery.start_soon(live, index, rng.choice((0, 0, 50, 2_000)), reads)
                    if rng.random() < 0.2:
                        await trio.sleep(0.005)
                    if rng.random() < 0.05:
                        nursery.start_soon(engine.health)
        metrics = await settled(engine)
    wrong = [index for index, got in found.items() if got is not None and got != expected[index]]
    assert wrong == []
    assert sum(got is not None for got in found.values()) > 25
    assert metrics["active_sequences"] == metrics["queued_requests"] == metrics["cache_protected_size"] == 0
    ends = sum(metrics[f"requests_{end}"] for end in ("length", "stop", "cancelled", "error", "rejected"))
    assert metrics["requests_total"] == ends == len(requests)
    assert metrics["requests_error"] == metrics["requests_rejected"] == 0
