"""`uma unpin`: takes `uma pin` back."""

from __future__ import annotations

import argparse

from uma.cli import pin


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    return pin.main(options, is_pinned=False)
