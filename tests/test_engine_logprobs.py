"""Log probabilities: those of a plain softmax over the model's logits, whatever else is asked for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_world import answer, answers, ask, config_for, tokens_for
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from uma import LLM, SamplingParams, open_engine
from uma.engine.worker.logprobs import BLOCK, LEAST, LogprobReader
from uma.llama.batch import Batch
from uma.llama.context import Context, ContextParams
from uma.llama.model import Model
from uma.types import MAX_LOGPROBS, Grammar, Logprobs

Row = npt.NDArray[np.float64]
logits = st.integers(1, 3 * MAX_LOGPROBS * BLOCK).flatmap(
    lambda width: arrays(np.float32, (2, width), elements=st.floats(-90, 90, width=32), fill=st.floats(-9, 9, width=32))
)


@given(logits, st.integers(0, MAX_LOGPROBS))
def test_the_likeliest_tokens_are_those_of_a_full_sort(logits: npt.NDArray[np.float32], count: int) -> None:
    known = LogprobReader(logits.shape[1])
    known.read(known.copied(np.concatenate([logits + 1, logits]), [2, 3]), count)
    ids, logprobs = known.top()
    for row, values in enumerate(logits):
        exact = values.astype(np.float64)
        exact -= exact.max() + math.log(np.exp(exact - exact.max()).sum())
        order = np.lexsort((np.arange(len(values)), -values))
        assert ids[row] == order[:count].tolist()
        assert np.allclose(logprobs[row], exact[order[:count]], atol=1e-4)
        for token in order[[0, min(count, len(order)) - 1, -1]].tolist():
            (logprob,), (rank,) = known.of([row], [token])
            assert logprob == pytest.approx(exact[token], abs=1e-4)
            assert rank == 1 + int((values > values[token]).sum())


def test_an_impossible_token_is_told_as_a_number() -> None:
    known = LogprobReader(2)
    known.read(np.array([[0, -np.inf]], np.float32), 2)
    assert known.of([0], [1]) == ([LEAST], [2])
    assert known.of([0], [0]) == ([0.0], [1])


def reference(model_path: Path, tokens: list[int]) -> list[Row]:
    """Log probabilities behind each of `tokens`, by llama.cpp and a softmax in 64 bits alone."""
    params = ContextParams(n_ctx=512, flash_attn="off", cache_type_k="f32", cache_type_v="f32", n_threads=1)
    rows = []
    with Model.load(model_path) as model, Context(model, params) as context:
        batch = Batch(1)
        for position, token in enumerate(tokens):
            batch.clear()
            batch.add([token], position, 0, last_logits=True)
            context.decode(batch)
            row = context.logits(1)[0].astype(np.float64)
            rows.append(row - row.max() - math.log(np.exp(row - row.max()).sum()))
    return rows


def check(known: tuple[Logprobs, ...], token_ids: tuple[int, ...], rows: list[Row], k: int) -> None:
    assert len(known) == len(token_ids)
    for each, token, row in zip(known, token_ids, rows, strict=True):
        assert each.chosen.token_id == token
        assert each.chosen.logprob == pytest.approx(row[token], abs=1e-3)
        assert each.chosen.rank == pytest.approx(1 + int((row > row[token]).sum()), abs=1)
        assert [top.logprob for top in each.top] == pytest.approx(np.sort(row)[::-1][:k].tolist(), abs=1e-3)
        assert [top.rank for top in each.top] == list(range(1, k + 1))


VARIANTS = [
    ask(tokens_for(1, 20), 12, logprobs=3),
    ask(tokens_for(2, 30), 12, logprobs=0, temperature=1.5, seed=1),
    ask(tokens_for(3, 25), 12, logprobs=20, temperature=0.5, top_k=5, seed=2, repetition_penalty=1.5),
    ask(tokens_for(4, 25), 12, logprobs=2, logit_bias={"z": 100}),
    ask(tokens_for(5, 25), 12, logprobs=2, grammar=Grammar(regex="[0-9]{12}"), temperature=1, seed=4),
    ask(tokens_for(6, 25), 12, logprobs=1, grammar=Grammar(choice=["forced to say"])),
]
UNCONSTRAINED = [each for each in VARIANTS if each.sampling.grammar is None and each.sampling.logit_bias is None]


async def test_they_are_the_models_own_before_anything_is_changed_or_cut(tiny: Path) -> None:
    async with open_engine(config_for(tiny, threads=1)) as engine:
        # The first of them once more without the others, whose rows are copied for what will change in them.
        asked = [*VARIANTS, *UNCONSTRAINED]
        got = [*(await answers(engine, VARIANTS)), *(await answers(engine, UNCONSTRAINED))]
    for request, each in zip(asked, got, strict=True):
        known = tuple(token.logprobs for token in each.tokens if token.logprobs is not None)
        tokens = [*(request.token_ids or ()), *each.token_ids]
        rows = reference(tiny, tokens)[len(request.token_ids or ()) - 1 : -1]
        assert len(known) == len(each.token_ids) > 0
        check(known, each.token_ids, rows, request.sampling.logprobs or 0)


async def test_asking_for_them_changes_no_token_and_asks_nothing_of_others(tiny: Path) -> None:
    plain = ask(tokens_for(1, 20), 30, temperature=1, seed=3)
    async with open_engine(config_for(tiny)) as engine:
        without, beside = await answers(engine, [plain, ask(tokens_for(1, 20), 30, temperature=1, seed=3, logprobs=5)])
    assert without.token_ids == beside.token_ids
    assert {token.logprobs for token in without.tokens} == {None}
    assert without.finished.logprobs is None


async def test_the_rows_that_ask_are_read_all_at_once_and_no_other(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, sizes = LogprobReader.read, list[int]()

    def counted(reader: LogprobReader, logits: npt.NDArray[np.float32], *more: Any) -> None:
        sizes.append(len(logits))
        read(reader, logits, *more)

    monkeypatch.setattr(LogprobReader, "read", counted)
    plain = [ask(tokens_for(seed, 20), 30, temperature=1, seed=seed) for seed in range(2)]
    asking = [ask(tokens_for(seed, 20), 30, logprobs=seed) for seed in range(2)]
    async with open_engine(config_for(tiny)) as engine:
        await answers(engine, plain)
        assert not sizes
        await answers(engine, [*plain, *asking])
    assert sum(sizes) == 2 * 30
    assert max(sizes) == 2


async def test_an_answer_that_is_not_streamed_has_all_of_them(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        streamed = await answer(engine, ask(max_tokens=10, logprobs=2))
        whole = await answer(engine, ask(max_tokens=10, logprobs=2, stream=False))
    given = [token.logprobs.chosen for token in streamed.tokens if token.logprobs]
    found = [each.chosen for each in whole.finished.logprobs or ()]
    assert [each.token_id for each in found] == [each.token_id for each in given] == list(streamed.token_ids[:10])
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in given], abs=1e-4)
    assert streamed.finished.logprobs is None
    joined = b"".join(bytes(each.chosen.bytes) for each in whole.finished.logprobs or ())
    assert joined.decode("utf-8", "replace") == whole.finished.text


async def test_capabilities_declare_as_many_as_can_be_asked_for(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        most = engine.info.capabilities.max_logprobs
        got = await answer(engine, ask(max_tokens=2, logprobs=most))
    assert most == MAX_LOGPROBS
    assert [len(token.logprobs.top) for token in got.tokens if token.logprobs] == [most, most]


def test_the_llm_gives_them_in_the_shape_that_vllm_has(tiny: Path) -> None:
    with LLM(str(tiny), n_ctx=512, n_gpu_layers=0) as llm:
        (out,) = llm.generate("x", SamplingParams(max_tokens=4, temperature=0, logprobs=5))
    (completion,) = out.outputs
    assert completion.logprobs is not None
    for token, known in zip(completion.token_ids, completion.logprobs, strict=True):
        assert known[token].rank == 1
        assert sorted(each.rank for each in known.values()) == [1, 2, 3, 4, 5]
    assert completion.cumulative_logprob == pytest.approx(
        sum(known[token].logprob for token, known in zip(completion.token_ids, completion.logprobs, strict=True))
    )
