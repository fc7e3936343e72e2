"""OpenAI's stored responses: what goes on from one, what another key sees of it, and what a killed server keeps."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Self

import openai
import pytest
from http_clients import openai_of
from http_server import HttpServer, ServeModels, new_key, running_http

from harness import short_directory
from uma.kept import Kept, KeptRow

ASKED: dict[str, Any] = {"model": "builtin", "max_output_tokens": 8, "temperature": 0}


def whole_turns(client: openai.OpenAI) -> tuple[str, str, str]:
    """What is answered to two questions where the second goes on from the first, and to both sent as one input."""
    first = client.responses.create(input="Once upon a time", **ASKED)
    second = client.responses.create(input="And then?", previous_response_id=first.id, **ASKED)
    items: list[Any] = [
        {"role": "user", "content": "Once upon a time"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    cold = client.responses.create(input=items, store=False, **ASKED)
    return second.output_text, cold.output_text, second.id


def test_a_response_goes_on_from_a_stored_one_and_is_listed_and_deleted(tmp_path: Path) -> None:
    with short_directory() as place, running_http(place, "--store-responses", "1") as server:
        client = openai_of(server)
        went_on, cold, id = whole_turns(client)
        assert went_on == cold
        stored = client.responses.retrieve(id)
        assert (stored.output_text, stored.previous_response_id is not None) == (went_on, True)
        items = client.responses.input_items.list(id, order="asc").data
        assert [getattr(item, "role", None) for item in items] == ["user", "assistant", "user"]
        third = client.responses.create(input="Why?", previous_response_id=id, **ASKED).id
        client.responses.delete(id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(id)
        items = client.responses.input_items.list(third, order="asc").data
        assert [getattr(item, "role", None) for item in items] == ["user", "assistant"] * 2 + ["user"]
        with pytest.raises(openai.NotFoundError, match="not found"):
            client.responses.create(input="Hi", previous_response_id=id, **ASKED)
        assert client.responses.create(input="And?", previous_response_id=third, **ASKED).output_text
        unstored = client.responses.create(input="Hi", store=False, **ASKED)
        with pytest.raises(openai.NotFoundError, match="not found"):
            client.responses.create(input="Hi", previous_response_id=unstored.id, **ASKED)


def test_a_stored_conversation_is_no_longer_than_one_that_is_sent_whole(tmp_path: Path) -> None:
    with (
        short_directory() as place,
        running_http(place, "--store-responses", "1", "--max-frame-bytes", "100000") as server,
    ):
        item = {"role": "user", "content": "Hi", "note": "x" * 60_000}  # it is kept packed, in some 100 bytes
        first = server.ask("POST", "/v1/responses", {**ASKED, "input": [item]}).json["id"]
        refused = server.ask("POST", "/v1/responses", {**ASKED, "input": [item], "previous_response_id": first})
        assert (refused.status, "previous_response_id" in str(refused.json)) == (413, True), refused.body
        second = server.ask("POST", "/v1/responses", {**ASKED, "input": "Hi", "previous_response_id": first}).json["id"]
        assert len(server.ask("GET", f"/v1/responses/{second}/input_items").json["data"]) == 3


def test_a_chain_takes_the_space_of_its_turns_and_what_is_deleted_stays_as_long_as_it_is_gone_on_from(
    tmp_path: Path,
) -> None:
    def keep(id: str, before: str | None, age_sec: float = 0.0, max_age_sec: float = 60.0) -> None:
        row = KeptRow(owner="ada", body=b"x", id=id, before=before, came_at=time.time() - age_sec)
        kept.add([row], max_age_sec=max_age_sec)

    def left() -> list[str]:
        return [id for (id,) in kept.rows("SELECT id FROM kept ORDER BY number")]

    with Kept(tmp_path / "responses.db") as kept:
        for turn in range(10):
            keep(f"r{turn}", f"r{turn - 1}" if turn else None, age_sec=100.0, max_age_sec=200.0)
        assert kept.forget("r4", "ada") and not kept.forget("r4", "ada")
        assert (len(list(kept.chain("r9", "ada"))), list(kept.chain("r4", "ada"))) == (10, [])
        for turn in range(5, 10):
            assert kept.forget(f"r{turn}", "ada")
        assert left() == ["r0", "r1", "r2", "r3"]  # with the last that went on from it, it went too
        keep("other", None, age_sec=100.0, max_age_sec=200.0)
        keep("new", "r3")
        assert left() == ["r0", "r1", "r2", "r3", "new"] and len(list(kept.chain("new", "ada"))) == 5
        kept.add([KeptRow(owner="ada", body=os.urandom(2_000), id="last")], max_age_sec=60.0, max_bytes=2_060)
        assert left() == ["r0", "r1", "last"]  # the oldest that nothing goes on from makes way, until the rest fits


class CountingKept(Kept):
    """Counts what SQLite does, in hundreds of its instructions."""

    steps = 0

    def __enter__(self) -> Self:
        super().__enter__()
        self._db.set_progress_handler(self._count, 100)
        return self

    def _count(self) -> int:
        self.steps += 1
        return 0


def test_the_end_of_a_long_chain_costs_as_much_as_it_has_turns(tmp_path: Path) -> None:
    def steps(turns: int) -> int:
        chain = [
            KeptRow(owner="", body=b"x", id=f"r{at}", before=f"r{at - 1}", came_at=time.time() - 100)
            for at in range(turns)
        ]
        with CountingKept(tmp_path / f"{turns}.db") as kept:
            kept.add(chain, max_age_sec=200.0)
            before = kept.steps
            kept.add([KeptRow(owner="", body=b"x", id="new")], max_age_sec=60.0)
            assert list(kept.rows("SELECT id FROM kept")) == [("new",)]
            return kept.steps - before

    assert steps(1_000) < 15 * steps(100)


def test_a_server_killed_inside_a_conversation_keeps_all_that_was_answered() -> None:
    with short_directory() as place:
        jobs = ("--store-responses", "1", "--http-jobs", str(place / "jobs"))
        (place / "one").mkdir()
        (place / "two").mkdir()
        with running_http(place / "one", *jobs) as server:
            client, told = openai_of(server), list[tuple[str, str]]()
            first = client.responses.create(input="Once upon a time", **ASKED)
            told.append((first.id, first.output_text))
            with client.responses.stream(input="And then?", previous_response_id=first.id, **ASKED) as stream:
                for event in stream:  # a stream is stored before its end is told
                    if event.type in ("response.completed", "response.incomplete"):
                        told.append((event.response.id, event.response.output_text))
                        break
            (last, _) = told[-1]
            with client.responses.stream(input="Why?", previous_response_id=last, **ASKED) as stream:
                next(iter(stream))
                os.kill(server.process.pid, signal.SIGKILL)
        with running_http(place / "two", *jobs) as server:
            client = openai_of(server)
            assert [(id, client.responses.retrieve(id).output_text) for id, _ in told] == told
            went_on = client.responses.create(input="Why?", previous_response_id=last, **ASKED)
            items = client.responses.input_items.list(went_on.id, order="asc").data
            assert [getattr(item, "role", None) for item in items] == ["user", "assistant"] * 2 + ["user"]


def test_bad_input_is_told_of_by_its_own_name_also_where_responses_are_stored() -> None:
    with short_directory() as place, running_http(place, "--store-responses", "1") as server:
        missing = server.ask("POST", "/v1/responses", {"max_output_tokens": 2})
        assert missing.status == 400 and missing.json["error"]["param"] == "input"
        id = server.ask("POST", "/v1/responses", {"input": "Hi", **ASKED}).json["id"]
        wrong = server.ask("POST", "/v1/responses", {"input": 7, "previous_response_id": id, **ASKED})
        assert wrong.status == 400 and wrong.json["error"]["param"] == "input"
        own = [{"role": "user", "content": "b"}, {"role": "user", "content": [{"type": "wrong"}]}]
        wrong = server.ask("POST", "/v1/responses", {"input": own, "previous_response_id": id, **ASKED})
        assert wrong.status == 400 and wrong.json["error"]["param"].startswith("input[1].content[0]")
        schema = {"type": "object", "properties": {"a": {"maximum": 123456789012345678901234567890}}}
        tool = {"type": "function", "name": "look", "parameters": schema}
        asked = {"input": "Hi", "tools": [tool], "tool_choice": "none", **ASKED}
        told = server.ask("POST", "/v1/responses", asked)
        assert server.ask("GET", f"/v1/responses/{told.json['id']}").body.count(b"123456789012345678901234567890") == 1


def test_of_several_models_each_goes_on_from_what_another_has_said(serve_models: ServeModels) -> None:
    server = serve_models("--models", "alpha,beta", "--store-responses", "1")
    id = server.ask("POST", "/v1/responses", {"input": "Hi", "max_output_tokens": 4, "model": "alpha"}).json["id"]
    body = {"input": "And?", "previous_response_id": id, "max_output_tokens": 4, "model": "beta"}
    assert server.ask("POST", "/v1/responses", body).status == 200
    assert server.ask("GET", f"/v1/responses/{id}").json["model"] == "alpha"


def test_another_key_s_response_is_not_found(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    ada, bob = (new_key(name, keys) for name in ("ada", "bob"))
    flags = ("--store-responses", "1", "--http-keys", str(keys))
    with short_directory() as place, running_http(place, *flags) as server:
        mine = {"authorization": f"Bearer {ada}"}
        id = server.ask("POST", "/v1/responses", {"input": "Hi", **ASKED}, **mine).json["id"]
        assert server.ask("GET", f"/v1/responses/{id}", **mine).status == 200
        other = {"authorization": f"Bearer {bob}"}
        for method, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
            assert server.ask(method, f"/v1/responses/{id}{path}", **other).status == 404
        body = {"input": "Hi", "previous_response_id": id, **ASKED}
        assert server.ask("POST", "/v1/responses", body, **other).status == 404
        assert server.ask("GET", f"/v1/responses/{id}", **mine).status == 200


def test_without_the_option_nothing_is_stored_and_that_is_told(http_server: HttpServer) -> None:
    answer = http_server.ask("POST", "/v1/responses", {"input": "Hi", "store": True, **ASKED})
    assert answer.json["store"] is False and "store" in answer.headers["x-uma-ignored"]
    assert http_server.ask("GET", f"/v1/responses/{answer.json['id']}").status == 404
    body = {"input": "Hi", "previous_response_id": answer.json["id"]}
    refused = http_server.ask("POST", "/v1/responses", body)
    assert refused.status == 400 and "--store-responses" in refused.json["error"]["message"]
