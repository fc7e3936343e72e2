"""Bounds of the socket's users, on a real server that knows this process's user from the kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
from http_server import running_gateway

from harness import Raw, RunInProcessText, Serve, ServerProcess, ask, run_to_end, uma_command, until
from uma.errors import BadRequest
from uma.net.metering import metered_whole
from uma.net.quota import Bounds, ClientAccount
from uma.types import EmbedRequest, RerankRequest

MANY_TEXTS = ["a fox in the forest " * 20] * 2_000
"""800,000 bytes: more than the quarter of that in tokens that a minute has, and some time to compute."""
MINE = """
max_concurrent = 2
max_tokens = 5000
max_priority = 0
"""


@pytest.fixture
def bounds(socket_dir: Path) -> Path:
    return socket_dir / "users.toml"


@pytest.fixture
def serve_bounded(bounds: Path, serve: Serve) -> Serve:
    """A server whose users have the bounds of this TOML text."""

    def start(toml: str, *flags: str) -> ServerProcess:
        bounds.write_text(toml)
        return serve("--socket-users", str(bounds), "--max-tokens", "30000", *flags)

    return start


@pytest.fixture
def bounded(serve_bounded: Serve) -> ServerProcess:
    """A server on which this process's user has `MINE`, and other users nearly nothing."""
    return serve_bounded(f"[{os.getuid()}]{MINE}\n[others]\nmax_tokens = 1\n")


def code_of(raw: Raw, id: str) -> str:
    return str(raw.last_of(id).get("code"))


def test_a_user_s_bounds_hold_over_all_its_sessions(bounded: ServerProcess) -> None:
    with bounded.connect() as one, bounded.connect() as other:
        one.hello()
        other.hello()
        one.send(ask("long", max_tokens=5_001), ask("urgent", priority=1))
        assert code_of(one, "long") == code_of(one, "urgent") == "E_PROTO_BAD_REQUEST"
        one.send(ask("a", max_tokens=5_000), ask("b", max_tokens=5_000))
        one.until_token("a")
        other.send(ask("c"))
        refused = other.last_of("c")
        assert refused["code"] == "E_LIMIT_OVERLOADED"
        assert "max_concurrent" in refused["message"]
        assert refused["retry_after_ms"] > 0
        one.send({"event": "cancel", "id": "a"})
        assert one.last_of("a")["reason"] == "cancelled"
        other.send(ask("d", priority=-1))
        assert other.last_of("d")["reason"] == "length"


def test_bounds_that_change_hold_from_the_next_request_on(bounds: Path, bounded: ServerProcess) -> None:
    with bounded.connect() as raw:
        raw.hello()
        raw.send(ask("before", max_tokens=9))
        assert raw.last_of("before")["reason"] == "length"
        bounds.write_text(f"[{os.getuid()}]\nmax_tokens = 3\n")
        raw.send(ask("after", max_tokens=9))
        assert "may generate 3 at most" in raw.last_of("after")["message"]
        bounds.write_text("[others]\nmax_tokens = many\n")
        raw.send(ask("broken", max_tokens=9))
        assert "may generate 3 at most" in raw.last_of("broken")["message"]
        bounds.write_text("")
        raw.send(ask("free", max_tokens=9))
        assert raw.last_of("free")["reason"] == "length"
    assert "event=socket.users_reloaded" in bounded.log.text


def test_a_bound_that_a_user_is_given_holds_in_sessions_that_are_open(bounds: Path, serve_bounded: Serve) -> None:
    with serve_bounded("[nobody]\nmax_tokens = 1\n").connect() as raw:
        raw.hello()
        raw.send(ask("free", max_tokens=9))
        assert raw.last_of("free")["reason"] == "length"
        bounds.write_text("[others]\nmax_tokens = 3\n")
        raw.send(ask("bounded", max_tokens=9))
        assert "may generate 3 at most" in raw.last_of("bounded")["message"]


def test_a_user_is_told_its_own_limits(bounded: ServerProcess) -> None:
    with bounded.connect() as raw:
        limits = raw.hello(versions=["1.1"])["limits"]
    assert (limits["max_tokens"], limits["max_priority"]) == (5_000, 0)


def test_a_chat_at_the_terminal_asks_for_no_more_than_its_user_has(bounded: ServerProcess) -> None:
    command = uma_command("chat", "--socket", str(bounded.socket), "--max-tokens", "3")
    done = run_to_end(*command, stdin="hello\n")
    assert (done.returncode, "priority" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize("most", [-1, 0])
def test_a_gateway_s_page_asks_for_no_more_than_its_user_has(serve_bounded: Serve, most: int) -> None:
    server = serve_bounded(f"[others]\nmax_priority = {most}\nmax_tokens = 10\n")
    with running_gateway(server) as gateway:
        question = {"messages": [{"role": "user", "content": "a"}], "sampling": {"max_tokens": 3}}
        answer = gateway.ask("POST", "/ui/api/answers", question)
        assert (answer.status, b"event: failed" in answer.body) == (200, False)
        for path, body in (
            ("/completion", {"prompt": "a", "n_predict": -1, "ignore_eos": True}),
            ("/v1/completions", {"prompt": "a", "ignore_eos": True}),
        ):
            whole = gateway.ask("POST", path, body)
            assert whole.status == 200, whole.body
            assert 10 in (whole.json.get("tokens_predicted"), whole.json.get("usage", {}).get("completion_tokens"))


def test_a_user_s_targets_hold_whatever_a_request_says(serve_bounded: Serve) -> None:
    with serve_bounded("[others]\ntarget_ttft_ms = 1e-6\n").connect() as raw:
        raw.hello()
        raw.send(ask("measured", priority=-1))
        assert raw.last_of("measured")["reason"] == "length"
        raw.send(ask("a", slo={"target_ttft_ms": 1e9}))
        refused = raw.last_of("a")
    assert (refused["code"], "target_ttft_ms" in refused["message"]) == ("E_LIMIT_OVERLOADED", True)


@pytest.mark.parametrize("table", [f"[{os.getuid()}]", "[others]"])
def test_tokens_a_minute_count_answers_that_nothing_read_to_the_end(serve_bounded: Serve, table: str) -> None:
    server = serve_bounded(f"{table}\nmax_tokens_per_minute = 50\n")
    with server.connect() as gone:
        gone.send(ask("a", max_tokens=30_000))
        for _ in range(60):
            assert gone.expect("token")
    until(server.metrics, lambda found: found["active_sequences"] == 0)
    with server.connect() as raw:
        raw.send(ask("b"))
        refused = raw.last_of("b")
    assert refused["code"] == "E_LIMIT_OVERLOADED"
    assert "max_tokens_per_minute" in refused["message"]
    assert 0 < refused["retry_after_ms"] <= 60_000


def test_tokens_a_minute_count_texts_whose_client_has_left(serve_bounded: Serve) -> None:
    server = serve_bounded("[others]\nmax_tokens_per_minute = 200_000\n")
    with server.connect() as gone:
        gone.hello(versions=["1.1"])
        gone.send({"type": "embed", "id": "a", "texts": MANY_TEXTS})
        until(server.metrics, lambda found: found["embed_requests_total"] == 1)
    tries: list[int] = []

    def refusal() -> str:
        tries.append(len(tries))
        assert len(tries) < 1_000, "these use up the minute's tokens themselves"
        with server.connect() as raw:
            raw.send(ask("b", max_tokens=1))
            return str(raw.last_of("b").get("message"))

    until(refusal, lambda message: "max_tokens_per_minute" in message)
    assert server.metrics()["embed_tokens_total"] < 200_000, "they were not computed to their end"


async def test_what_is_left_is_charged_by_its_size_and_what_fails_costs_nothing() -> None:
    asked: list[tuple[EmbedRequest | RerankRequest, int]] = [
        (RerankRequest("r", "why", ("a" * 9, "")), 4 + 1),
        (EmbedRequest("e", texts=("\u00e9" * 8,)), 5),
        (EmbedRequest("i", token_ids=((1, 2, 3), (4,))), 4),
    ]
    for request, tokens in asked:
        account = ClientAccount("x", Bounds(max_tokens_per_minute=tokens))
        with pytest.raises(BadRequest), metered_whole(request, account):
            raise BadRequest("no")
        assert account.objection(1, trio.current_time()) is None
        with pytest.raises(KeyError), metered_whole(request, account):
            raise KeyError
        assert account.objection(1, trio.current_time()) is not None
        more = ClientAccount("x", Bounds(max_tokens_per_minute=tokens + 1))
        with pytest.raises(KeyError), metered_whole(request, more):
            raise KeyError
        assert more.objection(1, trio.current_time()) is None


def test_lines_have_the_bounds_too(serve_bounded: Serve) -> None:
    server = serve_bounded("[others]\nmax_tokens_per_minute = 1\n", "--protocol", "newline", "--max-tokens", "3")
    with server.connect() as raw:
        raw.send_bytes(b"Once\nOnce\n")
        said = b""
        while b"E_LIMIT_OVERLOADED: user" not in said:
            more = raw.sock.recv(4096)
            assert more, said
            said += more


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[nobody-of-that-name]", "no user of that name"),
        (f"[{os.getuid()}]\nmax_token = 1", "max_token: no such limit"),
        ("[others]\nmax_tokens = 0", "max_tokens"),
        ("[others]\npriority = 1\nmax_priority = 0", "priority: 1 is over max_priority, 0"),
        ("others = 1", "expected a table"),
        ("[[", "is not TOML"),
    ],
)
def test_a_file_of_users_that_cannot_be_read_says_why(
    bounds: Path, socket_dir: Path, text: str, words: str, uma_told: RunInProcessText
) -> None:
    bounds.write_text(text)
    done = uma_told("run", "--socket", str(socket_dir / "s"), "--socket-users", str(bounds))
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
