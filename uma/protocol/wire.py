"""Flat form of each message: its fields on the wire, collected from the classes that own them.

On the wire a request's sampling parameters, its `keep_alive` and its `id` are members of one flat JSON object; in the
program they belong to three classes. Parser and JSON Schemas both use the flat classes made here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, get_args

import attrs

from uma.constraints import Length, Range, hints_of
from uma.protocol.messages import (
    Cancel,
    EmbedQuery,
    EndThinking,
    Generate,
    Hello,
    Query,
    ServerEvent,
    TokenizeQuery,
    UnknownEvent,
    WholeQuery,
)
from uma.protocol.versions import SUPPORTED
from uma.types import MAX_TEXTS, PROMPT_FIELDS, Request, SamplingParams

SAMPLING_FIELDS = tuple(hints_of(SamplingParams))


@attrs.frozen
class Additions:
    """Parts of the protocol that sessions of older versions do not have."""

    requests: frozenset[str] = frozenset()
    """Types of requests."""
    commands: frozenset[str] = frozenset()
    fields: Mapping[str, frozenset[str]] = MappingProxyType({})
    """Fields of requests by type, and of `messages`, that are ignored."""
    event_fields: Mapping[str, frozenset[str]] = MappingProxyType({})
    """Fields of events by name that are not sent."""


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
            event_fields=_names(hello="models", loading="id waits_for", eos="dropped_messages summary"),
        ),
    }
)
"""Additions of each version to the one before. Version 1.0 has only the event fields in `FIELDS_OF_1_0`."""


@cache
def unknown_to(version: str | None) -> Additions:
    """Parts of the protocol that a session of this version does not have; None: the newest, which has all."""
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
"""Fields of events in sessions of version 1.0, by path; no others are sent."""


def name_of(message: type) -> str:
    """Name of a message's class on the wire: without `Query` and `Event`, in snake case, as in `tool_call`."""
    word = re.sub("(Query|Event)$", "", message.__name__)
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", word).lower()


OWNERS: dict[type, tuple[type, ...]] = {}
"""Classes that the fields of each flat class come from; the last one is the message itself."""


def _flat(name: str, *parts: type, drop: tuple[str, ...] = ("warnings",), hints: dict[str, Any] | None = None) -> type:
    """A class with the fields of all `parts`. `hints` has types of fields that the wire accepts in further forms."""
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


def _flat_query(cls: type[Any]) -> type[Any]:
    """Flat class of a query; the fields of its request stand beside its own."""
    name = cls.__name__.removesuffix("Query")
    if cls is TokenizeQuery:
        return _flat(name, Request, cls, drop=_NOT_FOR_TOKENIZE)
    if cls not in get_args(WholeQuery):
        return _flat(name, cls)
    hints = {"token_ids": _LISTS_OF_TOKENS} if cls is EmbedQuery else None
    return _flat(name, hints_of(cls)["request"], cls, drop=("request", "warnings"), hints=hints)


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
    **{name_of(cls): _flat_query(cls) for cls in get_args(Query)},
}
"""Flat classes of requests by `type`."""

COMMANDS: dict[str, tuple[type, type[Any]]] = {
    "cancel": (Cancel, _flat("Cancel", Cancel)),
    "answer": (EndThinking, _flat("Answer", EndThinking)),
}
"""Message and flat class of each command about a running request, by `event`."""

EVENTS: dict[str, type[Any]] = {name_of(cls): cls for cls in get_args(ServerEvent) if cls is not UnknownEvent}
"""Classes of events by `event`."""
FLAT_METRICS = _flat("Metrics", EVENTS["metrics"], drop=("snapshot",))
"""Flat class of a metrics event. The fields of its snapshot stand beside these."""
