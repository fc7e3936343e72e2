"""`uma key new NAME`: makes an API key for HTTP, prints it once, and keeps its hash in the file of keys."""

from __future__ import annotations

import argparse
from pathlib import Path

from uma.cli import say


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    from uma.http.keys import add  # noqa: PLC0415  (slow to import)

    path = Path(options.keys)
    key = add(path, options.name)
    print(key)
    say.plain(
        f"This key is shown only now; {path} holds its hash. Bounds of its own go below [{options.name}] there:\n"
        "max_concurrent, max_tokens_per_minute, max_priority, max_tokens; and, for all its requests, priority,\n"
        "target_ttft_ms, target_tbt_ms. Serve with --http-keys "
        f"{path}; a server that runs already reads the file when it starts again."
    )
    return 0
