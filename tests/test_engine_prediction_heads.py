"""The model's own prediction head as a drafter (MTP): the text is the same with it and without, in fewer steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
import trio
from engine_world import Answer, alone, answer, answers, ask, at_once, config_for, settled, tokens_for
from every_kind import is_all
from gemma4 import write_assistant, write_gemma4
from hybrids import Predicting, write_hybrid, write_predicting
from projectors import MARKER, png, write_projector
from test_engine_pictures import about

from uma import Request, open_engine
from uma.engine import sizing
from uma.engine.engine import Engine
from uma.errors import ConfigError
from uma.types import Grammar, SamplingParams

COLD: dict[str, Any] = {"cache_tokens": 0, "cache_ram_mb": 0}
LETTERS = {str(token): 20.0 for token in range(97, 123)}
HEAD = "the model's prediction head (MTP)"


ONE: Predicting = "qwen35"
CHAINED: Predicting = "step35"
"""A kind with one head, and one with several, each of which guesses a token."""


@pytest.fixture
def predicting(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model whose heads predict what the model itself says."""
    kind: Predicting = getattr(request, "param", ONE)
    return write_predicting(tmp_path / "model.gguf", kind, context_length=1_024)


def ids(found: Sequence[Answer]) -> list[list[int]]:
    return [list(each.token_ids) for each in found]


def conversations(count: int = 8, beginning: Sequence[int] = ()) -> list[Request]:
    """Prompts of which no part comes again, with answers of several lengths."""
    prompts = [(*beginning, *tokens_for(seed, 40 + 7 * seed)) for seed in range(count)]
    return [ask(each, 24 + 5 * seed, logit_bias=LETTERS, id=str(seed)) for seed, each in enumerate(prompts)]


async def share(engine: Engine) -> tuple[float, int]:
    """Accepted drafted tokens, as a share of all; and batches so far."""
    counters = await settled(engine)
    return counters["draft_accepted_total"] / counters["draft_tokens_total"], counters["batch_calls_total"]


@pytest.mark.parametrize(
    ("kind", "layout"), [(ONE, "on"), (ONE, "off"), (CHAINED, "on"), *([("qwen35moe", "on")] if is_all() else [])]
)
async def test_a_head_that_predicts_its_own_model_is_believed_and_saves_steps(
    tmp_path: Path, kind: Predicting, layout: str
) -> None:
    predicting = write_predicting(tmp_path / "model.gguf", kind, context_length=1_024)
    config = config_for(predicting, **COLD, kv_unified=layout, n_ctx=4_096, max_sequences=3)
    asked = [attrs.evolve(each, sampling=attrs.evolve(each.sampling, logit_bias={})) for each in conversations(5)]
    async with open_engine(config) as engine:
        expected = await alone(engine, asked)
        plain = await settled(engine)
    async with open_engine(attrs.evolve(config, speculate="always")) as engine:
        assert engine.info.capabilities.speculation == f"prompt look-up, and {HEAD}"
        got = await alone(engine, asked)
        accepted, batches = await share(engine)
    assert ids(got) == ids(expected)
    assert accepted >= 0.9
    assert batches < plain["batch_calls_total"] / 2


@pytest.mark.parametrize("predicting", [ONE, CHAINED], indirect=True)
async def test_a_head_knows_a_prefix_that_is_shared_and_what_several_say_at_once(predicting: Path) -> None:
    """Its cells are copied and cut with the model's. What it does not know, it would guess from its own layer alone."""
    system, config = tokens_for(99, 200), config_for(predicting, n_ctx=8_192, max_sequences=8)
    asked = conversations(beginning=system)
    async with open_engine(attrs.evolve(config, **COLD)) as engine:
        expected = await alone(engine, asked)
    async with open_engine(attrs.evolve(config, speculate="always")) as engine:
        await answer(engine, ask(system, 1))
        got = await answers(engine, asked)
        again = await answers(engine, asked)
        accepted, _ = await share(engine)
    assert ids(got) == ids(again) == ids(expected)
    assert all(each.finished.usage.cached_tokens >= 190 for each in got)
    assert accepted >= 0.9


@pytest.mark.parametrize(("kind", "snapshots"), [(ONE, 0), (ONE, 16), (CHAINED, 16)])
async def test_a_head_that_is_wrong_changes_nothing_beside_others_that_are_preempted_and_cancelled(
    tmp_path: Path, kind: Predicting, snapshots: int
) -> None:
    """What was preempted is computed again, or comes back from snapshots."""
    model = write_hybrid(tmp_path / "model.gguf", kind, context_length=1_024, predicts=True)
    config = config_for(model, **COLD, n_ctx=1_024, kv_unified="on")
    lanes: tuple[Literal[-1, 0, 1], ...] = (-1, 0, 1)
    asked = [attrs.evolve(each, priority=lanes[number % 3]) for number, each in enumerate(conversations(12))]
    async with open_engine(config) as engine:
        expected = await alone(engine, asked)
    crowded = attrs.evolve(config, speculate="always", n_ctx=352, cache_ram_mb=snapshots, n_batch=128, n_ubatch=128)
    async with open_engine(crowded) as engine, trio.open_nursery() as nursery:

        async def leave(number: int) -> None:
            async with engine.generate(ask(tokens_for(number, 50), 300, id=f"left {number}")) as stream:
                for _ in range(3):
                    await stream.__anext__()

        for number in range(3):
            nursery.start_soon(leave, number)
        got = await answers(engine, asked)
        counters = await settled(engine)
    assert ids(got) == ids(expected)
    assert counters["draft_tokens_total"] > 0


@pytest.mark.parametrize("predicting", [ONE, CHAINED], indirect=True)
async def test_after_a_restart_a_prompt_goes_on_from_the_disk_with_the_same_text(
    predicting: Path, tmp_path: Path
) -> None:
    """A snapshot has the heads' cells too."""
    asked = ask(tokens_for(1, 300), 30, logit_bias=LETTERS)
    config = config_for(predicting, n_ctx=4_096, max_sequences=2)
    async with open_engine(attrs.evolve(config, **COLD)) as engine:
        expected = await answer(engine, asked)
    drafting = attrs.evolve(config, speculate="always", cache_dir=str(tmp_path / "cache"), cache_ram_mb=64)
    async with open_engine(drafting) as engine:
        before, again = await alone(engine, [asked, asked])
    async with open_engine(attrs.evolve(drafting, speculate="mtp")) as engine:
        got = await answer(engine, asked)
        counters = await settled(engine)
    assert counters["draft_accepted_total"] == counters["draft_tokens_total"]
    assert before.token_ids == again.token_ids == got.token_ids == expected.token_ids
    assert got.finished.usage.cached_tokens > 200


async def test_what_a_grammar_does_not_allow_is_not_drafted_into_the_text(predicting: Path) -> None:
    schema = {"type": "array", "items": {"enum": ["xy", "yx"]}}
    forms: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.5, "seed": 2}]
    asked = [
        ask(tokens_for(3, 40), 60, grammar=Grammar(json_schema=schema), ignore_eos=False, **form) for form in forms
    ]
    config = config_for(predicting, **COLD)
    async with open_engine(config) as engine:
        expected = await alone(engine, asked)
    async with open_engine(attrs.evolve(config, speculate="always")) as engine:
        got = await answers(engine, [attrs.evolve(one, id=str(number)) for number, one in enumerate(asked)])
        accepted, _ = await share(engine)
    assert ids(got) == ids(expected)
    assert accepted > 0


async def test_a_head_that_is_not_told_of_pictures_changes_nothing_behind_them(tmp_path: Path) -> None:
    """With M-RoPE a picture has fewer positions than tokens."""
    model = write_hybrid(tmp_path / "model.gguf", "qwen35", context_length=1_024, predicts=True)
    write_projector(tmp_path / "mmproj-model.gguf", "qwen3vl")
    longest = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    asked = [
        about(
            f"{MARKER}What is this?{MARKER} And this?", png(40 + 9 * seed, 30, seed), png(56, 56, 9), sampling=longest
        )
        for seed in range(4)
    ]
    config = config_for(model, n_ctx=4_096, max_sequences=4)
    async with open_engine(attrs.evolve(config, **COLD)) as engine:
        expected = await alone(engine, asked)
    async with open_engine(attrs.evolve(config, speculate="always")) as engine:
        got = await answers(engine, [attrs.evolve(one, id=str(number)) for number, one in enumerate(asked)])
        again = await alone(engine, asked)
        counters = await settled(engine)
    assert ids(got) == ids(again) == ids(expected)
    assert counters["draft_tokens_total"] > 0


async def test_mtp_is_the_head_alone_and_is_refused_of_a_model_without_one(predicting: Path, tiny: Path) -> None:
    async with open_engine(config_for(predicting, speculate="mtp")) as engine:
        assert engine.info.capabilities.speculation == HEAD
    async with open_engine(config_for(predicting, speculate="off")) as engine:
        assert engine.info.capabilities.speculation == "none: --speculate off"
    with pytest.raises(ConfigError, match=r"mtp is unsupported with .*: it has no prediction head"):
        async with open_engine(config_for(tiny, speculate="mtp")):
            pass


async def test_without_memory_for_a_head_auto_goes_on_without_it_and_mtp_does_not(
    predicting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_little(*_: object) -> None:
        raise ConfigError("speculate: there is no memory for the prediction head (64 bytes a token)")

    monkeypatch.setattr(sizing, "predicting_params", too_little)
    async with open_engine(config_for(predicting, speculate="auto")) as engine:
        assert engine.info.capabilities.speculation == "prompt look-up"
        assert len((await answer(engine, ask(max_tokens=4))).token_ids) == 4
    with pytest.raises(ConfigError, match="no memory for the prediction head"):
        async with open_engine(config_for(predicting, speculate="mtp")):
            pass


async def test_an_assistant_drafts_out_of_the_model_s_cells(tmp_path: Path) -> None:
    """Alone and eight at once, behind a shared prefix, preempted, cancelled, and from the disk."""
    model, assistant = write_gemma4(tmp_path / "model.gguf"), write_assistant(tmp_path / "assistant.gguf")
    config, system = config_for(model, n_ctx=8_192, max_sequences=8), tokens_for(99, 200)
    asked = conversations(beginning=system)
    async with open_engine(attrs.evolve(config, **COLD)) as engine:
        expected = ids(await alone(engine, asked))
    drafting = attrs.evolve(config, draft=str(assistant), speculate="always")
    kept: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "cache_ram_mb": 64}
    async with open_engine(attrs.evolve(drafting, **kept)) as engine:
        assert engine.info.capabilities.speculation == "prompt look-up, and the assistant assistant (MTP)"
        async with engine.generate(ask(system, 300, id="left")) as stream:
            for _ in range(9):
                await stream.__anext__()
        assert ids(await answers(engine, asked)) == expected
        assert (await settled(engine))["draft_tokens_total"] > 0
    async with open_engine(attrs.evolve(drafting, **kept, speculate="mtp")) as engine:
        again = await alone(engine, asked)
    assert ids(again) == expected
    assert all(each.finished.usage.cached_tokens >= 128 for each in again)
    crowded = attrs.evolve(drafting, n_ctx=640)  # with `mtp`, time would say whether guesses that fail are made
    async with open_engine(crowded) as engine:
        assert ids(await at_once(engine, asked)) == expected
        counters = await settled(engine)
    assert counters["preemptions_total"] > 0
    assert counters["draft_tokens_total"] > 0


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ({"embed": 32}, "for embeddings of 32 figures"),
        ({"kv_heads": 2}, "keys of 64 figures"),
        (None, "is no assistant"),
    ],
)
async def test_a_draft_that_cannot_read_the_cells_is_refused_before_llama_cpp_believes_it(
    tmp_path: Path, tiny: Path, figures: dict[str, int] | None, reason: str
) -> None:
    model = write_gemma4(tmp_path / "model.gguf")
    draft = tiny if figures is None else write_assistant(tmp_path / "assistant.gguf", **figures)
    with pytest.raises(ConfigError, match=reason):
        async with open_engine(config_for(model, draft=str(draft), speculate="mtp")):
            pass
