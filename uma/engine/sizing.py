"""How large the context is made, and what the model's kind of memory allows: decided from the model and the
configuration, never guessed, and told in `capabilities`.
"""

from __future__ import annotations

import os

import attrs

from uma.config import RuntimeConfig
from uma.errors import ConfigError
from uma.llama.context import Context, ContextParams
from uma.llama.model import Model
from uma.types import SamplingParams

MOST_SEQUENCE_IDS = 256
"""llama.cpp's LLAMA_MAX_SEQ: running sequences and cached prefixes share them."""
POOL_SEQUENCES = 8
"""Without `--n-ctx`: room for this many sequences of the model's full context,"""
LEAST_POOL_TOKENS, MOST_POOL_TOKENS = 8_192, 32_768
"""but from 8,192 tokens (or one full context) to 32,768,"""
MEMORY_SHARE = 4
"""and at most a quarter of the memory that is free."""


def context_params(model: Model, config: RuntimeConfig) -> ContextParams:
    """The context this configuration asks for. Raises `ConfigError` where it cannot be had."""
    unified = config.kv_unified != "off"
    n_ctx = config.n_ctx or _pool_tokens(model, config)
    has_cells = model.memory in ("attention", "sliding-window")
    return ContextParams(
        n_ctx=n_ctx,
        n_batch=min(config.n_batch, n_ctx),
        n_ubatch=min(config.n_ubatch, config.n_batch, n_ctx),
        # Sequence ids cost nothing in one buffer of cells; a recurrent state or a buffer of its own costs each its size.
        n_seq_max=MOST_SEQUENCE_IDS if unified and has_cells else config.max_sequences + 1,
        n_threads=config.threads,
        n_threads_batch=config.threads_batch,
        kv_unified=unified,
        flash_attn=config.flash_attn,
        cache_type_k=config.cache_type_k,
        cache_type_v=config.cache_type_v,
        offload_kqv=config.offload_kqv,
        swa_full=config.swa_full,
    )


def _pool_tokens(model: Model, config: RuntimeConfig) -> int:
    wanted = min(max(model.n_ctx_train * POOL_SEQUENCES, LEAST_POOL_TOKENS), MOST_POOL_TOKENS)
    wanted = max(wanted, min(model.n_ctx_train, MOST_POOL_TOKENS))
    cell_bytes = model.kv_bytes_per_token(config.cache_type_k, config.cache_type_v)
    affordable = _free_memory_bytes() // MEMORY_SHARE // max(cell_bytes, 1)
    if affordable < 512:
        raise ConfigError(
            f"n_ctx: there is memory for {affordable} tokens only ({cell_bytes:,} bytes each); "
            "use a smaller model, a smaller --cache-type-k and --cache-type-v, or set --n-ctx yourself"
        )
    return int(min(wanted, affordable)) // 256 * 256


def _free_memory_bytes() -> int:
    """Memory that can be had without swapping; half of all where the system does not tell."""
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123
            available = next(line for line in file if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return page * os.sysconf("SC_PHYS_PAGES") // 2


def max_request_tokens(context: Context) -> int:
    """Most tokens of one request: what the model was trained for, or what one sequence can hold if that is less."""
    return min(context.n_ctx_seq, context.model.n_ctx_train or context.n_ctx_seq)


def shares_prefixes(context: Context) -> bool:
    """Whether cells of a common prefix can be used by several sequences with exact results."""
    return prefix_sharing(context) == "cells"


def prefix_sharing(context: Context) -> str:
    """For `capabilities`: `cells`, or `none` and why."""
    memory = context.model.memory
    if memory in ("recurrent", "hybrid"):
        return f"none: a {memory} model's state cannot be cut to a prefix"
    if memory == "sliding-window" and not context.params.swa_full:
        return "none: the sliding window has dropped the prefix's cells (--no-swa-full)"
    return "cells"


def sampling_params() -> tuple[str, ...]:
    """Names of all parameters the sampler honours."""
    return tuple(field.name for field in attrs.fields(SamplingParams))
