"""`uma pull`: a model from the Hugging Face hub, with a bar on a terminal and a few lines elsewhere."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from uma.cli import say, words
from uma.cli.memory import fits, memory_bytes
from uma.cli.sanitize import sanitize_line
from uma.cli.table import print_table
from uma.errors import ConfigError, ModelError, UmaError
from uma.models import catalog, hub, places
from uma.models.pull import Pull

LINES = 10
"""Of progress, where there is no terminal."""


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    reference = hub.parse(options.reference, os.environ)
    cache = places.hub_cache(os.environ)
    if cache is None:
        raise ConfigError("there is no folder for the Hugging Face cache: name one by HF_HOME")
    endpoint = hub.endpoint_of(os.environ)
    if hub.is_offline(os.environ):
        return _offline(options.reference)
    listing = hub.listing(reference, endpoint)
    if options.list:
        _print(listing)
        return 0
    offer, memory = listing.choose(), memory_bytes()
    if not reference.what and len(listing.offers) > 1:
        taken = f"{offer.quantization or offer.name} ({words.size(offer.size_bytes)})"
        say.note(f"taking {taken}; uma pull {reference.repository} --list has all")
    if not options.no_mmproj and (projector := listing.projector_of(offer)) is not None:
        offer = offer.beside(projector)
        reported = f"{projector.path} ({words.size(projector.size_bytes)})"
        say.note(f"with its projector for pictures or sound, {reported}; --no-mmproj leaves it out")
    size = words.size(offer.size_bytes)
    if not fits(offer.size_bytes, memory):
        say.warn(f"{offer.name} has {size}, and {words.size(memory)} of memory are free here: it may not fit")
    with _progress(offer.name.rpartition("/")[2], offer.size_bytes) as on_progress:
        path = Pull(listing, offer, cache, endpoint, on_progress).run()
    say.note(f"{size} are here: uma chat {catalog.short_name(path, os.environ)}")
    print(sanitize_line(str(path)))
    return 0


def _offline(name: str) -> int:
    """The path of what is here. Raises `UmaError` where it is not."""
    try:
        print(sanitize_line(str(catalog.named(name, os.environ).path)))
    except ModelError as error:
        raise UmaError(f"{error.message}. It is not asked for: HF_HUB_OFFLINE is set; unset it to pull") from None
    return 0


def _print(listing: hub.Listing) -> None:
    memory = memory_bytes()
    rows = [
        (
            each.quantization,
            words.size(each.size_bytes),
            "yes" if fits(each.size_bytes, memory) else "no",
            str(len(each.files)),
            each.name,
        )
        for each in sorted(listing.offers, key=lambda each: each.size_bytes)
    ]
    print_table(("quantization", "size", "fits", "files", "name"), rows)
    for each in listing.projectors:
        say.plain(f"projector: {each.path} ({words.size(each.size_bytes)})")


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """What shows how many bytes are here, of all."""
    if not sys.stderr.isatty():
        yield _lines(name, total)
        return
    # Slow to import, and not needed where there is no terminal.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(None), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = None

        def show(n_bytes: int) -> None:
            nonlocal task
            if task is None:  # what was here already has no speed
                task = progress.add_task(sanitize_line(name), total=total, completed=n_bytes)
            progress.update(task, completed=n_bytes)

        yield show


def _lines(name: str, total: int) -> Callable[[int], None]:
    said = -1

    def tell(n_bytes: int) -> None:
        nonlocal said
        part = n_bytes * LINES // max(1, total)
        if part > said:
            said = part
            say.note(f"{name}: {100 * n_bytes // max(1, total)} % of {words.size(total)}")

    return tell
