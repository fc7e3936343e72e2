"""The ways to a server of several models beside its own HTTP: commands, a gateway, users with bounds of their own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
import trio
from http_server import HttpServer, running_gateway
from several import GREEDY, NAMES, PROMPT
from stranger import needs_root, told_to_a_stranger

from harness import PATIENCE_SEC, RunInProcessText, ServerProcess, running_server, short_directory, until
from uma.client import connect
from uma.client.several import models_there
from uma.errors import BadRequest
from uma.llm import LLM
from uma.types import Request, SamplingParams


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    """All that are here: nothing says which model."""
    with short_directory() as place:
        place.chmod(0o755)
        (place / "uma.toml").write_text("n_ctx = 512\n")
        flags = ("--config", str(place / "uma.toml"), "--socket-mode", "666")
        with running_server(place / "s", *flags, **only(folder, place)) as server:
            yield server


def only(folder: Path, place: Path) -> dict[str, str]:
    """Variables with which no other models are here."""
    return {"UMA_MODELS": str(folder), "HF_HOME": str(place), "HOME": str(place)}


def states(server: ServerProcess) -> dict[str, str]:
    with server.connect() as raw:
        raw.send({"type": "models"})
        return {each["name"]: each["state"] for each in raw.expect("models")["models"]}


def test_without_a_model_all_that_are_here_are_served_and_a_session_need_not_load_one(server: ServerProcess) -> None:
    with server.connect() as raw:
        hello = raw.hello(versions=["1.2"], loads=False)
        assert hello["models"] == [*NAMES, "builtin"]
        raw.send({"type": "models", "id": "m"})
        assert {each["state"] for each in raw.expect("models")["models"]} == {"unloaded"}


def test_the_built_in_model_is_served_by_one_process_where_there_is_no_other(socket_dir: Path) -> None:
    (socket_dir / "uma.toml").write_text("")
    none = only(socket_dir, socket_dir)
    with running_server(socket_dir / "s", "--config", str(socket_dir / "uma.toml"), **none) as server:
        with server.connect() as raw:
            hello = raw.hello(versions=["1.2"], loads=False)
        assert (hello["model"]["is_builtin"], "models" in hello) == (True, False)


def test_commands_and_the_library_ask_for_the_model_that_is_named_and_load_no_other(
    server: ServerProcess, texts: Mapping[str, str], uma_told: RunInProcessText
) -> None:
    at = ("--socket", str(server.socket))
    flags = (*at, "--raw", "--temperature", "0", "--max-tokens", "8", "--ignore-eos")
    done = uma_told("generate", "-m", "Beta", *flags, PROMPT)
    assert (done.returncode, done.stdout.strip()) == (0, texts["beta"].strip())
    for command in (("ps", "--json"), ("top", "--json"), ("doctor",)):
        uma_told(*command, *at)
    with LLM("beta", socket=server.socket) as llm:
        assert llm.generate(PROMPT, SamplingParams(**GREEDY))[0].outputs[0].text == texts["beta"]
    assert states(server) == {"alpha": "unloaded", "beta": "loaded", "gamma-one": "unloaded", "builtin": "unloaded"}


async def test_a_session_keeps_a_model_for_ever_where_its_user_can_pin(server: ServerProcess) -> None:
    async with connect(server.socket, loads=False) as client:
        assert (await client.load("beta", float("inf"))).leaves_in_sec is None
        assert {each.name for each in await client.models(reload=True)} == {*NAMES, "builtin"}
        assert (await client.load("beta", 600)).leaves_in_sec is not None


@needs_root
@pytest.mark.parametrize("keep_sec", [-1, 1e18])
def test_another_user_keeps_no_model_for_ever(server: ServerProcess, keep_sec: float) -> None:
    told = told_to_a_stranger(server.socket, {"type": "load", "id": "q", "model": "beta", "keep_sec": keep_sec})
    assert (told["code"], "only the user that the server runs as" in told["message"]) == ("E_PROTO_BAD_REQUEST", True)


async def test_a_model_leaves_behind_a_request_that_failed_or_was_hung_up(server: ServerProcess) -> None:
    async with connect(server.socket, loads=False) as client, models_there(server.socket, client) as models:
        with pytest.raises(ZeroDivisionError):
            async with models.using("gamma-one", keep_sec=0):
                raise ZeroDivisionError
        await trio.to_thread.run_sync(until, lambda: states(server)["gamma-one"], "unloaded".__eq__)
        with trio.CancelScope() as scope:
            async with models.using("gamma-one", keep_sec=0):
                scope.cancel()
                await trio.sleep_forever()
        await trio.to_thread.run_sync(until, lambda: states(server)["gamma-one"], "unloaded".__eq__)


@pytest.fixture(scope="module")
def gateway(server: ServerProcess) -> Iterator[HttpServer]:
    """HTTP in front of it, in a process of its own."""
    with running_gateway(server) as gateway:
        yield gateway


def statuses(gateway: HttpServer) -> dict[str, str]:
    return {each["id"]: each["status"]["value"] for each in gateway.ask("GET", "/v1/models").json["data"]}


def test_a_gateway_has_all_models_by_name(gateway: HttpServer, texts: Mapping[str, str]) -> None:
    assert set(statuses(gateway)) == {*NAMES, "builtin"}
    for name in ("gamma-one", "beta"):
        answer = gateway.ask("POST", "/v1/completions", {"model": name, "prompt": PROMPT, **GREEDY})
        assert (answer.status, answer.json["choices"][0]["text"], answer.json["model"]) == (200, texts[name], name)
    assert gateway.ask("POST", "/v1/completions", {"model": "gama-one", "prompt": "a"}).status == 404
    loaded = until(
        lambda: {each["name"]: each for each in gateway.ask("GET", "/api/ps").json["models"]},
        lambda found: {"beta", "gamma-one"} <= set(found),
    )
    for path in ("/metrics", "/metrics?model=Beta"):
        assert '\numa_tokens_generated_total{model="beta"} ' in gateway.ask("GET", path).body.decode()
    assert loaded["gamma-one"]["context_length"] == 512
    assert loaded["gamma-one"]["size"] > 2**20
    streamed = gateway.ask("POST", "/v1/completions", {"model": "gam", "prompt": PROMPT, "stream": True, **GREEDY})
    assert b"[DONE]" in streamed.body


def test_a_gateway_s_live_view_has_each_model_s_own_figures(gateway: HttpServer) -> None:
    for name, times in (("gamma-one", 1), ("beta", 2)):
        for _ in range(times):
            assert gateway.ask("POST", "/v1/completions", {"model": name, "prompt": PROMPT, **GREEDY}).status == 200
    text = gateway.ask("GET", "/metrics").body.decode()
    counts = {name: int(count) for name, count in re.findall(r'^uma_ttft_ms_count{model="(.+)"} (\d+)$', text, re.M)}
    with httpx.stream("GET", f"{gateway.url}/ui/api/live", timeout=PATIENCE_SEC) as stream:
        frame = json.loads(next(line for line in stream.iter_lines() if line.startswith('data: {"at_ms"'))[6:])
    told = {model["name"]: model["figures"]["first_token_ms"]["count"] for model in frame["models"]}
    assert told == {name: counts[name] for name in ("beta", "gamma-one")}


def test_a_gateway_loads_and_unloads_and_pulls_nothing(gateway: HttpServer, server: ServerProcess) -> None:
    gone = {"model": "gamma-one", "prompt": PROMPT, "keep_alive": 0, "stream": False, "options": {"num_predict": 2}}
    assert gateway.ask("POST", "/api/generate", gone).status == 200
    until(lambda: states(server)["gamma-one"], lambda state: state == "unloaded")
    until(lambda: statuses(gateway)["gamma-one"], lambda status: status == "unloaded")
    assert gateway.ask("POST", "/models/load", {"model": "gamma-one"}).json == {"success": True}
    until(lambda: statuses(gateway)["gamma-one"], lambda status: status == "loaded")
    assert gateway.ask("POST", "/models/unload", {"model": "gamma-one"}).json == {"success": True}
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
        refused = gateway.ask(method, path, {"model": "beta"})
        assert (refused.status, "a gateway" in refused.json["error"]) == (400, True)


@pytest.fixture(scope="module")
def bounded(folder: Path) -> Iterator[ServerProcess]:
    """A server on which this process's user has one of the models."""
    with short_directory() as place:
        (place / "users.toml").write_text(f'[{os.getuid()}]\nmodels = ["beta"]\n')
        flags = ("--models", "all", "--n-ctx", "512", "--socket-users", str(place / "users.toml"))
        with running_server(place / "s", *flags, **only(folder, place)) as server:
            yield server


async def test_a_session_of_before_a_model_was_known_ends_when_another_takes_its_place(bounded: ServerProcess) -> None:
    async with connect(bounded.socket, loads=False) as client, models_there(bounded.socket, client) as models:
        await models.card("beta", loads=False)  # nothing has loaded it yet
        assert (await models.card("beta")).model.path
        with trio.fail_after(PATIENCE_SEC):
            while (await client.metrics())["active_sessions"] != 2:  # this one, and that with the model
                pass  # each question is a whole round trip


async def test_a_user_that_is_bound_to_models_knows_no_others(bounded: ServerProcess) -> None:
    async with connect(bounded.socket, loads=False) as client:
        assert client.info.models == ("beta",)
        assert [each.name for each in await client.models()] == ["beta"]
        for ask_of_alpha in (client.load, client.pin, client.unload):
            with pytest.raises(BadRequest, match="may use beta"):
                await ask_of_alpha("alpha")
        request = Request("a", prompt=PROMPT, sampling=SamplingParams(**GREEDY), model="alpha")
        with pytest.raises(BadRequest, match="may use beta"):
            async with client.generate(request) as stream:
                await anext(stream)
    with pytest.raises(BadRequest, match="may use beta"):
        async with connect(bounded.socket, model="alpha"):
            pass
    async with connect(bounded.socket) as client:
        assert client.info.model.name == "beta"
