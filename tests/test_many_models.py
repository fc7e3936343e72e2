"""Several models in one server: which one answers, what is told of them, and what the end of one means for others."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import trio
import trio.testing
from http_server import STREAM_ERRORS, Answered, HttpServer, ServeModels, new_key, running_http
from projectors import write_projector
from several import GREEDY, NAMES, PROMPT, children, taken_bytes
from starlette.types import ASGIApp, Message

from harness import (
    ONE_THREAD,
    PATIENCE_SEC,
    Raw,
    RunInProcessText,
    ask,
    clean_environ,
    run_to_end,
    short_directory,
    uma_command,
    until,
)
from models import CHATML, write_large_cells, write_model
from uma.client import connect, dialled
from uma.config import RuntimeConfig
from uma.errors import BadRequest, Ended, InternalError
from uma.figures import MB
from uma.http.app import build_app
from uma.http.body_budget import BodyBudget
from uma.http.exchange import Exchange
from uma.http.gateway import Gateway
from uma.http.generation import HEARTBEAT_SEC
from uma.net.quota import ClientAccount
from uma.supervisor import open_models
from uma.supervisor.model import STANDSTILL_SEC, LoadWait, ModelLoad
from uma.types import Activity, Finished, LoadProgress, LoadState, Request, SamplingParams, Source, Token


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[HttpServer]:
    """All of them in one server."""
    with short_directory() as place, running_http(place, "--models", ",".join(NAMES), UMA_MODELS=str(folder)) as server:
        yield server


def complete(server: HttpServer, model: str | None, **fields: Any) -> Answered:
    named = {} if model is None else {"model": model}
    return server.ask("POST", "/v1/completions", {"prompt": PROMPT, **GREEDY, **named, **fields})


def text_of(answer: Answered) -> str:
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["text"])


def statuses(server: HttpServer) -> dict[str, str]:
    listed = server.ask("GET", "/v1/models").json["data"]
    return {each["id"]: each["status"]["value"] for each in listed}


def greeted(raw: Raw, **fields: Any) -> dict[str, Any]:
    """The answer to a hello of version 1.2, once the model is loaded."""
    raw.send({"type": "hello", "versions": ["1.2"], **fields})
    while (event := raw.next())["event"] == "loading":
        pass
    assert event["event"] == "hello", event
    return event


def test_a_list_of_models_loads_none_of_them(serve_models: ServeModels) -> None:
    server = serve_models()
    assert statuses(server) == dict.fromkeys((*NAMES, "builtin"), "unloaded")
    assert [each["name"] for each in server.ask("GET", "/api/tags").json["models"]] == [*NAMES, "builtin"]
    assert server.ask("GET", "/api/ps").json == {"models": []}
    assert server.ask("GET", "/health").status == 200
    assert children(server.process.pid) == set()


def test_what_a_model_is_can_be_read_without_a_load_and_is_so_after_it(serve_models: ServeModels) -> None:
    server = serve_models("--models", "all", "--temperature", "0.3")
    shown = server.ask("POST", "/api/show", {"model": "beta"})
    assert shown.status == 200, shown.body
    assert "temperature                    0.3" in shown.json["parameters"]
    assert shown.headers.get("x-uma-model") is None
    assert server.ask("POST", "/api/show", {"name": "gamma"}).headers["x-uma-model"] == "gamma-one"
    assert server.ask("POST", "/api/show", {"model": "nothing"}).status == 404
    assert set(statuses(server).values()) == {"unloaded"}
    complete(server, "beta")
    assert server.ask("POST", "/api/show", {"model": "beta"}).json == shown.json


def test_each_request_is_answered_by_the_model_it_names(server: HttpServer, texts: Mapping[str, str]) -> None:
    with ThreadPoolExecutor() as pool:
        asked = [NAMES[at % len(NAMES)] for at in range(12)]
        answers = list(pool.map(lambda name: complete(server, name), asked))
    assert [text_of(each) for each in answers] == [texts[name] for name in asked]
    assert [each.json["model"] for each in answers] == asked
    assert statuses(server) == dict.fromkeys(NAMES, "loaded")


@pytest.mark.parametrize("name", ["gamma", "GAMMA-ONE", "gamma-one.gguf", "gamma-one:latest"])
def test_a_name_is_taken_as_far_as_it_is_needed(server: HttpServer, texts: Mapping[str, str], name: str) -> None:
    answer = complete(server, name)
    assert (text_of(answer), answer.headers["x-uma-model"]) == (texts["gamma-one"], "gamma-one")
    assert "x-uma-model" not in complete(server, "gamma-one").headers


def test_a_name_that_is_not_here_is_answered_with_the_nearest(server: HttpServer) -> None:
    answer = complete(server, "gama-one")
    assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")
    assert "did you mean gamma-one?" in answer.json["error"]["message"]


def test_no_name_and_another_companys_are_the_first_models_and_the_answer_says_so(
    server: HttpServer, texts: Mapping[str, str]
) -> None:
    unnamed, other = complete(server, None), complete(server, "gpt-4o")
    assert (text_of(unnamed), unnamed.json["model"]) == (texts["alpha"], "alpha")
    assert (text_of(other), other.headers["x-uma-model"]) == (texts["alpha"], "alpha")


def test_the_first_request_after_the_default_model_s_file_is_gone_has_the_next_one(tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        write_model(tmp_path / f"{name}.gguf")
    variables = {"UMA_MODELS": str(tmp_path), "HF_HOME": str(tmp_path), "HOME": str(tmp_path)}
    with short_directory() as place, running_http(place, "--models", "all", **variables) as server:
        assert complete(server, None).json["model"] == "alpha"
        (tmp_path / "alpha.gguf").unlink()
        other = complete(server, "gpt-4o")
        assert (other.status, other.headers["x-uma-model"]) == (200, "beta")


@pytest.mark.parametrize(
    ("path", "body", "at"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], **GREEDY}, ("model",)),
        ("/api/generate", {"prompt": "a", "stream": False, "options": {"num_predict": 4}}, ("model",)),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}, ("model",)),
        ("/v1/embeddings", {"input": "a"}, ("model",)),
        ("/v1/responses", {"input": "a", "max_output_tokens": 4}, ("model",)),
    ],
)
def test_every_dialect_has_the_name(server: HttpServer, path: str, body: dict[str, Any], at: tuple[str, ...]) -> None:
    answer = server.ask("POST", path, {**body, "model": "beta"})
    assert answer.status == 200, answer.body
    assert answer.json["model"] == "beta"
    assert server.ask("POST", path, {**body, "model": "nothing"}).status == 404


def test_a_message_of_a_model_among_several_opens_with_its_prompt_s_tokens(server: HttpServer) -> None:
    body = {"model": "beta", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2, "stream": True}
    said = server.ask("POST", "/v1/messages", body).events
    opened, last = said[0]["message"]["usage"], said[-2]["usage"]
    assert opened["input_tokens"] == last["input_tokens"] > 0


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_model_whose_file_is_gone_is_unknown_and_in_no_list_and_the_next_one_is_default_loaded_or_not(
    tmp_path: Path, is_loaded: bool
) -> None:
    for name in ("alpha", "beta"):
        write_model(tmp_path / f"{name}.gguf", chat_template=CHATML)
    settings = tmp_path / "uma.toml"
    settings.write_text('model = "alpha"\n[models.all]\n[models.alpha]\nalias = ["quick"]\n', encoding="utf-8")
    variables = {"UMA_MODELS": str(tmp_path), "HF_HOME": str(tmp_path), "HOME": str(tmp_path)}
    with short_directory() as place, running_http(place, "--config", str(settings), **variables) as server:
        if is_loaded:
            assert complete(server, "quick").status == 200
        (tmp_path / "alpha.gguf").unlink()
        gone = complete(server, "quick")
        assert (gone.status, gone.json["error"]["code"]) == (404, "model_not_found")
        server.process.log.wait_for("model.default_changed model=beta before=alpha")
        assert complete(server, None).json["model"] == "beta"
        (tmp_path / "beta.gguf").unlink()  # no request tells of it
        server.process.log.wait_for("model.default_changed model=builtin before=beta")
        assert [each["id"] for each in server.ask("GET", "/v1/models").json["data"]] == ["builtin"]
        write_model(tmp_path / "alpha.gguf", chat_template=CHATML)
        server.process.log.wait_for("model.default_changed model=alpha before=builtin")
        assert (complete(server, None).json["model"], complete(server, "quick").status) == ("alpha", 200)


def test_a_file_that_comes_is_in_every_list_and_its_header_names_it_as_these_do(tmp_path: Path) -> None:
    def of_openai(server: HttpServer) -> set[str]:
        return {listed["id"] for listed in server.ask("GET", "/v1/models").json["data"]}

    def of_ollama(server: HttpServer) -> set[str]:
        return {listed["name"] for listed in server.ask("GET", "/api/tags").json["models"]}

    (tmp_path / "below").mkdir()
    variables = {"UMA_MODELS": str(tmp_path), "HF_HOME": str(tmp_path), "HOME": str(tmp_path)}
    with short_directory() as place, running_http(place, "--models", "all", **variables) as server:
        write_model(tmp_path / "alpha.gguf")
        until(lambda: of_openai(server), {"alpha", "builtin"}.__eq__)
        write_model(tmp_path / "below" / "bêta 100%.gguf")
        until(lambda: of_ollama(server), lambda names: any("bêta" in name for name in names))
        answered_by = unquote(complete(server, "bêta").headers["x-uma-model"])
        assert answered_by in of_openai(server)
        assert "x-uma-model" not in complete(server, answered_by).headers


def test_the_time_that_ollama_s_answers_call_the_load_s_is_in_their_whole_time(serve_models: ServeModels) -> None:
    server = serve_models()
    chat = {"messages": [{"role": "user", "content": "a"}], "options": {"num_predict": 4}}
    bodies: dict[str, dict[str, Any]] = {
        "generate": {"prompt": "a", "options": {"num_predict": 4}},
        "chat": chat,
        "embed": {"input": "a"},
    }
    for name, (path, body) in zip(NAMES, bodies.items(), strict=True):
        answers = [server.ask("POST", f"/api/{path}", {"model": name, "stream": False, **body}).json for _ in range(2)]
        assert answers[0]["total_duration"] > answers[0]["load_duration"] > 0
        assert answers[1]["total_duration"] > answers[1]["load_duration"] == 0


def test_a_query_names_the_model_where_there_is_no_body_and_a_get_loads_none(server: HttpServer) -> None:
    server.ask("POST", "/models/unload", {"model": "beta"})
    until(lambda: statuses(server)["beta"], lambda status: status == "unloaded")
    for path in ("/props", "/slots", "/metrics"):
        refused = server.ask("GET", f"{path}?model=beta")
        assert (refused.status, "beta is not loaded" in refused.json["error"]["message"]) == (404, True)
    assert statuses(server)["beta"] == "unloaded"
    text_of(complete(server, "beta"))
    assert server.ask("GET", "/props?model=beta").json["model"]["path"].endswith("beta.gguf")
    assert server.ask("GET", "/v1/models/beta").json["id"] == "beta"
    assert server.ask("GET", "/v1/models/nothing").status == 404


def test_pages_of_other_sites_cannot_even_ask_by_a_picture_s_address(server: HttpServer) -> None:
    elsewhere = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"}
    for path in ("/v1/models?reload=1", "/props?model=beta", "/"):
        assert server.ask("GET", path, **elsewhere).status == 403
    assert server.ask("GET", "/", **elsewhere | {"sec_fetch_mode": "navigate"}).status == 200
    assert server.ask("GET", "/props", sec_fetch_site="same-origin").status == 200


SAMPLE = re.compile(r'^(\w+)(?:\{model="([^"]*)"(?:,\w+="([^"]*)")?\})? (\S+)$', re.MULTILINE)


def samples(server: HttpServer, path: str = "/metrics") -> dict[tuple[str, str, str], float]:
    """The samples of `/metrics`, by their name, model and other label: upper bound, state or reason."""
    return {(*found[:3],): float(found[3]) for found in SAMPLE.findall(server.ask("GET", path).body.decode())}


def of_one(every: Mapping[tuple[str, str, str], float], model: str) -> dict[tuple[str, str], float]:
    return {(name, bound): value for (name, label, bound), value in every.items() if label == model}


def test_the_metrics_tell_the_models_apart_and_their_sums_are_the_server_s(serve_models: ServeModels) -> None:
    server = serve_models()
    assert not {label for _, label, _ in samples(server)} - {""}
    for name, times in (("alpha", 1), ("beta", 3)):
        for _ in range(times):
            text_of(complete(server, name.upper()))
    every, tokens = samples(server), GREEDY["max_tokens"]
    alpha, beta = of_one(every, "alpha"), of_one(every, "beta")
    assert {label for _, label, _ in every} == {"", "alpha", "beta"}
    for told, times in ((alpha, 1), (beta, 3)):
        assert told["uma_tokens_generated_total", ""] == times * tokens
        assert told["uma_ttft_ms_count", ""] == told["uma_ttft_ms_bucket", "+Inf"] == times
        assert told["uma_decode_ms_ewma", ""] > 0
        assert told["uma_cache_hit_rate", ""] == pytest.approx((times - 1) / times, abs=1e-4)
    assert alpha.keys() == beta.keys()
    assert samples(server, "/metrics?model=BETA")["uma_tokens_generated_total", "beta", ""] == 3 * tokens
    snapshot = server.process.metrics()
    assert snapshot["tokens_generated_total"] == 4 * tokens
    assert snapshot["ttft_ms_buckets"]["inf"] == 4
    assert snapshot["kv_cells_total"] == sum(of["kv_cells_total"] for of in snapshot["models"].values())
    assert "decode_ms_ewma" not in snapshot  # which has no sum
    assert snapshot["models"]["beta"]["decode_ms_ewma"] > 0


def test_a_model_s_name_is_escaped_in_a_label(tmp_path: Path) -> None:
    write_model(path := tmp_path / 'a"b\\c.gguf')
    with short_directory() as place, running_http(place, "--model", str(path)) as server:
        assert '\numa_requests_total{model="a\\"b\\\\c"} 0\n' in server.ask("GET", "/metrics").body.decode()


def test_when_a_model_leaves_its_counters_stay_and_its_gauges_go(server: HttpServer) -> None:
    text_of(complete(server, "beta"))
    before, summed = samples(server), server.process.metrics()
    assert before["uma_uptime_sec", "", ""] > 0
    assert before["uma_kv_cells_used", "beta", ""] > 0
    server.ask("POST", "/models/unload", {"model": "beta"})
    until(lambda: samples(server), lambda now: ("uma_kv_cells_used", "beta", "") not in now)

    def still_grow() -> None:
        text = server.ask("GET", "/metrics").body.decode()
        families = re.findall(r"^# TYPE (\w+) (?:counter|histogram)$", text, re.MULTILINE)
        grow = {*families, *(f"{family}{end}" for family in families for end in ("_bucket", "_count", "_sum"))}
        after, sums = samples(server), server.process.metrics()
        kept = {key: value for key, value in before.items() if key[0] in grow}
        assert not {key: (value, after.get(key)) for key, value in kept.items() if after.get(key, -1) < value}
        numbers = {name: value for name, value in summed.items() if isinstance(value, int | float)}
        assert not {name for name in grow if name[4:] in numbers and sums[name[4:]] < numbers[name[4:]]}

    still_grow()
    assert {name for name, _ in of_one(samples(server), "beta")} >= {"uma_requests_total", "uma_ttft_ms_sum"}
    text_of(complete(server, "beta"))
    still_grow()
    assert samples(server)["uma_requests_total", "beta", ""] == before["uma_requests_total", "beta", ""] + 1


def test_a_process_that_stands_still_holds_up_nothing_else_and_is_loaded_anew(
    serve_models: ServeModels, texts: Mapping[str, str]
) -> None:
    server = serve_models()
    text_of(complete(server, "beta"))
    (beta,) = children(server.process.pid)
    text_of(complete(server, "alpha"))
    with server.process.connect() as raw, ThreadPoolExecutor() as pool:
        raw.hello(model="alpha")
        os.kill(beta, signal.SIGSTOP)
        stuck = pool.submit(complete, server, "beta")
        raw.send(ask("a", max_tokens=200))
        raw.until_token("a")
        for path in ("/health", "/metrics", "/slots", "/v1/requests", "/v1/models"):
            assert server.ask("GET", path).status == 200
            assert server.ask("GET", "/health").status == 200
        assert not stuck.done()  # all of these waited a second at most
        figures = pool.submit(server.ask, "GET", "/metrics")  # they wait for the process's, and health does not
        assert server.ask("GET", "/health").status == 200
        assert not figures.done()
        assert text_of(complete(server, "alpha")) == texts["alpha"]
        assert raw.last_of("a")["event"] == "eos"
        failed = stuck.result()
    assert (failed.status, "the process of beta has ended" in failed.json["error"]["message"]) == (503, True)
    server.process.log.wait_for("timeout: it did not answer for 10 s")
    assert text_of(complete(server, "beta")) == texts["beta"]
    assert not is_running(beta)


@pytest.mark.parametrize("during", ["scan", "load and unload"])
def test_health_is_answered_at_once_whatever_is_done_with_models(serve_models: ServeModels, during: str) -> None:
    server = serve_models()
    text_of(complete(server, "alpha"))

    def work() -> None:
        for number in range(2):
            if during == "scan":
                assert complete(server, f"nothing-{number}").status == 404
                assert server.ask("GET", "/v1/models?reload=1").status == 200
            else:
                assert complete(server, "beta").status == 200
                for is_pinned in (True, False):
                    raw_pin.send({"type": "pin", "model": "beta", "pinned": is_pinned})
                    assert raw_pin.receive() is not None
                server.ask("POST", "/models/unload", {"model": "beta"})

    with server.process.connect() as raw, server.process.connect() as raw_pin, ThreadPoolExecutor(1) as pool:
        raw.hello(model="alpha")
        raw_pin.hello(versions=["1.2"])
        raw.send(ask("a", max_tokens=200))
        working, longest = pool.submit(work), 0.0
        while not working.done():
            began = time.monotonic()
            assert server.ask("GET", "/health").status == 200
            longest = max(longest, time.monotonic() - began)
        working.result()
        assert raw.last_of("a")["event"] == "eos"
    assert longest < 10 * HEALTH_SEC


HEALTH_SEC = 0.2
"""Within it `/health` is answered, on a machine that has nothing else to do."""


def test_a_session_can_ask_any_model_and_its_hello_names_one(server: HttpServer, texts: Mapping[str, str]) -> None:
    with server.process.connect() as raw:
        hello = greeted(raw)
        assert (hello["models"], hello["model"]["path"].rpartition("/")[2]) == (list(NAMES), "alpha.gguf")
        assert hello["limits"]["max_frame_bytes"] == 2**20  # none of them sees or hears
        raw.send(*(ask(name, prompt=PROMPT, stream=False, model=name, **_without_max()) for name in NAMES))
        found: dict[str, str] = {}
        while len(found) < len(NAMES):
            if (event := raw.next())["event"] == "eos":
                found[event["id"]] = event["text"]
        assert found == texts
        raw.send(ask("x", model="nothing"))
        assert raw.expect("error")["code"] == "E_PROTO_UNKNOWN_MODEL"
    with server.process.connect() as raw:
        assert greeted(raw, model="beta")["model"]["path"].endswith("beta.gguf")
        raw.send(ask(prompt=PROMPT, stream=False, temperature=0))
        assert raw.last_of("a")["text"] == texts["beta"]


def _without_max() -> dict[str, Any]:
    return {name: value for name, value in GREEDY.items() if name not in ("max_tokens", "ignore_eos")}


def test_sessions_can_use_one_id_at_once(server: HttpServer, texts: Mapping[str, str]) -> None:
    with server.process.connect() as one, server.process.connect() as two:
        one.hello()
        two.hello()
        for raw in (one, two):
            raw.send(ask("same", prompt=PROMPT, model="beta", temperature=0, max_tokens=400, metadata={"n": 1}))
        one.until_token("same")
        two.until_token("same")
        counts = [raw.last_of("same")["usage"] for raw in (one, two)]
        assert [(each["prompt_tokens"], each["completion_tokens"]) for each in counts] == [(len(PROMPT) + 1, 400)] * 2


async def test_each_client_s_requests_are_its_own_also_behind_several_models(server: HttpServer) -> None:
    long, path = SamplingParams(max_tokens=15_000, ignore_eos=True), server.process.socket
    async with connect(path, model="beta") as client, connect(path, model="alpha") as onlooker:
        async with client.generate(Request("one", prompt="x", sampling=long)) as one:
            await anext(one)
            (running,) = (await onlooker.activity()).running
            assert f"socket · pid {os.getpid()}" in running.origin
            assert await onlooker.end_request(running.number)
            with pytest.raises(Ended):
                async for _ in one:
                    pass
        assert not await onlooker.end_request(running.number)
        assert (await onlooker.explain("one")).origin == running.origin
        trace = json.loads(await onlooker.trace(0.05))
        assert {"alpha", "beta"} <= {each["args"]["name"] for each in trace["traceEvents"] if each["ph"] == "M"}


async def test_a_session_loads_unloads_and_pins_models_and_lists_them(serve_models: ServeModels) -> None:
    server = serve_models("--models", ",".join(NAMES))
    path, told = server.process.socket, list[LoadState]()
    async with dialled(path) as client:
        assert [(each.name, each.state) for each in await client.models()] == [(name, "unloaded") for name in NAMES]
    async with dialled(path) as client:
        loaded = await client.load("beta", 600, told.append)
        assert (loaded.name, loaded.state, loaded.is_pinned) == ("beta", "loaded", False)
        assert 0 < (loaded.leaves_in_sec or 0) <= 600
        assert told
    async with connect(path, model="beta") as client:
        listed = {each.name: each for each in await client.models()}
        assert [each.state for each in listed.values()] == ["unloaded", "loaded", "unloaded"]
        assert listed["beta"].memory_bytes > 2**20
        assert (await client.pin("beta")).is_pinned
        with pytest.raises(BadRequest, match="beta is pinned"):
            await client.unload(None)
        assert not (await client.pin("beta", is_pinned=False)).is_pinned
        await client.unload("beta")
        with pytest.raises(BadRequest, match="did you mean gamma-one"):
            await client.load("gama-one")
    until(lambda: statuses(server)["beta"], lambda status: status == "unloaded")


def test_commands_load_unload_and_pin_a_model(serve_models: ServeModels) -> None:
    server = serve_models("--models", ",".join(NAMES))

    def said(*arguments: str) -> tuple[int, str]:
        done = run_to_end(*uma_command(*arguments, "--socket", str(server.process.socket)))
        return done.returncode, done.stdout

    assert said("load", "beta") == (0, "beta is loaded; `uma pin beta` keeps it loaded\n")
    assert statuses(server)["beta"] == "loaded"
    assert said("load", "beta") == (0, "nothing changes: beta was loaded already\n")
    assert said("unload", "beta") == (0, "beta leaves\n")
    assert said("unload", "alpha") == (0, "nothing changes: alpha was not loaded\n")
    assert (said("load", "gama-one")[0], said("unload", "gama-one")[0]) == (2, 2)
    assert said("pin", "gamma") == (0, "gamma-one is loaded and stays; `uma unpin gamma-one` undoes that\n")
    assert said("unload", "gamma")[0] == 2  # it is pinned
    assert said("unpin", "gamma") == (0, "gamma-one can leave again\n")
    assert said("unpin", "gamma") == (0, "nothing changes: gamma-one was not pinned\n")
    server.ask("POST", "/models/unload", {"model": "gamma-one"})
    server.process.log.wait_for(r"event=model\.asked model=gamma-one to=unload by=http")
    asked = re.findall(r"event=model\.asked model=(\S+) to=(\w+) by=(\S+)", server.process.log.text)
    assert asked[0] == ("beta", "load", "socket")
    by_socket = [("gamma-one", to, "socket") for to in ("pin", "unpin", "unpin")]
    assert asked[-4:] == [*by_socket, ("gamma-one", "unload", "http")]
    assert len(re.findall(r"event=model\.loading model=\S+ pid=\d+ by=socket", server.process.log.text)) == 2
    assert server.process.log.text.count("event=server.ready") == 1  # of its models' processes none is a server


def test_a_pin_that_was_not_kept_is_told_until_it_is_taken_back(serve_models: ServeModels, tmp_path: Path) -> None:
    settings = tmp_path / "uma.toml"
    settings.write_text("[models.alpha]\npin = true\ncache_ram_mb = 1000000\n")
    server = serve_models("--models", "all", "--config", str(settings))
    server.process.log.wait_for("event=model.not_pinned")

    def told(*command: str) -> bool:
        done = run_to_end(*uma_command(*command, "--socket", str(server.process.socket)))
        return "alpha is not pinned, as its settings ask: alpha does not fit" in " ".join(done.stdout.split())

    assert told("ps")
    assert told("doctor")
    told("unpin", "alpha")
    assert not told("ps")


def test_a_command_on_a_named_socket_has_the_server_s_answer_for_every_name(folder: Path) -> None:
    with short_directory() as place:
        models = place / "models"
        models.mkdir()
        shutil.copy(folder / "alpha.gguf", models)
        environ = {"UMA_MODELS": str(models)}
        with running_http(place, "--models", "all", **environ) as server:
            shutil.copy(folder / "beta.gguf", models)
            (models / "broken.gguf").write_text("this is no model")

            def run(*arguments: str) -> tuple[int, str]:
                at = ("--socket", str(server.process.socket))
                done = run_to_end(*uma_command(*arguments, *at), environ=clean_environ(**environ))
                return done.returncode, done.stderr

            code, said = run("generate", "-m", "beta", "hi", "--max-tokens", "2")
            assert (code, "loading that here" in said, statuses(server)["beta"]) == (0, False, "loaded")
            for command in (("generate", "-m", "broken", "hi"), ("chat", "broken"), ("pin", "broken")):
                code, said = run(*command)
                assert (code, "broken.gguf: is not a GGUF file" in said) == (2, True), said
            code, said = run("generate", "-m", str(folder / "gamma-one.gguf"), "hi")
            assert (code, "--local loads it here" in said) == (2, True), said


def test_a_client_waits_until_its_model_is_loaded_and_is_told_so(
    serve_models: ServeModels, texts: Mapping[str, str]
) -> None:
    told: list[LoadState] = []

    async def main(path: Path) -> str:
        async with connect(path, model="beta", on_loading=told.append) as client:
            request = Request("a", prompt=PROMPT, sampling=SamplingParams(**GREEDY), stream=False, model="gamma-one")
            async with client.generate(request) as stream:
                (finished,) = [event async for event in stream]
            assert client.info.model.name == "beta"
            assert isinstance(finished, Finished)
            return str(finished.text)

    server = serve_models()
    assert trio.run(main, server.process.socket) == texts["gamma-one"]
    assert told and all(each.words.startswith("loading, ") for each in told)
    with server.process.connect() as raw:
        greeted(raw, model="beta")
        raw.send(ask("w", model="alpha"))
        assert raw.expect("loading")["id"] == "w"
        assert raw.last_of("w")["event"] == "eos"


def test_one_server_of_one_model_refuses_the_name_of_another(folder: Path) -> None:
    one = ("--model", str(folder / "alpha.gguf"))
    with short_directory() as place, running_http(place, *one) as server, server.process.connect() as raw:
        assert raw.hello(versions=["1.2"]).get("models") is None
        raw.send(ask("a", model="beta"), ask("b", model="Alpha"))
        assert raw.last_of("a")["code"] == "E_PROTO_UNKNOWN_MODEL"
        assert raw.last_of("b")["event"] == "eos"


def test_a_killed_process_ends_its_own_requests_alone_and_comes_back(
    serve_models: ServeModels, texts: Mapping[str, str]
) -> None:
    server = serve_models()
    text_of(complete(server, "beta"))
    (beta,) = children(server.process.pid)
    with server.process.connect() as raw, server.process.connect() as other:
        other.hello(model="alpha")  # of version 1.0, which is not told that it waits
        raw.hello(model="beta")
        other.send(ask("o", max_tokens=100))
        raw.send(ask("r", max_tokens=400, metadata={"pad": "x" * 8000}))
        raw.until_token("r")
        body = {"model": "beta", "prompt": PROMPT, "stream": True, **GREEDY, "max_tokens": 16_000}
        with server.connect() as http:
            http.send("POST", "/v1/completions", body)
            assert http.head()[0] == 200
            pieces = http.chunks()
            assert b"choices" in next(pieces)
            os.kill(beta, signal.SIGKILL)
            *_, last = b"".join(pieces).decode().split("data: ")
        failed = json.loads(last)["error"]
        assert (failed["type"], failed["code"]) == ("server_error", "server_error")
        error = raw.last_of("r")
        assert (error["event"], error["code"]) == ("error", "E_RUNTIME_INTERNAL")
        assert "beta" in error["message"]
        assert other.last_of("o")["event"] == "eos"
    server.process.log.wait_for("event=model.ended model=beta")

    def doctor() -> str:
        return " ".join(run_to_end(*uma_command("doctor", "--socket", str(server.process.socket))).stdout.split())

    told = (
        "! server: beta: its process has ended by SIGKILL; the system does that where memory runs out; the next request"
    )
    assert told in doctor()
    assert text_of(complete(server, "beta")) == texts["beta"]
    assert "beta: its process" not in doctor()


@pytest.mark.parametrize("is_told", [False, True], ids=["unasked", "asked"])
def test_requests_that_end_with_a_killed_process_are_counted_as_failed_and_raise_the_alert(
    serve_models: ServeModels, *, is_told: bool
) -> None:
    alerts = Path(__file__).parent.parent / "docs" / "monitoring" / "alerts.yaml"
    _, watched, crashed, _ = re.findall(r"increase\((\w+)[\[{]", alerts.read_text(encoding="utf-8"))
    server = serve_models("--models", "beta", "--max-tokens", "20000", "--n-ctx", "32768")
    text_of(complete(server, "beta"))
    before, (beta,) = samples(server), children(server.process.pid)
    with server.connect() as raw:
        endless = {"model": "beta", "prompt": PROMPT, "max_tokens": 20_000, "ignore_eos": True, "stream": True}
        raw.send("POST", "/v1/completions", endless)
        status, headers = raw.head()
        assert status == 200
        id = headers["x-request-id"]
        if is_told:  # its process, of the request that runs
            assert samples(server)["uma_requests_total", "beta", ""] == before["uma_requests_total", "beta", ""] + 1
        os.kill(beta, signal.SIGKILL)
        *_, last = raw.chunks()
        assert b"the process of beta has ended" in last
        lost = server.ask("GET", f"/v1/requests/{id}")
        assert (lost.status, "the process of beta has ended" in str(lost.json)) == (410, True)
        told = run_to_end(*uma_command("explain", id, "--socket", str(server.process.socket)))
        assert "the process of beta has ended" in told.stderr
    server.process.log.wait_for("event=model.ended")
    after = samples(server)
    for name in (watched, "uma_requests_error_total", "uma_requests_total"):
        assert after[name, "beta", ""] == before[name, "beta", ""] + 1
    # Each is there at 0 before it grows, or nothing could tell that it has grown.
    assert before["uma_requests_error_total", "beta", ""] == before[crashed, "beta", "crashed"] == 0
    assert after[crashed, "beta", "crashed"] == after["uma_model_state", "beta", "unloaded"] == 1
    assert after["uma_model_memory_bytes", "beta", ""] == 0 < before["uma_model_memory_bytes", "beta", ""]
    assert text_of(complete(server, "beta"))
    assert samples(server)[watched, "beta", ""] == after[watched, "beta", ""]


async def test_a_request_of_a_process_that_ends_before_it_answers_is_worth_asking_again(
    serve_models: ServeModels, texts: Mapping[str, str]
) -> None:
    server = serve_models()
    text_of(complete(server, "beta"))
    (beta,) = children(server.process.pid)
    os.kill(beta, signal.SIGSTOP)  # as one that is ended and does not know it yet
    async with connect(server.process.socket, loads=False) as client:
        with server.connect() as raw:
            raw.send("POST", "/v1/completions", {"model": "beta", "prompt": PROMPT, **GREEDY})
            with trio.fail_after(PATIENCE_SEC):
                while not any(model.running for model in await client.models()):
                    pass  # each question is a whole round trip
            os.kill(beta, signal.SIGKILL)
            answer = await trio.to_thread.run_sync(raw.answer)
    assert (answer.status, answer.json["error"]["code"]) == (503, "service_unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert "the process of beta has ended" in answer.json["error"]["message"]
    assert text_of(complete(server, "beta")) == texts["beta"]


def test_children_end_with_a_server_that_is_killed(serve_models: ServeModels) -> None:
    server = serve_models()
    text_of(complete(server, "alpha"))
    text_of(complete(server, "beta"))
    every = children(server.process.pid)
    assert len(every) == 2
    server.process.signal(signal.SIGKILL)
    server.process.wait()
    until(lambda: [pid for pid in every if is_running(pid)], lambda left: not left)


def test_the_last_line_of_the_log_is_the_end_of_a_server_and_its_models(serve_models: ServeModels) -> None:
    server = serve_models()
    text_of(complete(server, "alpha"))
    server.process.signal(signal.SIGTERM)
    assert server.process.wait() == 0
    events = re.findall(r"event=(\S+)", server.process.log.join())
    assert (events[-1], events.count("server.stopped")) == ("server.stopped", 1)
    assert "model.ended" in events


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("alpha,bet,omega",), "omega: model not found, and no such file"),
        (
            ("all", "--memory", "10"),
            r"\w+ does not fit, --memory \d+ is enough: .* have 10 MB \(--memory\), .*; it is the smallest",
        ),
    ],
)
def test_models_that_cannot_be_served_are_told_before_anything_is(
    folder: Path, flags: tuple[str, ...], told: str, uma_told: RunInProcessText
) -> None:
    done = uma_told("run", *ONE_THREAD, "--models", *flags, UMA_MODELS=str(folder))
    assert done.returncode == 2
    assert re.search(told, done.stderr)


MEMORY_MB = 168
"""Two of the models fit, with their processes; three do not while it is not known how much each takes."""


def taken_mb(server: HttpServer) -> float:
    """What the processes of all models take now."""
    return sum(map(taken_bytes, children(server.process.pid))) / MB


def test_models_that_do_not_fit_together_take_turns_and_no_request_is_lost(
    serve_models: ServeModels, texts: Mapping[str, str]
) -> None:
    server = serve_models("--models", ",".join(NAMES), "--memory", str(MEMORY_MB), "--n-ctx", "512")
    rng = random.Random(0)
    asked = [rng.choice(NAMES) for _ in range(18)]
    most = [0.0]
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(complete, server, name) for name in asked]
        while not all(each.done() for each in answers):
            most.append(taken_mb(server))
            wait(answers, timeout=0.2)
    assert [text_of(each.result()) for each in answers] == [texts[name] for name in asked]
    assert max(most) <= 1.05 * MEMORY_MB
    server.process.log.wait_for("event=model.ended")


def test_a_model_whose_context_no_memory_holds_evicts_no_other_and_is_refused_by_a_status_that_none_retries(
    serve_models: ServeModels, tmp_path: Path
) -> None:
    wide = write_large_cells(tmp_path / "wide.gguf", layers=32, kv_heads=8)
    server = serve_models("--models", f"alpha,{wide}", "--memory", "120")
    server.process.log.wait_for('event=model.too_large reason="wide does not fit, --memory ')
    assert complete(server, "alpha").status == 200
    for _ in range(2):
        refused = complete(server, "wide")
        assert (refused.status, refused.json["error"]["code"]) == (422, "model_unusable")
        assert "there is memory for" in refused.json["error"]["message"]
        server.process.log.wait_for(
            f"event=http.failed request={refused.headers['x-request-id']} .* model=wide client="
        )
    assert len(re.findall(r"event=(?:http\.request|request\.finished) .*model=alpha", server.process.log.text)) == 1
    assert "event=model.ended" not in server.process.log.text


def test_answers_and_lanes_of_bodies_count_in_the_queue_of_a_load(serve_models: ServeModels) -> None:
    server = serve_models("--models", ",".join(NAMES), "--max-sequences", "2", "--max-queue", "2")
    body = {"model": "alpha", "prompt": "Once", "n": 2, "max_tokens": 4}

    def waiting() -> list[dict[str, Any]]:
        return list(server.ask("GET", "/v1/requests").json["data"])

    with ExitStack() as stack:
        raws = [stack.enter_context(server.connect()) for _ in range(4)]
        raws[0].send("POST", "/v1/completions", body)
        server.process.log.wait_for("event=model.loading")
        (loading,) = children(server.process.pid)
        os.kill(loading, signal.SIGSTOP)
        stack.callback(os.kill, loading, signal.SIGCONT)
        for raw in raws[1:3]:
            raw.send("POST", "/v1/completions", body)
        until(waiting, lambda found: len(found) == 3)
        refused = complete(server, "alpha")  # another connection is another client: for it the queue is twice as long
        assert (refused.status, "6 requests wait for the load of alpha" in str(refused.json)) == (429, True)
        raws[3].send("POST", "/v1/completions", body | {"n": 1}, **{"x-uma-priority": "-1"})
        found = until(waiting, lambda found: len(found) == 4)
        assert sorted(each["priority"] for each in found) == [-1, 0, 0, 0]
        os.kill(loading, signal.SIGCONT)
        assert [raw.answer().status for raw in raws] == [200] * 4


def test_a_model_that_can_never_fit_is_told_at_the_start_and_refused_with_what_it_takes(
    serve_models: ServeModels, tmp_path: Path
) -> None:
    large = write_model(tmp_path / "large.gguf", feed_forward=40_000)
    server = serve_models("--models", f"alpha,{large}", "--memory", "100", "--n-ctx", "512")
    server.process.log.wait_for('event=model.too_large reason="large takes about 1')
    told = r"large takes about 1\d\d MB, and all models together can have 100 MB \(--memory\); --memory \d+ is enough"
    listed = {each["id"]: each for each in server.ask("GET", "/v1/models").json["data"]}
    assert [listed[name]["meta"]["fits"] for name in ("alpha", "large")] == [True, False]
    assert re.search(told, listed["large"]["status"]["message"])
    answer, loaded = complete(server, "large"), server.ask("POST", "/models/load", {"model": "large"})
    assert (answer.status, answer.json["error"]["code"], loaded.status) == (422, "model_unusable", 422)
    assert all(re.search(told, refused.json["error"]["message"]) for refused in (answer, loaded))


def test_a_load_beside_pinned_models_which_leave_no_memory_is_refused_as_a_request_is(
    serve_models: ServeModels, tmp_path: Path
) -> None:
    large = write_model(tmp_path / "large.gguf", feed_forward=40_000)
    server = serve_models("--models", f"alpha,{large}", "--memory", "180", "--n-ctx", "512")
    assert run_to_end(*uma_command("pin", "alpha", "--socket", str(server.process.socket))).returncode == 0
    loaded, answer = server.ask("POST", "/models/load", {"model": "large"}), complete(server, "large")
    assert (loaded.status, answer.status) == (503, 503)
    assert loaded.headers["retry-after"] == answer.headers["retry-after"]
    assert "beside alpha, which stays" in loaded.json["error"]["message"]
    assert loaded.json["error"]["message"] == answer.json["error"]["message"]


LARGE_ALONE = 'models = ["large"]'
"""Bounds of a key that can use one model."""


def test_a_key_of_one_model_does_not_learn_the_names_of_those_that_have_its_memory(tmp_path: Path) -> None:
    for name, size in (("alpha", 64), ("large", 40_000)):
        write_model(tmp_path / f"{name}.gguf", feed_forward=size)
    keys, names = tmp_path / "keys.toml", f"{tmp_path / 'alpha.gguf'},{tmp_path / 'large.gguf'}"
    bound = {"authorization": f"Bearer {new_key('guest', keys, LARGE_ALONE)}"}
    flags = ("--models", names, "--memory", "180", "--n-ctx", "512", "--http-keys", str(keys))
    with short_directory() as place, running_http(place, *flags) as server:
        assert run_to_end(*uma_command("pin", "alpha", "--socket", str(server.process.socket))).returncode == 0
        refused = server.ask("POST", "/v1/completions", {"prompt": PROMPT, "model": "large"}, **bound)
        assert refused.status == 503
        assert "large takes about 1" in refused.json["error"]["message"]
        assert "beside another model, which stays" in refused.json["error"]["message"]
        assert "alpha" not in refused.body.decode()


def test_models_that_never_fit_into_the_memory_of_all_are_told_by_run_doctor_and_the_list_of_models(
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "large.gguf", feed_forward=40_000)
    write_large_cells(tmp_path / "wide.gguf", layers=32, kv_heads=8)
    write_model(tmp_path / "little.gguf")
    flags = ("--models", "all", "--memory", "120")
    with short_directory() as place, running_http(place, *flags, UMA_MODELS=str(tmp_path)) as server:
        log = server.process.log
        log.wait_for('event=model.too_large reason="large does not fit, --memory [0-9]+ is enough: ')
        log.wait_for('event=model.too_large reason="wide does not fit, --memory [0-9]+ is enough: ')
        enough = re.search(r'reason="wide .* --memory (\d+) is enough: ', log.text)
        assert enough is not None
        assert "little" not in "".join(re.findall("model.too_large.*", log.text))
        environ = {"UMA_MODELS": str(tmp_path), "UMA_SOCKET": str(server.process.socket)}
        listed = run_to_end(*uma_command("models"), environ=environ)
        assert dict(re.findall(r"^(\w+) .* (yes|no) ", listed.stdout, re.MULTILINE)) == {
            "builtin": "yes",
            "large": "no",
            "little": "yes",
            "wide": "no",
        }
        assert f"fits: into 120 MB, what the models of the server on {server.process.socket} can have" in listed.stderr
        found = json.loads(run_to_end(*uma_command("doctor", "--json"), environ=environ).stdout)["checks"]
        (asked,) = (check["lacks"] for check in found if check["name"] == "server")
        assert set(re.findall("(large|wide) (?:takes about|does not fit)", asked)) == {"large", "wide"}
        plain = run_to_end(*uma_command("doctor"), environ=environ).stdout
        assert plain.startswith("UMA works here, but not with every model:\n! server: ")
        named = run_to_end(*uma_command("models", "--socket", str(server.process.socket)))
        assert "into 120 MB, what the models of the server" in named.stderr
    for memory, is_told in ((120, True), (int(enough[1]), False)):
        alone = environ | {"UMA_SOCKET": str(tmp_path / "none")}
        done = run_to_end(*uma_command("doctor", "--json", "--memory", str(memory)), environ=alone)
        too_large = [check["lacks"] for check in json.loads(done.stdout)["checks"] if check["name"] == "too large"]
        assert ("wide does not fit" in "".join(too_large)) == is_told


def test_an_idle_model_leaves_and_is_loaded_again_for_the_next_request(
    serve_models: ServeModels, texts: Mapping[str, str]
) -> None:
    server = serve_models("--models", ",".join(NAMES), "--idle-unload", "0.001")
    assert text_of(complete(server, "beta")) == texts["beta"]
    until(lambda: (children(server.process.pid), statuses(server)["beta"]), lambda now: now == (set(), "unloaded"))
    assert text_of(complete(server, "beta")) == texts["beta"]


def test_one_model_that_is_idle_gives_its_memory_back_and_is_loaded_by_the_next_request(
    serve_models: ServeModels, texts: Mapping[str, str]
) -> None:
    server = serve_models("--model", "alpha", "--alias", "chat", "--idle-unload", "60")
    pid, body = server.process.pid, {"model": "chat", "prompt": PROMPT, "stream": False}
    assert children(pid) == set(), "nothing is loaded before a request needs it"
    free = taken = 0
    for keep_alive in ("10m", 0):
        assert text_of(complete(server, "chat")) == texts["alpha"]
        assert server.ask("POST", "/api/generate", {**body, "keep_alive": keep_alive}).status == 200
        if keep_alive:
            (listed,) = server.ask("GET", "/api/ps").json["models"]
            assert datetime.fromisoformat(listed["expires_at"]).timestamp() > time.time() + 300
            (child,) = children(pid)
            free, taken = taken_bytes(pid), taken_bytes(child)
        else:
            until(lambda: children(pid), lambda now: now == set())
    assert taken_bytes(pid) - free <= taken / 20


def test_one_model_leaves_by_itself_after_so_many_minutes(serve_models: ServeModels, texts: Mapping[str, str]) -> None:
    server = serve_models("--model", "alpha", "--idle-unload", "0.001")
    for _ in range(2):
        assert text_of(complete(server, "alpha")) == texts["alpha"]
        until(lambda: children(server.process.pid), lambda now: now == set())


async def test_a_load_that_stands_still_is_ended_and_the_models_behind_it_have_their_turn(
    folder: Path, texts: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setenv("UMA_MODELS", str(folder))
    config = RuntimeConfig(models=",".join(NAMES), threads=1)
    failures: list[str] = []

    async def fail() -> None:
        with pytest.raises(InternalError) as failed:
            await text("alpha")
        failures.append(str(failed.value))

    async def text(model: str) -> str:
        request = Request(f"of {model}", prompt=PROMPT, sampling=SamplingParams(**GREEDY), model=model)
        async with models.generate(request) as stream:
            return "".join([event.text async for event in stream if isinstance(event, Token)])

    others = children(os.getpid())
    async with open_models(config, LoadProgress()) as models, trio.open_nursery() as nursery:
        nursery.start_soon(fail)
        while not (pids := children(os.getpid()) - others):
            await trio.lowlevel.checkpoint()
        os.kill(pids.pop(), signal.SIGSTOP)
        nursery.start_soon(fail)
        mock_clock.jump(STANDSTILL_SEC + 1)
        assert await text("beta") == texts["beta"]
        mock_clock.jump(1)  # of a load that has failed the next is tried a little later
        assert await text("alpha") == texts["alpha"]
    assert len(failures) == 2
    assert "no progress for 300 s" in failures[0]


async def post(app: ASGIApp, path: str, body: dict[str, Any], said: list[Message]) -> None:
    """Ask a server in this process; what it says comes into `said`."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    bodies = [json.dumps(body).encode()]

    async def hear() -> Message:
        if not bodies:
            await trio.sleep_forever()
        return {"type": "http.request", "body": bodies.pop()}

    async def write(message: Message) -> None:
        said.append(message)

    await app({"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}, hear, write)


@pytest.mark.parametrize(
    ("path", "asks", "begins"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}]}, b" "),
        ("/api/chat", {"prompt": "Hi"}, b"{"),  # which has no message: the model is loaded, and the answer has one line
        ("/api/generate", {"prompt": "Hi"}, b" "),
        ("/api/generate", {"messages": [{"role": "user", "content": "Hi"}]}, b"{"),
        ("/v1/audio/transcriptions", {"file_url": "data:audio/wav;base64,AA", "stream": True}, b": alpha: loading, "),
    ],
)
async def test_streams_and_no_other_answers_begin_while_their_model_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mock_clock: trio.testing.MockClock,
    path: str,
    asks: dict[str, Any],
    begins: bytes,
) -> None:
    monkeypatch.setenv("UMA_MODELS", str(tmp_path))
    write_model(tmp_path / "alpha.gguf")
    write_projector(tmp_path / "mmproj-alpha.gguf", hears="ultravox")
    config = RuntimeConfig(models="alpha", threads=1)
    said: list[Message] = []
    others = children(os.getpid())
    async with open_models(config, LoadProgress()) as models, trio.open_nursery() as nursery:
        app = build_app(Gateway.of(models, config))
        nursery.start_soon(post, app, path, {"model": "alpha", "options": {"num_predict": 2}, **asks}, said)
        while not (pids := children(os.getpid()) - others):
            await trio.lowlevel.checkpoint()
        os.kill(pid := pids.pop(), signal.SIGSTOP)
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(HEARTBEAT_SEC)
        await trio.testing.wait_all_tasks_blocked()
        os.kill(pid, signal.SIGCONT)
    start, first, *rest = said
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert first["body"].startswith(begins)
    assert {message["type"] for message in (first, *rest)} == {"http.response.body"}


async def test_what_waits_for_a_load_when_the_server_stops_is_told_so_in_its_own_dialect(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    mock_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "uma.http")
    monkeypatch.setenv("UMA_MODELS", str(folder))
    config = RuntimeConfig(models="alpha", threads=1)
    chat = {"model": "alpha", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    said: dict[tuple[str, bool], list[Message]] = {}

    async def ask(path: str, is_streamed: bool) -> None:
        answer = said[path, is_streamed] = []
        asked = {"input": "Hi"} if path == "/v1/responses" else {"prompt": "Hi", "input": "Hi"}
        await post(app, path, {**chat, **asked, "stream": is_streamed}, answer)

    others = children(os.getpid())
    async with open_models(config, LoadProgress()) as models:
        app = build_app(gateway := Gateway.of(models, config))
        async with trio.open_nursery() as nursery:
            for path in (*STREAM_ERRORS, "/v1/responses", "/v1/embeddings", "/tokenize"):
                nursery.start_soon(ask, path, False)
            for path in STREAM_ERRORS:
                nursery.start_soon(ask, path, True)
            while not (pids := children(os.getpid()) - others):
                await trio.lowlevel.checkpoint()
            os.kill(pid := pids.pop(), signal.SIGSTOP)
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(HEARTBEAT_SEC)
            await trio.testing.wait_all_tasks_blocked()
            gateway.abort()
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        os.kill(pid, signal.SIGCONT)
    for (path, is_streamed), (start, *parts) in said.items():
        last = parts[-1]["body"]
        assert b"the server is stopping" in last
        assert not parts[-1]["more_body"]
        assert start["status"] == (200 if is_streamed else 503)
        assert last.startswith(STREAM_ERRORS[path] if is_streamed else b"{")
    ends = [record.getMessage() for record in caplog.records if "event=http.request" in record.getMessage()]
    assert len(ends) == len(said)
    assert all(" code=E_RUNTIME_SHUTDOWN " in end for end in ends)


async def test_requests_of_other_keys_that_wait_for_a_load_are_told_apart_and_not_by_their_ids(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMA_MODELS", str(folder))
    config = RuntimeConfig(models="alpha", threads=1)
    bodies, parsing = BodyBudget.of(10**6), trio.CapacityLimiter(1)
    waits = tuple(LoadWait(id, "alpha").as_request(LoadState(0)) for id in "ab")
    async with open_models(config, LoadProgress()) as models:
        gateway, scope = Gateway.of(models, config), {"type": "http", "headers": []}
        http = Exchange(scope, trio.sleep_forever, trio.sleep, "id", 10**6, 10.0, parsing, bodies)  # type: ignore[arg-type]
        http.account = ClientAccount("ada")
        shown = {each.id for each in gateway.shown(Activity((), 0, 2, 0, waits), http).waiting}
    assert (len(shown), shown & {"a", "b"}) == (2, set())
    with gateway.ended_by_abort(http), gateway.waiting(http):
        assert gateway.is_of("id", http.owner)
    assert not gateway.is_of("id", http.owner)  # it asked for no answer, so it is none of the last ones


async def test_a_load_that_says_the_same_again_stands_still(mock_clock: trio.testing.MockClock) -> None:
    load = ModelLoad()
    due = []
    for percent in (0, 0, 7, 7):
        load.note(percent)
        due.append(load.patience.deadline - STANDSTILL_SEC)
        mock_clock.jump(10)
    assert due == [0, 0, 20, 20]


def test_a_model_that_comes_back_finds_its_prefixes(tmp_path: Path) -> None:
    write_model(tmp_path / "alpha.gguf", context_length=2_048)
    flags = ("--models", "alpha", "--idle-unload", "0.001", "--cache-dir", str(tmp_path / "kv"))
    prompt = [5 + at % 200 for at in range(1_000)]
    read = []
    with short_directory() as place, running_http(place, *flags, UMA_MODELS=str(tmp_path)) as server:
        for _ in range(2):
            usage = complete(server, "alpha", prompt=prompt).json["usage"]
            read.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
            until(lambda: statuses(server)["alpha"], lambda status: status == "unloaded")
    assert read[0] == 1_000
    assert read[1] <= 64


async def test_what_has_begun_with_a_model_that_is_to_leave_ends_with_it(
    folder: Path, texts: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setenv("UMA_MODELS", str(folder))
    config = RuntimeConfig(models=",".join(NAMES), memory=115, threads=1)
    found: dict[str, str] = {}

    async def ask_of(source: Source, model: str) -> None:
        request = Request(f"of {model}", prompt=PROMPT, sampling=SamplingParams(**GREEDY), model=model)
        async with source.generate(request) as stream:
            found[model] = "".join([event.text async for event in stream if isinstance(event, Token)])

    async with (
        open_models(config, LoadProgress()) as models,
        trio.open_nursery() as nursery,
        models.using("alpha") as source,
    ):
        nursery.start_soon(ask_of, models, "beta")  # which does not fit beside it
        mock_clock.jump(1_000)
        while models.find("alpha").info is not None:
            await trio.lowlevel.checkpoint()
        await ask_of(source, "alpha")
        assert list(found) == ["alpha"]
    assert found == {name: texts[name] for name in ("alpha", "beta")}
