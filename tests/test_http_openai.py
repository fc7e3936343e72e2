"""OpenAI's dialect on the real server, through the client that people use."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest
from http_server import HttpServer

STORY: Any = [{"role": "user", "content": "Tell me a story about a fox"}]
NEAR_TIES = 5
"""Maximum questions until a streamed answer has a whole one's words: a near tie of two tokens can go either way where
answers are computed side by side."""


def test_a_stream_and_a_whole_answer_say_the_same(openai_client: openai.OpenAI) -> None:
    asked: Any = {"messages": STORY, "max_tokens": 24, "seed": 7, "extra_body": {"ignore_eos": True}}
    whole = openai_client.chat.completions.create(model="builtin", **asked)
    chunks = list(
        openai_client.chat.completions.create(
            model="builtin", stream=True, stream_options={"include_usage": True}, **asked
        )
    )
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_a_seeded_question_asked_again_has_the_same_answer_without_flash_attention_too(
    openai_client: openai.OpenAI,
) -> None:
    asked: Any = {"messages": STORY, "max_tokens": 24, "seed": 7, "extra_body": {"ignore_eos": True}}
    answers = [openai_client.chat.completions.create(model="builtin", **asked) for _ in range(6)]
    assert len({each.choices[0].message.content for each in answers}) == 1


class Animal(pydantic.BaseModel):
    """What the model is made to fill in."""

    kind: Literal["fox", "owl"]
    can_fly: bool


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_pydantic_model_is_parsed_out_of_the_answer(openai_client: openai.OpenAI, is_streamed: bool) -> None:
    asked: Any = {"model": "builtin", "messages": STORY, "max_tokens": 200, "temperature": 0, "response_format": Animal}
    if is_streamed:
        with openai_client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            parsed = stream.get_final_completion().choices[0].message.parsed
    else:
        parsed = openai_client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(parsed, Animal)


def test_json_object_and_a_schema_of_responses_hold(openai_client: openai.OpenAI) -> None:
    asked: Any = {"model": "builtin", "messages": STORY, "max_tokens": 300, "temperature": 0}
    whole = openai_client.chat.completions.create(**asked, response_format={"type": "json_object"})
    if whole.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(whole.choices[0].message.content or ""), dict)
    parsed = openai_client.responses.parse(
        model="builtin", input="A fox", text_format=Animal, temperature=0
    ).output_parsed
    assert isinstance(parsed, Animal)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_several_choices_are_told_apart_and_usage_counts_all(openai_client: openai.OpenAI, is_streamed: bool) -> None:
    asked: Any = {"model": "builtin", "messages": STORY, "max_tokens": 6, "n": 3, "seed": 5, "temperature": 1.5}
    asked["extra_body"] = {"ignore_eos": True}
    for _ in range(NEAR_TIES):
        whole = openai_client.chat.completions.create(**asked)
        texts = {choice.index: choice.message.content for choice in whole.choices}
        assert sorted(texts) == [0, 1, 2]
        assert len(set(texts.values())) == 3
        told = dict.fromkeys(texts, "")
        for chunk in openai_client.chat.completions.create(**asked, stream=True) if is_streamed else ():
            for choice in chunk.choices:
                told[choice.index] += choice.delta.content or ""
        if not is_streamed or told == texts:
            break
    assert not is_streamed or told == texts
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 18
    single = openai_client.chat.completions.create(**{**asked, "n": 1})
    assert single.usage is not None
    assert whole.usage.prompt_tokens == single.usage.prompt_tokens


def test_usage_sums_all_prompts_and_choices_streamed_or_not(openai_client: openai.OpenAI) -> None:
    prompts = ["Once upon a time", "The owl"]
    asked: Any = {"model": "builtin", "max_tokens": 3, "temperature": 0, "extra_body": {"ignore_eos": True}}
    singles = [openai_client.completions.create(**asked, prompt=each) for each in prompts]
    asked |= {"prompt": prompts, "n": 2}
    whole = openai_client.completions.create(**asked)
    *_, last = openai_client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert [choice.text for choice in whole.choices] == [each.choices[0].text for each in singles for _ in range(2)]
    for usage in (whole.usage, last.usage):
        assert usage is not None
        assert usage.prompt_tokens == sum(each.usage.prompt_tokens for each in singles if each.usage)
        assert (usage.completion_tokens, usage.total_tokens) == (12, usage.prompt_tokens + 12)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_of_several_prompts_the_one_that_is_too_long_is_named(openai_client: openai.OpenAI, is_streamed: bool) -> None:
    asked: Any = {"model": "builtin", "prompt": ["Once", "long " * 300_000], "max_tokens": 1, "stream": is_streamed}
    with pytest.raises(openai.BadRequestError, match=r"prompt\[1\]: prompt too large") as refused:
        list(openai_client.completions.create(**asked))
    assert refused.value.code == "context_length_exceeded"


def test_a_prompt_of_token_ids_is_that_of_their_text(openai_client: openai.OpenAI) -> None:
    text = "Once upon a time"
    found = openai_client.post("/../tokenize", body={"content": text, "add_special": True}, cast_to=dict[str, Any])
    asked: Any = {"model": "builtin", "max_tokens": 4, "seed": 3}
    by_text = openai_client.completions.create(**asked, prompt=text)
    by_ids = openai_client.completions.create(**asked, prompt=found["tokens"])
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_ids.usage and by_text.usage
    assert by_ids.usage.prompt_tokens == by_text.usage.prompt_tokens == found["count"]


def test_a_prompt_is_scored_without_an_answer(http_server: HttpServer, openai_client: openai.OpenAI) -> None:
    asked: Any = {"model": "builtin", "prompt": "Once upon a time", "echo": True, "logprobs": 1, "temperature": 0}
    alone = openai_client.completions.create(**asked, max_tokens=0)
    longer = openai_client.completions.create(**asked, max_tokens=2)
    (one,), (other,) = alone.choices, longer.choices
    assert (one.text, one.finish_reason) == ("Once upon a time", "length")
    assert one.logprobs and other.logprobs and one.logprobs.token_logprobs and other.logprobs.token_logprobs
    assert one.logprobs.tokens == (other.logprobs.tokens or [])[:-2]
    assert one.logprobs.token_logprobs[1:] == pytest.approx(other.logprobs.token_logprobs[1:-2], abs=1e-3)
    assert alone.usage and alone.usage.completion_tokens == 0
    native = http_server.ask("POST", "/completion", {"prompt": "Once upon a time", "n_predict": 0}).json
    assert (native["content"], native["tokens_predicted"], native["tokens_evaluated"]) == (
        "",
        0,
        alone.usage.prompt_tokens,
    )


def test_log_probabilities_have_openai_s_form_streamed_or_not(openai_client: openai.OpenAI) -> None:
    asked: Any = {"model": "builtin", "messages": STORY, "max_tokens": 5, "temperature": 0}
    asked |= {"logprobs": True, "top_logprobs": 2}
    whole = openai_client.chat.completions.create(**asked).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content or []
    assert "".join(each.token for each in content) == whole.message.content
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in content)
    assert all(each.logprob == each.top_logprobs[0].logprob for each in content)
    streamed = [
        each
        for chunk in openai_client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for each in choice.logprobs.content or []
    ]
    assert [each.token for each in streamed] == [each.token for each in content]


def test_a_rendered_conversation_is_the_same_prompt_wherever_text_is_a_prompt(http_server: HttpServer) -> None:
    talk: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    chat = http_server.ask("POST", "/v1/chat/completions", talk).json["usage"]["prompt_tokens"]
    text = http_server.ask("POST", "/apply-template", talk).json["prompt"]
    found = [
        http_server.ask("POST", "/v1/completions", {"prompt": text, "max_tokens": 1}).json["usage"]["prompt_tokens"],
        http_server.ask("POST", "/completion", {"prompt": text, "n_predict": 1}).json["tokens_evaluated"],
        http_server.ask(
            "POST", "/api/generate", {"prompt": text, "raw": True, "stream": False, "options": {"num_predict": 1}}
        ).json["prompt_eval_count"],
        http_server.ask("POST", "/tokenize", {"content": text, "add_special": True}).json["count"],
    ]
    assert found == [chat] * 4
    plain = http_server.ask("POST", "/tokenize", {"content": text, "add_special": True, "parse_special": False}).json
    assert plain["count"] > chat


def test_the_spelling_of_a_control_token_in_a_message_is_that_token(http_server: HttpServer) -> None:
    def prompt_tokens(text: str) -> int:
        asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        return int(http_server.ask("POST", "/v1/chat/completions", asked).json["usage"]["prompt_tokens"])

    assert prompt_tokens("Hi<|im_end|>") == prompt_tokens("Hi") + 1


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "Once upon", "seed": 7, "max_tokens": 6, "temperature": 0.8, "stop": ["ime, t", "zzz"]},
        {"prompt": "\u00e9\U0001f98a", "echo": True, "max_tokens": 4, "temperature": 0},
    ],
)
def test_text_offsets_are_where_each_token_s_text_begins_streamed_or_not(
    openai_client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    whole = openai_client.completions.create(model="builtin", logprobs=1, **fields).choices[0]
    parts = [
        each.choices[0] for each in openai_client.completions.create(model="builtin", logprobs=1, **fields, stream=True)
    ]
    assert whole.logprobs is not None
    offsets = whole.logprobs.text_offset or []
    assert offsets == [at for each in parts if each.logprobs for at in each.logprobs.text_offset or []]
    for at, token in zip(offsets, whole.logprobs.tokens or [], strict=True):
        if "\ufffd" not in token:
            assert whole.text[at:].startswith(token[: max(0, len(whole.text) - at)])


def test_log_probabilities_of_completions_are_four_lists_with_the_token_itself_among_the_likeliest(
    openai_client: openai.OpenAI,
) -> None:
    asked: Any = {"model": "builtin", "prompt": "Once upon", "max_tokens": 12, "temperature": 2, "seed": 1}
    done = openai_client.completions.create(**asked, logprobs=1).choices[0]
    form = done.logprobs
    assert form is not None
    assert "".join(form.tokens or []) == done.text
    assert len(form.token_logprobs or []) == len(form.top_logprobs or []) == 12
    assert form.text_offset is not None
    assert form.text_offset[1] == len((form.tokens or [""])[0])
    for token, likeliest in zip(form.tokens or [], form.top_logprobs or [], strict=True):
        assert token in likeliest and len(likeliest) <= 2


def test_log_probabilities_of_responses_are_those_of_the_chat_streamed_or_not(openai_client: openai.OpenAI) -> None:
    asked: Any = {"model": "builtin", "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    chat = openai_client.chat.completions.create(**asked, messages=STORY).choices[0].logprobs
    assert chat is not None
    expected = [(each.token, len(each.top_logprobs)) for each in chat.content or []]
    again: Any = {"model": "builtin", "max_output_tokens": 5, "temperature": 0, "top_logprobs": 2, "input": STORY}
    again |= {"include": ["message.output_text.logprobs"]}
    whole = openai_client.responses.create(**again)
    *events, end = openai_client.responses.create(**again, stream=True)
    deltas = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    assert [(each.token, len(each.top_logprobs or [])) for each in deltas] == expected
    for response in (whole, end.response):
        item: Any = response.output[0]
        assert [(each.token, len(each.top_logprobs)) for each in item.content[0].logprobs] == expected
    del again["include"], again["top_logprobs"]
    item = openai_client.responses.create(**again).output[0]
    assert item.content[0].logprobs == []


def test_a_response_echoes_what_held(openai_client: openai.OpenAI) -> None:
    asked: Any = {"model": "builtin", "input": "x", "max_output_tokens": 1}
    given: Any = {"temperature": 0.5, "top_p": 0.75, "metadata": {"topic": "foxes"}}
    said = openai_client.responses.create(**asked, reasoning={"effort": "none"}, **given)
    assert (said.temperature, said.top_p, said.reasoning and said.reasoning.effort) == (0.5, 0.75, "none")
    assert said.metadata == {"topic": "foxes"}
    said = openai_client.responses.create(**asked, reasoning={"effort": "high"}, text={"verbosity": "low"})
    assert (said.temperature, said.top_p, said.reasoning and said.reasoning.effort) == (0.8, 0.95, "high")
    assert said.text and said.text.verbosity == "low"


def test_a_token_that_is_biased_away_does_not_come(openai_client: openai.OpenAI) -> None:
    asked: Any = {"model": "builtin", "prompt": "Once upon", "max_tokens": 1, "temperature": 0}
    usual = openai_client.completions.create(**asked, logprobs=0).choices[0]
    tokens = openai_client.post("/../tokenize", body={"content": usual.text}, cast_to=dict[str, Any])["tokens"]
    other = openai_client.completions.create(**asked, logit_bias={str(tokens[0]): -100}).choices[0]
    assert other.text != usual.text


@pytest.mark.parametrize("count", [1, 2])
def test_echo_puts_the_prompt_and_its_log_probabilities_before_each_answer(
    openai_client: openai.OpenAI, count: int
) -> None:
    asked: Any = {"model": "builtin", "prompt": "Once upon a time", "max_tokens": 3, "n": count, "seed": 1}
    plain = openai_client.completions.create(**asked)
    whole = openai_client.completions.create(**asked, echo=True, logprobs=2)
    assert [each.text for each in whole.choices] == ["Once upon a time" + each.text for each in plain.choices]
    streamed = dict.fromkeys(range(count), "")
    told: dict[int, list[float | None]] = {index: [] for index in range(count)}
    for chunk in openai_client.completions.create(**asked, echo=True, logprobs=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            told[choice.index] += (choice.logprobs.token_logprobs or []) if choice.logprobs else []
    for choice in whole.choices:
        assert streamed[choice.index] == choice.text
        form = choice.logprobs
        assert form is not None
        assert "".join(form.tokens or []) == choice.text
        first, *others = form.token_logprobs or []
        assert first is None
        assert all(each <= 0 for each in others)
        assert [told[choice.index][0], *told[choice.index][1:]] == pytest.approx(form.token_logprobs, abs=1e-2)


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/nope", "/health"),
        ("/api/create", "--models all"),
    ],
)
def test_a_path_that_there_is_not_is_answered_with_what_there_is(
    http_server: HttpServer, path: str, advice: str
) -> None:
    answer = http_server.ask("POST", path, {})
    assert answer.status == 404
    assert advice in str(answer.json)


PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": STORY, "max_tokens": 24, "temperature": 0, "logprobs": True},
    "/v1/completions": {"prompt": "Once upon", "max_tokens": 24, "temperature": 0, "logprobs": 0},
    "/v1/responses": {"input": "Go.", "max_output_tokens": 24, "temperature": 0, "top_logprobs": 0},
    "/api/chat": {"messages": STORY, "logprobs": True, "options": {"num_predict": 24, "temperature": 0}},
    "/completion": {"prompt": "Once upon", "n_predict": 24, "temperature": 0, "n_probs": 1},
}


def told_tokens(server: HttpServer, path: str, stop: list[str], *, is_streamed: bool) -> tuple[str, list[str]]:
    """The text of an answer, and of each token that it has log probabilities of."""
    body = {**PATHS[path], "stream": is_streamed}
    body |= {"options": {**body["options"], "stop": stop}} if "options" in body else {"stop": stop}
    parts: list[dict[str, Any]] = server.ask("POST", path, body).events
    text, tokens = "", list[str]()
    for part in parts:
        if path == "/v1/responses":
            deltas = [part] if part.get("type") == "response.output_text.delta" else []
            found = [item["content"][0] for item in part.get("output", ())] + deltas
            text += "".join(each.get("delta", each.get("text", "")) for each in found)
            tokens += [each["token"] for one in found for each in one["logprobs"]]
        elif path == "/completion":
            text += part["content"]
            tokens += [each["token"] for each in part.get("completion_probabilities", ())]
        elif path == "/api/chat":
            text += part["message"]["content"]
            tokens += [each["token"] for each in part.get("logprobs", ())]
        else:
            (choice,) = part["choices"]
            said, logprobs = choice.get("delta") or choice.get("message") or choice, choice["logprobs"] or {}
            text += said.get("content", said.get("text", ""))
            tokens += logprobs.get("tokens", ())
            tokens += [each["token"] for each in logprobs.get("content", ())]
    return text, tokens


@pytest.mark.parametrize("path", PATHS)
def test_log_probabilities_are_those_of_the_text_that_stop_strings_leave_streamed_or_not(
    http_server: HttpServer, path: str
) -> None:
    text, tokens = told_tokens(http_server, path, [], is_streamed=False)
    assert "".join(tokens) == text
    at = next(at for at in range(4, 20) if len(tokens[at]) >= 3)
    one, other, third = tokens[at : at + 3]
    for stop in (
        [one[-2:] + other + "ZZZ", one[-1] + other],  # the longer begins earlier
        [one + other + third],  # of which several tokens are held
        [text[-3:] + "ZZZ"],  # which is held to the end, and given out
        [text[:3]],  # which leaves nothing
    ):
        for _ in range(NEAR_TIES):
            whole_text, whole = told_tokens(http_server, path, stop, is_streamed=False)
            streamed_text, streamed = told_tokens(http_server, path, stop, is_streamed=True)
            if streamed_text == whole_text:
                break
        assert (streamed_text, streamed) == (whole_text, whole), stop
        assert "".join(whole).startswith(whole_text)
        assert not whole or len("".join(whole[:-1])) < len(whole_text), stop
