"""Numbers for people: sizes in decimal units (`1 GB` is 10^9 bytes), large counts, three significant digits."""

from __future__ import annotations

MB = 10**6
"""Bytes in the unit of sizes, of `--memory` and of the settings that end in `_mb`."""


def size(n_bytes: int) -> str:
    """Size such as `4.1 MB`."""
    return _scaled(n_bytes, (" B", " kB", " MB", " GB", " TB"))


def count(number: int) -> str:
    """Count such as `7.2 B` for parameters: thousands, millions, billions by letter."""
    return _scaled(number, ("", " K", " M", " B", " T"))


def _scaled(number: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if number < 999.5:
            return figure(number) + unit if unit != units[0] else f"{number:.0f}{unit}"
        number /= 1000
    return figure(number) + units[-1]


def figure(number: float) -> str:
    """Three significant digits, and all digits before the point: `0.0123`, `41.2`, `2,110`."""
    return f"{number:,.0f}" if abs(number) >= 99.95 else f"{number:.3g}"
