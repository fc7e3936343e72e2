"""`uma resume`: takes `uma pause` back."""

from __future__ import annotations

import argparse

from uma.cli.pause import paused


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    return paused(options, 0, "goes on")
