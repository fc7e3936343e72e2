"""The flat shape of each kind of message: which fields stand on the wire, put together from the classes that own them.

A request's sampling parameters, its `keep_alive` and its `id` are one flat JSON object there, while in the program they
belong to three classes. The flat classes made here serve the parser and the JSON Schemas alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any

import attrs

from uma.constraints import Length, Range, hints_of
from uma.protocol.messages import (
    ActivityEvent,
    ActivityQuery,
    Cancel,
    DecideEvent,
    DecideQuery,
    EmbedEvent,
    EmbedQuery,
    EndEvent,
    EndQuery,
    EndThinking,
    EosEvent,
    ErrorEvent,
    ExplainEvent,
    ExplainQuery,
    Generate,
    HealthEvent,
    HealthQuery,
    Hello,
    HelloEvent,
    LoadingEvent,
    LoadQuery,
    MetricsEvent,
    MetricsQuery,
    ModelsEvent,
    ModelsQuery,
    PauseQuery,
    PinQuery,
    PromptEvent,
    ReasoningEvent,
    RerankEvent,
    RerankQuery,
    TokenEvent,
    TokenizeEvent,
    TokenizeQuery,
    ToolCallEvent,
    TraceEvent,
    TraceQuery,
    UnloadQuery,
)
from uma.protocol.versions import SUPPORTED
from uma.types import MAX_TEXTS, PROMPT_FIELDS, DecisionRequest, EmbedRequest, Request, RerankRequest, SamplingParams

SAMPLING_FIELDS = tuple(hints_of(SamplingParams))


@attrs.frozen
class Additions:
    """What sessions of some versions do not have."""

    requests: frozenset[str] = frozenset()
    """Types of requests."""
    commands: frozenset[str] = frozenset()
    fields: Mapping[str, frozenset[str]] = MappingProxyType({})
    """Fields of requests by their type, and of `messages`: they are ignored."""
    event_fields: Mapping[str, frozenset[str]] = MappingProxyType({})
    """Fields of events by their name: they are not sent."""


def _names(**by_kind: str) -> Mapping[str, frozenset[str]]:
    return MappingProxyType({kind: frozenset(names.split()) for kind, names in by_kind.items()})


ADDED: Mapping[str, Additions] = MappingProxyType(
    {
        "1.1": Additions(
            requests=frozenset(("embed", "rerank", "end", "explain", "trace")),
            commands=frozenset(("answer",)),
            fields=_names(
                generate="grammar logprobs prompt_logprobs logit_bias n best_of echo penalty_window penalize_prompt "
                "typical_p top_n_sigma xtc_probability xtc_threshold dynatemp_range dynatemp_exponent mirostat "
                "mirostat_tau mirostat_eta dry_multiplier dry_base dry_allowed_length dry_window dry_sequence_breakers "
                "tools tool_choice parallel_tool_calls reasoning parse_special chat_template_kwargs "
                "continue_final_message cache_prompt reproducible max_reasoning_tokens sender media",
                tokenize="tools tool_choice reasoning parse_special chat_template_kwargs continue_final_message media",
                messages="tool_calls tool_call_id name reasoning media",
            ),
        ),
        "1.2": Additions(
            requests=frozenset(("models", "load", "unload", "pin", "pause", "decide")),
            fields=_names(
                activity="request",
                generate="model lora truncation expects_more",
                tokenize="model pieces",
                embed="model",
                rerank="model",
            ),
            event_fields=_names(hello="models", loading="id", eos="dropped_messages summary"),
        ),
    }
)
"""What a version has that the one before it has not. Of events, version 1.0 has `FIELDS_OF_1_0`."""


@cache
def unknown_to(version: str | None) -> Additions:
    """What a session of this version does not have; None: the newest, which has all."""
    later = SUPPORTED[SUPPORTED.index(version) + 1 :] if version is not None else ()
    added = [ADDED[newer] for newer in later]

    def together(tables: Iterable[Mapping[str, frozenset[str]]]) -> Mapping[str, frozenset[str]]:
        found: dict[str, frozenset[str]] = {}
        for table in tables:
            found |= {kind: names | found.get(kind, frozenset()) for kind, names in table.items()}
        return found

    return Additions(
        frozenset().union(*(addition.requests for addition in added)),
        frozenset().union(*(addition.commands for addition in added)),
        together(addition.fields for addition in added),
        together(addition.event_fields for addition in added),
    )


FIELDS_OF_1_0: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        path: frozenset(names.split())
        for path, names in {
            "hello": "version server model capabilities limits warnings",
            "hello.capabilities": "streaming chat cancel tokenize token_ids_input prefix_sharing kv_unified "
            "max_stop_sequences sampling_params",
            "hello.limits": "n_ctx max_tokens max_prompt_bytes max_frame_bytes max_sessions max_queue",
            "eos": "id reason usage metrics seed text token_ids warnings metadata",
            "eos.usage": "prompt_tokens cached_tokens completion_tokens",
            "eos.metrics": "queue_ms prefill_ms decode_ms ttft_ms batch_size tokens_per_second decode_iterations",
            "tokenize": "id token_ids warnings",
        }.items()
    }
)
"""Fields of events that a session of version 1.0 has, by path; it is sent no other."""


OWNERS: dict[type, tuple[type, ...]] = {}
"""Classes that the fields of each flat class come from; the last is the message itself."""


def _flat(name: str, *parts: type, drop: tuple[str, ...] = ("warnings",), hints: dict[str, Any] | None = None) -> type:
    """A class with the fields of all `parts`; `hints` has the types of those that the wire takes in more ways."""
    types = {field: hint for part in parts for field, hint in hints_of(part).items() if field not in drop}
    defaults = {field.name: field.default for part in parts for field in attrs.fields(part)}
    fields = {field: attrs.field(type=hint, default=defaults[field]) for field, hint in (types | (hints or {})).items()}
    cls = attrs.make_class(name, fields, frozen=True, kw_only=True)
    OWNERS[cls] = parts
    return cls


_ONE_OR_MORE_STRINGS = Annotated[str, Length(1, 1024)] | hints_of(SamplingParams)["stop"]

_TOKENS = Annotated[list[Annotated[int, Range(0)]], Length(1, None, "tokens")]
_LISTS_OF_TOKENS = Annotated[tuple[_TOKENS, ...], Length(1, MAX_TEXTS, "texts")] | None

TOKENIZE_FIELDS = (
    *("id", *PROMPT_FIELDS, "media", "parse_special", "tools", "tool_choice", "reasoning"),
    *("chat_template_kwargs", "continue_final_message", "model"),
)
"""Fields of a request that its prompt depends on."""

_NOT_FOR_TOKENIZE = ("request", "warnings", *(name for name in hints_of(Request) if name not in TOKENIZE_FIELDS))

REQUESTS: dict[str, type[Any]] = {
    "generate": _flat(
        "Generate",
        Request,
        SamplingParams,
        Generate,
        drop=("request", "sampling", "warnings"),
        hints={"stop": _ONE_OR_MORE_STRINGS},
    ),
    "hello": _flat("Hello", Hello),
    "metrics": _flat("Metrics", MetricsQuery),
    "activity": _flat("Activity", ActivityQuery),
    "explain": _flat("Explain", ExplainQuery),
    "trace": _flat("Trace", TraceQuery),
    "end": _flat("End", EndQuery),
    "pause": _flat("Pause", PauseQuery),
    "models": _flat("Models", ModelsQuery),
    "load": _flat("Load", LoadQuery),
    "unload": _flat("Unload", UnloadQuery),
    "pin": _flat("Pin", PinQuery),
    "health": _flat("Health", HealthQuery),
    "tokenize": _flat("Tokenize", Request, TokenizeQuery, drop=_NOT_FOR_TOKENIZE),
    "embed": _flat(
        "Embed", EmbedRequest, EmbedQuery, drop=("request", "warnings"), hints={"token_ids": _LISTS_OF_TOKENS}
    ),
    "rerank": _flat("Rerank", RerankRequest, RerankQuery, drop=("request", "warnings")),
    "decide": _flat("Decide", DecisionRequest, DecideQuery, drop=("request", "warnings")),
}
"""Classes of requests by `type`."""

COMMANDS: dict[str, tuple[type, type[Any]]] = {
    "cancel": (Cancel, _flat("Cancel", Cancel)),
    "answer": (EndThinking, _flat("Answer", EndThinking)),
}
"""What a client says of a running request, by `event`: the message and its flat class."""

EVENTS: dict[str, type[Any]] = {
    "hello": HelloEvent,
    "prompt": PromptEvent,
    "token": TokenEvent,
    "reasoning": ReasoningEvent,
    "tool_call": ToolCallEvent,
    "eos": EosEvent,
    "error": ErrorEvent,
    "activity": ActivityEvent,
    "explain": ExplainEvent,
    "trace": TraceEvent,
    "end": EndEvent,
    "models": ModelsEvent,
    "health": HealthEvent,
    "loading": LoadingEvent,
    "tokenize": TokenizeEvent,
    "embed": EmbedEvent,
    "rerank": RerankEvent,
    "decide": DecideEvent,
    "metrics": _flat("Metrics", MetricsEvent, drop=("snapshot",)),
}
"""Classes of events by `event`. A metrics event has its snapshot's fields beside these."""
