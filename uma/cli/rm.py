"""`uma rm`: a model off the disk, after a question."""

from __future__ import annotations

import argparse
import os
import sys

from uma import figures
from uma.cli import say
from uma.cli.table import print_wrapped
from uma.config import BUILTIN
from uma.errors import ConfigError, ModelError
from uma.models import catalog
from uma.models.remove import removal

FAILED = 1


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    if options.name == BUILTIN:
        raise ModelError("builtin: the built-in model cannot be removed")
    found = catalog.named(options.name, os.environ)
    removed = removal(found)
    size, kept = figures.size(removed.freed_bytes), removed.kept_file
    what = f"{found.path}{'' if removed.projector is None else f' and its projector {removed.projector.name}'}"
    frees = f"which frees {size}" if kept is None else f"a link: {kept}, to which it points, stays"
    if not options.yes and not _agreed(f"remove {what}, {frees}?"):
        say.note("nothing was removed")
        return FAILED
    removed.run()
    also = "" if removed.projector is None else " and its projector"
    freed = f"{size} are free" if kept is None else f"it was a link, and {kept}, to which it pointed, stays"
    print_wrapped(f"removed {found.name}{also}: {freed}")
    return 0


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is no terminal to ask on; say --yes")
    print_wrapped(f"uma: {question} [y/N] ", sys.stderr, end=" ")
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):
        print(file=sys.stderr)  # Ctrl-D leaves the cursor behind the question
    return answer.strip().lower() in ("y", "yes")
