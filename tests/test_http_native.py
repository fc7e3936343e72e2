"""llama-server's native completion: its forms of a prompt, several at once, and what its last object tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from engine_world import answer, ask, config_for
from http_server import Answered, RawHttp, hosted_http

from models import CHATML, write_encoder
from uma.engine import open_engine
from uma.http.usage import timings

GREEDY = {"temperature": 0, "n_predict": 6, "ignore_eos": True}


@attrs.frozen
class Server:
    """Where the service of this process listens."""

    port: int

    def ask(self, method: str, path: str, body: Any = None) -> Answered:
        """One request on a connection of its own."""
        raw = RawHttp(self.port)
        try:
            return raw.ask(method, path, body)
        finally:
            raw.close()


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    """A model whose tokens are bytes."""
    with hosted_http(config_for(tiny, http="127.0.0.1:0")) as hosted:
        yield Server(hosted.port)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A BERT, which wants a token before a text and one behind it."""
    path = write_encoder(tmp_path_factory.mktemp("model") / "bert.gguf")
    with hosted_http(config_for(path, http="127.0.0.1:0")) as hosted:
        yield Server(hosted.port)


def events(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, without comments."""
    answer = server.ask("POST", path, {**body, "stream": True})
    assert answer.status == 200
    return answer.events


def ids_of(server: Server, text: str) -> list[int]:
    found: list[int] = server.ask("POST", "/tokenize", {"content": text, "add_special": True}).json["tokens"]
    return found


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param(lambda ids: [*ids[:6], "upon a ", *ids[13:]], id="a text among ids"),
        pytest.param(lambda ids: ["Once upon a ", *ids[13:]], id="a text first"),
        pytest.param(lambda ids: {"prompt_string": "Once upon a time"}, id="an object"),
    ],
)
@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_a_prompt_in_parts_is_the_prompt_of_its_tokens(server: Server, path: str, prompt: Any) -> None:
    ids = ids_of(server, "Once upon a time")
    fields = {**GREEDY, "max_tokens": 6}
    whole = server.ask("POST", path, {"prompt": ids, **fields}).json
    parts = server.ask("POST", path, {"prompt": prompt(ids), **fields}).json
    texts = [each["content"] if path == "/completion" else each["choices"][0]["text"] for each in (whole, parts)]
    assert texts[0] == texts[1]


def test_several_prompts_have_an_answer_each_in_their_order(server: Server) -> None:
    alone = [server.ask("POST", "/completion", {"prompt": each, **GREEDY}).json for each in ("Once", "The owl")]
    both = {"prompt": ["Once", "The owl"], **GREEDY}
    told = server.ask("POST", "/completion", both).json
    assert [(each["index"], each["content"]) for each in told] == [(0, alone[0]["content"]), (1, alone[1]["content"])]
    streamed = ["", ""]
    for event in events(server, "/completion", both):
        streamed[event["index"]] += event["content"]
    assert streamed == [each["content"] for each in alone]
    assert server.ask("POST", "/completion", {"prompt": ["Once"], **GREEDY}).json["content"] == alone[0]["content"]


@pytest.mark.parametrize("prompt", [[], 5, ["a", []], [[]], {"text": "a"}, {"content": "a"}, [True, "a"]])
def test_what_is_no_prompt_is_refused_by_name(server: Server, prompt: Any) -> None:
    refused = server.ask("POST", "/completion", {"prompt": prompt, "n_predict": 1})
    assert (refused.status, refused.json["error"]["message"][:6]) == (400, "prompt")


@pytest.mark.parametrize(("text", "files"), [("What is <__media__>?", ["AAAA"]), ("What is it?", [])])
def test_an_image_in_a_prompt_is_refused_by_name(server: Server, text: str, files: list[str]) -> None:
    refused = server.ask("POST", "/completion", {"prompt": {"prompt_string": text, "multimodal_data": files}})
    message = refused.json["error"]["message"]
    assert (refused.status, "this model does not support image or audio input (multimodal_data)" in message) == (
        400,
        True,
    )


def test_the_last_object_says_how_it_was_sampled(server: Server) -> None:
    body = {"prompt": "Once", "n_predict": 3, "temperature": 0.5, "seed": 7, "stop": ["zzz"], "logit_bias": [[65, -1]]}
    whole = server.ask("POST", "/completion", body).json
    last = events(server, "/completion", body)[-1]
    for told in (whole, last):
        figures = told["generation_settings"]
        assert (figures["temperature"], figures["seed"], figures["n_predict"]) == (0.5, 7, 3)
        assert (figures["top_k"], figures["top_p"], figures["min_p"]) == (40, 0.95, 0.05)
        assert (figures["stop"], figures["logit_bias"]) == (["zzz"], [{"token": "65", "bias": -1.0}])
        assert told["prompt"] == "Once"


def test_a_line_break_in_the_answer_is_told(server: Server) -> None:
    for text, is_there in (("a\\nb", True), ("ab", False)):
        body = {"prompt": "x", "grammar": f'root ::= "{text}"'}
        assert server.ask("POST", "/completion", body).json["has_new_line"] is is_there
        assert events(server, "/completion", body)[-1]["has_new_line"] is is_there


def test_of_the_last_object_only_the_members_asked_for_are_told(server: Server) -> None:
    body = {"prompt": "Once", **GREEDY, "response_fields": ["content", "generation_settings/n_predict", "nothing/here"]}
    whole = server.ask("POST", "/completion", body).json
    assert (set(whole), whole["generation_settings/n_predict"]) == ({"content", "generation_settings/n_predict"}, 6)
    assert set(events(server, "/completion", body)[-1]) == set(whole)


@pytest.mark.parametrize("name", ["n_predict", "max_tokens", "max_completion_tokens"])
def test_the_number_of_tokens_has_three_names(server: Server, name: str) -> None:
    told = server.ask("POST", "/completion", {"prompt": "Once", "ignore_eos": True, name: 5}).json
    assert (told["tokens_predicted"], told["stop_type"]) == (5, "limit")


def test_an_answer_that_ends_where_the_context_is_full_is_truncated(server: Server) -> None:
    n_ctx = server.ask("GET", "/props").json["default_generation_settings"]["n_ctx"]
    prompt = {"prompt": [97] * (n_ctx - 20), "ignore_eos": True}
    for n_predict, tokens in ((-1, 20), (5, 5)):
        told = server.ask("POST", "/completion", {**prompt, "n_predict": n_predict}).json
        assert (told["tokens_predicted"], told["truncated"]) == (tokens, n_predict == -1)
        assert events(server, "/completion", {**prompt, "n_predict": n_predict})[-1]["truncated"] is (n_predict == -1)


async def test_speeds_are_those_of_the_tokens_after_the_first(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        one, many = [(await answer(engine, ask(max_tokens=count))).finished for count in (1, 12)]
    told = timings(many)
    assert told["predicted_per_second"] == pytest.approx(11 * 1_000 / many.metrics.decode_ms, rel=0.01)
    assert 1_000 / told["predicted_per_token_ms"] == pytest.approx(told["predicted_per_second"], rel=0.01)
    assert told["predicted_n"] * 1_000 / told["predicted_ms"] == pytest.approx(told["predicted_per_second"], rel=0.01)
    assert timings(one)["predicted_per_second"] == timings(one)["predicted_ms"] == 0


def test_probabilities_behind_the_sampler_are_refused_by_name(server: Server) -> None:
    refused = server.ask("POST", "/completion", {"prompt": "a", "n_probs": 3, "post_sampling_probs": True})
    assert (refused.status, "post_sampling_probs" in refused.json["error"]["message"]) == (400, True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/completion"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_prompt_that_does_not_fit_is_told_with_both_sizes(server: Server, path: str, streams: bool) -> None:
    n_ctx = server.ask("GET", "/props").json["limits"]["n_ctx"]
    text = "x" * (n_ctx + 10)
    body = {"prompt": text} if path == "/completion" else {"messages": [{"role": "user", "content": text}]}
    refused = server.ask("POST", path, {**body, "stream": streams})
    told = refused.json["error"]
    assert (refused.status, told["type"], told["n_ctx"]) == (400, "exceed_context_size_error", n_ctx)
    assert told["n_prompt_tokens"] >= n_ctx


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embedding"])
def test_texts_and_token_ids_are_embedded_in_one_list(encoder: Server, path: str) -> None:
    ids = ids_of(encoder, "a fox")
    assert len(ids) > 4
    mixed = [ids, "a fox", [*ids[:2], "fox", ids[-1]], {"content": [{"type": "text", "text": "a fox"}]}]
    told = encoder.ask("POST", path, {"input": mixed}).json
    vectors = [np.ravel(each["embedding"]) for each in (told["data"] if isinstance(told, dict) else told)]
    for each in vectors[1:]:
        assert np.allclose(each, vectors[0], atol=1e-4)


def test_the_usage_of_a_chat_stream_comes_with_timings(server: Server) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "ignore_eos": True}
    first, *_, last = events(server, "/v1/chat/completions", {**asked, "stream_options": {"include_usage": True}})
    assert (last["choices"], last["usage"]["completion_tokens"], last["timings"]["predicted_n"]) == ([], 3, 3)
    assert first["system_fingerprint"] == last["system_fingerprint"]
    assert first["system_fingerprint"].startswith("b")


def test_the_settings_of_a_body_that_says_nothing_are_told(server: Server) -> None:
    told = server.ask("GET", "/props").json["default_generation_settings"]["params"]
    asked = server.ask("POST", "/completion", {"prompt": "a", "n_predict": 1}).json["generation_settings"]
    for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "stop", "ignore_eos"):
        assert told[name] == asked[name]
    assert told["n_predict"] == -1


def test_figures_for_llama_server_s_dashboards_are_there(server: Server) -> None:
    def figures() -> dict[str, float]:
        lines = server.ask("GET", "/metrics").body.decode().splitlines()
        own = [line.split(" ") for line in lines if line.startswith("llamacpp:")]
        return {name: float(value) for name, value in own}

    before = figures()
    used = [server.ask("POST", "/completion", {"prompt": "0123456789", **GREEDY}).json["timings"] for _ in range(2)]
    added = {name: value - before[name] for name, value in figures().items()}
    assert added["llamacpp:prompt_tokens_total"] == sum(each["prompt_n"] for each in used)
    assert added["llamacpp:prompt_tokens_cached_total"] == sum(each["cache_n"] for each in used) > 0
    assert added["llamacpp:tokens_predicted_total"] == 12
    assert added["llamacpp:n_decode_total"] > 0
    assert server.ask("GET", "/metrics").headers["process-start-time-unix"].isdigit()


def test_the_template_and_the_parameters_in_use_are_told(server: Server, encoder: Server) -> None:
    assert server.ask("GET", "/props").json["chat_template"] == CHATML
    shown = server.ask("POST", "/api/show", {}).json
    assert shown["template"] == CHATML
    told = dict(line.split() for line in shown["parameters"].splitlines())
    n_ctx = server.ask("GET", "/props").json["limits"]["n_ctx"]
    drawn = {"temperature": "0.8", "top_k": "40", "top_p": "0.9", "min_p": "0.0", "repeat_penalty": "1.1"}
    assert told == {"num_ctx": str(n_ctx)} | drawn
    name = server.ask("GET", "/v1/models").json["data"][0]["id"]
    parameters = "".join(f"PARAMETER {word} {value}\n" for word, value in told.items())
    texts = f'TEMPLATE """{CHATML}"""\nLICENSE """{shown["license"]}"""\n'
    assert shown["modelfile"] == f"FROM {name}\n{texts}{parameters}"
    assert encoder.ask("GET", "/props").json["chat_template"] == ""
    shown = encoder.ask("POST", "/api/show", {}).json
    assert (shown["template"], shown["parameters"].split()[0]) == ("", "num_ctx")
    assert "TEMPLATE" not in shown["modelfile"]
