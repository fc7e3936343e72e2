"""The Trio client against the real server process: the same interface as an engine, and what the socket adds to it."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from harness import HELLO, PATIENCE_SEC, Serve, ServerProcess
from uma.client import Client, connect, dial, stream
from uma.errors import (
    BadRequest,
    ConnectionLost,
    Ended,
    FrameTooLarge,
    InternalError,
    PromptTooLarge,
    ShuttingDown,
    TooManySessions,
    UmaError,
)
from uma.net.inline import MAX_POSITIONS
from uma.protocol.codec import parse_event
from uma.protocol.messages import ServerEvent
from uma.types import Event, Finished, Request, SamplingParams, Source, Token

STORY = "Once upon a time there was a fox"


def ask(id: str = "a", max_tokens: int = 8, **fields: object) -> Request:
    return Request(id, prompt=STORY, sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True), **fields)  # type: ignore[arg-type]


async def collect(client: Client, request: Request) -> tuple[list[Token], Finished]:
    """All events of a request."""
    events: list[Event] = []
    async with client.generate(request) as events_of:
        async for event in events_of:
            events.append(event)
    *tokens, last = events
    assert isinstance(last, Finished)
    assert all(isinstance(token, Token) for token in tokens)
    return tokens, last  # type: ignore[return-value]


async def nothing_runs(client: Client) -> dict[str, int]:
    """The metrics once no request runs any more."""
    with trio.fail_after(PATIENCE_SEC):
        while True:
            metrics = dict(await client.metrics())
            if metrics["active_sequences"] == 0 and metrics["queued_requests"] == 0:
                return metrics


async def test_a_client_is_a_source_and_knows_its_server(server: ServerProcess) -> None:
    async with connect(server.socket) as client:
        assert isinstance(client, Source)
        assert client.info.model.is_builtin
        health = await client.health()
        assert (health.status, health.tokens_generated) == ("ok", 1)
        assert (await client.health(probe=False)).tokens_generated == 0
        assert (await client.metrics())["active_sessions"] >= 1


async def test_a_request_gives_tokens_and_one_finished(server: ServerProcess) -> None:
    async with connect(server.socket) as client:
        tokens, last = await collect(client, ask())
        assert len(tokens) == last.usage.completion_tokens == 8
        assert (last.id, last.reason) == ("a", "length")
        unstreamed_tokens, unstreamed = await collect(client, ask(stream=False))
        assert unstreamed_tokens == []
        assert unstreamed.text == "".join(token.text for token in tokens)
        assert unstreamed.token_ids == tuple(token.token_id for token in tokens)


async def test_a_long_answer_is_written_and_read_beside_the_trio_thread(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[int] = []

    def noted(payload: bytes) -> ServerEvent:
        readers.append(threading.get_ident())
        return parse_event(payload)

    sampling = SamplingParams(max_tokens=MAX_POSITIONS + 10, ignore_eos=True, logprobs=20)
    async with connect(server.socket) as client:
        monkeypatch.setattr("uma.protocol.session.parse_event", noted)
        _, last = await collect(client, Request("a", prompt=STORY, sampling=sampling, stream=False))
    assert [len(each.top) for each in last.logprobs or ()] == [20] * last.usage.completion_tokens
    assert threading.get_ident() not in readers[-1:]


async def test_many_requests_of_one_client_run_at_once_and_do_not_mix(server: ServerProcess) -> None:
    results: dict[str, tuple[list[Token], Finished]] = {}

    async def run(client: Client, id: str, max_tokens: int) -> None:
        results[id] = await collect(client, ask(id, max_tokens))

    async with connect(server.socket) as client, trio.open_nursery() as nursery:
        for number in range(30):
            nursery.start_soon(run, client, f"r{number}", 10 + number)
    for number in range(30):
        tokens, last = results[f"r{number}"]
        assert len(tokens) == last.usage.completion_tokens == 10 + number
        assert {token.id for token in tokens} == {f"r{number}"}
    assert max(last.metrics.batch_size for _, last in results.values()) > 1


async def test_leaving_the_block_cancels_at_the_server_and_the_id_is_free_again(server: ServerProcess) -> None:
    async with connect(server.socket) as client:
        before = (await nothing_runs(client))["requests_cancelled"]
        async with client.generate(ask("a", 400)) as events:
            async for _ in events:
                break
        tokens, last = await collect(client, ask("a", 5))  # not one late event of the first gets in here
        assert (len(tokens), last.reason) == (5, "length")
        assert (await nothing_runs(client))["requests_cancelled"] == before + 1


async def test_a_cancelled_task_leaves_nothing_running(server: ServerProcess) -> None:
    async with connect(server.socket) as client:
        before = (await nothing_runs(client))["requests_cancelled"]
        with trio.CancelScope() as scope:
            async with client.generate(ask("a", 400)) as events:
                async for _ in events:
                    scope.cancel()
        assert scope.cancelled_caught
        assert (await nothing_runs(client))["requests_cancelled"] == before + 1


async def test_cancel_ends_the_stream_with_a_last_event_and_its_usage(server: ServerProcess) -> None:
    async with connect(server.socket) as client, client.generate(ask("a", 400)) as events:
        seen = []
        async for event in events:
            seen.append(event)
            if len(seen) == 3:
                events.cancel()
    last = seen[-1]
    assert isinstance(last, Finished)
    assert last.reason == "cancelled"
    assert last.usage.completion_tokens == len(seen) - 1 < 400


async def test_closing_the_client_cancels_all_that_runs(server: ServerProcess) -> None:
    async with connect(server.socket) as watcher:
        before = (await nothing_runs(watcher))["requests_cancelled"]
        async with connect(server.socket) as client, client.generate(ask("a", 400)) as events:
            await anext(aiter(events))
        assert (await nothing_runs(watcher))["requests_cancelled"] == before + 1


async def test_an_id_that_is_running_is_refused_before_it_is_sent(server: ServerProcess) -> None:
    async with connect(server.socket) as client, client.generate(ask("a", 100)) as events:
        with pytest.raises(ValueError, match="'a' is running"):
            async with client.generate(ask("a")):
                pass
        assert isinstance([event async for event in events][-1], Finished)


async def test_errors_are_the_server_s_by_class_and_the_session_goes_on(server: ServerProcess) -> None:
    async with connect(server.socket) as client:
        with pytest.raises(PromptTooLarge, match="tokens"):
            await collect(client, Request("a", token_ids=(5,) * client.info.limits.n_ctx))
        with pytest.raises(BadRequest, match="vocabulary"):
            await collect(client, Request("a", token_ids=(client.info.model.vocab_size,)))
        with pytest.raises(BadRequest, match="vocabulary"):
            await client.tokenize(Request("a", token_ids=(client.info.model.vocab_size,)))
        assert client.info.limits.max_frame_bytes == 2**20
        with pytest.raises(FrameTooLarge):
            await collect(client, Request("a", prompt="x" * 2**20))
        assert (await collect(client, ask()))[1].reason == "length"


async def test_the_body_s_own_exception_comes_out_as_it_is(server: ServerProcess) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with connect(server.socket) as client, client.generate(ask("a", 100)):
            raise KeyError("mine")


async def test_without_a_server_the_error_says_how_to_start_one(socket_dir: Path) -> None:
    with pytest.raises(ConnectionLost, match="uma run"):
        async with connect(socket_dir / "none"):
            pass
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(socket_dir / "stale"))
    with pytest.raises(ConnectionLost, match="uma run"):
        async with connect(socket_dir / "stale"):
            pass


async def test_a_server_that_dies_loses_what_ran_and_names_the_socket(serve: Serve) -> None:
    server = serve("--max-tokens", "30000")
    async with connect(server.socket) as client:
        with pytest.raises(ConnectionLost, match=str(server.socket)):
            async with client.generate(ask("a", 30_000)) as events:
                async for _ in events:
                    server.signal(signal.SIGKILL)
        for method in (client.health, client.metrics):
            with pytest.raises(ConnectionLost, match="connect again"):
                await method()
        with pytest.raises(ConnectionLost):
            await collect(client, ask())


async def test_a_server_that_stops_says_so_by_class(serve: Serve) -> None:
    server = serve("--drain-timeout-sec", "0", "--max-tokens", "30000")
    async with connect(server.socket) as client:
        with pytest.raises(ShuttingDown):
            async with client.generate(ask("a", 30_000)) as events:
                await anext(aiter(events))
                server.signal(signal.SIGTERM)
                async for _ in events:
                    pass
        with pytest.raises(UmaError):
            await client.health()
    assert server.wait() == 0


async def test_a_full_server_refuses_at_connect(serve: Serve) -> None:
    server = serve("--max-sessions", "1")
    async with connect(server.socket):
        with pytest.raises(TooManySessions):
            async with connect(server.socket):
                pass


async def test_a_server_that_does_not_answer_hello_is_given_up_on(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dial, "HELLO_TIMEOUT_SEC", 0.2)
    server = serve("--protocol", "newline")
    ends = rf"--protocol newline`: `uma stop --now .*` or `kill -9 {server.pid}` ends that"
    with pytest.raises(ConnectionLost, match=ends):
        async with connect(server.socket):
            pass


async def test_an_answer_to_hello_counts_that_came_while_the_client_had_no_turn(
    socket_dir: Path, mock_clock: trio.testing.MockClock
) -> None:
    """As where a machine has stood still for longer than the client waits."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_dir / "s"))
        listener.listen()

        async def answer_and_stand_still() -> None:
            await trio.testing.wait_all_tasks_blocked()  # the client waits for the answer
            conversation, _ = listener.accept()
            with conversation:
                conversation.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            mock_clock.jump(2 * dial.HELLO_TIMEOUT_SEC)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_and_stand_still)
            with pytest.raises(ConnectionLost, match="does not speak UMA's protocol"):
                async with connect(socket_dir / "s"):
                    pass


async def test_a_slow_caller_holds_up_no_other_within_its_bound(server: ServerProcess) -> None:
    async with connect(server.socket) as client, client.generate(ask("slow", 300)) as slow:
        await anext(aiter(slow))
        for number in range(3):
            assert len((await collect(client, ask(f"quick{number}", 100)))[0]) == 100
        assert len([event async for event in slow]) == 300


async def test_past_its_bound_a_slow_caller_pauses_the_client_and_loses_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BUFFER_EVENTS", 16)
    server = serve("--max-tx-bytes", "4096", "--max-tokens", "30000")
    async with connect(server.socket) as watcher, connect(server.socket) as client:
        async with client.generate(ask("slow", 1_500, metadata={"pad": "x" * 8_000})) as slow:
            await anext(aiter(slow))
            seen = [-2, -1]
            while seen[-1] != seen[-2]:  # the server goes on until every buffer on the way is full
                await watcher.health()
                seen.append((await watcher.metrics())["tokens_generated_total"])
            assert seen[-1] < 1_500
            rest = [event async for event in slow]
        assert len(rest) == 1_500
        assert isinstance(rest[-1], Finished)


@pytest.mark.parametrize("is_before", [True, False])
async def test_past_its_bound_a_slow_caller_ends_alone_where_its_client_has_other_requests(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, is_before: bool
) -> None:
    monkeypatch.setattr(stream, "BUFFER_EVENTS", 100)
    async with connect(server.socket) as client, client.generate(ask("slow", 1_000)) as slow:
        await anext(aiter(slow))
        while client.is_reading and not is_before:
            await trio.lowlevel.checkpoint()
        for number in range(3):
            assert len((await collect(client, ask(f"quick{number}", 50)))[0]) == 50
        assert (await client.tokenize(ask("t", 1))).token_ids
        read = []
        with pytest.raises(Ended, match=r"slow reader: too many tokens"):
            async for event in slow:
                read.append(event)
        assert 100 <= len(read) < 1_000


async def test_two_servers_and_a_plain_session_beside_a_client(server: ServerProcess, serve: Serve) -> None:
    async with connect(server.socket) as one, connect(serve().socket) as two:
        assert one.info.model.name != two.info.model.name
        with server.connect() as raw:
            raw.send({**HELLO, "client": "raw/2"})
            assert raw.expect("hello")["model"]["name"] == one.info.model.name


async def test_a_tap_that_raises_ends_its_own_stream_alone(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(token: Token) -> bool:
        raise ZeroDivisionError("on purpose")

    async with connect(server.socket) as client:
        async with client.generate(ask("bad", 400)) as events, client.generate(ask("good", 100)) as others:
            events.tap = fail
            with pytest.raises(InternalError, match="on purpose"):
                async for _ in events:
                    pass
            got = [event async for event in others]
        assert len(got) == 101
        assert (await nothing_runs(client))["active_sequences"] == 0
        tokens, _ = await collect(client, ask("bad"))
        assert len(tokens) == 8, "the id cannot be used again"
    assert "Traceback" in caplog.text
