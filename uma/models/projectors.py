"""Which projector (mmproj file) belongs to a model: the one that lies beside it."""

from __future__ import annotations

import re
from pathlib import Path

from uma.models.places import is_projector

_PREFERRED = ("q8_0", "f16", "bf16", "f32")
"""Of several of one model the first of these: they differ in precision alone."""


def beside(model: Path) -> Path | None:
    """The projector in a model's own folder; of several that whose name has most in common with the model's."""
    found = sorted(each for each in model.parent.glob("*.gguf") if is_projector(each.name) and each != model)
    words = _words(model.name)
    return min(found, key=lambda each: (-len(words & _words(each.name)), _rank(each.name)), default=None)


def _words(name: str) -> set[str]:
    return set(re.split(r"[-_. ]+", name.casefold())) - {"mmproj", "gguf", "", *_PREFERRED}


def _rank(name: str) -> int:
    words = re.split(r"[-. ]+", name.casefold())
    return next((rank for rank, each in enumerate(_PREFERRED) if each in words), len(_PREFERRED))
