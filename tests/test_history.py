"""The history: what was sent is kept whole and bounded, and two requests tell where the cache broke."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import stat
import subprocess
import threading
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from engine_world import answer, ask
from http_server import ServeModels, new_key, running_http
from pty_screen import Terminal

from harness import PATIENCE_SEC, clean_environ, run_to_end, short_directory, uma_command, until
from uma import json_bytes, json_text
from uma.cli.history import batch_row
from uma.config import RuntimeConfig
from uma.engine import open_engine
from uma.errors import BadRequest, ConfigError
from uma.history import Head, History, HistoryEntry, parting, place
from uma.kept import KeptFault
from uma.server.recording import recording

AGENT = [
    {"role": "system", "content": "You are an agent. It is 12:01."},
    {"role": "user", "content": "List the files."},
]


def entry(text: str, *, came_at: float | None = None, owner: str = "", **request: Any) -> HistoryEntry:
    head = Head(
        id="r", model="m", origin="", came_at=time.time() if came_at is None else came_at, took_ms=1, reason="stop"
    )
    ends = tuple(range(1, len(text + "yes") + 1))
    return HistoryEntry(head=head, request=request, prompt=text, ends=ends, answer="yes", owner=owner)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history.db"
    with History(path) as history:
        history.keep([entry("one", prompt="one"), entry("two", prompt="two")])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with History(path) as history:
        assert [number for number, _ in history.heads(10)] == [1, 2]
        assert [number for number, _ in history.heads(10, after=1)] == [2]
        assert history.entry(2).prompt == "two" and list(history.entry(2).ends) == [1, 2, 3, 4, 5, 6]
        with pytest.raises(BadRequest, match="not found"):
            history.entry(3)


def test_the_oldest_make_way_by_size_and_by_age(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    with History(path) as history:
        history.keep([entry("old", came_at=time.time() - 8 * 24 * 3_600)])
        history.keep([entry(os.urandom(2_000).hex()) for _ in range(10)], max_bytes=12_000)
        assert 0 < len(history.heads(100)) < 10
        assert history.heads(100)[-1][0] == 11


def test_what_one_key_sends_pushes_out_none_of_another_s_and_each_finds_its_own(tmp_path: Path) -> None:
    with History(tmp_path / "history.db") as history:
        history.keep([entry("About a FOX", owner="ada"), entry("About foxes", owner="bob")])
        history.keep([entry(os.urandom(2_000).hex(), owner="bob") for _ in range(10)], max_bytes=12_000)
        assert [number for number, _ in history.heads(100, owner="ada")] == [1]
        assert 0 < len(history.heads(100, owner="bob")) < 10
        assert [number for number, _ in history.heads(100, search="fox")] == [1]
        assert [number for number, _ in history.heads(1, before=12)] == [history.heads(2)[0][0]]
        with pytest.raises(BadRequest, match="not found"):
            history.entry(1, "bob")


def test_a_file_that_is_no_history_or_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.db").write_bytes(b"no database" * 1_000)
    with pytest.raises(KeptFault, match="not a database"), History(tmp_path / "bad.db"):
        pass
    told = run_to_end(*uma_command("history"), environ={**clean_environ(), "XDG_STATE_HOME": str(tmp_path)})
    assert told.returncode == 1 and "uma run --history" in told.stderr
    assert not (tmp_path / "uma").exists()  # looking makes none


def test_a_key_s_search_looks_through_its_own_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uma.history.MAX_SEARCHED", 2)
    with History(tmp_path / "history.db") as history:
        history.keep([entry("a fox", owner=owner) for owner in ("ada", "ada", "ada", "bob", "bob", "bob")])
        assert [number for number, _ in history.heads(9, owner="ada", search="fox")] == [2, 3]
        assert [number for number, _ in history.heads(9, search="fox")] == [5, 6]
        assert len(history.heads(9)) == 6


def test_numbers_of_any_length_are_looked_for(tmp_path: Path) -> None:
    with History(tmp_path / "history.db") as history:
        history.keep([entry("one", prompt="one")])
        assert len(history.heads(10**30)) == 1 and history.entry(1).number == 1
        with pytest.raises(BadRequest, match="not found"):
            history.entry(10**30)


def test_a_history_is_read_from_the_start_and_while_a_server_writes(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    path.touch()
    with History(path) as history:
        assert history.heads(5) == []
        history.keep([entry("one", prompt="one")])
    with closing(sqlite3.connect(path, isolation_level=None)) as server:
        server.execute("BEGIN IMMEDIATE")
        with History(path) as history:
            assert len(history.heads(5)) == 1


@pytest.mark.parametrize("is_still", [False, True])
def test_a_history_that_can_only_be_read_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_still: bool
) -> None:
    path = tmp_path / "history.db"
    with History(path) as history:
        history.keep([entry("one", prompt="one"), entry("two", prompt="two")])
    monkeypatch.setattr(os, "access", lambda *_: not is_still)
    with History(path, only_reads=True) as history:
        assert [found.prompt for found in history.entries()] == ["one", "two"]
        if is_still:
            assert [file.name for file in tmp_path.iterdir()] == ["history.db"]
        with pytest.raises(KeptFault, match="readonly"):
            history.keep([entry("three")])


def test_a_reader_that_waits_between_two_entries_keeps_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    with History(path) as server, History(path, only_reads=True) as reader:
        server.keep([entry("one"), entry("two"), entry("other")])
        entries = reader.entries()
        assert next(entries).prompt == "one"
        server.keep([entry("late")])
        with closing(sqlite3.connect(path)) as checkpointing:
            ((is_busy, *_),) = checkpointing.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert not is_busy
        assert [found.prompt for found in entries] == ["two", "other"]
        assert [found.prompt for found in reader.entries("two")] == ["two"]


def test_a_request_that_cannot_be_written_costs_the_history_no_other(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    all_ended, keep = threading.Event(), History.keep

    def keep_all_but_b(self: History, entries: Iterable[HistoryEntry]) -> None:
        assert all_ended.wait(PATIENCE_SEC)
        keep(self, [attrs.evolve(found, prompt="\ud800") if found.head.id == "b" else found for found in entries])

    async def serve() -> None:
        config = RuntimeConfig(model=str(tiny), history=True)
        async with open_engine(config) as engine, recording(engine, config):
            for id in "abc":
                await answer(engine, ask(max_tokens=1, id=id))
            all_ended.set()

    monkeypatch.setattr(History, "keep", keep_all_but_b)
    trio.run(serve)
    with History(tmp_path / "uma" / "history.db", only_reads=True) as history:
        assert [head.id for _, head in history.heads(9)] == ["a", "c"]
    assert "history.lost" in caplog.text


def test_what_a_pattern_finds_is_kept_nowhere_and_prompts_part_at_their_tokens() -> None:
    secret = "sk-12345678901"
    said = [{"role": "user", "content": f"my key is {secret}"}]
    one, other = (
        entry(f"{secret} {text}", messages=said).redacted(re.compile(r"sk-\d+|es$")) for text in ("alone", "alike")
    )
    assert secret not in repr(one) and one.request["messages"][0]["content"] == "my key is [redacted]"
    assert (one.prompt, one.answer) == ("[redacted] alone", "y[redacted]")
    found = parting(one, other)
    assert found is not None and (found.common, found.tokens) == (len(f"{secret} al"), ("o", "i"))


def test_two_prompts_part_at_a_token_in_a_message() -> None:
    said = [{"role": "system", "content": "It is 12:01."}, {"role": "user", "content": "Hi"}]
    later = [{"role": "system", "content": "It is 12:02."}, {"role": "user", "content": "Hi"}]
    one, other = entry("<s>It is 12:01.<u>Hi", messages=said), entry("<s>It is 12:02.<u>Hi", messages=later)
    found = parting(one, other)
    assert found is not None
    assert (found.common, found.tokens) == (len("<s>It is 12:0"), ("1", "2"))
    assert found.places == ("messages[0] (system)",) * 2
    assert place(one, len("<s>It is 12:01.<")) == "what follows messages[0] (system)"
    assert parting(one, one) is None
    longer = parting(one, entry("<s>It is 12:01.<u>Hiyes?", messages=said))
    assert longer is not None and longer.tokens == ("", "?")  # it goes on from the answer, which the cache has too
    rewritten = parting(one, entry("<s>It is 12:01.<u>Hi there", messages=said))
    assert rewritten is not None and (rewritten.tokens, rewritten.places[0]) == (("y", " "), "the answer")


def test_numbers_that_no_float_holds_are_kept_as_they_were_written(tmp_path: Path) -> None:
    schema = json_bytes.loads(b'{"maximum": 123456789012345678901234567890, "multipleOf": 1e-400}')
    with History(tmp_path / "history.db") as history:
        history.keep(
            [entry("a", messages=[{"role": "user", "content": "a"}], tools=[{"name": "t", "parameters": schema}])]
        )
        kept = history.entry(1)
    assert json_bytes.dumps(kept.request["tools"][0]["parameters"]) == json_bytes.dumps(schema)
    assert "1e-400" in json_text.dumps(batch_row(kept))


def test_a_pattern_that_is_none_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="is no regular expression"):
        RuntimeConfig(history_redact="(")


def test_a_request_becomes_a_row_of_a_batch() -> None:
    call = {"id": "c", "name": "look", "arguments": "{}"}
    kept = entry("", messages=[{"role": "assistant", "content": "", "tool_calls": [call]}], sampling={"max_tokens": 7})
    row = batch_row(kept)
    assert row["url"] == "/v1/chat/completions" and row["body"]["max_tokens"] == 7
    assert row["body"]["messages"][0]["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    assert batch_row(entry("", prompt="Go"))["body"]["prompt"] == "Go"


def test_eighty_columns_tell_when_a_request_came_and_how_long_it_took(tmp_path: Path) -> None:
    with History(tmp_path / "uma" / "history.db") as history:
        history.keep([entry("one", prompt="one")])
    environ = {**clean_environ(), "XDG_STATE_HOME": str(tmp_path)}
    with Terminal(uma_command("history"), environ, columns=80) as terminal:
        assert terminal.wait() == 0
        assert {"came", "took", "ended"} <= set(terminal.text.split())


def test_over_http_each_key_sees_its_own_also_of_several_models(tmp_path: Path, serve_models: ServeModels) -> None:
    keys = tmp_path / "keys.toml"
    of = {name: {"authorization": f"Bearer {new_key(name, keys)}"} for name in ("ada", "bob")}
    state = {"XDG_STATE_HOME": str(tmp_path)}
    server = serve_models("--models", "alpha,beta", "--history", "--http-keys", str(keys), **state)
    for model, name in (("alpha", "ada"), ("beta", "bob"), ("beta", "ada")):
        body = {"messages": [{"role": "user", "content": f"I am {name}"}], "max_tokens": 2, "model": model}
        assert server.ask("POST", "/v1/chat/completions", body, **of[name]).status == 200

    def listed(name: str, query: str = "") -> list[int]:
        told = server.ask("GET", f"/v1/history{query}", **of[name])
        return [each["number"] for each in told.json["data"]]

    until(lambda: listed("ada") + listed("bob"), lambda found: len(found) == 3)
    (first, second), (other,) = listed("ada"), listed("bob")
    assert listed("ada", "?search=i%20am%20ADA") == [first, second] and listed("ada", "?search=bob") == []
    assert listed("ada", f"?before={first}&limit=1") == [second]
    whole = server.ask("GET", f"/v1/history/{first}?against={second}", **of["ada"]).json
    assert whole["request"]["messages"][0]["content"] == "I am ada" and "parting" in whole
    for path in (f"/v1/history/{other}", f"/v1/history/{first}?against={other}", f"/v1/history/{10**30}"):
        assert server.ask("GET", path, **of["ada"]).status == 404


def test_a_server_keeps_what_an_agent_sent_and_tells_where_its_cache_broke(tmp_path: Path, tiny: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    with short_directory() as place, running_http(place, "--history", "--history-redact", "sesame", **state) as server:
        later = [{**AGENT[0], "content": "You are an agent. It is 12:02."}, {"role": "user", "content": "Say sesame."}]
        for messages in (AGENT, later):
            body = {"messages": messages, "max_tokens": 4, "temperature": 0, "cache_prompt": messages is AGENT}
            assert server.ask("POST", "/v1/chat/completions", body).status == 200

        # Without keys it is the server's user who sees it, from this machine.
        until(lambda: server.ask("GET", "/v1/history").json["data"], lambda found: len(found) == 2)
        assert server.ask("GET", "/v1/history?search=12:02").json["data"][0]["number"] == 2
        assert server.ask("GET", "/v1/history", x_forwarded_for="10.0.0.1").status == 403
        file = tmp_path / "uma" / "history.db"
        file.rename(own := tmp_path / "own.db")
        file.touch()  # no history: a look at it makes none of it
        assert server.ask("GET", "/v1/history").status == 503 and not file.stat().st_size
        own.rename(file)

        def told(*arguments: str) -> str:
            return run_to_end(*uma_command("history", *arguments), environ={**clean_environ(), **state}).stdout

        until(told, lambda table: table.count("length") == 2)
        shown = told("2")
        assert '"max_tokens": 4' in shown and '"cache_prompt": false' in shown
        assert "mirostat" not in shown  # what is as it would be anyway is left out
        assert "You are an agent. It is 12:02." in shown and "[redacted]" in shown and "sesame" not in shown
        differs = told("--diff", "1", "2")
        assert "2 had 0 of" in differs  # it was all read again
        for number, token in ((1, "1"), (2, "2")):
            assert re.search(
                rf"^{number}: token [\d,]+ is '\S*{token}\S*', in messages\[0\] \(system\)$", differs, re.M
            )
        environ, follow = {**clean_environ(), **state}, uma_command("history", "--follow")
        with subprocess.Popen(follow, stdout=subprocess.PIPE, text=True, env=environ) as follower:
            try:
                assert follower.stdout is not None
                assert next(line for line in follower.stdout if line.lstrip().startswith("2 "))
                assert server.ask("POST", "/v1/chat/completions", {"messages": AGENT, "max_tokens": 4}).status == 200
                assert "length" in next(line for line in follower.stdout if line.startswith("3 "))
            finally:
                follower.send_signal(signal.SIGINT)
    told("--export", str(tmp_path / "rows.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    hidden = [later[0], {**later[1], "content": "Say [redacted]."}]
    assert [row["body"]["messages"] for row in rows] == [AGENT, hidden, AGENT]
    again = ("batch", str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--model", str(tiny), "--local")
    assert run_to_end(*uma_command(*again)).returncode == 0
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["response"]["status_code"] for row in answers] == [200] * 3
