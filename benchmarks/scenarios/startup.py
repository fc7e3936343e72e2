"""Start-up: from the command to the first word on the screen, on the model that comes with UMA."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

import trio

from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary

CASE = "uma generate, built-in model"
FIRST, LATER = "UMA, first start", "UMA, later start"
"""The first has no cache folder, so it tries out this CPU with a child process."""


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """`uma generate` in process, with no server to ask: twice with the same cache folder, new at first."""
    with tempfile.TemporaryDirectory(prefix="uma-bench-") as cache:
        for start in (FIRST, LATER):
            emit(CASE, start, await trio.to_thread.run_sync(_run, cache))


def _run(cache: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="uma-bench-") as folder:
        command = [sys.executable, "-m", "uma", "generate", "--model", "builtin", "Tell me a story about a fox"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("UMA_")}
        # The usual place of the socket, where no server is: one that is named must have a server.
        env |= {"XDG_CACHE_HOME": cache, "XDG_RUNTIME_DIR": folder}
        began = time.perf_counter()
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
        ) as process:
            assert process.stdout is not None
            first = os.read(process.stdout.fileno(), 1)
            first_s = time.perf_counter() - began
            process.stdout.read()
        total_s = time.perf_counter() - began
    if not first or process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {"first_token_s": first_s, "whole_answer_s": total_s}


def checks(summary: Summary) -> list[Check]:
    """Quicker than one wonders whether it hangs."""
    first_s, later_s = (summary.get(CASE, start, "first_token_s") for start in (FIRST, LATER))
    return [
        Check("start-up to first token, built-in model", later_s, "≤", 1.5, "s"),
        Check("start-up without a cache folder: longer by", first_s - later_s, "≤", 0.5, "s"),
    ]


SCENARIO = Scenario(
    name="startup",
    about="`uma generate` from the command to the first byte on standard output, on the built-in model: the first "
    "start with an empty cache folder, and the one after it.",
    columns=("first_token_s", "whole_answer_s"),
    measure=measure,
    checks=checks,
    round_limit_s=60,
)
