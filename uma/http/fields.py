"""Fields that all dialects share, and how they become sampling parameters, bounds of tokens and urgency."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import attrs

from uma.constraints import Length, Range, Text
from uma.errors import BadRequest
from uma.http import abilities
from uma.http.exchange import Exchange
from uma.http.gateway import Gateway
from uma.http.problem import Unsupported
from uma.net.quota import Lane
from uma.types import (
    MAX_SEED,
    AdapterScale,
    Pace,
    Penalty,
    RepetitionPenalty,
    SamplingParams,
    Share,
    Slo,
    TopK,
    Truncation,
)

T = TypeVar("T")

DRAWN: Mapping[str, float] = MappingProxyType({"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05})
"""Figures with which tokens are drawn where nothing else says how: llama-server's."""

MAX_MESSAGES = 16_384
"""Maximum messages of one body: each takes time of its own to be checked and rendered, however short it is."""

Seed = Annotated[int, Range(-(2**63), 2**63 - 1)]
"""Seed as OpenAI's documents have it. The engine's have 32 bits: the others are taken modulo 2^32."""

MAX_WINDOW = 65_536
"""Maximum tokens that a penalty looks back over."""

_TTFT, _TBT = "x-uma-target-ttft-ms", "x-uma-target-tbt-ms"
_ABOUT_STREAMS = (_TTFT, _TBT, "x-uma-pace")
"""Headers."""
_LANES: Mapping[str | None, Lane] = {None: 0, "-1": -1, "0": 0, "1": 1}
_PACES: Mapping[str | None, Pace] = {None: "auto", "auto": "auto", "off": "off"}

MaxTokens = Annotated[int, Range(1)] | Literal[-1] | None
"""A bound of tokens; -1 is none."""
Stop = str | Annotated[tuple[Annotated[str, Length(1, 1024)], ...], Length(0, 16, "strings")] | None


@attrs.frozen(kw_only=True)
class Common:
    """UMA's own fields, in every dialect: scheduling, and the sampling parameters under UMA's names."""

    priority: Lane | None = None
    slo: Slo | None = None
    pace: Pace | None = None
    cache_prompt: bool | None = None
    lora: Annotated[tuple[AdapterScale, ...], Length(0, 64, "adapters")] | None = None
    truncation: Truncation | Literal["disabled"] | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Seed | None = None
    reproducible: bool | None = None
    stop: Stop = None
    min_tokens: Annotated[int, Range(0)] | None = None
    ignore_eos: bool | None = None
    penalty_window: Annotated[int, Range(0, MAX_WINDOW)] | None = None
    penalize_prompt: bool | None = None
    typical_p: Annotated[float, Range(gt=0, le=1)] | None = None
    top_n_sigma: Annotated[float, Range(-1)] | None = None
    """Up to 0 it is off, as llama-server has it."""
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Range(0, 0.5)] | None = None
    dynatemp_range: Annotated[float, Range(0, 2)] | None = None
    dynatemp_exponent: Annotated[float, Range(gt=0, le=10)] | None = None
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: Annotated[float, Range(gt=0)] | None = None
    mirostat_eta: Annotated[float, Range(gt=0, le=1)] | None = None
    dry_multiplier: Annotated[float, Range(0, 100)] | None = None
    dry_base: Annotated[float, Range(1, 10)] | None = None
    dry_allowed_length: Annotated[int, Range(1, 65_536)] | None = None
    dry_window: Annotated[int, Range(0, MAX_WINDOW)] | None = None
    max_reasoning_tokens: Annotated[int, Range(0)] | None = None
    dry_sequence_breakers: Annotated[tuple[Annotated[str, Length(1), Text()], ...], Length(0, 64, "strings")] | None = (
        None
    )


_SHARED = [name for name in (field.name for field in attrs.fields(Common)) if name in attrs.fields_dict(SamplingParams)]


def sampling(gateway: Gateway, body: Common, defaults: Mapping[str, float], own: Mapping[str, Any]) -> SamplingParams:
    """The parameters of `body`: its own fields, and in `own` those of other names; None stands for the default.

    `defaults` are the dialect's; where the operator or the model's file has a figure, that one counts. Raises
    `Unsupported` for what the source cannot do and `BadRequest` for what does not go together.
    """
    given = {name: getattr(body, name) for name in _SHARED} | dict(own)
    if body.top_n_sigma is not None and body.top_n_sigma <= 0:
        given["top_n_sigma"] = None
    wanted = {name: value for name, value in given.items() if value is not None}
    if "seed" in wanted:
        wanted["seed"] %= MAX_SEED + 1
    able = gateway.info.capabilities
    abilities.generation(able)
    for name in wanted:
        if name not in able.sampling_params:
            raise Unsupported.at(name, "this server cannot do that; leave it out")
    return SamplingParams(**{**_defaults(gateway, defaults), **wanted})


def all_tokens(gateway: Gateway, http: Exchange, answers: int = 1) -> int:
    """What -1 asks for: as many tokens as the server and the key let each of so many answers have, at most all of the
    context.
    """
    most = gateway.info.limits.max_tokens
    bound = None if http.account is None else http.account.bounds.max_tokens
    return most if bound is None else min(most, max(1, bound // answers))


def allowed_tokens(gateway: Gateway, asked: int | None, name: str) -> int | None:
    """The tokens that the field `name` asks for. Raises `BadRequest` where they are over the server's `--max-tokens`.

    More than the context holds is no error, since it depends on the prompt: such an answer ends where the context does.
    """
    limits = gateway.info.limits
    if asked is not None and limits.has_max_tokens and asked > limits.max_tokens:
        raise BadRequest.at(name, f"{asked:,} is over this server's limit of {limits.max_tokens:,} (--max-tokens)")
    return asked


def context_window(gateway: Gateway) -> int:
    """Tokens of the context that a penalty can look back over."""
    return min(gateway.info.limits.n_ctx, MAX_WINDOW)


def of_output(gateway: Gateway, body: Common) -> dict[str, Any]:
    """Sampling of dialects whose penalties count what has been generated, all of it, and not the prompt."""
    if "penalize_prompt" not in gateway.info.capabilities.sampling_params:  # a server of before
        return {}
    windows = (body.penalty_window, gateway.info.capabilities.suggested_sampling.get("penalty_window"))
    window = next((each for each in windows if each is not None), context_window(gateway))
    return {"penalize_prompt": body.penalize_prompt or False, "penalty_window": window}


def _defaults(gateway: Gateway, dialect: Mapping[str, float]) -> dict[str, float]:
    able = gateway.info.capabilities
    known = {name: value for name, value in dialect.items() if name in able.sampling_params}
    return {**known, **able.suggested_sampling, **gateway.config.chosen_sampling}


def urgency(body: Common, http: Exchange) -> dict[str, Any]:
    """The fields of a `Request` by which it is scheduled, paced and cached: from the body, else the headers, else the
    defaults.

    Raises `BadRequest` where a header is no number in its range, or no word.
    """
    asked = body.slo or Slo()
    slo = Slo(asked.target_ttft_ms or _header_ms(http, _TTFT), asked.target_tbt_ms or _header_ms(http, _TBT))
    pace = body.pace or _header_word(http, "X-UMA-Pace", _PACES)
    return {
        "priority": lane(body.priority, http),
        "slo": slo,
        "pace": pace,
        "cache_prompt": body.cache_prompt is not False,
        "truncation": "off" if body.truncation in (None, "disabled") else body.truncation,
    }


def lane(priority: Lane | None, http: Exchange) -> Lane:
    """The lane that the body asks for, else the header, else the normal one. Raises `BadRequest` as `urgency` does."""
    http.has_priority = priority is not None or http.header(b"x-uma-priority") is not None
    return _header_word(http, "X-UMA-Priority", _LANES) if priority is None else priority


def lane_alone(priority: Lane | None, http: Exchange) -> Lane:
    """Lane of what does not stream. Adds the headers about streams to the ignored fields."""
    http.ignored.add_all(name for name in _ABOUT_STREAMS if http.header(name.encode()) is not None)
    return lane(priority, http)


def _header_word(http: Exchange, name: str, words: Mapping[str | None, T]) -> T:
    text = http.header(name.lower().encode())
    if text not in words:
        raise BadRequest(f"{name}: expected one of {', '.join(filter(None, words))}, not {text!r}")
    return words[text]


def _header_ms(http: Exchange, name: str) -> float | None:
    text = http.header(name.encode())
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise BadRequest(f"{name}: expected milliseconds over 0, not {text!r}")
    return value
