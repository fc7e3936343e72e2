"""A draft model changes nothing but the time, is refused where it cannot draft, and is kept in step with each row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from engine_world import alone, answer, answers, ask, config_for, settled, tokens_for
from test_engine_speculation import COLD, requests, said

from models import Kind, write_model
from uma import LLM, RuntimeConfig, open_engine
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
        assert engine.info.capabilities.speculation == "prompt look-up, and the draft model Tiny test model"
        got = [*await answers(engine, asked[:-1]), await answer(engine, asked[-1])]
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


async def test_the_policy_learns_whether_a_draft_model_pays(target: Path, small: Path) -> None:
    """Guesses that hardly ever hold are given up; the tokens are the same all the while."""
    request = ask(letters(1), 400, temperature=1.5, seed=3)
    config = config_for(target, **COLD, n_ctx=2_048)
    async with open_engine(config) as engine:
        expected = await answer(engine, request)
    async with open_engine(attrs.evolve(config, speculate="auto", draft=str(small))) as engine:
        got = await answer(engine, request)
    told = got.finished.metrics.speculation
    assert got.token_ids == expected.token_ids
    assert told is None or told.drafted < 400


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
