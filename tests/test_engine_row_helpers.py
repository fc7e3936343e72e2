"""Rows are shared with helper threads where a GPU computes: the same tokens, in the same order, by several threads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from engine_world import Answer, EarlyContext, answers, ask, compute_with, config_for, tokens_for
from hypothesis import given
from hypothesis import strategies as st

from harness import PATIENCE_SEC
from uma import open_engine
from uma.engine.worker import row_helpers
from uma.engine.worker.row_helpers import MIN_LOGITS, RowHelpers
from uma.engine.worker.sampling import RowSampler
from uma.llama.context import Context


@given(st.integers(0, 7), st.integers(1, 300), st.integers(1, 200_000))
def test_all_rows_are_chosen_once_and_come_in_order(helpers: int, rows: int, n_vocab: int) -> None:
    shared = RowHelpers(helpers)
    try:
        assert shared.each_part(list, rows, rows * n_vocab) == list(range(rows))
    finally:
        shared.close()


def test_parts_are_chosen_at_the_same_time_by_as_many_threads() -> None:
    together, helpers = threading.Barrier(4, timeout=PATIENCE_SEC), RowHelpers(3)

    def choose(rows: range) -> list[int]:
        together.wait()  # raises unless there are four of them
        return [threading.get_ident()] * len(rows)

    try:
        assert len(set(helpers.each_part(choose, 64, 64 * MIN_LOGITS))) == 4
    finally:
        helpers.close()


def test_little_work_stays_with_the_thread_that_asks() -> None:
    helpers, before = RowHelpers(3), threading.active_count()
    assert (
        helpers.each_part(lambda rows: [threading.get_ident()] * len(rows), 64, 2 * MIN_LOGITS - 1)
        == [threading.get_ident()] * 64
    )
    assert threading.active_count() == before


async def test_readers_are_given_the_same_and_no_thread_is_left(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [ask(tokens_for(seed, 30), 60, id=f"greedy {seed}") for seed in range(4)]
    requests += [ask(tokens_for(seed, 30), 60, id=f"drawn {seed}", temperature=0.9, seed=seed) for seed in range(4)]
    requests += [ask(tokens_for(9, 30), 90, id="not soon", ignore_eos=False, min_tokens=40)]
    by: set[str] = set()
    draw = RowSampler._draw

    def watched(sampling: RowSampler, *args: object) -> int:
        by.add(threading.current_thread().name.partition("_")[0])
        return draw(sampling, *args)  # type: ignore[arg-type]

    async def asked(context: type[Context]) -> list[Answer]:
        compute_with(monkeypatch, context)
        async with open_engine(config_for(tiny)) as engine:
            return await answers(engine, requests)

    expected = await asked(Context)
    monkeypatch.setattr(RowSampler, "_draw", watched)
    monkeypatch.setattr(row_helpers, "MIN_LOGITS", 1)
    monkeypatch.setattr("uma.engine.worker.sampling.core_count", lambda: 4)
    got = await asked(EarlyContext)
    assert [(each.token_ids, each.text) for each in got] == [(each.token_ids, each.text) for each in expected]
    assert "uma-rows" in by and len(by) > 1, "no helper chose a token"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("uma-rows")]
