"""What one session can ask for in a flood, and that the others still have their turn: a real engine and a real server,
in this process where a test must hold something up.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from test_server_faults import ask as request
from test_server_faults import last_of, serving

from harness import PATIENCE_SEC, Raw, Serve, ServerProcess, ask, frame
from uma.client import connect
from uma.engine import Engine
from uma.engine.intake.overload import full_queue_retry_ms
from uma.net.inline import PLAIN_BYTES, is_quick
from uma.net.throttle import LINES_OF_ONE, LINES_OF_ONE_PER_SEC
from uma.protocol.session import Parsed, ServerSession
from uma.server.connection import MAX_SESSION_REQUESTS
from uma.server.json_connection import MAX_QUERIES
from uma.types import Health

LARGE = {"type": "tokenize", "id": "large", "prompt": "x" * PLAIN_BYTES}


def flood(raw: Raw, data: bytes, answers: int) -> list[dict[str, Any]]:
    """Send frames while their answers are read."""
    sending = threading.Thread(target=raw.send_bytes, args=(data,))
    sending.start()
    events = [raw.next() for _ in range(answers)]
    sending.join()
    return events


async def test_while_a_large_frame_is_parsed_other_sessions_are_served_and_its_own_next_frames_wait(
    socket_dir: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, is_parsing, may_go_on = ServerSession.parse, trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    def parse_in_a_while(self: ServerSession, payload: bytes) -> Parsed:
        if not is_quick(payload):
            token.run_sync_soon(is_parsing.set)
            assert may_go_on.wait(PATIENCE_SEC)
        return parse(self, payload)

    monkeypatch.setattr(ServerSession, "parse", parse_in_a_while)
    async with serving(socket_dir / "s", tiny), connect(socket_dir / "s") as other:
        with Raw(socket_dir / "s") as raw:
            raw.send({"type": "hello", "versions": ["1.0"]}, LARGE, {"id": "large"})
            await is_parsing.wait()
            assert (await last_of(other, request("a", 1))).reason == "length"
            may_go_on.set()
            events = await trio.to_thread.run_sync(lambda: [raw.next() for _ in range(3)])
    # The frame behind it was looked at once the large one was entered: its id was taken, or just answered.
    assert {event["event"] for event in events} == {"hello", "tokenize", "error"}


def test_a_cancel_right_behind_a_large_request_finds_it(serve: Serve) -> None:
    with serve("--max-tokens", "30000").connect() as raw:
        raw.hello()
        large = ask("a", max_tokens=10_000, prompt="x" * (PLAIN_BYTES + 1))
        raw.send(large, {"event": "cancel", "id": "a"})
        assert raw.last_of("a")["reason"] == "cancelled"


def test_queries_count_against_the_sessions_limit(serve: Serve) -> None:
    server = serve("--max-tokens", "30000", "--max-sequences", "4")
    with server.connect() as crowd, server.connect() as other:
        other.hello()
        other.send({"type": "metrics"})
        most, service_ms = MAX_SESSION_REQUESTS, other.expect("metrics")["service_ms_ewma"]
        retry_ms = full_queue_retry_ms(most, most, service_ms, 4)
        crowd.hello()
        rest = [f"b{number}" for number in range(1, most)]
        crowd.send(*(ask(id, max_tokens=30_000) for id in ("a", *rest)))
        queries: list[dict[str, Any]] = [
            {"type": "health", "id": "h"},
            {"type": "metrics", "id": "m"},
            {"type": "tokenize", "id": "t", "prompt": "x"},
        ]
        for query in queries:
            crowd.send(query)
            refused = crowd.last_of(query["id"])
            assert (refused["code"], refused["retry_after_ms"]) == ("E_LIMIT_OVERLOADED", retry_ms)
        other.send({"type": "health"})
        assert other.expect("health")["status"] == "ok"
        crowd.send({"event": "cancel", "id": "a"})
        crowd.last_of("a")
        crowd.send({"type": "tokenize", "id": "t", "prompt": "x"})
        while (event := crowd.next())["event"] != "tokenize":
            assert event["id"] in rest


async def test_a_session_that_floods_queries_has_a_few_answered_at_a_time_and_all_in_the_end(
    socket_dir: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_running, most_running, may_answer = 0, 0, trio.Event()

    async def health(self: Engine, *, probe: bool = True) -> Health:
        nonlocal n_running, most_running
        n_running += 1
        most_running = max(most_running, n_running)
        await may_answer.wait()
        n_running -= 1
        return Health("ok", 0.0, 1)

    monkeypatch.setattr(Engine, "health", health)
    count = 20 * MAX_QUERIES
    async with serving(socket_dir / "s", tiny), connect(socket_dir / "s") as other:
        with Raw(socket_dir / "s") as raw:
            raw.send({"type": "hello", "versions": ["1.0"]}, *[{"type": "health"}] * count)
            while n_running < MAX_QUERIES:
                await trio.testing.wait_all_tasks_blocked()
            assert (await last_of(other, request("a", 1))).reason == "length"
            assert n_running == MAX_QUERIES
            may_answer.set()
            events = await trio.to_thread.run_sync(lambda: [raw.next() for _ in range(count + 1)])
    assert [event["event"] for event in events] == ["hello", *["health"] * count]
    assert most_running == MAX_QUERIES


async def test_frames_that_nothing_comes_of_leave_others_their_turn(socket_dir: Path, tiny: Path) -> None:
    turns, taken = 0, trio.Event()
    cancels = frame({"event": "cancel", "id": "nothing"}) * 1_500
    parse = ServerSession.parse
    n_parsed = 0

    def count(self: ServerSession, payload: bytes) -> Parsed:
        nonlocal n_parsed, turns
        n_parsed += 1
        if n_parsed == 100:
            turns = 0
        if n_parsed == 1_400:
            taken.set()
            seen.append(turns)
        return parse(self, payload)

    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerSession, "parse", count)
        async with serving(socket_dir / "s", tiny):
            with Raw(socket_dir / "s") as raw:
                raw.send_bytes(frame({"type": "hello", "versions": ["1.0"]}) + cancels)
                while not taken.is_set():
                    await trio.lowlevel.checkpoint()
                    turns += 1
    assert seen[0] > 1  # all of it came in one read, and takes a machine of today many milliseconds


async def test_large_answers_that_are_not_read_are_bounded_for_all_sessions_together(
    socket_dir: Path, tiny: Path
) -> None:
    texts = [f"{number}" for number in range(2_000)]
    async with serving(socket_dir / "s", tiny) as server:
        server.unread.most_bytes = 1
        with Raw(socket_dir / "s") as slow, Raw(socket_dir / "s") as other:
            slow.send({"type": "embed", "id": "e", "texts": texts})
            with trio.fail_after(PATIENCE_SEC):
                while not server.unread.held_bytes:
                    await trio.to_thread.run_sync(int)
            other.send({"type": "hello", "versions": ["1.1"]}, {"type": "embed", "id": "e", "texts": ["a"]})
            hello, refused = await trio.to_thread.run_sync(lambda: [other.next(), other.next()])
            assert (hello["event"], refused["code"], refused["retry_after_ms"] > 0) == (
                "hello",
                "E_LIMIT_OVERLOADED",
                True,
            )
            found = await trio.to_thread.run_sync(slow.next)
            assert len(found["embeddings"]) == 2_000
            with trio.fail_after(PATIENCE_SEC):
                while server.unread.held_bytes:
                    await trio.to_thread.run_sync(int)
            other.send({"type": "embed", "id": "e", "texts": ["a"]})
            assert (await trio.to_thread.run_sync(other.next))["event"] == "embed"


def test_a_flood_of_bad_frames_is_a_few_lines_in_the_log_which_say_how_many_there_were(serve: Serve) -> None:
    server = serve()
    with server.connect() as raw:
        raw.hello()
        began_sec = time.monotonic()
        assert len(flood(raw, frame({"id": "a", "prompt": 5}) * 5_000, 5_000)) == 5_000
        most_lines = LINES_OF_ONE + LINES_OF_ONE_PER_SEC * (time.monotonic() - began_sec)
    assert server.stop() == 0
    lines = [line for line in server.log.join().splitlines() if "request.failed" in line]
    told = sum(int(line.partition("suppressed=")[2] or 0) for line in server.log.text.splitlines())
    assert len(lines) <= most_lines
    assert len(lines) + told == 5_000


def test_a_log_line_about_many_wrong_fields_is_short(server: ServerProcess) -> None:
    mark = server.log.mark()
    with server.connect() as raw:
        raw.send(json.dumps({"id": "wrong", "token_ids": ["x" * 50] * 100}).encode())
        raw.expect("error")
    assert len(server.log.wait_for("request=wrong", since=mark)) < 1_000
