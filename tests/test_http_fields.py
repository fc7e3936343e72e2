"""Every field of every dialect reaches the engine as the dialect's documents have it, under whatever name it comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest
from engine_world import config_for
from http_server import HostedHttp, HttpServer, Reachable, hosted_http
from test_http_promises import GENERATING, Noting

from models import write_model
from uma.types import Grammar, Message, Request, SamplerSettings

CHAT, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA_CHAT, OLLAMA, NATIVE = GENERATING
N_CTX = 2_048
SHARED: dict[str, Any] = {
    **{"top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": 11, "stop": ["zz", "yy"], "min_tokens": 1, "ignore_eos": True},
    **{"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.2, "penalty_window": 9},
    **{"typical_p": 0.9, "top_n_sigma": 2.0, "xtc_probability": 0.1, "xtc_threshold": 0.2},
    **{"dynatemp_range": 0.1, "dynatemp_exponent": 1.5, "mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2},
    **{"dry_multiplier": 0.5, "dry_base": 1.5, "dry_allowed_length": 3, "dry_window": 12},
    "dry_sequence_breakers": ["\n", "a"],
    "reproducible": True,
}
"""Under UMA's own names, in every dialect."""


@attrs.frozen
class Asking(Reachable):
    """A server, and the requests that its engine was given."""

    port: int
    given: list[Request]

    def requests(self, path: str, fields: dict[str, Any]) -> list[Request]:
        """What the engine is given of one HTTP request."""
        self.given.clear()
        self.answer(path, fields)
        return list(self.given)

    def answer(self, path: str, fields: dict[str, Any]) -> Any:
        """The whole answer to a request, which must be a good one."""
        found = self.ask("POST", path, {**GENERATING[path], "stream": False, **fields})
        assert (found.status, found.headers.get("x-uma-ignored")) == (200, None), found.body
        return found.json


@pytest.fixture(scope="module")
def asking(tiny: Path) -> Iterator[Asking]:
    bounds = {"n_ctx": N_CTX, "max_tokens": 32, "alias": "*"}
    with hosted_http(config_for(tiny, http="127.0.0.1:0", **bounds)) as hosted:
        noting: Any = Noting(hosted.engine)
        hosted.call(lambda: hosted.gateway.be_ready(noting))
        yield Asking(hosted.port, noting.given)


@pytest.fixture(scope="module")
def small(tiny: Path) -> Iterator[HostedHttp]:
    """A server whose context any answer can fill."""
    with hosted_http(config_for(tiny, http="127.0.0.1:0", n_ctx=64)) as hosted:
        yield hosted


def optional(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields where the dialect has those of sampling."""
    return {"options": fields} if path.startswith("/api/") else fields


@pytest.mark.parametrize("path", GENERATING)
def test_uma_s_own_names_are_known_in_every_dialect(asking: Asking, path: str) -> None:
    (request,) = asking.requests(path, optional(path, SHARED))
    expected = {name: tuple(value) if isinstance(value, list) else value for name, value in SHARED.items()}
    assert {name: getattr(request.sampling, name) for name in SHARED} == expected


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("off", [-1, 0, -1.0])
def test_top_n_sigma_is_switched_off_as_llama_server_has_it(asking: Asking, path: str, off: float) -> None:
    (request,) = asking.requests(path, optional(path, {"top_n_sigma": off}))
    assert request.sampling.top_n_sigma is None


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
NAMED = {"name": "x", "schema": SCHEMA, "strict": True}
BY_SCHEMA, ANY_OBJECT = Grammar(json_schema=SCHEMA), Grammar(json_object=True)
TOP = {"include": ["message.output_text.logprobs"]}


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {"max_tokens": 3}, {"max_tokens": 3}),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 2}, {"max_tokens": 2}),
        (CHAT, {"max_tokens": -1}, {"max_tokens": 32}),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": -1}, {"max_tokens": 32}),
        (COMPLETIONS, {"max_tokens": -1}, {"max_tokens": 32}),
        (CHAT, {"guided_json": SCHEMA}, {"grammar": BY_SCHEMA}),
        (CHAT, {"guided_json": orjson.dumps(SCHEMA).decode()}, {"grammar": BY_SCHEMA}),
        (CHAT, {"guided_choice": ["yes", "no"]}, {"grammar": Grammar(choice=("yes", "no"))}),
        (CHAT, {"structured_outputs": {"regex": "a+", "json_object": False}}, {"grammar": Grammar(regex="a+")}),
        (CHAT, {"structured_outputs": {"json_object": True}}, {"grammar": ANY_OBJECT}),
        (COMPLETIONS, {"guided_regex": "a+"}, {"grammar": Grammar(regex="a+")}),
        (COMPLETIONS, {"guided_grammar": 'root ::= "a"'}, {"grammar": Grammar(gbnf='root ::= "a"')}),
        (COMPLETIONS, {"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": Grammar(lark='start: "a"')}),
        (COMPLETIONS, {"structured_outputs": {"json": SCHEMA}}, {"grammar": BY_SCHEMA}),
        (CHAT, {"n": 2, "temperature": 0.3, "stop": "zz"}, {"n": 2, "temperature": 0.3, "stop": ("zz",)}),
        (CHAT, {"logprobs": True}, {"logprobs": 0}),
        (CHAT, {"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
        (CHAT, {"logit_bias": {"200": -3}}, {"logit_bias": {"200": -3.0}}),
        (CHAT, {"logit_bias": {}}, {"logit_bias": None}),
        (CHAT, {"seed": 2**40 + 3}, {"seed": 3}),
        (COMPLETIONS, {"seed": -1}, {"seed": 2**32 - 1}),
        (CHAT, {"response_format": {"type": "text"}}, {"grammar": None}),
        (CHAT, {"response_format": {"type": "json_object"}}, {"grammar": ANY_OBJECT}),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": NAMED}}, {"grammar": BY_SCHEMA}),
        (COMPLETIONS, {}, {"max_tokens": 16, "logprobs": None, "echo": False}),
        (COMPLETIONS, {"max_tokens": 3, "temperature": 0.3}, {"max_tokens": 3, "temperature": 0.3}),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, {"echo": True, "logprobs": 1, "prompt_logprobs": 1}),
        (COMPLETIONS, {"n": 2, "best_of": 3}, {"n": 2, "best_of": 3}),
        (COMPLETIONS, {"best_of": 1}, {"n": 1, "best_of": None}),
        (COMPLETIONS, {"logit_bias": {"200": 3}}, {"logit_bias": {"200": 3.0}}),
        (RESPONSES, {"max_output_tokens": 3, "temperature": 0.3}, {"max_tokens": 3, "temperature": 0.3}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", **NAMED}}}, {"grammar": BY_SCHEMA}),
        (RESPONSES, {"top_logprobs": 2, **TOP}, {"logprobs": 2}),
        (RESPONSES, TOP, {"logprobs": 0}),
        (MESSAGES, {"max_tokens": 3, "temperature": 0.3}, {"max_tokens": 3, "temperature": 0.3}),
        (MESSAGES, {"stop_sequences": ["zz"]}, {"stop": ("zz",)}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, {"grammar": BY_SCHEMA}),
        (OLLAMA_CHAT, {"options": {"num_predict": 3, "temperature": 0.3}}, {"max_tokens": 3, "temperature": 0.3}),
        (
            OLLAMA_CHAT,
            {"options": {"num_predict": -1, "seed": -1, "stop": "zz"}},
            {"seed": None, "stop": ("zz",), "max_tokens": 32},
        ),
        (OLLAMA_CHAT, {"logprobs": True}, {"logprobs": 0}),
        (OLLAMA, {"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
        (OLLAMA_CHAT, {"format": "json"}, {"grammar": ANY_OBJECT}),
        (OLLAMA_CHAT, {"format": SCHEMA}, {"grammar": BY_SCHEMA}),
        (OLLAMA, {"options": {"repeat_penalty": 1.2}}, {"repetition_penalty": 1.2}),
        (OLLAMA, {"options": {"repeat_last_n": 5}}, {"penalty_window": 5}),
        (OLLAMA, {"options": {"repeat_last_n": -1}}, {"penalty_window": N_CTX}),
        (OLLAMA, {"format": ""}, {"grammar": None}),
        (NATIVE, {"n_predict": 3, "temperature": 0.3}, {"max_tokens": 3, "temperature": 0.3}),
        (NATIVE, {"n_predict": -1, "seed": -1}, {"max_tokens": 32, "seed": None}),
        (NATIVE, {"n_predict": None}, {"max_tokens": 32}),
        (NATIVE, {"seed": 2**32 - 1}, {"seed": None}),
        (NATIVE, {"seed": 2**32 - 2}, {"seed": 2**32 - 2}),
        (CHAT, {"seed": 2**32 - 1}, {"seed": 2**32 - 1}),
        (OLLAMA, {"options": {"num_predict": -2}}, {"max_tokens": 32}),
        (NATIVE, {"repeat_penalty": 1.2, "repeat_last_n": 5}, {"repetition_penalty": 1.2, "penalty_window": 5}),
        (NATIVE, {"repeat_last_n": -1, "dry_penalty_last_n": -1}, {"penalty_window": N_CTX, "dry_window": N_CTX}),
        (NATIVE, {"dry_penalty_last_n": 7, "n_probs": 3}, {"dry_window": 7, "logprobs": 3}),
        (NATIVE, {"n_probs": 0}, {"logprobs": None}),
        (NATIVE, {"logit_bias": [[200, 3], [201, False]]}, {"logit_bias": {"200": 3.0, "201": -100.0}}),
        (NATIVE, {"logit_bias": {"201": False}}, {"logit_bias": {"201": -100.0}}),
        (NATIVE, {"grammar": 'root ::= "a"'}, {"grammar": Grammar(gbnf='root ::= "a"')}),
        (NATIVE, {"json_schema": SCHEMA}, {"grammar": BY_SCHEMA}),
    ],
)
def test_a_dialect_s_own_names_mean_what_its_documents_say(
    asking: Asking, path: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    (request,) = asking.requests(path, fields)
    assert {name: getattr(request.sampling, name) for name in expected} == expected


@pytest.mark.parametrize("path", [OLLAMA_CHAT, OLLAMA])
def test_ollama_s_answers_have_the_log_probabilities_of_their_tokens(asking: Asking, path: str) -> None:
    options = {"num_predict": 6, "temperature": 0, "ignore_eos": True}
    asked = {**GENERATING[path], "logprobs": True, "top_logprobs": 2, "options": options}
    whole = asking.answer(path, asked)
    lines = [orjson.loads(line) for line in asking.ask("POST", path, {**asked, "stream": True}).body.splitlines()]
    streamed = [each for line in lines for each in line.get("logprobs", ())]
    assert [each["bytes"] for each in streamed] == [each["bytes"] for each in whole["logprobs"]]
    for one, other in zip(streamed, whole["logprobs"], strict=True):  # the second prompt came from the cache
        assert one["logprob"] == pytest.approx(other["logprob"], abs=0.01)
    text = whole["response"] if path == OLLAMA else whole["message"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in whole["logprobs"]).decode(errors="replace") == text
    assert {len(each["top_logprobs"]) for each in whole["logprobs"]} == {2}
    assert all(each["logprob"] == each["top_logprobs"][0]["logprob"] <= 0 for each in whole["logprobs"])


def test_the_best_of_fewer_answers_than_are_wanted_is_refused(asking: Asking) -> None:
    with asking.connect() as raw:
        for few in (1, 2):
            refused = raw.ask("POST", COMPLETIONS, {**GENERATING[COMPLETIONS], "stream": False, "n": 3, "best_of": few})
            assert (refused.status, refused.json["error"]["message"].startswith(f"best_of: {few} ")) == (400, True)


def test_a_health_check_can_have_no_more_tokens_than_any_other_request(asking: Asking) -> None:
    refused = asking.ask("POST", "/health/check", {"type": "generation", "token_ids": [200], "max_tokens": 33})
    assert (refused.status, "--max-tokens" in refused.json["error"]["message"]) == (400, True)


def test_any_model_is_told_of_where_any_is_served(asking: Asking) -> None:
    found = asking.ask("GET", "/v1/models/gpt-4")
    assert (found.status, found.json["id"]) == (200, "gpt-4")


def test_a_streamed_response_ends_with_what_a_whole_one_has(asking: Asking) -> None:
    whole = asking.answer(RESPONSES, {"max_output_tokens": 3, "temperature": 0, "ignore_eos": True})
    asked = {**GENERATING[RESPONSES], "stream": True, "max_output_tokens": 3, "temperature": 0, "ignore_eos": True}
    streamed = asking.ask("POST", RESPONSES, asked).events[-1]["response"]
    assert streamed.keys() == whole.keys()
    assert streamed["timings"]["predicted_n"] == whole["timings"]["predicted_n"] == 3


DEFAULTS = {
    **dict.fromkeys(
        (OLLAMA_CHAT, OLLAMA), SamplerSettings(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.1)
    ),
    **dict.fromkeys(
        (CHAT, COMPLETIONS, RESPONSES, MESSAGES, NATIVE),
        SamplerSettings(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    ),
}


@pytest.mark.parametrize("path", GENERATING)
def test_what_is_not_asked_for_is_the_dialect_s_default(asking: Asking, path: str) -> None:
    (request,) = asking.requests(path, {})
    assert request.sampling.settled == DEFAULTS[path]


OF_THE_FILE = {"temp": 0.6, "top_p": 0.9, "penalty_repeat": 1.05, "penalty_last_n": 32, "min_p": 7.0}
"""A min-p that there cannot be is left out."""


def test_the_operator_s_figures_go_before_the_model_s_own_and_these_before_a_dialect_s(tmp_path: Path) -> None:
    own = {f"general.sampling.{key}": value for key, value in OF_THE_FILE.items()}
    model = write_model(tmp_path / "model.gguf", metadata=own)
    config = config_for(model, http="127.0.0.1:0", max_tokens=16, temperature=0.0, top_k=5)
    with hosted_http(config) as hosted:
        noting: Any = Noting(hosted.engine)
        hosted.call(lambda: hosted.gateway.be_ready(noting))
        for path, of_dialect in DEFAULTS.items():
            (request,) = Asking(hosted.port, noting.given).requests(path, {})
            expected = attrs.evolve(of_dialect, temperature=0.0, top_k=5, top_p=0.9, repetition_penalty=1.05)
            assert request.sampling.settled == expected, path
            assert request.sampling.penalty_window == 32, path


@pytest.mark.parametrize("path", GENERATING)
def test_penalties_count_what_was_generated_alone_where_the_dialect_s_documents_say_so(
    asking: Asking, path: str
) -> None:
    (request,) = asking.requests(path, {})
    counts_prompt = path in (NATIVE, OLLAMA, OLLAMA_CHAT)
    assert request.sampling.penalize_prompt == counts_prompt
    assert request.sampling.penalty_window == (64 if counts_prompt else N_CTX)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, OLLAMA, OLLAMA_CHAT, NATIVE])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_without_a_number_an_answer_can_fill_the_context(tiny: Path, path: str, is_streamed: bool) -> None:
    with hosted_http(config_for(tiny, http="127.0.0.1:0", n_ctx=256, alias="*")) as hosted:
        noting: Any = Noting(hosted.engine)
        hosted.call(lambda: hosted.gateway.be_ready(noting))
        fields = optional(path, {"ignore_eos": True, "temperature": 0})
        unbounded = {name: value for name, value in GENERATING[path].items() if not name.startswith("max_")}
        answer = hosted.ask("POST", path, {**unbounded, **fields, "stream": is_streamed})
        assert (answer.status, b'"warnings"' in answer.body) == (200, False)
        (request,) = noting.given
        assert request.sampling.max_tokens == hosted.engine.info.limits.max_tokens


TEXTS: Any = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
INPUT_TEXTS = [{**each, "type": "input_text"} for each in TEXTS]
USER = {"role": "user", "content": "u"}
SYSTEM_AND_USER = (Message("system", "a\nb"), Message("user", "u"))


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {"messages": [{"role": "developer", "content": TEXTS}, USER]}, SYSTEM_AND_USER),
        (RESPONSES, {"instructions": "a\nb", "input": "u"}, SYSTEM_AND_USER),
        (RESPONSES, {"input": [{"role": "developer", "content": INPUT_TEXTS}, USER]}, SYSTEM_AND_USER),
        (MESSAGES, {"system": "a\nb", "messages": [USER]}, SYSTEM_AND_USER),
        (MESSAGES, {"system": TEXTS, "messages": [USER]}, SYSTEM_AND_USER),
        (OLLAMA, {"system": "a\nb", "prompt": "u"}, SYSTEM_AND_USER),
    ],
)
def test_instructions_are_the_system_s_message(
    asking: Asking, path: str, fields: dict[str, Any], expected: tuple[Message, ...]
) -> None:
    (request,) = asking.requests(path, fields)
    assert request.messages == expected


def test_a_raw_prompt_goes_without_a_template(asking: Asking) -> None:
    (request,) = asking.requests(OLLAMA, {"prompt": "u", "raw": True})
    assert (request.prompt, request.messages, request.parse_special) == ("u", None, True)


@pytest.mark.parametrize("path", [COMPLETIONS, NATIVE])
def test_a_prompt_is_a_string_or_token_ids(asking: Asking, path: str) -> None:
    assert [each.prompt for each in asking.requests(path, {"prompt": "a"})] == ["a"]
    assert [each.token_ids for each in asking.requests(path, {"prompt": [200, 201]})] == [(200, 201)]


def test_a_list_of_prompts_can_hold_both(asking: Asking) -> None:
    requests = sorted(asking.requests(COMPLETIONS, {"prompt": ["a", [200, 201], "b"]}), key=lambda each: each.id)
    assert [each.prompt or each.token_ids for each in requests] == [
        "a",
        (200, 201),
        "b",
    ]


@pytest.mark.parametrize("path", GENERATING)
def test_with_any_model_an_answer_has_the_name_that_was_asked_for(asking: Asking, path: str) -> None:
    assert asking.answer(path, {"model": "gpt-9"})["model"] == "gpt-9"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (NATIVE, {"n_predict": -1, "ignore_eos": True}),
        (NATIVE, {"n_predict": None, "ignore_eos": True}),
        (CHAT, {"max_tokens": -1, "ignore_eos": True}),
        (COMPLETIONS, {"max_tokens": -1, "ignore_eos": True}),
        (OLLAMA, {"options": {"num_predict": -1, "ignore_eos": True}}),
        (OLLAMA_CHAT, {"options": {"num_predict": -2, "ignore_eos": True}}),
    ],
)
def test_a_client_that_wants_all_tokens_there_may_be_is_not_warned_of_fewer(
    small: HostedHttp, path: str, fields: dict[str, Any], is_streamed: bool
) -> None:
    answer = small.ask("POST", path, {**GENERATING[path], **fields, "stream": is_streamed})
    assert (answer.status, b"warnings" in answer.body) == (200, False)
    said = (b'"stop_type":"limit"', b'"done_reason":"length"', b'"finish_reason":"length"')
    assert any(each in answer.body for each in said)


def test_a_number_that_does_not_fit_is_warned_of(small: HostedHttp) -> None:
    most = small.engine.info.limits.max_tokens
    answer = small.ask("POST", NATIVE, {**GENERATING[NATIVE], "n_predict": most, "ignore_eos": True})
    assert "do not fit" in answer.json["warnings"][0]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_llama_server_s_completion_tells_its_tokens_and_how_likely_they_were(
    http_server: HttpServer, is_streamed: bool
) -> None:
    asked = {"prompt": "Once upon", "n_predict": 4, "temperature": 0, "return_tokens": True, "n_probs": 2}
    whole = http_server.ask("POST", NATIVE, asked).json
    told, ids, text = whole["completion_probabilities"], whole["tokens"], whole["content"]
    if is_streamed:
        events = http_server.ask("POST", NATIVE, {**asked, "stream": True}).events
        assert [event["stop"] for event in events] == [False] * 4 + [True]
        told = [each for event in events[:-1] for each in event["completion_probabilities"]]
        assert [token for event in events[:-1] for token in event["tokens"]] == ids
        assert "".join(event["content"] for event in events) == text
    assert http_server.ask("POST", "/detokenize", {"tokens": ids}).json["content"] == text
    assert [each["id"] for each in told] == ids
    for each in told:
        likeliest, second = each["top_logprobs"]
        assert (likeliest["id"], likeliest["logprob"]) == (each["id"], each["logprob"])
        assert second["logprob"] <= likeliest["logprob"] <= 0
