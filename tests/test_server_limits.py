"""Limits, each on a real server process that has it set low: what is refused, and that no other session is touched."""

from __future__ import annotations

import resource
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import BULKY, EXACT, HELLO, Serve, ServerProcess, ask, running_server, short_directory, until
from uma.engine.intake.overload import full_queue_retry_ms
from uma.server.connection import MAX_SESSION_REQUESTS
from uma.server.json_connection import MAX_STARTING


def codes(events: list[dict[str, Any]]) -> list[str]:
    return [event["code"] for event in events if event["event"] == "error"]


def service_ms(server: ServerProcess) -> float:
    """How long requests usually take, as the server has it now; 0 where none has ended."""
    with server.connect() as raw:
        raw.send({"type": "metrics"})
        return float(raw.expect("metrics")["service_ms_ewma"])


def test_more_sessions_than_allowed_are_told_so_and_a_place_is_free_again_once_one_leaves(serve: Serve) -> None:
    server = serve("--max-sessions", "2")
    first, second = server.connect(), server.connect()
    first.hello()
    second.hello()
    with server.connect() as third:
        third.send(HELLO)
        assert codes(third.rest()) == ["E_LIMIT_SESSIONS"]
    first.sock.close()

    def metrics_or_refusal() -> dict[str, Any]:
        with server.connect() as raw:
            raw.send({"type": "metrics"})
            return raw.receive() or {}

    assert until(metrics_or_refusal, lambda event: event["event"] == "metrics")["active_sessions"] == 2
    second.send(ask("a"))
    assert second.last_of("a")["reason"] == "length"
    second.sock.close()


def test_a_full_queue_is_told_with_a_time_to_try_again_and_the_session_stays(serve: Serve) -> None:
    server = serve("--max-queue", "1", "--max-sequences", "1", "--max-tokens", "30000")
    with server.connect() as raw:
        raw.hello()
        raw.send(ask("runs", max_tokens=30_000))
        raw.until_token("runs")
        raw.send(ask("waits"), *(ask(f"r{number}") for number in range(4)))
        refused = [raw.last_of(f"r{number}") for number in range(4)]
        assert {event["code"] for event in refused} == {"E_LIMIT_OVERLOADED"}
        least_ms = full_queue_retry_ms(1, 1, service_ms(server), 1)
        assert min(event["retry_after_ms"] for event in refused) >= least_ms
        raw.send({"event": "cancel", "id": "runs"})
        assert raw.last_of("waits")["reason"] == "length"


def test_max_tokens_over_the_limit_is_cut_and_told(serve: Serve) -> None:
    with serve("--max-tokens", "5").connect() as raw:
        raw.send(ask("a", max_tokens=50))
        last = raw.rest()[-1]
    assert last["usage"]["completion_tokens"] == 5
    assert last["warnings"] == ["max_tokens: 50 is over the limit of 5 and was cut to it"]


IMPATIENT_SEC = 1.0


@pytest.fixture(scope="module")
def impatient(heavy: Path) -> Iterator[ServerProcess]:
    """A server that closes an idle session after `IMPATIENT_SEC`."""
    flags = ("--model", str(heavy), "--idle-timeout-sec", str(IMPATIENT_SEC), "--max-tokens", "30000")
    with short_directory() as directory, running_server(directory / "s", *flags) as server:
        yield server


@pytest.mark.parametrize("first", [None, HELLO])
def test_a_session_that_says_nothing_is_closed(impatient: ServerProcess, first: dict[str, Any] | None) -> None:
    with impatient.connect() as raw:
        if first:
            raw.hello()
        assert codes(raw.rest()) == ["E_TIMEOUT_IDLE"]


def test_half_a_frame_is_closed_on_even_while_something_runs(impatient: ServerProcess) -> None:
    with impatient.connect() as raw:
        raw.send(HELLO, ask("a", max_tokens=30_000))  # in one go: this test must not be idle itself
        raw.until_token("a")
        raw.send_bytes(struct.pack("<I", 100) + b"{")
        events = raw.rest()
    assert codes(events)[-1] == "E_TIMEOUT_IDLE"
    assert impatient.settled()["active_sequences"] == 0


def test_a_running_request_is_not_idle_and_the_clock_starts_when_it_ends(impatient: ServerProcess) -> None:
    long_ms = 1.5 * IMPATIENT_SEC * 1000
    ran_ms, tokens = 0.0, 250
    while ran_ms < long_ms:  # as many tokens as take longer than an idle session may live
        tokens *= 2
        assert tokens <= 30_000, f"the model is too fast for this test: {ran_ms} ms"
        with impatient.connect() as raw:
            raw.send(HELLO, ask("a", max_tokens=tokens))
            last = raw.last_of("a")
            assert last["event"] == "eos", last
            ran_ms = last["metrics"]["decode_ms"]
            if ran_ms >= long_ms:
                assert codes(raw.rest()) == ["E_TIMEOUT_IDLE"]


def test_a_slow_reader_pauses_only_itself_and_loses_nothing(serve: Serve) -> None:
    server = serve("--max-tx-bytes", "65536", *EXACT)
    with server.connect() as slow, server.connect() as quick:
        slow.hello()
        slow.send(ask("slow", max_tokens=2_000, metadata=BULKY))
        quick.hello()
        rounds = iter(range(1_000))

        def slow_so_far() -> int:
            """Tokens made for the slow reader, after a whole request of the quick one."""
            id = f"q{next(rounds)}"
            quick.send(ask(id, max_tokens=50))
            assert quick.last_of(id)["usage"]["completion_tokens"] == 50
            return int(server.metrics()["tokens_generated_total"]) - 50 * (int(id[1:]) + 1)

        seen = [-2, -1]
        while seen[-1] != seen[-2]:
            seen.append(slow_so_far())
        assert 0 < seen[-1] < 2_000
        got = []
        while (event := slow.next())["event"] == "token":
            got.append(event["token_id"])
        assert event["usage"]["completion_tokens"] == 2_000
        quick.send(ask("whole", max_tokens=2_000, stream=False))
        assert got == quick.last_of("whole")["token_ids"]


def test_a_reader_that_never_reads_is_hung_up_on_and_its_requests_are_cancelled(serve: Serve) -> None:
    server = serve("--max-tx-bytes", "1024", "--tx-timeout-sec", "0.2")
    with server.connect() as raw:
        raw.hello()
        raw.send(ask("a", max_tokens=4_000, metadata=BULKY))
        server.log.wait_for("event=session.stalled")
        settled = server.settled()
    assert settled["requests_cancelled"] == 1
    assert settled["tokens_generated_total"] < 4_000


def test_a_flood_of_bad_requests_from_a_client_that_never_reads_does_not_grow_without_bound(serve: Serve) -> None:
    server = serve("--max-tx-bytes", "4096", "--tx-timeout-sec", "0.3")
    with server.connect() as raw:
        raw.hello()
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            for _ in range(10_000):
                raw.send(*({"id": "a", "prompt": 5} for _ in range(100)))
        server.log.wait_for("event=session.stalled")
        assert server.settled()["active_sessions"] == 1


def test_a_session_with_too_many_requests_is_told_when_to_try_again_and_others_are_served(serve: Serve) -> None:
    server = serve("--max-tokens", "30000", "--max-sequences", "4")
    with server.connect() as crowd, server.connect() as other:
        crowd.hello()
        most = MAX_SESSION_REQUESTS
        crowd.send(*(ask(str(number), max_tokens=20_000) for number in range(most + 1)))
        refused = crowd.last_of(str(most))
        retry_ms = full_queue_retry_ms(most, most, service_ms(server), 4)
        assert (refused["code"], refused["retry_after_ms"]) == ("E_LIMIT_OVERLOADED", retry_ms)
        # However often it is told, it is still listened to.
        crowd.send(*(ask(f"more{number}") for number in range(2 * MAX_STARTING)))
        assert crowd.last_of(f"more{2 * MAX_STARTING - 1}")["code"] == "E_LIMIT_OVERLOADED"
        other.hello()
        other.send(ask("a"))
        assert other.last_of("a")["reason"] == "length"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the limit of a running process is set on Linux only")
def test_connections_leave_file_descriptors_to_what_runs(serve: Serve) -> None:
    server = serve()
    with server.connect() as first:
        first.hello()
        limit = len(list(Path(f"/proc/{server.pid}/fd").iterdir())) + 40
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (limit, limit))
        crowd = [socket.socket(socket.AF_UNIX) for _ in range(2 * limit)]
        for each in crowd:
            each.setblocking(False)
            each.connect_ex(str(server.socket))
        server.log.wait_for("event=server.cannot_accept")
        # The first token, a thread, a child process and a grammar of this server's life: each opens what it needs.
        first.send(ask("first"), ask("long", prompt="word " * 1_000), ask("held", grammar={"regex": "[a-z]{100}"}))
        messages = [{"role": "user", "content": "hi"}] * 100
        first.send({"id": "chat", "messages": messages, "max_tokens": 1, "ignore_eos": True})
        ends: list[dict[str, Any]] = []
        while len(ends) < 4:
            ends += [event for event in [first.next()] if event["event"] != "token"]
        assert [event.get("reason") for event in ends] == ["length"] * 4, ends
        for each in crowd:
            each.close()
        until(server.metrics, lambda metrics: metrics["active_sessions"] == 2)
