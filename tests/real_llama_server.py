"""The real llama-server, as `benchmarks.build_peers` builds it: what texts are compared with."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cache import peer_binary
from benchmarks.targets.base import free_port
from harness import EXACT, until


@contextmanager
def llama_server(model: Path, *options: str) -> Iterator[str]:
    """The URL of a server of this model with these options; ended with the block."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [str(peer_binary("llama-server")), "--model", str(model), "--port", str(port), "--parallel", "1"]
    command += [*EXACT, "--threads", "1", "--threads-batch", "1", *options]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: process.poll() is not None or is_healthy(url), bool)
        yield url
    finally:
        process.kill()
        process.wait()


def is_healthy(url: str) -> bool:
    """Whether its model is loaded."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
