"""Whether a model of some size fits this machine, before it is loaded or even here."""

from __future__ import annotations

from uma.engine import sizing
from uma.llama import devices

BESIDE_WEIGHTS = 0.1
"""Memory for a context and for computing, as a part of the weights: what a few thousand tokens take."""


def memory_bytes() -> int:
    """The memory that a model can have: what is free, or a GPU's where that is more."""
    return max(sizing.free_memory_bytes(), sum(gpu.free_bytes for gpu in devices.gpus()))


def fits(size_bytes: int, memory: int) -> bool:
    """Whether weights of this size and a short context fit into `memory` bytes."""
    return size_bytes * (1 + BESIDE_WEIGHTS) <= memory
