"""A frontend's request to a backend: tokens, sampling, stop conditions, wanted output.

The fields are those of Dynamo 1.6 that a backend must heed or refuse. None means: not asked for, the backend's default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Any

import attrs

from uma.constraints import Json, Length, Range, Text
from uma.contracts.parse import Rule, parse

HEALTH_CHECK_KEY = "_HEALTH_CHECK"
"""Key that marks a request as a frontend's health probe."""

Tokens = tuple[Annotated[int, Range(0)], ...]
AnyJson = Annotated[dict[str, Any], Json()]


@attrs.frozen
class GuidedDecoding:
    """Constraint of the output: at most one of `json`, `regex`, `choice`, `grammar`."""

    json: AnyJson | str | None = None
    """JSON Schema, as an object or as its text."""
    regex: Annotated[str, Length(1), Text()] | None = None
    choice: Annotated[tuple[Annotated[str, Length(1), Text()], ...], Length(1, 10_000, "strings")] | None = None
    grammar: Annotated[str, Length(1), Text()] | None = None
    backend: str | None = None
    """Library to use for it; a hint, which changes no output."""
    whitespace_pattern: str | None = None
    structural_tag: AnyJson | str | None = None


@attrs.frozen
class SamplingOptions:
    """Sampling parameters."""

    n: Annotated[int, Range(1, 128)] | None = None
    best_of: Annotated[int, Range(1, 128)] | None = None
    temperature: Annotated[float, Range(0, 2)] | None = None
    top_p: Annotated[float, Range(0, 1)] | None = None
    top_k: Annotated[int, Range(-1)] | None = None
    """0 or -1: all tokens."""
    min_p: Annotated[float, Range(0, 1)] | None = None
    frequency_penalty: Annotated[float, Range(-2, 2)] | None = None
    presence_penalty: Annotated[float, Range(-2, 2)] | None = None
    repetition_penalty: Annotated[float, Range(gt=0, le=2)] | None = None
    seed: Annotated[int, Range(-(2**63), 2**64 - 1)] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    include_stop_str_in_output: bool | None = None
    guided_decoding: GuidedDecoding | None = None


@attrs.frozen
class StopConditions:
    """Conditions that end the output."""

    max_tokens: Annotated[int, Range(1)] | None = None
    stop: tuple[Annotated[str, Length(1)], ...] | None = None
    stop_token_ids: Tokens | None = None
    stop_token_ids_visible: Tokens | None = None
    stop_token_ids_hidden: Tokens | None = None
    min_tokens: Annotated[int, Range(0)] | None = None
    ignore_eos: bool | None = None
    max_thinking_tokens: Annotated[int, Range(0)] | None = None


@attrs.frozen
class OutputOptions:
    """Output beside the tokens."""

    logprobs: Annotated[int, Range(0)] | None = None
    prompt_logprobs: Annotated[int, Range(0)] | None = None
    skip_special_tokens: bool | None = None
    formatted_prompt: bool | None = None
    return_tokens_as_token_ids: bool | None = None


@attrs.frozen
class Routing:
    """The router's decision, and the hints that an agent gave with its request."""

    dp_rank: int | None = None
    priority: int | None = None
    priority_jump: float | None = None
    strict_priority: int | None = None
    """The router's own tier of waiting requests; workers ignore it."""
    expected_output_tokens: int | None = None
    backend_instance_id: int | None = None


@attrs.frozen
class RouterParams:
    """Latency targets of `nvext.router`, in ms."""

    ttft_target: Annotated[float, Range(0)] | None = None
    """Time to first token."""
    itl_target: Annotated[float, Range(0)] | None = None
    """Time between tokens."""


@attrs.frozen(kw_only=True)
class PreprocessedRequest:
    """A request whose chat template was rendered, and whose prompt was tokenized, by the frontend."""

    token_ids: Annotated[Tokens, Length(1, None, "tokens")]
    sampling_options: SamplingOptions
    stop_conditions: StopConditions
    output_options: OutputOptions = OutputOptions()
    model: str = ""
    eos_token_ids: Tokens | None = None
    mdc_sum: str | None = None
    annotations: tuple[str, ...] | None = None
    router_config_override: AnyJson | None = None
    routing: Routing | None = None
    router: RouterParams | None = None
    extra_args: AnyJson | None = None
    prefill_result: AnyJson | None = None
    """Prefill of the prompt by another worker."""
    bootstrap_info: AnyJson | None = None
    """Source of the prompt's KV cells."""
    encoder_result: AnyJson | None = None
    """Encoded media from another worker."""
    multi_modal_data: AnyJson | None = None
    mm_processor_kwargs: AnyJson | None = None
    prompt_embeds: str | None = None
    """The prompt as embeddings instead of tokens."""


def parse_request(
    value: Any,
    *,
    n_vocab: int,
    max_stop_sequences: int,
    strict: bool = True,
    also: Rule[PreprocessedRequest] | None = None,
) -> PreprocessedRequest:
    """Parse a frontend's request. Raises `BadRequest` with a line for each wrong field.

    Checked beyond types and ranges: tokens are in the vocabulary, stop strings within the backend's limit, and fields
    consistent with each other. `also` has further rules of the backend.
    """
    if isinstance(value, Mapping) and HEALTH_CHECK_KEY in value:
        value = {name: member for name, member in value.items() if name != HEALTH_CHECK_KEY}

    def rules(request: PreprocessedRequest) -> Iterator[str]:
        return chain(_problems(request, n_vocab, max_stop_sequences), () if also is None else also(request))

    return parse(value, PreprocessedRequest, rules, strict=strict)


def is_health_check(value: Mapping[str, Any]) -> bool:
    """Whether a request is a frontend's probe."""
    return value.get(HEALTH_CHECK_KEY) is True


def _problems(request: PreprocessedRequest, n_vocab: int, max_stop_sequences: int) -> Iterator[str]:
    if (largest := max(request.token_ids)) >= n_vocab:
        index = request.token_ids.index(largest)
        yield f"token_ids[{index}]: {largest} is not in the vocabulary of {n_vocab:,} tokens"
    stop, sampling = request.stop_conditions, request.sampling_options
    if stop.stop is not None and len(stop.stop) > max_stop_sequences:
        yield f"stop_conditions.stop: {len(stop.stop)} strings are over the limit of {max_stop_sequences}"
    if stop.min_tokens is not None and stop.max_tokens is not None and stop.min_tokens > stop.max_tokens:
        yield f"stop_conditions.min_tokens: {stop.min_tokens} must not be over max_tokens, {stop.max_tokens}"
    if sampling.best_of is not None and sampling.best_of < (sampling.n or 1):
        yield f"sampling_options.best_of: {sampling.best_of} must not be under n, {sampling.n or 1}"
    if (guided := sampling.guided_decoding) is not None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(guided, name) is not None]
        if len(given) > 1:
            yield f"sampling_options.guided_decoding: give one of json, regex, choice, grammar; these came: {given}"
