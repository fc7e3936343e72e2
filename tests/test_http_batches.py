"""OpenAI's files and batches, with its own client: sent, run, listed, cancelled, read, and there after a restart."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import sqlite3
import stat
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from engine_world import config_for
from http_server import HttpServer, hosted_http, new_key, running_http
from openai.types import Batch

from harness import until
from models import write_model
from uma.errors import BadRequest
from uma.http import files
from uma.http.multipart import MAX_FIELD_BYTES, MAX_HEAD_BYTES, MAX_PARTS, FormReader

CHAT: Any = "/v1/chat/completions"
OVER = ("completed", "failed", "cancelled")


def line(number: int, url: str = CHAT, **more: Any) -> dict[str, Any]:
    """A row."""
    body = {"messages": [{"role": "user", "content": f"Story {number}"}], "max_tokens": 5, "temperature": 0, **more}
    return {"custom_id": f"q{number}", "method": "POST", "url": url, "body": body}


def data(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data") / "jobs"


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[HttpServer]:
    with running_http(folder.parent, "--http-jobs", str(folder)) as server:
        yield server


@contextmanager
def client_of(server: HttpServer, key: str = "none") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def client(served: HttpServer) -> Iterator[openai.OpenAI]:
    with client_of(served) as one:
        yield one


def begun(client: openai.OpenAI, rows: list[dict[str, Any]], endpoint: Any = CHAT) -> Batch:
    """A batch of these rows."""
    file = client.files.create(file=("rows.jsonl", data(rows)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"})


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    """It, once it is over."""
    return until(lambda: client.batches.retrieve(batch.id), lambda now: now.status in OVER)


def completed(batch: Batch) -> int:
    return batch.request_counts.completed if batch.request_counts is not None else 0


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def test_a_batch_runs_to_an_output_and_an_error_file(client: openai.OpenAI) -> None:
    rows = [*(line(number) for number in range(12)), line(12, temperature=7), line(13, temprature=1)]
    batch = begun(client, rows)
    assert (batch.object, batch.completion_window, batch.metadata) == ("batch", "24h", {"a": "b"})
    done = ended(client, batch)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert done.request_counts.to_dict() == {"total": 14, "completed": 13, "failed": 1}
    good, bad = lines_of(client, done.output_file_id), lines_of(client, done.error_file_id)
    assert [each["custom_id"] for each in good] == [*(f"q{number}" for number in range(12)), "q13"]
    assert all(each["response"]["body"]["choices"][0]["message"]["content"] for each in good)
    assert bad[0]["response"]["status_code"] == 400
    assert bad[0]["response"]["body"]["error"]["param"] == "temperature"
    assert done.completed_at is not None
    assert done.completed_at >= done.created_at


def test_a_batch_decides_and_names_the_field_of_a_row_that_is_wrong(client: openai.OpenAI) -> None:
    body = {"input": "Buy now!", "questions": [{"type": "predicate", "instructions": "Is it spam?"}]}
    rows = [{"custom_id": name, "method": "POST", "url": "/v1/decisions", "body": body} for name in ("a", "b", "c")]
    rows[1]["body"] = body | {"questions": [{"type": "guess"}]}
    done = ended(client, begun(client, rows, "/v1/decisions"))
    good, bad = lines_of(client, done.output_file_id), lines_of(client, done.error_file_id)
    shares = [each["response"]["body"]["answers"][0]["probability"] for each in good]
    assert [each["custom_id"] for each in (*good, *bad)] == ["a", "c", "b"]
    assert all(0 < share < 1 for share in shares)
    assert bad[0]["response"]["body"]["error"]["param"] == "questions[0].type"


def test_files_are_listed_shown_sent_back_and_deleted(client: openai.OpenAI) -> None:
    sent = data([line(0)]) * 3_000  # some pieces of a connection
    made = [client.files.create(file=(f"{index} é.jsonl", sent), purpose="batch") for index in range(3)]
    over_pages = [each.id for each in client.files.list(limit=2)]
    assert over_pages[:3] == [each.id for each in reversed(made)]
    assert client.files.retrieve(made[0].id).filename == "0 é.jsonl"
    assert client.files.retrieve(made[0].id).bytes == len(sent)
    assert client.files.content(made[0].id).content == sent
    assert client.files.delete(made[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(made[0].id)
    with pytest.raises(openai.BadRequestError, match="purpose: expected batch"):
        client.files.create(file=("a", b"x"), purpose="assistants")


def test_a_batch_is_cancelled_and_keeps_what_was_done(client: openai.OpenAI) -> None:
    batch = begun(client, [line(number, max_tokens=12, ignore_eos=True) for number in range(3_000)])
    with pytest.raises(openai.BadRequestError, match="reads this file"):
        client.files.delete(batch.input_file_id)

    def completed(now: Batch) -> int:
        assert now.request_counts is not None
        return now.request_counts.completed

    until(lambda: client.batches.retrieve(batch.id), lambda now: completed(now) > 0)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch)
    assert done.status == "cancelled"
    assert len(lines_of(client, done.output_file_id)) == completed(done) < 3_000
    assert batch.id in [each.id for each in client.batches.list(limit=1)]
    with pytest.raises(openai.BadRequestError, match="cancelled already"):
        client.batches.cancel(batch.id)


def test_rows_that_end_behind_one_that_runs_are_counted_as_they_end(client: openai.OpenAI) -> None:
    long = line(0, max_tokens=1_500, ignore_eos=True)
    batch = begun(client, [long, *(line(number, max_tokens=2) for number in range(1, 5)), line(5, temperature=7)])
    now = until(lambda: client.batches.retrieve(batch.id), lambda now: completed(now) == 4 or now.status in OVER)
    assert now.request_counts is not None
    assert (now.status, now.request_counts.to_dict()) == ("in_progress", {"total": 6, "completed": 4, "failed": 1})
    assert completed(ended(client, batch)) == 5


def test_gzip_is_refused_over_http(client: openai.OpenAI, folder: Path) -> None:
    before = set((folder / "files").iterdir())
    with pytest.raises(openai.BadRequestError, match="gzip is not supported over HTTP"):
        client.files.create(file=("rows.jsonl.gz", gzip.compress(data([line(0)]))), purpose="batch")
    assert set((folder / "files").iterdir()) == before


def test_metadata_and_rows_have_openai_s_bounds(client: openai.OpenAI) -> None:
    def make(metadata: dict[str, str], rows: bytes = b"{}\n") -> Batch:
        file = client.files.create(file=("rows.jsonl", rows), purpose="batch")
        return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata=metadata)

    most = {f"{at:064}": 512 * "x" for at in range(16)}
    assert make(most).metadata == most
    for metadata in ({str(at): "" for at in range(17)}, {65 * "n": ""}, {"a": 513 * "x"}):
        with pytest.raises(openai.BadRequestError, match="metadata: expected"):
            make(metadata)
    for value in (True, 1, None, ["x"]):
        wrong: dict[str, Any] = {"a": value}
        with pytest.raises(openai.BadRequestError, match=r"metadata\['a'\]: expected a string"):
            make(wrong)
    with pytest.raises(openai.BadRequestError, match="over 50,000 lines"):
        make({}, b"\n" * 50_001)


def test_pages_go_on_behind_an_entry_that_is_there(client: openai.OpenAI) -> None:
    made = [client.files.create(file=("rows.jsonl", b"{}"), purpose="batch") for _ in range(3)]
    rising = client.files.list(order="asc", after=made[0].id, limit=1)
    assert ([each.id for each in rising.data], rising.has_more) == ([made[1].id], True)
    client.files.delete(made[1].id)
    with pytest.raises(openai.BadRequestError, match=r"after: .* was not found"):
        client.files.list(after=made[1].id)
    with pytest.raises(openai.BadRequestError, match="limit: expected"):
        client.files.list(extra_query={"limit": "9" * 5_000})
    with pytest.raises(openai.BadRequestError, match="was not found"):
        client.batches.list(after="batch_1")


def test_what_cannot_be_a_batch_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="input_file_id: no such file"):
        client.batches.create(input_file_id="file-1", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_1")
    file = client.files.create(file=("rows.jsonl", b"{}"), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="endpoint: expected one of"):
        client.batches.create(input_file_id=file.id, endpoint="/v1/moderations", completion_window="24h")


@pytest.mark.parametrize(
    ("wrong", "code", "message"),
    [
        (b"id,text\n", "invalid_json_line", "line 3: the row is not JSON"),
        (b'{"prompt": "a"}\n', "invalid_url", "line 3: url: expected /v1/chat/completions, not null"),
        (data([line(1, "/v1/embeddings")]), "invalid_url", 'url: expected /v1/chat/completions, not "/v1/embeddings"'),
        (data([line(1) | {"method": "GET"}]), "invalid_method", 'method: expected POST, not "GET"'),
        (data([line(1) | {"body": None}]), "missing_required_parameter", "body: expected a JSON object, not null"),
        (data([line(1) | {"custom_id": None}]), "missing_required_parameter", "custom_id: expected a name of the row"),
        (data([line(0)]), "duplicate_custom_id", 'custom_id: "q0" is that of line 1 and of line 3'),
    ],
)
def test_a_batch_with_a_row_that_can_be_no_request_fails_and_names_its_line(
    client: openai.OpenAI, wrong: bytes, code: str, message: str
) -> None:
    file = client.files.create(file=("rows.jsonl", data([line(0)]) + b"\n" + wrong), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    batch = client.batches.retrieve(made.id)
    assert (batch.status, made.status, batch.output_file_id, batch.in_progress_at) == ("failed", "failed", None, None)
    assert batch.failed_at is not None
    assert batch.errors is not None and batch.errors.data is not None
    (fault,) = batch.errors.data
    assert (fault.code, fault.line) == (code, 3)
    assert message in str(fault.message)
    assert "--" not in str(fault.message), "words of the command line"
    client.files.delete(file.id)


def test_an_empty_file_and_a_table_are_batches_that_fail(client: openai.OpenAI) -> None:
    for rows, codes in ((b"\n", ["empty_file"]), (b"id,text\n" * 120, ["invalid_json_line"] * 100)):
        file = client.files.create(file=("rows.jsonl", rows), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert batch.errors is not None and batch.errors.data is not None
        assert (batch.status, [each.code for each in batch.errors.data]) == ("failed", codes)


def test_only_this_user_reads_what_is_kept(client: openai.OpenAI, folder: Path) -> None:
    client.files.create(file=("rows.jsonl", b"{}"), purpose="batch")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for each in (folder / "files").iterdir():
        assert stat.S_IMODE(each.stat().st_mode) == 0o600


def test_a_batch_goes_on_in_the_next_server_and_each_key_sees_its_own(tmp_path: Path) -> None:
    keys, jobs = tmp_path / "keys.toml", tmp_path / "jobs"
    names = ("ann", "bob")
    keys.write_text("".join(f'[{each}]\nsha256 = "{hashlib.sha256(each.encode()).hexdigest()}"\n' for each in names))
    options = ("--http-jobs", str(jobs), "--http-keys", str(keys))
    rows = [line(number) for number in range(120)]
    with running_http(tmp_path, *options) as server:
        with client_of(server, "ann") as ann:
            batch = begun(ann, rows)
        with client_of(server, "bob") as bob, pytest.raises(openai.NotFoundError):
            bob.batches.retrieve(batch.id)
        server.process.process.kill()
        server.process.wait()
    with running_http(tmp_path, *options) as server, client_of(server, "ann") as ann:
        done = ended(ann, batch)
        assert done.status == "completed"
        assert [each["custom_id"] for each in lines_of(ann, done.output_file_id)] == [f"q{n}" for n in range(120)]
    with sqlite3.connect(jobs / "index.sqlite3") as index:
        assert index.execute("SELECT count(*) FROM batches").fetchone() == (1,)
    index.close()
    assert not list((jobs / "batches").iterdir())


def test_a_batch_s_tokens_are_its_key_s_and_a_row_that_waits_for_the_key_s_bound_is_no_refusal(tmp_path: Path) -> None:
    key = new_key("ann", keys := tmp_path / "keys.toml", "max_tokens_per_minute = 1\n")
    options = ("--http-jobs", str(tmp_path / "jobs"), "--http-keys", str(keys))
    with running_http(tmp_path, *options) as server, client_of(server, key) as ann:
        begun(ann, [line(number) for number in range(400)])

        def told() -> str:
            return server.ask("GET", "/metrics", authorization=f"Bearer {key}").body.decode()

        text = until(told, lambda text: 'uma_http_requests_total{status="429"}' in text)
    figures = dict(re.findall(r'^uma_key_(\w+)_total{key="ann"} (\d+)$', text, re.MULTILINE))
    assert int(figures["requests"]) > 0
    assert int(figures["completion_tokens"]) > 0
    assert int(figures["refused"]) == 0


def test_a_batch_that_cannot_go_on_says_why_and_goes_on_once_it_can(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    folders = [tmp_path / each for each in ("small", "large")]
    for folder in folders:
        folder.mkdir()
    small, large = (
        write_model(folder / "same.gguf", feed_forward=size) for folder, size in zip(folders, (256, 512), strict=True)
    )
    flags = "--http-jobs", str(jobs)
    with running_http(tmp_path, "--model", str(small), *flags) as server, client_of(server) as client:
        batch = begun(client, [line(number, max_tokens=60) for number in range(200)])
        until(lambda: client.batches.retrieve(batch.id), lambda now: completed(now) > 0)
    with running_http(tmp_path, "--model", str(large), *flags) as server, client_of(server) as client:
        left = until(lambda: client.batches.retrieve(batch.id), lambda now: now.errors is not None)
        assert left.status == "in_progress"
        assert "paused: " in str(left.errors)
        assert "model.parameters was " in str(left.errors)
    with running_http(tmp_path, "--model", str(small), *flags) as server, client_of(server) as client:
        on = until(lambda: client.batches.retrieve(batch.id), lambda now: now.errors is None)
        assert on.status == "in_progress"
        done = ended(client, batch)
        assert (done.status, done.errors, completed(done)) == ("completed", None, 200)


def test_an_index_that_cannot_be_written_leaves_the_server_and_the_batch(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    with running_http(tmp_path, "--http-jobs", str(jobs)) as server, client_of(server) as client:
        batch = begun(client, [line(0)])
        with closing(sqlite3.connect(jobs / "index.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            until(lambda: "batch.paused" in server.process.log.text, bool)
            other.execute("ROLLBACK")
        assert ended(client, begun(client, [line(1)])).status == "completed"
        assert ended(client, batch).status == "completed"


FORM = (
    b'preamble\r\n--b--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
    b"{}\r\n--b--\r\n\r\n--b--x--\r\nepilogue"
)


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
def test_a_form_is_the_same_in_whatever_pieces_it_comes(piece: int) -> None:
    contents: list[bytes] = []
    form = FormReader('multipart/form-data; boundary="b--x"')
    form.write = contents.append
    for start in range(0, len(FORM), piece):
        assert form.is_whole == (start >= len(FORM) - len("epilogue") - 2)
        form.feed(FORM[start : start + piece])
    assert (form.fields, form.file_name, b"".join(contents)) == ({"purpose": "batch"}, "a.jsonl", b"{}\r\n--b--\r\n")


def test_what_is_no_form_is_refused() -> None:
    with pytest.raises(BadRequest, match="expected multipart/form-data"):
        FormReader("application/json")
    with pytest.raises(BadRequest, match="follows a boundary"):
        FormReader("multipart/form-data; boundary=b").feed(b"--bad")


@pytest.mark.parametrize("coding", ["unicode_escape", "idna", "punycode", "hex", "a%00b"])
def test_a_file_name_in_any_encoding_is_text_or_refused(coding: str) -> None:
    head = f"filename*={coding}''%5Cud800"
    form = FormReader("multipart/form-data; boundary=b")
    try:
        form.feed(part(f'name="file"; {head}') + b"--b--\r\n")
    except BadRequest as refused:
        assert "encoding of its name" in refused.message
    else:
        assert form.file_name is not None
        form.file_name.encode()


def part(head: str, value: bytes = b"") -> bytes:
    return b"--b\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + value + b"\r\n"


def test_what_a_form_costs_is_bounded_whatever_its_length() -> None:
    def read(form: bytes) -> FormReader:
        reader = FormReader("multipart/form-data; boundary=b")
        reader.feed(form + b"--b--\r\n")
        return reader

    most = b"".join(part(f'name="n{at}"') for at in range(MAX_PARTS))
    assert len(read(most).fields) == MAX_PARTS
    for form, told in (
        (most + part('name="more"'), "more than 64 parts"),
        (part('name="a"; x="' + "y" * MAX_HEAD_BYTES + '"'), "headers are over 2,048 bytes"),
        (part('name="a"', bytes(MAX_FIELD_BYTES)) + part('name="a"', b"1"), "a: the form's values are over"),
    ):
        with pytest.raises(BadRequest, match=told):
            read(form)


def test_what_stands_behind_a_form_is_not_kept() -> None:
    form, more = FormReader("multipart/form-data; boundary=b"), bytes(2**20)
    form.feed(b"--b--\r\n")
    tracemalloc.start()
    for _ in range(20):
        form.feed(more)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(more)


def test_what_stands_around_a_file_is_bounded_too(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form's beginning, before its first part, that has no end."""
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 100_000)
    config = config_for(tiny, http="127.0.0.1:0", http_jobs=str(tmp_path / "jobs"))
    with hosted_http(config) as server, server.connect() as raw:
        piece = b"10000\r\n" + bytes(65_536) + b"\r\n"
        raw.sock.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n" + 2 * piece
        )
        assert (answered := raw.answer()).status == 413
        assert "file: is over 100,000 bytes" in answered.json["error"]["message"]
