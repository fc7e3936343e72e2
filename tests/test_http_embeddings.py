"""Embeddings and rankings over HTTP are the engine's own, in the form of each dialect, through the clients of each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import ollama
import openai
import pytest
from http_server import HttpServer, running_http

from harness import short_directory, until
from models import write_encoder
from uma.client.probe import SocketProbe
from uma.contracts.proofs import Question

TEXTS = ["a fox", "once upon a time there was a forest", "b"]
DOCUMENTS = ["a fox in a forest", "b", "the end of it all"]
QUERY = "where is the fox"


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server whose model ranks, and neither embeds nor generates."""
    path = write_encoder(tmp_path_factory.mktemp("model") / "reranker.gguf", pooling="rank")
    with short_directory() as directory, running_http(directory, "--model", str(path)) as process:
        yield process


def over_the_socket(server: HttpServer, **question: Any) -> dict[str, Any]:
    return SocketProbe(server.process.socket).ask(Question(question)).last


def test_openai_s_client_gets_what_the_socket_gives(openai_client: openai.OpenAI, http_server: HttpServer) -> None:
    told = over_the_socket(http_server, type="embed", texts=TEXTS)
    every = openai_client.embeddings.create(model="builtin", input=TEXTS)  # in base64, as this client asks for it
    numbers = openai_client.embeddings.create(model="builtin", input=TEXTS, encoding_format="float")
    for found in (every, numbers):
        assert np.allclose([each.embedding for each in found.data], told["embeddings"], atol=1e-5)
        assert [each.index for each in found.data] == [0, 1, 2]
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(told["prompt_tokens"])
    assert every.model == "builtin"


def test_an_input_is_a_string_token_ids_or_a_list_of_either(
    openai_client: openai.OpenAI, http_server: HttpServer
) -> None:
    ids = [
        http_server.ask("POST", "/tokenize", {"content": text, "add_special": True}).json["tokens"] for text in TEXTS
    ]
    texts = openai_client.embeddings.create(model="builtin", input=TEXTS).data
    tokens = openai_client.embeddings.create(model="builtin", input=ids).data
    (text,) = openai_client.embeddings.create(model="builtin", input=TEXTS[0]).data
    (token,) = openai_client.embeddings.create(model="builtin", input=ids[0]).data
    assert np.allclose([each.embedding for each in texts], [each.embedding for each in tokens], atol=1e-5)
    assert np.allclose(text.embedding, token.embedding, atol=1e-5)
    assert np.allclose(text.embedding, texts[0].embedding, atol=1e-5)


def test_what_is_asked_for_about_streams_is_named_as_ignored(http_server: HttpServer) -> None:
    headers = {"x-uma-target-ttft-ms": "5", "x-uma-pace": "off", "x-uma-priority": "-1"}
    answer = http_server.ask("POST", "/v1/embeddings", {"input": "a", "slo": {"target_ttft_ms": 5}}, **headers)
    assert answer.headers["x-uma-ignored"] == "slo, x-uma-target-ttft-ms, x-uma-pace"


def test_dimensions_are_cut_and_normalised_again(openai_client: openai.OpenAI) -> None:
    whole = np.array(openai_client.embeddings.create(model="builtin", input=TEXTS[0]).data[0].embedding)
    cut = openai_client.embeddings.create(model="builtin", input=TEXTS[0], dimensions=8).data[0].embedding
    assert np.allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ["a fox", "a\0b"]}, "input[1]"),
        ({"input": [[1], [10**9]]}, "input[1]"),
        ({"input": []}, "input"),
        ({"input": "a fox", "dimensions": 100_000}, "dimensions"),
        ({"input": "a fox", "encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_the_body_s_own_names(
    http_server: HttpServer, fields: dict[str, Any], param: str
) -> None:
    refused = http_server.ask("POST", "/v1/embeddings", fields)
    assert (refused.status, refused.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("asked", "count"), [(["a fox", [1, 2]], 2), (["a fox", 7], 1)])
def test_texts_and_token_ids_may_stand_beside_each_other(http_server: HttpServer, asked: Any, count: int) -> None:
    got = http_server.ask("POST", "/v1/embeddings", {"input": asked})
    assert (got.status, len(got.json["data"])) == (200, count)


@pytest.mark.parametrize("truncate", [True, False, None])
def test_a_text_that_is_too_long_is_never_cut(http_server: HttpServer, truncate: bool | None) -> None:
    long = ["a fox", "a fox " * 9000]
    refused = http_server.ask("POST", "/v1/embeddings", {"input": long})
    assert (refused.status, refused.json["error"]["code"]) == (400, "context_length_exceeded")
    assert "input[1]: prompt too large" in refused.json["error"]["message"]
    refused = http_server.ask("POST", "/api/embed", {"input": long, "truncate": truncate})
    assert refused.status == 400
    assert "input[1]: prompt too large" in refused.json["error"]
    assert "none is cut" in refused.json["error"]


def test_a_text_over_the_bound_of_bytes_is_named_by_its_place(http_server: HttpServer) -> None:
    huge = http_server.ask("POST", "/v1/embeddings", {"input": ["a fox", "x" * 1_000_001]})
    assert "input[1]: prompt too large: 1,000,001 bytes" in huge.json["error"]["message"]


def test_ollama_s_client_embeds(http_server: HttpServer, llama: ollama.Client) -> None:
    told = over_the_socket(http_server, type="embed", texts=TEXTS, dimensions=8)
    plain = over_the_socket(http_server, type="embed", texts=TEXTS[:1], normalize=False)
    every = llama.embed("builtin", TEXTS, dimensions=8)
    one = llama.embed("builtin", TEXTS[0], dimensions=8, truncate=True)
    old = llama.embeddings("builtin", TEXTS[0])
    assert llama.embed("builtin", "").embeddings == []
    with pytest.raises(ollama.ResponseError, match="not loaded"):
        llama.embed("llama3", "x")
    assert np.allclose(every.embeddings, told["embeddings"], atol=1e-5)
    assert np.allclose(one.embeddings, every.embeddings[:1], atol=1e-5)
    assert np.allclose(old.embedding, plain["embeddings"][0], atol=1e-4)
    assert every.prompt_eval_count == sum(told["prompt_tokens"])
    assert every.total_duration is not None
    assert every.total_duration > 0


def test_ollama_s_single_input_is_named_without_a_place(http_server: HttpServer) -> None:
    for single, listed, why in (
        ("a\0b", ["x", "a\0b"], "holds a NUL"),
        ("a fox " * 9000, ["x", "a fox " * 9000], "prompt"),
    ):
        refused = http_server.ask("POST", "/api/embed", {"input": single})
        assert (refused.status, refused.json["error"].startswith("input: ")) == (400, True), refused.json
        assert why in refused.json["error"]
        assert "input[1]: " in http_server.ask("POST", "/api/embed", {"input": listed}).json["error"]


def test_llama_server_s_embedding_is_a_list_of_one_for_each_text(http_server: HttpServer) -> None:
    told = over_the_socket(http_server, type="embed", texts=TEXTS, normalize=False)["embeddings"]
    found = http_server.ask("POST", "/embedding", {"content": TEXTS, "embd_normalize": -1}).json
    assert [each["index"] for each in found] == [0, 1, 2]
    assert np.allclose([each["embedding"][0] for each in found], told, atol=1e-4)
    (scaled,) = http_server.ask("POST", "/embeddings", {"input": TEXTS[0]}).json
    assert np.allclose(scaled["embedding"][0], np.array(told[0]) / np.linalg.norm(told[0]), atol=1e-5)
    refused = http_server.ask("POST", "/embedding", {"content": "x", "embd_normalize": 1})
    assert (refused.status, refused.json["error"]["type"]) == (400, "not_supported_error")


def test_documents_are_ranked_in_jina_s_form(reranker: HttpServer) -> None:
    told = over_the_socket(reranker, type="rerank", query=QUERY, documents=DOCUMENTS)
    jina = reranker.ask("POST", "/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "return_documents": True}).json
    best = reranker.ask("POST", "/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}).json["results"]
    order = [each["index"] for each in told["results"]]
    assert [each["index"] for each in jina["results"]] == order
    assert [each["index"] for each in best] == order[:2]
    scores = [each["score"] for each in told["results"]]
    # llama.cpp rounds an encoder's GELU to 16 bits: texts that meet in another batch differ in the fourth digit.
    assert np.allclose([each["relevance_score"] for each in jina["results"]], scores, atol=2e-3)
    assert [each["document"]["text"] for each in jina["results"]] == [DOCUMENTS[index] for index in order]
    assert jina["usage"]["prompt_tokens"] == told["prompt_tokens"]
    other = reranker.ask("POST", "/rerank", {"query": QUERY, "documents": DOCUMENTS, "return_text": True})
    assert (other.status, other.headers["x-uma-ignored"]) == (200, "return_text")


def test_pairs_are_scored_as_vllm_does(http_server: HttpServer, reranker: HttpServer) -> None:
    ranked = reranker.ask("POST", "/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}).json
    by_index = {each["index"]: each["relevance_score"] for each in ranked["results"]}
    told = reranker.ask("POST", "/score", {"text_1": QUERY, "text_2": DOCUMENTS})
    assert told.status == 200
    assert told.json.keys() == {"id", "object", "created", "model", "data", "usage"}
    assert [(each["index"], each["object"]) for each in told.json["data"]] == [
        (index, "score") for index in range(len(DOCUMENTS))
    ]
    scores = [each["score"] for each in told.json["data"]]
    assert np.allclose(scores, [by_index[index] for index in range(len(DOCUMENTS))], atol=2e-3)
    assert told.json["usage"]["prompt_tokens"] == ranked["usage"]["prompt_tokens"]
    for one, other in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        pairs = reranker.ask("POST", "/v1/score", {one: [QUERY] * len(DOCUMENTS), other: DOCUMENTS}).json
        assert np.allclose([each["score"] for each in pairs["data"]], scores, atol=2e-3)

    embedded = http_server.ask("POST", "/v1/embeddings", {"input": TEXTS}).json
    vectors = [each["embedding"] for each in embedded["data"]]
    compared = http_server.ask("POST", "/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json
    assert np.allclose([each["score"] for each in compared["data"]], np.array(vectors) @ vectors[0], atol=1e-4)
    (single,) = http_server.ask("POST", "/score", {"text_1": TEXTS[0], "text_2": TEXTS[1]}).json["data"]
    assert np.isclose(single["score"], compared["data"][1]["score"], atol=1e-4)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"text_1": "a"}, "text_1: expected two sides"),
        ({"text_1": "a", "documents": ["b"]}, "text_1: expected two sides"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1: 2 texts cannot be compared with 1"),
        ({"text_1": "a", "text_2": []}, "text_2: expected a text or a list of texts"),
        ({"text_1": "a", "text_2": ["b", 3]}, "text_2: expected a text or a list of texts"),
        ({"queries": "a", "documents": ["x", "x " * 20_000]}, "documents[1]: prompt too large"),
        ({"text_1": ["x " * 20_000, "a"], "text_2": ["x", "y"]}, "text_1[0]: prompt too large"),
    ],
)
def test_pairs_that_cannot_be_scored_are_refused_by_their_own_names(
    http_server: HttpServer, body: dict[str, Any], why: str
) -> None:
    refused = http_server.ask("POST", "/v1/score", body)
    assert (refused.status, why in refused.json["error"]["message"]) == (400, True), refused.body


def test_a_query_of_no_character_is_refused_by_its_own_name(reranker: HttpServer) -> None:
    refused = reranker.ask("POST", "/score", {"text_1": ["a", ""], "text_2": DOCUMENTS[:2]})
    assert (refused.status, refused.json["error"]["param"]) == (400, "text_1[1]"), refused.body


def test_what_a_model_cannot_do_is_refused_in_the_dialect_s_own_body(
    http_server: HttpServer, reranker: HttpServer
) -> None:
    no_classifier = http_server.ask("POST", "/rerank", {"query": QUERY, "documents": DOCUMENTS})
    assert (no_classifier.status, no_classifier.json["error"]["type"]) == (400, "not_supported_error")
    assert "load a reranker" in no_classifier.json["error"]["message"]
    openais = reranker.ask("POST", "/v1/embeddings", {"input": "x"})
    assert (openais.status, openais.json["error"]["code"]) == (400, "unsupported_parameter")
    ollamas = reranker.ask("POST", "/api/embed", {"input": "x"})
    assert (ollamas.status, "it ranks documents" in ollamas.json["error"]) == (400, True)
    chat = reranker.ask("POST", "/v1/completions", {"prompt": "x"})
    assert chat.status == 400
    assert "does not generate" in chat.json["error"]["message"]
    for server, asked in ((reranker, {"type": "generation"}), (reranker, {"type": "embedding"})):
        assert server.ask("POST", "/health/check", asked).status == 400
    long = reranker.ask("POST", "/rerank", {"query": QUERY, "documents": ["x", "x " * 200]})
    assert (long.status, long.json["error"]["type"]) == (400, "exceed_context_size_error")
    assert "documents[1]: prompt too large" in long.json["error"]["message"]


def left_early(server: HttpServer) -> int:
    """Requests whose clients went away before an answer."""
    found = re.search(r'uma_http_requests_total\{status="0"\} (\d+)', server.ask("GET", "/metrics").body.decode())
    return int(found[1]) if found else 0


def test_a_client_that_goes_away_ends_its_embeddings(http_server: HttpServer) -> None:
    def small() -> float:
        assert http_server.ask("POST", "/v1/embeddings", {"input": "a fox"}).status == 200
        return float(http_server.process.metrics()["embed_tokens_total"])

    small()
    asked, gone = http_server.process.metrics()["embed_requests_total"], left_early(http_server)
    with http_server.connect() as raw:
        raw.send("POST", "/v1/embeddings", {"input": ["a fox in a forest " * 20] * 1000})
        until(http_server.process.metrics, lambda found: found["embed_requests_total"] == asked + 1)
    until(lambda: left_early(http_server), lambda count: count == gone + 1)
    before = small()
    assert (
        small() - before == http_server.ask("POST", "/v1/embeddings", {"input": "a fox"}).json["usage"]["prompt_tokens"]
    )


def test_best_of_gives_the_likeliest_of_several_answers(openai_client: openai.OpenAI) -> None:
    asked: Any = {"model": "builtin", "prompt": "Once upon", "max_tokens": 4, "seed": 3, "logprobs": 0}

    def likelihood(choice: Any) -> float:
        return float(np.mean(choice.logprobs.token_logprobs))

    drawn = openai_client.completions.create(**asked, n=4).choices
    (best,) = openai_client.completions.create(**asked, best_of=4).choices
    assert likelihood(best) == pytest.approx(max(map(likelihood, drawn)), abs=1e-3)
    with pytest.raises(openai.BadRequestError, match="best_of: which answers are the best is known at their end"):
        openai_client.completions.create(**asked, best_of=4, stream=True)
