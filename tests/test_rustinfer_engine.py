"""The ZeroMQ engine with RustInfer's own messages: answers, errors, many peers, and peers that vanish."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import msgpack
import pytest
import rustinfer_fixture as rust
import trio
import zmq
from engine_world import answer, ask, config_for
from rustinfer_fixture import Peer, inference

from forked import Forked
from harness import PATIENCE_SEC, ServerProcess, clean_environ, run_to_end, uma_command
from uma.bridges.pieces import TokenFollower
from uma.bridges.rustinfer.engine import RustInferEngine
from uma.bridges.rustinfer.socket import HEARTBEAT_MS, PeerStalledError, RouterSocket
from uma.engine import Engine, open_engine
from uma.engine.worker.sequence import Sequence
from uma.types import Request, SamplingParams, ServerInfo, Usage

MAX_MESSAGE_BYTES = 10_000
ENDLESS = "1 2 3"
"""A prompt that the tiny model goes on with for thousands of tokens: RustInfer has no word for `ignore_eos`."""


@attrs.frozen
class World:
    """A real engine behind a ROUTER socket, and the peers' side of ZeroMQ."""

    engine: Engine
    bridge: RustInferEngine
    context: zmq.Context[Any]
    closing: ExitStack

    @property
    def endpoint(self) -> str:
        """Where peers connect."""
        return self.bridge.socket.endpoint

    def peer(self, kind: int = zmq.DEALER) -> Peer:
        """A peer that is connected, until the world ends."""
        made = Peer(self.context, self.endpoint, kind)
        self.closing.callback(made.close)
        return made


@asynccontextmanager
async def serving(
    directory: Path, model: Path, heartbeat_ms: int = HEARTBEAT_MS, stall_sec: float = PATIENCE_SEC, **settings: Any
) -> AsyncIterator[World]:
    async with open_engine(config_for(model, **settings)) as engine, trio.open_nursery() as nursery:
        place = f"ipc://{directory}/zmq"
        socket = RouterSocket(place, 4 * MAX_MESSAGE_BYTES, heartbeat_ms, 3 * heartbeat_ms, stall_sec)
        bridge = RustInferEngine(engine, engine.tokenize_rendered, socket, MAX_MESSAGE_BYTES, 16, PATIENCE_SEC)
        await nursery.start(lambda *, task_status: bridge.serve(task_status=task_status))
        with zmq.Context() as context, ExitStack() as closing:
            yield World(engine, bridge, context, closing)
        bridge.begin_drain()


async def run(work: Any, *args: Any) -> Any:
    """Blocking peers work in a thread, bounded."""
    with trio.fail_after(PATIENCE_SEC):
        return await trio.to_thread.run_sync(work, *args)


def chat(peer: Peer, request: dict[str, Any]) -> list[dict[str, Any]]:
    """All messages of one answer."""
    peer.ask(request)
    answers = [peer.receive()]
    while answers[-1].get("chunk_type") == "Token":
        answers.append(peer.receive())
    return answers


async def test_a_whole_answer_is_what_the_engine_gives(socket_dir: Path, tiny: Path) -> None:
    async with serving(socket_dir, tiny) as world:
        expected = (await answer(world.engine, ask(max_tokens=8, ignore_eos=False, stream=False))).finished
        peer = world.peer()
        (got,) = await run(chat, peer, inference())
    response = got["Inference"]
    assert (response["status"], response["error"]) == ("Success", None)
    assert (response["text"], response["tokens"]) == (expected.text, list(expected.token_ids or ()))
    assert response["num_tokens"] == expected.usage.completion_tokens
    assert set(response["metrics"]) == set(rust.METRICS_FIELDS)


async def test_a_stream_adds_up_to_the_same_answer_and_ends_with_done(socket_dir: Path, tiny: Path) -> None:
    async with serving(socket_dir, tiny) as world:
        peer = world.peer()
        (whole,) = await run(chat, peer, inference(max_tokens=20))
        *tokens, done = await run(chat, peer, inference(max_tokens=20, stream=True))
    assert "".join(each["token"] for each in tokens) == whole["Inference"]["text"]
    assert [each["token_id"] for each in tokens if each["token_id"] is not None] == whole["Inference"]["tokens"]
    assert done["chunk_type"] == "Done"
    assert done["finish_reason"] == ("length" if whole["Inference"]["num_tokens"] == 20 else "stop")
    assert done["metrics"]["batch_size"] >= 1


@pytest.mark.parametrize("write", [rust.named_bytes, rust.compact_bytes])
async def test_messagepack_is_answered_in_kind(socket_dir: Path, tiny: Path, write: Any) -> None:
    async with serving(socket_dir, tiny) as world:
        peer = world.peer()
        peer.send(write({"Inference": inference()}) if write is rust.named_bytes else write(inference()))
        data = await run(peer.socket.recv)
    got = msgpack.unpackb(data) if write is rust.named_bytes else rust.from_compact(data)
    assert got["Inference"]["status"] == "Success"


async def test_a_req_socket_gets_its_answer(socket_dir: Path, tiny: Path) -> None:
    async with serving(socket_dir, tiny) as world:
        peer = world.peer(zmq.REQ)
        (got,) = await run(chat, peer, inference())
    assert got["Inference"]["status"] == "Success"


async def test_metrics_are_complete_and_count_what_was_served(socket_dir: Path, tiny: Path) -> None:
    def work(peer: Peer) -> Any:
        (served,) = chat(peer, inference())
        peer.send(rust.json_bytes("MetricsQuery"))
        return served["Inference"], peer.receive()["Metrics"]

    async with serving(socket_dir, tiny) as world:
        peer = world.peer()
        served, metrics = await run(work, peer)
    assert (set(metrics["engine"]), set(metrics["cache"])) == (set(rust.ENGINE_FIELDS), set(rust.CACHE_FIELDS))
    assert metrics["engine"]["completed_requests"] == 1
    assert metrics["engine"]["total_tokens_generated"] == served["num_tokens"]
    assert metrics["engine"]["avg_prefill_time_ms"] > 0
    assert metrics["cache"]["total_capacity"] > 0


@pytest.mark.parametrize(
    ("data", "id"),
    [
        (b"", ""),
        (b"{", ""),
        (b"\xc1\xff", ""),
        (rust.json_bytes({"Inference": inference(temperature=9.0)}), inference()["request_id"]),
        (rust.json_bytes({"Unknown": {"request_id": "u"}}), "u"),
        (rust.json_bytes({"Inference": inference(prompt="x" * 2 * MAX_MESSAGE_BYTES)}), inference()["request_id"]),
    ],
)
async def test_a_message_that_cannot_be_taken_is_answered_and_the_next_one_is_served(
    socket_dir: Path, tiny: Path, data: bytes, id: str
) -> None:
    def work(peer: Peer) -> tuple[Any, Any]:
        peer.send(data)
        raw = peer.socket.recv()
        refusal = msgpack.unpackb(raw) if raw[0] != ord("{") else json.loads(raw)
        return refusal["Inference"], chat(peer, inference())[0]["Inference"]

    async with serving(socket_dir, tiny) as world:
        peer = world.peer()
        refusal, served = await run(work, peer)
    assert (refusal["status"], refusal["request_id"]) == ("Error", id)
    assert refusal["error"]
    assert served["status"] == "Success"


async def test_the_engine_s_own_refusal_reaches_the_peer_with_its_code(socket_dir: Path, tiny: Path) -> None:
    async with serving(socket_dir, tiny, n_ctx=512) as world:
        peer = world.peer()
        (whole,) = await run(chat, peer, inference(prompt="y " * 900))
        (chunk,) = await run(chat, peer, inference(prompt="y " * 900, stream=True))
    assert whole["Inference"]["error"].startswith("E_LIMIT_PROMPT_TOO_LARGE: ")
    assert chunk["chunk_type"] == "Error"
    assert chunk["finish_reason"].startswith("E_LIMIT_PROMPT_TOO_LARGE: ")


async def test_an_answer_that_breaks_the_contract_is_counted_logged_and_an_error(
    socket_dir: Path,
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def more(sequence: Sequence, real: Any = Sequence.usage) -> Usage:
        counted: Usage = real(sequence)
        return attrs.evolve(counted, completion_tokens=counted.completion_tokens + 100)

    def work(peer: Peer) -> Any:
        whole, streamed = chat(peer, inference()), chat(peer, inference(stream=True))
        peer.send(rust.json_bytes("MetricsQuery"))
        return whole[-1]["Inference"]["error"], streamed[-1]["finish_reason"], peer.receive()["Metrics"]["engine"]

    monkeypatch.setattr(Sequence, "usage", more)  # as if the engine had lost tokens
    async with serving(socket_dir, tiny) as world:
        peer = world.peer()
        *errors, figures = await run(work, peer)
    for error in errors:
        assert error.startswith("E_RUNTIME_CONTRACT: ")
        assert "token_ids came" in error
    assert figures["failed_requests"] == 2
    assert len([each for each in caplog.messages if "event=rustinfer.contract_violation" in each]) == 2


async def test_a_fault_ends_its_answer_alone(socket_dir: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*arguments: Any) -> Any:
        raise ArithmeticError("a bug")

    def work(peer: Peer) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(TokenFollower, "take", take)
            streamed = chat(peer, inference(stream=True))
        return streamed, chat(peer, inference(stream=True))

    async with serving(socket_dir, tiny) as world:
        peer = world.peer()
        (failed,), after = await run(work, peer)
    assert failed["finish_reason"] == "E_RUNTIME_INTERNAL: a fault in the server itself; its log says more"
    assert after[-1]["chunk_type"] == "Done"


async def test_one_id_runs_once_at_a_time(socket_dir: Path, tiny: Path) -> None:
    def work(peer: Peer) -> Any:
        peer.ask(inference(prompt=ENDLESS, stream=True, max_tokens=2_000))
        peer.receive()
        peer.ask(inference())
        while (got := peer.receive()).get("chunk_type") == "Token":
            pass
        return got

    async with serving(socket_dir, tiny) as world:
        peer = world.peer()
        got = await run(work, peer)
    assert "is running already" in got["Inference"]["error"]


async def test_a_request_over_a_peer_s_bound_or_at_the_end_is_refused_in_the_form_that_it_waits_for(
    socket_dir: Path, tiny: Path
) -> None:
    def refusals(peer: Peer) -> list[Any]:
        for id, stream in (("chunk", True), ("whole", False)):
            peer.ask(inference(request_id=id, stream=stream))
        found: list[Any] = []
        while len(found) < 2:
            got = peer.receive()
            found += [got] if got.get("request_id") != "runs" else []
        return sorted(found, key=lambda each: "Inference" in each)

    async with serving(socket_dir, tiny, n_ctx=32_768) as world:
        world.bridge.max_peer_requests = 1
        peer = world.peer()
        peer.ask(inference(request_id="runs", prompt=ENDLESS, stream=True, max_tokens=100_000))
        await run(peer.receive)
        many = await run(refusals, peer)
        world.bridge.begin_drain()
        late = await run(refusals, peer)
    for (chunk, whole), code in ((many, "E_LIMIT_OVERLOADED: "), (late, "E_RUNTIME_SHUTDOWN: ")):
        assert (chunk["request_id"], chunk["chunk_type"]) == ("chunk", "Error")
        assert chunk["finish_reason"].startswith(code)
        assert whole["Inference"]["error"].startswith(code)


async def test_a_peer_that_vanishes_frees_its_requests(socket_dir: Path, tiny: Path) -> None:
    async with serving(socket_dir, tiny, n_ctx=8_192) as world:
        peer = world.peer()
        for index in range(4):
            # Half of them send nothing before their end, so that no answer can run into the closed door.
            peer.ask(inference(request_id=str(index), prompt=ENDLESS, stream=index % 2 == 0, max_tokens=100_000))
        await run(peer.receive)
        peer.close()
        with trio.fail_after(PATIENCE_SEC):
            while (await world.engine.metrics())["requests_cancelled"] < 4:
                await world.engine.health()
        other = world.peer()
        (served,) = await run(chat, other, inference())
    assert served["Inference"]["status"] == "Success"


SILENT_PEER = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
socket.send(sys.argv[2].encode())
socket.recv()
print("heard", flush=True)
sys.stdin.read()
"""


async def test_a_peer_that_falls_silent_frees_its_requests_although_its_connection_is_open(
    socket_dir: Path, tiny: Path
) -> None:
    # A stream that is not read pauses, so it cannot end before it is freed: its peer's buffer is full, or there is no
    # heartbeat, whatever comes first.
    message = json.dumps({"Inference": inference(prompt=ENDLESS, stream=True, max_tokens=100_000)})
    async with serving(socket_dir, tiny, heartbeat_ms=100, stall_sec=0.3, n_ctx=32_768) as world:
        command = [sys.executable, "-c", SILENT_PEER, world.endpoint, message]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:  # noqa: ASYNC220
            assert peer.stdout is not None
            try:
                assert await run(peer.stdout.readline) == b"heard\n"
                peer.send_signal(signal.SIGSTOP)
                with trio.fail_after(PATIENCE_SEC):
                    while (await world.engine.metrics())["requests_cancelled"] < 1:
                        await world.engine.health()
            finally:
                peer.kill()


async def test_a_peer_that_takes_nothing_out_of_a_full_buffer_is_told_so_once_it_reads_again(socket_dir: Path) -> None:
    # Without heartbeats: behind a full buffer none is sent.
    router = RouterSocket(f"ipc://{socket_dir}/zmq", MAX_MESSAGE_BYTES, heartbeat_ms=0, stall_timeout_sec=0.1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer, trio.fail_after(PATIENCE_SEC):
        peer.setsockopt(zmq.RCVHWM, 1)
        peer.connect(router.endpoint)
        peer.send(b"hello")
        to, _ = await router.receive()
        sent = 0
        with pytest.raises(PeerStalledError):
            while True:
                await router.send(to, b"%d" % sent + bytes(1_000))
                sent += 1
        # Once it reads again it has all that was sent, and what was left to say.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.send_late, to, b"sorry")
            got = [await run(peer.recv) for _ in range(sent + 1)]
    router.close()
    assert got == [b"%d" % number + bytes(1_000) for number in range(sent)] + [b"sorry"]


@attrs.frozen
class Overheard:
    """An engine, and the requests that it was given."""

    engine: Engine
    requests: list[Request] = attrs.field(factory=list)

    @property
    def info(self) -> ServerInfo:
        return self.engine.info

    def generate(self, request: Request) -> Any:
        self.requests.append(request)
        return self.engine.generate(request)


async def test_what_a_peer_asks_for_reaches_the_engine(socket_dir: Path, tiny: Path) -> None:
    wanted: dict[str, Any] = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.75, "top_k": 7}
    async with serving(socket_dir, tiny) as world:
        overheard: Any = Overheard(world.engine)
        world.bridge.source = overheard
        peer = world.peer()
        for priority in (-5, 0, 9):
            await run(chat, peer, inference(priority=priority, stop_sequences=["zzz"], **wanted))
    requests: list[Request] = overheard.requests
    assert [each.priority for each in requests] == [-1, 0, 1]
    assert {each.sampling for each in requests} == {SamplingParams(**wanted, stop=("zzz",))}


async def test_32_peers_with_8_requests_each_get_their_own_answers(socket_dir: Path, tiny: Path) -> None:
    def work(peer: Peer, number: int) -> dict[str, str]:
        for index in range(8):
            peer.ask(inference(request_id=f"{number}-{index}", prompt=f"{number % 4} {index}", stream=index % 2 == 0))
        texts = {f"{number}-{index}": "" for index in range(8)}
        ended = 0
        while ended < 8:
            got = peer.receive()
            if "Inference" in got:
                texts[got["Inference"]["request_id"]] = got["Inference"]["text"]
                ended += 1
            else:
                texts[got["request_id"]] += got["token"] or ""
                ended += got["chunk_type"] == "Done"
        return texts

    found: dict[int, dict[str, str]] = {}

    async def one(world: World, number: int) -> None:
        found[number] = await run(work, world.peer(), number)

    async with serving(socket_dir, tiny) as world:
        async with trio.open_nursery() as nursery:
            for number in range(32):
                nursery.start_soon(one, world, number)
        expected = {
            (kind, index): (await answer(world.engine, ask(f"{kind} {index}", max_tokens=8, ignore_eos=False))).text
            for kind in range(4)
            for index in range(8)
        }
    for number, texts in found.items():
        for index in range(8):
            assert texts[f"{number}-{index}"] == expected[number % 4, index]


def test_the_command_serves_until_sigterm(socket_dir: Path, tiny: Path) -> None:
    endpoint = f"ipc://{socket_dir}/z"
    flags = ["--bind", endpoint, "--socket", str(socket_dir / "uma.sock"), "--model", str(tiny), "--threads", "1"]
    process = Forked(("engine-zmq", *flags), clean_environ(), stderr=subprocess.PIPE)
    server = ServerProcess(process, socket_dir / "uma.sock")
    try:
        server.log.wait_for(f"zmq     {endpoint}")
        with zmq.Context() as context:
            peer = Peer(context, endpoint)
            (got,) = chat(peer, inference())
            peer.close()
        assert got["Inference"]["status"] == "Success"
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    finally:
        server.stop()


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5599", "tcp://*:5599", "carrier-pigeon://home", "ipc://"])
def test_an_endpoint_that_others_can_reach_or_that_is_none_is_refused(endpoint: str) -> None:
    done = run_to_end(*uma_command("engine-zmq", "--bind", endpoint))
    assert done.returncode == 2
    assert done.stderr.startswith("uma: error: --bind: ")
