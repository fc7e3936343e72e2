"""`uma pull`: a model from the Hugging Face hub, with a bar on a terminal and a few lines elsewhere."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from uma import figures
from uma.cli import say
from uma.cli.memory import fits, memory_bytes
from uma.cli.sanitize import sanitize_line
from uma.cli.table import print_table
from uma.errors import ConfigError, ModelError, UmaError
from uma.models import catalog, hub, places
from uma.models.pull import Pull

LINES = 10
"""Lines of progress where there is no terminal."""
COLUMNS = ("", "quantization", "size", "fits", "files", "name")
CHOSEN = "*"
"""Marks the one that is pulled."""


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
    memory = memory_bytes()
    if options.list:
        _list(listing, memory)
        return 0
    offer = listing.choose() if reference.what else _choose(listing, memory)
    if not options.no_mmproj and (projector := listing.projector_of(offer)) is not None:
        offer = offer.beside(projector)
        about = f"{projector.path} ({figures.size(projector.size_bytes)})"
        say.note(f"with its projector for pictures or sound, {about}; --no-mmproj leaves it out")
    size = figures.size(offer.size_bytes)
    if not fits(offer.size_bytes, memory):
        smaller = _largest_that_fits(listing, memory)
        does = "" if smaller is None else f"; {smaller.quantization or smaller.name} does"
        say.warn(f"{offer.name} has {size}, and {figures.size(memory)} of memory are free here: it may not fit{does}")
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
        raise UmaError(f"{error.message}. Offline: HF_HUB_OFFLINE is set; unset it to pull") from None
    return 0


def _choose(listing: hub.Listing, memory: int) -> hub.Offer:
    """What is taken where nothing is asked for, told among all that there is. Raises as `Listing.choose`."""
    if len(listing.offers) < 2:
        return listing.choose()
    try:
        chosen = listing.choose()
    except ModelError:
        show_offers(listing, None, memory, sys.stderr)  # standard output has the path
        raise
    show_offers(listing, chosen, memory, sys.stderr)
    say.note(f"taking {_why(chosen)}; for another: uma pull {listing.reference.repository}:QUANTIZATION")
    return chosen


def _list(listing: hub.Listing, memory: int) -> None:
    chosen: hub.Offer | None = None
    with suppress(ModelError):  # none is, or several are
        chosen = listing.choose()
    show_offers(listing, chosen, memory, sys.stdout)
    for projector in listing.projectors:
        say.plain(f"projector: {projector.path} ({figures.size(projector.size_bytes)})")
    if chosen is not None and not listing.reference.what:
        say.plain(f"{CHOSEN} comes where none is named: {_why(chosen)}")


def show_offers(listing: hub.Listing, chosen: hub.Offer | None, memory: int, file: TextIO) -> None:
    """Write the models of a repository for people, the smallest first."""
    rows = [
        (
            CHOSEN if offer == chosen else "",
            offer.quantization,
            figures.size(offer.size_bytes),
            "yes" if fits(offer.size_bytes, memory) else "no",
            str(len(offer.files)),
            offer.name,
        )
        for offer in sorted(listing.offers, key=lambda offer: offer.size_bytes)
    ]
    print_table(COLUMNS, rows, file, spare={"files": 100})


def _why(chosen: hub.Offer) -> str:
    """What is taken where nothing is asked for, and why."""
    usual, found = hub.PREFERRED[0], chosen.quantization
    why = "which most take: small, with little loss" if found == usual else f"the nearest to {usual} that there is"
    return f"{found or chosen.name} ({figures.size(chosen.size_bytes)}), {why}"


def _largest_that_fits(listing: hub.Listing, memory: int) -> hub.Offer | None:
    fitting = [offer for offer in listing.offers if fits(offer.size_bytes, memory)]
    return max(fitting, key=lambda offer: offer.size_bytes, default=None)


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
            say.note(f"{name}: {100 * n_bytes // max(1, total)} % of {figures.size(total)}")

    return tell
