"""Sampling parameters that a model's file suggests: its `general.sampling.…` keys, as llama.cpp's programs use them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from uma.llama.header import Header
from uma.types import SamplingParams

_PREFIX = "general.sampling."
_FIELDS: Mapping[str, str] = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "penalty_last_n": "penalty_window",
    "penalty_repeat": "repetition_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}
"""Field of `SamplingParams` for each key. The key `sequence` has none: the order of steps is llama.cpp's default."""
DIGITS = 7
"""Significant digits of a 32-bit float."""

_log = logging.getLogger("uma.llama")


def suggested_sampling(first: Header) -> dict[str, float]:
    """Fields of `SamplingParams` by name, as the file suggests them. Invalid ones are left out, with a warning."""
    found: dict[str, float] = {}
    for key, name in _FIELDS.items():
        value = first.metadata.get(_PREFIX + key)
        if not isinstance(value, (int, float)):
            continue
        figure: Any = value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")
        try:
            SamplingParams(**{name: figure})
        except ValueError as error:
            _log.warning("%s: %s%s is left out: %s", first.path, _PREFIX, key, error)
        else:
            found[name] = figure
    return found
