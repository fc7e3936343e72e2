"""Several models at the edges of one server: other servers' clients, names that are pulled, keys, files, `uma ps`."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import ollama
import pytest
from http_clients import ollama_of, openai_of
from http_server import Answered, HttpServer, running_http
from hub_server import running_hub

from harness import RunInProcessText, run_to_end, short_directory, uma_command, until
from models import write_encoder, write_model
from uma.cli import main
from uma.client import connect

REPOSITORY = "someone/Tiny-8B-GGUF"
PULLED = f"hf.co/{REPOSITORY}:Q4_K_M"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
SETTINGS = """
[models.all]

[models.alpha]
n_ctx = 256
temperature = 0.25
alias = ["first", "Erste"]

[models."beta.v1"]
idle_unload = 50
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder with two models that chat, one that embeds, and one that ranks."""
    with short_directory() as path:
        folder = path / "models"
        folder.mkdir()
        write_encoder(folder / "a-encoder.gguf", pooling="cls")
        write_encoder(folder / "a-ranker.gguf", pooling="rank")
        for seed, name in enumerate(("alpha", "beta.v1")):
            write_model(folder / f"{name}.gguf", seed=seed)
        (path / "uma.toml").write_text(SETTINGS, encoding="utf-8")
        yield path


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[HttpServer]:
    """All of them in one server, which pulls from a hub of this machine."""
    data = write_model(place / "pulled.gguf", seed=7).read_bytes()
    with running_hub({REPOSITORY: {"Tiny-8B-Q4_K_M.gguf": data}}) as hub:
        home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(place), "HOME": str(place), "NO_PROXY": "*"}
        models = {"UMA_MODELS": str(place / "models"), **home}
        flags = ("--config", str(place / "uma.toml"), "--http-jobs", str(place / "jobs"))
        with running_http(place, *flags, **models) as server:
            yield server


def complete(server: HttpServer, model: str, **fields: Any) -> Answered:
    return server.ask("POST", "/v1/completions", {"prompt": "Once", "model": model, **GREEDY, **fields})


def listed(server: HttpServer) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in server.ask("GET", "/models").json["data"]}


def status(server: HttpServer, model: str) -> str:
    return str(listed(server)[model]["status"]["value"])


def children(pid: int) -> list[int]:
    """Those that run a program of their own: while it is only begun, the parent waits for it with all its threads."""

    def command(of: int) -> bytes:
        with suppress(FileNotFoundError, ProcessLookupError):  # it can have ended since
            return Path(f"/proc/{of}/cmdline").read_bytes()
        return b""

    found = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [child for child in found if command(child) not in (b"", command(pid))]


def test_ollamas_client_pulls_lists_shows_generates_with_two_models_and_deletes(server: HttpServer) -> None:
    with ollama_of(server) as client:
        before = {each.model for each in client.list().models}
        told = list(client.pull(PULLED, stream=True))
        assert told[0].status == "pulling manifest"
        assert told[-1].status == "success"
        whole = next(each for each in reversed(told) if each.digest)
        assert whole.completed == whole.total != 0
        assert {each.model for each in client.list().models} - before == {"Tiny-8B-Q4_K_M"}
        assert client.pull(PULLED).status == "success"  # it is here
        details = client.show(PULLED).details
        assert details is not None
        assert details.format == "gguf"
        options = {"num_predict": 6, "temperature": 0}
        texts = {name: client.generate(name, "Once", raw=True, options=options).response for name in (PULLED, "alpha")}
        assert texts[PULLED] != texts["alpha"]
        assert client.chat("alpha", [{"role": "user", "content": "Hi"}], options=options).done
        assert client.generate("alpha", "Once", options=options, keep_alive="1h30m").done
        (resident,) = [each for each in client.ps().models if each.model == "alpha"]
        assert resident.expires_at is not None
        assert timedelta(hours=1) < resident.expires_at - datetime.now(UTC) <= timedelta(hours=1.5)
        assert client.generate(PULLED, keep_alive=0).done_reason == "unload"
        until(lambda: status(server, "Tiny-8B-Q4_K_M"), lambda now: now == "unloaded")
        assert client.delete(PULLED).status == "success"
        assert {each.model for each in client.list().models} == before
        with pytest.raises(ollama.ResponseError, match="model not found"):
            client.generate(PULLED, "Once")


def test_openais_client_lists_and_chats_with_two_models(server: HttpServer) -> None:
    with openai_of(server) as client:
        assert {"alpha", "beta.v1"} < {each.id for each in client.models.list()}
        assert client.models.retrieve("alpha").id == "alpha"
        said = {
            name: client.completions.create(model=name, prompt="Once", max_tokens=6, temperature=0).choices[0].text
            for name in ("alpha", "beta.v1")
        }
        assert said["alpha"] != said["beta.v1"]
        turns: Any = [{"role": "user", "content": "Hi"}]
        chunks = list(client.chat.completions.create(model="beta.v1", messages=turns, max_tokens=6, stream=True))
        assert {each.model for each in chunks} == {"beta.v1"}


def test_a_rag_client_with_two_names_works_with_nothing_configured(server: HttpServer) -> None:
    texts = ["a fox", "a forest", "an owl"]
    with openai_of(server) as client:
        with ThreadPoolExecutor() as pool:
            vectors = pool.submit(client.embeddings.create, model="a-encoder", input=texts)
            turns: Any = [{"role": "user", "content": "Where is the fox?"}]
            answer = pool.submit(client.chat.completions.create, model="alpha", messages=turns, max_tokens=6)
            ranked = pool.submit(
                server.ask, "POST", "/v1/rerank", {"model": "a-ranker", "query": "fox", "documents": texts}
            )
        assert [len(each.embedding) for each in vectors.result().data] == [64] * 3
        assert answer.result().model == "alpha"
        assert len(ranked.result().json["results"]) == 3
        # The default is one that generates, whatever else is first by its name.
        assert client.completions.create(model="gpt-4o", prompt="Once", max_tokens=2).usage is not None
    assert server.ask("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 2}).json["model"] == "alpha"


def test_llama_servers_router_loads_and_unloads(server: HttpServer) -> None:
    if status(server, "beta.v1") == "loaded":
        assert server.ask("POST", "/models/unload", {"model": "beta.v1"}).json == {"success": True}
    until(lambda: status(server, "beta.v1"), lambda now: now == "unloaded")
    assert server.ask("POST", "/models/unload", {"model": "beta.v1"}).status == 400
    unloaded = server.ask("POST", "/v1/completions?autoload=false", {"model": "beta.v1", "prompt": "Once"})
    assert (unloaded.status, "autoload is false" in unloaded.json["error"]["message"]) == (400, True)
    assert server.ask("POST", "/models/load", {"model": "beta.v1"}).json == {"success": True}
    until(lambda: status(server, "beta.v1"), lambda now: now == "loaded")
    assert server.ask("POST", "/models/load", {"model": "beta.v1"}).status == 400
    assert server.ask("POST", "/models/load", {"model": "omega"}).status == 404
    assert server.ask("GET", "/props").json["role"] == "router"
    entry = listed(server)["beta.v1"]
    assert entry["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}


def test_a_stream_is_told_how_far_its_model_is_loaded_and_who_does_not_wait_when_to_come_again(
    server: HttpServer,
) -> None:
    server.ask("POST", "/models/unload", {"model": "alpha"})
    until(lambda: status(server, "alpha"), lambda now: now == "unloaded")
    before = set(children(server.process.pid))
    with server.connect() as raw, server.connect() as ollamas:
        body = {"model": "alpha", "prompt": "Once", "stream": True, **GREEDY}
        raw.send("POST", "/v1/completions", body)
        (loading,) = until(lambda: set(children(server.process.pid)) - before, bool)
        os.kill(loading, signal.SIGSTOP)
        ollamas.send("POST", "/api/generate", {"model": "alpha", "prompt": "Once", "format": {"type": "objekt"}})
        assert raw.head()[0] == 200
        chunks = raw.chunks()
        assert next(chunks).startswith(b": alpha: loading, ")
        with server.connect() as gone:  # which is no fault of the server (`running_http`)
            gone.send("POST", "/v1/completions", body)
            assert gone.head()[0] == 200
        refused = server.ask("POST", "/v1/completions?autoload=false", body)
        assert (refused.status, "retry-after" in refused.headers) == (503, True)
        head = ollamas.head()  # begun, so that what is wrong is told in it
        os.kill(loading, signal.SIGCONT)
        rest = b"".join(chunks)
        assert head[0] == 200
        *_, failed = b"".join(ollamas.chunks()).split(b"\n")[:-1]
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b'"text"' in rest
    assert json.loads(failed)["error"].startswith("format: ")


def test_a_model_has_settings_of_its_own_and_further_names(server: HttpServer) -> None:
    assert complete(server, "first").json["model"] == "first"
    entry = listed(server)["alpha"]
    assert (entry["max_model_len"], entry["aliases"]) == (256, ["first", "Erste"])
    assert complete(server, "beta.v1").status == 200
    assert listed(server)["beta.v1"]["max_model_len"] == 512
    drawn = {
        name: server.ask("GET", f"/props?model={name}").json["default_generation_settings"]["params"]["temperature"]
        for name in ("alpha", "beta.v1")
    }
    assert drawn == {"alpha": 0.25, "beta.v1": 0.8}


@pytest.mark.parametrize(
    ("method", "path", "body", "said"),
    [
        ("POST", "/api/copy", {"source": "alpha", "destination": "gamma"}, "destination: a copy would only be another"),
        ("DELETE", "/api/delete", {"model": "builtin"}, "model: the built-in model cannot be removed"),
        ("DELETE", "/api/delete", {}, "model: the name of the model is missing"),
        ("POST", "/api/pull", {"model": "llama3.2"}, "model: llama3.2: is no repository of the hub"),
        (
            "POST",
            "/api/generate",
            {"model": "alpha", "prompt": "a", "keep_alive": "5 x"},
            "keep_alive: expected seconds",
        ),
    ],
)
def test_what_cannot_be_done_with_models_is_refused_by_name(
    server: HttpServer, method: str, path: str, body: Mapping[str, Any], said: str
) -> None:
    answer = server.ask(method, path, body)
    assert (answer.status, answer.json["error"][: len(said)]) == (400, said)


def test_what_the_hub_does_not_have_is_told_in_the_stream_or_as_a_status(server: HttpServer) -> None:
    asked = {"model": f"{REPOSITORY}:Q9_K"}
    *_, last = server.ask("POST", "/api/pull", asked).body.splitlines()
    assert "has no Q9_K" in json.loads(last)["error"]
    whole = server.ask("POST", "/api/pull", {**asked, "stream": False})
    assert (whole.status, "has no Q9_K" in whole.json["error"]) == (404, True)


def test_rows_of_a_batch_name_any_model(
    server: HttpServer, place: Path, tmp_path: Path, uma_told: RunInProcessText
) -> None:
    names = ("alpha", "beta.v1", "omega", "alpha")
    url: Any = "/v1/completions"
    rows = [
        {"custom_id": str(at), "method": "POST", "url": url, "body": {"prompt": "Once", "model": name, **GREEDY}}
        for at, name in enumerate(names)
    ]
    data = "".join(json.dumps(row) + "\n" for row in rows)
    with openai_of(server) as client:
        file = client.files.create(file=("rows.jsonl", data.encode()), purpose="batch")
        begun = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
        done = until(lambda: client.batches.retrieve(begun.id), lambda now: now.status == "completed")
        assert done.output_file_id is not None
        over_http = {
            row["custom_id"]: row["response"]["body"]["choices"][0]["text"]
            for row in map(json.loads, client.files.content(done.output_file_id).text.splitlines())
        }
    (tmp_path / "in.jsonl").write_text(data)
    out = tmp_path / "out.jsonl"
    ended = uma_told("batch", str(tmp_path / "in.jsonl"), "-o", str(out), "--socket", str(server.process.socket))
    results = {each["custom_id"]: each["response"] for each in map(json.loads, out.read_text().splitlines())}
    assert ended.returncode == 1, ended.stderr
    assert results.pop("2")["status_code"] == 404
    assert {id: each["body"]["choices"][0]["text"] for id, each in results.items()} == over_http
    assert over_http["0"] == over_http["3"] != over_http["1"]


def test_ps_tells_each_model_what_it_takes_and_when_it_leaves(server: HttpServer, uma_told: RunInProcessText) -> None:
    assert complete(server, "alpha").status == complete(server, "beta.v1").status == 200
    socket = ("--socket", str(server.process.socket))
    (told,) = json.loads(uma_told("ps", "--json", *socket).stdout)
    models = {each["name"]: each for each in told["models"]}
    assert models["beta.v1"]["state"] == "loaded"
    assert 2**20 < models["beta.v1"]["taken_bytes"] <= models["beta.v1"]["memory_bytes"]
    assert 0 < models["beta.v1"]["leaves_in_sec"] <= 3_000
    assert [models["builtin"][each] for each in ("state", "running", "taken_bytes")] == ["unloaded", 0, 0]
    table = uma_told("ps", *socket).stdout
    (line,) = [each for each in table.splitlines() if each.startswith("beta.v1")]
    assert "loaded" in line
    assert "in 0:" in line


def new_key(name: str, file: Path, *flags: str) -> str:
    with redirect_stdout(StringIO()) as told, redirect_stderr(StringIO()):
        assert main(["key", "new", name, "--keys", str(file), *flags]) == 0
    return told.getvalue().split()[0]


async def test_processes_of_models_are_neither_sessions_nor_servers_in_the_metrics(server: HttpServer) -> None:
    for name in ("alpha", "beta.v1"):
        assert complete(server, name).status == 200
    text = server.ask("GET", "/metrics").body.decode()
    assert "uma_active_sessions 0\n" in text
    helps = dict(line.removeprefix("# HELP uma_").split(" ", 1) for line in text.splitlines() if "# HELP uma_" in line)
    assert not {name for name, help in helps.items() if not help.endswith(".")}
    async with connect(server.process.socket) as client:
        before = (await client.metrics())["sessions_total"]
        async with connect(server.process.socket, model="alpha"):
            metrics = await client.metrics()
        assert (metrics["active_sessions"], metrics["sessions_total"]) == (2, before + 1)


def test_the_log_of_a_server_that_ends_counts_the_answers_that_still_run(place: Path) -> None:
    models = {"UMA_MODELS": str(place / "models")}
    with (
        short_directory() as own,
        running_http(own, "--models", "all", **models) as server,
        server.connect() as raw,
    ):
        assert run_to_end(*uma_command("pause", "--socket", str(server.process.socket))).returncode == 0
        raw.send("POST", "/v1/completions", {"model": "alpha", "prompt": "a", "max_tokens": 2})
        until(server.process.metrics, lambda found: found["queued_requests"] + found["active_sequences"] == 1)
        server.process.signal(signal.SIGTERM)
        server.process.log.wait_for("event=http.draining requests=1")


@pytest.fixture(scope="module")
def keyed(place: Path) -> Iterator[tuple[HttpServer, dict[str, str]]]:
    """A server of the same models, and keys: one for all, one for `beta.v1` alone, one that can manage models."""
    with short_directory() as own:
        file = own / "keys.toml"
        more = {"all": (), "bound": ("--models", "beta"), "manager": ("--manage-models",)}
        keys = {name: new_key(name, file, *flags) for name, flags in more.items()}
        models = {"UMA_MODELS": str(place / "models"), "HF_HOME": str(own), "HOME": str(own)}
        with running_http(own, "--models", "all", "--http-keys", str(file), **models) as server:
            yield server, keys


def test_a_key_that_is_bound_to_models_knows_no_others(keyed: tuple[HttpServer, dict[str, str]]) -> None:
    server, keys = keyed
    bound = {"authorization": f"Bearer {keys['bound']}"}
    assert [each["id"] for each in server.ask("GET", "/v1/models", **bound).json["data"]] == ["beta.v1"]
    assert [each["name"] for each in server.ask("GET", "/api/tags", **bound).json["models"]] == ["beta.v1"]
    own = server.ask("POST", "/v1/completions", {"prompt": "Once", **GREEDY}, **bound)
    assert (own.status, own.json["model"]) == (200, "beta.v1")
    for name in ("alpha", "omega"):
        other = server.ask("POST", "/v1/completions", {"prompt": "Once", "model": name}, **bound)
        assert other.status == 403
        assert other.json["error"]["message"] == f"model: bound may use beta.v1 (models), and not {name}"
    assert server.ask("GET", "/v1/models/alpha", **bound).status == 403
    assert server.ask("POST", "/models/load", {"model": "alpha"}, **bound).status == 403
    page = {"messages": [{"role": "user", "content": "Hi"}], "model": "alpha"}
    assert server.ask("POST", "/ui/api/answers", page, **bound).status == 403
    info = server.ask("GET", "/ui/api/info", **bound).json
    assert ([each["name"] for each in info["models"]], info["model"]["called"]) == (["beta.v1"], "beta.v1")


MESSAGES = [{"role": "user", "content": "Hi"}]
FORBIDDEN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 100}),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 3, "max_tokens": 20}),
    ("/v1/completions", {"prompt": "a", "priority": 1}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 100}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 100}),
    ("/completion", {"prompt": "a", "n_predict": 100}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 100}),
    ("/api/chat", {"messages": MESSAGES, "options": {"num_predict": 100}}),
    ("/api/generate", {"prompt": "a", "options": {"num_predict": 100}}),
    ("/v1/embeddings", {"input": "a", "priority": 1}),
    ("/rerank", {"model": "a-ranker", "query": "a", "documents": ["b"], "priority": 1}),
    ("/ui/api/answers", {"messages": MESSAGES, "sampling": {"max_tokens": 100}}),
]
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "priority": 5}),
    ("/v1/chat/completions", {"messages": [{"role": "usr", "content": "a"}]}),
    ("/v1/chat/completions", {"messages": MESSAGES, "response_format": {"type": "xml"}}),
    ("/v1/completions", {"prompt": "a", "temperature": -1}),
    ("/v1/responses", {"input": "a", "top_p": 2}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 0}),
    ("/completion", {"prompt": "a", "n_predict": "many"}),
    ("/api/chat", {"messages": MESSAGES, "options": {"top_k": "many"}}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}),
    ("/rerank", {"query": "a", "documents": "b"}),
    ("/v1/decisions", {"input": "a", "questions": "b"}),
]


def test_what_no_model_would_answer_is_refused_before_one_is_loaded(place: Path) -> None:
    with short_directory() as own:
        file = own / "keys.toml"
        bearer = {"authorization": f"Bearer {new_key('small', file)}"}
        with file.open("a", encoding="utf-8") as end:
            end.write("max_tokens = 40\nmax_priority = 0\n")
        models = {"UMA_MODELS": str(place / "models"), "HOME": str(own)}
        with running_http(own, "--models", "all", "--http-keys", str(file), **models) as server:
            for status_of, asked in ((403, FORBIDDEN), (400, WRONG)):
                for path, body in asked:
                    answer = server.ask("POST", path, {"model": "alpha", **body}, **bearer)
                    assert answer.status == status_of, (path, body, answer.body)
            assert "event=model.asked" not in server.process.log.text
            assert "event=model.loading" not in server.process.log.text
            picture = {"type": "image_url", "image_url": {"url": ""}}
            past = [{"role": "user", "content": [picture]}, {"role": "assistant", "content": "a"}, *MESSAGES]
            fine = {"model": "alpha", "messages": past, "max_tokens": 2, "reasoning_effort": "low"}
            assert server.ask("POST", "/v1/chat/completions", fine, **bearer).status == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/api/pull", {"model": PULLED}),
        ("DELETE", "/api/delete", {"model": "alpha"}),
        ("POST", "/models/unload", {"model": "beta.v1"}),
        ("POST", "/api/generate", {"model": "beta.v1", "keep_alive": 0}),
    ],
)
def test_only_a_right_lets_a_key_manage_models(
    keyed: tuple[HttpServer, dict[str, str]], method: str, path: str, body: dict[str, Any]
) -> None:
    server, keys = keyed
    assert complete_with(server, keys["all"], "beta.v1").status == 200
    refused = server.ask(method, path, body, authorization=f"Bearer {keys['all']}")
    assert (refused.status, "manage_models = true" in str(refused.json["error"])) == (403, True)


@pytest.mark.parametrize("kept", [-1, "25h", 1e18])
def test_a_key_without_the_right_is_answered_and_told_that_its_model_may_leave(
    keyed: tuple[HttpServer, dict[str, str]], kept: float | str
) -> None:
    server, keys = keyed
    stay = {"model": "beta.v1", "prompt": "a", "keep_alive": kept, "stream": False, "options": {"num_predict": 2}}
    answered = server.ask("POST", "/api/generate", stay, authorization=f"Bearer {keys['all']}")
    assert (answered.status, answered.headers["x-uma-ignored"]) == (200, "keep_alive")


def complete_with(server: HttpServer, key: str, model: str) -> Answered:
    body = {"prompt": "Once", "model": model, **GREEDY}
    return server.ask("POST", "/v1/completions", body, authorization=f"Bearer {key}")


def test_a_request_that_waits_for_its_model_is_shown_to_its_own_key_explained_and_ended(
    keyed: tuple[HttpServer, dict[str, str]],
) -> None:
    server, keys = keyed
    own, other, manager = ({"authorization": f"Bearer {keys[name]}"} for name in ("all", "bound", "manager"))
    server.ask("POST", "/models/unload", {"model": "beta.v1"}, **manager)
    until(lambda: children(server.process.pid), lambda found: not found)
    body = {"model": "beta.v1", "input": "Once", "stream": True, "max_output_tokens": 4}
    with server.connect() as raw, server.connect() as ended:
        raw.send("POST", "/v1/responses", body, **own)
        (loading,) = until(lambda: children(server.process.pid), bool)
        server.process.log.wait_for(f"event=model.loading model=beta.v1 pid={loading}")  # its start is over
        os.kill(loading, signal.SIGSTOP)
        (begun, headers), chunks = raw.head(), raw.chunks()
        assert (begun, next(chunks).startswith(b": beta.v1: loading, ")) == (200, True)
        id = headers["x-request-id"]
        (entry,) = server.ask("GET", "/v1/requests", **own).json["data"]
        assert (entry["id"], entry["model"], entry["waits_for"]) == (id, "beta.v1", "loading")
        assert list(server.ask("GET", f"/v1/requests/{id}", **own).json["spent_ms"]) == ["loading"]
        assert server.ask("GET", "/v1/requests", **other).json["data"] == []
        assert server.ask("GET", f"/v1/requests/{id}", **other).status == 404
        ended.send("POST", "/v1/completions", {"model": "beta.v1", "prompt": "Once"}, **own)
        waits = until(lambda: server.ask("GET", "/v1/requests", **own).json["data"], lambda data: len(data) == 2)
        (second,) = {each["id"] for each in waits} - {id}
        assert server.ask("DELETE", f"/v1/requests/{second}", **own).status == 200
        assert ended.head()[0] == 410
        os.kill(loading, signal.SIGCONT)
        assert b"event: response.incomplete" in b"".join(chunks)


def test_a_key_with_the_right_unloads_and_pins(keyed: tuple[HttpServer, dict[str, str]]) -> None:
    server, keys = keyed
    manager = {"authorization": f"Bearer {keys['manager']}"}
    stay = {"model": "beta.v1", "prompt": "a", "keep_alive": -1, "stream": False, "options": {"num_predict": 2}}
    assert server.ask("POST", "/api/generate", stay, **manager).status == 200
    (resident,) = server.ask("GET", "/api/ps", **manager).json["models"]
    assert resident["expires_at"].startswith("9999")
    assert server.ask("POST", "/models/unload", {"model": "beta.v1"}, **manager).json == {"success": True}


def test_a_wish_of_ollama_s_is_ignored_by_name_where_another_s_dialect_has_it(server: HttpServer) -> None:
    assert complete(server, "alpha", keep_alive=-1).headers["x-uma-ignored"] == "keep_alive"


def test_a_proxys_requests_without_a_key_manage_nothing(server: HttpServer) -> None:
    refused = server.ask("DELETE", "/api/delete", {"model": "alpha"}, x_forwarded_for="203.0.113.9")
    assert refused.status == 403
    assert "only the user that the server runs as can delete models" in refused.json["error"]


def test_a_file_that_is_broken_since_the_folders_were_looked_at_is_told_as_any_broken_one() -> None:
    with short_directory() as path:
        folder = path / "models"
        folder.mkdir()
        write_model(folder / "alpha.gguf")
        with running_http(path, "--models", "all", UMA_MODELS=str(folder)) as server:
            assert server.ask("POST", "/api/show", {"model": "builtin"}).status == 200
            os.truncate(folder / "alpha.gguf", 2_000)
            for ask in ("/v1/completions", "/api/show"):
                answer = server.ask("POST", ask, {"model": "alpha", "prompt": "Once", "max_tokens": 2})
                assert (answer.status, "alpha.gguf" in str(answer.json)) == (422, True), answer.body
