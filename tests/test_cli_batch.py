"""`uma batch`: each row has one result, whatever ends the job, the server or the disk meanwhile."""

from __future__ import annotations

import gzip
import json
import random
import re
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE, run
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from pty_screen import WIDTHS, Terminal, check_screen

from forked import Forked
from harness import (
    EXACT,
    PATIENCE_SEC,
    RunInProcessText,
    ServerProcess,
    clean_environ,
    running_server,
    uma_command,
    until,
)
from uma.cli.batch_view import Speed
from uma.cli.say import ERASE_LINE
from uma.jobs import Progress, Tally

URL = "/v1/chat/completions"
SHORT = {"max_tokens": 6, "temperature": 0}


def lines(count: int, **more: Any) -> list[dict[str, Any]]:
    """OpenAI's batch lines."""
    return [
        {
            "custom_id": f"q{number}",
            "method": "POST",
            "url": URL,
            "body": {"messages": [{"role": "user", "content": f"Tell me story {number}"}], **SHORT, **more},
        }
        for number in range(count)
    ]


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes the input."""

    def write(rows: Sequence[Any], name: str = "in.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in rows))
        return path

    return write


@pytest.fixture
def batch(uma_told: RunInProcessText, server: ServerProcess, tmp_path: Path) -> Callable[..., Any]:
    """Runs it to its end on the server that all share; OUT is `out.jsonl`."""
    return partial(uma_told, "batch", "--socket", str(server.socket), "-o", str(tmp_path / "out.jsonl"))


def results(path: Path) -> list[Any]:
    """OUT, which must hold whole lines alone."""
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return [json.loads(line) for line in data.splitlines()]


def said(result: Any) -> tuple[str, str]:
    """What a result says, but for its times."""
    return result["custom_id"], result["response"]["body"]["choices"][0]["message"]["content"]


@contextmanager
def started(server: Path, file: Path, out: Path, *more: str) -> Iterator[Forked]:
    """A process of its own, gone after the block."""
    command = ("batch", "--socket", str(server), str(file), "-o", str(out), *more)
    with Forked(command, clean_environ(), stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_results(server: ServerProcess, out: Path, least: int) -> None:
    """Wait until OUT has so many. Each look is a round trip to the server too, which leaves the job the processor."""

    def count() -> int:
        server.metrics()
        return out.read_bytes().count(b"\n") if out.exists() else 0

    until(count, lambda found: found >= least)


def test_each_row_has_a_line_as_openai_s_batches_have_it(
    server: ServerProcess, rows: Callable[..., Path], tmp_path: Path
) -> None:
    bad = {"custom_id": "bad", "url": URL, "body": {"messages": [], **SHORT}}
    foreign = {"id": "plain", "prompt": "Hi", "model": "gpt-4", **SHORT}
    other = {"custom_id": "other", "url": URL, "body": {"model": "llama-9", "messages": [{"role": "user"}]}}
    file = rows([*lines(20), bad, "not json", foreign, other])
    command = uma_command("batch", "--socket", str(server.socket), "-", "-o", str(tmp_path / "out.jsonl"))
    # Rows of a pipe cannot be looked at before a model answers.
    done = run(command, input=file.read_text(), env=clean_environ(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"done: 24 rows in .* tokens/s, 3 failed", done.stderr)
    assert re.search(
        r"3 rows failed:\n.* 1 because: .*\(row 21\)\n.* 1 because: .*\(row 22\)\n.* 1 because: .*\(row 24\)\n",
        done.stderr,
    )
    assert re.search("uma: 1 row named gpt-4, answered by .", done.stderr)
    found = results(tmp_path / "out.jsonl")
    assert [each["custom_id"] for each in found] == [
        *(f"q{number}" for number in range(20)),
        "bad",
        "row-22",
        "plain",
        "other",
    ]
    for each in (*found[:20], found[22]):
        assert each.keys() == {"id", "custom_id", "response", "error"}
        assert each["response"].keys() == {"status_code", "request_id", "body"}
        assert each["response"]["status_code"] == 200
        assert each["error"] is None
        assert ChatCompletion.model_validate(each["response"]["body"]).choices[0].message.content
    assert found[20]["response"]["status_code"] == 400
    assert found[20]["response"]["body"]["error"]["param"] == "messages"
    assert found[21]["response"] is None
    assert found[21]["error"]["code"] == "invalid_row"
    assert found[23]["response"]["body"]["error"]["code"] == "model_not_found"


def test_other_endpoints_columns_and_pipes(
    batch: Callable[..., Any], rows: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    predicate = {"type": "predicate", "instructions": "Is it spam?"}
    asked = [
        {"url": "/v1/completions", "body": {"prompt": "Once", **SHORT}},
        {"url": "/v1/responses", "body": {"input": "Hi", "max_output_tokens": 5}},
        {"url": "/score", "body": {"text_1": "a fox", "text_2": ["a fox", "the sea"]}},
        {"url": "/v1/decisions", "body": {"input": "Buy!", "questions": [predicate]}},
        {"url": "/v1/systemone", "body": {"state": {"mail": "Buy!"}, "questions": {"a": predicate | {"type": "noul"}}}},
    ]
    packed = gzip.compress("".join(json.dumps(each) + "\n" for each in asked).encode())
    assert batch("-", stdin=packed).returncode == 0
    *generated, scored, one, other = (each["response"]["body"] for each in results(out))
    assert [each["object"] for each in (*generated, scored)] == ["text_completion", "response", "list"]
    near, far = (each["score"] for each in scored["data"])
    assert 0 < one["answers"][0]["probability"] < 1
    assert 0 < other["answers"]["a"]["noul"] < 1
    assert near == pytest.approx(1)
    assert far < near
    table = rows(["id,text", "a,the sea", "b,a fox"], "in.csv")
    schema = rows([{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}], "schema.json")
    options = ("--template", "Tell me of {text}", "--max-tokens", "40", "--schema", str(schema), "--restart")
    assert batch(str(table), *options).returncode == 0
    assert [said(each)[0] for each in results(out)] == ["a", "b"]
    ended = [each for each in results(out) if each["response"]["body"]["choices"][0]["finish_reason"] == "stop"]
    assert all(isinstance(json.loads(said(each)[1])["n"], int) for each in ended)


def test_a_job_goes_on_and_notices_what_has_changed(
    batch: Callable[..., Any], rows: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    assert batch(str(rows(lines(5)))).returncode == 0
    first = out.read_bytes()
    grown = batch(str(rows([*lines(8), {"messages": []}])))
    assert grown.returncode == 1
    assert out.read_bytes().startswith(first), "what was done is not done again"
    assert len(results(out)) == 9
    assert batch(str(rows([*lines(8), {"messages": []}]))).returncode == 1, "a row that failed still has"
    other = batch(str(rows(lines(8))), "--seed", "5")
    assert other.returncode == 2
    assert "--seed was not set and is 5 now" in other.stderr
    shrunk = batch(str(rows(lines(8))))
    assert shrunk.returncode == 2
    assert "more rows than the input" in shrunk.stderr
    changed = [*lines(8), {"prompt": "mended", **SHORT}]
    changed[2] = {"prompt": "another", **SHORT}
    noticed = batch(str(rows(changed)))
    assert noticed.returncode == 2
    assert "row 3 of the input is another one" in noticed.stderr
    kept = out.read_bytes().splitlines()
    assert batch(str(rows(changed)), "--only-failed").returncode == 0
    now = out.read_bytes().splitlines()
    assert [index for index in range(9) if kept[index] != now[index]] == [2, 8]
    assert batch(str(rows(lines(2))), "--restart").returncode == 0
    assert len(results(out)) == 2


def test_killed_at_any_moment_every_row_has_one_result_and_it_is_the_same(
    server: ServerProcess, batch: Callable[..., Any], rows: Callable[..., Path], tmp_path: Path
) -> None:
    file, whole, killed = rows(lines(90)), tmp_path / "out.jsonl", tmp_path / "killed.jsonl"
    assert batch(str(file)).returncode == 0
    chance = random.Random(7)
    for part in (1, 3):
        with started(server.socket, file, killed) as job:
            wait_for_results(server, killed, 15 * part + chance.randrange(15))
            job.kill()
    with killed.open("ab") as torn:
        torn.write(b'{"id": "batch_req_')
    with started(server.socket, file, killed) as job:
        job.communicate(timeout=PATIENCE_SEC)
        assert job.returncode == 0
    assert list(map(said, results(killed))) == list(map(said, results(whole)))


def test_rows_wait_for_a_server_that_is_killed_and_started_again(
    socket_dir: Path, rows: Callable[..., Path], tmp_path: Path
) -> None:
    out, place = tmp_path / "out.jsonl", socket_dir / "uma.sock"
    with running_server(place, *EXACT) as server, started(place, rows(lines(90)), out, "--unordered") as job:
        wait_for_results(server, out, 10)
        server.process.kill()
        server.wait()
        with running_server(place, *EXACT):
            _, told = job.communicate(timeout=PATIENCE_SEC)
    assert job.returncode == 0, told
    assert b"the server is back" in told
    assert sorted(each["custom_id"] for each in results(out)) == sorted(f"q{number}" for number in range(90))
    assert {each["response"]["status_code"] for each in results(out)} == {200}


def test_ctrl_c_lets_rows_end_and_says_how_to_go_on(
    server: ServerProcess, rows: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    with started(server.socket, rows(lines(2_000, max_tokens=12)), out, "--json") as job:
        wait_for_results(server, out, 5)
        with server.connect() as raw:
            at_once = raw.hello(versions=["1.1"])["limits"]["max_sequences"]
        figures = server.metrics()
        assert figures["active_sequences"] + figures["queued_requests"] < at_once, "others find a place at once"
        job.send_signal(signal.SIGINT)
        events, told = job.communicate(timeout=PATIENCE_SEC)
    assert job.returncode == 130
    assert b"run to their ends" in told
    assert b"Ctrl-C again" in told
    assert b"the same command goes on" in told
    stopped = json.loads(events.splitlines()[-1])
    assert stopped["event"] == "stopped"
    assert stopped["rows"] == len(results(out)) < 2_000
    assert {each["response"]["status_code"] for each in results(out)} == {200}


def test_a_first_wave_is_told_of_and_whatever_ends_it_says_how_to_go_on(
    server: ServerProcess, rows: Callable[..., Path], tmp_path: Path
) -> None:
    out, file = tmp_path / "out.jsonl", rows(lines(16, max_tokens=3_000, ignore_eos=True))
    with started(server.socket, file, out, "--json") as job:
        assert job.stdout is not None
        seen = iter(map(json.loads, iter(job.stdout.readline, b"")))
        told = next(each for each in seen if each["completion_tokens"])
        assert (told["event"], told["rows"], told["total_rows"], told["running"]) == ("progress", 0, 16, 16)
        assert told["tokens_per_second"] > 0
        assert told["prompt_tokens"] > 0
        assert job.stderr is not None
        job.send_signal(signal.SIGTERM)
        assert any(
            b"16 rows run to their ends (rows 1, 2, 3 \xe2\x80\xa6), and then it stops; SIGTERM again" in line
            for line in iter(job.stderr.readline, b"")
        )
        job.send_signal(signal.SIGTERM)
        _, said = job.communicate(timeout=PATIENCE_SEC)
    assert job.returncode == 128 + signal.SIGTERM
    assert b"the same command goes on" in said
    with started(server.socket, file, out) as job:
        assert job.stderr is not None
        assert any(
            b"was begun before, and no row had come to its end" in line for line in iter(job.stderr.readline, b"")
        )


def test_rows_that_come_through_a_pipe_are_answered_as_they_come(server: ServerProcess, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with started(server.socket, Path("-"), out) as job:
        assert job.stdin is not None
        for number, each in enumerate(lines(3)):
            job.stdin.write(json.dumps(each).encode() + b"\n")
            job.stdin.flush()
            wait_for_results(server, out, number + 1)
        job.communicate(timeout=PATIENCE_SEC)
    assert job.returncode == 0


def test_ctrl_c_ends_a_job_that_waits_for_rows_of_a_terminal(server: ServerProcess, tmp_path: Path) -> None:
    command = uma_command("batch", "-", "-o", "out.jsonl", "--socket", str(server.socket), "--max-tokens", "2")
    for keys, code, said in (("\x03", 130, "stopped with 0 results"), ("\x04", 0, "- has no rows")):
        with Terminal(command, clean_environ(), cwd=str(tmp_path)) as terminal:
            terminal.wait_for("waiting for rows from the terminal, one on each line; Ctrl-D ends them")
            terminal.type(keys)
            assert terminal.wait() == code
            assert said in terminal.text
    with Terminal(command, clean_environ(), cwd=str(tmp_path)) as terminal:
        terminal.wait_for("Ctrl-D ends them")
        terminal.type('{"prompt": "a"}\r')
        wait_for_results(server, tmp_path / "out.jsonl", 1)
        terminal.type("\x03")
        assert terminal.wait() == 130
        assert "stopped with 1 result in out.jsonl" in terminal.text


def test_a_full_disk_ends_it_and_with_space_it_goes_on(
    batch: Callable[..., Any], rows: Callable[..., Path], server: ServerProcess, tmp_path: Path
) -> None:
    file, out = rows(lines(40)), tmp_path / "out.jsonl"
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        full = batch(str(file))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert full.returncode == 1
    assert "out.jsonl: File too large; what is in it is kept" in full.stderr
    kept = out.read_bytes()
    assert 0 < len(results(out)) < 40
    assert batch(str(file)).returncode == 0
    assert out.read_bytes().startswith(kept)
    assert [each["custom_id"] for each in results(out)] == [f"q{number}" for number in range(40)]


def test_before_a_row_has_ended_it_is_told_how_many_run() -> None:
    tally = Tally()
    tally.begin()
    assert Speed(tally).line() == "0 rows · 1 running"
    tally.note({"a": Progress(prompt_tokens=1_200)})
    assert Speed(tally).line() == "0 rows · 1 running · 1,200 prompt tokens read"
    tally.note({"a": Progress(prompt_tokens=1)})
    assert Speed(tally).line().endswith(" · 1 prompt token read")
    tally.total_rows, tally.rows, tally.failed = 20, 5, 1
    tally.note({"a": Progress(prompt_tokens=1_200, completion_tokens=9)})
    assert re.fullmatch(
        r"5 of 20 rows \(25 ?%\) · 1 running · [0-9,.]+ tokens/s · [0-9,.]+ rows/min · 0:00:0\d · 1 failed",
        Speed(tally).line(),
    )
    assert Speed(tally).line(40).startswith("5 of 20 rows"), "what matters least makes way"
    assert "running" not in Speed(tally).line(40)
    assert Speed(tally).line(30) == Speed(tally).line(1)
    assert Speed(tally).line(30).endswith("%) · 1 failed")
    tally.note({"a": Progress(waits=True)})
    assert "· 1 queued ·" in Speed(tally).line()
    tally.note({}, "beta: loading, 40 %")
    assert "· beta: loading, 40 % ·" in Speed(tally).line()
    assert "beta: loading, 40 %" in Speed(tally).line(1)
    tally.note({"a": Progress(1)}, "beta: loading, 40 %")
    assert "loading" not in Speed(tally).line(), "its rows run, and it is others' model"
    tally.note({})
    tally.unwritten, tally.unwritten_failed, tally.kept, tally.blocking_row = 14, 6, 14, 6
    line = Speed(tally).line()
    assert line.startswith("19 of 20 rows (95%) · 1 running (row 6; 14 wait for it) · ") and line.endswith(
        " · 7 failed"
    )


def test_rows_that_all_fail_alike_say_so_once_and_what_can_be_known_before_is_told_before(
    batch: Callable[..., Any], rows: Callable[..., Path], tmp_path: Path
) -> None:
    file = rows([{"text": "a"}, {"text": "b"}])
    done = batch(str(file), "--template", "Say: {txt}")
    assert (done.returncode, "--template: there is no column 'txt' in the row; it has text" in done.stderr) == (2, True)
    assert not (tmp_path / "out.jsonl").exists(), "it is told before a model is loaded"
    done = batch(str(file))
    assert (done.returncode, "lines 1, 2: expected a prompt" in done.stderr) == (2, True)
    done = batch(str(rows([{"messages": []}] * 2, "none.jsonl")))
    assert (done.returncode, "all 2 rows failed, because: messages" in done.stderr) == (1, True)
    assert batch(str(file), "--template", "Say: {text}", "--max-tokens", "2").returncode == 0, "nothing good was lost"
    other = batch(str(file), "--template", "{text}", "--local", "--model", "/none.gguf")
    assert (other.returncode, "was started with other settings: --template was" in other.stderr) == (2, True), (
        "before the model"
    )
    missing = batch(str(tmp_path / "nothing.jsonl"))
    assert (missing.returncode, "nothing.jsonl: No such file" in missing.stderr) == (2, True)
    nowhere = batch(str(file), "--template", "{text}", "-o", str(tmp_path / "none" / "out"))
    assert (nowhere.returncode, "/none/out: cannot be written; results need a folder" in nowhere.stderr) == (2, True)


def test_a_narrow_terminal_has_one_line_that_whatever_is_said_replaces(
    socket_dir: Path, rows: Callable[..., Path], tmp_path: Path
) -> None:
    place, file, columns = socket_dir / "uma.sock", rows(lines(90, max_tokens=3_000, ignore_eos=True)), 36
    command = uma_command("batch", "--socket", str(place), str(file), "-o", str(tmp_path / "out.jsonl"))
    with running_server(place, *EXACT) as server, Terminal(command, clean_environ(), columns=columns) as terminal:
        terminal.wait_for("of 90 rows")
        terminal.wait_until(lambda: terminal.raw.count(b"of 90 rows") > 4, "more looks")
        server.process.kill()
        server.wait()
        terminal.wait_until(
            lambda: b"wait until a server is back" in b" ".join(terminal.raw.split()), "the server's end"
        )
        assert all(line.startswith("uma: ") for line in terminal.screen if "uma.sock:" in line), terminal.screen
        looks = [each.partition("\r")[0] for each in terminal.raw.decode().split(ERASE_LINE) if "of 90" in each]
        assert max(map(len, looks)) < columns


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_job_s_last_screen_is_the_one_in_its_file(
    columns: int, server: ServerProcess, rows: Callable[..., Path], tmp_path: Path
) -> None:
    file = rows([*lines(3, max_tokens=2), {"custom_id": "without", "method": "POST", "url": URL, "body": {}}])
    command = uma_command("batch", "--socket", str(server.socket), file.name, "-o", "out.jsonl")
    with Terminal(command, clean_environ(), columns=columns, cwd=str(tmp_path)) as terminal:
        assert terminal.wait() == 1
        shown = terminal.text.strip() + "\n"
    shown = re.sub(r"in [\d.]+ s, 6 tokens, [\d.,]+ tokens/s", "in 1 s, 6 tokens, 41 tokens/s", shown)
    check_screen("batch-end", columns, shown)


@pytest.mark.parametrize("name", ["in.csv", "in.jsonl.gz"])
def test_an_input_that_cannot_be_read_to_its_end_costs_the_rows_before_nothing(
    batch: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    file, out = tmp_path / name, tmp_path / "out.jsonl"
    whole = b'prompt\na\nb\n"c"\nd\n'
    if name.endswith(".gz"):
        whole = gzip.compress(b"".join(b'{"prompt": "%s"}\n' % each for each in (b"a", b"b", b"c", b"d")))
    file.write_bytes(whole[:-8] if name.endswith(".gz") else whole.replace(b'"c"', b'"c'))
    cut = batch(str(file), "--max-tokens", "5")
    assert cut.returncode == 2
    assert re.search(rf"{name}: the input.* the rows before have results in .*the same command goes on", cut.stderr)
    kept = out.read_bytes()
    assert len(results(out)) >= 2
    file.write_bytes(whole)
    assert batch(str(file), "--max-tokens", "5").returncode == 0
    assert out.read_bytes().startswith(kept)
    assert len(results(out)) == 4


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--raw", "--system", "Be brief."), "--system: instructions need the chat template"),
        (("--template", "Summarise: {{text}}"), "names no column, so that all rows would ask the same; write"),
        (("--schema", "/nowhere.json"), "/nowhere.json: cannot be read: No such file or directory\n"),
    ],
)
def test_an_option_that_no_row_could_follow_is_refused_before_any_runs(
    batch: Callable[..., Any], rows: Callable[..., Path], tmp_path: Path, options: Sequence[str], why: str
) -> None:
    refused = batch(str(rows([{"prompt": "a", "text": "b"}])), *options)
    assert refused.returncode == 2
    assert why in refused.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_missing_input_and_no_file_of_results_are_told_at_once(uma_told: RunInProcessText, tmp_path: Path) -> None:
    done = uma_told("batch", str(tmp_path / "none.jsonl"))
    assert done.returncode == 2
    told = " ".join(done.stderr.split())
    assert "none.jsonl: No such file or directory" in told
    assert "-o is missing: name the file of results" in told
    (tmp_path / "in.jsonl").touch()
    assert "uma: error: -o is missing" in uma_told("batch", str(tmp_path / "in.jsonl")).stderr
    for name in ("-", "/dev/stdout"):
        piped = uma_told("batch", str(tmp_path / "in.jsonl"), "-o", name)
        assert (piped.returncode, "-o: results go to a file" in piped.stderr) == (2, True)


def test_one_row_that_failed_is_told_as_one(batch: Callable[..., Any], rows: Callable[..., Path]) -> None:
    assert "done: 1 row in" in (told := batch(str(rows([{"messages": []}]))).stderr)
    assert "1 row failed, because: messages" in told


def test_fields_that_had_no_effect_are_named_once_for_all_rows(
    batch: Callable[..., Any], rows: Callable[..., Path]
) -> None:
    asked = [{"prompt": "a", **SHORT, "temper": 1}, {"prompt": "b", **SHORT, "temper": 1, "category": "c"}]
    told = batch(str(rows(asked)))
    assert told.returncode == 0
    assert (
        "fields and options that had no effect: temper (2 rows; did you mean temperature?), category (1 row)\n"
        in told.stderr
    )
    assert "no effect" not in batch(str(rows(lines(2))), "--restart").stderr


def test_answers_that_are_cut_and_options_that_ready_rows_do_not_take_are_told(
    batch: Callable[..., Any], rows: Callable[..., Path]
) -> None:
    ready = [
        {"url": "/v1/responses", "body": {"input": "Hi", "max_output_tokens": 2, "stream": True}},
        {"url": "/v1/messages", "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}},
        {"url": URL, "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}},
    ]
    told = batch(str(rows([*ready, {"prompt": "Hi", "max_tokens": 2}])), "--schema", '{"type": "object"}')
    assert told.returncode == 0, told.stderr
    said = " ".join(told.stderr.split())
    assert "fields and options that had no effect: --schema (3 rows), stream (1 row)" in said
    assert "4 answers cut by --max-tokens, a row's max_tokens or the context (finish_reason length), which" in said


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"mesages": []}, "line 2: mesages: expected a prompt, messages, or url and body; did you mean messages?"),
        (
            {"prompt": "b", "max_token": 1},
            "line 2: max_token: no field of /v1/chat/completions; did you mean max_tokens?",
        ),
        (
            {"url": URL, "body": {"messages": [], "temprature": 1}},
            "line 2: body.temprature: no field of /v1/chat/completions; did you mean temperature?",
        ),
        ({"url": "/v1/embeddings", "body": {"dimension": 8}}, "no field of /v1/embeddings; did you mean dimensions?"),
    ],
)
def test_a_misspelt_field_is_refused_before_a_model_is_loaded(
    batch: Callable[..., Any], rows: Callable[..., Path], row: Any, why: str, tmp_path: Path
) -> None:
    file = rows([{"prompt": "a", **SHORT}, row])
    told = batch(str(file), "--local", "--model", "/none.gguf")
    assert (told.returncode, why in told.stderr) == (2, True)
    assert not (tmp_path / "out.jsonl").exists()


def test_rows_on_standard_input_that_is_a_file_are_judged_and_all_run(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    more = ("-o", str(tmp_path / "out"), "--template", "{prompt}", "--max-tokens", "2")
    with (tmp_path / "in").open("rb") as file:
        command = uma_command("batch", "--socket", str(server.socket), "-", *more)
        run(command, stdin=file, env=clean_environ(), timeout=PATIENCE_SEC, check=True)
    assert (tmp_path / "out").read_bytes().count(b"\n") == 2


def test_what_is_wrong_with_a_row_is_told_with_what_helps(batch: Callable[..., Any], rows: Callable[..., Path]) -> None:
    messages = [{"role": "usr", "content": "x"}]
    told = batch(str(rows([{"prompt": "a", "model": "smollm2"}, {"messages": messages}]))).stderr
    assert "model: 'smollm2' is not loaded here; 'builtin' is (--any-model takes such rows)" in told
    assert "messages[0].role: expected one of" in told and "; did you mean user?" in told


def test_all_wrong_rows_are_told_together_before_a_model_is_loaded(
    batch: Callable[..., Any], rows: Callable[..., Path], tmp_path: Path
) -> None:
    wrong = ["not json", {"a": 1}, {"prompt": 7}, {"prompt": "b", "max_tokns": 1}, {"id": "x", "prompt": "c"}]
    file = rows([{"id": "x", "prompt": "a"}, *wrong, {"a": 2}])
    told = batch(str(file), "--local", "--model", "/none.gguf")
    assert told.returncode == 2
    said = " ".join(told.stderr.split())
    for each in (
        "error: 6 of 7 rows are wrong: uma: error: line 2: the row is not JSON",
        "at column 1; each line must be a JSON object of its own",
        "lines 3, 7: expected a prompt, messages, or url and body",
        "line 4: prompt: expected a text, not 7",
        "line 5: max_tokns: no field of /v1/chat/completions; did you mean max_tokens?",
        'line 6: id: "x" is that of line 1 and of line 6; ids must be unique: change one',
    ):
        assert each in said
    assert not (tmp_path / "out.jsonl").exists()
    (tmp_path / "t.csv").write_text("text\na\n")
    told = batch(str(tmp_path / "t.csv"), "--local", "--model", "/none.gguf")
    assert (told.returncode, "--template makes a prompt of columns" in " ".join(told.stderr.split())) == (2, True)
    told = batch(str(file), "--schema", '{"type":')
    assert "'{\"type\":' is not JSON: " in told.stderr


def test_rows_that_leave_a_column_of_the_template_empty_are_counted(batch: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("id,text,more\na,one,\nb,,\nc\n")
    told = batch(str(tmp_path / "t.csv"), "--template", "Say {text} and {text}", "--max-tokens", "2")
    assert (told.returncode, "uma: empty columns of --template: text (2 rows)\n" in told.stderr) == (0, True)


def test_in_its_own_process_as_many_rows_run_as_the_model_computes_at_once(
    rows: Callable[..., Path], tmp_path: Path
) -> None:
    out = str(tmp_path / "out.jsonl")
    own = ("--local", "--model", "builtin", "--max-sequences", "2")
    command = ("batch", str(rows(lines(20, max_tokens=3_000, ignore_eos=True))), "-o", out, *own)
    with Forked((*command, "--json"), clean_environ(), stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        process.kill()
    assert first["running"] == 2


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        (
            "in.jsonl",
            '{"custom_id": "a", "prompt": "x"}\n' * 2,
            'custom_id: "a" is that of line 1 and of line 2; ids must be unique',
        ),
        ("in.jsonl", '{"id": 7, "prompt": "x"}\n' * 2, "id: 7 is that of line 1 and of line 2; ids must be unique"),
        ("in.csv", "id,prompt\n1,x\n2,y\n1,z\n", 'id: "1" is that of line 2 and of line 4; ids must be unique'),
    ],
)
def test_two_rows_of_one_name_are_told_before_a_model_is_loaded(
    name: str, text: str, told: str, batch: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    done = batch(str(tmp_path / name), "--local")
    assert (done.returncode, told in done.stderr, "loading" in done.stderr) == (2, True, False), done.stderr
    assert not (tmp_path / "out.jsonl").exists()
