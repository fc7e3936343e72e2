"""How large contexts and caches are, and what the model's kind of memory allows: by the model, the configuration and
the memory that is free.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path

import attrs

from uma import cgroup
from uma.config import RuntimeConfig, Speculate, Toggle
from uma.engine.policy.cost import SIZES
from uma.errors import ConfigError
from uma.llama import backend, devices, pages
from uma.llama.context import ROLLED_BACK, ROUNDED_TOKENS, Context, ContextParams
from uma.llama.devices import Device
from uma.llama.footprint import footprint
from uma.llama.header import Header
from uma.llama.model import Model, Pooling, llama_version
from uma.llama.placement import ALL_LAYERS, Placement, place

POOL_SEQUENCE_IDS = 128
"""Ids that running sequences and cached prefixes share in one buffer of cells, where no more are asked for. llama.cpp
compares them in pairs for each batch: 256 take it some 50 us, 128 (by their square) a quarter of that. Cache without an
id is a snapshot in memory."""
POOL_SEQUENCES = 8
"""Sequences of the model's full context for which the pool has cells, without `--n-ctx`."""
LEAST_POOL_TOKENS, MOST_POOL_TOKENS = 8_192, 32_768
"""Minimum and maximum size of that pool, where neither more sequences nor one request of the model's full context need
more."""
LONG_CONTEXTS, LONG_SHARE = 2, 8
"""Full contexts that the pool has of a model whose own is as long as that maximum or longer, as far as the free memory
divided by the second holds them."""
MOST_SEQUENCE_TOKENS = 512
"""The maximum for each sequence that can run, where that is more: it decides beyond 64 sequences."""
MOST_STREAM_TOKENS = 4_096
"""Maximum share of one sequence in it with split KV."""
MEMORY_SHARE = 4
"""Divisor of the free memory: the pool takes at most a quarter of it."""
LEAST_CONVERSATIONS, MOST_MEMORY_SHARE = 4, 0.7
"""Where that quarter holds fewer conversations of `MOST_STREAM_TOKENS` than the first, the pool takes up to the second
as a share of the free memory."""
DEFAULT_SEQUENCES = 64
"""Maximum sequences that run at once, without `--max-sequences`."""
STATES_SHARE, LEAST_STATES_BYTES, LEAST_STATES = 2, 48 * 2**20, 8
"""Recurrent states are there from the start, for all that can run at once. Without `--max-sequences` they take at most
the weights' size divided by the first, or the second where that is more; but the third are there as far as a quarter
of the free memory holds them. Full-size windows are made as long as they take no more than that."""
MAX_DRAFT = 15
"""Maximum drafted tokens of a row: with the one before them a batch of 16."""
LEAST_ROLLED_BACK = 3
"""Minimum tokens of a draft for which a sequence has further states. Shorter drafts are hardly worth that memory."""
SMALL_WINDOWS_SHARE = 4
"""Windows are made small where they take at most the cells of full-size ones divided by it."""
LEAST_CACHE_TOKENS, CACHE_SHARE = 2_048, 16
"""Minimum cells that can hold cache alone, and the divisor of all cells for larger pools."""
RAM_SHARE, MOST_RAM_BYTES = 8, 8 * 2**30
MAX_TEXT_TOKENS = 8_192
"""Maximum tokens of a text to embed. The context for it takes its memory while streams run, so it stays small."""
LEAST_SIDE_TOKENS = 256
"""Minimum context for embeddings and of a draft model: a smaller one is of no use."""
LEAST_REPRODUCIBLE_TOKENS = 8_192
"""Minimum tokens of a request that is computed apart from all others, where the model and the pool hold as many."""
REPRODUCIBLE_START_SHARE = 4
"""Divisor of the memory that is free at the start: more of it than so the context of such requests has for no number of
tokens above that minimum, since it comes beside the pool."""
REPRODUCIBLE_BATCH_TOKENS = 32
"""Tokens at whose multiples a batch of such a request ends: the streams of others wait for it, which mostly takes less
than a quarter of a second. Another number changes the last bits of every answer."""
EXACT_BATCH_TOKENS = 2_048
"""Maximum batch that is computed without flash attention: of an encoder, memory grows with its square."""
EMBED_SEQUENCES = 64
"""Maximum texts of one batch; `LEAST_STATES` where each has a state of its own."""
PROCESS_BYTES = 64 * 2**20
"""What a process takes beside weights and context: Python, llama.cpp, its buffers for computing."""
VOCABULARY_BYTES = 900
"""What a token of the vocabulary takes: some 600 in the tables of llama.cpp and of grammars, and a logit in each row of
a large batch."""
DEFAULT_UBATCH_TOKENS = RuntimeConfig().n_ubatch
"""What computing an ubatch takes in memory is not asked of a machine up to this size."""
FLOAT_BYTES = 4
"""Bytes of a logit, and of a score of plain attention, which keeps those of a whole ubatch in each head, layer by
layer."""
MASK_BYTES = 2
"""Bytes for a cell and a token of an ubatch: llama.cpp's mask of what a token can attend to, in F16."""

_log = logging.getLogger("uma.engine")


def context_params(model: Model, config: RuntimeConfig) -> ContextParams:
    """The context this configuration asks for. Raises `ConfigError` where there is no memory for it."""
    if not model.is_causal:
        return embed_params(model, config, free_bytes=0)
    streams = _streams(model, config)
    # With a buffer each, a sequence has its share only, and prefixes are copied. Where the share is a whole context,
    # `auto` takes it: rows then pass by no cells of others.
    unified = config.kv_unified == "on" or (config.kv_unified == "auto" and config.n_ctx < streams * model.n_ctx_train)
    small = _with_small_windows(model, config, streams, is_unified=unified)
    streams = small or streams
    n_ctx = config.n_ctx or _pool_tokens(model, config, streams, is_unified=unified, swa_full=not small)
    # A recurrent state, a small window or a buffer of its own costs each its size.
    # Where ids share cells, parts of a state pass through one more.
    n_seq_max = max(streams + 1, POOL_SEQUENCE_IDS) if unified and not (model.has_states or small) else streams
    guards_window = unified and not small and model.memory == "sliding-window" and can_guard(streams)
    n_seq_max = min(2 * n_seq_max if guards_window else n_seq_max, backend.MAX_SEQUENCES)
    # A batch has room for a token of every sequence and some prefill, or prompts would wait for ever.
    n_batch = min(max(_most_batch_tokens(model, config), streams + SIZES[0]), n_ctx)
    params = attrs.evolve(
        _generating(config),
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_ubatch=n_batch if model.memory == "sliding-window" else min(config.n_ubatch, n_ctx),
        n_seq_max=n_seq_max,
        kv_unified=unified,
        swa_full=not small,
        guards_window=guards_window,
        rolled_back=_rolled_back(model, config, streams),
    )
    if config.n_ctx or config.n_ubatch > DEFAULT_UBATCH_TOKENS:
        _check_fits(model, config, params)
    return params


def process_bytes(n_tokens: int) -> int:
    """What a process takes beside weights, context and cache, with so many tokens in its vocabulary."""
    return PROCESS_BYTES + VOCABULARY_BYTES * n_tokens


def placed(config: RuntimeConfig, parts: list[Header], gpus: Sequence[Device], beside_bytes: int) -> RuntimeConfig:
    """The configuration with numbers for what it leaves to the memory of the GPUs: layers, and layers whose experts are
    the CPU's. They hold KV for a few conversations too, and `beside_bytes` of other weights.
    """
    if config.n_gpu_layers >= 0 or config.n_cpu_moe >= 0 or not gpus:
        return attrs.evolve(config, n_cpu_moe=max(0, config.n_cpu_moe))
    kept = footprint(parts, parts[0].n_layers)
    tokens = config.n_ctx or LEAST_CONVERSATIONS * min(parts[0].context_length, MOST_STREAM_TOKENS)
    kv_bytes = tokens * kept.bytes_per_token(config.cache_type_k, config.cache_type_v) + LEAST_STATES * kept.state_bytes
    free_bytes = [gpu.free_bytes for gpu in gpus]
    found = place(parts, [free_bytes[0] - beside_bytes, *free_bytes[1:]], kv_bytes if config.offload_kqv else 0)
    if found != Placement(ALL_LAYERS):
        _log.warning(
            "the GPU's memory does not hold the whole model: --n-gpu-layers is %s, and the CPU computes the experts "
            "of the first %s layers (--n-cpu-moe)",
            found.gpu_layers, found.cpu_experts,
        )  # fmt: skip
    return attrs.evolve(config, n_gpu_layers=found.gpu_layers, n_cpu_moe=found.cpu_experts)


def _generating(config: RuntimeConfig) -> ContextParams:
    """What every context that generates has of the configuration."""
    return ContextParams(
        n_threads=config.threads,
        n_threads_batch=config.threads,
        flash_attn=config.flash_attn,
        cache_type_k=config.cache_type_k,
        cache_type_v=config.cache_type_v,
        offload_kqv=config.offload_kqv,
    )


def _check_fits(model: Model, config: RuntimeConfig, params: ContextParams) -> None:
    """Raise `ConfigError` where a context of the size that the user has named needs more memory than is free: Linux
    gives it out, and ends the process, or another one, once it is written.
    """
    free_bytes = free_kv_bytes(config) - params.n_seq_max * (1 + params.rolled_back) * model.state_bytes
    heads = model.attention_heads // max(1, model.n_layers) if params.flash_attn == "off" else 0
    work_bytes = params.n_ubatch * (MASK_BYTES + FLOAT_BYTES * heads)
    cell_bytes = _cell_bytes(model, config, swa_full=params.swa_full) + work_bytes
    # Beside what is the same for each cell: small windows.
    other_bytes = params.kv_bytes(model) + params.cells * work_bytes - params.cells * cell_bytes
    other_bytes += params.n_ubatch * model.vocab.n_tokens * FLOAT_BYTES
    if (needed_bytes := params.cells * cell_bytes + other_bytes) <= free_bytes:
        return
    most = max(0, free_bytes - other_bytes) // cell_bytes // ROUNDED_TOKENS * ROUNDED_TOKENS
    raise ConfigError(
        f"n_ctx: a context of {params.n_ctx:,} tokens takes {needed_bytes / 2**30:,.2f} GiB of memory, {cell_bytes:,} "
        f"bytes a token with --n-ubatch {params.n_ubatch}, and {max(0, free_bytes) / 2**30:,.2f} GiB are free, which "
        f"{most:,} tokens fit into; use a smaller --n-ctx, --n-ubatch, or --cache-type-k and --cache-type-v"
    )


def _cell_bytes(model: Model, config: RuntimeConfig, *, swa_full: bool = True) -> int:
    """Bytes of a cell of the context; without `swa_full` in the layers that have no window. At least 1."""
    types = config.cache_type_k, config.cache_type_v
    return max(1, model.kv_bytes_per_token(*types) - (0 if swa_full else model.window_bytes_per_token(*types)))


def check_weights(size_bytes: int, config: RuntimeConfig, name: str) -> None:
    """Raise `ConfigError` where the user wants weights kept in memory that it cannot hold: those that `name` sets."""
    is_kept = config.use_mmap == "off" or config.use_mlock
    if is_kept and not _computes_on_gpu(config) and size_bytes > (free_bytes := free_memory_bytes()):
        setting = "use_mlock" if config.use_mlock else "use_mmap"
        raise ConfigError(
            f"{setting}: the weights of --{name} take {size_bytes / 2**30:,.2f} GiB, and {free_bytes / 2**30:,.2f} GiB "
            "of memory are free; leave them mapped (--use-mmap on, no --use-mlock), or use a smaller model"
        )


def solo_tokens(context: Context) -> int:
    """Prefill tokens of one batch while nothing decodes. On a CPU more than an ubatch would be no faster; while a GPU
    computes one, llama.cpp prepares the next of the same batch.
    """
    return context.n_ubatch if context.computes_on_cpu else context.n_batch


def _streams(model: Model, config: RuntimeConfig) -> int:
    """Ids for all sequences that can run, and one for health probes. Where each has a recurrent state, which is there
    from the start, as many as there is memory for. Raises `ConfigError` where that is none.
    """
    most = _most_sequences(config)
    wanted = min(most + 1, backend.MAX_SEQUENCES)
    if not model.state_bytes:
        return wanted
    free_bytes = _bytes_beside_weights(model, config)
    affordable = free_bytes // MEMORY_SHARE // model.state_bytes
    if affordable < 1:
        raise ConfigError(
            f"model: beside the weights {free_bytes // 2**20:,} MiB of memory are free, and a sequence's state alone "
            f"takes {model.state_bytes / 2**20:,.0f} MiB; use a smaller model"
        )
    if not config.max_sequences:
        states = 1 + LEAST_ROLLED_BACK if _wants_rolled_back(model, config) else 1
        wanted = min(wanted, max(LEAST_STATES, _modest_bytes(model) // (states * model.state_bytes)))
    if affordable < min(most, wanted):
        _log.warning(
            "--max-sequences is %s, and not %s: a sequence's state takes %.1f MiB, and beside the weights %s MiB of "
            "memory are free",
            f"{affordable:,}", f"{min(most, wanted):,}", model.state_bytes / 2**20, f"{free_bytes // 2**20:,}",
        )  # fmt: skip
    return min(wanted, affordable)


def _modest_bytes(model: Model) -> int:
    """What states take at most where no number of sequences is asked for, and windows of full size."""
    return max(model.info.size_bytes // STATES_SHARE, LEAST_STATES_BYTES)


def _wants_rolled_back(model: Model, config: RuntimeConfig) -> bool:
    return config.speculate != "off" and model.state_bytes > 0 and model.info.architecture in ROLLED_BACK


def _rolled_back(model: Model, config: RuntimeConfig, streams: int) -> int:
    """Tokens of a draft that can be cut off where each sequence has a state: for each of them all have a state more.
    As many as the longest draft has, or as memory holds; none where that is too few.
    """
    if not _wants_rolled_back(model, config):
        return 0
    most_bytes = _bytes_beside_weights(model, config) // MEMORY_SHARE
    if not config.max_sequences:
        most_bytes = min(most_bytes, _modest_bytes(model))
    most = min(MAX_DRAFT, most_bytes // (streams * model.state_bytes) - 1)
    return most if most >= LEAST_ROLLED_BACK else 0


def _bytes_beside_weights(model: Model, config: RuntimeConfig) -> int:
    """Memory for KV and states that the weights leave."""
    left_bytes = host_bytes(config, model)
    if config.memory:
        left_bytes = max(0, left_bytes - cache_ram_bytes(config, left_bytes))
    elif not keeps_kv_here(config):
        return free_kv_bytes(config)
    return min(left_bytes, free_kv_bytes(config))


def host_bytes(config: RuntimeConfig, model: Model) -> int:
    """Free memory of the machine that the weights leave, within `--memory`."""
    free_bytes = free_memory_bytes()
    if model.is_mapped and not _keeps_kv_on_gpu(config):
        # Mapped weights count as free to Linux, which can drop them; a server that computes with them needs them there.
        free_bytes -= model.info.size_bytes
    if config.memory:
        taken_bytes = model.info.size_bytes + process_bytes(model.vocab.n_tokens)
        free_bytes = min(free_bytes, config.memory * 2**20 - taken_bytes)
    return max(0, free_bytes)


def context_bytes(model: Model, params: ContextParams) -> int:
    """Memory of a context's cells and states."""
    return params.kv_bytes(model) + params.n_seq_max * (1 + params.rolled_back) * model.state_bytes


def _with_small_windows(model: Model, config: RuntimeConfig, streams: int, *, is_unified: bool) -> int:
    """Sequences that run, where layers with a window keep that of each and no more; 0 where they keep all cells.

    Of all cells prefixes can be shared at any token, where each sequence can have a guard. With small windows they are
    shared at checkpoints, and each sequence has a window of its own: so there are fewer, where no number is asked for.
    """
    if model.memory != "sliding-window" or config.swa_full == "on":
        return 0
    wanted = config.n_ctx or _wanted_tokens(model, config, streams, is_unified=is_unified)
    tokens = config.n_ctx or min(wanted, _affordable_tokens(model, config, streams, wanted, is_unified=is_unified))
    most = (tokens // SMALL_WINDOWS_SHARE - config.n_ubatch) // model.window_tokens
    small = min(streams, max(LEAST_STATES, most)) if is_unified and not config.max_sequences else streams
    if config.swa_full == "off" or not is_unified:
        return small
    window_bytes = tokens * model.window_bytes_per_token(config.cache_type_k, config.cache_type_v)
    if tokens == wanted and window_bytes <= _modest_bytes(model):
        return 0
    return small if small <= most else 0


def _most_batch_tokens(model: Model, config: RuntimeConfig) -> int:
    """Maximum tokens of a batch: with a sliding window those of one ubatch.

    llama.cpp finds cells for all ubatches of a batch before it computes the first, so a later one can be given cells
    that have left the window only by then: an earlier one still attends to them, and they stay lost.
    """
    return config.n_ubatch if model.memory == "sliding-window" else config.n_batch


def embed_params(
    model: Model, config: RuntimeConfig, free_bytes: int, max_tokens: int = MAX_TEXT_TOKENS
) -> ContextParams:
    """A context that embeds texts of up to `max_tokens` tokens, in a quarter of `free_bytes`; an encoder's takes no
    memory for them. Raises `ConfigError` where that is too little.
    """
    longest = min(max_tokens, MAX_TEXT_TOKENS, model.n_ctx_train or MAX_TEXT_TOKENS, config.n_ctx or MAX_TEXT_TOKENS)
    if model.is_causal:
        # One ubatch a batch: pooling puts together what one ubatch holds of a sequence. Beside one text that is read
        # in pieces there is always space for a batch of whole ones.
        n_batch = config.n_ubatch
        cell_bytes = max(1, model.kv_bytes_per_token("f16", "f16"))
        spare_bytes = free_bytes // MEMORY_SHARE - LEAST_STATES * model.state_bytes
        longest = min(longest, spare_bytes // cell_bytes - n_batch)
        if longest < min(LEAST_SIDE_TOKENS, max_tokens):
            raise ConfigError(f"there is no memory for a context to embed texts in ({cell_bytes:,} bytes a token)")
        n_ctx = longest + n_batch
    else:
        n_ctx = n_batch = longest
    return ContextParams(
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_ubatch=n_batch,
        n_seq_max=LEAST_STATES if model.has_states else EMBED_SEQUENCES,
        n_threads=config.threads,
        n_threads_batch=config.threads,
        # llama.cpp's flash attention for few rows and for many differ in the fifth digit: a text's embedding would
        # depend on the texts that share its batch.
        flash_attn="off" if n_batch <= EXACT_BATCH_TOKENS else config.flash_attn,
        offload_kqv=config.offload_kqv,
        pooling=pooling(model, config),
    )


def reproducible_params(model: Model, config: RuntimeConfig, n_ctx: int, free_bytes: int) -> ContextParams:
    """A context that computes one request by itself, always in the same batches. Raises `ConfigError` where half of
    `free_bytes` are too little.

    It is without flash attention where that is not asked for: llama.cpp's adds up, for a single row, a part of the
    cells in each thread, so that the number of threads could not follow what other programs leave.
    """
    has_choice = config.flash_attn == "auto" and config.cache_type_v in ("f32", "f16", "bf16")
    flash_attn: Toggle = "off" if has_choice else config.flash_attn
    heads = model.attention_heads // max(1, model.n_layers) if flash_attn == "off" else 0
    work_bytes = REPRODUCIBLE_BATCH_TOKENS * (MASK_BYTES + FLOAT_BYTES * heads)
    needed_bytes = n_ctx * (_cell_bytes(model, config) + work_bytes) + model.state_bytes
    if needed_bytes > free_bytes // 2:
        raise ConfigError(
            f"it takes {needed_bytes / 2**20:,.0f} MiB for {n_ctx:,} tokens, and half of the memory that is left are "
            f"{free_bytes // 2 / 2**20:,.0f} MiB"
        )
    return attrs.evolve(
        _generating(config),
        n_ctx=n_ctx,
        n_batch=REPRODUCIBLE_BATCH_TOKENS,
        n_ubatch=REPRODUCIBLE_BATCH_TOKENS,
        flash_attn=flash_attn,
    )


def max_text_tokens(context: Context) -> int:
    """Maximum tokens of a text that `context`, one for embeddings, takes."""
    params = context.params  # llama.cpp rounds n_ctx up, beyond what the model was trained for
    return params.n_ctx - params.n_batch if context.model.is_causal else params.n_batch


def grammars_at_once(params: ContextParams) -> int:
    """Maximum grammars compiled at once: one for each core that neither computes nor runs Trio's thread, and at least
    one. Each takes a core for as long as a second, and llama.cpp's threads all wait for one that has lost its core.
    """
    cores = backend.core_count()
    computing = max(params.n_threads or cores, params.n_threads_batch or cores)
    return max(1, cores - computing - 1)


def pooling(model: Model, config: RuntimeConfig) -> Pooling:
    """How the embedding of a text is made of its tokens': as configured, as the model says, or their mean."""
    if config.pooling != "auto":
        return config.pooling
    return "mean" if model.pooling == "none" else model.pooling


def _computes_on_gpu(config: RuntimeConfig) -> bool:
    return config.n_gpu_layers != 0 and backend.has_gpu()


def _wanted_tokens(model: Model, config: RuntimeConfig, streams: int, *, is_unified: bool) -> int:
    if not is_unified:
        return streams * min(model.n_ctx_train, MOST_STREAM_TOKENS)
    most = max(MOST_POOL_TOKENS, MOST_SEQUENCE_TOKENS * _most_sequences(config))
    wanted = min(max(model.n_ctx_train * POOL_SEQUENCES, LEAST_POOL_TOKENS), most)
    # One request can have the whole context: a coding agent's session grows to 100,000 tokens and more.
    return max(wanted, model.n_ctx_train)


def _affordable_tokens(
    model: Model,
    config: RuntimeConfig,
    streams: int,
    wanted: int,
    *,
    is_unified: bool,
    swa_full: bool = True,
    share: int = MEMORY_SHARE,
) -> int:
    states = streams * (1 + _rolled_back(model, config, streams))
    free_bytes = _bytes_beside_weights(model, config) - states * model.state_bytes
    window_bytes = 0
    if not swa_full:
        window_tokens = streams * model.window_tokens + config.n_ubatch * (1 if is_unified else streams)
        window_bytes = window_tokens * model.window_bytes_per_token(config.cache_type_k, config.cache_type_v)
    cell_bytes = _cell_bytes(model, config, swa_full=swa_full)
    affordable = (free_bytes // share - window_bytes) // cell_bytes
    least = _least_tokens(model, wanted)
    if affordable < least:
        affordable = min(least, (int(MOST_MEMORY_SHARE * free_bytes) - window_bytes) // cell_bytes)
    return affordable


def _least_tokens(model: Model, wanted: int) -> int:
    return min(wanted, LEAST_CONVERSATIONS * min(model.n_ctx_train, MOST_STREAM_TOKENS))


def _pool_tokens(model: Model, config: RuntimeConfig, streams: int, *, is_unified: bool, swa_full: bool) -> int:
    cell_bytes = _cell_bytes(model, config, swa_full=swa_full)
    wanted = _wanted_tokens(model, config, streams, is_unified=is_unified)
    affordable = _affordable_tokens(model, config, streams, wanted, is_unified=is_unified, swa_full=swa_full)
    least = _least_tokens(model, wanted)
    if affordable < 512:
        raise ConfigError(
            f"n_ctx: beside the weights there is memory for {affordable} tokens only ({cell_bytes:,} bytes each); "
            "use a smaller model, a smaller --cache-type-k and --cache-type-v, or set --n-ctx yourself"
        )
    tokens = int(min(wanted, affordable))
    if is_unified and tokens >= model.n_ctx_train >= MOST_POOL_TOKENS:
        tokens = max(tokens, _long_tokens(model, config, streams, swa_full=swa_full))
    tokens = tokens // 256 * 256
    if tokens < least // 256 * 256:
        _log.warning(
            "the context has %s tokens, less than %d conversations of %s: beside the weights %s MiB of memory are free "
            "and a token takes %s bytes; a smaller --cache-type-k and --cache-type-v hold more",
            f"{tokens:,}", LEAST_CONVERSATIONS, f"{least // LEAST_CONVERSATIONS:,}",
            f"{_bytes_beside_weights(model, config) // 2**20:,}", f"{cell_bytes:,}",
        )  # fmt: skip
    return tokens


def _long_tokens(model: Model, config: RuntimeConfig, streams: int, *, swa_full: bool) -> int:
    """Tokens of several long conversations at once, as far as they are cheap."""
    wanted = LONG_CONTEXTS * model.n_ctx_train
    cheap = _affordable_tokens(model, config, streams, wanted, is_unified=True, swa_full=swa_full, share=LONG_SHARE)
    window_bytes = model.window_bytes_per_token(config.cache_type_k, config.cache_type_v)
    if swa_full and window_bytes:
        cheap = min(cheap, _modest_bytes(model) // window_bytes)
    return min(wanted, cheap)


def map_above_bytes(config: RuntimeConfig) -> float:
    """Weights larger than this are mapped from their file, others read into memory.

    Where CPUs compute, weights in huge pages are faster to decode with, and a mapped file has none. But mapped weights
    can be dropped when memory is short, and are shared with other processes: what takes over half of it stays mapped.
    """
    if config.use_mmap != "auto":
        return 0 if config.use_mmap == "on" else math.inf
    return 0 if _computes_on_gpu(config) or not pages.gives_huge_pages() else free_memory_bytes() // 2


def cache_cells(context: Context, config: RuntimeConfig) -> int:
    """Cells that can hold nothing but cache. Where memory keeps none, all can: what left them would be lost."""
    if config.cache_tokens >= 0:
        return config.cache_tokens
    if config.cache_ram_mb == 0:
        return context.n_ctx
    return max(LEAST_CACHE_TOKENS, context.n_ctx // CACHE_SHARE)


def cache_ram_bytes(config: RuntimeConfig, free_bytes: int) -> int:
    """Host memory for snapshots, of so much that is free."""
    if config.cache_ram_mb >= 0:
        return config.cache_ram_mb * 2**20
    return min(free_bytes // RAM_SHARE, MOST_RAM_BYTES)


def snapshot_identity(context: Context) -> dict[str, str | int]:
    """All that a snapshot depends on: with anything else it must not be used."""
    params = context.params
    return {
        "model": context.model.model_hash,
        "llama_cpp": llama_version(),
        "kv_unified": params.kv_unified,
        "buffers": 1 if params.kv_unified else params.n_seq_max,
        "cache_type_k": params.cache_type_k,
        "cache_type_v": params.cache_type_v,
        "flash_attn": params.flash_attn,
        "swa_full": params.swa_full,
    }


def free_kv_bytes(config: RuntimeConfig) -> int:
    """Free memory where the KV is: on the GPUs, or in the machine; the smaller of both where each has a part of the
    layers.
    """
    if not _keeps_kv_on_gpu(config):
        return free_memory_bytes()
    on_gpus = sum(gpu.free_bytes for gpu in devices.gpus())
    return min(on_gpus, free_memory_bytes()) if keeps_kv_here(config) else on_gpus


def free_gpu_bytes(config: RuntimeConfig) -> float:
    """Free memory of the GPUs that bounds the KV: without bound where none of it is theirs."""
    return sum(gpu.free_bytes for gpu in devices.gpus()) if _keeps_kv_on_gpu(config) else math.inf


def keeps_kv_here(config: RuntimeConfig) -> bool:
    """Whether the machine's memory, and not the GPUs', has a part of the KV."""
    return config.n_gpu_layers >= 0 or not _keeps_kv_on_gpu(config)


def _keeps_kv_on_gpu(config: RuntimeConfig) -> bool:
    return config.offload_kqv and _computes_on_gpu(config)


def free_memory_bytes(root: Path = cgroup.ROOT) -> int:
    """Memory available without swapping, within the limits of this process's control groups; half of the machine's
    where the system does not say.
    """
    return int(min(_machine_free_bytes(root / "proc" / "meminfo"), cgroup.memory_left_bytes(root)))


def _machine_free_bytes(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def max_request_tokens(context: Context) -> int:
    """Maximum tokens of one request: what the model was trained for, or what one sequence can hold if that is less."""
    return min(context.n_ctx_seq, context.model.n_ctx_train or context.n_ctx_seq)


def max_reproducible_tokens(context: Context, config: RuntimeConfig, free_bytes: int) -> int:
    """Maximum tokens of one request that is computed apart from all others, by the memory that is left; 0 for a model
    that does not generate.
    """
    if not context.model.is_causal:
        return 0
    cell_bytes = context.model.kv_bytes_per_token(config.cache_type_k, config.cache_type_v)
    affordable = free_bytes // REPRODUCIBLE_START_SHARE // max(1, cell_bytes)
    return min(max_request_tokens(context), max(affordable, LEAST_REPRODUCIBLE_TOKENS))


def max_active(context: Context, config: RuntimeConfig) -> int:
    """Maximum sequences that run at once. One id is left for health probes where llama.cpp has as many; else a probe
    waits for the next token of a sequence.
    """
    return max(1, min(_most_sequences(config), context.n_sequences))


def _most_sequences(config: RuntimeConfig) -> int:
    return config.max_sequences or DEFAULT_SEQUENCES


def can_guard(sequences: int) -> bool:
    """Whether llama.cpp has a second id for each of so many sequences."""
    return 2 * sequences <= backend.MAX_SEQUENCES


def why_no_drafts(context: Context, config: RuntimeConfig, *, sees: bool) -> str | None:
    """Why no tokens are drafted; None where they are. Memory must be cut behind those of a draft that held."""
    model = context.model
    if config.speculate == "off":
        return "--speculate off"
    if not model.is_causal:
        return "an encoder does not generate"
    if model.has_states and not context.rolled_back:
        if model.info.architecture in ROLLED_BACK:
            return (
                f"for {context.n_sequences:,} sequences memory does not hold a state for each token of a draft "
                f"({model.state_bytes / 2**20:,.1f} MiB each); with a smaller --max-sequences it can"
            )
        return f"a {model.memory} model's state cannot be cut behind the tokens of a draft that held"
    if sees:
        return "beside pictures (--mmproj) nothing is drafted yet"
    return None


def speculate(context: Context, config: RuntimeConfig, *, sees: bool) -> Speculate:
    """Whether tokens are drafted."""
    return "off" if why_no_drafts(context, config, sees=sees) else config.speculate


def draft_params(model: Model, target: Context, config: RuntimeConfig, free_bytes: int) -> ContextParams:
    """The context of a draft model, for the sequences of `target`, in a quarter of `free_bytes`. Raises `ConfigError`
    where it cannot draft.
    """
    if not model.is_causal or model.has_states:
        kind = f"a {model.memory} model, whose state cannot be cut behind a draft" if model.is_causal else "an encoder"
        raise ConfigError(f"draft: {model.path} is {kind}; name a small decoder of the target's family")
    if difference := target.model.vocab.difference(model.vocab):
        raise ConfigError(
            f"draft: {model.path} has another vocabulary than {target.model.path} ({difference}); "
            "name a smaller model of the same family, or leave --draft out: prompt look-up needs no model"
        )
    cell_bytes = max(1, model.kv_bytes_per_token(config.cache_type_k, config.cache_type_v))
    n_ctx = min(target.n_ctx, free_bytes // MEMORY_SHARE // cell_bytes) // 256 * 256
    if n_ctx < LEAST_SIDE_TOKENS:
        raise ConfigError(f"draft: there is no memory for a context of {model.path} ({cell_bytes:,} bytes a token)")
    return attrs.evolve(
        _generating(config),
        n_ctx=n_ctx,
        n_batch=min(_most_batch_tokens(model, config), n_ctx),
        n_ubatch=min(config.n_ubatch, n_ctx),
        n_seq_max=max_active(target, config),
    )
