"""A thousand clients that leave at random moments, after which the server is as it was before."""

from __future__ import annotations

import random
import struct
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from harness import HELLO, Raw, ServerProcess, frame, running_server, until

HANG_UPS = 1_000
PROMPTS = [f"Once upon a time there was a fox called {name}" for name in ("Fern", "Ida", "Tom", "Wren")]


def ask(id: str, number: int) -> dict[str, Any]:
    return {"id": id, "prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": 32, "ignore_eos": True}


@attrs.frozen
class Footprint:
    """What a server holds of its process and its engine."""

    descriptors: int
    threads: int
    held_kv_cells: int
    """Those that are no cache: a request's."""
    protected_tokens: int
    """Cached ones that a request uses."""
    resident_bytes: int


def footprint(server: ServerProcess) -> Footprint:
    metrics = server.settled()
    process = Path(f"/proc/{server.pid}")
    pages = int((process / "statm").read_text().split()[1])
    return Footprint(
        descriptors=len(list((process / "fd").iterdir())),
        threads=len(list((process / "task").iterdir())),
        held_kv_cells=metrics["kv_cells_used"] - metrics["cache_total_cached"],
        protected_tokens=metrics["cache_protected_size"],
        resident_bytes=pages * 4096,
    )


def leave_somewhere(server: ServerProcess, chance: random.Random, number: int) -> None:
    """Connect, and hang up at a moment that `chance` picks."""
    raw = Raw(server.socket)
    requests = b"".join(frame(ask(f"r{each}", each)) for each in range(chance.randrange(1, 4)))
    session = chance.choice([b"", frame(HELLO)]) + requests
    match number % 6:
        case 0:
            pass
        case 1:
            raw.send_bytes(struct.pack("<I", 100)[: chance.randrange(1, 5)])
        case 2:
            raw.send_bytes(session[: chance.randrange(len(session))])
        case 3:
            raw.send_bytes(session)
        case 4:
            raw.send_bytes(session)
            raw.sock.recv(1)
        case 5:
            raw.send_bytes(session)
            raw.sock.recv(chance.randrange(1, 2_000))
    raw.sock.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thousand_hang_ups_leave_nothing_behind(socket_dir: Path, tiny: Path) -> None:
    chance = random.Random(1)
    flags = ("--model", str(tiny), "--n-ctx", "4096", "--max-sessions", "64", "--log-level", "info")
    with running_server(socket_dir / "s", *flags) as server:
        with server.connect() as raw:
            raw.hello()
            for number in range(len(PROMPTS)):
                raw.send(ask("whole", number))
                assert raw.last_of("whole")["reason"] == "length"
        calm = footprint(server)
        for number in range(200):
            leave_somewhere(server, chance, number)
        before = until(lambda: footprint(server), lambda now: now.descriptors <= calm.descriptors)
        for number in range(HANG_UPS):
            leave_somewhere(server, chance, number)
        # The last sessions, this question's included, may still be closing their sockets.
        after = until(lambda: footprint(server), lambda now: now.descriptors <= before.descriptors)
        assert after.threads <= before.threads
        assert (
            (after.held_kv_cells, after.protected_tokens) == (before.held_kv_cells, before.protected_tokens) == (0, 0)
        )
        assert after.resident_bytes < before.resident_bytes + 8 * 2**20
        assert server.metrics()["requests_cancelled"] > 0
