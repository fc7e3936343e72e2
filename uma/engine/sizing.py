"""Memory plan of an engine: sizes of contexts and caches, and the number of sequences, from the model's shape, the
configuration and the free memory. `ledger.Ledger` calls it, because it knows what is promised already.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import attrs

from uma import cgroup
from uma.config import RuntimeConfig, Speculate, Toggle
from uma.engine.policy.cost import SIZES
from uma.errors import ConfigError
from uma.figures import MB, size
from uma.llama import backend, devices, pages
from uma.llama.context import ROLLED_BACK, ROUNDED_TOKENS, Context, ContextParams
from uma.llama.devices import Device
from uma.llama.header import Header
from uma.llama.model import Model, llama_version
from uma.llama.placement import ALL_LAYERS, Placement, place
from uma.llama.shape import Pooling, Shape
from uma.types import MemoryPlan

_log = logging.getLogger("uma.engine")


@attrs.frozen
class Rules:
    """Constants of the plan. Shares are divisors of the free memory."""

    pool_ids: int = 128
    """Minimum sequence ids in one buffer, for running sequences and cached prefixes. llama.cpp compares ids in pairs
    for each batch: 256 take some 50 us, 128 a quarter of that."""
    sequences: int = 64
    """Maximum sequences that run at once without `--max-sequences`, and texts in a batch to embed."""
    full_contexts: int = 8
    """Number of the model's full contexts for which the pool has cells, without `--n-ctx`."""
    min_pool_tokens: int = 8_192
    """Minimum size of the pool."""
    max_pool_tokens: int = 32_768
    """Maximum size of the pool, unless more sequences, or one request of the full context, need more."""
    sequence_tokens: int = 512
    """Cells for each sequence that can run, if that exceeds the maximum: it does with more than 64 sequences."""
    conversation_tokens: int = 4_096
    """Assumed length of a conversation, for small memories; maximum cells of a sequence with split KV."""
    conversations: int = 4
    """Conversations that the pool holds even if they take more than its share of the memory."""
    pool_share: int = 4
    """Share of the pool, and of each further context."""
    pool_most: float = 0.7
    """Maximum part of the free memory for these conversations."""
    long_contexts: int = 2
    """Number of full contexts in the pool, for models whose context is at least the pool's maximum."""
    long_share: int = 8
    """Share of a pool with several long contexts."""
    states_share: int = 2
    """Divisor of the weights' size that bounds states and full-size windows, without `--max-sequences`."""
    states_bytes: int = 48 * 2**20
    """Bytes that states and full-size windows can always take."""
    least_states: int = 8
    """Minimum states, as far as the pool's share of the memory holds them; texts in a batch to embed with states."""
    max_draft: int = 15
    """Maximum drafted tokens of a row: with the one before them a batch of 16."""
    least_rolled_back: int = 3
    """Minimum length of a draft for which sequences get further states: shorter drafts are hardly worth it."""
    small_windows_share: int = 4
    """Divisor of the cells of full-size windows: windows are small if they take at most that many cells."""
    least_cache_tokens: int = 2_048
    """Minimum cells that can hold only cache."""
    cache_share: int = 16
    """Divisor of all cells that gives the cells which can hold only cache, above the minimum."""
    ram_share: int = 8
    """Share of the snapshots in host memory."""
    max_ram_bytes: int = 8_000 * MB
    """Maximum size of the snapshots in host memory."""
    text_tokens: int = 8_192
    """Maximum tokens of a text to embed. Its context takes memory while streams run, so it is small."""
    exact_batch_tokens: int = 2_048
    """Maximum batch computed without flash attention: an encoder's memory grows with its square."""
    reproducible_tokens: int = 8_192
    """Minimum length of a reproducible request, if the model and the pool hold as much."""
    reproducible_batch: int = 32
    """Batches of such a request end at multiples of so many tokens: streams wait for one batch, usually less than a
    quarter of a second. Another number changes the last bits of every answer."""
    process_bytes: int = 64 * 2**20
    """Memory of a process beside weights and context: Python, llama.cpp, and its compute buffers."""
    vocabulary_bytes: int = 900
    """Memory per token of the vocabulary: some 600 bytes in tables of llama.cpp and of grammars, and a logit in each
    row of a large batch."""
    float_bytes: int = 4
    """Bytes of a logit, and of a score of plain attention, which keeps all scores of a ubatch for each head."""
    mask_bytes: int = 2
    """Bytes for a cell and a token of a ubatch in llama.cpp's attention mask, in F16."""


RULES = Rules()


# The context in which a model generates


def context_params(shape: Shape, config: RuntimeConfig, free_bytes: int) -> ContextParams:
    """Parameters of the configured context, within `free_bytes`. Raises `ConfigError` if that is too little."""
    if not shape.is_causal:
        return embed_params(shape, config, 0)
    streams = _streams(shape, config, free_bytes)
    # With split KV a sequence has only its share, and prefixes are copied. If the share is a whole context, `auto`
    # chooses it: rows then pass over no other sequence's cells.
    fits = config.n_ctx < streams * shape.n_ctx_train
    pool = _Pool(
        shape, config, free_bytes, streams, unified=config.kv_unified == "on" or (config.kv_unified == "auto" and fits)
    )
    if shape.memory == "sliding-window" and (small := pool.with_small_windows()):
        pool = attrs.evolve(pool, streams=small, swa_full=False)
    params = pool.params()
    if config.n_ctx or config.n_ubatch > RuntimeConfig().n_ubatch:  # a default ubatch takes little
        _check_fits(shape, config, params)
    return params


@attrs.frozen
class _Pool:
    """Plan of the context in which a model generates."""

    shape: Shape
    config: RuntimeConfig
    free_bytes: int
    streams: int
    """Sequence ids for running sequences and a health probe."""
    unified: bool
    """Whether all sequences share one buffer of cells."""
    swa_full: bool = True
    """Whether layers with a sliding window keep all cells, too."""

    def params(self) -> ContextParams:
        """Parameters of the context."""
        shape, config, streams = self.shape, self.config, self.streams
        n_ctx = config.n_ctx or self._tokens()
        shares_ids = self.unified and self.swa_full and not shape.has_states
        # (One id is for parts of states. A recurrent state, a small window or a split buffer takes memory for each id.)
        n_seq_max = max(streams + 1, RULES.pool_ids) if shares_ids else streams
        guards_window = shares_ids and shape.memory == "sliding-window" and 2 * streams <= backend.MAX_SEQUENCES
        n_seq_max = min(2 * n_seq_max if guards_window else n_seq_max, backend.MAX_SEQUENCES)
        # A batch holds a token of every sequence and some prefill: otherwise prompts would never be read.
        n_batch = min(max(_most_batch_tokens(shape, config), streams + SIZES[0]), n_ctx)
        return attrs.evolve(
            _generating(config),
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_batch if shape.memory == "sliding-window" else min(config.n_ubatch, n_ctx),
            n_seq_max=n_seq_max,
            kv_unified=self.unified,
            swa_full=self.swa_full,
            guards_window=guards_window,
            rolled_back=self._rolled_back,
        )

    def with_small_windows(self) -> int:
        """Number of sequences with small windows: layers with a window keep only the window of each. 0: they keep all
        cells.

        With all cells, prefixes can be shared at any token, if each sequence can have a guard. With small windows they
        are shared at checkpoints, and each sequence has its own window, so fewer run, unless a number is configured.
        """
        config = self.config
        if config.swa_full == "on":
            return 0
        tokens = config.n_ctx or min(self._wanted, self._affordable())
        most = (tokens // RULES.small_windows_share - config.n_ubatch) // self.shape.window_tokens
        is_free = self.unified and not config.max_sequences
        small = min(self.streams, max(RULES.least_states, most)) if is_free else self.streams
        if config.swa_full == "off" or not self.unified:
            return small
        is_wanted = tokens == (config.n_ctx or self._wanted)
        if is_wanted and tokens * self._window_bytes <= _modest_bytes(self.shape):
            return 0
        return small if small <= most else 0

    @property
    def _rolled_back(self) -> int:
        """Draft tokens that can be cut off if sequences have states: each takes one more state for every sequence. As
        many as the longest draft, or as memory holds; 0 if that is too few.
        """
        if not _wants_rolled_back(self.shape, self.config):
            return 0
        most_bytes = self.free_bytes // RULES.pool_share
        if not self.config.max_sequences:
            most_bytes = min(most_bytes, _modest_bytes(self.shape))
        most = min(RULES.max_draft, most_bytes // (self.streams * self.shape.state_bytes) - 1)
        return most if most >= RULES.least_rolled_back else 0

    @property
    def _window_bytes(self) -> int:
        return self.shape.window_bytes_per_token(self.config.cache_type_k, self.config.cache_type_v)

    @property
    def _wanted(self) -> int:
        """Tokens of the pool if memory is no limit."""
        trained = self.shape.n_ctx_train
        if not self.unified:
            return self.streams * min(trained, RULES.conversation_tokens)
        most = max(RULES.max_pool_tokens, RULES.sequence_tokens * most_sequences(self.config))
        # One request can have the whole context: a coding agent's session grows to 100,000 tokens and more.
        return max(min(max(trained * RULES.full_contexts, RULES.min_pool_tokens), most), trained)

    @property
    def _least(self) -> int:
        """Tokens for which the pool may exceed its share."""
        return min(self._wanted, RULES.conversations * min(self.shape.n_ctx_train, RULES.conversation_tokens))

    def _affordable(self, share: int = RULES.pool_share) -> int:
        """Tokens that a share of the memory holds beside states and small windows."""
        free_bytes = self.free_bytes - self.streams * (1 + self._rolled_back) * self.shape.state_bytes
        window_bytes = 0
        if not self.swa_full:
            beside = self.config.n_ubatch * (1 if self.unified else self.streams)
            window_bytes = (self.streams * self.shape.window_tokens + beside) * self._window_bytes
        cell_bytes = _cell_bytes(self.shape, self.config, swa_full=self.swa_full)
        affordable = (free_bytes // share - window_bytes) // cell_bytes
        if affordable < self._least:
            affordable = min(self._least, (int(RULES.pool_most * free_bytes) - window_bytes) // cell_bytes)
        return affordable

    def _tokens(self) -> int:
        """Tokens of the pool. Raises `ConfigError` if memory holds hardly any."""
        trained, least, affordable = self.shape.n_ctx_train, self._least, self._affordable()
        cell_bytes = _cell_bytes(self.shape, self.config, swa_full=self.swa_full)
        if affordable < 2 * ROUNDED_TOKENS:
            raise ConfigError.at(
                "n_ctx",
                f"beside the weights there is memory for {affordable} tokens only ({cell_bytes:,} bytes each)",
            )
        tokens = min(self._wanted, affordable)
        if self.unified and tokens >= trained >= RULES.max_pool_tokens:
            cheap = min(RULES.long_contexts * trained, self._affordable(RULES.long_share))
            if self.swa_full and self._window_bytes:
                cheap = min(cheap, _modest_bytes(self.shape) // self._window_bytes)
            tokens = max(tokens, cheap)
        tokens = tokens // ROUNDED_TOKENS * ROUNDED_TOKENS
        if tokens < least // ROUNDED_TOKENS * ROUNDED_TOKENS:
            _log.warning(
                "the context has %s tokens, less than %d conversations of %s: beside the weights %s of memory are "
                "free and a token takes %s bytes; a smaller --cache-type-k and --cache-type-v hold more",
                f"{tokens:,}", RULES.conversations, f"{least // RULES.conversations:,}",
                size(self.free_bytes), f"{cell_bytes:,}",
            )  # fmt: skip
        return tokens


ENOUGH = (1, 1.25, 1.5, 2, 3, 4, 6)
"""Multiples of a memory size that are tried when a model has none left for its context."""


def enough_mb(least_mb: int, plan: Callable[[int], object]) -> int:
    """The first of these multiples of `least_mb` for which `plan` raises no `ConfigError`; 0: none."""
    for factor in ENOUGH:
        with suppress(ConfigError):
            plan(int(factor * least_mb))
            return int(factor * least_mb)
    return 0


def _streams(shape: Shape, config: RuntimeConfig, free_bytes: int) -> int:
    """Ids for all sequences that can run, and one for health probes. Recurrent states are allocated at once, so there
    are as many as memory holds. Raises `ConfigError` if that is none.
    """
    most = most_sequences(config)
    wanted = min(most + 1, backend.MAX_SEQUENCES)
    if not shape.state_bytes:
        return wanted
    affordable = free_bytes // RULES.pool_share // shape.state_bytes
    if affordable < 1:
        raise ConfigError.at(
            "model",
            f"beside the weights {size(free_bytes)} of memory are free, and a sequence's state alone "
            f"takes {size(shape.state_bytes)}",
        )
    if not config.max_sequences:
        states = 1 + RULES.least_rolled_back if _wants_rolled_back(shape, config) else 1
        wanted = min(wanted, max(RULES.least_states, _modest_bytes(shape) // (states * shape.state_bytes)))
    if affordable < min(most, wanted):
        _log.warning(
            "--max-sequences is %s, and not %s: a sequence's state takes %s, and beside the weights %s of "
            "memory are free",
            f"{affordable:,}", f"{min(most, wanted):,}", size(shape.state_bytes), size(free_bytes),
        )  # fmt: skip
    return min(wanted, affordable)


def most_sequences(config: RuntimeConfig) -> int:
    """Maximum sequences that run at once, as far as the settings bound them."""
    return config.max_sequences or RULES.sequences


def _modest_bytes(shape: Shape) -> int:
    """Maximum size of states without a configured number of sequences, and of full-size windows."""
    return max(shape.size_bytes // RULES.states_share, RULES.states_bytes)


def _wants_rolled_back(shape: Shape, config: RuntimeConfig) -> bool:
    return config.speculate != "off" and shape.state_bytes > 0 and shape.architecture in ROLLED_BACK


def _most_batch_tokens(shape: Shape, config: RuntimeConfig) -> int:
    """Maximum tokens of a batch: with a sliding window those of one ubatch.

    llama.cpp assigns cells to all ubatches of a batch before it computes the first. A later one can get cells that
    leave the window only by then, so an earlier one that still attends to them would lose them.
    """
    return config.n_ubatch if shape.memory == "sliding-window" else config.n_batch


def _generating(config: RuntimeConfig) -> ContextParams:
    """Parameters from the configuration that all generating contexts share."""
    return ContextParams(
        n_threads=config.threads,
        flash_attn=config.flash_attn,
        cache_type_k=config.cache_type_k,
        cache_type_v=config.cache_type_v,
        offload_kqv=config.offload_kqv,
    )


def _cell_bytes(shape: Shape, config: RuntimeConfig, *, swa_full: bool = True) -> int:
    """Bytes of a cell; without `swa_full` only of layers without a window. At least 1."""
    types = config.cache_type_k, config.cache_type_v
    return max(1, shape.bytes_per_token(*types) - (0 if swa_full else shape.window_bytes_per_token(*types)))


def _work_bytes(shape: Shape, params: ContextParams) -> int:
    """Bytes per cell while a ubatch is computed."""
    heads = shape.n_heads if params.flash_attn == "off" else 0
    return params.n_ubatch * (RULES.mask_bytes + RULES.float_bytes * heads)


def _check_fits(shape: Shape, config: RuntimeConfig, params: ContextParams) -> None:
    """Raise `ConfigError` if a context of a configured size needs more memory than is free: Linux would still allocate
    it, and end this or another process when it is written.
    """
    kv_bytes = params.kv_bytes(shape)
    free_bytes = free_kv_bytes(config) - (context_bytes(shape, params) - kv_bytes)
    cell_bytes = _cell_bytes(shape, config, swa_full=params.swa_full) + (work_bytes := _work_bytes(shape, params))
    logits_bytes = params.n_ubatch * shape.n_tokens * RULES.float_bytes
    needed_bytes = kv_bytes + params.cells * work_bytes + logits_bytes
    if needed_bytes <= free_bytes:
        return
    other_bytes = needed_bytes - params.cells * cell_bytes  # small windows, too
    most = max(0, free_bytes - other_bytes) // cell_bytes // ROUNDED_TOKENS * ROUNDED_TOKENS
    raise ConfigError.at(
        "n_ctx",
        f"a context of {params.n_ctx:,} tokens takes {size(needed_bytes)} of memory, {cell_bytes:,} "
        f"bytes a token with n_ubatch {params.n_ubatch}, and {size(max(0, free_bytes))} are free, which "
        f"{most:,} tokens fit into; use a smaller n_ctx (--n-ctx), n_ubatch, or cache_type_k and cache_type_v",
    )


def context_bytes(shape: Shape, params: ContextParams) -> int:
    """Memory of a context's cells and states."""
    return params.kv_bytes(shape) + params.n_seq_max * (1 + params.rolled_back) * shape.state_bytes


def memory_plan(shape: Shape, params: ContextParams) -> MemoryPlan:
    """Memory that a context with these parameters takes for texts, from its start."""
    kv_bytes = params.kv_bytes(shape)
    return MemoryPlan(
        kind=shape.memory,
        cells=params.cells,
        kv_bytes=kv_bytes,
        window_cells=params.window_cells(shape.window_tokens) if shape.memory == "sliding-window" else 0,
        states=params.n_seq_max * (1 + params.rolled_back) if shape.state_bytes else 0,
        state_bytes=context_bytes(shape, params) - kv_bytes,
    )


# Further contexts


def embed_params(
    shape: Shape, config: RuntimeConfig, free_bytes: int, max_tokens: int = RULES.text_tokens
) -> ContextParams:
    """Parameters of a context that embeds texts of up to `max_tokens` tokens, in a quarter of `free_bytes`; an
    encoder's takes no KV. Raises `ConfigError` if that is too little.
    """
    most = RULES.text_tokens
    longest = min(max_tokens, most, shape.n_ctx_train or most, config.n_ctx or most)
    n_ctx = n_batch = longest
    if shape.is_causal:
        # A batch is one ubatch, because pooling combines only what one ubatch holds of a sequence. Beside a text that
        # is read in pieces there is always space for a batch of whole texts.
        n_batch, cell_bytes = config.n_ubatch, max(1, shape.bytes_per_token("f16", "f16"))
        spare_bytes = free_bytes // RULES.pool_share - RULES.least_states * shape.state_bytes
        longest = min(longest, spare_bytes // cell_bytes - n_batch)
        if longest < min(ROUNDED_TOKENS, max_tokens):
            raise ConfigError(f"there is no memory for a context to embed texts in ({cell_bytes:,} bytes a token)")
        n_ctx = longest + n_batch
    return ContextParams(
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_ubatch=n_batch,
        n_seq_max=RULES.least_states if shape.has_states else RULES.sequences,
        n_threads=config.threads,
        # llama.cpp's flash attention for few and for many rows differs in the fifth digit: an embedding would depend on
        # the texts that share its batch.
        flash_attn="off" if n_batch <= RULES.exact_batch_tokens else config.flash_attn,
        offload_kqv=config.offload_kqv,
        pooling=pooling(shape, config),
    )


def reproducible_params(shape: Shape, config: RuntimeConfig, n_ctx: int, free_bytes: int) -> ContextParams:
    """Parameters of a context for one request at a time, always in the same batches. Raises `ConfigError` if half of
    `free_bytes` is too little.

    Flash attention is off unless configured: for a single row llama.cpp splits its sum over the threads, so their
    number could not follow the load of other programs.
    """
    has_choice = config.flash_attn == "auto" and config.cache_type_v in ("f32", "f16", "bf16")
    flash_attn: Toggle = "off" if has_choice else config.flash_attn
    batch = RULES.reproducible_batch
    params = attrs.evolve(_generating(config), n_ctx=n_ctx, n_batch=batch, n_ubatch=batch, flash_attn=flash_attn)
    needed_bytes = n_ctx * (_cell_bytes(shape, config) + _work_bytes(shape, params)) + shape.state_bytes
    if needed_bytes > free_bytes // 2:
        raise ConfigError(
            f"it takes {size(needed_bytes)} for {n_ctx:,} tokens, and half of the memory that is left are "
            f"{size(free_bytes // 2)}"
        )
    return params


def draft_params(model: Model, target: Context, config: RuntimeConfig, free_bytes: int) -> ContextParams:
    """Parameters of a draft model's context, for the sequences of `target`, in a quarter of `free_bytes`. Raises
    `ConfigError` if it cannot draft.
    """
    shape = model.shape
    if not shape.is_causal or shape.has_states:
        kind = f"a {shape.memory} model, whose state cannot be cut behind a draft" if shape.is_causal else "an encoder"
        raise ConfigError.at("draft", f"{model.path} is {kind}; name a small decoder of the target's family")
    if difference := target.model.vocab.difference(model.vocab):
        raise ConfigError.at(
            "draft",
            f"{model.path} has another vocabulary than {target.model.path} ({difference}); "
            "name a smaller model of the same family, or leave --draft out: prompt look-up needs no model",
        )
    cell_bytes = _cell_bytes(shape, config)
    affordable = free_bytes // RULES.pool_share // cell_bytes // ROUNDED_TOKENS * ROUNDED_TOKENS
    n_ctx = min(target.n_ctx, affordable)
    if n_ctx < ROUNDED_TOKENS:
        raise ConfigError.at(
            "draft", f"there is no memory for a context of {model.path} ({cell_bytes:,} bytes a token)"
        )
    return attrs.evolve(
        _generating(config),
        n_ctx=n_ctx,
        n_batch=min(_most_batch_tokens(shape, config), n_ctx),
        n_ubatch=min(config.n_ubatch, n_ctx),
        n_seq_max=max_active(target, config),
    )


def predicting_params(target: Context, config: RuntimeConfig, free_bytes: int) -> ContextParams:
    """Parameters of the context of the target's prediction head, with its sequences, in a quarter of `free_bytes`.
    Raises `ConfigError` if that is too little.
    """
    shape = target.model.shape.of_prediction_heads
    cell_bytes = max(1, _cell_bytes(shape, config))
    affordable = free_bytes // RULES.pool_share // cell_bytes // ROUNDED_TOKENS * ROUNDED_TOKENS
    n_ctx = min(target.params.cells or target.n_ctx, affordable)
    if n_ctx < ROUNDED_TOKENS:
        raise ConfigError.at("speculate", f"there is no memory for the prediction head ({cell_bytes:,} bytes a token)")
    return attrs.evolve(
        target.params,
        n_ctx=n_ctx,
        n_batch=target.n_batch,
        kv_unified=True,  # with split KV only whole sequences can be copied
        swa_full=True,
        rolled_back=0,
        predicts=True,
    )


def assisting_params(target: Context) -> ContextParams:
    """Parameters of the context of an assistant, which uses the target's cells."""
    return attrs.evolve(target.params, rolled_back=0, predicts=True)


def why_no_drafts(context: Context, config: RuntimeConfig) -> str | None:
    """Why tokens are not drafted; None if they are. Memory must be cut behind the accepted tokens of a draft."""
    shape = context.model.shape
    if config.speculate == "off":
        return "--speculate off"
    if not shape.is_causal:
        return "an encoder does not generate"
    if shape.has_states and not context.rolled_back:
        if shape.architecture in ROLLED_BACK:
            return (
                f"for {context.n_sequences:,} sequences memory does not hold a state for each token of a draft "
                f"({size(shape.state_bytes)} each); with a smaller max_sequences (--max-sequences) it can"
            )
        return f"a {shape.memory} model's state cannot be cut behind the tokens of a draft that held"
    return None


def speculate(context: Context, config: RuntimeConfig) -> Speculate:
    """Whether tokens are drafted."""
    return "off" if why_no_drafts(context, config) else config.speculate


# Limits of a context that was made


def solo_tokens(context: Context) -> int:
    """Maximum prefill tokens of a batch while nothing decodes. On a CPU more than a ubatch is no faster; a GPU computes
    one ubatch while llama.cpp prepares the next of the batch.
    """
    return context.n_ubatch if context.computes_on_cpu else context.n_batch


def max_request_tokens(context: Context) -> int:
    """Maximum tokens of one request: what the model was trained for, or what one sequence can hold if that is less."""
    return min(context.n_ctx_seq, context.model.n_ctx_train or context.n_ctx_seq)


def max_text_tokens(context: Context) -> int:
    """Maximum tokens of a text for `context`, which is one for embeddings."""
    params = context.params  # llama.cpp rounds n_ctx up, beyond what the model was trained for
    return params.n_ctx - params.n_batch if context.model.is_causal else params.n_batch


def max_reproducible_tokens(context: Context, config: RuntimeConfig, free_bytes: int) -> int:
    """Maximum tokens of a reproducible request, by the memory that is left; 0 for a model that does not generate."""
    if not context.model.is_causal:
        return 0
    affordable = free_bytes // RULES.pool_share // _cell_bytes(context.model.shape, config)
    return min(max_request_tokens(context), max(affordable, RULES.reproducible_tokens))


def max_active(context: Context, config: RuntimeConfig) -> int:
    """Maximum sequences that run at once. One id is left for health probes where llama.cpp has as many; else a probe
    waits for the next token of a sequence.
    """
    return max(1, min(most_sequences(config), context.n_sequences))


def cache_cells(context: Context, config: RuntimeConfig) -> int:
    """Cells that can hold only cache. All can if host memory keeps no snapshots: evicted prefixes would be lost."""
    if config.cache_tokens >= 0:
        return config.cache_tokens
    if config.cache_ram_mb == 0:
        return context.n_ctx
    return max(RULES.least_cache_tokens, context.n_ctx // RULES.cache_share)


def grammars_at_once(params: ContextParams) -> int:
    """Maximum grammars compiled at once: one for each core without a compute thread or Trio's, but at least one. Each
    takes a core for up to a second, and all of llama.cpp's threads wait for one that has lost its core.
    """
    cores = backend.core_count()
    return max(1, cores - (params.n_threads or cores) - 1)


def pooling(shape: Shape, config: RuntimeConfig) -> Pooling:
    """Pooling of token embeddings: as configured, as the model says, or their mean."""
    if config.pooling != "auto":
        return config.pooling
    return "mean" if shape.pooling == "none" else shape.pooling


def snapshot_identity(context: Context) -> dict[str, str | int]:
    """Everything that a snapshot depends on: if anything differs, it must not be used."""
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


# The machine's memory


def process_bytes(n_tokens: int) -> int:
    """Memory of a process beside weights, context and cache, for a vocabulary of `n_tokens`."""
    return RULES.process_bytes + RULES.vocabulary_bytes * n_tokens


def placed(config: RuntimeConfig, parts: list[Header], gpus: Sequence[Device], beside_bytes: int) -> RuntimeConfig:
    """The configuration, with the numbers that it leaves to the memory of GPUs: layers on GPUs, and layers whose
    experts the CPU computes. GPUs also hold KV for a few conversations, and `beside_bytes` of other weights.
    """
    if config.n_gpu_layers >= 0 or config.n_cpu_moe >= 0 or not gpus:
        return attrs.evolve(config, n_cpu_moe=max(0, config.n_cpu_moe))
    shape = Shape.of(parts)
    tokens = config.n_ctx or RULES.conversations * min(shape.n_ctx_train, RULES.conversation_tokens)
    kv_bytes = tokens * _cell_bytes(shape, config) + RULES.least_states * shape.state_bytes
    free_bytes = [gpu.free_bytes for gpu in gpus]
    found = place(parts, [free_bytes[0] - beside_bytes, *free_bytes[1:]], kv_bytes if config.offload_kqv else 0)
    if found != Placement(ALL_LAYERS):
        _log.warning(
            "the GPU's memory does not hold the whole model: --n-gpu-layers is %s, and the CPU computes the experts "
            "of the first %s layers (--n-cpu-moe)",
            found.gpu_layers, found.cpu_experts,
        )  # fmt: skip
    return attrs.evolve(config, n_gpu_layers=found.gpu_layers, n_cpu_moe=found.cpu_experts)


def adapter_bytes(config: RuntimeConfig) -> int:
    """Size of the LoRA adapters. A missing file counts as empty: loading it reports the error."""
    return sum(Path(file.path).stat().st_size for file in config.adapters if os.path.isfile(file.path))


def check_weights(size_bytes: int, config: RuntimeConfig, name: str) -> None:
    """Raise `ConfigError` if weights that must stay in memory do not fit; `name` is the option of the model."""
    is_kept = config.use_mmap == "off" or config.use_mlock
    if is_kept and not _computes_on_gpu(config) and size_bytes > (free_bytes := free_memory_bytes()):
        setting = "use_mlock" if config.use_mlock else "use_mmap"
        raise ConfigError.at(
            setting,
            f"the weights of --{name} take {size(size_bytes)}, and {size(free_bytes)} "
            'of memory are free; leave them mapped (use_mmap "on", no use_mlock), or use a smaller model',
        )


def map_above_bytes(config: RuntimeConfig) -> float:
    """Weights larger than this are mapped from their file, others are read into memory.

    On CPUs weights in huge pages decode faster, and a mapped file has none. But mapped weights can be dropped when
    memory is short, and are shared with other processes, so weights over half of the memory stay mapped.
    """
    if config.use_mmap != "auto":
        return 0 if config.use_mmap == "on" else math.inf
    return 0 if _computes_on_gpu(config) or not pages.gives_huge_pages() else free_memory_bytes() // 2


def host_bytes(config: RuntimeConfig, shape: Shape) -> int:
    """Free memory of the machine beside the weights, within `--memory`."""
    free_bytes = free_memory_bytes()
    if shape.is_mapped and not _keeps_kv_on_gpu(config):
        # Linux counts mapped weights as free, because it can drop them; a server that computes with them needs them.
        free_bytes -= shape.size_bytes
    if config.memory:
        free_bytes = min(free_bytes, config.memory * MB - shape.size_bytes - process_bytes(shape.n_tokens))
    return max(0, free_bytes)


def cache_ram_bytes(config: RuntimeConfig, free_bytes: int) -> int:
    """Host memory for snapshots, if `free_bytes` are free."""
    if config.cache_ram_mb >= 0:
        return config.cache_ram_mb * MB
    return min(free_bytes // RULES.ram_share, RULES.max_ram_bytes)


def free_kv_bytes(config: RuntimeConfig) -> int:
    """Free memory for KV: on GPUs or in host memory; the smaller of both if each has a part of the layers."""
    if not _keeps_kv_on_gpu(config):
        return free_memory_bytes()
    on_gpus = sum(gpu.free_bytes for gpu in devices.gpus())
    return min(on_gpus, free_memory_bytes()) if keeps_kv_here(config) else on_gpus


def free_gpu_bytes(config: RuntimeConfig) -> float:
    """Free memory of GPUs for KV; infinite if they hold none."""
    return sum(gpu.free_bytes for gpu in devices.gpus()) if _keeps_kv_on_gpu(config) else math.inf


def keeps_kv_here(config: RuntimeConfig) -> bool:
    """Whether host memory holds KV, or a part of it."""
    return config.n_gpu_layers >= 0 or not _keeps_kv_on_gpu(config)


def _keeps_kv_on_gpu(config: RuntimeConfig) -> bool:
    return config.offload_kqv and _computes_on_gpu(config)


def _computes_on_gpu(config: RuntimeConfig) -> bool:
    return config.n_gpu_layers != 0 and backend.has_gpu()


def free_memory_bytes(root: Path = cgroup.ROOT) -> int:
    """Memory available without swapping, within the limits of this process's control groups; half of the machine's if
    the system does not say.
    """
    return int(min(_machine_free_bytes(root / "proc" / "meminfo"), cgroup.memory_left_bytes(root)))


def free_memory_words() -> str:
    """How much memory is free, and whether the machine or a control group bounds it."""
    free_bytes = free_memory_bytes()
    where = "within the limit of this container or unit" if cgroup.memory_left_bytes() <= free_bytes else "here"
    return f"{size(free_bytes)} of memory are free {where}"


def machine_memory_bytes() -> int:
    """The machine's memory; no bound on Windows, which nothing here asks, or where a GPU has memory of its own."""
    if sys.platform == "win32" or backend.has_gpu():
        return sys.maxsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _machine_free_bytes(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        if sys.platform == "win32":
            return 4 * 2**30  # nothing here asks Windows: little enough for most machines
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
