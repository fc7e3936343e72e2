"""`uma pause` and `uma resume`: nothing is computed meanwhile, and nothing is lost."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest
import trio
from http_server import ServeModels, running_http
from pty_screen import Terminal

from harness import ServerProcess, ask, clean_environ, run_to_end, running_server, short_directory, uma_command, until
from uma import LLM
from uma.client import connect
from uma.types import PAUSED, Finished, Request, SamplingParams, Token

LONG = SamplingParams(max_tokens=1_000_000, ignore_eos=True, temperature=0)


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with short_directory() as place, running_server(place / "uma.sock", "--model", "builtin") as running:
        yield running


def command(name: str, server: ServerProcess, *options: str) -> str:
    done = run_to_end(*uma_command(name, "--socket", str(server.socket), *options))
    assert done.returncode == 0, done.stderr
    return done.stdout


def generated(server: ServerProcess) -> int:
    return int(server.metrics()["tokens_generated_total"])


def test_what_runs_stands_still_what_comes_waits_and_both_go_on(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.hello()
        raw.send(ask("runs", **{"max_tokens": 1_000_000, "ignore_eos": True}))
        raw.until_token("runs")
        command("pause", server)
        begun = generated(server)
        raw.send(ask("comes", max_tokens=2, temperature=0))
        until(server.metrics, lambda found: found["queued_requests"] + found["active_sequences"] == 2)
        assert generated(server) == begun
        (told,) = json.loads(command("ps", server, "--json"))
        assert 360 * 86_400 < told["paused_sec"] <= 365 * 86_400
        assert ", paused" in command("ps", server)
        with pytest.warns(UserWarning, match=f"^{PAUSED}$"), LLM(socket=server.socket):
            pass
        assert "paused: `uma resume`" in command("top", server)
        lines = Path(__file__).read_text(encoding="utf-8").splitlines()
        asks = uma_command("decide", __file__, "--yes", "Is it?", "--socket", str(server.socket))
        with Terminal(asks, clean_environ(), columns=120) as terminal:
            terminal.wait_for(f"text 1 of {len(list(filter(str.strip, lines)))}: {PAUSED}")
            assert f'"decide-{terminal.process.pid}-1"' in command("top", server, "--json")
            terminal.type("\x03")
            assert terminal.wait() == 130
        raw.send({"event": "cancel", "id": "runs"})
        assert raw.last_of("runs")["reason"] == "cancelled"
        assert generated(server) == begun
        command("resume", server)
        assert raw.last_of("comes")["reason"] == "length"
        resumed = "event=server.resumed"
        assert server.log.text.count(resumed) == 1
        assert "nothing changes" in command("resume", server)
        assert server.log.text.count(resumed) == 1
    assert json.loads(command("ps", server, "--json"))[0]["paused_sec"] == 0


def test_a_pause_ends_by_itself_after_the_time_that_was_named(server: ServerProcess) -> None:
    assert "computes nothing for 30 min" in command("pause", server, "--for", "1800")
    assert ", paused for 30 min more" in command("ps", server)
    command("pause", server, "--for", "0.5s")
    with server.connect() as raw:
        raw.hello()
        raw.send(ask("a", max_tokens=2))
        assert raw.last_of("a")["reason"] == "length"
    server.log.wait_for("event=server.resumed by=time")
    assert server.log.text.count("event=server.resumed") == 1  # the first pause had no end of its own


def test_a_server_that_is_paused_is_well_and_a_stream_has_signs_of_life() -> None:
    with short_directory() as place, running_http(place, "--model", "builtin") as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100_000, "ignore_eos": True}
        with server.connect() as raw:
            raw.send("POST", "/v1/chat/completions", {**body, "stream": True})
            assert raw.head()[0] == 200
            chunks = raw.chunks()
            next(chunk for chunk in chunks if chunk.startswith(b"data:"))
            command("pause", server.process)
            health = server.ask("GET", "/health")
            assert (health.status, health.json) == (200, {"status": "ok", "hint": PAUSED})
            told = server.ask("GET", "/metrics").body.decode()
            assert float(told.partition("\numa_paused_sec ")[2].split()[0]) > 0
            assert next(chunk for chunk in chunks if chunk.startswith(b":"))
        command("resume", server.process)


def test_a_server_that_is_paused_ends_in_order_with_what_runs(server: ServerProcess) -> None:
    with server.connect() as raw:
        raw.hello()
        command("pause", server)
        raw.send(ask("a", max_tokens=2))
        until(server.metrics, lambda found: found["queued_requests"] + found["active_sequences"] == 1)
        server.signal(signal.SIGTERM)
        assert raw.last_of("a")["reason"] == "length"
    assert server.wait() == 0


def test_several_models_are_paused_those_that_are_loaded_meanwhile_too(serve_models: ServeModels) -> None:
    server = serve_models().process
    texts: dict[str, str] = {}
    said = bytearray()

    async def ask_of(path: Path, model: str) -> None:
        async with connect(path, model=model) as client:
            request = Request(model, prompt="Once", sampling=SamplingParams(max_tokens=2), model=model)
            async with client.generate(request) as stream:
                (*_, last) = [event async for event in stream if isinstance(event, Token | Finished)]
                assert isinstance(last, Finished)
                texts[model] = last.reason

    async def main(path: Path) -> None:
        await ask_of(path, "alpha")
        async with connect(path, model="alpha") as client, trio.open_nursery() as nursery:
            await client.pause(3_600)
            for model in ("alpha", "beta"):
                nursery.start_soon(ask_of, path, f"{model}")
            while len((await client.activity()).running) + len((await client.activity()).waiting) < 2:  # noqa: ASYNC110
                await trio.sleep(0.05)
            assert set(texts) == {"alpha"}
            texts.clear()
            assert (await client.metrics())["paused_sec"] > 3_000
            asked = uma_command("generate", "--socket", str(path), "--max-tokens", "2", "Once")
            asking = await nursery.start(partial(trio.run_process, asked, stdout=DEVNULL, stderr=PIPE))
            assert asking.stderr is not None
            while PAUSED.encode() not in said:
                said.extend(await asking.stderr.receive_some() or pytest.fail(said.decode()))
            await client.pause(0)

    trio.run(main, server.socket)
    assert texts == {"alpha": "length", "beta": "length"}
    assert b"uma: alpha answers, of 4 models; -m NAME asks another" in said
    server.log.wait_for(r"event=server\.resumed session=\S+ by=socket")
    assert server.log.text.count("event=server.paused") == 1 == server.log.text.count("event=server.resumed")
