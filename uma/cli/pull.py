"""`uma pull`: a model from the Hugging Face hub, with a bar on a terminal and a few lines elsewhere."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from uma import figures
from uma.cli import say, words
from uma.cli.memory import fits, memory_bytes
from uma.cli.sanitize import sanitize_line
from uma.cli.table import print_table
from uma.errors import ConfigError, ModelError
from uma.models import catalog, hub, places
from uma.models.pull import Pull

LINES = 10
"""Lines of progress where there is no terminal."""
SHOW_SEC = 0.1
"""Time between two looks of a terminal's line."""
BAR_CELLS = 20
"""Length of its bar."""
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
    on_progress = _progress(offer.name.rpartition("/")[2], offer.size_bytes)
    pull = Pull(listing, offer, cache, endpoint, on_progress)
    here = "are already here" if pull.is_done else "are here"
    path = pull.run()
    say.note(f"{size} {here}: uma chat {catalog.short_name(path, os.environ)}")
    print(sanitize_line(str(path)))
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


def _progress(name: str, total: int) -> Callable[[int], None]:
    """What tells how many bytes are here, of all: in a line of a terminal that is replaced, else in a few lines."""
    is_shown = sys.stderr.isatty()
    begun: tuple[float, int] | None = None
    shown_sec, said = 0.0, -1

    def tell(n_bytes: int) -> None:
        nonlocal begun, shown_sec, said
        now, percent = time.monotonic(), 100 * n_bytes // max(1, total)
        begun = begun or (now, n_bytes)  # what was here already has no speed
        of_all = f"{percent} % of {figures.size(total)}"
        if is_shown and (now - shown_sec >= SHOW_SEC or n_bytes >= total):
            speed, shown_sec = (n_bytes - begun[1]) / max(now - begun[0], 1e-3), now
            pace = f" · {figures.size(round(speed))}/s · {words.time_span((total - n_bytes) / max(speed, 1))} left"
            say.passing(f"{words.blocks(percent, BAR_CELLS)} {of_all}{pace if speed else ''} · {name}")
        elif not is_shown and percent * LINES // 100 > said:
            said = percent * LINES // 100
            say.note(f"{name}: {of_all}")

    return tell
