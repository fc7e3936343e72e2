"""How long this process's threads ran, and waited for a core: Linux counts it for every thread (`schedstat`)."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")


def scheduled_ms(proc: Path = PROC) -> tuple[float, float] | None:
    """How long all threads of this process ran, and waited for a core; None where the kernel does not count."""
    running_ns = waiting_ns = 0
    try:
        threads = list((proc / "self" / "task").iterdir())
    except OSError:
        return None
    for thread in threads:
        try:
            fields = (thread / "schedstat").read_bytes().split()
            running_ns += int(fields[0])
            waiting_ns += int(fields[1])
        except (OSError, ValueError, IndexError):  # a thread that has just ended
            continue
    return (running_ns / 1e6, waiting_ns / 1e6) if running_ns else None
