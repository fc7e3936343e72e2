"""What a model is, and is expected to take as its process will plan its memory, before it was ever loaded: by its
header.
"""

from __future__ import annotations

import os
from pathlib import Path

import attrs

from uma.chat.families import thinking_of
from uma.config import RuntimeConfig
from uma.engine.intake.chat import CHOICES
from uma.engine.ledger import planned
from uma.engine.sizing import RULES, adapter_bytes, process_bytes
from uma.errors import ConfigError, UmaError
from uma.llama import header
from uma.llama.suggested import suggested_sampling
from uma.llama.template import PLAIN_TEMPLATE
from uma.models import projectors
from uma.net.logfmt import unlogged
from uma.types import (
    EMBEDDINGS,
    MAX_TEMPLATE_CHARS,
    RERANKER,
    ListedModel,
    MemoryPlan,
    ModelInfo,
    SamplingParams,
    ServerInfo,
)

ROUGH_SHARE = 4
"""Divisor of the weights for the context, where that is not known."""


def rough_bytes(size_bytes: int) -> int:
    """The memory of a process with weights of this size, as long as nothing else is known."""
    return size_bytes + size_bytes // ROUGH_SHARE + RULES.process_bytes


def most_weights_bytes(budget_bytes: int) -> int:
    """The largest weights of which `rough_bytes` are within a budget."""
    return max(0, budget_bytes - RULES.process_bytes) * ROUGH_SHARE // (ROUGH_SHARE + 1)


def planned_memory(path: Path, config: RuntimeConfig) -> tuple[int, MemoryPlan | None]:
    """Bytes of a process with these settings and the model of this file, and its context where that is known. Raises
    `ConfigError` where its context does not fit, as the process would. Any thread.
    """
    try:
        parts = header.read_parts(path)
        size_bytes = sum(part.size_bytes for part in parts) + projectors.size_bytes(
            projectors.chosen(config.mmproj, path)
        )
        with unlogged("uma.engine"):  # the process that does what is planned here logs them
            plan = planned(parts, config)
        size_bytes += adapter_bytes(config)
        beside_bytes = process_bytes(parts[0].vocab_size)
    except ConfigError:
        raise
    except (UmaError, OSError):  # loading it says what is wrong
        return rough_bytes(path.stat().st_size if os.path.isfile(path) else 0), None
    if plan is None:
        return rough_bytes(size_bytes), None
    return size_bytes + plan.kv_bytes + plan.state_bytes + beside_bytes, plan


def header_card(model: ListedModel, blank: ServerInfo, config: RuntimeConfig, n_ctx: int) -> ServerInfo:
    """The card of a model with these settings and, where it is known, this context; `blank` has what is so of any. It
    has no path: by that programs tell it from a loaded model's. Raises `ModelError`. Any thread.
    """
    first = header.read_parts(Path(model.path))[0]
    template, license = (str(first.metadata.get(key, "")) for key in ("tokenizer.chat_template", "general.license"))
    generates = model.kind not in (EMBEDDINGS, RERANKER)
    info = ModelInfo(
        *(model.name, "", model.architecture, model.parameters or first.parameters, model.size_bytes),
        *(model.quantization, model.context_length, first.vocab_size, bool(template), license or None),
    )
    able = attrs.evolve(
        blank.capabilities,
        generate=generates,
        chat=bool(template),
        vision=model.vision,
        reasoning=thinking_of(template) is not None,
        sampling_params=tuple(field.name for field in attrs.fields(SamplingParams)) if generates else (),
        suggested_sampling={**suggested_sampling(first), **config.chosen_sampling},
        tools=CHOICES if generates else (),
    )
    limits = attrs.evolve(blank.limits, n_ctx=n_ctx or model.context_length)
    shown = (template or PLAIN_TEMPLATE) if generates and len(template) <= MAX_TEMPLATE_CHARS else ""
    return attrs.evolve(blank, model=info, capabilities=able, limits=limits, chat_template=shown)
