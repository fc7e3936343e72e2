"""A bound on thinking: at it the model's own closing mark is given, and the answer goes on, however tokens come."""

from __future__ import annotations

from collections.abc import Generator
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import pytest
from chat_templates import TEMPLATES
from engine_world import EarlyContext, compute_with, config_for
from script_model import write_script_model
from test_engine_stride import PATIENT

from models import CHATML
from uma import Request, SamplingParams, open_engine
from uma.chat.families import Thinking
from uma.chat.parser import Parser
from uma.engine.worker.runner import BatchOutcome, DecodeStep, DecodeSteps, ModelRunner
from uma.engine.worker.thinking import MAX_COMPLETING, ThinkingBound
from uma.types import Event, Finished, Grammar, Message, ReasoningDelta, Token, Tool

pytestmark = pytest.mark.usefixtures("renders_here")

WORDS = 120
"""Tokens of the scripted thinking: more than a reader is given before it has read any."""
THOUGHT = tuple(f"w{number:03} " for number in range(WORDS))
ANSWER = ("It ", "rains.")
SCRIPT = ("<think>", *THOUGHT, "</think>", *ANSWER)
MARKS = ("<think>", "</think>")
NO_SPACE = {str(ord(char)): -100.0 for char in " \n"}
"""Against endless white space where a grammar allows some and the script has none."""
THINKS = CHATML + "{# <think></think> #}"
WEATHER = Tool("weather", "", {"properties": {"x": {"enum": ["a"]}}, "required": ["x"], "additionalProperties": False})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_script_model(tmp_path_factory.mktemp("bound") / "script.gguf", SCRIPT, template=THINKS)


@pytest.fixture(scope="module")
def model_with_control_marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bound") / "controls.gguf"
    return write_script_model(path, SCRIPT, template=THINKS, controls=MARKS)


def asked(limit: int | None, *, stream: bool = True, reasoning: Any = "auto", **sampling: Any) -> Request:
    params = SamplingParams(**({"max_tokens": 200, "max_reasoning_tokens": limit} | sampling))
    return Request("a", messages=(Message("user", "Go."),), sampling=params, stream=stream, reasoning=reasoning)


async def all_events_of(model: Path, *requests: Request, **settings: Any) -> list[list[Event]]:
    """Of requests that are asked one after the other."""
    found = []
    async with open_engine(config_for(model, **settings)) as engine:
        for request in requests:
            async with engine.generate(request) as stream:
                found.append([event async for event in stream])
    return found


async def events_of(model: Path, request: Request, **settings: Any) -> list[Event]:
    (events,) = await all_events_of(model, request, **settings)
    return events


def said(events: list[Event], index: int = 0) -> tuple[str, str]:
    """Thinking and text of one answer."""
    last = events[-1]
    assert isinstance(last, Finished)
    if len(events) == 1:
        each = last.every_answer[index]
        return each.reasoning or "", each.text or ""
    thought = "".join(each.text for each in events if isinstance(each, ReasoningDelta) and each.index == index)
    return thought, "".join(each.text for each in events if isinstance(each, Token) and each.index == index)


def end(events: list[Event]) -> Finished:
    last = events[-1]
    assert isinstance(last, Finished)
    return last


def is_told(finished: Finished, limit: int) -> bool:
    return f"max_reasoning_tokens: the thinking was ended by its limit of {limit} tokens" in (finished.warnings)


@pytest.mark.parametrize("stream", [True, False])
async def test_thinking_is_closed_at_its_bound_and_the_answer_goes_on(model: Path, stream: bool) -> None:
    limits = (0, 1, 7, WORDS - 1)
    found = await all_events_of(model, *(asked(limit, stream=stream) for limit in limits))
    for limit, events in zip(limits, found, strict=True):
        assert said(events) == ("".join(THOUGHT[:limit]), "It rains.")
        last = end(events)
        assert (last.reason, last.usage.reasoning_tokens) == ("stop", limit + len(MARKS))
        assert last.usage.completion_tokens == limit + len(MARKS) + len(ANSWER)
        assert is_told(last, limit)


async def test_marks_that_are_control_tokens_are_given_as_such(model_with_control_marks: Path) -> None:
    last = end(await events_of(model_with_control_marks, asked(3, stream=False)))
    assert (last.reasoning, last.text) == ("".join(THOUGHT[:3]), "It rains.")
    assert last.usage.reasoning_tokens == 5


async def test_thinking_that_ends_by_itself_is_not_told_of(model: Path) -> None:
    for events in await all_events_of(model, asked(None), asked(WORDS + 1)):
        assert said(events) == ("".join(THOUGHT), "It rains.")
        assert end(events).warnings == ()


async def test_thinking_that_the_prompt_has_opened_is_bounded_too(tmp_path: Path) -> None:
    template = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    assert template != CHATML
    model = write_script_model(tmp_path / "opened.gguf", SCRIPT[1:], template=template + "{# </think> #}")
    for limit, events in zip((0, 4), await all_events_of(model, asked(0), asked(4)), strict=True):
        assert said(events) == ("".join(THOUGHT[:limit]), "It rains.")
        assert is_told(end(events), limit)


async def test_text_that_is_not_told_apart_is_bounded_too(model: Path) -> None:
    events = await events_of(model, asked(2, reasoning=None))
    assert said(events) == ("", "<think>w000 w001 </think>It rains.")


async def test_each_token_of_a_closed_thought_has_its_log_probability(model: Path) -> None:
    last = end(await events_of(model, asked(5, stream=False, logprobs=0)))
    assert (last.reasoning, last.text) == ("".join(THOUGHT[:5]), "It rains.")
    assert [each.chosen.text for each in last.logprobs or ()] == [*SCRIPT[:6], *SCRIPT[-3:]]


async def test_a_grammar_goes_on_behind_the_mark(model: Path) -> None:
    form: dict[str, Any] = {"grammar": Grammar(regex="(no|yes)[.]"), "logit_bias": NO_SPACE, "stream": False}
    for (last,) in await all_events_of(model, asked(6, **form), asked(6, **form, logprobs=0)):
        assert isinstance(last, Finished)
        assert last.reasoning == "".join(THOUGHT[:6])
        assert last.text in ("no.", "yes.")
        assert is_told(last, 6)


async def test_a_grammar_that_has_no_place_for_the_mark_is_kept_to(model: Path) -> None:
    template_thinks = asked(0, stream=False, reasoning=None, grammar=Grammar(regex="<think>(w0|x){4}"))
    last = end(await events_of(model, template_thinks))
    assert (last.text or "").startswith("<think>")
    assert "max_reasoning_tokens: the grammar has no place for the end of the thinking here" in last.warnings


async def test_a_call_can_follow_a_closed_thought(model: Path) -> None:
    plain = attrs.evolve(asked(6, stream=False, logit_bias=NO_SPACE), tools=(WEATHER,))
    (may,), (must,) = await all_events_of(model, plain, attrs.evolve(plain, tool_choice="required"))
    assert isinstance(may, Finished)
    assert isinstance(must, Finished)
    assert may.reasoning == must.reasoning == "".join(THOUGHT[:6])
    assert (may.text, may.tool_calls) == ("It rains.", ())
    assert (must.text, [call.arguments for call in must.tool_calls]) == ("", ['{"x": "a"}'])


async def test_each_of_several_answers_has_the_bound(model: Path) -> None:
    for events in await all_events_of(model, asked(4, n=3), asked(4, n=3, stream=False)):
        assert [said(events, index) for index in range(3)] == [("".join(THOUGHT[:4]), "It rains.")] * 3
        assert end(events).usage.reasoning_tokens == 3 * (4 + len(MARKS))
        assert is_told(end(events), 4)


async def test_a_stop_string_of_the_mark_or_behind_it_still_ends_the_output(model: Path) -> None:
    behind, within = (asked(4, stream=False, stop=(stop,)) for stop in ("rain", "3 </th"))
    last, other = map(end, await all_events_of(model, behind, within))
    assert (last.reasoning, last.text, last.stop_string) == ("".join(THOUGHT[:4]), "It ", "rain")
    assert (other.reasoning, other.text, other.stop_string) == ("w000 w001 w002 w00", "", "3 </th")


async def test_max_tokens_can_end_the_output_before_the_bound(model: Path) -> None:
    last = end(await events_of(model, asked(20, stream=False, max_tokens=10)))
    assert (last.reason, last.reasoning, last.text) == ("length", "".join(THOUGHT[:9]), "")
    assert last.warnings == ()


@pytest.mark.parametrize("is_early", [False, True])
async def test_a_stride_of_many_steps_ends_at_the_bound(
    model: Path, is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_early:
        compute_with(monkeypatch, EarlyContext)
    lengths: list[int] = []
    decode = ModelRunner.decode

    def counted(decoding: DecodeSteps) -> Generator[DecodeStep, None, BatchOutcome]:
        lengths.append(0)
        for step in decoding:
            lengths[-1] += 1
            yield step
        return decoding.outcome

    def watched(*args: Any) -> DecodeSteps:
        return DecodeSteps(counted(decode(*args)))

    monkeypatch.setattr(ModelRunner, "decode", watched)
    request = attrs.evolve(asked(50, stream=False), slo=PATIENT)
    last = end(await events_of(model, request))
    assert max(lengths) > 4
    assert (last.reasoning, last.text) == ("".join(THOUGHT[:50]), "It rains.")


async def test_a_draft_does_not_go_beyond_the_bound(model: Path) -> None:
    """The prompt has the whole thinking, so that look-up drafts what comes behind the bound too."""
    request = attrs.evolve(asked(50, stream=False), messages=(Message("user", "".join(SCRIPT) * 2),))
    last = end(await events_of(model, request, speculate="auto"))
    assert last.metrics.speculation is not None
    assert last.metrics.speculation.accepted > 0
    assert (last.reasoning, last.text) == ("".join(THOUGHT[:50]), "It rains.")


async def test_the_engine_has_a_bound_for_requests_that_name_none(model: Path) -> None:
    found = await all_events_of(model, asked(None), asked(5), reasoning_budget=3)
    assert [said(events)[0] for events in found] == ["".join(THOUGHT[:3]), "".join(THOUGHT[:5])]


async def test_a_model_that_does_not_think_is_not_said_to_have_a_bound(tmp_path: Path) -> None:
    model = write_script_model(tmp_path / "plain.gguf", "Plain text.")
    async with open_engine(config_for(model)) as engine, engine.generate(asked(3, reasoning=None)) as stream:
        stream.end_thinking()
        events = [event async for event in stream]
    assert said(events) == ("", "Plain text.")
    assert end(events).warnings == (
        "max_reasoning_tokens: has no effect; this model's chat template has no marks of thinking",
    )


async def test_thinking_that_runs_is_ended_on_request(model: Path) -> None:
    form = {"grammar": Grammar(regex="(no|yes)[.]"), "logit_bias": NO_SPACE}
    async with open_engine(config_for(model)) as engine:
        every: list[dict[str, Any]] = [{}, {"logprobs": 0}, {"n": 2}, form]
        for fields in every:
            events: list[Event] = []
            async with engine.generate(asked(None, **fields)) as stream:
                async for event in stream:
                    if not events:
                        stream.end_thinking()
                    events.append(event)
                stream.end_thinking()  # it is over: nothing happens
            for index in range(fields.get("n", 1)):
                thought, text = said(events, index)
                assert "".join(THOUGHT).startswith(thought)
                assert len(thought) < len("".join(THOUGHT))
                assert text in (("no.", "yes.") if "grammar" in fields else ("It rains.",))
            assert end(events).warnings == ("thinking: it was ended on request",)


async def test_a_request_that_waits_does_not_begin_to_think(model: Path) -> None:
    async with open_engine(config_for(model)) as engine, engine.generate(asked(None)) as stream:
        stream.end_thinking()
        events = [event async for event in stream]
    assert said(events) == ("", "It rains.")


async def test_an_answer_that_is_written_goes_on_when_thinking_is_ended(model: Path) -> None:
    events: list[Event] = []
    async with open_engine(config_for(model)) as engine, engine.generate(asked(1)) as stream:
        async for event in stream:
            if isinstance(event, Token) and event.text:
                stream.end_thinking()
            events.append(event)
    assert said(events) == (THOUGHT[0], "It rains.")


async def test_gpt_oss_goes_on_in_the_channel_of_the_answer(tmp_path: Path) -> None:
    controls = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|return|>")
    script = ("<|channel|>", "analysis", "<|message|>", *THOUGHT[:20], *controls[2:], "assistant", "final")
    model = write_script_model(
        tmp_path / "harmony.gguf", script, template=TEMPLATES["harmony"] + "{{ '\\n' }}", controls=controls
    )
    last = end(await events_of(model, asked(6, stream=False, max_tokens=20)))
    assert last.reasoning == "".join(THOUGHT[:6])
    assert "".join(THOUGHT[:20]).startswith(last.text or "?")
    assert is_told(last, 6)


async def test_gpt_oss_that_must_call_and_thinks_again_is_led_to_a_call(tmp_path: Path) -> None:
    controls = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|return|>")
    script = ("<|channel|>", "analysis", "<|message|>", *THOUGHT[:20], *controls[2:], "assistant", "final")
    template = TEMPLATES["harmony"] + "{{ '\\n' }}"
    model = write_script_model(tmp_path / "harmony.gguf", script, template=template, controls=controls)
    again = {str(260 + place): 10.0 for place in range(2)}  # of all that it can begin, the channel of thinking
    request = attrs.evolve(asked(6, stream=False, logit_bias=again), tools=(WEATHER,), tool_choice="required")
    last = end(await events_of(model, request))
    assert last.reasoning == "".join(THOUGHT[:6])
    assert [call.arguments for call in last.tool_calls] == ['{"x": "a"}']


def test_a_character_that_has_begun_is_completed_first() -> None:
    pieces = {0: b"a", 1: "€".encode()[:1], 2: "€".encode()[1:2], 3: "€".encode()[2:], 4: b"</t>"}

    def bound(limit: int, *tokens: int) -> list[list[int]]:
        parser = Parser(None, {}, Thinking("<t>", "</t>"), begins_thinking=True)
        made = ThinkingBound(parser, pieces.__getitem__, [[4]], limit)
        found = []
        for token in tokens:
            made.read(token)
            found.append(made.closing(None))
        return found

    assert bound(2, 0, 1, 2, 3) == [[], [], [], [4]]
    assert bound(2, 0, *[1] * (1 + MAX_COMPLETING)) == [[]] * (1 + MAX_COMPLETING) + [[4]]
    assert list(accumulate(len(each) for each in bound(1, 0, 4, 0))) == [1, 1, 1]
