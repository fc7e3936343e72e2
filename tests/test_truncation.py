"""Conversations that outgrow the context: which turns go, that the next request begins alike, and that all is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from engine_world import config_for
from http_server import HttpServer, running_http
from hypothesis import given
from hypothesis import strategies as st
from script_model import write_script_model

from harness import short_directory
from models import Kind, write_model
from uma.engine import Engine, open_engine
from uma.engine.intake import compaction
from uma.engine.intake.truncation import INSTRUCTIONS, KEPT_SHARE, left_out
from uma.engine.submission import Over
from uma.errors import BadRequest, PromptTooLarge
from uma.types import SUMMARY_HEADING, Finished, Grammar, Message, Request, SamplingParams, ToolCall

CALL = (ToolCall("c", "look", "{}"),)
BRIEF = SamplingParams(max_tokens=16, temperature=0)


async def finished(engine: Engine, request: Request) -> Finished:
    async with engine.generate(request) as stream:
        (ended,) = [event async for event in stream]
    assert isinstance(ended, Finished)
    return ended


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Ones that end where a model is asked: by a question, or by the results of calls."""
    found = [Message("system", "Be brief.")] * draw(st.integers(0, 1))
    for is_last in (*[False] * draw(st.integers(0, 30)), True):
        found += [Message("user", "q" * draw(st.integers(0, 40)))] * draw(st.integers(1, 2))
        for _ in range(draw(st.integers(0, 3))):
            found += [Message("assistant", "", CALL), *[Message("tool", "r" * draw(st.integers(0, 60)))] * 2]
        if not is_last:
            found.append(Message("assistant", "a" * draw(st.integers(0, 40))))
            found += [Message("system", "Note.")] * draw(st.integers(0, 1))
    return found


def size(message: Message) -> int:
    return len(message.content) + 2


def fixed_of(messages: Sequence[Message]) -> int:
    return sum(size(each) for each in messages[:1] if each.role in INSTRUCTIONS)


def cut(messages: Sequence[Message], limit: int) -> list[Message]:
    gone = left_out(messages, lambda at: size(messages[at]), fixed_of(messages), limit)
    return [message for at, message in enumerate(messages) if at not in gone]


def last_question(messages: Sequence[Message]) -> int:
    """Place of the first message of the last question, which can have several."""
    last = max(at for at, each in enumerate(messages) if each.role == "user")
    return last - (last > 0 and messages[last - 1].role == "user")


def asked_at(messages: Sequence[Message]) -> list[list[Message]]:
    """The conversation at each time when the model was asked."""
    ends = (at for at, each in enumerate(messages, 1) if each.role in ("user", "tool"))
    return [
        list(messages[:end]) for end in ends if end == len(messages) or messages[end].role != messages[end - 1].role
    ]


@given(conversations(), st.integers(50, 2_000))
def test_what_is_left_fits_and_has_instructions_the_last_question_and_whole_calls(
    messages: list[Message], limit: int
) -> None:
    kept = cut(messages, limit)
    is_kept = {id(message) for message in kept}
    assert [each for each in messages if each.role in INSTRUCTIONS] == [e for e in kept if e.role in INSTRUCTIONS]
    question = last_question(messages)
    assert all(id(each) in is_kept for each in messages[question:] if each.role == "user")
    results = 0
    for message in kept:  # no result without its call, and no call without its results
        results = 2 if message.tool_calls else results - 1 if message.role == "tool" else 0
        assert results >= 0
    assert id(messages[-1]) in is_kept
    alone = cut([each for at, each in enumerate(messages) if at >= question or each.role in INSTRUCTIONS], limit)
    assert sum(map(size, kept)) <= max(limit, sum(map(size, alone)))


@given(conversations(), st.integers(200, 1_000))
def test_requests_of_one_conversation_begin_alike_until_two_fifths_more_have_come(
    messages: list[Message], limit: int
) -> None:
    before: list[Message] = []
    for asked in asked_at(messages):
        kept = cut(asked, limit)
        if kept[: len(before)] != before:  # a cut: from now on there is space again
            fixed, last = fixed_of(asked), last_question(kept)
            must = sum(size(each) for at, each in enumerate(kept) if at >= last or each.role in INSTRUCTIONS)
            assert sum(map(size, kept)) <= max(fixed + KEPT_SHARE * (limit - fixed), must)
        before = kept


@pytest.mark.parametrize(
    ("kind", "turns"), [("attention", 80), ("hybrid", 70), pytest.param("attention", 300, marks=pytest.mark.slow)]
)
async def test_a_long_conversation_goes_on_and_most_turns_read_only_what_is_new(
    tmp_path: Path, kind: Kind, turns: int
) -> None:
    model = write_model(tmp_path / "tiny.gguf", context_length=4_096, kind=kind)
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logit_bias={"a": 100.0, "b": 100.0})
    talk, dear, dropped = [Message("system", "You answer briefly.")], 0, 0
    async with open_engine(config_for(model, n_ctx=4_096)) as engine:
        for turn in range(turns):
            talk.append(Message("user", f"Question {turn}: what comes after {turn * 7}?"))
            request = Request(f"r{turn}", messages=talk, sampling=sampling, truncation="auto", stream=False)
            async with engine.generate(request) as stream:
                (ended,) = [event async for event in stream]
            assert isinstance(ended, Finished) and ended.usage.completion_tokens == 16
            assert ended.usage.prompt_tokens <= 4_096 - 16
            assert bool(ended.dropped_messages) == any("oldest turns were left out" in each for each in ended.warnings)
            assert (await engine.explain(request.id)).dropped_messages == ended.dropped_messages
            new = len((await engine.tokenize(Request("new", messages=talk[-1:]))).token_ids)
            dear += ended.usage.prompt_tokens - ended.usage.cached_tokens > 1.1 * new
            dropped = ended.dropped_messages
            talk.append(Message("assistant", ended.text or ""))
        assert dropped > turns / 2
        assert dear <= turns / 10
        with pytest.raises(PromptTooLarge):
            async with engine.generate(Request("off", messages=talk, sampling=sampling)):
                pass


async def test_the_cut_is_the_cached_one_also_where_the_answer_may_be_longer(tiny: Path) -> None:
    """It has less space beside it; up to a quarter of the context, that moves no cut."""
    talk = [Message("system", "Be brief."), Message("user", "Question 0: " + "a" * 90)]
    async with open_engine(config_for(tiny, n_ctx=1_024)) as engine:

        async def asked(id: str, most_tokens: int) -> Finished:
            sampling = SamplingParams(max_tokens=most_tokens, temperature=0, stop=("a", "e", "i", "o", "u"))
            request = Request(id, messages=talk, sampling=sampling, truncation="auto", stream=False)
            return await finished(engine, request)

        dropped = 0
        for turn in range(1, 40):
            ended = await asked(f"r{turn}", 16)
            if ended.dropped_messages > dropped > 0:  # a second cut, behind which there is space again
                break
            dropped = ended.dropped_messages
            talk += [Message("assistant", "Yes."), Message("user", f"Question {turn}: " + "a" * 90)]
        talk += [Message("assistant", "Yes."), Message("user", "And now?")]
        for most_tokens in range(100, 251, 50):
            longer = await asked(f"m{most_tokens}", most_tokens)
            assert longer.dropped_messages == ended.dropped_messages
            assert longer.usage.cached_tokens > 0.8 * longer.usage.prompt_tokens


async def test_a_summary_stands_for_what_went_and_is_written_of_what_is_cached(tmp_path: Path) -> None:
    model = write_script_model(tmp_path / "model.gguf", "It was about foxes.", context_length=2_048)
    talk, ended, asked = [Message("system", "You answer briefly.")], list[Finished](), list[Over]()
    async with open_engine(config_for(model, n_ctx=2_048)) as engine:
        engine.on_request_over(asked.append)
        for turn in range(50):
            talk.append(Message("user", f"Question {turn}: what comes after {turn * 7}?"))
            request = Request(f"r{turn}", messages=talk, sampling=BRIEF, truncation="compact", stream=False)
            ended.append(await finished(engine, request))
            talk.append(Message("assistant", f"That is {turn}."))
        prompts = {each.request.id: b"".join(map(engine.vocab.spelled, each.tokens)) for each in asked}
    written = [each for each in asked if each.request.id.endswith("-summary")]
    cut = [each for each in ended if each.dropped_messages]
    assert 1 < len(written) < 10 < len(cut)
    assert all("replaced by a summary" in each.warnings[0] for each in cut)
    assert all(SUMMARY_HEADING.encode() + b"\nIt was about foxes." in prompts[each.id] for each in cut)
    assert sum(each.usage.summary_tokens > 0 for each in cut) == len(written)
    assert all(each.request.priority == -1 for each in written)
    again = written[1:]  # the summary before is part of what is summarised, and all of it is cached
    assert all(SUMMARY_HEADING.encode() in prompts[each.request.id] for each in again)
    assert all(each.usage.cached_tokens > each.usage.prompt_tokens / 2 for each in written)


async def test_without_a_summary_in_time_the_turns_are_left_out_and_that_is_said(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "MAX_SUMMARY_SEC", 0.0)
    talk = [Message(role, "a" * 60) for _ in range(40) for role in ("user", "assistant")]
    async with open_engine(config_for(tiny, n_ctx=1_024)) as engine:
        request = Request("one", messages=talk[:-1], sampling=BRIEF, truncation="compact", stream=False)
        for is_first in (True, False):  # the second does not wait for what was not there in time
            ended = await finished(engine, request)
            assert ended.dropped_messages and "no summary" in ended.warnings[0] and not ended.summary
            assert (ended.usage.summary_tokens > 0) == is_first


async def test_equal_conversations_share_one_summary_which_the_first_that_is_answered_is_charged_with(
    tmp_path: Path,
) -> None:
    model = write_script_model(tmp_path / "model.gguf", "It was about foxes.", context_length=1_024)
    talk, asked = [Message(role, "a" * 60) for _ in range(20) for role in ("user", "assistant")], list[Over]()
    wrong = SamplingParams(max_tokens=16, grammar=Grammar(gbnf="root ::= nothing"))
    async with open_engine(config_for(model, n_ctx=1_024)) as engine:
        engine.on_request_over(asked.append)
        request = Request("r", messages=talk[:-1], sampling=wrong, truncation="compact", stream=False)
        with pytest.raises(BadRequest):
            await finished(engine, request)  # behind its summary
        ended = list[Finished]()

        async def one(id: str) -> None:
            ended.append(await finished(engine, attrs.evolve(request, id=id, sampling=BRIEF)))

        async with trio.open_nursery() as nursery:
            for id in "ab":
                nursery.start_soon(one, id)
    assert sum(each.request.id.endswith("-summary") for each in asked) == 1
    assert [each.summary for each in ended] == ["It was about foxes."] * 2
    assert sorted(each.usage.summary_tokens > 0 for each in ended) == [False, True]


async def test_a_question_that_does_not_fit_by_itself_is_refused(tiny: Path) -> None:
    talk = [Message("user", "a"), Message("assistant", "b"), Message("user", "?" * 3_000)]
    async with open_engine(config_for(tiny)) as engine:
        with pytest.raises(PromptTooLarge):
            async with engine.generate(Request("long", messages=talk, truncation="auto")):
                pass


TALK = [{"role": role, "content": f"{role} {at} " + "x" * 200} for at in range(40) for role in ("user", "assistant")]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": TALK[:-1], "max_tokens": 8}),
        ("/v1/messages", {"messages": TALK[:-1], "max_tokens": 8}),
        ("/v1/responses", {"input": TALK[:-1], "max_output_tokens": 8}),
    ],
)
def test_over_http_it_is_asked_for_and_told(http_server: HttpServer, path: str, body: dict[str, Any]) -> None:
    assert http_server.ask("POST", path, body).status == 400
    told = http_server.ask("POST", path, {**body, "truncation": "auto"})
    assert told.status == 200
    assert told.json["dropped_messages"] == int(told.headers["x-uma-dropped-messages"]) > 20
    assert told.json["usage"]["dropped_messages"] == told.json["dropped_messages"]
    assert any("oldest turns were left out" in each for each in told.json["warnings"])
    stream = http_server.ask("POST", path, {**body, "truncation": "auto", "stream": True}).body
    assert b'"dropped_messages":' in stream


@pytest.fixture(scope="module")
def summing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server whose model's summaries are short."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    model = write_script_model(path, "It was about foxes.", context_length=2_048)
    with short_directory() as place, running_http(place, "--model", str(model), "--alias", "builtin") as server:
        yield server


def test_a_summary_is_asked_for_of_a_chat(summing: HttpServer) -> None:
    body = {"messages": TALK[:-1], "max_tokens": 8, "truncation": "compact"}
    told = summing.ask("POST", "/v1/chat/completions", body)
    assert told.status == 200 and any("replaced by a summary" in each for each in told.json["warnings"])


def test_ollama_s_chat_cuts_unless_it_is_told_not_to(http_server: HttpServer) -> None:
    body = {"messages": TALK[:-1], "stream": False, "options": {"num_predict": 8}}
    assert http_server.ask("POST", "/api/chat", body).json["dropped_messages"] > 20
    assert http_server.ask("POST", "/api/chat", {**body, "truncate": False}).status == 400
