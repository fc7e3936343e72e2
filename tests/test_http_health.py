"""A client of a server with one model cannot keep it from answering `/health`, from streaming, or from ending."""

from __future__ import annotations

import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, get_args

import attrs
import pytest
from adapters import write_adapter
from engine_world import config_for
from http_server import HostedHttp, HttpServer, RawHttp, hosted_http, running_http
from hub_server import running_hub
from stalled_disk import stalling

from harness import until
from uma.http.app import ENDPOINTS
from uma.http.page.endpoints import ENDPOINTS as PAGE_ENDPOINTS
from uma.llama.builtin import builtin_path
from uma.protocol.messages import Query

HEALTH_SEC, BUSY_FACTOR = 0.2, 5
"""Within how long `/health` answers on an idle machine, and how many times that a busy one can take."""
ENDLESS = {"prompt": "Once", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
LONG = "a long tale of foxes and of a wolf, " * 20_000
ROWS = [
    b'{"custom_id": "%d", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 1}}\n' % number
    for number in range(20_000)
]
QUERIES: tuple[dict[str, Any], ...] = (
    *({"type": name} for name in ("metrics", "activity", "models", "health")),
    {"type": "explain", "request": "a"},
    {"type": "trace", "seconds": 0.1},
    {"type": "end", "number": 1_000_000},
    {"type": "pause", "seconds": 0.2},
    {"type": "tokenize", "id": "a", "prompt": LONG},
    {"type": "embed", "id": "a", "texts": [LONG]},
    {"type": "rerank", "id": "a", "query": LONG[:9_000], "documents": [LONG[:9_000]] * 4},
    {"type": "decide", "id": "a", "messages": [{"role": "user", "content": LONG}], "questions": []},
    *({"type": name, "model": "none"} for name in ("load", "unload", "pin")),
)
"""What commands ask over the socket (`protocol.messages.Query`)."""
TURNS = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}
BODIES: dict[str, dict[str, Any]] = {
    path: body
    for body, paths in (
        (TURNS, "/v1/chat/completions /v1/messages /v1/messages/count_tokens /api/chat /apply-template"),
        (TURNS, "/v1/chat/completions/input_tokens"),
        ({"prompt": LONG}, "/v1/completions /completion /completions /api/generate"),
        ({"input": LONG}, "/v1/responses /v1/responses/input_tokens /v1/embeddings /api/embed"),
        ({"content": LONG}, "/tokenize /embedding /embeddings"),
        ({"tokens": [5] * 100_000}, "/detokenize"),
        ({"input": LONG, "questions": [{"type": "predicate", "instructions": "Are foxes in it?"}]}, "/v1/decisions"),
        ({"state": LONG, "questions": {"a": {"type": "noul", "instructions": "Are foxes in it?"}}}, "/v1/systemone"),
        ({"query": LONG[:9_000], "documents": [LONG[:9_000]] * 4}, "/rerank /reranking /v1/rerank /v1/reranking"),
        ({"text_1": LONG[:9_000], "text_2": [LONG[:9_000]] * 4}, "/score /v1/score"),
        ({"input_prefix": LONG, "input_suffix": LONG}, "/infill"),
        ({"messages": [{"role": "user", "content": LONG}], "sampling": {}}, "/ui/api/answers"),
        ({"model": "builtin"}, "/api/show /api/pull /models/load /models/unload"),
    )
    for path in paths.split()
}


@attrs.define
class Watch:
    """How long `/health` took at most, and the tokens of a stream beside it."""

    worst_sec: float = 0.0
    worst_beside: str = ""
    tokens: int = 0
    beside: str = ""
    is_over: bool = False
    faults: list[BaseException] = attrs.field(factory=list)

    def ask_health(self, server: HttpServer | HostedHttp) -> None:
        """Ask again and again."""
        with server.connect() as raw:
            while not self.is_over:
                began = time.monotonic()
                beside, status = self.beside, raw.ask("GET", "/health").status
                took = time.monotonic() - began
                if status != 200:
                    self.faults.append(AssertionError(f"/health answered {status} beside {beside}"))
                if took > self.worst_sec:
                    self.worst_sec, self.worst_beside = took, beside
                time.sleep(0.02)

    def read_stream(self, server: HttpServer | HostedHttp) -> None:
        """Count its tokens; one that has ended is begun again."""
        while not self.is_over:
            with server.connect() as raw:
                raw.send("POST", "/v1/completions", ENDLESS)
                raw.head()
                for _ in raw.chunks():
                    self.tokens += 1
                    if self.is_over:
                        return


@contextmanager
def watched(server: HttpServer | HostedHttp) -> Iterator[Watch]:
    """A block beside which `/health` is asked and a stream is read."""
    watch = Watch()

    def kept(work: Any) -> None:
        try:
            work(server)
        except BaseException as fault:  # noqa: BLE001  (raised below)
            watch.faults.append(fault)

    threads = [threading.Thread(target=kept, args=[work]) for work in (watch.ask_health, watch.read_stream)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: watch.tokens, bool)
        yield watch
    finally:
        watch.is_over = True
        for thread in threads:
            thread.join()
    assert not watch.faults
    assert watch.worst_sec < HEALTH_SEC * BUSY_FACTOR, watch.worst_beside


def upload(raw: RawHttp, data: bytes) -> str:
    form = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + data + b"\r\n--b--\r\n"
    )
    answered = raw.ask("POST", "/v1/files", form, content_type="multipart/form-data; boundary=b")
    return str(answered.json["id"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    folder = tmp_path_factory.mktemp("health")
    flags = "--http-jobs", str(folder / "jobs"), "--n-ctx", "4096", "--store-responses", "600", "--history"
    adapter = write_adapter(folder / "one.gguf", builtin_path())
    with running_http(folder, *flags, "--lora", f"one={adapter}", XDG_STATE_HOME=str(folder)) as server:
        yield server


def test_health_answers_and_a_stream_goes_on_beside_every_endpoint(served: HttpServer) -> None:
    with watched(served) as watch:
        for method, path, *_ in [*ENDPOINTS, *PAGE_ENDPOINTS]:
            watch.beside, before = f"{method} {path}", watch.tokens
            with served.connect() as raw:
                named = path.replace("{id}", "a").replace("{id:path}", "a").replace("{name}", "main.js")
                named = named.replace("{number:int}", "1")
                raw.send(method, named, BODIES.get(path, {}) if method == "POST" else None)
                raw.head()
            until(lambda before=before: watch.tokens > before, bool)  # type: ignore[misc]


def test_health_answers_and_a_stream_goes_on_beside_all_that_commands_ask(served: HttpServer) -> None:
    asked = {structure for query in get_args(Query) for structure in (get_args(query) or (query,))}
    assert len(QUERIES) == len(asked)
    with watched(served) as watch, served.process.connect() as raw:
        raw.hello(versions=["1.2"])
        for query in QUERIES:
            watch.beside, before = str(query)[:40], watch.tokens
            raw.send(query)
            assert raw.receive() is not None
            until(lambda before=before: watch.tokens > before, bool)  # type: ignore[misc]


def test_health_answers_beside_stored_responses(served: HttpServer) -> None:
    with watched(served) as watch, served.connect() as raw:
        watch.beside, asked = "stored responses", {"input": LONG[:4_000], "max_output_tokens": 1}
        ids = [raw.ask("POST", "/v1/responses", asked).json["id"] for _ in range(5)]
        for id in ids:
            assert raw.ask("GET", f"/v1/responses/{id}").status == 200
            assert raw.ask("GET", f"/v1/responses/{id}/input_items").status == 200
            assert raw.ask("DELETE", f"/v1/responses/{id}").status == 200


def test_health_answers_and_a_stream_goes_on_beside_the_history_an_adapter_and_a_summary(served: HttpServer) -> None:
    turns = [{"role": role, "content": f"{role} {at}"} for at in range(1_500) for role in ("user", "assistant")]
    long = {"messages": [*turns, {"role": "user", "content": "And now?"}], "max_tokens": 1}
    adapted = {"prompt": LONG[:4_000], "max_tokens": 1, "model": "builtin+one"}
    asked = {"chat/completions": long | {"truncation": "compact"}, "completions": adapted}
    with watched(served) as watch, served.connect() as raw:
        for watch.beside, body in asked.items():
            before = watch.tokens
            assert raw.ask("POST", f"/v1/{watch.beside}", body).status == 200
            until(lambda before=before: watch.tokens > before, bool)  # type: ignore[misc]
        watch.beside = "the history"
        listed = until(lambda: raw.ask("GET", "/v1/history?search=now").json["data"], bool)
        assert raw.ask("GET", f"/v1/history/{listed[0]['number']}?against={listed[-1]['number']}").status == 200


def test_health_answers_beside_files_and_batches_whose_index_is_locked(served: HttpServer, tmp_path: Path) -> None:
    with watched(served) as watch, served.connect() as raw:
        watch.beside = "an upload"
        file_id = upload(raw, b"".join(ROWS))
        body = {"input_file_id": file_id, "endpoint": "/v1/completions"}
        watch.beside = "a batch"
        batches = [raw.ask("POST", "/v1/batches", body).json["id"] for _ in range(3)]
        index = next(tmp_path.parent.glob("health*/jobs/index.sqlite3"))
        with closing(sqlite3.connect(index, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            watch.beside = "a locked index"
            assert raw.ask("POST", "/v1/batches", body).status == 503
            other.execute("ROLLBACK")
        for path in ("/v1/batches", "/v1/files", f"/v1/files/{file_id}/content"):
            watch.beside = path
            with served.connect() as one:
                assert one.ask("GET", path).status == 200
        for batch in batches:
            watch.beside = "cancel"
            with served.connect() as one:
                assert one.ask("POST", f"/v1/batches/{batch}/cancel").status == 200


def test_health_answers_and_a_stream_goes_on_beside_a_batch_whose_disk_stalls(tiny: Path, tmp_path: Path) -> None:
    config = config_for(tiny, http="127.0.0.1:0", http_jobs=str(tmp_path), n_ctx=4096)
    with stalling() as disk, hosted_http(config) as server, closing(RawHttp(server.port)) as raw:
        with watched(server) as watch:
            watch.beside = "a disk that stalls"
            body = {"input_file_id": upload(raw, b"".join(ROWS[:20])), "endpoint": "/v1/completions"}
            batch = raw.ask("POST", "/v1/batches", body).json["id"]
            disk.is_asked.wait()
            before = watch.tokens
            until(lambda: watch.tokens > before + 20, bool)
            disk.goes_on.set()
        done = until(lambda: raw.ask("GET", f"/v1/batches/{batch}").json, lambda now: now["status"] == "completed")
    assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


def test_health_answers_and_a_stream_goes_on_beside_a_pull_that_stalls_and_the_server_ends(
    folder: Path, tmp_path: Path
) -> None:
    data = (folder / "beta.gguf").read_bytes()
    with running_hub({"tiny/Tiny-GGUF": {"Tiny-Q4_K_M.gguf": data}}) as hub:
        hub.goes_on.clear()
        flags = "--models", "all", "--drain-timeout-sec", "1"
        places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub"), "UMA_MODELS": str(folder), "NO_PROXY": "*"}
        with running_http(tmp_path, *flags, **places) as server, server.connect() as raw:
            raw.send("POST", "/api/pull", {"model": "hf.co/tiny/Tiny-GGUF"})
            raw.head()
            lines = raw.chunks()
            with watched(server) as watch:
                watch.beside = "a pull that stalls"
                until(lambda: next(lines), lambda line: b'"completed":0' not in line and b"sha256:" in line)
                before = watch.tokens
                until(lambda: watch.tokens > before + 20, bool)
            server.process.signal(signal.SIGTERM)
            assert server.process.wait() == 0
        hub.goes_on.set()


@pytest.mark.parametrize("signals", [1, 2])
def test_a_server_ends_beside_whatever_its_clients_have_asked_for(tmp_path: Path, signals: int) -> None:
    """Threads that nothing interrupts: long prompts, large bodies, and a store that does not answer."""
    jobs, drain_sec = tmp_path / "jobs", 1.0 if signals == 1 else 600.0
    flags = "--http-jobs", str(jobs), "--drain-timeout-sec", str(drain_sec), "--max-prompt-bytes", "8000000"
    with running_http(tmp_path, *flags) as server, server.connect() as raw:
        body = {"input_file_id": upload(raw, b"".join(ROWS)), "endpoint": "/v1/completions"}
        with closing(sqlite3.connect(jobs / "index.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            hanging = [RawHttp(server.port) for _ in range(6)]
            for one, (path, asked) in zip(
                hanging,
                2 * [("/v1/batches", body), ("/tokenize", {"content": 8 * LONG}), ("/v1/completions", ENDLESS)],
                strict=True,
            ):
                one.send("POST", path, asked)
            hanging[2].head()
            began = time.monotonic()
            for _ in range(signals):
                server.process.signal(signal.SIGTERM)
                server.process.log.wait_for("event=signal")
            assert server.process.wait() == 0
            bound_sec = drain_sec + 2 if signals == 1 else 1
            assert time.monotonic() - began < bound_sec * (BUSY_FACTOR if signals > 1 else 2)
            for one in hanging:
                one.close()
