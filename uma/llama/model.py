"""A loaded model: its weights, its card, its vocabulary and its chat template, all read from the file.

Loading checks the header first, so that an unusable file is refused by name and with the reason in plain words. For
other errors the message quotes llama.cpp's last log lines.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import llama_cpp.llama_cpp as lib

from uma.closing import Closing
from uma.config import Toggle
from uma.errors import ModelError
from uma.llama import adapters, backend, header, trial
from uma.llama.adapters import Adapter
from uma.llama.extra_buffers import chosen, only
from uma.llama.header import Header
from uma.llama.log import LOG
from uma.llama.pages import NewPages
from uma.llama.placement import Placement, overrides
from uma.llama.shape import COPIED_WHOLE, Memory, Shape, why_no_assistant
from uma.llama.template import ChatTemplate
from uma.llama.vocab import Vocab
from uma.types import ModelInfo, listed_name

OnProgress = Callable[[float], bool]
"""Called on the loading thread with the loaded fraction of the weights, 0 to 1. False stops the load. Must not
raise."""

SAMPLES, SAMPLE_BYTES = 256, 4096


class Model(Closing):
    """Owner of a loaded model. Any number of contexts, of any threads, can use it; close it after they are closed."""

    def __init__(
        self,
        handle: int,
        parts: list[Header],
        *,
        is_builtin: bool,
        vocab_only: bool = False,
        is_mapped: bool = False,
        n_gpu_layers: int = 0,
        cpu_experts: int = 0,
        predicts: bool = False,
    ) -> None:
        self._handle: int | None = handle
        self._parts = parts
        self._lock = threading.Lock()
        self._users = 0
        self._close_wanted = False
        self.path = parts[0].path
        self.vocab_only = vocab_only
        self._placement = Placement(n_gpu_layers, cpu_experts)
        self.is_on_gpu = n_gpu_layers != 0
        """Whether a GPU has any of its layers."""
        self.is_all_on_gpu = n_gpu_layers < 0 and not cpu_experts
        """Whether GPUs have all of its layers."""
        self.predicts = predicts
        """Whether its prediction heads are loaded."""
        self.vocab = Vocab(self, str(parts[0].metadata.get("tokenizer.ggml.pre", "default")))
        # (0 from llama.cpp for a vocabulary alone.)
        self.n_ctx_train = int(lib.llama_model_n_ctx_train(handle)) or parts[0].context_length
        self.is_causal = _is_causal(handle, parts[0])
        """See `Shape.is_causal`."""
        self.shape = attrs.evolve(
            Shape.of(parts),
            n_ctx_train=self.n_ctx_train,
            is_causal=self.is_causal,
            memory=_memory_of(handle, parts[0].architecture),
            window_tokens=max(0, int(lib.llama_model_n_swa(handle))),
            is_mapped=is_mapped,
        )
        self.n_embedding = int(lib.llama_model_n_embd_out(handle))
        """Dimensions of an embedding."""
        self.n_scores = int(lib.llama_model_n_cls_out(handle))
        """Number of a classifier's scores, where the model has a classifier."""
        rerank: bytes | None = lib.llama_model_chat_template(handle, b"rerank")
        self.rerank_template = rerank.decode("utf-8", "replace") if rerank else None
        """Prompt with `{query}` and `{document}`, where the model expects its own form of a pair."""
        template: bytes | None = lib.llama_model_chat_template(handle, None)
        self.chat_template = ChatTemplate(
            template.decode("utf-8", "replace") if template else None, self.vocab.bos_text, self.vocab.eos_text
        )
        trained: bytes | None = lib.llama_model_chat_template(handle, b"systemone")
        self.decision_template = ChatTemplate(trained.decode("utf-8", "replace"), "", "") if trained else None
        """Template of a decision model's prompts, where its file has one."""
        self.info = self._read_info(is_builtin)
        self.adapters: tuple[Adapter, ...] = ()
        """Loaded LoRA adapters."""

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        n_gpu_layers: int = -1,
        cpu_experts: int = 0,
        map_above_bytes: float = 0,
        use_mlock: bool = False,
        is_builtin: bool = False,
        vocab_only: bool = False,
        extra_buffers: Toggle = "auto",
        predicts: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Model:
        """Load a GGUF file, or a split model by its first part. Takes as long as reading the weights; any thread.

        Weights of more than `map_above_bytes` are mapped from their file, others are read into memory, in huge pages
        where available: 0 maps all, `math.inf` none.

        The experts of the first `cpu_experts` layers stay off the GPUs (`placement`).

        With `extra_buffers` on, llama.cpp arranges weights for the CPU's matrix units; `auto`: except for AMX, which
        some compilers build wrongly; `off`: weights stay as they are in the file.

        `predicts` also loads its prediction heads, where it has usable ones (`llama.heads`).

        Raises `ModelError`, naming the file and the reason, for a file that cannot be loaded, or neither generates nor
        embeds text; and `LoadStopped` where `on_progress`, which is called before each tensor, has returned False.
        """
        parts = header.read_parts(Path(path))
        header.check_vocabulary(Path(path))
        predicts = predicts and Shape.of(parts).heads > 0
        if header.needs_trial(parts[0]) and not vocab_only:
            trial.check_model(Path(path), predicts=predicts)
        backend.start()
        allowed = chosen(extra_buffers) if not vocab_only else ()
        mark = LOG.mark
        params = lib.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.use_extra_bufts = bool(allowed)
        is_mapped = sum(part.size_bytes for part in parts) > map_above_bytes
        params.load_mode = _LOAD_MODES[is_mapped, use_mlock]
        watch = _Watch(on_progress, None if is_mapped or vocab_only else NewPages())
        params.progress_callback = watch.callback
        params.vocab_only = vocab_only
        params.load_mtp = predicts
        kept = overrides(cpu_experts) if cpu_experts else None
        params.tensor_buft_overrides = ctypes.cast(kept, ctypes.c_void_p) if kept else None
        with only(allowed):
            handle: int | None = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not handle and watch.is_stopped:
            raise LoadStopped(f"{path}: loading was stopped")
        if not handle:
            raise ModelError(_why_not_loaded(parts[0], mark))
        try:
            _check_serves_text(handle, parts[0])
            n_gpu_layers = n_gpu_layers if backend.has_gpu() else 0
            model = cls(
                handle,
                parts,
                is_builtin=is_builtin,
                vocab_only=vocab_only,
                is_mapped=is_mapped,
                n_gpu_layers=n_gpu_layers,
                cpu_experts=cpu_experts,
                predicts=predicts,
            )
            if not vocab_only:
                model.chat_template.start()
        except BaseException:
            lib.llama_model_free(handle)
            raise
        return model

    def why_no_assistant_of(self, target: Model) -> str | None:
        """See `shape.why_no_assistant`; also the first difference of the vocabularies."""
        return why_no_assistant(self._parts[0], target._parts[0]) or target.vocab.difference(self.vocab)

    def load_adapter(self, path: Path, name: str, scale: float = 1.0) -> Adapter:
        """Check and load a LoRA adapter, before any context is made. Raises `ModelError`."""
        adapter = adapters.load(self.handle, [part.path for part in self._parts], path, name, scale)
        self.adapters += (adapter,)
        return adapter

    @property
    def handle(self) -> int:
        """llama.cpp's pointer. Raises `ValueError` after `close`."""
        if self._handle is None:
            raise ValueError(f"{self.path}: the model is closed")
        return self._handle

    @cached_property
    def model_hash(self) -> str:
        """Identity of the model, for keys of caches: equal for the same file, different for different models.

        Covers each part's size and whole header (metadata, vocabulary, shapes) and 256 samples of 4 KiB spread over its
        weights. So it takes milliseconds, where hashing all weights would take as long as loading.
        """
        digest = hashlib.sha256()
        for part in self._parts:
            digest.update(part.size_bytes.to_bytes(8, "little"))
            with part.path.open("rb") as file:
                digest.update(file.read(part.data_offset))
                step = max(SAMPLE_BYTES, (part.size_bytes - part.data_offset) // SAMPLES)
                for offset in range(part.data_offset, part.size_bytes, step):
                    file.seek(offset)
                    digest.update(file.read(SAMPLE_BYTES))
                file.seek(-min(SAMPLE_BYTES, part.size_bytes), os.SEEK_END)
                digest.update(file.read())
        return digest.hexdigest()

    @property
    def header(self) -> Header:
        """Header of its file; for a split model, of the first part."""
        return self._parts[0]

    @property
    def decision_temperatures(self) -> dict[str, float]:
        """Divisors of log probabilities, fitted to kinds of questions, by the kind or the kind and a size."""
        part = self._parts[0]
        start = f"{part.architecture}.decision.temperature."
        found = {key.removeprefix(start): value for key, value in part.metadata.items() if key.startswith(start)}
        return {name: value for name, value in found.items() if isinstance(value, float) and value > 0}

    @property
    def n_tensors(self) -> int:
        """Number of tensors in its files."""
        return sum(len(part.tensor_bytes) for part in self._parts)

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return int(lib.llama_model_n_layer(self.handle))

    def _read_info(self, is_builtin: bool) -> ModelInfo:
        metadata = self._parts[0].metadata
        title = str(metadata.get("general.name") or "")
        return ModelInfo(
            name=listed_name(str(self.path), title, is_builtin=is_builtin),
            title=title,
            path=str(self.path),
            architecture=self._parts[0].architecture,
            parameters=int(lib.llama_model_n_params(self.handle)) or sum(part.parameters for part in self._parts),
            size_bytes=sum(part.size_bytes for part in self._parts),
            quantization=self._parts[0].quantization,
            context_length=self.n_ctx_train,
            vocab_size=self.vocab.n_tokens,
            has_chat_template=self.chat_template.is_own,
            license=_optional_text(metadata, "general.license"),
            description=_optional_text(metadata, "general.description"),
            is_builtin=is_builtin,
            gpu_bytes=self._placement.weights_bytes(self._parts),
        )

    def close(self) -> None:
        """Free the weights, as soon as no context and no thread uses them. Harmless when repeated."""
        with self._lock:
            self._close_wanted = True
        self._free_if_unused()

    def retain(self) -> None:
        """Keep the model in memory until `release`. Raises `ValueError` after `close`."""
        with self._lock:
            if self._close_wanted:
                raise ValueError(f"{self.path}: the model is closed")
            self._users += 1

    def release(self) -> None:
        """The counterpart of `retain`."""
        with self._lock:
            self._users -= 1
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        with self._lock:
            if not self._close_wanted or self._users > 0:
                return
            handle, self._handle = self._handle, None
        if handle is not None:
            lib.llama_model_free(handle)
            self.chat_template.close()
            if self.decision_template is not None:
                self.decision_template.close()


class LoadStopped(Exception):
    """`on_progress` has stopped the load. Nothing of the model is left in memory."""


class _Watch:
    """llama.cpp's progress callback for one load. Must be referenced until the model is loaded."""

    def __init__(self, on_progress: OnProgress | None, pages: NewPages | None) -> None:
        self._on_progress = on_progress
        self._pages = pages
        self.is_stopped = False
        self.callback: Any = lib.llama_progress_callback(self._call)

    def _call(self, fraction: float, _user_data: object) -> bool:
        if self._pages is not None:
            self._pages.make_huge()
            self._pages = None
        self.is_stopped = self._on_progress is not None and not self._on_progress(fraction)
        return not self.is_stopped


_LOAD_MODES = {  # mapped, locked
    (True, False): lib.LLAMA_LOAD_MODE_MMAP,
    (False, False): lib.LLAMA_LOAD_MODE_NONE,
    (True, True): lib.LLAMA_LOAD_MODE_MMAP_MLOCK,
    (False, True): lib.LLAMA_LOAD_MODE_MLOCK,
}


def _memory_of(handle: int, architecture: str) -> Memory:
    if lib.llama_model_is_hybrid(handle) or architecture == COPIED_WHOLE:
        return "hybrid"
    if lib.llama_model_is_recurrent(handle):
        return "recurrent"
    return "sliding-window" if lib.llama_model_n_swa(handle) > 0 else "attention"


def _is_causal(handle: int, first: Header) -> bool:
    stated = first.metadata.get(f"{first.architecture}.attention.causal")
    return stated is not False and not lib.llama_model_has_encoder(handle)


def _check_serves_text(handle: int, first: Header) -> None:
    path, architecture = first.path, first.architecture
    if lib.llama_vocab_type(lib.llama_model_get_vocab(handle)) == lib.LLAMA_VOCAB_TYPE_NONE:
        raise ModelError(f"{path}: has no tokenizer, so text cannot be turned into tokens")
    if lib.llama_model_has_encoder(handle) and lib.llama_model_has_decoder(handle):
        raise ModelError(
            f"{path}: {architecture} is an encoder-decoder model; UMA serves models that decode or encode, not both"
        )
    if lib.llama_model_is_diffusion(handle):
        raise ModelError(f"{path}: {architecture} is a diffusion model, which does not generate token by token")


def _why_not_loaded(first: Header, mark: int) -> str:
    said = header.quoted(mark)
    if "unknown model architecture" in said:
        return (
            f"{first.path}: its architecture, {first.architecture}, is unknown to this llama.cpp "
            f"({lib.llama_version().decode()}); a newer one may know it"
        )
    if "cannot find tokenizer" in said or "unknown tokenizer" in said:
        return f"{first.path}: has no tokenizer that llama.cpp knows{said}"
    return f"{first.path}: cannot be loaded{said}"


def _optional_text(metadata: dict[str, Any], key: str) -> str | None:
    return str(metadata[key]) if metadata.get(key) else None


def llama_version() -> str:
    """Version of the loaded llama.cpp."""
    version: bytes = lib.llama_version()
    return version.decode("utf-8", "replace")
