"""Two real workers behind Dynamo's real frontend and KV router: routing, errors, a worker's death, a worker's drain."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest

from harness import ONE_THREAD, PATIENCE_SEC, Log, clean_environ, uma_command
from uma.contracts.card import ModelDeploymentCard, checksum
from uma.contracts.parse import parse

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("dynamo") is None and os.environ.get("TEST_DYNAMO") != "required",
    reason="needs the extra [dynamo]",
)

MODEL = "story"
WORKER_ID: dict[str, Any] = {"nvext": {"extra_fields": ["worker_id"]}}
LONG_CHAT = [{"role": "user", "content": "Tell me a story about a fox and an owl who meet a bear in the winter. " * 3}]


@attrs.frozen
class Process:
    """A process with its log."""

    popen: subprocess.Popen[bytes]
    log: Log

    def cpu_ticks(self) -> int:
        """CPU time it has used."""
        return sum(map(int, Path(f"/proc/{self.popen.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))


@attrs.frozen
class Cluster:
    """A frontend, and its workers."""

    url: str
    workers: list[Process]
    ports: list[int]
    """Of the workers' status servers."""

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """A request that is answered in one piece; `status` is HTTP's."""
        try:
            with self.open(path, body) as response:
                return {"status": 200, **json.load(response)}
        except urllib.error.HTTPError as error:
            return {"status": error.code, **json.load(error)}

    def open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """A response to read from."""
        data = None if body is None else json.dumps({"model": MODEL, **body}).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        return urllib.request.urlopen(request, timeout=PATIENCE_SEC)

    def stream(self, tokens: int, **more: Any) -> Iterator[dict[str, Any]]:
        """A long answer, chunk by chunk."""
        body = {**more, "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        with self.open("/v1/completions", body | {"stream_options": {"include_usage": True}}) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def freed_requests(self) -> int:
        """Requests that were cancelled, as of a moment from now on at which none runs."""
        began, until = time.time(), time.monotonic() + PATIENCE_SEC
        while time.monotonic() < until:
            found = [
                figures(told(*each, "/metrics", "uma_worker_report_timestamp_seconds"))
                for each in zip(self.workers, self.ports, strict=True)
            ]
            if all(each["worker_report_timestamp_seconds"] > began for each in found) and not any(
                each.get("worker_request_active_slots", 1) for each in found
            ):
                return sum(
                    int(
                        each["engine_total_requests"]
                        - each["engine_completed_requests"]
                        - each["engine_failed_requests"]
                    )
                    for each in found
                )
            time.sleep(0.05)
        raise AssertionError(self.workers[0].log.text)

    def busiest(self) -> Process:
        """The worker that computes just now."""
        before = [each.cpu_ticks() for each in self.workers]
        until = time.monotonic() + PATIENCE_SEC
        while time.monotonic() < until:
            used = [each.cpu_ticks() - was for each, was in zip(self.workers, before, strict=True)]
            if max(used) >= 10:
                return self.workers[used.index(max(used))]
        raise AssertionError("no worker computes")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], environ: dict[str, str]) -> Iterator[Process]:
    popen = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ)
    log = Log(popen.stderr)
    try:
        yield Process(popen, log)
    finally:
        popen.kill()
        popen.wait()
        log.join()


def free_system_ports(count: int) -> list[int]:
    """Ports that Dynamo takes for its status server: it reads a signed 16-bit number."""
    found = []
    for port in random.Random(os.getpid()).sample(range(20_000, 32_768), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    assert len(found) >= count, "no free ports under 32768"
    return found[:count]


FLAGS = ("--served-name", MODEL, "--discovery-backend", "file", "--n-ctx", "2048", *ONE_THREAD)


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """Of processes that find each other through files."""
    (tmp_path / "kv").mkdir()
    return clean_environ(
        DYN_FILE_KV=str(tmp_path / "kv"), XDG_CACHE_HOME=str(tmp_path / "cache"), HF_HUB_OFFLINE="1",
        DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="1", **more,
    )  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two workers of the built-in model behind a frontend with the KV router."""
    environ, port = environment(tmp_path, DYN_TCP_RPC_HOST="127.0.0.1"), free_port()
    frontend = [
        *(sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)),
        *("--router-mode", "kv", "--kv-cache-block-size", "16", "--migration-limit", "3"),
        *("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"),
    ]
    with ExitStack() as stack:
        ports = free_system_ports(2)
        workers = [
            stack.enter_context(running(uma_command("worker", *FLAGS), environ | {"DYN_SYSTEM_PORT": str(each)}))
            for each in ports
        ]
        front = stack.enter_context(running(frontend, environ))
        made = Cluster(f"http://127.0.0.1:{port}", workers, ports)
        wait_until_listed(made, front)
        yield made


def wait_until_listed(cluster: Cluster, front: Process) -> None:
    until = time.monotonic() + PATIENCE_SEC
    while time.monotonic() < until:
        assert front.popen.poll() is None, front.log.text
        assert all(each.popen.poll() is None for each in cluster.workers), cluster.workers[0].log.text
        try:
            with cluster.open("/v1/models") as response:
                if MODEL in response.read().decode() and both_are_known(cluster):
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError(front.log.text + cluster.workers[0].log.text)


def both_are_known(cluster: Cluster) -> bool:
    """Whether the frontend routes to both: a stream and what is asked beside it go to different workers."""
    stream = cluster.stream(64, **WORKER_ID)
    first = next(stream)
    beside = cluster.ask("/v1/completions", prompt="Hello", max_tokens=1, **WORKER_ID)
    chunks = [first, *stream]
    asked = {chunk["nvext"]["worker_id"]["decode_worker_id"] for chunk in chunks if chunk.get("nvext")}
    return bool(asked) and beside["status"] == 200 and beside["nvext"]["worker_id"]["decode_worker_id"] not in asked


def test_conversations_go_where_their_prefix_is_and_mistakes_are_the_client_s(cluster: Cluster) -> None:
    extra = {"extra_fields": ["worker_id", "timing"]}
    first = cluster.ask("/v1/chat/completions", messages=LONG_CHAT, max_tokens=20, nvext=extra)
    assert first["status"] == 200, first
    assert first["usage"]["completion_tokens"] == 20
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    home = first["nvext"]["worker_id"]["decode_worker_id"]

    def ask_again() -> dict[str, Any]:
        return cluster.ask("/v1/chat/completions", messages=[*LONG_CHAT, said, *LONG_CHAT], max_tokens=5, nvext=extra)

    # Events reach the router some milliseconds after the answer; from then on it knows.
    for _ in range(100):
        again = ask_again()
        if again["nvext"]["timing"]["kv_hit_rate"] > 0:
            break
    assert again["nvext"]["timing"]["kv_hit_rate"] > 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert again["nvext"]["worker_id"]["decode_worker_id"] == home

    for body in ({"n": 2}, {"best_of": 2}):
        refused = cluster.ask("/v1/completions", prompt="Hello", max_tokens=2, **body)
        assert refused["status"] == 400, refused
    # That the worker minds these proves that the router passes them on.
    refused = cluster.ask(
        "/v1/completions", prompt="Hello", max_tokens=2, nvext={"annotations": ["uma.target_tbt_ms:soon"]}
    )
    assert refused["status"] == 400
    assert "uma.target_tbt_ms:soon" in refused["message"]
    refused = cluster.ask("/v1/completions", prompt="word " * 4_000, max_tokens=2)
    assert refused["status"] == 400
    assert "do not fit the context" in refused["message"]
    story = {"prompt": LONG_CHAT[0]["content"], "max_tokens": 24}
    whole = cluster.ask("/v1/completions", **story)["choices"][0]["text"]
    stop = whole[len(whole) // 2 :][:4]
    # (The frontend passes on whatever number of tokens is asked for.)
    stopped = cluster.ask("/v1/completions", **(story | {"max_tokens": 300_000}), stop=[stop])
    assert stopped["choices"][0]["text"] == whole.partition(stop)[0]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    # A frontend that cuts at a stop string by itself loses these.
    assert stopped["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_what_a_client_asks_for_beyond_text_comes_through_the_frontend(cluster: Cluster) -> None:
    asked: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 6, "logprobs": 2}
    got = cluster.ask("/v1/completions", **asked, nvext={"extra_fields": ["engine_data"]})
    (choice,) = got["choices"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["top_logprobs"]) == 6
    assert got["nvext"]["engine_data"]["uma"]["batch_size"] >= 1
    chosen = cluster.ask("/v1/completions", prompt="Choose: ", max_tokens=20, guided_choice=["an owl", "a bear"])
    assert chosen["choices"][0]["text"] in ("an owl", "a bear")
    an_object = {"response_format": {"type": "json_object"}, "max_tokens": 200}
    (said,) = cluster.ask("/v1/chat/completions", messages=LONG_CHAT, **an_object)["choices"]
    assert said["message"]["content"].lstrip().startswith("{")
    assert said["finish_reason"] == "length" or isinstance(json.loads(said["message"]["content"]), dict)
    refused = cluster.ask("/v1/completions", prompt="Once", **an_object)  # by the frontend itself
    assert (refused["status"], "response_format" in refused["message"]) == (400, True)
    both = cluster.ask("/v1/completions", prompt=["Once upon a time", "The owl said:"], max_tokens=4)
    assert [each["index"] for each in both["choices"]] == [0, 1]
    assert both["usage"]["completion_tokens"] == 8
    # A client that hangs up, at the latest of several times before its answer has ended by itself.
    before, until = cluster.freed_requests(), time.monotonic() + PATIENCE_SEC
    while cluster.freed_requests() == before:
        assert time.monotonic() < until, cluster.workers[0].log.text
        with cluster.open(
            "/v1/completions", {**asked, "max_tokens": 1_900, "min_tokens": 1_900, "stream": True}
        ) as stream:
            stream.readline()


def figures(exposition: str) -> dict[str, float]:
    """A worker's own figures on `/metrics`, without `uma_`."""
    return {name: float(value) for name, value in re.findall(r"^uma_(\w+) (\S+)$", exposition, re.MULTILINE)}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stream_ends_whole_although_its_worker_dies_or_is_told_to_stop(cluster: Cluster, number: int) -> None:
    prompt_tokens = cluster.ask("/v1/completions", prompt="Once upon a time", max_tokens=1)["usage"]["prompt_tokens"]
    # A worker that is told to stop gives its answers 20 s, in which a busy machine must have come to the end.
    tokens = 1_000 if number == signal.SIGKILL else 300
    stream = cluster.stream(tokens, min_tokens=tokens)
    chunks = [next(stream)]
    worker = cluster.busiest()
    worker.popen.send_signal(number)
    chunks += stream
    assert not [chunk for chunk in chunks if "error" in chunk]
    reasons = {choice.get("finish_reason") for chunk in chunks for choice in chunk.get("choices", ())} - {None}
    assert reasons == {"length"}
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    assert usage["completion_tokens"] == tokens
    # After a migration, Dynamo counts what came before as prompt too; a worker that was told to stop ends its answers.
    assert (usage["prompt_tokens"] > prompt_tokens) is (number == signal.SIGKILL)
    code = worker.popen.wait(PATIENCE_SEC)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 0), worker.log.text
    assert cluster.ask("/v1/completions", prompt="Hello", max_tokens=2)["status"] == 200


def test_a_worker_tells_its_health_and_load_and_only_the_event_plane_listens_on_all_addresses(tmp_path: Path) -> None:
    (port,) = free_system_ports(1)
    environ = environment(
        tmp_path, DYN_SYSTEM_PORT=str(port), DYN_HEALTH_CHECK_ENABLED="true", DYN_CANARY_WAIT_TIME="1"
    )
    with running(uma_command("worker", *FLAGS), environ) as worker:
        told(worker, port, "/health", '"generate":"ready"')  # after a first probe through the engine
        assert "uma_worker_request_total_slots" in told(worker, port, "/metrics", "uma_worker_report_timestamp_seconds")
        listens = [each.laddr.ip for each in psutil.Process(worker.popen.pid).net_connections("tcp")
                   if each.status == psutil.CONN_LISTEN]  # fmt: skip
        key, entry = registered(worker, tmp_path / "kv")
        assert re.fullmatch(rf"v1/mdc/dynamo/{MODEL}/generate/[0-9a-f]+", key)  # as docs/many-machines.md has it
        (told_of_us,) = within(entry, "runtime_data")
        ours = told_of_us["uma"]
        assert checksum(parse(ours["card"], ModelDeploymentCard)) == ours["checksum"]
        # docs/many-machines.md tells of these three.
        assert sorted(ip for ip in listens if ip != "127.0.0.1") == ["0.0.0.0"] * 3
        assert "127.0.0.1" in listens
        worker.popen.send_signal(signal.SIGTERM)
        assert worker.popen.wait(PATIENCE_SEC) == 0, worker.log.text


def registered(worker: Process, folder: Path) -> tuple[str, dict[str, Any]]:
    """The key of the card that a worker has registered in this folder, and what stands there."""
    until = time.monotonic() + PATIENCE_SEC
    while time.monotonic() < until:
        assert worker.popen.poll() is None, worker.log.text
        for path in filter(Path.is_file, folder.rglob("*")):
            key = urllib.parse.unquote(str(path.relative_to(folder)))
            # (A file that is not whole yet is no JSON.)
            with suppress(ValueError, OSError):
                if key.startswith("v1/mdc/"):
                    return key, json.loads(path.read_text())
        time.sleep(0.1)
    raise AssertionError([str(path) for path in folder.rglob("*")])


def within(value: Any, name: str) -> list[Any]:
    """What this name stands for, wherever a JSON object has it."""
    inner = value.values() if isinstance(value, dict) else ()
    return [value[name]] if inner and name in value else [found for each in inner for found in within(each, name)]


def told(worker: Process, port: int, path: str, word: str) -> str:
    """What the status server answers with 200 as soon as it has `word` in it."""
    until = time.monotonic() + PATIENCE_SEC
    while time.monotonic() < until:
        assert worker.popen.poll() is None, worker.log.text
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            text: str = response.read().decode().replace('": "', '":"')
            if word in text:
                return text
        time.sleep(0.1)
    raise AssertionError(worker.log.text)
