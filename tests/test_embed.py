"""Embeddings and rankings are llama.cpp's own, and computing them takes nothing from what runs beside them."""

from __future__ import annotations

import re
from array import array
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import attrs
import llama_cpp.llama_cpp as lib
import numpy as np
import numpy.typing as npt
import pytest
import trio
import trio.testing
from http_server import running_gateway

from harness import ServerProcess, running_server
from models import NO, YES, write_causal_reranker, write_encoder, write_large_cells, write_model
from uma import LLM, RuntimeConfig, connect, open_engine
from uma.client.probe import ID, SocketProbe
from uma.contracts.proofs import Question
from uma.engine import Engine
from uma.errors import BadRequest, ModelUnusable, Overloaded, PromptTooLarge
from uma.llama.batch import Batch
from uma.llama.context import DONE, Context, ContextParams
from uma.llama.model import Model
from uma.llama.vocab import Vocab
from uma.net.client import CLIENT
from uma.protocol.codec import parse_event
from uma.protocol.frames import HEADER_BYTES, encode_frame
from uma.protocol.messages import Cancel, EmbedEvent, EmbedQuery
from uma.protocol.session import Refused, ServerSession
from uma.types import EmbedRequest, Finished, Request, RerankRequest, SamplingParams

Pooling = Literal["mean", "cls", "last"]

TEXTS = ("a fox", "once upon a time there was a fox who lived in a forest", "b", "the end of it all, he said")
ONE_BATCH: dict[str, Any] = {"start_target_tokens": 512}
"""llama.cpp rounds GELU to 16 bits: with an encoder, equal to the fifth digit is what was computed in equal batches."""
POOLING = {"mean": 1, "cls": 2, "last": 3, "rank": 4}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("model") / "encoder.gguf", pooling="cls")


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("model") / "reranker.gguf", pooling="rank")


def by_llama_cpp(model: Model, texts: Sequence[Sequence[int]], pooling: str, width: int) -> npt.NDArray[np.float32]:
    """What llama.cpp pools each text to, computed as its embedding example does it: all texts in one batch."""
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 1024
    params.n_outputs_max = 1024
    params.n_seq_max = len(texts)
    params.kv_unified = True
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.embeddings = True
    params.pooling_type = POOLING[pooling]
    context = lib.llama_init_from_model(model.handle, params)
    batch = lib.llama_batch_init(1024, 0, 1)
    try:
        for seq, tokens in enumerate(texts):
            for position, token in enumerate(tokens):
                row = batch.n_tokens
                batch.token[row], batch.pos[row], batch.logits[row] = token, position, 1
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, seq
                batch.n_tokens += 1
        assert lib.llama_decode(context, batch) == 0
        pooled = [lib.llama_get_embeddings_seq(context, seq) for seq in range(len(texts))]
        return np.array([np.ctypeslib.as_array(each, (width,)).copy() for each in pooled])
    finally:
        lib.llama_batch_free(batch)
        lib.llama_free(context)


def normalized(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    scaled: npt.NDArray[np.float32] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return scaled


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_generative_model_embeds_as_llama_cpp_does(tmp_path: Path, pooling: Pooling) -> None:
    file = write_model(tmp_path / "tiny.gguf", metadata={"llama.pooling_type": POOLING[pooling]})
    with LLM(file, n_ctx=1024) as llm, Model.load(file) as model:
        rows = llm.embed(TEXTS)
        expected = by_llama_cpp(model, [llm.tokenize(text) for text in TEXTS], pooling, 64)
    assert np.allclose(rows, normalized(expected), rtol=0, atol=1e-5)


def test_an_encoder_embeds_as_llama_cpp_does(encoder: Path) -> None:
    with LLM(encoder, **ONE_BATCH) as llm, Model.load(encoder) as model:
        rows = llm.embed(TEXTS)
        tokens = [model.vocab.tokenize(text, add_special=True, parse_special=True).tolist() for text in TEXTS]
        expected = by_llama_cpp(model, tokens, "cls", 64)
    assert np.allclose(rows, normalized(expected), rtol=0, atol=1e-5)


def test_a_reranker_gives_llama_cpps_scores_best_first(reranker: Path) -> None:
    with LLM(reranker, **ONE_BATCH) as llm, Model.load(reranker) as model:
        ranked = llm.rerank("where is the fox", TEXTS)

        def plain(text: str) -> list[int]:
            return list(model.vocab.tokenize(text, add_special=False, parse_special=False).tolist())

        # What llama-server makes of a pair for a vocabulary that adds [CLS] and [SEP], and no end of text.
        begin, between = model.vocab.bos, model.vocab.sep
        pairs = [[begin, *plain("where is the fox"), between, *plain(text)] for text in TEXTS]
        expected = by_llama_cpp(model, pairs, "rank", 1)[:, 0]
        with pytest.raises(TimeoutError, match="longer than its timeout"):
            llm.rerank("where is the fox", TEXTS * 500, timeout=0.01)
        best = llm.rerank("where is the fox", TEXTS, top_n=2, timeout=60)
    assert [each.index for each in ranked] == list(np.argsort(-expected))
    assert np.allclose([each.score for each in ranked], np.sort(expected)[::-1], rtol=0, atol=1e-5)
    assert len(set(expected.tolist())) == len(TEXTS)
    assert [each.index for each in best] == [each.index for each in ranked[:2]]


def test_a_rerankers_own_template_is_what_it_reads(tmp_path: Path) -> None:
    template = "[CLS]q: {query} d: {document}[SEP]"
    file = write_encoder(tmp_path / "reranker.gguf", pooling="rank", rerank_template=template)
    with LLM(file) as llm, Model.load(file) as model:
        ranked = llm.rerank("where is the fox", TEXTS)
        texts = [template.replace("{query}", "where is the fox").replace("{document}", text) for text in TEXTS]
        tokens = [model.vocab.tokenize(text, add_special=False, parse_special=True).tolist() for text in texts]
        expected = by_llama_cpp(model, tokens, "rank", 1)[:, 0]
    assert [each.index for each in ranked] == list(np.argsort(-expected))
    # Which text was read is the claim: another one's score differs in the first digits.
    assert np.allclose([each.score for each in ranked], np.sort(expected)[::-1], rtol=0, atol=1e-3)


JUDGE = "<|im_start|>Query: {query} Document: {document}<|im_end|>"


def test_a_causal_reranker_scores_by_how_much_likelier_yes_is_than_no(tmp_path: Path) -> None:
    file = write_causal_reranker(tmp_path / "reranker.gguf", JUDGE)
    query, documents = "where is the {document}", ("a fox", "{query}", "the end of it all")
    with LLM(file, n_ctx=512) as llm, Model.load(file) as model:
        scores = {each.index: each.score for each in llm.rerank(query, documents)}
        texts = [f"<|im_start|>Query: {query} Document: {each}<|im_end|>" for each in documents]
        prompts = [model.vocab.tokenize(text, add_special=False, parse_special=True).tolist() for text in texts]
        with Context(model, ContextParams(n_ctx=256, flash_attn="off")) as context:
            for index, tokens in enumerate(prompts):
                batch = Batch(256)
                batch.add(tokens, 0, 0, last_logits=True)
                assert context.decode(batch) == DONE
                yes, no = context.logits(1)[0, [YES, NO]].tolist()
                assert scores[index] == pytest.approx(1 / (1 + np.exp(no - yes)), abs=1e-3)
                context.clear()
    assert len({round(score, 2) for score in scores.values()}) > 1


def test_a_generative_model_without_a_classifier_says_what_to_load(tmp_path: Path) -> None:
    file = write_causal_reranker(tmp_path / "plain.gguf", JUDGE, has_classifier=False)
    with LLM(file, n_ctx=512) as llm:
        with pytest.raises(BadRequest, match=r"no classifier to rank documents with; .*convert_hf_to_gguf\.py"):
            llm.rerank("where is the fox", TEXTS)
        assert llm.embed("a fox").shape == (1, 64)


def test_the_shape_of_an_embedding_is_as_asked(tiny: Path) -> None:
    with LLM(tiny, n_ctx=1024) as llm:
        whole, plain = llm.embed(TEXTS), llm.embed(TEXTS, normalize=False)
        cut = llm.embed(TEXTS, dimensions=16)
        assert llm.embed("a fox").shape == (1, 64)
        with pytest.raises(BadRequest, match=r"^dimensions: 65 is over the 64"):
            llm.embed(TEXTS, dimensions=65)
    # Batches differ from call to call, and with them the last digits.
    assert np.allclose(whole, normalized(plain), atol=1e-4)
    assert np.allclose(cut, normalized(plain[:, :16]), atol=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_long_text_is_read_in_pieces_with_the_result_of_the_whole(tiny: Path, pooling: Pooling) -> None:
    tokens = [index * 7 % 200 for index in range(700)]
    with Model.load(tiny) as model:
        expected = by_llama_cpp(model, [tokens], pooling, 64)

    async def main() -> array[float]:
        async with open_engine(RuntimeConfig(model=str(tiny), n_ctx=1024, pooling=pooling, n_ubatch=128)) as engine:
            answer = await engine.embed(EmbedRequest("long", token_ids=[tokens, tokens[:20]]))
            assert answer.prompt_tokens == (700, 20)
            assert answer.vectors[0] is not None
            return answer.vectors[0]

    assert np.allclose(np.array(trio.run(main)), normalized(expected)[0], rtol=0, atol=1e-5)


def test_a_text_longer_than_the_context_is_an_error_that_names_it(encoder: Path) -> None:
    with LLM(encoder) as llm:
        with pytest.raises(PromptTooLarge, match=r"^texts\[1\]: prompt too large: 202 tokens do not fit .* 128 tokens"):
            llm.embed(["short", "long" * 50])
        assert llm.embed(["short"]).shape == (1, 64)


def test_the_bound_of_bytes_is_one_text_s_and_its_error_names_the_text(encoder: Path, reranker: Path) -> None:
    with LLM(encoder, max_prompt_bytes=20) as llm:
        assert len(llm.embed(["fifteen letters"] * 2_050)) == 2_050
        with pytest.raises(
            PromptTooLarge, match=r"^texts\[2049\]: prompt too large: 21 bytes .* 20 \(max_prompt_bytes\)"
        ):
            llm.embed(["fox"] * 2_049 + ["x" * 21])
    with LLM(reranker, max_prompt_bytes=20) as llm:
        assert len(llm.rerank("a query", ["fifteen letters"] * 3)) == 3
        with pytest.raises(PromptTooLarge, match=r"^documents\[1\]: prompt too large: 21 bytes"):
            llm.rerank("a query", ["fox", "x" * 21])
        with pytest.raises(PromptTooLarge, match=r"^query: prompt too large: 21 bytes"):
            llm.rerank("x" * 21, ["fox"])


def test_texts_that_one_frame_does_not_hold_are_asked_for_in_several(
    encoder: Path, reranker: Path, socket_dir: Path
) -> None:
    frame = ("--max-frame-bytes", "4000")
    texts = [f"{index} {'fox ' * (index % 20)}" for index in range(150)]
    with LLM(encoder) as alone, running_server(socket_dir / "e", "--model", str(encoder), *frame) as server:
        expected = alone.embed(texts)
        with LLM(socket=server.socket) as llm:
            assert llm.info.limits.max_frame_bytes == 4000 < len("".join(texts))
            assert np.allclose(llm.embed(texts), expected, rtol=0, atol=1e-2)
            with pytest.raises(
                PromptTooLarge, match=r"^texts\[149\]: prompt too large: the request takes 4,0\d\d bytes"
            ):
                llm.embed([*texts[:149], "x" * 4000])
        with running_gateway(server) as gateway:
            answer = gateway.ask("POST", "/v1/embeddings", {"input": texts}).json
            assert [each["index"] for each in answer["data"]] == list(range(150))
            assert np.allclose([each["embedding"] for each in answer["data"]], expected, rtol=0, atol=1e-2)
            refused = gateway.ask("POST", "/v1/embeddings", {"input": [*texts[:149], "long" * 50]})
            assert (refused.status, "input[149]: prompt too large: 202 tokens" in str(refused.json)) == (400, True)
    with LLM(reranker) as alone, running_server(socket_dir / "r", "--model", str(reranker), *frame) as server:
        ranked = {each.index: each.score for each in alone.rerank("a fox", texts)}
        with LLM(socket=server.socket) as llm:
            found = llm.rerank("a fox", texts, top_n=100)
            scores = [each.score for each in found]
            assert len({each.index for each in found}) == 100 and scores == sorted(scores, reverse=True)
            assert np.allclose(scores, [ranked[each.index] for each in found], rtol=0, atol=1e-2)


def test_a_query_that_is_long_beside_many_documents_is_refused_before_it_is_read(
    reranker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(reranker) as llm:
        monkeypatch.setattr(Vocab, "tokenize", lambda *_, **__: pytest.fail("it was tokenized"))
        with pytest.raises(PromptTooLarge, match="documents: prompt too large: 10,2"):
            llm.rerank("x" * 5_000, ["y"] * 2_048)


def test_an_encoder_starts_and_refuses_to_generate(encoder: Path) -> None:
    with LLM(encoder) as llm:
        with pytest.raises(BadRequest, match="embeds text and does not generate"):
            llm.generate("a fox")
        with pytest.raises(BadRequest, match="no classifier to rank documents with"):
            llm.rerank("query", ["document"])


def test_a_reranker_gives_no_embeddings(reranker: Path) -> None:
    with LLM(reranker) as llm, pytest.raises(BadRequest, match="ask it to rerank"):
        llm.embed(["a fox"])


async def story(engine: Engine, name: str) -> str:
    request = Request(
        name, prompt="Once upon a time", sampling=SamplingParams(max_tokens=60, ignore_eos=True), stream=False
    )
    async with engine.generate(request) as stream:
        async for event in stream:
            if isinstance(event, Finished):
                return event.text or ""
    raise AssertionError


async def test_a_stream_beside_embeddings_loses_nothing(tiny: Path) -> None:
    texts = [f"text number {index} of many" for index in range(200)]
    async with open_engine(RuntimeConfig(model=str(tiny), n_ctx=1024)) as engine:
        alone, vectors = await story(engine, "alone"), (await engine.embed(EmbedRequest("alone", texts=texts))).vectors
        told: list[str] = []
        answers = []
        async with trio.open_nursery() as nursery:

            async def tell(name: str) -> None:
                told.append(await story(engine, name))

            async def embed() -> None:
                answers.append(await engine.embed(EmbedRequest("beside", texts=texts)))

            nursery.start_soon(embed)
            for index in range(3):
                nursery.start_soon(tell, f"beside-{index}")
        assert told == [alone] * 3
        # Other batches round otherwise: by as much as 1.3e-5, where the nearest two of these vectors are 6e-3 apart.
        assert np.allclose(np.array(answers[0].vectors), np.array(vectors), atol=1e-4)


async def test_texts_without_memory_are_refused_with_the_setting_that_is_enough(tmp_path: Path) -> None:
    wide = write_large_cells(tmp_path / "wide.gguf", layers=32, kv_heads=8)
    config = RuntimeConfig(model=str(wide), n_ctx=512, memory=300, threads=1)
    request = EmbedRequest("a", texts=("a",))
    async with open_engine(config) as engine:
        with pytest.raises(
            ModelUnusable, match=r"no memory .* to embed texts in .*; --memory \d+ is enough"
        ) as refused:
            await engine.embed(request)
    enough = re.search(r"--memory (\d+)", refused.value.message)
    assert enough is not None
    async with open_engine(attrs.evolve(config, memory=int(enough[1]))) as engine:
        assert len((await engine.embed(request)).vectors) == 1


async def test_the_context_for_embeddings_is_made_by_the_first_request_for_one(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock(wraps=Context)
    monkeypatch.setattr("uma.engine.embeddings.Context", made)
    async with open_engine(RuntimeConfig(model=str(tiny), n_ctx=1024)) as engine:
        await story(engine, "before")
        assert made.call_count == 0
        for _ in range(2):
            await engine.embed(EmbedRequest("e", texts=["a fox"]))
        assert made.call_count == 1


async def test_a_small_request_overtakes_a_large_one_and_a_cancelled_one_leaves_nothing(tiny: Path) -> None:
    async with open_engine(RuntimeConfig(model=str(tiny), n_ctx=1024)) as engine:
        large = EmbedRequest("large", texts=[f"{index} " * 30 for index in range(1000)])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.embed, large)
            while engine.snapshot()["embed_texts_total"] == 0:
                await trio.lowlevel.checkpoint()
            await engine.embed(EmbedRequest("small", texts=["a fox"]))
            assert engine.snapshot()["embed_texts_total"] < 1000
            nursery.cancel_scope.cancel()
        await engine.embed(EmbedRequest("after", texts=["a fox"]))
        before = engine.snapshot()["embed_tokens_total"]
        await engine.embed(EmbedRequest("after", texts=["a fox"]))
        assert engine.snapshot()["embed_tokens_total"] - before == 6


async def test_requests_over_the_queues_bound_are_refused_as_overload(tiny: Path) -> None:
    async with open_engine(RuntimeConfig(model=str(tiny), n_ctx=1024, max_queue=2)) as engine:
        async with trio.open_nursery() as nursery:
            for index in range(2):
                nursery.start_soon(engine.embed, EmbedRequest(str(index), texts=["a fox " * 10] * 1000))
            while engine.snapshot()["embed_requests_total"] < 2:
                await trio.lowlevel.checkpoint()
            with pytest.raises(Overloaded, match="max_queue is 2") as refusal:
                await engine.embed(EmbedRequest("third", texts=["a fox"]))
            CLIENT.set("another")
            assert (await engine.embed(EmbedRequest("fourth", texts=["a fox"]))).vectors
            nursery.cancel_scope.cancel()
        assert refusal.value.retry_after_ms


async def test_an_engine_that_drains_answers_for_embeddings_that_it_has_taken(tiny: Path) -> None:
    async with open_engine(RuntimeConfig(model=str(tiny), n_ctx=1024)) as engine:
        answers: list[int] = []

        async def embed() -> None:
            answers.append(len((await engine.embed(EmbedRequest("many", texts=["a fox"] * 100))).vectors))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(embed)
            while engine.snapshot()["embed_requests_total"] == 0:
                await trio.lowlevel.checkpoint()
            engine.begin_drain()
        assert answers == [100]


def test_numbers_and_base64_are_the_same_embeddings_over_the_socket(server: ServerProcess) -> None:
    def ask(**fields: object) -> dict[str, Any]:
        return (
            SocketProbe(server.socket).ask(Question({"type": "embed", "texts": ["a fox", "a forest"], **fields})).last
        )

    numbers, packed = ask(dimensions=8, metadata={"a": 1}), ask(dimensions=8, encoding="base64")
    assert (numbers["id"], numbers["metadata"]) == (ID, {"a": 1})
    rows = [np.frombuffer(b64decode(each), "<f4") for each in packed["embeddings"]]
    assert np.allclose(rows, numbers["embeddings"], atol=1e-6)
    assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    assert ask(texts=None)["code"] == "E_PROTO_BAD_REQUEST"

    async def through_the_client() -> None:
        async with connect(server.socket) as client:
            found = await client.embed(EmbedRequest("mine", texts=["a fox", "a forest"], dimensions=8))
            assert (found.id, list(found.prompt_tokens)) == ("mine", packed["prompt_tokens"])
            assert np.allclose(np.array(found.vectors), rows, atol=1e-6)
            with pytest.raises(BadRequest, match="no classifier"):
                await client.rerank(RerankRequest("r", query="fox", documents=["a fox"]))

    trio.run(through_the_client)


def test_a_session_of_version_1_0_knows_no_embeddings() -> None:
    session = ServerSession()
    session.receive(encode_frame(b'{"type": "hello", "versions": ["1.0"]}'))
    session.next_message()
    session.receive(encode_frame(b'{"type": "embed", "id": "e", "texts": ["a fox"]}'))
    refused = session.next_message()
    assert isinstance(refused, Refused)
    assert "embed" not in refused.event.message.partition(", not ")[0]


def test_a_cancelled_embedding_ends_with_an_answer_that_says_so() -> None:
    session = ServerSession()
    session.receive(encode_frame(b'{"type": "hello", "versions": ["1.1"]}'))
    session.next_message()
    session.receive(encode_frame(b'{"type": "embed", "id": "e", "texts": ["a fox"]}'))
    query = session.next_message()
    assert isinstance(query, EmbedQuery)
    session.receive(encode_frame(b'{"event": "cancel", "id": "e"}'))
    assert isinstance(session.next_message(), Cancel)
    event = parse_event(session.cancelled(query)[HEADER_BYTES:])
    assert isinstance(event, EmbedEvent)
    assert (event.reason, event.embeddings) == ("cancelled", ())
    assert session.is_idle
