"""UMA as on Windows, as far as another system can show it: see `windows.py`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from harness import Log, clean_environ, run_to_end

WINDOWS = str(Path(__file__).with_name("windows.py"))
COMMAND = "import sys; from uma.cli import main; sys.exit(main({}))"
LIBRARY = """
from uma import LLM, SamplingParams
with LLM("builtin", threads=1) as llm:
    print(llm.generate(["Once upon a time,"], SamplingParams(max_tokens=8))[0].outputs[0].text)
    print(llm.chat([{"role": "user", "content": "What is UMA?"}], SamplingParams(max_tokens=8))[0].outputs[0].text)
"""


@pytest.mark.parametrize("program", [LIBRARY, COMMAND.format(["generate", "--model", "builtin", "A story"])])
def test_the_library_and_uma_generate_work_without_posix(program: str) -> None:
    done = run_to_end(sys.executable, WINDOWS, program)
    assert (done.returncode, len(done.stdout) > 10) == (0, True), done.stderr


def test_a_server_without_unix_sockets_answers_over_http_and_ends_in_order(tmp_path: Path) -> None:
    command = COMMAND.format(["run", "--model", "builtin", "--http", "127.0.0.1:0"])
    place = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, WINDOWS, command], stderr=subprocess.PIPE, env=clean_environ(**place)
    ) as server:
        log = Log(server.stderr)
        try:
            url = log.wait_for(r"http\.ready url=(\S+)").partition("url=")[2].split()[0]
            log.wait_for("server.ready")
            with urllib.request.urlopen(f"{url}/health") as answer:
                assert json.load(answer)["status"] == "ok"
            body = {"messages": [{"role": "user", "content": "What is UMA?"}], "max_tokens": 8, "stream": True}
            request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
            with urllib.request.urlopen(request) as answer:
                assert answer.read().rstrip().endswith(b"data: [DONE]")
            server.send_signal(signal.SIGINT)  # which Ctrl-C is there, too
            assert server.wait() == 128 + signal.SIGINT, log.text
            assert "http.stopped" in log.join()
            assert not list(tmp_path.iterdir())
        finally:
            server.kill()


@pytest.mark.parametrize("options", [[], ["--models", "builtin", "--http"]])
def test_what_needs_posix_is_refused_as_unsupported(options: list[str]) -> None:
    done = run_to_end(sys.executable, WINDOWS, COMMAND.format(["run", "--model", "builtin", *options]))
    assert done.returncode != 0
    assert "unsupported" in done.stderr
