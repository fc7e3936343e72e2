"""LoRA adapters over HTTP, on the socket and in the library: each is a model of its own, `model+NAME`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from adapters import write_adapter
from http_server import HttpServer, running_gateway, running_http
from pty_screen import Terminal

from harness import RunInProcessText, clean_environ, short_directory, uma_command
from models import write_model
from uma import LLM
from uma.config import load
from uma.errors import ConfigError, UnknownModel

PROMPT = "Once upon a time"
NAMES = ("tiny", "tiny+one", "tiny+two")


@pytest.fixture(scope="module")
def flags() -> Iterator[list[str]]:
    with short_directory() as folder:
        model = write_model(folder / "tiny.gguf")
        one, two = (write_adapter(folder / f"{seed}.gguf", model, seed=seed) for seed in (1, 2))
        adapters = f"one={one}", f"two={two}:0.5"
        yield ["--model", str(model), "--lora", adapters[0], "--lora", adapters[1], "--threads", "1"]


@pytest.fixture(scope="module")
def server(flags: list[str]) -> Iterator[HttpServer]:
    with short_directory() as folder, running_http(folder, *flags) as server:
        yield server


def completed(server: HttpServer, **fields: Any) -> str:
    given = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True} | fields
    answer = server.ask("POST", "/v1/completions", given)
    assert answer.status == 200, answer.body
    assert "model" not in fields or answer.json["model"] == fields["model"]
    text: str = answer.json["choices"][0]["text"]
    return text


def test_lists_of_models_have_each_adapter(server: HttpServer) -> None:
    assert [each["id"] for each in server.ask("GET", "/v1/models").json["data"]] == list(NAMES)
    assert [each["name"] for each in server.ask("GET", "/api/tags").json["models"]] == list(NAMES)
    assert server.ask("GET", "/v1/models/tiny+two").json["id"] == "tiny+two"
    adapters = server.ask("GET", "/lora-adapters").json
    assert [(each["id"], each["task_name"], each["scale"]) for each in adapters] == [(0, "one", 0.0), (1, "two", 0.0)]


def test_every_dialect_the_socket_and_the_library_ask_for_an_adapter_by_its_name(
    server: HttpServer, flags: list[str]
) -> None:
    found = [completed(server, model=name) for name in NAMES]
    assert len(set(found)) == len(NAMES)
    assert completed(server) == completed(server, model="TINY") == found[0]
    params = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    with LLM(flags[1], lora=f"{flags[3]},{flags[5]}", threads=1) as llm:
        assert [llm.generate(PROMPT, params, model=name)[0].outputs[0].text for name in NAMES] == found
        with pytest.raises(UnknownModel, match="'tiny', 'tiny\\+one' and 'tiny\\+two' are"):
            llm.generate(PROMPT, params, model="tiny+three")
    for name, text in zip(NAMES, found, strict=True):
        with LLM(name, socket=str(server.process.socket)) as llm:
            assert llm.generate(PROMPT, params)[0].outputs[0].text == text
    with pytest.raises(UnknownModel), LLM("tiny+three", socket=str(server.process.socket)):
        pass
    asked = {"prompt": PROMPT, "raw": True, "stream": False, "options": {"num_predict": 16, "temperature": 0}}
    given = [server.ask("POST", "/api/generate", asked | {"model": name}).json for name in NAMES]
    assert [each["model"] for each in given] == list(NAMES)
    assert len({each["response"] for each in given}) == len(NAMES)
    hello = [{"role": "user", "content": "Hi"}]
    chats = [server.ask("POST", "/v1/messages", {"model": name, "max_tokens": 8, "messages": hello}) for name in NAMES]
    assert len({str(each.json["content"]) for each in chats}) == len(NAMES)
    wet = {"type": "score", "instructions": "How wet is it?", "levels": [{"label": "dry"}, {"label": "wet"}]}
    asked = {"input": "It rains.", "questions": [wet]}
    decided = [server.ask("POST", "/v1/decisions", asked | {"model": name}) for name in NAMES]
    assert all(each.status == 200 for each in decided)
    assert len({each.body for each in decided}) == len(NAMES)


def said_on_the_page(server: HttpServer, name: str) -> str:
    """What the page shows as the answer of a model that it lists."""
    told = server.ask("GET", f"/ui/api/info?model={quote(name)}").json
    assert told["model"]["called"] == name
    assert [each["name"] for each in told["models"]][: len(NAMES)] == list(NAMES)
    sampling = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    asked = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "sampling": sampling}
    given = server.ask("POST", "/ui/api/answers", asked)
    assert given.status == 200
    return "".join(each.get("text", "") for each in given.events)


def test_the_page_asks_for_an_adapter_as_for_a_model(server: HttpServer) -> None:
    assert len({said_on_the_page(server, name) for name in NAMES}) == len(NAMES)


def test_scales_are_given_by_request_as_llama_server_has_them(server: HttpServer) -> None:
    by_name = [completed(server, model=name) for name in NAMES]
    for lora, text in (([], 0), ([{"id": 0, "scale": 1.0}], 1), ([{"id": 1, "scale": 0.5}, {"id": 0, "scale": 0}], 2)):
        assert completed(server, lora=lora) == by_name[text]
        asked = {"prompt": PROMPT, "n_predict": 16, "temperature": 0, "ignore_eos": True, "lora": lora}
        assert server.ask("POST", "/completion", asked).json["content"] == by_name[text]
    assert completed(server, lora=[{"id": 0, "scale": 2.0}]) not in by_name


def test_a_model_that_leaves_several_models_and_gateways_offer_the_same_adapters(
    server: HttpServer, flags: list[str], tmp_path: Path, uma_told: RunInProcessText
) -> None:
    """A model that leaves while it is idle is one of several; its process gets its adapters."""
    expected = [completed(server, model=name) for name in NAMES]
    table = tmp_path / "uma.toml"
    adapters = ",".join(flag for flag in flags if "=" in flag)
    table.write_text(f'[models."{flags[1]}"]\nalias = ["fast"]\nlora = "{adapters}"\n')
    several = ["--models", f"{flags[1]},builtin", "--config", str(table), "--threads", "1"]
    with (
        short_directory() as folder,
        running_http(folder / "a", *flags, "--idle-unload", "60") as leaving,
        running_http(folder / "b", *several) as many,
        running_gateway(leaving.process) as before_leaving,
        running_gateway(server.process) as before_one,
    ):
        for place in (leaving, many, before_leaving, before_one):
            offered = [each["id"] for each in place.ask("GET", "/v1/models").json["data"]]
            assert offered[: len(NAMES)] == list(NAMES)
            assert place.ask("GET", "/v1/models/tiny+two").json["id"] == "tiny+two"
            assert [each["name"] for each in place.ask("GET", "/api/tags").json["models"]][: len(NAMES)] == list(NAMES)
            assert [each["task_name"] for each in place.ask("GET", "/lora-adapters").json] == ["one", "two"]
            assert [completed(place, model=name) for name in NAMES] == expected
            assert completed(place, lora=[{"id": 1, "scale": 0.5}]) == expected[2]
            body = {"model": "tiny+three", "prompt": PROMPT}
            assert place.ask("POST", "/v1/completions", body).json["error"]["code"] == "model_not_found"
            assert place.ask("POST", "/v1/embeddings", {"model": "tiny+one", "input": "text"}).status == 400
        assert completed(many, model="fast+two") == expected[2]
        assert [said_on_the_page(many, name) for name in NAMES] == [said_on_the_page(server, name) for name in NAMES]
        for place in (many, server):
            options = ("--socket", str(place.process.socket), "--raw", "--temperature", "0", "--max-tokens", "16")
            said = uma_told("generate", "-m", "tiny+two", *options, "--ignore-eos", PROMPT)
            assert said.stdout.strip() == expected[2].strip()
        with LLM("tiny+two", socket=str(many.process.socket)) as llm:
            params = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
            assert llm.generate(PROMPT, params)[0].outputs[0].text == expected[2]
        assert many.ask("POST", "/v1/completions", {"model": "builtin+one", "prompt": PROMPT}).status == 404


def test_an_adapter_of_several_models_needs_the_model_that_it_is_of() -> None:
    with pytest.raises(ConfigError, match=r"UMA_LORA: an adapter is of one model.*\[models"):
        load({"models": "a,b"}, {"UMA_LORA": "one=a.gguf"})


def test_what_is_not_there_is_refused(server: HttpServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    refused = server.ask("POST", "/v1/completions", body | {"model": "tiny+three"})
    assert (refused.status, refused.json["error"]["code"]) == (404, "model_not_found")
    refused = server.ask("POST", "/v1/completions", body | {"lora": [{"id": 2, "scale": 1}]})
    assert refused.status == 400
    assert "no adapter has the id 2; they are 0 to 1" in refused.json["error"]["message"]
    assert server.ask("POST", "/v1/embeddings", {"model": "tiny+one", "input": "text"}).status == 400
    refused = server.ask("POST", "/lora-adapters", [{"id": 0, "scale": 1.0}])
    assert refused.status == 501
    assert "give lora in each" in refused.json["error"]["message"]


@pytest.mark.parametrize(
    ("lora", "problem"),
    [("one", "expected NAME=FILE"), ("a=x,A=y", "two adapters have one name"), ("a+b=x", "expected NAME=FILE")],
)
def test_adapters_that_cannot_be_named_are_no_configuration(lora: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        LLM(lora=lora)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"missing\.gguf: no such file"):
        LLM(lora=f"one={tmp_path / 'missing.gguf'}")


def test_commands_ask_for_an_adapter_by_its_name_and_list_all(
    server: HttpServer, flags: list[str], uma_told: RunInProcessText, tmp_path: Path
) -> None:
    at = "--socket", str(server.process.socket)
    asked = ("generate", "--raw", PROMPT, "--max-tokens", "16", "--temperature", "0", "--ignore-eos")
    served = [uma_told(*asked, "-m", name, *at) for name in NAMES]
    assert [done.stdout.strip() for done in served] == [completed(server, model=name).strip() for name in NAMES]
    here = uma_told(*asked, "-m", f"{flags[1]}+two", *flags[2:], "--local")
    assert here.stdout == served[2].stdout, here.stderr
    missing = uma_told(*asked, "-m", "tiny+three", *at)
    assert (missing.returncode, "model not found" in missing.stderr) == (2, True)
    (running,) = json.loads(uma_told("ps", "--json", *at).stdout)
    assert (running["model"], running["adapters"]) == ("tiny", ["one", "two"])
    assert "tiny, +one, +two" in uma_told("ps", *at).stdout
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    batch = ("batch", str(rows), "-o", str(out), *asked[3:], "--raw", *at)
    assert uma_told(*batch, "-m", "tiny+two").returncode == 0
    body = json.loads(out.read_text())["response"]["body"]
    assert (body["model"], body["choices"][0]["text"]) == ("tiny+two", completed(server, model="tiny+two"))
    assert uma_told(*batch, "-m", "tiny+one").returncode == 2
    wet = ("decide", "--yes", "Is it wet?", *at, "-m")
    assert len({uma_told(*wet, name, stdin=b"It rains.\n").stdout for name in NAMES}) == len(NAMES)
    assert "embeddings with a LoRA adapter" in uma_told("embed", "It rains.", "-m", "tiny+one", *at).stderr


def test_a_chat_begins_with_an_adapter_and_goes_on_with_another(server: HttpServer, tmp_path: Path) -> None:
    options = "--max-tokens", "4", "--ignore-eos", "--socket", str(server.process.socket)
    command = uma_command("chat", "tiny+one", *options)
    with Terminal(command, clean_environ(HOME=str(tmp_path)), columns=100, cwd=str(tmp_path)) as terminal:
        terminal.wait_for("tiny+one answers; /model NAME has tiny+one, tiny+two")
        terminal.type("Hi\r/model +three\r/model +TWO\r/model\rHi\r")
        terminal.wait_for("model not found; there are tiny, tiny+one, tiny+two")
        terminal.wait_for("The next question goes to tiny+two.")
        terminal.wait_for("answers   tiny+two")
        terminal.wait_for("first after", 2)
