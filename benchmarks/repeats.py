"""Does a question that is asked again have the same answer? UMA beside llama-server, with a real model.

    python -m benchmarks.build_peers
    python -m benchmarks.reference          # fetches the model
    python -m benchmarks.repeats            # 40 questions six times in three cases: some ten minutes on 2 cores

Both servers run with their defaults and are asked one question at a time, greedily, over OpenAI's chat completions. The
cases: each question several times in a row with the prefix cache; the same without it; and once more by a new process,
which is to answer as the one before.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import trio
from rich.console import Console
from rich.table import Table

from benchmarks.cache import peer_binary
from benchmarks.http_stream import HttpError, post
from benchmarks.reference import model_path
from benchmarks.targets.base import StartError, free_port, server_process
from benchmarks.targets.llama_server import is_built, is_healthy

UMA, PEER = "UMA", "llama-server"
CACHED, UNCACHED, RESTARTED = "in a row, cached", "in a row, cache_prompt: false", "after a restart"

SUBJECTS = ("the sea", "a bicycle", "bread", "the moon", "a clock", "glass", "a bridge", "winter", "music", "a forest")
FORMS = (
    "What is {}?",
    "Write one sentence about {}.",
    "Name three words that go with {}.",
    "A child asks about {}. What do you say, in a few plain words, so that it understands what that is and is for?",
)


def questions(count: int) -> list[str]:
    """So many short questions, no two alike: at most as many as there are subjects and forms."""
    every = [form.format(subject) for subject in SUBJECTS for form in FORMS]
    return every[:count]


@asynccontextmanager
async def serving(server: str, model: Path) -> AsyncIterator[int]:
    """Run a server with its defaults for the block; its port."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="uma-bench-") as folder:
        if server == UMA:
            command = [sys.executable, "-m", "uma", "run", "--model", str(model), "--http", f"127.0.0.1:{port}"]
            command += ["--socket", str(Path(folder) / "uma.sock")]
        else:
            command = [str(peer_binary(PEER)), "--model", str(model), "--port", str(port)]
        env = {name: value for name, value in os.environ.items() if not name.startswith("UMA_")}
        async with server_process(command, lambda: is_healthy(port), env=env):
            yield port


async def answer(port: int, question: str, max_tokens: int, *, caches: bool) -> str:
    """The whole answer to a question, at temperature 0."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "cache_prompt": caches,
    }
    text = ""
    async with post(port, "/v1/chat/completions", body) as events:
        async for payload in events:
            for choice in orjson.loads(payload)["choices"]:
                text += choice["delta"].get("content") or ""
    return text


async def measure(server: str, model: Path, asked: Sequence[str], times: int, max_tokens: int) -> dict[str, list[int]]:
    """How many different answers each question had, by case."""
    found: dict[str, list[int]] = {}
    first: dict[str, str] = {}
    async with serving(server, model) as port:
        for case, caches in ((CACHED, True), (UNCACHED, False)):
            found[case] = []
            for question in asked:
                told = [await answer(port, question, max_tokens, caches=caches) for _ in range(times)]
                found[case].append(len(set(told)))
                first.setdefault(question, told[0])
            _say(server, case, found)
    async with serving(server, model) as port:
        found[RESTARTED] = [len({first[each], await answer(port, each, max_tokens, caches=True)}) for each in asked]
        _say(server, RESTARTED, found)
    return found


def _say(server: str, case: str, found: dict[str, list[int]]) -> None:
    print(f"{server}, {case}: {found[case].count(1)} of {len(found[case])}", file=sys.stderr, flush=True)


def table(results: dict[str, dict[str, list[int]]], times: int) -> Table:
    """Questions with one answer, by server and case."""
    shown = Table(title=f"Questions with one answer of {times} (after a restart: of 2), greedy, one at a time")
    shown.add_column("case")
    for server in results:
        shown.add_column(server, justify="right")
    for case in (CACHED, UNCACHED, RESTARTED):
        counts = [found[case] for found in results.values()]
        shown.add_row(case, *(f"{sum(each == 1 for each in found)} of {len(found)}" for found in counts))
    return shown


def main() -> int:
    """Measure, and print the table. Exit code 1: a question had several answers from UMA more often than from its peer;
    2: the model or the peer is missing, or a server failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.repeats", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--questions", type=int, default=40, help="how many questions (default and most: 40)")
    parser.add_argument("--times", type=int, default=6, help="how often each is asked (default 6)")
    parser.add_argument("--max-tokens", type=int, default=32, help="length of an answer (default 32)")
    parser.add_argument("--only", choices=(UMA, PEER), help="one server alone")
    parser.add_argument("--json", type=Path, help="also write the number of answers of each question here")
    args = parser.parse_args()
    model = model_path("smollm2")
    servers = [args.only] if args.only else [UMA, PEER]
    if not model.exists() or (PEER in servers and not is_built()):
        print("repeats: run `python -m benchmarks.reference` and `python -m benchmarks.build_peers`", file=sys.stderr)
        return 2
    asked = questions(args.questions)
    try:
        results = {server: trio.run(measure, server, model, asked, args.times, args.max_tokens) for server in servers}
    except (StartError, HttpError) as error:
        print(f"repeats: {error}", file=sys.stderr)
        return 2
    Console(width=None if sys.stdout.isatty() else 120).print(table(results, args.times))
    if args.json is not None:
        args.json.write_text(json.dumps({"questions": asked, "answers": results}, indent=1))
    if len(results) < 2:
        return 0
    repeats = {server: {case: each.count(1) for case, each in found.items()} for server, found in results.items()}
    return int(any(repeats[UMA][case] < repeats[PEER][case] for case in repeats[UMA]))


if __name__ == "__main__":
    sys.exit(main())
