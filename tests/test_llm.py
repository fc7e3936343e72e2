"""The synchronous way in, as a script or a notebook uses it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import psutil
import pytest
from chat_templates import HERMES_CALLS
from engine_world import break_decode_thread
from script_model import write_script_model

import uma
from harness import PATIENCE_SEC, run_to_end
from models import write_model
from uma import LLM, DecisionQuestion, Engine, Grammar, Message, RuntimeConfig, SamplingParams, connect, open_engine
from uma.errors import BadRequest, ConfigError, ModelError, PromptTooLarge, UmaError, WrongValues
from uma.llm import Completion
from uma.llm.arguments import messages_of, tool_of
from uma.types import DEFAULT_MAX_TOKENS, Tool, ToolCallDelta

TINY: dict[str, Any] = {
    "n_ctx": 2_048, "threads": 1, "n_gpu_layers": 0,
    "flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32",
}  # fmt: skip
"""As `engine_world.config_for`."""


def params(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **({"ignore_eos": True, "temperature": 0} | more))


def kept(fields: Any) -> Any:
    """The same, of no type that mypy would check."""
    return fields


def open_llm(path: Path, **settings: Any) -> LLM:
    return LLM(str(path), **(TINY | settings))


@pytest.fixture(scope="module")
def timed(tiny: Path) -> Any:
    """It computes one sequence at a time."""
    with open_llm(tiny, n_ctx=16_384, max_sequences=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Any:
    with open_llm(tiny) as opened:
        yield opened


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"Prompt {index} " * (index % 7 + 1) for index in range(40)]
    together = llm.generate(prompts, params())
    assert [out.prompt for out in together] == prompts
    alone = [llm.generate(prompt, params())[0] for prompt in prompts]
    assert [out.outputs[0].text for out in together] == [out.outputs[0].text for out in alone]
    assert len({out.outputs[0].text for out in together}) > 30
    assert len(llm.generate((str(index) for index in range(5)), params())) == 5, "they may come from a generator"
    assert llm.generate([], params()) == llm.chat([], params()) == []


def test_an_output_says_all_there_is_to_know(llm: LLM) -> None:
    (out,) = llm.generate("Once", params(5, seed=3, temperature=1.0))
    (completion,) = out.outputs
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")
    assert out.error is None
    assert out.seed == 3
    assert out.usage is not None
    assert out.usage.completion_tokens == 5
    assert out.metrics is not None
    assert out.metrics.ttft_ms > 0


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    outs = llm.generate(["a", "b", "c"], [params(1), params(2), params(3)])
    assert [len(out.outputs[0].token_ids) for out in outs] == [1, 2, 3]
    with pytest.raises(ValueError, match="2 came for 3 prompts"):
        llm.generate(["a", "b", "c"], [params(1), params(2)])


def test_what_imports_the_library_does_not_get_a_test_runner_with_it() -> None:
    code = "import sys, uma.llm, uma.server; print({'pytest', 'trio.testing'} & sys.modules.keys())"
    assert run_to_end(sys.executable, "-c", code).stdout.strip() == "set()"


def test_a_bad_prompt_costs_the_others_nothing(llm: LLM) -> None:
    with pytest.warns(UserWarning, match=r"2 of 4 prompts failed, the first because: prompt too large: ") as warned:
        outs = llm.generate(["good", "x" * 5_000, "\ud800", "also good"], params())
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert [type(out.error) for out in outs] == [type(None), PromptTooLarge, WrongValues, type(None)]
    assert [out.outputs[0].finish_reason for out in outs] == ["length", "error", "error", "length"]
    assert "prompt" in str(outs[2].error)
    assert [len(out.outputs[0].token_ids) for out in outs] == [8, 0, 0, 8]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda llm: llm.generate(None),
            "prompts: expected .* list of token ids, or a list of these, not None",
        ),
        (lambda llm: llm.generate(b"x"), "prompts: expected a string or a list of token ids, or a"),
        (lambda llm: llm.generate(["x", 7]), r"prompts\[1\]: expected a string or a list of token ids, not 7"),
        (lambda llm: llm.generate([Message("user", "x")]), "llm.chat takes conversations"),
        (
            lambda llm: llm.generate("x", 64),
            "sampling_params: expected SamplingParams, a dict of its fields",
        ),
        (lambda llm: llm.generate("x", [64]), r"sampling_params\[0\]: expected SamplingParams or a dict"),
        (lambda llm: llm.generate("x", max_new_tokens=3), r"'max_new_tokens'; give sampling_params=.*\(max_tokens=…\)"),
        (lambda llm: llm.chat([], max_tokens=3), r"'max_tokens'; give sampling_params=SamplingParams\(max_tokens=…\)"),
        (lambda llm: llm.stream("x", colour="red"), "unexpected keyword argument 'colour'$"),
        (
            lambda llm: SamplingParams(**kept({"max_new_tokens": 3})),
            r"max_new_tokens is no field of it; did you mean max_tokens\?",
        ),
        (lambda llm: SamplingParams(**kept({"num_predict": 3})), r"num_predict .*did you mean max_tokens\?"),
        (lambda llm: SamplingParams(**kept({"stop_token_ids": [3]})), r"did you mean stop\?"),
        (lambda llm: SamplingParams(**kept({"guided_json": {}})), r"did you mean json_schema\?"),
        (lambda llm: SamplingParams(**kept({"response_format": {}})), r"did you mean json_schema\?"),
        (lambda llm: llm.chat("a", **kept({"structured_outputs": {}})), r"SamplingParams\(json_schema=…\)"),
        (lambda llm: SamplingParams().replace(**kept({"max_new_tokens": 3})), r"did you mean max_tokens\?"),
        (lambda llm: LLM(**kept({"base_url": "http://a"})), "a client of OpenAI's API"),
        (lambda llm: SamplingParams(**kept({"repeat_penalty": 1.1})), r"did you mean repetition_penalty\?"),
        (lambda llm: llm.generate("x", {"num_predict": 1}), r"'num_predict' .*did you mean max_tokens\?"),
        (lambda llm: llm.generate("x", num_predict=1), r"give sampling_params=SamplingParams\(max_tokens=…\)"),
        (lambda llm: llm.chat("hi", stream=True), "llm.stream gives an answer piece by piece"),
        (lambda llm: llm.imap(["a"], max_tokens=3), r"imap\(\) .*'max_tokens'; give sampling_params="),
        (lambda llm: llm.imap("abc"), "rows: expected a list of prompts, not 'abc'; llm.generate takes one alone"),
        (lambda llm: llm.imap(5), "rows: expected a list of prompts, not 5"),
        (lambda llm: llm.generate("x", checkpoint=5), "checkpoint: expected the path of a file, not 5"),
        (lambda llm: llm.decide("x", "y?", id="z"), r"decide\(\) got an unexpected keyword argument 'id'"),
        (lambda llm: llm.embed("a", normalise=False), r"embed\(\) .*'normalise'; did you mean normalize\?"),
        (lambda llm: llm.decide("x", ["y?"], lables=[]), r"decide\(\) .*'lables'; did you mean labels\?"),
        (lambda llm: llm.chat(), "conversations: give these, or messages, which is one of them"),
        (lambda llm: llm.chat([Message("user", "x")], tool_choice={"type": "function"}), "tool_choice: expected auto"),
        (lambda llm: llm.generate("x", {"max_token": 1}), r"'max_token' is no field of .*did you mean max_tokens\?"),
        (lambda llm: llm.chat({"role": "user", "content": "hi"}), "conversations: expected a string, or a list of"),
        (lambda llm: llm.chat(Message("user", "hi")), "conversations: expected a string, or a list of messages"),
        (lambda llm: llm.chat([["hi"]]), r"conversations\[0\]\[0\]: expected a string, or a list of messages"),
        (lambda llm: llm.stream(7), "prompt: expected a string or a list of token ids, or a list of messages, not 7"),
        (lambda llm: llm.tokenize(None), "prompt: expected a string"),
        (lambda llm: llm.detokenize("x"), "token_ids: expected a list of integers"),
        (
            lambda llm: LLM(7),  # type: ignore[arg-type]
            "model: expected a path or a name, not 7",
        ),
        (lambda llm: llm.generate("x", model=7), "model: expected a name, not 7"),
        (lambda llm: llm.generate("x", **kept({"use_tqdm": True})), r"'use_tqdm'; did you mean progress\?"),
        (lambda llm: LLM(n_contx=512), r"LLM.* 'n_contx'; did you mean n_ctx\?"),
        (lambda llm: LLM(max_model_len=512), r"'max_model_len'; did you mean n_ctx\?"),
        (lambda llm: LLM(use_tqdm=False), "'use_tqdm'; llm.generate and llm.chat have progress=False"),
        (lambda llm: LLM(timeout=3), r"'timeout'; each call has it: llm\.generate\(…, timeout=30\)"),
        (lambda llm: llm.generate(bytearray(b"x")), "prompts: expected a string or a list of token ids, or a"),
        (lambda llm: llm.generate(memoryview(b"x")), "prompts: expected a string or a list of token ids, or a"),
        (lambda llm: llm.generate([True, False]), r"prompts\[0\]: expected a string or a list of token ids, not True"),
        (lambda llm: llm.imap(bytearray(b"x")), "rows: expected a list of prompts, not bytearray"),
        (lambda llm: llm.detokenize(bytearray(b"x")), "token_ids: expected a list of integers, not bytearray"),
        (lambda llm: llm.generate("x", timeout="3"), "timeout: expected seconds, not '3'"),
        (lambda llm: LLM(gpu_memory_utilization=0.9), "'gpu_memory_utilization'; n_gpu_layers and n_ctx"),
        (lambda llm: LLM(tensor_parallel_size=2), "'tensor_parallel_size'; a model is divided among all GPUs"),
        (lambda llm: LLM(verbose=True), "'verbose'; .*logging"),
        (
            lambda llm: SamplingParams(**kept({"grammar": "x"})),
            "grammar: expected a Grammar, not 'x'; give one of json_",
        ),
        (lambda llm: llm.chat("x", tools=5), "tools: expected a list of functions, of Tools, .* not 5"),
        (lambda llm: llm.decide("x", None), "questions: expected a string, .* not None"),
        (
            lambda llm: llm.decide("x", ["y?", {"type": "x"}]),
            r"questions\[1\]: .* not {'type': 'x'}; DecisionQ.* makes one",
        ),
        (lambda llm: llm.decide(b"x", "y?"), "state: expected a text, a conversation, or what JSON has, not b'x'"),
    ],
)
def test_what_is_no_prompt_and_no_parameters_is_a_type_error_at_the_call(call: Any, message: str, llm: LLM) -> None:
    with pytest.raises(TypeError, match=message) as raised:
        call(llm)
    assert isinstance(raised.value, UmaError), "one family"


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: SamplingParams(temperature=9), ValueError),
        (Grammar, ValueError),
        (lambda: DecisionQuestion.choice("Which?", []), ValueError),
        (lambda: params(json_schema=complex), ValueError),
        (lambda: uma.Request("a"), ValueError),
        (lambda: LLM("no-such-model"), uma.ModelError),
    ],
)
def test_what_uma_refuses_is_a_uma_error_and_python_s_own_kind_too(call: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert isinstance(raised.value, UmaError)
    assert raised.value.code


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm, sec: llm.generate("Once", params(4_000), timeout=sec),
        lambda llm, sec: llm.generate(["Once", "Twice"], params(4_000), timeout=sec, checkpoint=f"kept{sec}"),
        lambda llm, sec: llm.chat("Once", params(4_000), timeout=sec),
        lambda llm, sec: list(llm.imap(["Once"], params(4_000), timeout=sec)),
        lambda llm, sec: list(llm.stream("Once", params(4_000), timeout=sec)),
        lambda llm, sec: llm.embed(["Once"] * 5_000, timeout=sec),
        lambda llm, sec: llm.decide("Once " * 200, ["Is it?"] * 300, timeout=sec),
        lambda llm, sec: asyncio.run(llm.agenerate(["Once"], params(4_000), timeout=sec)),
        lambda llm, sec: asyncio.run(llm.achat("Once", params(4_000), timeout=sec)),
        lambda llm, sec: asyncio.run(llm.aembed(["Once"] * 5_000, timeout=sec)),
        lambda llm, sec: asyncio.run(llm.adecide("Once " * 200, ["Is it?"] * 300, timeout=sec)),
    ],
)
def test_a_timeout_ends_the_call_with_uma_s_error_and_what_it_had_asked(
    ask: Any, timed: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TimeoutError, match=r"longer than its timeout of 0\.05 s, and was cancelled") as raised:
        ask(timed, 0.05)
    assert isinstance(raised.value, UmaError)
    # With one sequence at a time this would wait for 4,000 tokens.
    assert len(timed.generate("Again", params(2), timeout=PATIENCE_SEC)[0].outputs[0].token_ids) == 2
    with pytest.raises(ValueError, match="timeout: -1 must be 0 or more seconds"):
        ask(timed, -1)


@pytest.mark.parametrize("timeout", [10**400, float("inf")])
def test_a_timeout_that_no_clock_holds_is_none(timeout: float, llm: LLM) -> None:
    (out,) = llm.generate("Once", params(2), timeout=timeout)
    assert len(out.outputs[0].token_ids) == 2
    with pytest.raises(ValueError, match=r"logit_bias.*: .* a (finite number|number from -100 to 100)"):
        SamplingParams(logit_bias={"a": timeout})


def test_parameters_may_be_a_dict_of_fields(llm: LLM) -> None:
    fields = {"max_tokens": 3, "ignore_eos": True, "stop": None}
    assert len(llm.generate("Once", fields)[0].outputs[0].token_ids) == 3
    one, two = llm.generate(["Once", "Twice"], [fields, params(2)])
    assert (len(one.outputs[0].token_ids), len(two.outputs[0].token_ids)) == (3, 2)
    assert SamplingParams(stop=None).stop == ()
    with pytest.raises(ValueError, match="stop: expected a list of strings, not 5"):
        SamplingParams(stop=5)  # type: ignore[arg-type]


def test_a_stream_gives_the_same_text_piece_by_piece(llm: LLM) -> None:
    stream = llm.stream("Once", params(40))
    pieces = list(stream)
    assert len(pieces) > 5
    assert "".join(pieces) == llm.generate("Once", params(40))[0].outputs[0].text
    assert stream.finished is not None
    assert stream.finished.usage.completion_tokens == 40
    assert list(stream) == []
    talk = [{"role": "user", "content": "Hi"}]
    assert "".join(llm.stream(talk, params(12))) == llm.chat(talk, params(12))[0].outputs[0].text


def test_a_stream_that_is_left_is_cancelled(tiny: Path) -> None:
    with open_llm(tiny, n_ctx=16_384, max_sequences=1) as llm:
        with llm.stream("Once", params(4_000)) as stream:
            assert next(stream)
        # Its place is free: with one sequence at a time this would wait for all 4,000 tokens.
        assert len(llm.generate("Again", params(2))[0].outputs[0].token_ids) == 2
        assert stream.finished is None
        abandoned = llm.stream("Once", params(4_000))
        next(abandoned)
        left = weakref.ref(abandoned)
        del abandoned
        gc.collect()
        assert left() is None  # with it goes its request
        assert len(llm.generate("Again", params(2))[0].outputs[0].token_ids) == 2


def test_a_stream_that_fails_raises_the_error(llm: LLM) -> None:
    with pytest.raises(PromptTooLarge, match="prompt too large"):
        list(llm.stream("x" * 5_000))
    with pytest.raises(BadRequest, match="surrogate"):
        llm.stream("\ud800")


def test_text_becomes_tokens_and_text_again(llm: LLM) -> None:
    ids = llm.tokenize("Once upon ä time")
    (out,) = llm.generate("Once upon ä time", params(1))
    assert out.usage is not None
    assert len(ids) == out.usage.prompt_tokens
    assert llm.detokenize(ids) == "Once upon ä time"
    assert llm.detokenize([]) == ""
    assert len(llm.tokenize([{"role": "user", "content": "Hi"}])) > len(llm.tokenize("Hi"))
    with pytest.raises(BadRequest, match="vocabulary"):
        llm.detokenize([10**6])


def test_a_prompt_may_be_its_token_ids(llm: LLM, tmp_path: Path) -> None:
    ids, text = llm.tokenize("Once upon a time"), "Once upon a time"
    (whole,) = llm.generate(text, params())
    assert llm.generate(ids, params())[0].text == whole.text
    for given in kept([[ids, text], [np.array(ids), text]]):
        outs = llm.generate(given, params(), checkpoint=tmp_path / "kept")
        assert [(out.prompt, out.text) for out in outs] == [(tuple(ids), whole.text), (text, whole.text)]
    assert [out.text for out in asyncio.run(llm.agenerate([ids], params()))] == [whole.text]
    assert [out.text for out in llm.imap([ids, text], params())] == [whole.text] * 2
    assert "".join(llm.stream(ids, params())) == whole.text
    with pytest.raises(BadRequest, match=r"token_ids\[1\]: expected an integer, not 'x'"):
        llm.generate(kept([1, "x"]))
    with pytest.raises(TypeError, match=r"prompts\[0\]: expected a string or a list of token ids, not \[\]"):
        llm.generate([[]])


def test_what_is_shown_at_a_prompt_is_short(llm: LLM) -> None:
    assert repr(SamplingParams(max_tokens=3, stop="x")) == "SamplingParams(max_tokens=3, stop=('x',))"
    assert len(repr(llm.info)) < 1_000 < len(llm.info.chat_template) + 1_000
    assert set(uma.__all__) <= set(dir(uma))
    stream = llm.stream("Once", params(400, logprobs=5))
    assert repr(stream).endswith(": on its way>")
    list(stream)
    assert repr(stream).endswith(": ended>")
    assert re.match(r"Finished\(id='stream-\d+', reason='length', usage=Usage\(", repr(stream.finished))
    assert len(repr(stream.finished)) < 1_500
    assert repr(llm._loop.source) == "<uma.Engine: tiny, 2,048 tokens of context>"


def test_an_llm_says_what_it_is(tiny: Path) -> None:
    llm = open_llm(tiny)
    assert repr(llm) == f"<uma.LLM {str(tiny)!r}: tiny, 2,048 tokens of context>"
    llm.close()
    assert "closed" in repr(llm)


def test_a_model_without_a_template_does_not_write_the_user_s_turn(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base.gguf", chat_template=None)
    written = SamplingParams(grammar=Grammar(regex=" Hello\\n\\nUser: Who are you\\\\?"), max_tokens=60)
    with open_llm(base) as llm:
        talk = [{"role": "user", "content": "Hi"}]
        (out,) = llm.chat(talk, written)
        assert out.outputs[0].text.strip() == "Hello"
        assert out.outputs[0].finish_reason == "stop"
        # A text is no conversation: nothing ends it.
        assert "User: Who" in llm.generate("Hi", written)[0].outputs[0].text


FORKS = """
import os, sys
def child():
    try:
        llm.generate("Once", params)
    except RuntimeError as error:
        print(error, flush=True)
    with LLM(sys.argv[1], n_ctx=4096, threads=2, n_gpu_layers=0) as own:
        out = own.generate("Once", SamplingParams(max_tokens=3, ignore_eos=True))[0]
        print(len(out.outputs[0].token_ids), flush=True)
llm.generate("Once", SamplingParams(max_tokens=2))
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "fork",
    [
        "pid = os.fork()\nif not pid:\n    child()\n    sys.exit()\nassert os.waitpid(pid, 0)[1] == 0",
        "from multiprocessing import get_context as in_a\n"
        "p = in_a('fork').Process(target=child); p.start(); p.join(); assert not p.exitcode",
    ],
)
def test_a_forked_child_is_told_to_make_its_own_and_can(fork: str, tiny: Path) -> None:
    after = "\nprint(len(llm.generate('Once', SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids))"
    process = script(tiny, FORKS + fork + after)
    out, err = process.communicate(timeout=PATIENCE_SEC)
    assert process.returncode == 0, err
    told, own, parents = out.splitlines()
    assert "make the LLM in the child" in told
    assert (own, parents) == ("3", "2")


@pytest.mark.parametrize("function", [lambda path: open_engine(RuntimeConfig(model=str(path))), connect])
def test_under_asyncio_the_trio_interface_says_what_to_do(function: Any, tiny: Path) -> None:
    async def notebook() -> None:
        async with function(tiny):
            raise AssertionError("this is no Trio")

    with pytest.raises(RuntimeError, match=r"needs Trio, and this is asyncio; use uma\.LLM") as raised:
        asyncio.run(notebook())
    assert isinstance(raised.value, UmaError)


def test_a_chat_calls_a_tool_and_goes_on_with_its_result(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    function: dict[str, Any] = {"name": "weather", "parameters": {**schema, "additionalProperties": False}}
    talk = [Message("user", "What is the weather?")]
    offered = [{"type": "function", "function": function}]
    (out,) = llm.chat(talk, SamplingParams(max_tokens=100), tools=offered, tool_choice="weather")
    (said,) = out.outputs
    named = {"type": "function", "function": {"name": "weather"}}
    (again,) = llm.chat(messages=talk, sampling_params={"max_tokens": 100}, tools=offered, tool_choice=named)
    assert again.outputs[0].tool_calls[0].name == "weather"
    assert [(call.name, json.loads(call.arguments)) for call in said.tool_calls] == [("weather", {"city": "Oslo"})]
    (call,) = said.tool_calls
    talk += [Message("assistant", said.text, said.tool_calls), Message("tool", "Rain.", (), call.id, call.name)]
    (last,) = llm.chat(talk, params(), tools=[Tool("weather", "", function["parameters"])])
    assert last.error is None
    openai_call = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    dicts: list[dict[str, Any]] = [
        {"role": "user", "content": "What is the weather?"},
        {"role": "assistant", "content": said.text or None, "tool_calls": [openai_call]},
        {"role": "tool", "content": "Rain.", "tool_call_id": call.id, "name": call.name},
    ]
    assert messages_of(dicts) == tuple(talk)
    assert [tool_of({"function": function | given}, "").strict for given in ({}, {"strict": True})] == [False, True]
    assert llm.chat(dicts, params(), tools=offered)[0].outputs == last.outputs
    with pytest.raises(BadRequest, match=r"tools\[0\]: expected a Tool"):
        llm.chat(talk, tools=[{"type": "function"}])


class Office:
    def weather(self, city: Annotated[Literal["Oslo"], "where it is"], *, days: int = 1, now: bool) -> str:
        """The weather in a city.

        For some days.
        """
        return f"Rain in {city} for {days}, {now}."


def test_a_python_function_is_a_tool_by_its_name_docstring_and_annotations(llm: LLM) -> None:
    call = Office().weather
    tool = tool_of(call, "")
    days = {"type": "integer", "minimum": 1 - 2**53, "maximum": 2**53 - 1}
    city = {"enum": ["Oslo"], "description": "where it is"}
    assert (tool.name, tool.description) == ("weather", "The weather in a city.\n\nFor some days.")
    assert tool.parameters == {
        "type": "object",
        "properties": {"city": city, "days": days, "now": {"type": "boolean"}},
        "required": ["city", "now"],
        "additionalProperties": False,
    }
    (out,) = llm.chat("Hi", SamplingParams(max_tokens=200, temperature=0), tools=[call], tool_choice="required")
    assert out.outputs[0].tool_calls
    assert call(**json.loads(out.outputs[0].tool_calls[0].arguments)).startswith("Rain in Oslo for ")

    def untold(city: Untold) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    def several(*cities) -> None:  # type: ignore[no-untyped-def]
        pass

    for wrong, why in (
        (untold, r"^untold: its annotations: name 'Untold' is not defined; write its JSON Schema out"),
        (several, r"\*cities cannot be given by name"),
        (lambda city: None, r"^tools\[0\]: a lambda has no name to call it by; write the function with def"),
        (print, r"^tools\[0\]: expected a function"),
    ):
        with pytest.raises(TypeError, match=why):
            tool_of(wrong, "tools[0]")


def test_a_stream_gives_thinking_and_calls_as_events(tmp_path: Path) -> None:
    call = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    said = f"<think>Oslo?</think>So.\n<tool_call>\n{call}\n</tool_call>"
    shown = "{% for m in messages %}{{ m.content }}" + HERMES_CALLS + "{% endfor %}"
    template = "{{ tools | tojson }}{# <think></think> #}" + shown + "{{ '\\n' }}"
    model = write_script_model(tmp_path / "script.gguf", said, template=template)
    tool = Tool("weather", "", {"properties": {"city": {"type": "string"}}})
    with LLM(model) as llm:
        stream = llm.stream([Message("user", "?")], {"max_tokens": 200}, tools=[tool], reasoning="auto")
        assert next(stream).startswith("So")
        events = list(stream.events())
    assert "".join(each.arguments for each in events if isinstance(each, ToolCallDelta)) == '{"city": "Oslo"}'
    assert stream.finished is not None
    assert stream.finished is events[-1]
    assert [call.name for call in stream.finished.tool_calls] == ["weather"]


def test_a_chat_goes_on_with_the_assistant_s_message_at_its_end(llm: LLM) -> None:
    talk: list[Message | dict[str, str]] = [Message("user", "Tell me a story.")]
    (asked,) = llm.chat(talk, params(echo=True))
    (going_on,) = llm.chat([*talk, {"role": "assistant", "content": "Once upon"}], params(echo=True))
    assert asked.prompt_text is not None
    assert going_on.prompt_text == asked.prompt_text + "Once upon"


def test_a_conversation_goes_through_the_chat_template(llm: LLM) -> None:
    talk: list[Message | dict[str, str]] = [{"role": "user", "content": "Hi"}]
    (one,) = llm.chat(talk, params())
    both: list[list[Message | dict[str, str]]] = [[Message("user", "Hi")], [*talk, Message("assistant", "Ha"), *talk]]
    same, other = llm.chat(both, params())
    assert one.outputs[0].text == same.outputs[0].text
    assert one.prompt == (Message("user", "Hi"),)
    assert [out.text for out in (*llm.chat("Hi", params()), *llm.chat(["Hi"], params()))] == [one.outputs[0].text] * 2
    assert other.usage is not None
    assert one.usage is not None
    assert other.usage.prompt_tokens > one.usage.prompt_tokens
    assert one.outputs[0].text != llm.generate("Hi", params())[0].outputs[0].text


def test_a_bad_conversation_costs_the_others_nothing(llm: LLM) -> None:
    bad: Any = [
        [{"role": "user", "content": "Hi"}],
        [{"role": "user"}],
        [],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": "Hi", "colour": "red"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}]}],
        [{"role": "user", "content": None}],
        [{"role": "assistant", "content": "", "tool_calls": 7}],
        [{"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"id": 1, "name": "f", "arguments": "{}"}]}],
        [Message("user", "Hi")],
    ]
    with pytest.warns(UserWarning, match="9 of 11 prompts failed"):
        outs = llm.chat(bad, params())
    assert [type(out.error) for out in outs] == [type(None), *[WrongValues] * 9, type(None)]
    assert outs[0].outputs == outs[-1].outputs
    assert "nothing is fetched here" in str(outs[5].error)
    assert max(len(repr(out)) for out in outs) < 1_000


TALK = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda llm: llm.chat([{"role": "usr", "content": "x"}]), r"^messages\[0\]\.role: 'usr' .*did you mean user\?"),
        (lambda llm: llm.stream([*TALK, {"role": "asistant"}]), r"^messages\[1\]\.role: 'asistant' is no role"),
        (
            lambda llm: llm.chat([{"role": "user", "contents": "x"}]),
            r"^messages\[0\]\.contents: .*did you mean content\?",
        ),
        (lambda llm: llm.chat([*TALK, {"content": "x"}]), r"^messages\[1\]\.role: this message has none"),
        (lambda llm: llm.chat([{"role": "user", "content": 3}]), r"^messages\[0\]\.content: expected a string, not 3"),
        (lambda llm: llm.chat("Hi", tool_choice="required"), "^tool_choice: required, but there are no tools"),
        (lambda llm: llm.chat(messages=[]), "^messages: must have 1 or more messages, not 0"),
        (lambda llm: asyncio.run(llm.achat(messages=[])), "^messages: must have 1 or more messages, not 0"),
        (lambda llm: llm.chat("x", tools=[{"name": 5}]), r"^tools\[0\].name: expected a string, not 5"),
        (lambda llm: llm.decide("x", []), "^questions: must have 1 to 400 questions, not 0"),
        (lambda llm: asyncio.run(llm.adecide("x", [])), "^questions: must have 1 to 400 questions, not 0"),
        (lambda llm: asyncio.run(llm.aembed(["a"], dimensions=0)), "^dimensions: "),
        (lambda llm: asyncio.run(llm.arerank("a", ["b"])), "reranker"),
        (lambda llm: llm.chat([TALK, TALK], tool_choice="zzz"), "^tool_choice: 'zzz' is none of"),
        (lambda llm: llm.chat("Hi", tools=[{"nam": "x"}]), r"^tools\[0\]: expected a Tool.*; did you mean name\?"),
        (lambda llm: llm.chat("x", tools=[TOOL | {"parametrs": {}}]), r"^tools\[0\]\.parametrs: .*mean parameters\?"),
        (lambda llm: llm.chat("x", tools=[{"name": "f", "input_schema": {}}]), r"input_schema: .*mean parameters\?"),
        (lambda llm: llm.chat([TALK[0] | {"a\n\x1b[31m": 1}]), r"^messages\[0\]\['a\\n\\x1b\[31m'\]: no field of"),
        (lambda llm: llm.generate("Once", {"regex": "("}), "^grammar.regex: unclosed group"),
        (lambda llm: llm.generate(["Once", "Twice"], {"json_schema": {"type": "objct"}}), "^grammar.json_schema: type"),
        (lambda llm: list(llm.imap(["Once"], {"regex": "("})), "^grammar.regex: unclosed group"),
        (lambda llm: asyncio.run(llm.achat([TALK, TALK], {"regex": "("})), "^grammar.regex: unclosed group"),
        (lambda llm: asyncio.run(llm.agenerate("\ud800")), "^prompt: holds a lone surrogate"),
    ],
)
def test_what_is_wrong_with_the_call_or_its_only_prompt_is_raised(ask: Any, message: str, llm: LLM) -> None:
    with pytest.raises(BadRequest, match=message):
        ask(llm)


def test_of_many_prompts_each_has_an_error_of_its_own(llm: LLM) -> None:
    with pytest.warns(UserWarning, match="2 of 3 prompts failed"):
        outs = llm.generate(["Once", "x" * 5_000, "Twice"], [params(), params(), {"regex": "("}])
    assert [type(out.error) for out in outs] == [type(None), PromptTooLarge, BadRequest]
    with pytest.warns(UserWarning, match="1 of 2 prompts failed"):
        outs = llm.chat([TALK, [{"role": "asistant", "content": "Hi"}]], params())
    assert "messages[0].role: 'asistant' is no role; did you mean assistant?" in str(outs[1].error)
    with pytest.warns(UserWarning, match="1 of 2 prompts failed"):
        outs = asyncio.run(llm.agenerate(["Once", "x" * 5_000], params()))
    assert [out.index for out in outs] == [0, 1]


def test_cancelling_an_asyncio_task_ends_the_work(tiny: Path) -> None:
    with open_llm(tiny, n_ctx=16_384, max_sequences=1) as llm:

        async def work() -> None:
            for begun in (llm.agenerate("Once", params(4_000)), llm.achat(["Once", "Twice"], params(4_000))):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(begun, 0.05)
            stream = llm.stream("Once", params(4_000))
            assert await anext(stream)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    async for _ in stream:
                        pass
            assert stream.finished is None and repr(stream).endswith(": closed>")
            # With one sequence at a time these would wait for 16,000 tokens.
            outs = await asyncio.gather(llm.agenerate("Again", params(2)), llm.agenerate(["Once"], params(2)))
            assert [len(out.outputs[0].token_ids) for (out,) in outs] == [2, 2]

        asyncio.run(work())


def test_asyncio_has_the_same_texts(llm: LLM) -> None:
    async def work() -> None:
        (out,) = await llm.agenerate("Once", params())
        assert [piece async for piece in llm.stream("Once", params())] == list(llm.stream("Once", params()))
        assert (await llm.achat("Hi", params()))[0].outputs == llm.chat("Hi", params())[0].outputs
        assert out.outputs == llm.generate("Once", params())[0].outputs
        assert (await llm.aembed(["a", "b"])).tolist() == llm.embed(["a", "b"]).tolist()
        question = DecisionQuestion.choice("Which?", ["lamp", "box"])
        assert (await llm.adecide("A lamp.", question))[0].labels == ("lamp", "box")

    asyncio.run(work())


def test_an_asyncio_block_closes_its_llm(tiny: Path) -> None:
    async def work() -> LLM:
        async with open_llm(tiny) as llm:
            assert (await llm.agenerate("Once", params()))[0].error is None
        return llm

    with pytest.raises(ValueError, match="this LLM is closed"):
        asyncio.run(work()).generate("Once")


def test_a_short_queue_is_no_limit_for_many_prompts(tiny: Path) -> None:
    with open_llm(tiny, max_sequences=4, max_queue=2) as llm:
        outs = llm.generate([str(index) for index in range(30)], params(3))
    assert [out.error for out in outs] == [None] * 30


def test_two_llms_work_side_by_side(tiny: Path, tmp_path: Path) -> None:
    another = write_model(tmp_path / "another.gguf", seed=1, context_length=2_048)
    prompts = [str(index) for index in range(8)]
    with open_llm(tiny) as one, open_llm(another) as two:
        outs = [each.generate(prompts, params(20)) for each in (one, two, one)]
    texts = [[out.outputs[0].text for out in each] for each in outs]
    assert texts[0] == texts[2] != texts[1]


FEW_FILES = """
import gc, os, resource
from uma import LLM
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for left in range(16):
    try:
        LLM(n_ctx=512, threads=1).close()
        print("made", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
    gc.collect()
    os.close(held.pop())
"""


def test_without_file_descriptors_for_its_thread_an_llm_is_an_error() -> None:
    done = run_to_end(sys.executable, "-c", FEW_FILES)
    told = done.stdout.splitlines()
    assert told[3] == "the LLM's thread cannot start: Too many open files; raise `ulimit -n`", done.stderr
    assert told[-1] == "made"


def test_several_threads_share_an_llm(llm: LLM) -> None:
    expected = [llm.generate(str(index), params(20))[0].outputs[0].text for index in range(4)]
    found: dict[int, str] = {}

    def work(index: int) -> None:
        found[index] = llm.generate(str(index), params(20))[0].outputs[0].text

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SEC)
    assert [found[index] for index in range(4)] == expected


def test_it_works_where_an_asyncio_loop_runs(tiny: Path) -> None:
    async def notebook() -> int:
        await asyncio.sleep(0)
        with open_llm(tiny) as llm:
            return len(llm.generate("Once", params())[0].outputs[0].token_ids)

    assert asyncio.run(notebook()) == 8


def test_a_closed_llm_says_so(tiny: Path) -> None:
    llm = open_llm(tiny)
    llm.close()
    llm.close()
    with pytest.raises(ValueError, match="closed") as raised:
        llm.generate("Once", params())
    assert isinstance(raised.value, UmaError)


def test_closing_ends_what_another_thread_generates(tiny: Path) -> None:
    llm = open_llm(tiny, n_ctx=8_192)
    started = threading.Event()
    ended: list[BaseException] = []

    def prompts() -> Any:
        yield "Once"
        started.set()

    def work() -> None:
        with pytest.raises(ValueError, match="closed") as error:
            llm.generate(prompts(), params(4_000))
        ended.append(error.value)

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(PATIENCE_SEC)
    llm.close()
    thread.join(PATIENCE_SEC)
    assert len(ended) == 1


def test_a_fault_of_the_engine_is_raised_and_hangs_no_caller(tiny: Path) -> None:
    llm = open_llm(tiny)
    engine = llm._loop.source
    assert isinstance(engine, Engine)
    break_decode_thread(engine)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            llm.generate("Once", params())
    llm.close()


def test_what_cannot_be_opened_is_an_error_at_once(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere\.gguf"):
        LLM(str(tmp_path / "nowhere.gguf"))
    with pytest.raises(ConfigError, match="n_batch"):
        open_llm(tiny, n_batch=0)
    with pytest.raises(ConfigError, match=r"^lora: expected a string, not \[5\]$"):
        open_llm(tiny, lora=[5])
    with pytest.raises(ConfigError, match=r"^n_batch: expected an integer, not 'x'$"):
        open_llm(tiny, n_batch="x")


def test_settings_in_variables_are_the_command_s_alone(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMA_MAX_TOKENS", "3")
    monkeypatch.setenv("UMA_NO_SUCH_THING", "1")
    with open_llm(tiny) as llm:
        limits = llm.info.limits
        assert (limits.max_tokens, limits.has_max_tokens) == (limits.n_ctx, False)
        assert limits.default_max_tokens == min(DEFAULT_MAX_TOKENS, limits.n_ctx)


def test_sampling_that_is_not_asked_for_is_a_setting_of_the_llm_else_the_model_s_own_else_drawn(
    tiny: Path, tmp_path: Path
) -> None:
    def text(path: Path, sampling: SamplingParams, **settings: Any) -> str:
        with open_llm(path, **settings) as llm:
            return llm.generate("Once", sampling)[0].outputs[0].text

    unsaid = params(12, seed=3, temperature=None)
    greedy = text(tiny, params(12))
    assert text(tiny, unsaid, temperature=0.0) == greedy
    assert text(tiny, unsaid, temperature=1.5, top_k=1) == greedy
    assert text(tiny, unsaid) == text(tiny, params(12, seed=3, temperature=0.7, top_p=0.95)) != greedy
    own = write_model(tmp_path / "own.gguf", metadata={"general.sampling.temp": 0.0})
    assert text(own, unsaid) == greedy
    assert text(own, params(12, seed=3, temperature=0.7)) == text(tiny, unsaid)
    with open_llm(own) as llm:
        assert "".join(llm.stream("Once", unsaid)) == greedy


def test_an_llm_without_references_is_closed(tiny: Path) -> None:
    llm = open_llm(tiny)
    thread = llm._loop._thread
    del llm
    gc.collect()
    thread.join(PATIENCE_SEC)
    assert not thread.is_alive()


def test_a_bar_is_shown_on_request_and_not_without_a_terminal(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], params(1))
    assert capfd.readouterr() == ("", "")
    llm.generate(["a", "b"], params(1), progress=True)
    assert "2/2" in capfd.readouterr().err


def test_two_thousand_prompts_take_no_memory_but_for_their_results(tiny: Path) -> None:
    with open_llm(tiny, max_sequences=16) as llm:
        process = psutil.Process()
        llm.generate([f"warm {index}" for index in range(500)], params(1))
        before = process.memory_info().rss
        outs = llm.generate((str(index) for index in range(2_000)), params(1))
        grown = process.memory_info().rss - before
    assert [out.error for out in outs] == [None] * 2_000
    # A result is some hundred bytes; a request in flight, its tokens and its task, some ten thousand.
    assert grown < 10 * 2**20


# Scripts, as processes of their own

PREAMBLE = """
import sys
from uma import LLM, SamplingParams
llm = LLM(sys.argv[1], n_ctx=4096, threads=1, n_gpu_layers=0)
params = SamplingParams(max_tokens=4000, ignore_eos=True)
"""


def script(path: Path, body: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", PREAMBLE + body, str(path)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )


ANNOUNCED = """
from contextlib import contextmanager
import uma.llm.llm

words = ["started"]

@contextmanager
def announcing(total, wanted):
    yield lambda: words and print(words.pop(), flush=True)

uma.llm.llm.progress_bar = announcing
work = ["Once"] * 500, [SamplingParams(max_tokens=1)] * 250 + [params] * 250
"""
"""A script that says "started" in place of a bar's first step: one answer is there, and many long ones are to come."""


def test_ctrl_c_ends_a_generation_leaves_the_llm_usable_and_ends_a_script_that_does_not_catch_it(tiny: Path) -> None:
    body = """
try:
    llm.generate(*work)
except KeyboardInterrupt:
    out = llm.generate("Again", SamplingParams(max_tokens=3, ignore_eos=True))
    words.append("stopped %d" % len(out[0].outputs[0].token_ids))
llm.generate(*work)
"""
    process = script(tiny, ANNOUNCED + body)
    assert process.stdout is not None
    for said in ("started\n", "stopped 3\n"):
        assert process.stdout.readline() == said
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_SEC)
    assert process.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_a_script_that_never_closes_its_llm_ends_by_itself_with_its_own_error(tiny: Path) -> None:
    body = "print(len(llm.generate('Once', SamplingParams(max_tokens=3))))\nraise SystemExit(3)"
    process = script(tiny, body)
    out, err = process.communicate(timeout=PATIENCE_SEC)
    assert (out, err, process.returncode) == ("1\n", "", 3)


def test_a_cut_repr_ends_between_numbers_and_closes_its_brackets() -> None:
    made = Completion("x" * 500, tuple(range(10_000, 10_200)), "length", logprobs=({1: "[" * 300},))  # type: ignore[dict-item]
    assert re.search(r", token_ids=\((\d{5}, )+…\), finish_reason='length', ", repr(made))
    assert re.fullmatch(r"Completion\(text='x+…', .*\[…'}\)\)", repr(made))
