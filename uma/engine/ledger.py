"""Memory that one engine has promised: to its contexts, caches and a draft model.

Caches take memory when they fill, mapped weights when they are read, and a draft model's context after the target's is
made. Until then the system counts all of it as free, so two sizes that are each planned by the free memory can exceed
it, and Linux then ends the process under load. So each is planned by what the ledger has left, and entered in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from uma.config import RuntimeConfig
from uma.engine import sizing
from uma.errors import ConfigError
from uma.figures import MB
from uma.llama.context import ContextParams
from uma.llama.header import Header
from uma.llama.shape import Shape
from uma.types import MemoryPlan


class Ledger:
    """What is left of the memory that was free after the model was loaded. One thread at a time."""

    def __init__(self, config: RuntimeConfig, shape: Shape) -> None:
        self._config = config
        self._shape = shape
        self._host_left = sizing.host_bytes(config, shape)
        self._gpu_left = sizing.free_gpu_bytes(config)
        self.cache_bytes = 0
        """Maximum size of the snapshots in host memory."""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are neither promised nor in use."""
        return max(0, min(self._host_left, sizing.free_memory_bytes()))

    @property
    def kv_bytes(self) -> int:
        """Free bytes of the memory that holds the KV; if host and GPUs share it, the smaller of both."""
        here = self._host_left if sizing.keeps_kv_here(self._config) else math.inf
        return max(0, int(min(here, self._gpu_left, sizing.free_kv_bytes(self._config))))

    def context_params(self) -> ContextParams:
        """Parameters of the configured context. Raises `ConfigError` if there is no memory for it, with the `--memory`
        that is enough, or with what is free where no `--memory` is.
        """
        try:
            return self._context_params()
        except ConfigError as error:
            raise ConfigError(f"{error.message}; {self._advice()}") from error

    def _advice(self) -> str:
        def plan(memory: int) -> None:
            Ledger(attrs.evolve(self._config, memory=memory), self._shape)._context_params()

        least = (self._shape.size_bytes + sizing.process_bytes(self._shape.n_tokens)) // MB
        if self._config.memory and (enough := sizing.enough_mb(max(least, self._config.memory), plan)):
            return f"--memory {enough} is enough"
        return f"{sizing.free_memory_words()}; use a smaller model, or end other programs"

    def _context_params(self) -> ContextParams:
        free_bytes = self.kv_bytes
        if self._config.memory:  # without the part for snapshots
            free_bytes = min(free_bytes, self.host_bytes - sizing.cache_ram_bytes(self._config, self.host_bytes))
        return sizing.context_params(self._shape, self._config, max(0, free_bytes))

    @contextmanager
    def promised(self, shape: Shape, params: ContextParams) -> Iterator[None]:
        """Reserve the memory of this context, which the block makes. If the block fails, the memory is released."""
        n_bytes = sizing.context_bytes(shape, params)
        self._promise_kv(n_bytes)
        try:
            yield
        except BaseException:
            self._promise_kv(-n_bytes)
            raise

    def promise_weights(self, shape: Shape) -> None:
        """Reserve the memory of a further model that was loaded or mapped."""
        self._promise_kv(shape.size_bytes)

    def promise_cache(self, queued_bytes: int = 0) -> None:
        """Reserve memory for snapshots, and for up to `queued_bytes` of them that wait to be written to disk."""
        self.cache_bytes = sizing.cache_ram_bytes(self._config, self.host_bytes)
        self._host_left -= self.cache_bytes + min(queued_bytes, self.cache_bytes)

    def _promise_kv(self, n_bytes: int) -> None:
        if sizing.keeps_kv_here(self._config):
            self._host_left -= n_bytes
        self._gpu_left -= n_bytes


def planned(parts: list[Header], config: RuntimeConfig) -> MemoryPlan | None:
    """Memory plan of a model with these files, if it were loaded now; None for an encoder, which keeps no KV. Raises
    `ConfigError` if there is no memory for it. Any thread.
    """
    shape = Shape.of(parts)
    return sizing.memory_plan(shape, Ledger(config, shape).context_params()) if shape.is_causal else None
