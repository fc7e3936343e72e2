"""Loads the models of an engine, with one progress for all of them. A cancelled load ends soon."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import attrs
import trio

from uma.config import RuntimeConfig
from uma.engine import sizing
from uma.errors import ModelError
from uma.llama import devices, header
from uma.llama.header import Header
from uma.llama.model import LoadStopped, Model
from uma.llama.projector import Projector
from uma.llama.shape import ASSISTANT
from uma.models import projectors
from uma.models.catalog import ResolvedModel, resolve
from uma.models.places import ollama_name
from uma.types import LoadProgress

_log = logging.getLogger("uma.engine")


class Loader:
    """Loads the model and the draft model of one engine. All methods run in threads that Trio has started.

    A cancelled task's load ends before its next tensor, with `trio.Cancelled`. The rest (probing a new library, the
    vocabulary, a context) cannot be interrupted and takes seconds at most.
    """

    def __init__(self, config: RuntimeConfig, progress: LoadProgress) -> None:
        self._progress = progress
        self._loaded_bytes = 0
        self._model = resolve(config.model, os.environ)
        self._draft = resolve(config.draft, os.environ) if config.draft else None
        parts = header.read_parts(Path(self._model.path))
        draft_bytes = _size_bytes(header.read_parts(Path(self._draft.path))) if self._draft else 0
        self._projector = projectors.chosen(config.mmproj, Path(self._model.path))
        self._total_bytes = _size_bytes(parts) + draft_bytes
        self._asked = config
        beside_bytes = draft_bytes + projectors.size_bytes(self._projector) + sizing.adapter_bytes(config)
        self.config = sizing.placed(config, parts, devices.gpus(), beside_bytes)
        """Configuration, with numbers where it leaves the choice to the free memory of GPUs."""

    def model(self) -> Model:
        """Load the model. Raises `ModelError`, and `ConfigError` if its weights must be kept in memory and do
        not fit.
        """
        model = self._load(self._model, "model", self.config)
        try:
            for adapter in self.config.adapters:
                model.load_adapter(Path(adapter.path), adapter.name, adapter.scale)
            model.vocab.least_tokens("")  # reads the whole vocabulary once, so that the Trio thread need not
        except BaseException:
            model.close()
            raise
        return model

    @property
    def has_assistant(self) -> bool:
        """Whether the draft model is an assistant, which reads the target's cells."""
        return self._draft is not None and header.read(Path(self._draft.path)).architecture == ASSISTANT

    def draft(self) -> Model:
        """Load the draft model. Raises as `model`."""
        assert self._draft is not None
        return self._load(self._draft, "draft", attrs.evolve(self._asked, n_cpu_moe=0))

    def projector(self, model: Model) -> Projector | None:
        """The projector for pictures and sounds: `--mmproj`, or one beside the model. Raises `ModelError` if `--mmproj`
        cannot be used.
        """
        named, path = self.config.mmproj, self._projector
        if path is None or not model.is_causal:
            return None
        uses_gpu = self.config.n_gpu_layers != 0
        try:
            found = Projector(path, model, threads=self.config.threads, uses_gpu=uses_gpu)
        except ModelError as error:
            if named:
                raise
            _log.warning("the projector beside the model is not used: %s", error)
            return None
        if found.sees or found.hears:
            return found
        found.close()
        if named:
            raise ModelError(f"{path}: is no projector for pictures or sounds that can be decoded here")
        return None

    def _load(self, found: ResolvedModel, name: str, config: RuntimeConfig) -> Model:
        size_bytes = _size_bytes(header.read_parts(Path(found.path)))
        sizing.check_weights(size_bytes, config, name)

        def go_on(fraction: float) -> bool:
            self._progress.report((self._loaded_bytes + fraction * size_bytes) / self._total_bytes)
            try:
                trio.from_thread.check_cancelled()
            except trio.Cancelled:
                return False
            return True

        try:
            model = Model.load(
                Path(found.path),
                # llama.cpp refuses an adapter for a matrix that is not loaded, and some also change the heads'.
                predicts=config.speculate != "off" or bool(config.adapters),
                n_gpu_layers=config.n_gpu_layers,
                cpu_experts=config.n_cpu_moe,
                map_above_bytes=sizing.map_above_bytes(config),
                use_mlock=config.use_mlock,
                is_builtin=found.is_builtin,
                extra_buffers=config.extra_buffers,
                on_progress=go_on,
            )
        except LoadStopped:
            trio.from_thread.check_cancelled()
            raise
        if called := ollama_name(Path(found.path)):  # the file's name is a checksum
            model.info = attrs.evolve(model.info, name=called)
        self._loaded_bytes += size_bytes
        return model


def _size_bytes(parts: Iterable[Header]) -> int:
    return sum(part.size_bytes for part in parts)
