"""A context: the KV memory of several sequences, and the call that computes a batch.

Everything here belongs to one thread at a time, except `request_abort` and methods marked "any thread". Errors at which
llama.cpp would end the process (a sequence id out of range, a partial copy between separate buffers) raise `ValueError`
instead.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Protocol

import attrs
import llama_cpp.llama_cpp as lib
import numpy as np
import numpy.typing as npt
from numpy import ctypeslib

from uma.closing import Closing
from uma.errors import ConfigError, ModelError
from uma.llama import backend
from uma.llama.adapters import Adapter
from uma.llama.batch import Batch, EmbeddingBatch
from uma.llama.graph import CHUNK_TOKENS, RunningGraph
from uma.llama.header import quoted
from uma.llama.log import LOG
from uma.llama.model import Model
from uma.llama.shape import Shape

CACHE_TYPES: dict[str, int] = {
    "f32": lib.GGML_TYPE_F32,
    "f16": lib.GGML_TYPE_F16,
    "bf16": 30,  # GGML_TYPE_BF16, which the bindings leave out
    "q8_0": lib.GGML_TYPE_Q8_0,
    "q4_0": lib.GGML_TYPE_Q4_0,
    "q4_1": lib.GGML_TYPE_Q4_1,
    "q5_0": lib.GGML_TYPE_Q5_0,
    "q5_1": lib.GGML_TYPE_Q5_1,
    "iq4_nl": lib.GGML_TYPE_IQ4_NL,
}

FLASH_ATTENTION: dict[str, int] = {
    "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}

POOLING: dict[str, int] = {
    "mean": lib.LLAMA_POOLING_TYPE_MEAN,
    "cls": lib.LLAMA_POOLING_TYPE_CLS,
    "last": lib.LLAMA_POOLING_TYPE_LAST,
    "rank": lib.LLAMA_POOLING_TYPE_RANK,
}

ROLLED_BACK = ("qwen35", "qwen35moe", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe")
"""Architectures with hybrid memory whose recurrent states llama.cpp can also keep for the last tokens of a batch
(`llm_arch_supports_rs_rollback` in its llama-arch.cpp). It does not tell before the context is made."""
ROUNDED_TOKENS = 256
"""llama.cpp rounds the number of a buffer's cells up to a multiple of this."""

DONE, NO_ROOM, ABORTED, INVALID_BATCH = 0, 1, 2, -1
"""Return values of `Context.decode`; less than -1 is a fatal error."""


@attrs.frozen(kw_only=True)
class ContextParams:
    """Parameters of a context, named as in `RuntimeConfig`. The `Context` has what llama.cpp has made of them."""

    n_ctx: int = 0
    """KV cells of all sequences together; 0: as many as the model was trained for."""
    n_batch: int = 2048
    """Maximum tokens of one `decode`."""
    n_ubatch: int = 512
    """Maximum tokens computed at once inside it."""
    n_seq_max: int = 1
    """Number of sequence ids."""
    n_threads: int = 0
    """Compute threads; 0: this machine's cores."""
    kv_unified: bool = True
    """One buffer that all sequences share, or one of `n_ctx / n_seq_max` cells for each."""
    flash_attn: Literal["auto", "on", "off"] = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    offload_kqv: bool = True
    swa_full: bool = True
    guards_window: bool = False
    """Reserve the upper half of the ids for guards: each holds all cells of an id in the lower half a second time."""
    rolled_back: int = 0
    """Maximum tokens of the last batch that can be cut off a recurrent sequence. Each takes the memory of one more
    state."""
    pooling: Literal["none", "mean", "cls", "last", "rank"] = "none"
    """How the embeddings of a sequence's tokens in one batch are combined; `none`: the context gives no embeddings."""
    predicts: bool = False
    """Compute the model's prediction heads instead of its other layers: see `llama.heads`."""

    def __attrs_post_init__(self) -> None:
        if self.flash_attn == "off" and self.cache_type_v not in ("f32", "f16", "bf16"):
            raise ConfigError.at("cache_type_v", f"{self.cache_type_v} needs flash attention; leave flash_attn on auto")

    @property
    def cells(self) -> int:
        """Number of cells in all buffers together. `n_ctx` must not be 0."""
        return self.n_ctx_seq * (1 if self.kv_unified else self.n_seq_max)

    @property
    def n_ctx_seq(self) -> int:
        """Number of cells in one buffer."""
        return _rounded(self.n_ctx if self.kv_unified else self.n_ctx // self.n_seq_max)

    def window_cells(self, window_tokens: int) -> int:
        """Number of cells in layers with a window of `window_tokens`. With small windows: what each sequence attends
        to, and what a batch adds.
        """
        needed = window_tokens * (self.n_seq_max if self.kv_unified else 1) + min(self.n_ubatch, self.n_batch)
        in_buffer = self.n_ctx_seq if self.swa_full else min(self.n_ctx_seq, _rounded(needed))
        return in_buffer * (1 if self.kv_unified else self.n_seq_max)

    def kv_bytes(self, shape: Shape) -> int:
        """Bytes of all cells."""
        in_windows = shape.window_bytes_per_token(self.cache_type_k, self.cache_type_v)
        elsewhere = shape.bytes_per_token(self.cache_type_k, self.cache_type_v) - in_windows
        return self.cells * elsewhere + self.window_cells(shape.window_tokens) * in_windows

    def struct(self) -> lib.llama_context_params:
        """llama.cpp's struct of these parameters."""
        struct = lib.llama_context_default_params()
        struct.n_ctx = self.n_ctx
        struct.n_batch = self.n_batch
        struct.n_ubatch = self.n_ubatch
        struct.n_seq_max = self.n_seq_max
        # llama.cpp reserves an output for every sequence, and ends the process where this is less.
        struct.n_outputs_max = max(self.n_batch, self.n_seq_max)
        struct.n_threads = struct.n_threads_batch = self.n_threads or backend.core_count()
        struct.kv_unified = self.kv_unified
        struct.flash_attn_type = FLASH_ATTENTION[self.flash_attn]
        struct.type_k = CACHE_TYPES[self.cache_type_k]
        struct.type_v = CACHE_TYPES[self.cache_type_v]
        struct.offload_kqv = self.offload_kqv
        struct.swa_full = self.swa_full
        struct.n_rs_seq = self.rolled_back
        if self.pooling != "none":
            struct.embeddings = True
            struct.pooling_type = POOLING[self.pooling]
        if self.predicts:
            struct.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP
        struct.no_perf = True
        return struct


class Follower(Protocol):
    """Observer of all that a context computes, copies and removes. Called on its thread, right after each operation."""

    kept: Context | None
    """Context whose memory of a sequence is part of the sequence's snapshots."""
    has_windows: bool
    """Whether its layers have sliding windows, so that its memory is also part of checkpoints."""

    def computed(self, batch: Batch) -> None:
        """A whole batch of tokens was computed."""

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        """Positions were removed."""

    def seq_cp(self, source: int, target: int, p0: int, p1: int) -> None:
        """Positions were copied."""

    def clear(self) -> None:
        """All sequences were removed."""


class Context(Closing):
    """Owner of a llama context. Keeps its model's weights loaded until it is closed."""

    def __init__(self, model: Model, params: ContextParams, beside: Context | None = None) -> None:
        """Make the context, which allocates its memory at once. An assistant model reads the cells of the context
        `beside` it.

        Raises `ConfigError` for settings that exclude each other, and `ModelError` with llama.cpp's reason where it
        cannot be made, usually for lack of memory.
        """
        if model.vocab_only:
            raise ValueError(f"{model.path}: was loaded with vocab_only, without what computes")
        self.is_ended = False
        """Whether `request_abort` was called, so that nothing is computed any more."""
        self._is_retried = False
        """Whether `request_retry` was called, and not `resume` since."""
        self.threads = 0
        """Number of compute threads set by `set_threads`; 0: not set yet."""
        self.model = model
        self._handle: int | None = None
        self._follower: Follower | None = None
        self._n_vocab = model.vocab.n_tokens
        self._logits_address = 0
        self._logits_views: dict[int, npt.NDArray[np.float32]] = {}
        self._is_queued = backend.has_gpu()
        """Whether a GPU computes on after `llama_decode` has returned, until a result is asked for."""
        alike_tokens = CHUNK_TOKENS if model.shape.has_states else min(params.n_ubatch, params.n_batch)
        self._graph = RunningGraph(model.n_layers, is_counted=not self._is_queued, alike_tokens=alike_tokens)
        self.returns_early = self._is_queued and model.is_on_gpu
        """Whether this thread is normally free between `begin` and `wait`."""
        self.computes_on_cpu = not (model.is_all_on_gpu and params.offload_kqv)
        """Whether CPU cores compute layers or attention."""
        model.retain()
        self._holds_model = True
        began_sec = time.monotonic()
        try:
            self._open(params, beside)
        except BaseException:
            self.close()
            raise
        self.opened_ms = (time.monotonic() - began_sec) * 1000
        """Time that it took to make the context, most of it for allocating memory."""

    def _open(self, params: ContextParams, beside: Context | None) -> None:
        mark, model = LOG.mark, self.model
        struct = params.struct()
        struct.ctx_other = None if beside is None else beside.handle
        struct.abort_callback = ctypes.cast(self._graph.callback, lib.ggml_abort_callback)
        struct.abort_callback_data = self._graph.address
        handle = lib.llama_init_from_model(model.handle, struct)
        if not handle:
            cells = params.n_ctx or model.n_ctx_train
            raise ModelError(f"{model.path}: no context of {cells:,} cells (n_ctx) could be made{quoted(mark)}")
        self._use(handle, params)
        if not self._memory and params.pooling == "none":
            raise ModelError(f"{model.path}: {model.info.architecture} keeps no memory of a text; it does not generate")

    def _use(self, handle: int, params: ContextParams) -> None:
        self._handle = handle
        self._memory: int | None = lib.llama_get_memory(handle)
        self.n_ctx = int(lib.llama_n_ctx(handle))
        """KV cells of all sequences together."""
        self.n_ctx_seq = int(lib.llama_n_ctx_seq(handle))
        """Maximum cells of one sequence: `n_ctx` in a unified buffer, its share otherwise."""
        self.n_batch = int(lib.llama_n_batch(handle))
        self.n_ubatch = int(lib.llama_n_ubatch(handle))
        self.n_seq_max = int(lib.llama_n_seq_max(handle))
        self.n_sequences = self.n_seq_max // 2 if params.guards_window else self.n_seq_max
        """Number of ids for sequences, from 0 on."""
        self.rolled_back = int(lib.llama_n_rs_seq(handle))
        """Value of `params.rolled_back` that llama.cpp uses; 0 without recurrent states."""
        self.params = params

    @property
    def handle(self) -> int:
        """llama.cpp's pointer. Raises `ValueError` after `close`."""
        if self._handle is None:
            raise ValueError("the context is closed")
        return self._handle

    def set_threads(self, threads: int) -> None:
        """Compute with so many threads from the next batch on, at most with `params.n_threads`."""
        if threads != self.threads:
            self.threads = threads
            count = max(1, min(threads, self.params.n_threads or threads))
            lib.llama_set_n_threads(self.handle, count, count)

    def use_adapters(self, adapters: Sequence[tuple[Adapter, float]]) -> None:
        """Compute with these LoRA adapters, each with its scale, and no others, from the next batch on. If they differ
        from the current ones, the next batch takes longer, because its graph is planned again.
        """
        pointers = (lib.llama_adapter_lora_p_ctypes * len(adapters))(*(adapter.pointer for adapter, _ in adapters))
        scales = (ctypes.c_float * len(adapters))(*(scale for _, scale in adapters))
        lib.llama_set_adapters_lora(self.handle, pointers, len(adapters), scales)

    def decode(self, batch: Batch) -> int:
        """Compute a batch. Blocks until it is done, on a GPU too, without the GIL.

        Returns `DONE`; `NO_ROOM` where there are too few KV cells (the memory is unchanged); `ABORTED` (the parts
        computed until then stay in memory); `INVALID_BATCH` for an impossible token or position (the memory is
        unchanged); less for a fatal error.
        """
        code = self.begin(batch)
        self.wait()
        return code

    def begin(self, batch: Batch) -> int:
        """Begin to compute a batch. With `returns_early` a GPU can still be computing when it returns: until `wait`
        returns there are no results, and those of the batch before are gone. Sequences can be changed meanwhile, as if
        it were computed. Returns what `decode` does.
        """
        batch.struct.n_tokens = batch.n_tokens
        code = self.computing(batch.n_tokens, partial(lib.llama_decode, self.handle, batch.struct))
        if self._follower is not None and code == DONE:
            self.wait()
            self._follower.computed(batch)
        return code

    def follow(self, follower: Follower | None) -> None:
        """Report every operation to `follower` from now on, before `begin` returns; None: to none."""
        self._follower = follower
        self.returns_early = self._is_queued and self.model.is_on_gpu and follower is None

    def decode_embeddings(self, batch: EmbeddingBatch) -> int:
        """Like `decode`, for embeddings instead of tokens."""
        batch.struct.n_tokens = batch.n_tokens
        code = self.computing(batch.n_tokens, partial(lib.llama_decode, self.handle, batch.struct))
        self.wait()
        return code

    def computing(self, n_tokens: int, compute: Callable[[], int]) -> int:
        """Call `compute`, which has llama.cpp compute `n_tokens`, and return its result: 0 for success."""
        self._start()
        return int(self._graph.compute(n_tokens, compute))

    @property
    def progress(self) -> float:
        """Completed fraction of the running `decode`, from 0 to 1, by nodes of its graph. Any thread.

        0 where none runs, with a GPU, and where a system cannot count; too low for the first batch of its size:
        `llama.graph`.
        """
        return self._graph.progress

    def wait(self) -> None:
        """Wait until the batch of `begin` is computed, without the GIL."""
        if self._is_queued:
            # Also for batches without results: their duration is measured, for predicting the cost of batches.
            lib.llama_synchronize(self.handle)

    def logits(self, n_rows: int) -> npt.NDArray[np.float32]:
        """Logits of the last batch's flagged tokens, `[n_rows, n_vocab]`, in the order of adding.

        A writable view of llama.cpp's memory: a `Sampler` sees what is changed in it. Valid until the next `decode`.
        Raises `ValueError` where there are none.
        """
        address = _get_logits(self.handle)
        if not address:
            raise ValueError("logits: nothing has been computed")
        # Views are kept: making one costs more than the rest of this call, and llama.cpp's buffer hardly ever moves.
        if address != self._logits_address:
            self._logits_address = address
            self._logits_views.clear()
        view = self._logits_views.get(n_rows)
        if view is None:
            pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
            view = self._logits_views[n_rows] = ctypeslib.as_array(pointer, (n_rows, self._n_vocab))
        return view

    def embedding(self, seq: int) -> npt.NDArray[np.float32]:
        """A copy of a sequence's pooled embedding in the last batch, or its scores with `rank`.

        Raises `ValueError` where the batch had none of its tokens.
        """
        pointer = lib.llama_get_embeddings_seq(self.handle, seq)
        if not pointer:
            raise ValueError(f"seq: nothing was pooled for {seq}")
        width = self.model.n_scores if self.params.pooling == "rank" else self.model.n_embedding
        return ctypeslib.as_array(pointer, (width,)).copy()

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove a sequence's positions from `p0` to before `p1` (-1: to the ends). A whole sequence can always be
        removed.

        False where only a part was to be removed and the memory cannot do that (a recurrent state has no parts). With
        `rolled_back` it returns True for so many last tokens, which is only correct for those of the last batch: see
        `kv/memory_kinds.py`.
        """
        is_gone = bool(lib.llama_memory_seq_rm(self._checked_memory(seq), seq, p0, p1))
        if self._follower is not None and is_gone:
            self._follower.seq_rm(seq, p0, p1)
        return is_gone

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Give `dst` the positions of `src` from `p0` to before `p1`. In a unified buffer no data is copied.

        With a buffer for each sequence the data is copied, and only a whole sequence can be (`ValueError`). A recurrent
        state is always copied as it is at the end of `src`, and cells of layers with a window can be gone before that
        end. Where `dst` must continue from an earlier position, restore the state of that position by `part_set`.
        """
        if (p0 > 0 or p1 >= 0) and not self.params.kv_unified:
            raise ValueError("seq_cp: only a whole sequence can be copied with split KV buffers")
        self._checked_memory(dst)
        lib.llama_memory_seq_cp(self._checked_memory(src), src, dst, p0, p1)
        if self._follower is not None:
            self._follower.seq_cp(src, dst, p0, p1)

    def seq_pos_min(self, seq: int) -> int:
        """First position in memory, of layers with a window where there are any; -1 for an empty sequence."""
        return int(lib.llama_memory_seq_pos_min(self._checked_memory(seq), seq))

    def seq_pos_max(self, seq: int) -> int:
        """Last position in memory; -1 for an empty sequence."""
        return int(lib.llama_memory_seq_pos_max(self._checked_memory(seq), seq))

    def clear(self, *, overwrites: bool = True) -> None:
        """Remove all sequences. `overwrites` fills their data with zeros, which takes as long as allocating it."""
        lib.llama_memory_clear(self._checked_memory(0), overwrites)
        if self._follower is not None:
            self._follower.clear()

    def state_size(self, seq: int) -> int:
        """Bytes that `state_get` would return."""
        return self._size(seq, 0)

    def state_get(self, seq: int) -> bytes:
        """A sequence's memory, for `state_set` in a context of the same model and parameters."""
        return self._get(seq, 0)

    def state_set(self, seq: int, data: bytes | bytearray | memoryview) -> bool:
        """Replace a sequence's memory by the result of `state_get`. False where it does not fit."""
        return self._set(seq, data, 0)

    def part_size(self, seq: int) -> int:
        """Bytes that `part_get` would return."""
        return self._size(seq, _PART)

    def part_get(self, seq: int) -> bytes:
        """A copy of the part of a sequence's memory that cannot be cut: its recurrent state, and the cells of layers
        with a window that its end attends to. A sequence with the other cells up to this position can continue from
        here with it, in the same context.
        """
        return self._get(seq, _PART)

    def part_set(self, seq: int, data: bytes) -> bool:
        """Replace that part of a sequence's memory by the result of `part_get`. Other cells stay; those behind the
        part's end must be removed by the caller. False where it does not fit.
        """
        return self._set(seq, data, _PART)

    def _size(self, seq: int, flags: int) -> int:
        self._checked_memory(seq)
        own, beside = int(lib.llama_state_seq_get_size_ext(self.handle, seq, flags)), self._beside(flags)
        return own + (0 if beside is None else beside._size(seq, flags))

    def _get(self, seq: int, flags: int) -> bytes:
        size = self._size(seq, flags)
        # The library writes into an allocated bytes object, which saves a second copy of what can be gigabytes.
        # (Safe, because nothing else refers to it yet.)
        data = bytes(size)
        written = self._write(seq, data, 0, flags)
        return data if written == size else data[:written]

    def _write(self, seq: int, data: bytes, at: int, flags: int) -> int:
        """Write a state into `data` from index `at` on. Returns its end."""
        address = ctypes.cast(ctypes.addressof(_address_of(data).contents) + at, ctypes.POINTER(ctypes.c_uint8))
        end = at + int(lib.llama_state_seq_get_data_ext(self.handle, address, len(data) - at, seq, flags))
        beside = self._beside(flags)
        return end if beside is None else beside._write(seq, data, end, flags)

    def _set(self, seq: int, data: bytes | bytearray | memoryview, flags: int) -> bool:
        self._checked_memory(seq)
        source = np.frombuffer(data, np.uint8)
        pointer = source.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        read = int(lib.llama_state_seq_set_data_ext(self.handle, pointer, source.nbytes, seq, flags))
        if self._follower is not None and not flags:
            self._follower.seq_rm(seq, -1, -1)
        beside, rest = self._beside(flags), source[read:]
        if beside is not None and read and rest.nbytes and not beside._set(seq, rest.data, flags):
            beside.seq_rm(seq)
        return read > 0

    def _beside(self, flags: int) -> Context | None:
        """Follower's context whose memory of the same sequence is part of the state."""
        follower = self._follower
        return None if follower is None or (flags and not follower.has_windows) else follower.kept

    def request_abort(self) -> None:
        """Have a running `decode` return `ABORTED` within one graph node, and every later one at once. Any thread."""
        self.is_ended = True
        self._graph.stop()

    def request_retry(self) -> None:
        """Have a running `decode` return `ABORTED` within one graph node; after `resume`, later ones compute. Any
        thread.
        """
        self._is_retried = True
        self._graph.stop()

    def resume(self) -> None:
        """Allow computing after `request_retry`. `request_abort` stays in effect."""
        self._is_retried = False

    def _start(self) -> None:
        self._graph.start()
        # Checked after the start: an abort at the same time either stops the graph itself, or is seen here.
        if self._is_retried or self.is_ended:
            self._graph.stop()

    def _checked_memory(self, seq: int) -> int | None:
        if not 0 <= seq < self.n_seq_max:
            raise ValueError(f"seq: {seq} must be from 0 to {self.n_seq_max - 1}")
        if self._handle is None:
            raise ValueError("the context is closed")
        return self._memory

    def close(self) -> None:
        """Free the memory. Harmless when repeated. Not while another thread is inside `decode`."""
        handle, self._handle = self._handle, None
        self._logits_address = 0
        self._logits_views.clear()
        if handle:
            lib.llama_free(handle)
        if self._holds_model:
            self._holds_model = False
            self.model.release()


def _rounded(tokens: int) -> int:
    return math.ceil(tokens / ROUNDED_TOKENS) * ROUNDED_TOKENS


_PART = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_get_logits = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("llama_get_logits", lib._lib))
"""Variant of the binding's function that returns a number: the binding makes a pointer object on each call."""


def _address_of(data: bytes) -> ctypes._Pointer[ctypes.c_uint8]:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.POINTER(ctypes.c_uint8))
