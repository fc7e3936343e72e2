"""Who shares a folder of batches: keys, servers, versions, and uploads that never end."""

from __future__ import annotations

import errno
import hashlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

import openai
import pytest
import trio
from engine_world import config_for
from http_server import HostedHttp, RawHttp, hosted_http, running_http
from openai.types import Batch
from test_http_batches import CHAT, begun, client_of, completed, ended, line, lines_of

from harness import PATIENCE_SEC, until
from models import write_model
from uma import Engine
from uma.http import batch_queue, batches, files
from uma.jobs import JobChanged, Results
from uma.jobs.store import JobFolder, Store
from uma.kept import KeptFault

ENDLESS = [line(number, max_tokens=12, ignore_eos=True) for number in range(3_000)]


def made(client: openai.OpenAI, file_id: str) -> Batch:
    return client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")


def test_a_batch_that_cannot_run_is_cancelled_and_its_file_deleted(tmp_path: Path) -> None:
    """Its model is another one by now, or has another name, and it keeps what it had."""
    small = write_model(tmp_path / "same.gguf", feed_forward=256)
    (tmp_path / "large").mkdir()
    others = write_model(tmp_path / "other.gguf"), write_model(tmp_path / "large" / "same.gguf", feed_forward=512)
    flags = "--http-jobs", str(tmp_path / "jobs")
    with running_http(tmp_path, "--model", str(small), *flags) as server, client_of(server) as client:
        first, second = begun(client, ENDLESS), begun(client, ENDLESS)
        until(lambda: client.batches.retrieve(first.id), lambda now: completed(now) > 0)
    for other, batch, has_rows in zip(others, (second, first), (False, True), strict=True):
        with running_http(tmp_path, "--model", str(other), *flags) as server, client_of(server) as client:
            done = client.batches.cancel(batch.id)
            assert done.status in ("cancelled", "cancelling")
            done = ended(client, batch)
            assert done.status == "cancelled"
            assert len(lines_of(client, done.output_file_id) if has_rows else ()) == completed(done)
            assert bool(completed(done)) == has_rows
            assert client.files.delete(batch.input_file_id).deleted


def test_a_row_of_another_version_costs_nothing_but_itself_and_orphans_are_removed(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    with running_http(tmp_path, "--http-jobs", str(jobs)) as server, client_of(server) as client:
        kept = ended(client, begun(client, [line(0)]))
        bad = [ended(client, begun(client, [line(0)])) for _ in range(3)]
    with closing(sqlite3.connect(jobs / "index.sqlite3", isolation_level=None)) as index:
        index.execute("UPDATE batches SET data = json_set(data, '$.news', 1) WHERE id = ?", (kept.id,))
        for batch, data in zip(bad, ("{", '{"id": "a"}', "[]"), strict=True):
            index.execute("UPDATE batches SET is_over = 0, data = ? WHERE id = ?", (data, batch.id))
    orphans = jobs / "files" / "file-0.part", jobs / "files" / "file-1", jobs / "batches" / "batch_0.jsonl"
    others = jobs / "files" / "thesis.txt", jobs / "batches" / "notes.jsonl"
    for each in (*orphans, *others):
        each.write_bytes(b"x")
    (jobs / "files" / "photos").mkdir()
    with running_http(tmp_path, "--http-jobs", str(jobs)) as server, client_of(server) as client:
        assert [each.id for each in client.batches.list()] == [kept.id]
        assert ended(client, begun(client, [line(1)])).status == "completed"
        assert lines_of(client, kept.output_file_id)
        for batch in bad:
            assert server.process.log.text.count(f"event=jobs.row_skipped id={batch.id}") == 1
    assert not any(orphan.exists() for orphan in orphans)
    assert all(other.exists() for other in others), "a user's own, in a folder that they named"


def test_one_server_runs_a_folder_s_batches_and_another_says_which(tmp_path: Path) -> None:
    homes = tmp_path / "a", tmp_path / "b"
    for home in homes:
        home.mkdir()
    flags = "--http-jobs", str(tmp_path / "jobs")
    with running_http(homes[0], *flags) as one, client_of(one) as owner:
        batch = begun(owner, ENDLESS)
        with running_http(homes[1], *flags) as two, client_of(two) as other:
            assert [each.id for each in other.batches.list()] == [batch.id]
            assert other.files.content(batch.input_file_id).content
            for change in (
                lambda: other.batches.cancel(batch.id),
                lambda: other.files.delete(batch.input_file_id),
                lambda: made(other, batch.input_file_id),
                lambda: other.files.create(file=("a", b"{}"), purpose="batch"),
            ):
                with pytest.raises(openai.InternalServerError, match=f"process id {one.process.process.pid}") as told:
                    change()
                assert told.value.status_code == 503
            assert owner.batches.retrieve(batch.id).status == "in_progress"
            assert owner.batches.cancel(batch.id).status == "cancelling"
            assert ended(owner, batch).status == "cancelled"
            one.process.stop()
            assert ended(other, begun(other, [line(0)])).status == "completed"


@contextmanager
def shared(tiny: Path, folder: Path, *names: str) -> Iterator[tuple[HostedHttp, list[openai.OpenAI]]]:
    """A server in this process, and a client for each key; without names one without a key."""
    keys = folder / "keys.toml"
    keys.write_text("".join(f'[{each}]\nsha256 = "{hashlib.sha256(each.encode()).hexdigest()}"\n' for each in names))
    config = config_for(
        tiny,
        http="127.0.0.1:0",
        http_jobs=str(folder / "jobs"),
        http_keys=str(keys) if names else "",
        http_timeout_sec=1.0,
    )
    with hosted_http(config) as server:
        yield (
            server,
            [
                openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=name, max_retries=0)
                for name in names or ("none",)
            ],
        )


def test_owners_have_their_own_bounds_and_take_turns(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MAX_UNFINISHED", 2)
    monkeypatch.setattr(batches, "TURN_SEC", 0.1)
    monkeypatch.setattr(files, "MAX_FILES", 6)
    with shared(tiny, tmp_path, "ann", "bob") as (_, (ann, bob)):
        long = begun(ann, ENDLESS)
        until(lambda: ann.batches.retrieve(long.id), lambda now: completed(now) > 0)
        made(ann, long.input_file_id)
        with pytest.raises(openai.RateLimitError, match="2 batches have not ended"):
            made(ann, long.input_file_id)
        assert ended(bob, begun(bob, [line(0)])).status == "completed"
        assert ann.batches.retrieve(long.id).status == "in_progress"
        with pytest.raises(openai.PermissionDeniedError, match=r"6 files and .* at most are kept for a key"):
            for _ in range(6):
                ann.files.create(file=("a", b"{}"), purpose="batch")
        bob.files.create(file=("a", b"{}"), purpose="batch")
        for batch in ann.batches.list():
            ann.batches.cancel(batch.id)


def test_rows_of_a_cancelled_batch_that_do_not_end_are_ended(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    @asynccontextmanager
    async def endless(*_: object) -> AsyncIterator[None]:
        asked.set()
        await trio.sleep_forever()
        yield

    monkeypatch.setattr(batch_queue, "CANCEL_SEC", 0.1)
    with shared(tiny, tmp_path) as (_, (client,)):
        monkeypatch.setattr(Engine, "generate", endless)
        batch = begun(client, ENDLESS)
        assert asked.wait(PATIENCE_SEC)
        assert client.batches.cancel(batch.id).status == "cancelling"
        assert ended(client, batch).status == "cancelled"


def test_uploads_that_trickle_are_ended_and_leave_no_file(tiny: Path, tmp_path: Path) -> None:
    head = (
        b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ann\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with shared(tiny, tmp_path, "ann", "bob") as (server, (ann, bob)):
        slow = [RawHttp(server.port) for _ in range(files.MAX_ARRIVING)]
        for raw in slow:
            raw.sock.sendall(head + b"1\r\nx\r\n")
        parts = tmp_path / "jobs" / "files"
        until(lambda: len(list(parts.glob("*.part"))) if parts.is_dir() else 0, lambda n: n == len(slow))
        with pytest.raises(openai.InternalServerError, match="of a client"):
            ann.files.create(file=("a", b"{}"), purpose="batch")
        bob.files.create(file=("a", b"{}"), purpose="batch")
        for raw in slow:
            with closing(raw):
                raw.sock.settimeout(0.2)
                answered = b""
                while not answered:  # a byte now and then, until the server has enough of it
                    raw.sock.sendall(b"1\r\nx\r\n")
                    try:
                        answered = raw.sock.recv(65_536)
                    except TimeoutError:
                        continue
                assert answered.startswith(b"HTTP/1.1 408")
                assert b"timeout: the body stalled" in answered
        until(lambda: list(parts.glob("*.part")), lambda left: not left)
        ann.files.create(file=("a", b"{}"), purpose="batch")


def test_a_full_disk_is_told_as_such(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(FileIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with shared(tiny, tmp_path) as (_, (client,)):
        kept = client.files.create(file=("a", b"{}"), purpose="batch")
        monkeypatch.setattr(files, "FileIO", Full)
        with pytest.raises(openai.InternalServerError, match="the disk is full: DELETE files") as told:
            client.files.create(file=("a", b"{}"), purpose="batch")
        assert (told.value.status_code, told.value.code) == (503, "service_unavailable")
        assert "Errno" not in told.value.message
        assert [each.name for each in (tmp_path / "jobs" / "files").iterdir()] == [kept.id]


@pytest.mark.parametrize("name", ["index.sqlite3", "responses.db"])
def test_a_damaged_index_or_file_of_responses_costs_itself_alone_and_stays_open_nowhere(
    tmp_path: Path, name: str
) -> None:
    damaged, errors = tmp_path / name, list[Exception]()
    with closing(Store(tmp_path)) as store:
        assert list(store.responses.chain("resp_1", "")) == []
    damaged.write_bytes(b"no database " * 1_000)
    for _ in range(3):
        try:
            with closing(Store(tmp_path)) as store:
                assert store.files("", 10) == ([], False)
                list(store.responses.chain("resp_1", ""))
        except (sqlite3.Error, KeptFault) as error:
            errors.append(error)  # with all that its traceback holds
    assert [type(error) for error in errors] == [KeptFault if name == "responses.db" else sqlite3.DatabaseError] * 3
    is_open = [fd.resolve().is_relative_to(tmp_path.resolve()) for fd in Path("/dev/fd").iterdir()]
    assert not any(is_open)


def test_results_that_are_open_only_after_the_server_s_end_are_closed_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, goes_on, is_open, real = threading.Event(), threading.Event(), threading.Event(), Results.open

    def stalled(*given: Any, **how: Any) -> Results:
        opening.set()
        assert goes_on.wait(PATIENCE_SEC)
        results = real(*given, **how)
        is_open.set()
        return results

    monkeypatch.setattr(Results, "open", stalled)
    with shared(tiny, tmp_path) as (_, (client,)):
        id = begun(client, [line(0)]).id
        assert opening.wait(PATIENCE_SEC)

    def is_free() -> bool:
        with suppress(JobChanged):
            real(tmp_path / "jobs" / "batches" / f"{id}.jsonl", {"version": 1}).close()
            return True
        return False

    goes_on.set()
    assert is_open.wait(PATIENCE_SEC)
    until(is_free, bool)


async def test_work_whose_caller_has_gone_lets_another_process_have_the_folder_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_there, may_end, is_closed, close = threading.Event(), threading.Event(), threading.Event(), Store.close

    def work(store: Store) -> None:
        store.check_own()
        is_there.set()
        assert may_end.wait(PATIENCE_SEC)

    def closed(store: Store) -> None:
        close(store)
        is_closed.set()

    monkeypatch.setattr(Store, "close", closed)
    folder = JobFolder(tmp_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(folder.do, work)
        assert await trio.to_thread.run_sync(is_there.wait, PATIENCE_SEC)
        nursery.cancel_scope.cancel()
    folder.close()
    assert not is_closed.is_set()
    may_end.set()
    assert await trio.to_thread.run_sync(is_closed.wait, PATIENCE_SEC)
    await JobFolder(tmp_path).do(Store.check_own)
