"""Dynamo's contract without Dynamo: requests and chunks mapped, and the tokenizer that its frontend needs."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import attrs
import pytest
from engine_world import config_for
from hypothesis import given
from hypothesis import strategies as st
from kv_histories import histories
from reference import real_model, vocabulary
from tokenizers import Tokenizer

from models import (
    BOS,
    SPECIALS,
    merges_of,
    write_encoder,
    write_model,
    write_sentence_pieces,
    write_vocabulary,
)
from uma.bridges.dynamo import model_directory
from uma.bridges.dynamo.mapping import Chunks, asked, chunks_for
from uma.bridges.dynamo.model_directory import FILES, ModelFiles
from uma.bridges.dynamo.router_view import RouterView
from uma.bridges.dynamo.tokenizer import PROBE, check_tokenizer, make_tokenizer
from uma.contracts.event_log import BlockIndex, EventLog
from uma.contracts.events import KvEvent
from uma.engine import open_engine
from uma.errors import BadRequest, ContractViolation, ModelError
from uma.llama.builtin import builtin_path
from uma.llama.model import Model
from uma.types import (
    Capabilities,
    Finished,
    Grammar,
    Limits,
    Logprobs,
    ModelInfo,
    Prompt,
    RequestMetrics,
    ServerInfo,
    Slo,
    Token,
    TokenLogprob,
    Usage,
)

INFO = ServerInfo(
    "uma/0",
    ModelInfo("Tiny", "/tiny.gguf", "llama", 1, 1, "F32", 512, 400, True),
    Capabilities(True, True, True, True, True, "cells", True, 16, ("temperature",)),
    Limits(512, 512, 1_000, 1_000, 1, 1),
)


EXACTLY = {"top_p": 0.75, "min_p": 0.25, "frequency_penalty": 0.5, "presence_penalty": -1.5, "repetition_penalty": 1.25}
"""Sampling options whose names and figures the engine has too."""


VAST: dict[str, Any] = {"a": [[]] * 70_000}
"""A JSON Schema with more members than the engine takes."""


def fields(**more: Any) -> dict[str, Any]:
    """A request of three tokens that leaves everything to the engine."""
    plain: dict[str, Any] = {"token_ids": [5, 6, 7], "sampling_options": {}, "stop_conditions": {}}
    return plain | more


def test_what_was_not_asked_for_is_left_to_the_engine() -> None:
    request = asked(fields(), INFO, "a", None).request
    assert request.token_ids == (5, 6, 7)
    assert (request.sampling.temperature, request.sampling.max_tokens, request.priority) == (None, None, 0)


def test_what_was_asked_for_arrives() -> None:
    wanted = asked(
        fields(
            sampling_options={"temperature": 0.20000000298, "top_k": 5, "seed": -1, **EXACTLY},
            stop_conditions={
                "max_tokens": 9,
                "stop": ["x"],
                "ignore_eos": True,
                "min_tokens": 2,
                "max_thinking_tokens": 5,
            },
            output_options={"logprobs": 3, "prompt_logprobs": 1},
            routing={"priority": 7},
            router={"ttft_target": 250.0, "itl_target": 50},
            annotations=["formatted_prompt", "uma.target_tbt_ms:0"],
            extra_args={"nvext": {"extra_fields": ["engine_data"]}},
        ),
        INFO,
        "a",
        None,
    ).request
    sampling = wanted.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.20000000298, 5, 9)
    assert (sampling.stop, sampling.ignore_eos, sampling.min_tokens) == (("x",), True, 2)
    assert sampling.max_reasoning_tokens == 5
    assert sampling.seed == 2**32 - 1
    assert {name: getattr(sampling, name) for name in EXACTLY} == EXACTLY
    assert (sampling.logprobs, sampling.prompt_logprobs) == (3, 1)
    assert wanted.priority == 1
    assert wanted.slo == Slo(target_ttft_ms=250.0, target_tbt_ms=1.0)


@pytest.mark.parametrize(
    ("guided", "grammar"),
    [
        # As the frontend of Dynamo 1.6.1 hands on a chat's `response_format: {"type": "json_object"}`.
        ({"json": {"type": "object"}}, Grammar(json_schema={"type": "object"})),
        ({"regex": "a+", "backend": "xgrammar"}, Grammar(regex="a+")),
        ({"choice": ["a", "b"]}, Grammar(choice=("a", "b"))),
        ({"grammar": 'root ::= "a"'}, Grammar(gbnf='root ::= "a"')),
        ({}, None),
    ],
)
def test_guided_decoding_arrives_as_a_grammar(guided: dict[str, Any], grammar: Grammar | None) -> None:
    wanted = asked(fields(sampling_options={"guided_decoding": guided}), INFO, "a", None)
    assert wanted.request.sampling.grammar == grammar


@pytest.mark.parametrize(
    ("routing", "lane"),
    [
        (None, 0),
        ({"priority": 0, "priority_jump": 0.0}, 0),
        ({"priority": 5, "priority_jump": 5.0}, 1),
        ({"priority": -5, "priority_jump": 0.0}, -1),
        ({"priority": None, "priority_jump": 2.5}, 1),
    ],
)
def test_an_agent_s_hints_choose_the_lane(routing: dict[str, Any] | None, lane: int) -> None:
    assert asked(fields(routing=routing), INFO, "a", None).request.priority == lane


@pytest.mark.parametrize(("ids", "given", "added"), [([5, 6], (BOS, 5, 6), 1), ([BOS, 5], (BOS, 5), 0)])
def test_the_beginning_of_text_comes_once(ids: list[int], given: tuple[int, ...], added: int) -> None:
    wanted = asked(fields(token_ids=ids), INFO, "a", BOS)
    assert (wanted.request.token_ids, wanted.added_tokens, wanted.prompt_tokens) == (given, added, len(ids))


@pytest.mark.parametrize(
    "more",
    [
        {"sampling_options": {"n": 2}},
        {"sampling_options": {"use_beam_search": True}},
        {"sampling_options": {"length_penalty": 0.5}},
        {"sampling_options": {"guided_decoding": {"structural_tag": "<a>"}}},
        {"sampling_options": {"guided_decoding": {"json": {}, "whitespace_pattern": " "}}},
        {"sampling_options": {"guided_decoding": {"json": VAST}}},
        {"stop_conditions": {"stop_token_ids": [9]}, "eos_token_ids": [2]},
        {"stop_conditions": {"stop_token_ids_hidden": [2, 9]}, "eos_token_ids": [2]},
        {"output_options": {"logprobs": 21}},
        {"output_options": {"prompt_logprobs": 1}},
        {"output_options": {"skip_special_tokens": False}},
        {"output_options": {"return_tokens_as_token_ids": True}},
        {"output_options": {"formatted_prompt": True}},
        {"token_ids": [INFO.model.vocab_size]},
        {"sampling_options": {"guided_decoding": {"json": "{}"}}},
        {"prefill_result": {"disaggregated_params": {}}},
        {"prompt_embeds": "AAAA"},
    ],
)
def test_what_this_worker_cannot_do_is_the_client_s_mistake_and_named(more: dict[str, Any]) -> None:
    with pytest.raises(
        BadRequest, match=r"^(sampling_options|stop_conditions|output_options|token_ids|prefill_result|prompt_embeds)"
    ):
        asked(fields(**more), INFO, "a", None)


def test_all_that_is_wrong_comes_in_one_error_whatever_made_it_wrong() -> None:
    with pytest.raises(BadRequest) as refused:
        asked(
            fields(
                sampling_options={"temperature": "hot", "n": 2, "seed": 1.5, "guided_decoding": {"json": VAST}},
                # (types, what is not to be had, and an engine's bound; then what spans fields, and such a bound again)
                stop_conditions={"min_tokens": 9, "max_tokens": 8, "stop": ["x"] * 17},
                output_options={"logprobs": 21},
                annotations=["uma.target_tbt_ms:soon"],
            ),
            INFO,
            "a",
            None,
        )
    assert {line.partition(":")[0] for line in refused.value.message.splitlines()} == {
        "sampling_options.temperature",
        "sampling_options.n",
        "sampling_options.seed",
        "sampling_options.guided_decoding.json",
        "stop_conditions.min_tokens",
        "stop_conditions.stop",
        "output_options.logprobs",
        "annotations",
    }


def test_a_newer_frontend_s_fields_are_ignored_and_told() -> None:
    assert asked(fields(sparkle=1), INFO, "a", None).ignored == ("sparkle",)


def finished(completion: int, reason: Any = "stop") -> Finished:
    return Finished("a", reason, Usage(4, 3, completion), RequestMetrics(0, 1, 2, 1, 1, 1.0, 2), seed=1)


def made(bos: int | None = BOS) -> Chunks:
    return chunks_for(asked(fields(), INFO, "a", bos), INFO)


def test_tokens_that_are_ready_together_are_one_chunk_and_text_goes_with_its_ids() -> None:
    chunks = made()
    (first,) = chunks.of([Token("a", "He", 8), Token("a", "y", 9)])
    assert first == {"index": 0, "token_ids": [8, 9], "text": "Hey"}
    (last,) = chunks.of([attrs.evolve(finished(2), warnings=("min_p: not known here, ignored",))])
    assert (last["token_ids"], last["finish_reason"]) == ([], "stop")
    # The frontend's own prompt had three tokens; the beginning of text was put before them here.
    assert last["completion_usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert last["engine_data"]["uma"]["batch_size"] == 1
    assert last["engine_data"]["uma"]["warnings"] == ["min_p: not known here, ignored"]
    json.dumps(last)


def test_an_id_waits_for_its_whole_text() -> None:
    chunks = made()
    (first,) = chunks.of([Token("a", "He", 8), Token("a", "", 9, holds=True)])
    assert (first["token_ids"], first["text"]) == ([8], "He")
    assert chunks.of([Token("a", "", 12, holds=True)]) == []
    (second,) = chunks.of([Token("a", "y", 10), Token("a", "?", 11, holds=True)])
    assert (second["token_ids"], second["text"]) == ([9, 12, 10], "y")
    rest, last = chunks.of([finished(5)])
    assert (rest["token_ids"], rest["text"], last["token_ids"]) == ([11], "?", [])


def test_text_that_was_held_comes_without_an_id() -> None:
    chunks = made()
    events: list[Token | Finished] = [Token("a", "x", 8), Token("a", "held", 8), finished(1)]
    first, last = chunks.of(events)
    assert (first["token_ids"], first["text"]) == ([8], "x")
    assert (last["token_ids"], last["text"]) == ([], "held")


def test_log_probabilities_stand_beside_their_tokens_with_the_texts_that_the_frontend_wants() -> None:
    likely, other = TokenLogprob(8, "He", (72, 101), -0.5, 1), TokenLogprob(9, "y", (121,), -1.5, 2)
    events = [
        Token("a", "He", 8, logprobs=Logprobs(likely, (likely,))),
        Token("a", "", 9, logprobs=Logprobs(other, ())),
    ]
    (chunk,) = made().of(events)
    assert (chunk["token_ids"], chunk["text"]) == ([8, 9], "He")
    assert (chunk["tokens"], chunk["log_probs"]) == (["He", "y"], [-0.5, -1.5])
    assert chunk["top_logprobs"] == [[{"rank": 1, "token_id": 8, "token": "He", "logprob": -0.5}], []]


def test_the_frontend_s_prompt_tokens_have_their_log_probabilities_at_the_end() -> None:
    likely, said = TokenLogprob(8, "He", (72, 101), -0.5, 1), TokenLogprob(5, "y", (121,), -1.5, 2)
    chunks = made()  # whose beginning of text was put before the frontend's tokens
    assert chunks.of([Prompt("a", "y", (BOS, 5), (None, Logprobs(said, (likely,))))]) == []
    (last,) = chunks.of([finished(0)])
    assert last["engine_data"]["prompt_logprobs"] == [
        {
            "8": {"logprob": -0.5, "rank": 1, "decoded_token": "He"},
            "5": {"logprob": -1.5, "rank": 2, "decoded_token": "y"},
        }
    ]


def test_an_answer_that_does_not_add_up_does_not_leave() -> None:
    with pytest.raises(ContractViolation):
        made().of([Token("a", "x", 8), finished(5)])
    with pytest.raises(ContractViolation):
        made().of([Token("a", "x", INFO.model.vocab_size)])


# KV events


@given(histories(), st.integers(1, 4), st.lists(st.booleans(), min_size=30, max_size=30))
def test_a_router_knows_what_is_held_also_where_the_worker_has_missed_events(
    history: list[KvEvent], capacity: int, reads: list[bool]
) -> None:
    log, router, known, sequence = EventLog(capacity), RouterView(), BlockIndex(), 0
    for event, is_read in zip(history, reads, strict=False):
        log.append(event)
        if is_read:
            missed = log.catch_up(sequence)
            sequence = missed.sequence
            for each in router.events_for(missed):
                # (Raises where a parent is told after its child, or a block is removed that was not told of.)
                known.apply(each)
            assert known.blocks == log.index.blocks


# Tokenizers


WORDS = ("▁the", "▁th", "ere", "er", "▁owl", "ing", "▁été", "▁ete", "▁при", "вет", "▁你", "▁“", "▁🦉")


TEXTS = (
    "The owl said: “Привет, 你好”, नमस्ते 🦉!",
    "  two  spaces,\ttabs\n\nand 1,234 lines\n",
    "There! $5+3, [MASK]the others été",
)


@pytest.fixture(params=["builtin", "words", "pieces", "gpt-2", "llama-bpe", "qwen2"])
def model_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A vocabulary of each kind. Those by the name of a pre-tokenizer would merge whatever stands side by side in the
    texts, if the pre-tokenizer did not cut them, and have a word to which no merges lead.
    """
    text = "".join([PROBE, *TEXTS])
    if request.param == "builtin":
        return builtin_path()
    if request.param == "words":
        return write_encoder(tmp_path / "bert.gguf", words=WORDS)
    if request.param == "pieces":
        return write_sentence_pieces(tmp_path / "pieces.gguf", text, unknown="中🙂বு½")
    return write_vocabulary(
        tmp_path / "bytes.gguf", pre_tokenizer=request.param, merges=merges_of(text), words=["Ġowl"]
    )


def test_the_tokenizer_made_of_a_file_gives_llama_cpp_s_ids_for_every_script(model_path: Path) -> None:
    with Model.load(model_path, vocab_only=True) as model:

        def reference(text: str) -> list[int]:
            return [int(each) for each in model.vocab.tokenize(text, add_special=False, parse_special=True)]

        made = make_tokenizer(model_path)
        check_tokenizer(made, reference, "it")
        for text in TEXTS:
            assert made.encode(text, add_special_tokens=False).ids == reference(text)


def test_a_tokenizer_that_differs_is_refused_with_the_first_difference() -> None:
    with pytest.raises(ModelError, match=r"it gives other tokens .* token 0 of .* --tokenizer-dir"):
        check_tokenizer(make_tokenizer(builtin_path()), lambda text: [0] * len(text), "it")


def test_a_tokenizer_that_differs_in_special_tokens_alone_is_refused(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "bytes.gguf")
    with Model.load(path, vocab_only=True) as model, pytest.raises(ModelError, match=re.escape(SPECIALS[0])):
        check_tokenizer(
            make_tokenizer(path),
            lambda text: model.vocab.tokenize(text, add_special=False, parse_special=False).tolist(),
            "it",
        )


def test_a_tokenizer_that_differs_in_a_word_of_the_vocabulary_alone_is_refused(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "bytes.gguf", pre_tokenizer="llama-bpe", words=["Ġzebra"])
    merging = Tokenizer.from_str(make_tokenizer(path).to_str().replace('"ignore_merges":true', '"ignore_merges":false'))
    with Model.load(path, vocab_only=True) as model, pytest.raises(ModelError, match="of ' zebra'"):
        check_tokenizer(
            merging, lambda text: model.vocab.tokenize(text, add_special=False, parse_special=True).tolist(), "it"
        )


def test_a_kind_of_tokenizer_that_cannot_be_converted_is_refused_by_name(tmp_path: Path) -> None:
    path = write_model(tmp_path / "rwkv.gguf", tokenizer="rwkv")
    with pytest.raises(ModelError, match="its tokenizer, rwkv, cannot be converted"):
        make_tokenizer(path)


async def test_what_the_frontend_would_send_is_computed_as_the_prompt_s_text_is() -> None:
    from engine_world import ask

    tokenizer = make_tokenizer(builtin_path())
    async with open_engine(config_for(Path("builtin"))) as engine:
        ids = tokenizer.encode("Once upon a time", add_special_tokens=False).ids
        by_text = (await engine.tokenize(ask("Once upon a time"))).token_ids
        wanted = asked(fields(token_ids=ids), engine.info, "a", by_text[0])
    assert wanted.request.token_ids == tuple(by_text)


async def test_wherever_an_answer_breaks_off_the_ids_that_left_are_the_text_that_left() -> None:
    with Model.load(builtin_path(), vocab_only=True) as model:
        ids = model.vocab.tokenize("Once upon a time", add_special=False, parse_special=False).tolist()
        pieces = [model.vocab.piece(id) for id in range(model.vocab.n_tokens)]
    async with open_engine(config_for(Path("builtin"))) as engine:

        async def answer(stop: list[str]) -> list[dict[str, Any]]:
            wanted = asked(
                fields(token_ids=ids, stop_conditions={"max_tokens": 24, "stop": stop, "ignore_eos": True}),
                engine.info, "a", None,
            )  # fmt: skip
            chunks = chunks_for(wanted, engine.info)
            async with engine.generate(wanted.request) as stream:
                events = [event async for event in stream]
            return [chunk for event in events if isinstance(event, Token | Finished) for chunk in chunks.of([event])]

        text = "".join(chunk.get("text") or "" for chunk in await answer([]))
        # Stop strings that the text begins, and then goes on otherwise.
        chunks = await answer([text[5:9] + "ZZ", text[14:22] + "ZZ"])
    said, read = b"", ""
    for chunk in chunks:
        said += b"".join(pieces[id] for id in chunk["token_ids"])
        read += chunk.get("text") or ""
        assert said.decode() == read
    assert read == text
    assert len(chunks) < 25, "no text was held"


# The directory


def files(**changes: Any) -> ModelFiles:
    return attrs.evolve(ModelFiles(INFO.model, 1, 2, "</s>", "{{ bos_token }}x", "{}"), **changes)


def test_a_model_s_directory_is_named_by_its_content_and_whole(tmp_path: Path) -> None:
    name = model_directory.write(tmp_path / "a", files())
    assert model_directory.write(tmp_path / "b", files()) == name
    assert model_directory.write(tmp_path / "a", files()) == name
    assert model_directory.write(tmp_path / "a", files(chat_template="y")) != name
    assert {each.name for each in (tmp_path / "a" / name).iterdir()} == set(FILES)
    assert not list((tmp_path / "a").glob(".new-*"))


def test_workers_that_start_together_write_one_directory_and_leave_nothing_beside_it(tmp_path: Path) -> None:
    together = Barrier(8)

    def write(_: int) -> str:
        together.wait()
        return model_directory.write(tmp_path, files())

    with ThreadPoolExecutor(8) as pool:
        (name,) = set(pool.map(write, range(8)))
    assert [each.name for each in tmp_path.iterdir()] == [name]
    assert sorted(each.name for each in (tmp_path / name).iterdir()) == sorted(FILES)


def test_nothing_in_the_directory_tells_of_the_machine(tmp_path: Path) -> None:
    elsewhere = files(info=attrs.evolve(INFO.model, path="/home/me/tiny.gguf"))
    assert model_directory.write(tmp_path, elsewhere) == model_directory.write(tmp_path, files())


def test_no_template_writes_the_beginning_of_text_that_the_worker_puts_there(tmp_path: Path) -> None:
    config = json.loads(files().contents()["tokenizer_config.json"])
    assert (config["bos_token"], config["chat_template"]) == ("", "{{ bos_token }}x")


def test_the_probe_has_every_kind_of_text() -> None:
    assert len({ord(each) >> 8 for each in PROBE}) > 24


@pytest.mark.parametrize("name", ["qwen35", "starcoder"])
def test_a_real_vocabulary_becomes_a_tokenizer_that_gives_llama_cpp_s_tokens(name: str) -> None:
    _check_made(vocabulary(name))


def test_a_real_model_becomes_a_tokenizer_that_gives_llama_cpp_s_tokens() -> None:
    _check_made(real_model("smollm2"))


def _check_made(path: Path) -> None:
    with Model.load(path, vocab_only=True) as model:
        tokens = partial(model.vocab.tokenize, add_special=False, parse_special=True)
        check_tokenizer(make_tokenizer(path), lambda text: tokens(text).tolist(), str(path))
