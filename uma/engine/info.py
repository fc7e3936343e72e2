"""What the server says of itself: derived from the model, the running context and the configuration."""

from __future__ import annotations

import attrs

from uma.config import RuntimeConfig
from uma.engine import sizing
from uma.engine.intake.chat import ChatAbilities
from uma.engine.intake.trained_form import unsupported_kind
from uma.engine.kv.memory_kinds import kind_of
from uma.llama.context import Context
from uma.llama.heads import PredictionHeads
from uma.llama.model import Model
from uma.llama.projector import Projector
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


def server_info(
    context: Context,
    config: RuntimeConfig,
    chat: ChatAbilities,
    free_kv_bytes: int,
    draft: Context | None = None,
    projector: Projector | None = None,
    heads: PredictionHeads | None = None,
) -> ServerInfo:
    """What a server answers to `info` and `hello`, with so much memory left for further contexts."""
    model = context.model
    return ServerInfo(
        server=f"uma/{__version__}",
        model=model.info,
        capabilities=_of_generator(context, config, chat, draft, projector, heads)
        if model.is_causal
        else _of_encoder(context, config),
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


def _of_generator(
    context: Context,
    config: RuntimeConfig,
    chat: ChatAbilities,
    draft: Context | None,
    projector: Projector | None,
    heads: PredictionHeads | None,
) -> Capabilities:
    return attrs.evolve(
        _of_encoder(context, config),
        streaming=True,
        chat=context.model.info.has_chat_template,
        prefix_sharing=_prefix_sharing(context, config),
        max_stop_sequences=MAX_STOPS,
        sampling_params=tuple(field.name for field in attrs.fields(SamplingParams)),
        suggested_sampling={**context.model.suggested_sampling, **config.chosen_sampling},
        tools=chat.tool_choices,
        reasoning=chat.has_thinking,
        reasoning_switch=chat.has_thinking_switch,
        reasoning_efforts=context.model.chat_template.efforts,
        template_variables=tuple(sorted(context.model.chat_template.switches)),
        grammars=GRAMMAR_FIELDS if len(context.model.vocab.eog) else (),
        max_logprobs=MAX_LOGPROBS,
        max_answers=min(MAX_ANSWERS, sizing.max_active(context, config)),
        echo=True,
        decisions=0 if unsupported_kind(context.model) else WORDING,
        generate=True,
        speculation=_speculation(context, config, draft, heads),
        vision=projector is not None and projector.sees,
        audio=projector is not None and projector.hears,
        media_urls=projector is not None and config.media_urls,
        fill_in=context.model.vocab.fill_in,
        adapters=tuple(adapter.name for adapter in context.model.adapters),
        memory=sizing.memory_plan(context.model.shape, attrs.evolve(context.params, rolled_back=context.rolled_back)),
    )


def _of_encoder(context: Context, config: RuntimeConfig) -> Capabilities:
    """Capabilities of an encoder, which generates nothing. A generator has these unless it says otherwise."""
    pooling = sizing.pooling(context.model.shape, config)
    return Capabilities(
        streaming=False,
        chat=False,
        cancel=True,
        tokenize=True,
        token_ids_input=True,
        prefix_sharing="none: an encoder reads each text by itself",
        kv_unified=context.params.kv_unified,
        max_stop_sequences=0,
        sampling_params=(),
        generate=False,
        embeddings=pooling != "rank",
        pooling=pooling,
        embedding_dimensions=context.model.n_embedding,
        rerank=pooling == "rank",
        speculation="none: an encoder does not generate",
    )


def _prefix_sharing(context: Context, config: RuntimeConfig) -> str:
    """How a common prefix is shared, and why not better."""
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
