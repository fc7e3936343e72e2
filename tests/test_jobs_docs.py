"""docs/jobs.md is true: its commands and its Python run as they are pasted, and a result has the form that it shows."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from http_server import HttpServer

from harness import PATIENCE_SEC, clean_environ, run_to_end

PAGE = (Path(__file__).parents[1] / "docs" / "jobs.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^((?:zcat|uma batch) .*?)(?: {2,}#.*)?$", PAGE, re.MULTILINE)
OVER_HTTP, IN_PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
ROW: dict[str, object] = {
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
}
ROWS: list[dict[str, object]] = [
    {"prompt": "Say hello.", "max_tokens": 4},
    {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    {"custom_id": "a", **ROW},
]
"""A row of each form that the page has."""


def write_rows(folder: Path, rows: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "in.jsonl").write_text(text, encoding="utf-8")
    (folder / "rows.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "texts.csv").write_text("text\nThe fox ran.\n", encoding="utf-8")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_gives_each_row_a_result_of_the_form_that_is_shown(
    command: str, tmp_path: Path, http_server: HttpServer
) -> None:
    write_rows(tmp_path, ROWS)
    pasted = re.sub(r"\buma batch\b", f"{sys.executable} -m uma batch", command).replace("model.gguf", "builtin")
    done = subprocess.run(
        ["sh", "-c", f"{pasted} --max-tokens 4"],
        cwd=tmp_path,
        env=clean_environ(UMA_SOCKET=str(http_server.process.socket)),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SEC,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    (shown,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    told = json.loads(shown)
    assert len(results) == (1 if ".csv" in command else len(ROWS))
    for result in results:
        assert result.keys() == told.keys()
        assert result["response"].keys() == told["response"].keys()
        assert told["response"]["body"].keys() <= result["response"]["body"].keys()


def test_the_batch_over_http_is_one_that_the_server_takes(tmp_path: Path, http_server: HttpServer) -> None:
    write_rows(tmp_path, [{"custom_id": "a", **ROW}])
    code = OVER_HTTP.replace("http://127.0.0.1:8080", http_server.url)
    done = run_to_end(sys.executable, "-c", code.replace('"in.jsonl"', repr(str(tmp_path / "in.jsonl"))))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("validating", "in_progress", "finalizing", "completed")


def test_the_same_call_in_python_continues_with_the_results_that_are_there(tmp_path: Path) -> None:
    code = IN_PYTHON.replace('"checkpoint.jsonl"', repr(str(tmp_path / "a.jsonl")))
    first, again = (run_to_end(sys.executable, "-c", code) for _ in range(2))
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert first.stdout == again.stdout
    assert len(first.stdout) > 40
