"""A fuzzer for the running server: `python tests/fuzz --seconds 60`, or for hours, or `--frames 10000000`.

A real `uma run` is sent legal and illegal frames by processes that also read slowly, cancel, and hang up. Meanwhile a
canary streams short answers from the same server. The run fails where the canary's tokens are not those it gets alone,
where its waits are longer than `allowed_ms` derives from what it measured alone, or where the server dies, logs a
fault, or has anything left of the others once they are gone. The same `--seed` sends the same frames, in another order.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import tempfile
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from attackers import ATTACKERS, Budget, attack
from canary import Canary

from harness import EXACT, PATIENCE_SEC, ServerProcess, start_server
from models import write_model

FLAGS = (
    *EXACT,  # tokens do not depend on company
    *("--n-ctx", "8192"),  # without flash attention each token takes time with all cells that attackers fill
    *("--max-tokens", "64", "--max-tx-bytes", "65536", "--tx-timeout-sec", "2", "--idle-timeout-sec", "5"),
    *("--log-level", "warning", "--cache-ram-mb", "64"),
)
ALONE_SEC = 5.0
MAX_GROWN_BYTES = 512 * 2**20
"""By how much the server may have grown: its cache, buffers of 64 sessions, and what the allocator keeps of both."""
PERCENT = 99
"""Of the canary's waits, those that count as usual: they may take half as long as the longest."""
LATE = 3
"""Exit code where only the canary's waits were too long: beside a host that is away for a second, that is chance."""
FAULTS = ("Traceback", "traceback=", "session.crashed", " error ")


def allowed_ms(alone_ms: float) -> float:
    """The longest wait that is allowed, from the longest one alone.

    Of a wait only that part counts which was the server's own doing: attackers, and whatever else this machine does,
    compute on the same cores.
    """
    return 20 * alone_ms + 500


def main() -> int:
    """Run the fuzzer. Returns the exit code: 1 where a claim is false, `LATE` where only those about waits are."""
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to attack")
    parser.add_argument("--frames", type=int, default=sys.maxsize, help="end after so many frames")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=ATTACKERS, action="append", help="attack in this way alone (repeatable)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="uma-") as folder:
        model = write_model(Path(folder) / "tiny.gguf", context_length=32_768)
        server = start_server(Path(folder) / "s", "--model", str(model), *FLAGS)
        try:
            _await_ready(server)
            problems, late = _fuzz(server, args.seconds, args.frames, args.seed, args.only or list(ATTACKERS))
            server.signal(signal.SIGTERM)
            code = server.wait()
        finally:
            server.stop()
        log = server.log.join()
    problems += [f"the log has: {line[:300]}" for line in log.splitlines() if any(word in line for word in FAULTS)]
    problems += [f"the server ended with {code}"] if code else []
    print("\n".join(f"FAILED: {problem}" for problem in (problems + late)[:20]) or "passed", flush=True)
    return 1 if problems else LATE if late else 0


def _await_ready(server: ServerProcess) -> None:
    # The log is of warnings only, or the lines of an hour would fill this process; so it does not say "ready".
    due = time.monotonic() + PATIENCE_SEC
    while not _is_ready(server):
        assert server.process.poll() is None, server.log.join()
        assert time.monotonic() < due, "the server has not started"
        time.sleep(0.05)


def _is_ready(server: ServerProcess) -> bool:
    """Whether the server answers, and no longer that it is loading its model."""
    if not server.socket.exists():
        return False
    with server.connect() as raw:
        raw.send({"type": "health", "probe": False})
        return [each["status"] for each in raw.rest()] == ["ok"]


def _fuzz(
    server: ServerProcess, seconds: float, frames: int, seed: int, ways: list[str]
) -> tuple[list[str], list[str]]:
    """Attack. Returns what was wrong, and which waits were too long."""
    process = psutil.Process(server.pid)
    canary = Canary(server.socket, server.pid)
    alone = canary.watch(lambda: time.monotonic() - began < ALONE_SEC) if (began := time.monotonic()) else None
    assert alone is not None
    began, rss = time.monotonic(), process.memory_info().rss
    context = multiprocessing.get_context("spawn")
    budget = Budget(context.Value("q", 0), frames, time.time() + seconds)
    # Daemons: none outlives a fault of this process.
    workers = [context.Process(target=attack, args=(name, server.socket, seed, budget), daemon=True) for name in ways]
    for worker in workers:
        worker.start()
    amid = canary.watch(lambda: not budget.is_spent and server.process.poll() is None)
    took = time.monotonic() - began
    for worker in workers:
        worker.join(60)
    problems = [f"attacker {worker.name} ended with {worker.exitcode}" for worker in workers if worker.exitcode]
    for worker in workers:
        worker.kill()
    if server.process.poll() is not None:
        return [*problems, "the server died"], []
    problems += amid.problems
    if amid.answers == 0:
        problems.append("the canary got no answer at all")
    settled = server.settled()
    grown = process.memory_info().rss - rss
    print(f"{_value(budget.sent):,} frames in {took:.0f} s, seed {seed}; canary: {amid.answers:,} answers")
    print(f"longest wait {amid.longest_ms:.1f} ms, alone {alone.longest_ms:.1f} ms; of that the server's own doing")
    print(f"  {amid.longest_own_ms:.1f} ms, alone {alone.longest_own_ms:.1f} ms, allowed {_allowed(alone):.0f} ms")
    usual = f"{amid.usual_ms(PERCENT):.1f} ms, alone {alone.usual_ms(PERCENT):.1f} ms"
    print(f"  in {PERCENT} % of waits at most {usual}, allowed {_allowed_usually(alone):.0f} ms")
    print(f"the server has grown by {grown / 2**20:.0f} MiB")
    if grown > MAX_GROWN_BYTES:
        problems.append(f"the server has grown by {grown:,} bytes; {MAX_GROWN_BYTES:,} are allowed")
    wanted = (
        "requests_total",
        "requests_rejected",
        "requests_cancelled",
        "requests_error",
        "sessions_total",
        "cache_ram_bytes",
    )
    print(", ".join(f"{name} {settled[name]:,}" for name in wanted))
    return problems, _late(alone, amid)


def _late(alone: Any, amid: Any) -> list[str]:
    late = []
    if amid.longest_own_ms > _allowed(alone):
        late.append(f"the canary waited {amid.longest_own_ms:.0f} ms; {_allowed(alone):.0f} ms are allowed")
    usual_ms, allowed = amid.usual_ms(PERCENT), _allowed_usually(alone)
    if usual_ms > allowed:
        late.append(
            f"{100 - PERCENT} % of the canary's waits took {usual_ms:.0f} ms or more; {allowed:.0f} ms are allowed"
        )
    return late


def _allowed_usually(alone: Any) -> float:
    return allowed_ms(alone.usual_ms(PERCENT)) / 2


def _allowed(alone: Any) -> float:
    return allowed_ms(alone.longest_own_ms)


def _value(number: Synchronized[int]) -> int:
    return number.value


if __name__ == "__main__":
    sys.exit(main())
