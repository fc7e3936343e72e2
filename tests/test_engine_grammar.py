"""Grammars in the engine: what ends is complete, and nothing else that the engine does changes a constrained output."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import attrs
import jsonschema
import numpy as np
import numpy.typing as npt
import pytest
import trio
import trio.testing
from engine_world import Answer, alone, answer, answers, ask, at_once, config_for, tokens_for
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schemas import CHECKER, schemas
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from harness import PATIENCE_SEC
from models import Kind, write_model
from uma import LLM, SamplingParams, open_engine
from uma.engine.engine import Engine
from uma.engine.worker.sampling import MAX_FORCED
from uma.errors import BadRequest, InternalError
from uma.llama import backend
from uma.llama import grammar as module
from uma.llama.batch import Batch
from uma.llama.context import Context
from uma.llama.grammar import GrammarMasks, GrammarState
from uma.types import GRAMMAR_FIELDS, Grammar, Request, Token

PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
        "favourite_colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["first_name", "age_in_years", "favourite_colours"],
    "additionalProperties": False,
}


def constrained(grammar: Grammar, seed: int = 0, **more: Any) -> Request:
    given: dict[str, Any] = {"max_tokens": 400, "ignore_eos": False, "temperature": 1.5, "seed": seed}
    return ask(tokens_for(seed, 20), grammar=grammar, id=f"g{seed}", **(given | more))


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), n_ctx=8_192, n_gpu_layers=0, threads=1, max_sequences=8) as llm:
        yield llm


@settings(max_examples=25)
@given(asked=st.lists(schemas, min_size=1, max_size=6), seed=st.integers(0, 2**31))
def test_every_output_that_ends_by_itself_validates(llm: LLM, asked: list[dict[str, Any]], seed: int) -> None:
    asked = [*asked, {"enum": [1, 2]}]  # the last one ends by itself always
    params = [
        SamplingParams(grammar=Grammar(json_schema=schema), temperature=1.5, max_tokens=300, seed=seed + index)
        for index, schema in enumerate(asked)
    ]
    for schema, out in zip(asked, llm.generate(["x"] * len(asked), params), strict=True):
        assert out.error is None
        (completion,) = out.outputs
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == 300
            continue
        assert completion.finish_reason == "stop"
        validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
        validator.validate(json.loads(completion.text))
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize(
    ("grammar", "matches"),
    [
        (Grammar(json_object=True), r"\{.*\}"),
        (Grammar(regex="[ab]{4}c"), "[ab]{4}c"),
        (Grammar(choice=["yes", "no", "¿qué?"]), "yes|no|¿qué\\?"),
        (Grammar(lark='start: "<" WORD ">"\nWORD: /[a-z]{3}/'), "<[a-z]{3}>"),
        (Grammar(gbnf='root ::= "(" [0-9]+ ")"'), r"\([0-9]+\)"),
        (Grammar(json_schema={"type": "integer", "minimum": 10, "maximum": 99}), "[1-9][0-9]"),
    ],
    ids=["json_object", "regex", "choice", "lark", "gbnf", "json_schema"],
)
async def test_each_grammar_that_capabilities_declare_holds(tiny: Path, grammar: Grammar, matches: str) -> None:
    async with open_engine(config_for(tiny)) as engine:
        assert engine.info.capabilities.grammars == GRAMMAR_FIELDS
        assert "grammar" in engine.info.capabilities.sampling_params
        for seed in range(5):
            got = await answer(engine, constrained(grammar, seed))
            if got.finished.reason == "stop":
                assert re.fullmatch(matches, got.text, re.DOTALL)


SAMPLERS: list[dict[str, Any]] = [
    {"mirostat": 1},
    {"mirostat": 2},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"dry_multiplier": 5.0},
    {"typical_p": 0.3},
    {"top_n_sigma": 1.0},
    {"dynatemp_range": 0.5},
    {"top_k": 1},
    {"logit_bias": {str(ord("c")): 100.0}, "logprobs": 2},
]


async def test_a_grammar_holds_with_every_sampler(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        for index, sampler in enumerate(SAMPLERS):
            got = await answer(engine, constrained(Grammar(regex="[ab]{3}-[0-9]{2}"), index, **sampler))
            assert re.fullmatch("[ab]{3}-[0-9]{2}", got.text), sampler


async def test_forced_tokens_are_read_together_and_not_sampled(tiny: Path) -> None:
    grammar = Grammar(json_schema={"const": {"a fixed key": "a fixed value", "another": [1, 2, 3]}})
    async with open_engine(config_for(tiny)) as engine:
        got = await answer(engine, constrained(grammar))
    assert got.finished.reason == "stop"
    assert got.text == '{"a fixed key":"a fixed value","another":[1,2,3]}'
    assert got.finished.usage.completion_tokens == len(got.tokens) > MAX_FORCED
    assert got.finished.metrics.decode_iterations == math.ceil(len(got.tokens) / MAX_FORCED) + 1


@pytest.mark.parametrize("kind", ["attention", "sliding-window", "recurrent", "hybrid"])
@pytest.mark.parametrize("layout", ["on", "off"])
async def test_a_constrained_output_is_the_same_beside_others_and_under_pressure(
    tmp_path: Path, kind: Kind, layout: str
) -> None:
    model = write_model(tmp_path / "model.gguf", kind=kind, context_length=2_048)
    requests = [constrained(Grammar(json_schema=PERSON), seed, temperature=0.9 * (seed % 2)) for seed in range(5)]
    requests += [
        ask(tokens_for(9, 30), 40, id="free"),
        ask(tokens_for(10, 30), 40, id="drawn", temperature=0.8, seed=3),
    ]
    requests += [constrained(Grammar(regex="[a-z ]{60}"), 6, stream=False, repetition_penalty=1.3)]
    async with open_engine(
        config_for(model, cache_tokens=0, cache_ram_mb=0, max_sequences=1, kv_unified=layout)
    ) as one:
        expected = await alone(one, requests)
    assert expected[0].finished.reason == "stop"
    crowded = config_for(model, n_ctx=144, n_batch=64, n_ubatch=64)
    beside = config_for(model, n_ctx=4_096, max_sequences=9, kv_unified=layout)
    for config in (beside, crowded):
        async with open_engine(config) as engine:
            got = await at_once(engine, requests)
            preemptions = engine.snapshot()["preemptions_total"]
        for mine, theirs in zip(got, expected, strict=True):
            assert (mine.token_ids, mine.text, mine.finished.text) == (
                theirs.token_ids,
                theirs.text,
                theirs.finished.text,
            )
            assert mine.finished.reason == theirs.finished.reason
    assert preemptions > 0 or kind == "recurrent", "there was no pressure"


@pytest.mark.parametrize("cache_ram_mb", [0, 64], ids=["without snapshots", "with snapshots"])
async def test_a_grammar_goes_on_where_a_preempted_request_was(tiny: Path, cache_ram_mb: int) -> None:
    low = ask(tokens_for(3, 300), 200, priority=-1, ignore_eos=False, temperature=1, seed=3)
    low = attrs.evolve(low, sampling=attrs.evolve(low.sampling, grammar=Grammar(regex="([a-z]{4}-){25}[0-9]{5}")))
    async with open_engine(config_for(tiny, max_sequences=1, cache_ram_mb=cache_ram_mb)) as engine:
        expected = await answer(engine, low)
        assert re.fullmatch("([a-z]{4}-){25}[0-9]{5}", expected.text)
        with trio.fail_after(PATIENCE_SEC):
            async with engine.generate(low) as stream:
                text = ""
                for _ in range(9):
                    event = await stream.__anext__()
                    text += event.text if isinstance(event, Token) else ""
                # It waits for its reader by now or soon, in the middle of its text.
                await answer(engine, ask(tokens_for(4, 20), 4, id="high", priority=1))
                async for event in stream:
                    text += event.text if isinstance(event, Token) else ""
        metrics = engine.snapshot()
    assert metrics["preemptions_total"] == 1
    assert text == expected.text


async def test_an_output_that_is_cut_inside_its_grammar_says_length(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        whole = await answer(engine, constrained(Grammar(json_schema=PERSON)))
        size = whole.finished.usage.completion_tokens
        for limit in (1, 2, size - 1, size):
            got = await answer(engine, constrained(Grammar(json_schema=PERSON), max_tokens=limit))
            assert got.token_ids == whole.token_ids[:limit]
            assert got.finished.reason == ("stop" if limit == size else "length")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stop", ["d", "cd", "abcd"])
async def test_a_stop_string_that_the_grammar_s_last_token_completes_is_seen(
    tiny: Path, stop: str, stream: bool
) -> None:
    grammars = [Grammar(choice=["abcd"]), Grammar(choice=["abcdef"]), Grammar(regex="abcd(ef)?")]
    async with open_engine(config_for(tiny)) as engine:
        for grammar in grammars:
            asked = constrained(grammar, stop=[stop, "dx"], stream=stream, temperature=0)
            got = await answer(engine, asked)
            text = got.text if stream else got.finished.text
            assert (text, got.finished.reason) == ("abcd".removesuffix(stop), "stop")
            assert got.finished.stop_string == stop


async def test_what_could_have_become_a_stop_string_is_given_out_where_the_grammar_ends(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        got = await answer(engine, constrained(Grammar(choice=["abcd"]), stop=["cdx"]))
    assert (got.text, got.finished.reason, got.finished.stop_string) == ("abcd", "stop", None)


@pytest.mark.parametrize("more", [{"min_tokens": 30}, {"ignore_eos": True}], ids=str)
async def test_a_grammar_with_nothing_left_ends_whatever_min_tokens_says(tiny: Path, more: dict[str, Any]) -> None:
    async with open_engine(config_for(tiny)) as engine:
        for temperature in (0.0, 1.0):
            got = await answer(engine, constrained(Grammar(regex="ab?"), temperature=temperature, **more))
            assert (got.text, got.finished.reason) == ("ab", "stop")
            got = await answer(engine, constrained(Grammar(regex="a*"), temperature=temperature, max_tokens=40, **more))
            assert re.fullmatch("a{30,40}", got.text)


async def test_a_grammar_that_cannot_be_served_is_refused_before_anything_is_computed(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        schema: dict[str, Any] = {"properties": {"x": {"contains": {}}}}
        with pytest.raises(BadRequest, match=r"grammar\.json_schema\.properties\.x"):
            await answer(engine, constrained(Grammar(json_schema=schema)))
        with pytest.raises(BadRequest, match="echo: a grammar is about the output"):
            await answer(engine, constrained(Grammar(regex="a"), echo=True))
        metrics = engine.snapshot()
    assert (metrics["batch_calls_total"], metrics["requests_rejected"]) == (0, 2)


async def test_new_grammars_are_compiled_at_once_on_cores_to_spare_and_no_other_request_waits(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, go_on = threading.Barrier(3), threading.Event()

    def slow(tokenizer: LLTokenizer, source: str, **how: Any) -> LLMatcher:
        compiling.wait(PATIENCE_SEC)  # for the other one
        assert go_on.wait(PATIENCE_SEC)
        return LLMatcher(tokenizer, source, **how)

    known = [Grammar(json_schema={"const": 1, "description": "x" * size}) for size in (1, 5_000)]
    monkeypatch.setattr(backend, "core_count", lambda: 4)  # one computes, one is Trio's
    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        for grammar in known:
            await answer(engine, constrained(grammar))
        compiler = Mock(wraps=LLMatcher, side_effect=slow)
        monkeypatch.setattr(module, "LLMatcher", compiler)
        # The second of two alike compiles nothing, and leaves the core to the next.
        for schema in (PERSON, PERSON, {"enum": ["new"]}):
            nursery.start_soon(answer, engine, constrained(Grammar(json_schema=schema)))
            await trio.testing.wait_all_tasks_blocked()
        await trio.to_thread.run_sync(compiling.wait, PATIENCE_SEC)
        with trio.fail_after(PATIENCE_SEC):
            free = await answer(engine, ask(max_tokens=40))
            assert free.finished.reason == "length"
            for grammar in known:
                assert (await answer(engine, constrained(grammar))).text == "1"
        go_on.set()
    assert compiler.call_count == 2


async def test_a_grammar_whose_request_is_cancelled_in_mid_compile_is_not_compiled_beside_itself(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, go_on, got = threading.Event(), threading.Event(), list[str]()

    def slow(tokenizer: LLTokenizer, source: str, **how: Any) -> LLMatcher:
        compiling.set()
        assert go_on.wait(PATIENCE_SEC)
        return LLMatcher(tokenizer, source, **how)

    async def ask_for(scope: trio.CancelScope) -> None:
        with scope:
            got.append((await answer(engine, constrained(Grammar(json_schema={"const": 1})))).text)

    monkeypatch.setattr(backend, "core_count", lambda: 4)
    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        compiler = Mock(wraps=LLMatcher, side_effect=slow)
        monkeypatch.setattr(module, "LLMatcher", compiler)
        nursery.start_soon(ask_for, scope := trio.CancelScope())
        assert await trio.to_thread.run_sync(compiling.wait, PATIENCE_SEC)
        scope.cancel()
        nursery.start_soon(ask_for, trio.CancelScope())
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()
    assert (compiler.call_count, got) == (1, ["1"])


async def test_what_the_first_grammar_needs_is_made_before_a_server_is_ready(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance makes it under the GIL, so that streams would stand still."""
    made: list[LLTokenizer] = []

    def make(*given: Any, **how: Any) -> LLTokenizer:
        made.append(LLTokenizer(*given, **how))
        return made[-1]

    monkeypatch.setattr(module, "LLTokenizer", make)
    for is_server in (True, False):
        made.clear()
        async with open_engine(config_for(tiny), prepares_grammars=is_server) as engine:
            assert len(made) == is_server
            assert (await answer(engine, constrained(Grammar(json_schema={"const": 1})))).text == "1"
        assert len(made) == 1


async def test_no_new_grammar_waits_while_the_place_of_another_s_error_is_sought(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeking, go_on = threading.Event(), threading.Event()
    refusals: list[str] = []

    def slow(source: str, tokenizer: LLTokenizer, **how: Any) -> str:
        seeking.set()
        assert go_on.wait(PATIENCE_SEC)
        return LLMatcher.validate_grammar(source, tokenizer, **how)

    async def ask_in_vain(engine: Engine) -> None:
        with pytest.raises(BadRequest) as caught:
            await answer(engine, constrained(Grammar(json_schema={"properties": {"x": {"contains": {}}}})))
        refusals.append(caught.value.message)

    monkeypatch.setattr(backend, "core_count", lambda: 4)
    compiler = Mock(wraps=LLMatcher)
    compiler.validate_grammar.side_effect = slow
    monkeypatch.setattr(module, "LLMatcher", compiler)
    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(ask_in_vain, engine)
        assert await trio.to_thread.run_sync(seeking.wait, PATIENCE_SEC)
        assert (await answer(engine, constrained(Grammar(json_schema={"const": 1})))).text == "1"
        go_on.set()
    assert refusals[0] == refusals[1]
    assert refusals[0].startswith("grammar.json_schema.properties.x: ")


async def test_masks_take_threads_by_the_cores_that_this_process_can_use(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Mock(wraps=LLExecutor)
    monkeypatch.setattr(module, "LLExecutor", executor)
    monkeypatch.setattr(backend, "core_count", lambda: 6)
    async with open_engine(config_for(tiny, threads=1)) as engine:
        await answer(engine, constrained(Grammar(json_schema={"type": "integer"})))
    executor.assert_called_once_with(3)


async def test_masks_of_all_rows_are_computed_beside_their_batch(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, asked, made = Context.begin, threading.Event(), threading.Event()
    sizes: list[int] = []

    class Watched(GrammarMasks):
        def begin(self, states: Sequence[GrammarState], drafts: Sequence[list[int]] | None = None) -> None:
            asked.set()
            made.clear()
            super().begin(states, drafts)

        def _fill(self, states: Sequence[GrammarState], drafts: Sequence[list[int]]) -> npt.NDArray[np.float32]:
            sizes.append(len(states))
            found = super()._fill(states, drafts)
            made.set()
            return found

        def wait(self) -> npt.NDArray[np.float32]:
            assert not asked.is_set(), "they were asked for behind the batch"
            return super().wait()

    def until_made(context: Context, batch: Batch) -> int:
        code = begin(context, batch)
        if asked.is_set():
            assert made.wait(PATIENCE_SEC)
            asked.clear()
        return code

    monkeypatch.setattr("uma.engine.worker.sampling.GrammarMasks", Watched)
    monkeypatch.setattr(Context, "begin", until_made)
    async with open_engine(config_for(tiny)) as engine:
        got = await answers(engine, [constrained(Grammar(regex="[a-z]{30}"), seed, min_tokens=30) for seed in range(3)])
        batches = engine.snapshot()["batch_calls_total"]
    assert [len(each.text) for each in got] == [30] * 3
    assert max(sizes) == 3
    assert len(sizes) <= batches


class Unlucky:
    """llguidance's own, which fails where it is given a grammar whose text can end."""

    def __init__(self, threads: int) -> None:
        self._real = LLExecutor(threads)

    def unsafe_compute_mask_ptr(self, interpreters: list[tuple[LLMatcher, int]], *place: int) -> None:
        if any(matcher.is_accepting() for matcher, _ in interpreters):
            raise MemoryError("no memory for this mask")
        self._real.unsafe_compute_mask_ptr(interpreters, *place)


async def test_a_fault_in_a_grammar_s_mask_ends_its_request_alone(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = [constrained(Grammar(regex="[a-y]{30}"), seed) for seed in range(3)]
    good.append(ask(tokens_for(9, 20), 40, id="free"))
    async with open_engine(config_for(tiny)) as engine:
        expected = await answers(engine, good)
        monkeypatch.setattr(module, "LLExecutor", Unlucky)
    failed: list[InternalError] = []

    async def fail(engine: Engine) -> None:
        with pytest.raises(InternalError, match="which tokens its grammar allows could not be computed") as caught:
            await answer(engine, constrained(Grammar(regex="[a-z]{9}[0-9]*"), 7))
        failed.append(caught.value)

    async with open_engine(config_for(tiny)) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, engine)
            got = await answers(engine, good)
        again = await answers(engine, good)
    assert len(failed) == 1
    assert "no memory for this mask" in caplog.text
    assert [each.token_ids for each in got] == [each.token_ids for each in expected]
    assert [each.token_ids for each in again] == [each.token_ids for each in expected]


async def test_a_grammar_that_is_too_complex_at_a_place_of_its_text_ends_as_a_bad_request(tiny: Path) -> None:
    words = " | ".join(f'"w{index}x" root' for index in range(2_500))
    async with open_engine(config_for(tiny)) as engine:
        with pytest.raises(BadRequest, match=r"grammar: at one place of its text .* more than 2,000 ways"):
            await answer(engine, constrained(Grammar(gbnf=f"root ::= [ab] ({words})")))
        assert (await answer(engine, constrained(Grammar(choice=["yes"])))).text == "yes"


def test_a_grammar_has_exactly_one_form() -> None:
    with pytest.raises(ValueError, match=r"grammar: give exactly one of json_schema, .*; none was given"):
        Grammar()
    with pytest.raises(ValueError, match=r"exactly one of .*; these came: json_object, regex"):
        Grammar(regex="a", json_object=True)


async def test_a_cancelled_constrained_request_leaves_the_others_alone(tiny: Path) -> None:
    long = constrained(Grammar(regex="[a-z]{200}"), 1)
    async with open_engine(config_for(tiny)) as engine:
        expected = await answer(engine, constrained(Grammar(regex="[a-z]{100}"), 2))
        async with trio.open_nursery() as nursery:

            async def leave() -> None:
                async with engine.generate(long) as stream:
                    await stream.__anext__()

            nursery.start_soon(leave)
            got = await answer(engine, constrained(Grammar(regex="[a-z]{100}"), 2))
    assert got.token_ids == expected.token_ids


async def test_a_slow_reader_of_a_long_forced_text_is_given_all_of_it(tiny: Path) -> None:
    text = "forced " * 200
    async with open_engine(config_for(tiny)) as engine:
        got = await answer(engine, constrained(Grammar(choice=[text]), max_tokens=1_500))
        assert got.text == text


# Logit bias


async def test_a_bias_of_a_hundred_decides_and_one_of_minus_a_hundred_excludes(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        free = await answer(engine, ask(max_tokens=8))
        forced = await answer(engine, ask(max_tokens=8, logit_bias={"z": 100}))
        assert forced.text == "z" * 8
        first = free.token_ids[0]
        other = await answer(engine, ask(max_tokens=8, logit_bias={first: -100}))
        assert first not in other.token_ids
        drawn = await answer(engine, ask(max_tokens=8, temperature=1, seed=1, logit_bias={ord("q"): 100}))
        assert drawn.text == "q" * 8


async def test_a_bias_for_a_token_that_does_not_exist_is_refused(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        with pytest.raises(BadRequest, match="logit_bias: 99999 is not in the vocabulary"):
            await answer(engine, ask(logit_bias={"99999": 1}))
        with pytest.raises(BadRequest, match="logit_bias: '' has no token"):
            await answer(engine, ask(logit_bias={"": 1}))


async def test_a_grammar_that_is_compiled_again_holds_up_its_own_row_alone(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = constrained(Grammar(regex="[a-z]*[aeiou][a-z]{40}"), 3)
    async with open_engine(config_for(tiny)) as engine:
        expected = await answer(engine, request)
    monkeypatch.setattr(module, "KEPT_LIMITS", LLParserLimits(max_lexer_states=150, verbose_errors=False))
    real, made, may_go_on, got = module._source, list[Grammar](), threading.Event(), list[Answer]()

    def source(grammar: Grammar) -> str:
        made.append(grammar)
        assert len(made) != 2 or may_go_on.wait(PATIENCE_SEC)
        return real(grammar)

    async def read() -> None:
        got.append(await answer(engine, request))

    monkeypatch.setattr(module, "_source", source)
    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(read)
        async with engine.generate(ask(max_tokens=1_500)) as stream:
            while len(made) < 2:
                await anext(stream)
            for _ in range(20):
                await anext(stream)
            assert not got
            assert "grammar" in [each.waits_for for each in (await engine.activity()).running]
            may_go_on.set()
    assert [each.token_ids for each in got] == [expected.token_ids]
    assert engine.snapshot()["preemptions_total"]
