"""Drafts change nothing but the time: what a reader is given is the same, token for token, whatever is drafted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from engine_world import SMALL_WINDOWS, Answer, alone, answer, answers, ask, at_once, config_for, settled, tokens_for
from hybrids import Hybrid, write_hybrid

from models import Kind, write_encoder, write_model
from uma import Request, RuntimeConfig, open_engine
from uma.engine import sizing
from uma.engine.ledger import Ledger
from uma.engine.sizing import RULES
from uma.engine.worker.runner import ModelRunner
from uma.llama.model import Model
from uma.protocol.codec import encode_event
from uma.protocol.frames import HEADER_BYTES
from uma.protocol.messages import EosEvent, wire_event
from uma.protocol.versions import SUPPORTED
from uma.types import Grammar, Source

COLD: dict[str, Any] = {"cache_tokens": 0, "cache_ram_mb": 0}
WITH_STATES: tuple[Hybrid, ...] = ("qwen35", "nemotron_h", "lfm2")
"""Hybrids of which llama.cpp keeps the states of a batch's last tokens."""
ONLY_LETTERS = {str(token): 20.0 for token in range(97, 100)}
LIST = {"type": "array", "items": {"type": "object", "properties": {"ab": {"enum": ["x", "y"]}}, "required": ["ab"]}}


def few_letters(seed: int, count: int = 120) -> tuple[int, ...]:
    """A prompt of three letters: any three tokens came before, so that every step has a draft, mostly a wrong one."""
    return tuple(random.Random(seed).choices(range(97, 100), k=count))


def requests(prompt: Callable[[int], Sequence[int]] = few_letters, lanes: Sequence[int] = (0,)) -> list[Request]:
    """Every way in which a token is chosen, and every way in which an output ends."""
    forms: list[dict[str, Any]] = [
        {},
        {"max_tokens": 3},
        {"ignore_eos": False, "logit_bias": ONLY_LETTERS},
        {"temperature": 1.0, "seed": 3, "logit_bias": ONLY_LETTERS},
        {"temperature": 0.8, "seed": 4, "top_p": 0.9, "repetition_penalty": 1.2, "penalty_window": 16, "logprobs": 3},
        {"temperature": 1.0, "seed": 5, "mirostat": 2},
        {"temperature": 1.2, "seed": 6, "dry_multiplier": 0.5, "logit_bias": ONLY_LETTERS, "logprobs": 0},
        {"logit_bias": ONLY_LETTERS, "stop": ("ab", "cc", "aaaaaaaaaaa"), "min_tokens": 5},
        {
            "temperature": 1.0,
            "seed": 7,
            "ignore_eos": False,
            "min_tokens": 20,
            "logit_bias": ONLY_LETTERS | {"262": 21.0},
        },
        {"temperature": 1.0, "seed": 8, "grammar": Grammar(regex="[abc]{30}(abcabcabc|cab)*c")},
        {"grammar": Grammar(json_schema=LIST), "ignore_eos": False},
        {"temperature": 1.5, "seed": 9, "grammar": Grammar(json_schema=LIST), "logprobs": 1, "ignore_eos": False},
        {"temperature": 1.0, "seed": 10, "n": 3, "logit_bias": ONLY_LETTERS, "stop": ("abc",)},
    ]
    return [
        ask(
            prompt(index),
            id=str(index),
            **({"max_tokens": 60} | form),
            stream=index % 4 != 3,
            priority=lanes[index % len(lanes)],
        )
        for index, form in enumerate(forms)
    ]


def said(got: Answer) -> Any:
    """All that a reader is given, but what depends on time."""
    finished, by_answer = got.finished, dict[int, list[tuple[int, str]]]()
    for token in got.tokens:
        by_answer.setdefault(token.index, []).append((token.token_id, token.text))
    parts = [(each.index, each.reason, each.seed, each.text, each.token_ids) for each in finished.answers]
    return finished.text, finished.token_ids, finished.reason, finished.usage.completion_tokens, parts, by_answer


def logprobs(got: Answer) -> list[float]:
    """Every log probability that it holds, those of the likeliest tokens included."""
    every = [*(got.finished.logprobs or ()), *(token.logprobs for token in got.tokens if token.logprobs)]
    return [one.logprob for each in every for one in (each.chosen, *each.top)]


def model_of(folder: Path, name: str) -> Path:
    """A model of this kind, with a context for 1,024 tokens."""
    path = folder / f"{name}.gguf"
    for hybrid in WITH_STATES:
        if name == hybrid:
            return write_hybrid(path, hybrid, context_length=1_024)
    kind: Kind = "attention" if name == "attention" else "sliding-window"
    return write_model(path, kind=kind, context_length=1_024)


@pytest.mark.parametrize("name", ["attention", "sliding-window", SMALL_WINDOWS, *WITH_STATES])
@pytest.mark.parametrize("layout", ["on", "off"])
async def test_drafts_change_no_token_no_text_and_no_log_probability(tmp_path: Path, name: str, layout: str) -> None:
    model = model_of(tmp_path, name)
    config = config_for(model, **COLD, kv_unified=layout, n_ctx=4_096, max_sequences=3)
    asked = requests()
    async with open_engine(config) as engine:
        expected = await alone(engine, asked)
        plain = await settled(engine)
    async with open_engine(attrs.evolve(config, speculate="always")) as engine:
        got = await alone(engine, asked)
        counters = await settled(engine)
    for mine, theirs in zip(got, expected, strict=True):
        assert said(mine) == said(theirs)
        assert logprobs(mine) == pytest.approx(logprobs(theirs), abs=1e-3)
    assert 50 < counters["draft_accepted_total"] < counters["draft_tokens_total"]
    assert counters["batch_calls_total"] < plain["batch_calls_total"]
    for counter in ("tokens_generated_total", "inter_token_ms_count"):
        assert counters[counter] == plain[counter], counter
    told = [each.finished.metrics.speculation for each in got]
    assert sum(each.drafted for each in told if each) == counters["draft_tokens_total"]
    assert sum(each.accepted for each in told if each) == counters["draft_accepted_total"]
    assert sum(each.saved_ms for each in told if each) == pytest.approx(counters["draft_saved_ms_total"], abs=0.1)
    assert counters["draft_saved_ms_total"] != 0
    assert not any(each.finished.metrics.speculation for each in expected)


@pytest.mark.parametrize("name", ["attention", *WITH_STATES])
async def test_drafts_of_unequal_length_in_one_step_change_nothing(tmp_path: Path, name: str) -> None:
    """Where sequences have ended and others begun, llama.cpp moves states as it computes rows of unequal length."""
    letters = {str(token): 20.0 for token in range(97, 105)}
    asked = [ask(tokens_for(seed, 100), 20 + seed * 7 % 40, logit_bias=letters) for seed in range(24)]
    config = config_for(model_of(tmp_path, name), **COLD, kv_unified="on", n_ctx=8_192, max_sequences=8)
    async with open_engine(config) as engine:
        expected = await alone(engine, asked)
    async with open_engine(attrs.evolve(config, speculate="always")) as engine:
        got = await answers(engine, asked)
        counters = await settled(engine)
    assert [each.token_ids for each in got] == [each.token_ids for each in expected]
    assert 0 < counters["draft_accepted_total"] < counters["draft_tokens_total"]


@pytest.mark.parametrize("name", WITH_STATES)
@pytest.mark.parametrize("layout", ["on", "off"])
async def test_behind_drafts_the_next_turns_of_several_begin_with_the_right_state(
    tmp_path: Path, name: str, layout: str
) -> None:
    """An answer ends where a draft did not hold, is cached as it is, and two go on from there at once."""
    asked = [ask(few_letters(seed), 40, logit_bias=ONLY_LETTERS) for seed in range(4)]
    config = config_for(model_of(tmp_path, name), kv_unified=layout, n_ctx=16_384, max_sequences=15)

    def turns(said: Sequence[Answer]) -> list[Request]:
        beginnings = [(*few_letters(seed), *got.token_ids) for seed, got in enumerate(said)]
        return [ask((*tokens, *few_letters(9 + turn, 40)), 20) for tokens in beginnings for turn in range(2)]

    async with open_engine(attrs.evolve(config, **COLD, speculate="off")) as engine:
        first = await alone(engine, asked)
        expected = await alone(engine, turns(first))
    async with open_engine(attrs.evolve(config, speculate="always")) as engine:
        got = await alone(engine, asked)
        again = await answers(engine, turns(first))
        counters = await settled(engine)
    assert [each.token_ids for each in got] == [each.token_ids for each in first]
    assert [each.token_ids for each in again] == [each.token_ids for each in expected]
    assert 0 < counters["draft_accepted_total"] < counters["draft_tokens_total"]
    assert sum(each.finished.usage.cached_tokens >= 159 for each in again) >= 3, "where the answer ends"


async def test_sequences_of_a_hybrid_have_states_for_drafts_as_far_as_memory_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_hybrid(tmp_path / "model.gguf", "qwen35", state=64)
    config = config_for(path, n_ctx=512, speculate="auto")
    with Model.load(path) as model:
        monkeypatch.setattr(
            sizing, "free_memory_bytes", lambda: 1_800 * model.shape.state_bytes
        )  # a quarter: 450 states
        plain, drafting, few = (
            Ledger(attrs.evolve(config, **asked), model.shape).context_params()
            for asked in ({"speculate": "off"}, {}, {"max_sequences": 4})
        )
        assert (plain.n_seq_max, plain.rolled_back) == (65, 0)
        assert drafting.n_seq_max < 65
        assert drafting.rolled_back == RULES.least_rolled_back
        assert (few.n_seq_max, few.rolled_back) == (5, RULES.max_draft)
    async with open_engine(attrs.evolve(config, max_sequences=120)) as engine:
        told = engine.info.capabilities.speculation
        assert told.startswith("none: for 121 sequences memory does not hold a state for each token of a draft")
        assert len((await answer(engine, ask(few_letters(1), 20))).token_ids) == 20


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
async def test_memory_that_cannot_be_cut_turns_drafts_off_and_says_why(tmp_path: Path, kind: Kind) -> None:
    model = write_model(tmp_path / "model.gguf", kind=kind)
    async with open_engine(config_for(model, n_ctx=512, speculate="always")) as engine:
        assert engine.info.capabilities.speculation == (
            f"none: a {kind} model's state cannot be cut behind the tokens of a draft that held"
        )
        got = await answer(engine, ask(few_letters(1), 20))
        counters = await settled(engine)
    assert got.finished.metrics.speculation is None
    assert counters["draft_tokens_total"] == 0


async def test_capabilities_name_prompt_look_up_where_it_is_on(tiny: Path, tmp_path: Path) -> None:
    look_up = "prompt look-up"
    for mode, told in (("auto", look_up), ("always", look_up), ("off", "none: --speculate off")):
        async with open_engine(config_for(tiny, speculate=mode)) as engine:
            assert engine.info.capabilities.speculation == told
    encoder = write_encoder(tmp_path / "encoder.gguf")
    async with open_engine(RuntimeConfig(model=str(encoder), speculate="auto")) as engine:
        assert engine.info.capabilities.speculation == "none: an encoder does not generate"


async def hang_up(source: Source, request: Request, after: int) -> None:
    """Read some events of a request, and leave it."""
    async with source.generate(request) as stream:
        for _ in range(after):
            await stream.__anext__()


@pytest.mark.parametrize("snapshots", [0, 16], ids=["computed again", "from snapshots"])
@pytest.mark.parametrize("name", ["attention", "qwen35", "lfm2"])
async def test_drafts_beside_others_that_are_preempted_and_cancelled_change_nothing(
    tmp_path: Path, name: str, snapshots: int
) -> None:
    model = model_of(tmp_path, name)
    asked = requests(lanes=(-1, 0, 1))
    config = config_for(model, **COLD, kv_unified="on", n_ctx=1_024)
    async with open_engine(config) as engine:
        expected = await alone(engine, asked)
    crowded = attrs.evolve(config, speculate="always", n_ctx=320, cache_ram_mb=snapshots, n_batch=128, n_ubatch=128)
    got: list[Answer] = []
    twice = [*asked, *(attrs.evolve(each, id=f"{each.id} again") for each in asked)]
    async with open_engine(crowded) as engine:

        async def read_all() -> None:
            got.extend(await at_once(engine, twice))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all)
            for number in range(3):
                nursery.start_soon(hang_up, engine, ask(few_letters(50 + number), 300, id=f"left {number}"), 3)
        # Under pressure it is a matter of time how much is drafted. This one comes alone, and is known from before.
        got.append(await answer(engine, asked[2]))
        counters = await settled(engine)
    for mine, theirs in zip(got, [*expected, *expected, expected[2]], strict=True):
        assert said(mine) == said(theirs)
    assert counters["requests_cancelled"] == 3
    # A hybrid's rows end in another order from one machine to the next: it need not run short of cells.
    assert counters["preemptions_total"] > 0 or name != "attention", "there was no pressure"
    assert counters["draft_accepted_total"] > 0


async def test_nothing_is_drafted_while_another_prompt_is_read(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def logged(name: str) -> Callable[..., Any]:
        method = getattr(ModelRunner, name)

        def call(runner: ModelRunner, *args: Any, **more: Any) -> Any:
            log.append(name)
            return method(runner, *args, **more)

        return call

    for name in ("verify", "prefill"):
        monkeypatch.setattr(ModelRunner, name, logged(name))
    long = ask(few_letters(1), 1_500, id="long", logit_bias=ONLY_LETTERS)
    config = config_for(tiny, speculate="always", n_batch=64, n_ubatch=64)
    async with open_engine(config) as engine, engine.generate(long) as stream:
        while "verify" not in log:
            await stream.__anext__()
        del log[:]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer, engine, ask(tokens_for(1, 500), 30))
            async for _ in stream:
                pass
    pieces = [index for index, name in enumerate(log) if name != "verify"]
    assert len(pieces) > 4
    assert "verify" not in log[pieces[0] : pieces[-1]]
    assert "verify" in log[pieces[-1] :]


async def test_a_text_with_drafts_is_exact_again_and_in_a_next_turn_and_its_figures_are_told(tiny: Path) -> None:
    first = ask(few_letters(3, 40), 40, logit_bias=ONLY_LETTERS)
    async with open_engine(config_for(tiny, **COLD)) as engine:
        reply = await answer(engine, first)
        turn = ask((*few_letters(3, 40), *reply.token_ids, *few_letters(2, 30)), 40)
        expected = await answer(engine, turn)
        plain = await settled(engine)
    async with open_engine(config_for(tiny, speculate="always")) as engine:
        got = [await answer(engine, first), await answer(engine, first), await answer(engine, turn)]
    assert [each.token_ids for each in got] == [reply.token_ids, reply.token_ids, expected.token_ids]
    again, next_turn = got[1].finished, got[2].finished
    assert again.metrics.speculation is not None
    assert again.metrics.speculation.drafted >= 30
    frames = {version: encode_event(wire_event(EosEvent, again), version)[HEADER_BYTES:] for version in SUPPORTED}
    newest, oldest = json.loads(frames["1.1"])["metrics"], json.loads(frames["1.0"])["metrics"]
    assert newest["speculation"] == attrs.asdict(again.metrics.speculation)
    assert oldest == {name: each for name, each in newest.items() if name != "speculation"}
    assert next_turn.usage.cached_tokens >= 79
    assert plain["draft_tokens_total"] == 0
