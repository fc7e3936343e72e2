"""What the server says of itself: derived from the model, the running context and the configuration; of a model that is
not loaded, from its file.
"""

from __future__ import annotations

import attrs

from uma.chat.families import thinking_of
from uma.config import RuntimeConfig
from uma.engine import sizing
from uma.engine.intake.chat import CHOICES, ChatAbilities
from uma.engine.intake.rendering import has_switch
from uma.engine.intake.trained_form import unsupported_kind
from uma.engine.kv.memory_kinds import kind_of
from uma.llama.context import Context
from uma.llama.header import Header
from uma.llama.heads import PredictionHeads
from uma.llama.model import Model
from uma.llama.projector import Projector
from uma.llama.shape import Shape
from uma.llama.suggested import suggested_sampling
from uma.llama.template import ChatTemplate
from uma.types import (
    GRAMMAR_FIELDS,
    MAX_ANSWERS,
    MAX_LOGPROBS,
    MAX_STOPS,
    MAX_TEMPLATE_CHARS,
    WORDING,
    Capabilities,
    Limits,
    SamplingParams,
    ServerInfo,
)
from uma.version import __version__

NOT_LOADED = "none: the model is not loaded"
"""What is told of prefixes and of drafts before a load, which decides how both are served."""


def server_info(
    context: Context,
    config: RuntimeConfig,
    chat: ChatAbilities,
    free_kv_bytes: int,
    draft: Context | None = None,
    projector: Projector | None = None,
    heads: PredictionHeads | None = None,
) -> ServerInfo:
    """Answer of a server to `info` and `hello`. `free_kv_bytes` is the memory left for further contexts."""
    model = context.model
    return ServerInfo(
        server=f"uma/{__version__}",
        model=model.info,
        capabilities=_of_loaded(context, config, chat, draft, projector, heads),
        limits=Limits(
            n_ctx=sizing.max_request_tokens(context),
            max_tokens=config.max_tokens or sizing.max_request_tokens(context),
            max_prompt_bytes=config.max_prompt_bytes,
            max_frame_bytes=config.frame_bytes(takes_media=projector is not None),
            max_sessions=config.max_sessions,
            max_queue=config.max_queue,
            max_sequences=sizing.max_active(context, config),
            has_max_tokens=config.max_tokens > 0,
            max_reproducible_tokens=sizing.max_reproducible_tokens(context, config, free_kv_bytes),
        ),
        chat_template=_shown_template(model) if model.is_causal else "",
    )


def _shown_template(model: Model) -> str:
    source = model.chat_template.source
    return source if len(source) <= MAX_TEMPLATE_CHARS else ""


def of_file(
    first: Header, shape: Shape, config: RuntimeConfig, template: ChatTemplate, senses: tuple[bool, bool]
) -> Capabilities:
    """What a model can do, as its file's header and chat template tell it, with `senses` for pictures and sounds. What
    only its vocabulary, its context, or rendering the template tells is as with a model that can do it.
    """
    pooling = sizing.pooling(shape, config)
    able = Capabilities(
        streaming=False,
        chat=False,
        cancel=True,
        tokenize=True,
        token_ids_input=True,
        prefix_sharing="none: an encoder reads each text by itself",
        kv_unified=True,
        max_stop_sequences=0,
        sampling_params=(),
        generate=False,
        embeddings=pooling != "rank",
        pooling=pooling,
        rerank=pooling == "rank",
        speculation="none: an encoder does not generate",
    )
    if not shape.is_causal:
        return able
    sees, hears = senses
    thinks = thinking_of(template.source) is not None
    return attrs.evolve(
        able,
        streaming=True,
        chat=template.is_own,
        prefix_sharing=NOT_LOADED,
        max_stop_sequences=MAX_STOPS,
        sampling_params=tuple(field.name for field in attrs.fields(SamplingParams)),
        suggested_sampling={**suggested_sampling(first), **config.chosen_sampling},
        tools=CHOICES,
        reasoning=thinks,
        reasoning_switch=thinks and has_switch(template),
        reasoning_efforts=template.efforts,
        template_variables=tuple(sorted(template.switches)),
        grammars=GRAMMAR_FIELDS,
        max_logprobs=MAX_LOGPROBS,
        max_answers=min(MAX_ANSWERS, sizing.most_sequences(config)),
        echo=True,
        decisions=0 if unsupported_kind(first) else WORDING,
        generate=True,
        speculation=NOT_LOADED,
        vision=sees,
        audio=hears,
        media_urls=(sees or hears) and config.media_urls,
    )


def _of_loaded(
    context: Context,
    config: RuntimeConfig,
    chat: ChatAbilities,
    draft: Context | None,
    projector: Projector | None,
    heads: PredictionHeads | None,
) -> Capabilities:
    model = context.model
    senses = (projector.sees, projector.hears) if projector is not None else (False, False)
    able = attrs.evolve(
        of_file(model.header, model.shape, config, model.chat_template, senses),
        kv_unified=context.params.kv_unified,
        embedding_dimensions=model.n_embedding,
    )
    if not able.generate:
        return able
    return attrs.evolve(
        able,
        prefix_sharing=_prefix_sharing(context, config),
        tools=chat.tool_choices,
        grammars=GRAMMAR_FIELDS if len(model.vocab.eog) else (),
        max_answers=min(MAX_ANSWERS, sizing.max_active(context, config)),
        speculation=_speculation(context, config, draft, heads),
        fill_in=model.vocab.fill_in,
        adapters=tuple(adapter.name for adapter in model.adapters),
        memory=sizing.memory_plan(model.shape, attrs.evolve(context.params, rolled_back=context.rolled_back)),
    )


def _prefix_sharing(context: Context, config: RuntimeConfig) -> str:
    """How a common prefix is shared, with the reason if it is not by cells."""
    how = "cells" if context.params.kv_unified else "copies"
    if not kind_of(context).can_be_cut:
        if not config.cache_ram_mb:
            return f"none: a {context.model.shape.memory} model needs memory for checkpoints (--cache-ram-mb)"
        how += " and checkpoints"
    return how if context.params.kv_unified else f"{how}: each sequence has KV of its own (--kv-unified off)"


def _speculation(context: Context, config: RuntimeConfig, draft: Context | None, heads: PredictionHeads | None) -> str:
    """How tokens are drafted, or why they are not."""
    if reason := sizing.why_no_drafts(context, config):
        return f"none: {reason}"
    ways = [] if config.speculate == "mtp" else ["prompt look-up"]
    ways += [f"the draft model {draft.model.info.name}"] if draft is not None else []
    if heads is not None:
        ways.append(
            f"the assistant {heads.context.model.info.name} (MTP)"
            if heads.reads_cells
            else "the model's prediction head (MTP)"
        )
    return ", and ".join(ways)
