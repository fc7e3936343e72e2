"""What a model is called by: its file, first; and what a request gets that names another company's model, or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from engine_world import config_for
from http_server import HostedHttp, hosted_http

from uma.types import listed_name

TURNS = [{"role": "user", "content": "a"}]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/embeddings": {"input": "a"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/api/chat": {"messages": TURNS, "stream": False, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "a", "stream": False, "options": {"num_predict": 1}},
    "/completion": {"prompt": "a", "n_predict": 1},
    "/tokenize": {"content": "a"},
}


@pytest.fixture(scope="module")
def hosted(tiny: Path) -> Iterator[HostedHttp]:
    with hosted_http(attrs.evolve(config_for(tiny, http="127.0.0.1:0"), alias="house")) as hosted:
        yield hosted


def test_lists_begin_with_the_file_s_name_and_tell_the_context_that_is_served(hosted: HostedHttp, tiny: Path) -> None:
    n_ctx = hosted.engine.info.limits.n_ctx
    with hosted.connect() as raw:
        listed = raw.ask("GET", "/v1/models").json["data"]
        assert [each["id"] for each in listed] == [tiny.stem, "house"]
        assert listed[0]["meta"]["n_ctx"] == n_ctx
        assert raw.ask("GET", "/v1/models", **{"anthropic-version": "1"}).json["first_id"] == tiny.stem
        assert raw.ask("GET", "/api/tags").json["models"][0]["model"] == tiny.stem
        (resident,) = raw.ask("GET", "/api/ps").json["models"]
        assert (resident["model"], resident["size_vram"]) == (tiny.stem, hosted.engine.info.model.gpu_bytes)
        assert raw.ask("GET", "/props").json["model_alias"] == tiny.stem
        shown = raw.ask("POST", "/api/show", {"model": tiny.stem[:-1]}).json["model_info"]
        assert shown["general.basename"] == tiny.stem
        assert shown[f"{shown['general.architecture']}.context_length"] == n_ctx


@pytest.mark.parametrize("path", BODIES)
def test_every_name_of_it_and_none_at_all_mean_the_loaded_model(hosted: HostedHttp, tiny: Path, path: str) -> None:
    with hosted.connect() as raw:
        own = hosted.engine.info.model.title
        beginnings = (tiny.stem[:-1], "HOU")  # as `--model` takes them, too
        for name in (None, tiny.stem, tiny.stem.upper(), tiny.name, own, "house", f"{tiny.stem}:latest", *beginnings):
            answer = raw.ask("POST", path, BODIES[path] if name is None else {**BODIES[path], "model": name})
            told = None if name in (None, tiny.stem) else tiny.stem
            assert (answer.status, answer.headers.get("x-uma-model")) == (200, told), (name, answer.body)


@pytest.mark.parametrize("path", BODIES)
def test_a_name_of_another_company_s_model_means_the_loaded_one_and_the_answer_says_so(
    hosted: HostedHttp, tiny: Path, path: str
) -> None:
    with hosted.connect() as raw:
        for name in ("claude-sonnet-5-20990101", "gpt-9-codex"):
            answer = raw.ask("POST", path, {**BODIES[path], "model": name})
            assert (answer.status, answer.headers.get("x-uma-model")) == (200, tiny.stem)
            assert answer.json.get("model", name) == name
        assert raw.ask("POST", path, {**BODIES[path], "model": "llama-9"}).status == 404
        assert raw.ask("GET", "/v1/models/gpt-9").status == 404


def test_an_alias_can_be_any_name(tiny: Path) -> None:
    config = config_for(tiny, http="127.0.0.1:0", alias="a, *")
    with hosted_http(config) as hosted, hosted.connect() as raw:
        for path, body in BODIES.items():
            assert raw.ask("POST", path, {**body, "model": "llama-9"}).status == 200
        assert [model["id"] for model in raw.ask("GET", "/v1/models").json["data"]] == [tiny.stem, "a"]


@pytest.mark.parametrize(
    ("path", "is_builtin", "called"),
    [
        ("/models/Qwen3-0.6B-Q8_0.gguf", False, "Qwen3-0.6B-Q8_0"),
        ("/models/big-00001-of-00003.gguf", False, "big"),
        ("weights", False, "weights"),
        ("/x/uma-story.gguf", True, "builtin"),
    ],
)
def test_a_model_is_called_by_its_file(path: str, is_builtin: bool, called: str) -> None:
    assert listed_name(path, "Its own title", is_builtin=is_builtin) == called
