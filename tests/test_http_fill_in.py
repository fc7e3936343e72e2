"""Filling in the middle: the prompt has the model's own tokens in llama-server's order, in every dialect that asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_world import config_for
from http_server import hosted_http
from test_http_native import Server

from models import FILL_IN, write_word_model
from uma.types import FillIn

GREEDY = {"temperature": 0, "ignore_eos": True}
BEFORE, BEHIND = "the day ", " she said"
OPTIONS = {"num_predict": 6, "repeat_penalty": 1, **GREEDY}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": BEFORE, "suffix": BEHIND, "max_tokens": 6, **GREEDY},
    "/api/generate": {
        "prompt": BEFORE,
        "suffix": BEHIND,
        "stream": False,
        "options": {"num_predict": 6, "repeat_penalty": 1, **GREEDY},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model with all five tokens, in a context of 256 tokens."""
    path = write_word_model(tmp_path_factory.mktemp("model") / "words.gguf", fill_in=FILL_IN)
    with hosted_http(config_for(path, http="127.0.0.1:0", n_ctx=256)) as hosted:
        yield Server(hosted.port)


@pytest.fixture(scope="module")
def marks(server: Server) -> FillIn:
    """The model's tokens."""
    return FillIn(**server.ask("GET", "/props").json["capabilities"]["fill_in"])


def ids(server: Server, text: str) -> list[int]:
    found: list[int] = server.ask("POST", "/tokenize", {"content": text}).json["tokens"]
    return found


def continued(server: Server, prompt: list[int]) -> tuple[str, int]:
    """What is generated behind these tokens, and how many they are."""
    told = server.ask("POST", "/completion", {"prompt": prompt, "n_predict": 6, **GREEDY}).json
    return told["content"], len(prompt)


@pytest.mark.parametrize("path", ASKED)
def test_a_suffix_is_put_behind_the_gap(server: Server, marks: FillIn, path: str) -> None:
    told = server.ask("POST", path, ASKED[path]).json
    prompt = [1, marks.prefix, *ids(server, BEFORE), marks.suffix, *ids(server, BEHIND), marks.middle]
    text = told["choices"][0]["text"] if path == "/v1/completions" else told["response"]
    used = told["usage"]["prompt_tokens"] if path == "/v1/completions" else told["prompt_eval_count"]
    assert (text, used) == continued(server, prompt)


def test_infill_lays_files_and_the_begun_line_out_as_llama_server_does(server: Server, marks: FillIn) -> None:
    assert marks.repository is not None
    assert marks.file is not None
    files = [{"filename": "a.h", "text": "on it"}, {"text": "of you"}]
    body = {"input_prefix": BEFORE, "input_suffix": BEHIND, "prompt": "he", "input_extra": files}
    told = server.ask("POST", "/infill", {**body, "n_predict": 6, **GREEDY}).json
    prompt = [
        *(marks.repository, *ids(server, "myproject\n")),
        *(marks.file, *ids(server, "a.h\n"), *ids(server, "on it")),
        *(marks.file, *ids(server, "tmp\n"), *ids(server, "of you")),
        *(marks.file, *ids(server, "filename\n")),
        *(1, marks.prefix, *ids(server, BEFORE), *ids(server, "he")),
        *(marks.suffix, *ids(server, BEHIND), marks.middle),
    ]
    assert (told["content"], told["tokens_evaluated"]) == continued(server, prompt)


def test_files_that_do_not_fit_are_left_out_from_the_first_on(server: Server) -> None:
    files = [{"filename": name, "text": "x" * 60} for name in "abcdef"]
    told = server.ask(
        "POST", "/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": files, "n_predict": 4}
    ).json
    assert told["warnings"] == ["input_extra: the first 3 of 6 do not fit the context"]
    assert told["tokens_predicted"] <= 4


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"input_extra": [{"filename": 1, "text": "a"}]}, "input_extra[0].filename"),
        ({"input_suffix": None}, "input_suffix"),
        ({"prompt": [1, 2]}, "prompt"),
    ],
)
def test_what_cannot_be_filled_in_is_refused_by_name(server: Server, fields: dict[str, Any], named: str) -> None:
    refused = server.ask("POST", "/infill", {"input_prefix": "a", "input_suffix": "b", **fields})
    assert (refused.status, named in refused.json["error"]["message"]) == (400, True)


@pytest.mark.parametrize(("path", "body"), [*ASKED.items(), ("/infill", {"input_prefix": "a", "input_suffix": "b"})])
def test_a_model_without_such_tokens_refuses_by_name(tiny: Path, path: str, body: dict[str, Any]) -> None:
    with hosted_http(config_for(tiny, http="127.0.0.1:0")) as hosted:
        refused = Server(hosted.port).ask("POST", path, body)
        assert (refused.status, "tokens for filling in the middle" in refused.body.decode()) == (400, True)


def test_a_spelled_control_token_in_the_text_is_text(server: Server, marks: FillIn) -> None:
    told = server.ask("POST", "/v1/completions", {"prompt": "<MID>", "suffix": "b", "max_tokens": 1}).json
    assert told["usage"]["prompt_tokens"] == 1 + 1 + len("\u2581<MID>") + 1 + len(ids(server, "b")) + 1
