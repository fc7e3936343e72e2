"""A text of no token costs the others nothing: it has null for an embedding, and one warning, wherever it is sent."""

from __future__ import annotations

import json
import warnings
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openai
import pytest
import trio
from http_clients import openai_of
from http_server import HttpServer, running_http

from harness import RunInProcessText, short_directory
from models import write_model
from uma import LLM, connect
from uma.client.probe import SocketProbe
from uma.contracts.proofs import Question
from uma.errors import BadRequest
from uma.types import EmbedRequest

TEXTS = ["a fox", "", "b", ""]
EMPTY = [False, True, False, True]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A model that wants no token before a text."""
    path = write_model(tmp_path_factory.mktemp("model") / "model.gguf", add_bos=False)
    with short_directory() as directory, running_http(directory, "--model", str(path)) as process:
        yield process


def asked(server: HttpServer, **fields: Any) -> dict[str, Any]:
    """The answer over the socket."""
    return SocketProbe(server.process.socket).ask(Question({"type": "embed", "texts": TEXTS, **fields})).last


@pytest.fixture(scope="module")
def expected(server: HttpServer) -> npt.NDArray[np.float64]:
    """The embeddings of the texts that have one."""
    return np.array(asked(server, texts=["a fox", "b"])["embeddings"])


def check(found: list[Any], expected: npt.NDArray[np.float64], empty: Any = None) -> None:
    assert [each == empty for each in found] == EMPTY
    assert np.allclose([each for each in found if each != empty], expected, atol=1e-5)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_on_the_socket_it_has_null(server: HttpServer, expected: npt.NDArray[np.float64], encoding: str) -> None:
    told = asked(server, encoding=encoding)
    found = told["embeddings"]
    if encoding == "base64":
        found = [each and np.frombuffer(b64decode(each), "<f4").tolist() for each in found]
    check(found, expected)
    assert [count == 0 for count in told["prompt_tokens"]] == EMPTY
    (warning,) = told["warnings"]
    assert warning.startswith("texts[1] and 1 more: no token at all")
    assert asked(server, texts=[""], encoding=encoding)["embeddings"] == [None]


def test_on_the_socket_it_fails_where_that_is_asked_for(server: HttpServer) -> None:
    told = asked(server, fail_on_empty=True)
    assert (told["code"], "texts[1]: gives no token at all" in told["message"]) == ("E_PROTO_BAD_REQUEST", True)


def test_a_client_of_the_socket_has_none_for_it(server: HttpServer, expected: npt.NDArray[np.float64]) -> None:
    async def ask() -> None:
        async with connect(server.process.socket) as client:
            found = await client.embed(EmbedRequest("e", texts=TEXTS))
            check([each and each.tolist() for each in found.vectors], expected)
            assert found.warnings[0].startswith("texts[1] and 1 more: ")
            with pytest.raises(BadRequest, match=r"texts\[1\]: gives no token"):
                await client.embed(EmbedRequest("e", texts=TEXTS, fail_on_empty=True))

    trio.run(ask)


def test_the_command_writes_null_and_warns_once(
    server: HttpServer, expected: npt.NDArray[np.float64], tmp_path: Path, uma_told: RunInProcessText
) -> None:
    file, at = tmp_path / "texts", ("--socket", str(server.process.socket))
    file.write_text("".join(f"{text}\n" for text in TEXTS) + "b\n" * 300 + "\n")
    done = uma_told("embed", "--file", str(file), *at)
    assert done.returncode == 0
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    check(lines[:4], expected)
    assert (len(lines), lines[-1], lines.count(None)) == (305, None, 3)
    warned = [line for line in done.stderr.splitlines() if line.startswith("uma: warning: ")]
    assert warned == [
        "uma: warning: text 2 and others have no token: their embeddings are null (3 of 305); "
        "--fail-on-empty refuses such texts"
    ]
    refused = uma_told("embed", "a fox", "", *at, "--fail-on-empty")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "text 2: gives no token at all" in refused.stderr


def test_llm_has_a_row_of_nan_and_warns_once(server: HttpServer, expected: npt.NDArray[np.float64]) -> None:
    with LLM(socket=str(server.process.socket)) as llm:
        with pytest.warns(
            UserWarning, match=r"2 of 4 texts have no token, so their rows are NaN; .* texts\[1\]"
        ) as told:
            rows = llm.embed(TEXTS)
        assert len(told) == 1
        assert np.isnan(rows).all(axis=1).tolist() == EMPTY
        assert np.allclose(rows[[0, 2]], expected, atol=1e-5)
        with pytest.raises(BadRequest, match=r"texts\[1\]: gives no token"):
            llm.embed(TEXTS, fail_on_empty=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert llm.embed("a fox").shape == (1, expected.shape[1])


def test_openai_s_client_has_none_for_it(server: HttpServer, expected: npt.NDArray[np.float64]) -> None:
    with openai_of(server) as client:
        for form in (openai.omit, "float"):
            found = client.embeddings.create(model="model", input=TEXTS, encoding_format=form)
            check([each.embedding for each in found.data], expected)
            assert found.model_extra is not None
            assert found.model_extra["warnings"][0].startswith("input[1] and 1 more: no token at all")
        assert client.embeddings.create(model="model", input="").data[0].embedding is None
        with pytest.raises(openai.BadRequestError, match=r"input\[1\]: gives no token at all"):
            client.embeddings.create(model="model", input=TEXTS, extra_body={"fail_on_empty": True})


def test_ollama_s_clients_have_an_empty_list_for_it(server: HttpServer, expected: npt.NDArray[np.float64]) -> None:
    found = server.ask("POST", "/api/embed", {"model": "model", "input": TEXTS}).json
    check(found["embeddings"], expected, [])
    assert found["warnings"][0].startswith("input[1] and 1 more: ")
    refused = server.ask("POST", "/api/embed", {"model": "model", "input": TEXTS, "fail_on_empty": True})
    assert (refused.status, "input[1]: gives no token" in refused.json["error"]) == (400, True)


def test_llama_server_s_list_has_null_for_it(server: HttpServer, expected: npt.NDArray[np.float64]) -> None:
    found = server.ask("POST", "/embedding", {"content": TEXTS, "embd_normalize": 2}).json
    check([each["embedding"] and each["embedding"][0] for each in found], expected)
    assert ["warnings" in each for each in found] == [False, True, False, False]
    refused = server.ask("POST", "/embedding", {"content": TEXTS, "fail_on_empty": True})
    assert refused.status == 400
    assert b"content[1]: gives no token" in refused.body
