"""A draft model changes nothing but the time, is refused where it cannot draft, and is kept in step with each row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from engine_world import alone, answer, answers, ask, at_once, config_for, settled, tokens_for
from test_engine_speculation import COLD, requests, said

from models import Kind, write_model
from uma import LLM, RuntimeConfig, open_engine
from uma.engine.policy.cost import CostModel
from uma.errors import ConfigError
from uma.types import Grammar


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that others draft for."""
    return write_model(tmp_path_factory.mktemp("draft") / "target.gguf", context_length=1_024)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same vocabulary that guesses badly."""
    return write_model(tmp_path_factory.mktemp("draft") / "small.gguf", seed=1, feed_forward=32, context_length=1_024)


def letters(seed: int) -> Sequence[int]:
    """A prompt in which hardly anything repeats: look-up has nothing to guess."""
    return tokens_for(seed, 90)


@pytest.mark.parametrize("n_ctx", [8_192, 256], ids=["with room for all", "under pressure"])
async def test_a_draft_model_changes_no_token_no_text_and_no_end(target: Path, small: Path, n_ctx: int) -> None:
    # Under pressure it is a matter of time whether anything is drafted; for the last one, which comes alone, it is.
    asked = [*requests(letters), ask(letters(99), 60, logit_bias={str(token): 20.0 for token in range(97, 100)})]
    config = config_for(target, **COLD, n_ctx=8_192, kv_unified="on")
    async with open_engine(config) as engine:
        expected = await alone(engine, asked)
    async with open_engine(attrs.evolve(config, n_ctx=n_ctx, speculate="always", draft=str(small))) as engine:
        assert engine.info.capabilities.speculation == f"prompt look-up, and the draft model {small.stem}"
        got = [*await at_once(engine, asked[:-1]), await answer(engine, asked[-1])]
        counters = await settled(engine)
    assert [said(each) for each in got] == [said(each) for each in expected]
    assert counters["draft_tokens_total"] > counters["draft_accepted_total"] > 0
    assert counters["draft_model_ms_total"] > 0
    assert n_ctx > 256 or counters["preemptions_total"] > 0, "there was no pressure"


async def test_a_model_that_drafts_for_itself_is_always_right(target: Path) -> None:
    """Its memory was cut and filled exactly as each row's was, with grammar and bias as the row has them."""
    forms: list[dict[str, Any]] = [
        {},
        {"logit_bias": {str(token): -5.0 for token in range(97, 123)}},
        {"grammar": Grammar(regex="[a-m]{25}[n-z]{25}")},
        {"ignore_eos": False, "min_tokens": 30, "max_tokens": 60},
    ]
    asked = [ask(letters(20 + index), **({"max_tokens": 60} | form)) for index, form in enumerate(forms)]
    upset = [ask(letters(30 + seed), 60, temperature=2.0, seed=seed) for seed in (1, 2)]
    config = config_for(target, **COLD, n_ctx=8_192, kv_unified="on", draft=str(target), speculate="always")
    async with open_engine(config) as engine:
        for request in asked:
            told = (await answer(engine, request)).finished.metrics.speculation
            assert told is not None
            assert told.accepted == told.drafted >= 20
        wrong = (await answer(engine, upset[0])).finished.metrics.speculation
        others = [attrs.evolve(each, token_ids=letters(40 + index)) for index, each in enumerate(asked[:2])]
        together = [each.finished.metrics.speculation for each in await answers(engine, [*others, upset[1]])]
    assert wrong is not None
    assert wrong.accepted < wrong.drafted
    assert [each is not None and each.accepted == each.drafted for each in together] == [True, True, False]


class TwoSteps(CostModel):
    """A machine on which a batch with drafts takes as long as two steps without, whatever it holds."""

    __slots__ = ()

    def has_decoded(self, rows: int) -> bool:
        return True

    def decode_ms(self, rows: int, cells: int) -> float:
        return 10.0 if rows == 1 else 20.0

    def hoped_decode_ms(self, rows: int, cells: int, *, is_trial: bool = False) -> float:
        return self.decode_ms(rows, cells)


class Clock:
    """By it the draft model's first `slow` batches take a minute each, and all others no time."""

    def __init__(self, slow: int = 0) -> None:
        self.slow = slow
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return 60_000.0 * min(self.reads, 2 * self.slow) + 0.01 * self.reads


async def test_guesses_that_hardly_ever_hold_are_given_up(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    likely, unlikely = ask(letters(1), 300), ask(letters(2), 300, temperature=2.0, seed=3)
    config = config_for(target, **COLD, n_ctx=2_048)
    async with open_engine(config) as engine:
        expected = await alone(engine, [likely, unlikely])
    monkeypatch.setattr("uma.engine.policy.scheduler.CostModel", TwoSteps)
    monkeypatch.setattr("uma.engine.worker.drafts.guessing.now_ms", Clock())
    async with open_engine(attrs.evolve(config, speculate="auto", draft=str(target))) as engine:
        got = await alone(engine, [likely, unlikely])
    assert [each.token_ids for each in got] == [each.token_ids for each in expected]
    right, wrong = (each.finished.metrics.speculation for each in got)
    assert right is not None
    assert wrong is not None
    assert right.accepted > 200
    assert 0 < wrong.drafted < right.drafted / 2


async def test_a_draft_model_that_was_slow_once_is_measured_again(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(slow=1)
    monkeypatch.setattr("uma.engine.policy.scheduler.CostModel", TwoSteps)
    monkeypatch.setattr("uma.engine.worker.drafts.guessing.now_ms", clock)
    monkeypatch.setattr("uma.engine.worker.drafts.guessing.MEASURE_AGAIN", 2)
    config = config_for(target, **COLD, n_ctx=2_048, speculate="auto", draft=str(target))
    async with open_engine(config) as engine:
        await alone(engine, [ask(letters(seed), 40) for seed in range(10, 16)])
    assert clock.reads > 2 * (clock.slow + 10), "the draft model was left alone for good"


async def test_guesses_go_on_in_parts_where_one_batch_cannot_hold_them(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows whose texts the draft model has read but for some tokens: a batch of 16 takes one or two of them."""
    asked = [ask(letters(50 + index), 40, id=str(index)) for index in range(3)]
    config = config_for(target, **COLD, n_ctx=2_048, kv_unified="on")
    async with open_engine(config) as engine:
        expected = await alone(engine, asked)
    drafted = attrs.evolve(config, speculate="always", draft=str(target), n_batch=16, n_ubatch=16)
    async with open_engine(drafted) as engine:
        got = await answers(engine, asked)
    assert [said(each) for each in got] == [said(each) for each in expected]
    told = [each.finished.metrics.speculation for each in got]
    assert all(each is not None and each.accepted >= 20 for each in told)


async def test_a_draft_model_that_cannot_draft_is_refused_at_the_start(target: Path, tmp_path: Path) -> None:
    state = write_model(tmp_path / "state.gguf", kind="recurrent")
    for draft, reason in (("builtin", "has another vocabulary"), (str(state), "cannot be cut behind a draft")):
        with pytest.raises(ConfigError, match=f"draft: .*{reason}.*; name a small"):
            async with open_engine(config_for(target, n_ctx=512, speculate="auto", draft=draft)):
                pass
    with pytest.raises(ConfigError, match="add --speculate auto"):
        RuntimeConfig(draft=str(target), speculate="off")


@pytest.mark.parametrize("kind", ["recurrent"])
async def test_memory_that_cannot_be_cut_needs_no_draft_model(tmp_path: Path, target: Path, kind: Kind) -> None:
    model = write_model(tmp_path / "model.gguf", kind=kind)
    async with open_engine(config_for(model, n_ctx=512, speculate="auto", draft=str(target))) as engine:
        assert "state cannot be cut" in engine.info.capabilities.speculation


def test_llm_takes_a_draft_model(target: Path) -> None:
    config = config_for(target, n_ctx=512, speculate="always")
    settings = {name: getattr(config, name) for name in ("n_ctx", "n_gpu_layers", "threads", "speculate", "flash_attn")}
    with LLM(target, draft=target, **settings) as llm:
        (output,) = llm.generate("Once upon a time", {"max_tokens": 20, "ignore_eos": True})
    assert output.metrics is not None
    assert output.metrics.speculation is not None
