"""What a model is, and is expected to take as its process will plan its memory, before it was ever loaded: by its
header.
"""

from __future__ import annotations

from pathlib import Path

import attrs

from uma.config import BUILTIN, RuntimeConfig
from uma.engine.info import of_file
from uma.engine.ledger import planned
from uma.engine.sizing import RULES, adapter_bytes, process_bytes
from uma.errors import ConfigError, UmaError
from uma.llama import header
from uma.llama.shape import Shape
from uma.llama.template import ChatTemplate
from uma.models import projectors
from uma.net.logfmt import unlogged
from uma.types import MAX_TEMPLATE_CHARS, ListedModel, MemoryPlan, ModelInfo, ServerInfo

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
        return rough_bytes(projectors.size_bytes(path)), None
    if plan is None:
        return rough_bytes(size_bytes), None
    return size_bytes + plan.kv_bytes + plan.state_bytes + beside_bytes, plan


def header_card(model: ListedModel, blank: ServerInfo, config: RuntimeConfig, n_ctx: int) -> ServerInfo:
    """The card of a model with these settings and, where it is known, this context; `blank` has what is so of any. It
    has no path: by that programs tell it from a loaded model's. Raises `ModelError`. Any thread.
    """
    path = Path(model.path)
    parts = header.read_parts(path)
    first = parts[0]
    texts = ("tokenizer.chat_template", "general.name", "general.license", "general.description")
    source, title, license, description = (str(first.metadata.get(key) or "") for key in texts)
    template = ChatTemplate(source or None, "", "")
    senses = projectors.senses(projectors.chosen(config.mmproj, path))
    info = ModelInfo(
        *(model.name, "", first.architecture, sum(part.parameters for part in parts), model.size_bytes),
        *(model.quantization, model.context_length, first.vocab_size, template.is_own),
        *(license or None, description or None, model.name == BUILTIN),
        title=title,
    )
    with unlogged("uma.llama"):  # the process that is loaded logs what it leaves out
        able = of_file(first, Shape.of(parts), config, template, senses)
    able = attrs.evolve(able, adapters=model.adapters)
    tokens = min(filter(None, (n_ctx, model.context_length)), default=0)
    limits = attrs.evolve(blank.limits, n_ctx=tokens, max_tokens=config.max_tokens or tokens or blank.limits.max_tokens)
    shown = template.source if able.generate and len(template.source) <= MAX_TEMPLATE_CHARS else ""
    return attrs.evolve(blank, model=info, capabilities=able, limits=limits, chat_template=shown)
