"""The card of a model that was never loaded, by its file, beside that of its process; and what is refused by it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import attrs
import pytest
import trio
from every_kind import kinds, write_named
from http_server import running_http
from projectors import write_projector, write_seeing_model
from reference import real_model

from benchmarks.reference import RealModel
from harness import short_directory
from models import write_causal_reranker, write_encoder, write_model
from uma.config import ModelSettings, RuntimeConfig
from uma.supervisor import open_models
from uma.types import Capabilities, LoadProgress, ServerInfo

OF_THE_CONTEXT = frozenset(("prefix_sharing", "speculation", "kv_unified", "embedding_dimensions", "memory", "fill_in"))
"""Fields of `Capabilities` that no header tells, and none but `fill_in` refuses anything."""
CAN_BE_LESS = ("tools", "grammars")
"""Fields that a model can have fewer of, by its vocabulary and by what its template makes of calls."""
THINKING = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{{ greeting }}"
)
UNKNOWN_CALLS = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[-1].content }}"


def refusing(able: Capabilities) -> dict[str, Any]:
    """What requests are refused by, or changed."""
    return {
        name: value
        for name, value in attrs.asdict(able, recurse=False).items()
        if name not in (*OF_THE_CONTEXT, *CAN_BE_LESS, "max_answers")
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    write_model(path / "alpha.gguf")
    write_model(path / "calls.gguf", chat_template=UNKNOWN_CALLS)
    write_model(path / "decides.gguf", metadata={"llama.decision.type": "kev"})
    write_model(path / "last.gguf", metadata={"llama.pooling_type": 3})
    write_encoder(path / "encoder.gguf")
    write_encoder(path / "ranker.gguf", pooling="rank")
    return path


async def cards(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tables: Mapping[str, ModelSettings] | None = None
) -> Mapping[str, tuple[ServerInfo, ServerInfo]]:
    """The card of each model of a folder, and of the built-in one, before its load and behind it."""
    monkeypatch.setenv("UMA_MODELS", str(folder))
    found = {}
    async with open_models(RuntimeConfig(models="all", threads=1, cache_ram_mb=0), LoadProgress(), tables) as models:

        async def look(name: str) -> None:
            found[name] = await models.card(name, loads=False), await models.card(name)

        async with trio.open_nursery() as nursery:
            for name in models.names:
                nursery.start_soon(look, name)
    return found


def check(found: Mapping[str, tuple[ServerInfo, ServerInfo]]) -> None:
    for name, (before, after) in found.items():
        assert (before.model.path, bool(after.model.path)) == ("", True)
        own = attrs.evolve(after.model, name=name, path="", gpu_bytes=0)
        assert before.model == own
        assert refusing(before.capabilities) == refusing(after.capabilities), name
        for field in CAN_BE_LESS:
            assert set(getattr(before.capabilities, field)) >= set(getattr(after.capabilities, field)), (name, field)
        assert before.capabilities.max_answers >= after.capabilities.max_answers, name
        assert before.chat_template == after.chat_template, name
        assert before.limits == attrs.evolve(
            after.limits,
            max_sequences=before.limits.max_sequences,
            max_reproducible_tokens=before.limits.max_reproducible_tokens,
        ), name


async def test_a_card_by_the_header_is_that_of_the_process_for_every_kind_of_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for kind in kinds("sliding-window", "qwen35"):
        shutil.move(write_named(tmp_path, kind), folder / f"{kind}.gguf")
    write_model(folder / "alpha.gguf", metadata={"general.sampling.temp": 0.5, "general.sampling.top_k": 7})
    write_model(folder / "base.gguf", chat_template=None)
    write_model(folder / "thinking.gguf", chat_template=THINKING)
    write_model(folder / "unknown-calls.gguf", chat_template=UNKNOWN_CALLS)
    write_model(folder / "last.gguf", metadata={"llama.pooling_type": 3})
    write_model(folder / "decides.gguf", metadata={"llama.decision.type": "kev"})
    write_encoder(folder / "encoder.gguf")
    write_encoder(folder / "ranker.gguf", pooling="rank")
    write_causal_reranker(folder / "causal.gguf", "{query}{document}")
    write_causal_reranker(folder / "no-classifier.gguf", "{query}{document}", has_classifier=False)
    write_seeing_model(folder / "seeing.gguf", "llava")
    write_projector(folder / "mmproj-seeing.gguf")
    found = await cards(folder, monkeypatch, {"alpha": ModelSettings(values={"temperature": 0.25, "n_ctx": 300})})
    check(found)
    able = {name: before.capabilities for name, (before, _) in found.items()}
    assert [name for name, each in able.items() if each.vision] == ["seeing"]
    assert {name for name, each in able.items() if not each.generate} == {"encoder", "ranker"}
    assert {name for name, each in able.items() if each.rerank} == {"ranker", "causal"}
    assert able["thinking"].reasoning_switch
    assert able["thinking"].template_variables == ("enable_thinking", "greeting")
    assert able["alpha"].suggested_sampling == {"temperature": 0.25, "top_k": 7}
    assert not able["decides"].decisions
    assert found["unknown-calls"][1].capabilities.tools == ()  # as only rendering its template shows


@pytest.mark.parametrize("name", get_args(RealModel))
async def test_a_card_by_the_header_is_that_of_the_process_for_real_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: RealModel
) -> None:
    (tmp_path / f"{name}.gguf").symlink_to(real_model(name))
    check(await cards(tmp_path, monkeypatch))


TURNS = [{"role": "user", "content": "Hi"}]
SEEN = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
REFUSED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("alpha", "/v1/chat/completions", {"messages": SEEN}),
    ("alpha", "/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("alpha", "/v1/completions", {"prompt": [1 << 20]}),
    ("alpha", "/v1/completions", {"prompt": "a", "logprobs": 1_000}),
    ("encoder", "/v1/chat/completions", {"messages": TURNS}),
    ("encoder", "/api/generate", {"prompt": "a"}),
    ("ranker", "/v1/embeddings", {"input": "a"}),
    ("decides", "/v1/systemone", {"state": "a", "questions": {"a": {"type": "noul", "instructions": "b"}}}),
)


def test_what_a_model_s_file_shows_that_it_cannot_do_is_refused_before_it_is_loaded_as_behind_it(
    folder: Path,
) -> None:
    names = {"UMA_MODELS": str(folder), "HOME": str(folder)}
    with short_directory() as own, running_http(own, "--models", "all", **names) as server:
        before = [server.ask("POST", path, {"model": name, **body}) for name, path, body in REFUSED]
        assert "event=model.loading" not in server.process.log.text
        assert [answer.status for answer in before] == [*[400] * 7, 501]
        for name in ("alpha", "encoder", "ranker", "decides"):
            assert server.ask("POST", "/tokenize", {"model": name, "content": "a"}).status == 200
        after = [server.ask("POST", path, {"model": name, **body}) for name, path, body in REFUSED]
        assert [(answer.status, answer.json) for answer in before] == [(answer.status, answer.json) for answer in after]


def test_what_only_a_loaded_model_shows_is_taken_before_its_load(folder: Path) -> None:
    names = {"UMA_MODELS": str(folder), "HOME": str(folder)}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    with short_directory() as own, running_http(own, "--models", "all", **names) as server:
        unnamed = server.ask("POST", "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2})
        assert (unnamed.status, unnamed.json["model"]) == (200, "alpha")
        called = server.ask("POST", "/v1/chat/completions", {"model": "calls", "messages": TURNS, "tools": [tool]})
        assert (called.status, "cannot be told from its text" in str(called.json)) == (400, True)
        filled = server.ask("POST", "/v1/completions", {"model": "decides", "prompt": "a", "suffix": "b"})
        assert (filled.status, "no tokens for filling in" in str(filled.json)) == (400, True)
        assert server.ask("POST", "/v1/embeddings", {"model": "last", "input": "a"}).status == 200
        assert server.ask("POST", "/v1/completions", {"model": "last", "prompt": "a", "max_tokens": 2}).status == 200


async def test_a_file_in_the_place_of_another_is_judged_by_its_own_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "alpha.gguf", chat_template=THINKING)
    monkeypatch.setenv("UMA_MODELS", str(tmp_path))
    async with open_models(RuntimeConfig(models="alpha", threads=1, n_ctx=512), LoadProgress()) as models:
        assert (await models.card("alpha")).capabilities.reasoning
        write_model(tmp_path / "new.gguf", metadata={"llama.decision.type": "kev"}).replace(path)
        card = await models.card("alpha", loads=False)
        assert (card.model.path, card.capabilities.reasoning, card.capabilities.decisions) == ("", False, 0)
        assert (await models.card("alpha")).capabilities == (await models.card("alpha", loads=False)).capabilities
