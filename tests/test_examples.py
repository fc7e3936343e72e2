"""The examples run as a user would run them: as scripts, on the built-in model and on a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import ServerProcess, run_to_end

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(name: str, *args: str) -> str:
    """Standard output of a script that must succeed."""
    done = run_to_end(sys.executable, str(EXAMPLES / name), *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_batch_job_answers_every_line_in_its_place(tmp_path: Path) -> None:
    prompts = ["Once upon a time, a fox", "x" * 400_000, "Tell me a story about an owl"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts), encoding="utf-8")
    run_example("batch_file.py", str(tmp_path / "prompts.txt"), str(tmp_path / "results.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == prompts
    assert [row["error"] is None for row in rows] == [True, False, True]
    assert all(row["text"] for row in rows if row["error"] is None)
    assert "context" in rows[1]["error"]


def test_the_batch_job_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    prompts = [f"Tell me story {index}" for index in range(80)]
    source, results = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    source.write_text("\n".join(prompts), encoding="utf-8")
    command = [sys.executable, str(EXAMPLES / "batch_file.py"), str(source), str(results)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as job:
        while not results.exists() or results.read_bytes().count(b"\n") < 5:
            with pytest.raises(subprocess.TimeoutExpired):
                job.wait(0.05)
        job.kill()
    kept = results.read_bytes()
    results.write_bytes(kept + b'{"prompt": "torn')
    run_example("batch_file.py", str(source), str(results))
    assert results.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1]), "what was done is not done again"
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == prompts


@pytest.mark.parametrize("name", ["batch_file.py", "plain_client.py"])
def test_a_script_without_its_arguments_ends_with_its_usage(name: str) -> None:
    done = run_to_end(sys.executable, str(EXAMPLES / name))
    assert done.returncode == 1
    assert done.stderr.startswith(f"usage: python {name} ")
    assert done.stderr.count("\n") == 1


def test_the_race_has_a_winner_in_process() -> None:
    assert " won:\n" in run_example("race.py")


def test_the_race_is_the_same_code_on_a_server_and_leaves_nothing_behind(server: ServerProcess) -> None:
    assert " won:\n" in run_example("race.py", str(server.socket))


def test_the_plain_client_streams_the_answer(server: ServerProcess) -> None:
    assert len(run_example("plain_client.py", str(server.socket), "Once upon a time,").strip()) > 20
