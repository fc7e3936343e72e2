"""Translates Dynamo's requests to UMA's, and UMA's events to Dynamo's chunks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs

from uma.bridges.pieces import TokenFollower
from uma.contracts.request import (
    GuidedDecoding,
    PreprocessedRequest,
    RouterParams,
    parse_request,
)
from uma.contracts.response import (
    BackendOutput,
    CompletionUsage,
    OutputChecker,
    OutputFinishReason,
    PromptTokensDetails,
    TopLogprob,
)
from uma.errors import WrongValues
from uma.protocol.converter import unknown_fields, unstructure
from uma.types import MAX_SEED, Finished, Grammar, Logprobs, Prompt, Request, SamplingParams, ServerInfo, Slo, Token
from uma.wrong import Wrong, renamed

NOT_HERE = "is not available in this worker; leave it out"

NO_ECHO = (
    "output_options.prompt_logprobs: echo is not available in this worker; for prompt log probabilities, name "
    "engine_data in nvext.extra_fields"
)
"""Refusal of `echo`: the frontend sends it as `prompt_logprobs` and nothing else, and would answer without the
prompt."""
MIN_TARGET_MS = 1.0
"""Minimum latency target: the engine does not accept 0."""
OWN_ANNOTATION = "uma."
"""Prefix of annotations (`nvext.annotations`) that are meant for this worker. Annotations are the only client-defined
field that Dynamo 1.6's KV router passes on unchanged."""

_TARGET = re.compile(r"uma\.(target_ttft_ms|target_tbt_ms):(\d{1,9}(?:\.\d{1,9})?)")

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


@attrs.frozen
class MappedRequest:
    """A request for the engine, and what is needed to check its answer."""

    request: Request
    prompt_tokens: int
    """Prompt tokens as the frontend counts them."""
    added_tokens: int
    """Number of tokens that the worker puts before the prompt: the beginning of text."""
    ignored: tuple[str, ...]
    """Fields that the contract does not have."""


def asked(fields: Mapping[str, Any], info: ServerInfo, id: str, bos: int | None) -> MappedRequest:
    """The engine's request for a frontend's `fields`. Raises `BadRequest` with a line for each wrong field.

    `bos` is put before tokens that do not begin with it, because the frontend adds none. Absent fields have the
    engine's defaults.
    """
    wanted = parse_request(
        fields,
        n_vocab=info.model.vocab_size,
        max_stop_sequences=info.capabilities.max_stop_sequences,
        strict=False,
        also=_problems,
    )
    adds = bos is not None and wanted.token_ids[0] != bos
    request = Request(
        id=id,
        token_ids=(bos, *wanted.token_ids) if adds and bos is not None else wanted.token_ids,
        sampling=attrs.evolve(_figures(wanted), grammar=_grammar(wanted)),
        priority=_lane(wanted),
        slo=_slo(wanted),
    )
    ignored = tuple(unknown_fields(dict(fields), PreprocessedRequest))
    return MappedRequest(request, len(wanted.token_ids), int(adds), ignored)


def end_without_tokens(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The only chunk of a migrated request that has no tokens left to generate; None where some are left.

    The frontend subtracts the tokens that it has received from `max_tokens`, and a worker can die between its last
    token and the end that follows. The frontend itself refuses a client's `max_tokens` of 0.
    """
    stop = fields.get("stop_conditions")
    left = stop.get("max_tokens") if isinstance(stop, Mapping) else None
    prompt = fields.get("token_ids")
    if type(left) is int and left == 0 and isinstance(prompt, list):
        usage = CompletionUsage(len(prompt), 0, len(prompt))
        return chunk_of(BackendOutput((), finish_reason="length", completion_usage=usage))
    return None


def _problems(wanted: PreprocessedRequest) -> Iterator[str]:
    """Lines about fields that are valid in the contract, but unsupported by this engine."""
    unavailable = _unavailable(wanted)
    yield from (f"{path}: {NOT_HERE}" for path in unavailable)
    if wanted.output_options.prompt_logprobs is not None and "engine_data" not in _extra_fields(wanted):
        yield NO_ECHO
    guided = wanted.sampling_options.guided_decoding
    if guided is not None and isinstance(guided.json, str):
        yield "sampling_options.guided_decoding.json: expected an object, not its text"
    for annotation in _own_annotations(wanted):
        if not _TARGET.fullmatch(annotation):
            yield f"annotations: {annotation[:60]!r} must be uma.target_ttft_ms:N or uma.target_tbt_ms:N, with N in ms"
    # Some bounds of the engine are narrower than the contract's.
    for make in (_grammar, _figures):
        try:
            make(wanted)
        except WrongValues as error:
            lines = renamed(error.lines, PLACES)
            yield from (line for line in lines if not (isinstance(line, Wrong) and line.field in unavailable))


def _extra_fields(wanted: PreprocessedRequest) -> Sequence[Any]:
    """Fields of `nvext` that the client wants in the answer."""
    nvext = (wanted.extra_args or {}).get("nvext")
    named = nvext.get("extra_fields") if isinstance(nvext, dict) else None
    return named if isinstance(named, list) else ()


def _unavailable(wanted: PreprocessedRequest) -> list[str]:
    sampling, stop, output = wanted.sampling_options, wanted.stop_conditions, wanted.output_options
    guided, ends = sampling.guided_decoding or GuidedDecoding(), set(wanted.eos_token_ids or ())
    refused = {
        "sampling_options.n": (sampling.n or 1) > 1,
        "sampling_options.best_of": (sampling.best_of or 1) > 1,
        "sampling_options.use_beam_search": bool(sampling.use_beam_search),
        "sampling_options.length_penalty": sampling.length_penalty not in (None, 0, 1),
        "sampling_options.include_stop_str_in_output": bool(sampling.include_stop_str_in_output),
        "sampling_options.guided_decoding.structural_tag": guided.structural_tag is not None,
        "sampling_options.guided_decoding.whitespace_pattern": guided.whitespace_pattern is not None,
        "stop_conditions.stop_token_ids": not ends.issuperset(stop.stop_token_ids or ()),
        "stop_conditions.stop_token_ids_visible": not ends.issuperset(stop.stop_token_ids_visible or ()),
        "stop_conditions.stop_token_ids_hidden": not ends.issuperset(stop.stop_token_ids_hidden or ()),
        "output_options.skip_special_tokens": output.skip_special_tokens is False,
        "output_options.formatted_prompt": bool(output.formatted_prompt),
        "output_options.return_tokens_as_token_ids": bool(output.return_tokens_as_token_ids),
    }
    refused |= {name: getattr(wanted, name) is not None for name in _NOT_TOKENS}
    return [path for path, is_asked in refused.items() if is_asked]


_NOT_TOKENS = (
    "prefill_result", "bootstrap_info", "encoder_result", "multi_modal_data", "mm_processor_kwargs", "prompt_embeds",
)  # fmt: skip
"""Fields of prompts that are more than tokens: with media, or prefilled elsewhere."""


_GUIDED = {"regex": "regex", "choice": "choice", "json_schema": "json", "gbnf": "grammar"}
"""The frontend's name for each form of a grammar."""
PLACES = {
    **{name: f"sampling_options.{name}" for name in (*_SAME_NAME, "seed")},
    **{name: f"stop_conditions.{name}" for name in ("max_tokens", "min_tokens", "ignore_eos", "stop")},
    "max_reasoning_tokens": "stop_conditions.max_thinking_tokens",
    **{name: f"output_options.{name}" for name in ("logprobs", "prompt_logprobs")},
    "grammar": "sampling_options.guided_decoding",
    **{f"grammar.{name}": f"sampling_options.guided_decoding.{own}" for name, own in _GUIDED.items()},
    **{name: f"sampling_options.guided_decoding.{own}" for name, own in _GUIDED.items()},
}
"""Path in a frontend's request for each field of `SamplingParams`."""


def _figures(wanted: PreprocessedRequest) -> SamplingParams:
    """Sampling parameters, without the grammar. Raises `ValueError` with a line for each field that the engine does not
    accept.
    """
    options, stop = wanted.sampling_options, wanted.stop_conditions
    given: dict[str, Any] = {name: getattr(options, name) for name in _SAME_NAME}
    given |= {
        "max_tokens": stop.max_tokens,
        "min_tokens": stop.min_tokens,
        "ignore_eos": stop.ignore_eos,
        "stop": stop.stop,
        "max_reasoning_tokens": stop.max_thinking_tokens,
        # OpenAI's seeds are signed 64-bit numbers; the engine's have 32 bits.
        "seed": None if options.seed is None else options.seed % (MAX_SEED + 1),
        "logprobs": wanted.output_options.logprobs,
        "prompt_logprobs": wanted.output_options.prompt_logprobs,
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _grammar(wanted: PreprocessedRequest) -> Grammar | None:
    """The grammar. Raises `ValueError` as `_figures` does."""
    guided = wanted.sampling_options.guided_decoding
    if guided is None:
        return None
    if isinstance(guided.json, dict):
        return Grammar(json_schema=guided.json)
    if guided.regex is not None:
        return Grammar(regex=guided.regex)
    if guided.choice is not None:
        return Grammar(choice=guided.choice)
    return Grammar(gbnf=guided.grammar) if guided.grammar is not None else None


def _slo(wanted: PreprocessedRequest) -> Slo:
    """Latency targets of `nvext.router` and of UMA's annotations, which take precedence. 0 asks for the lowest possible
    latency.
    """
    router = wanted.router or RouterParams()
    targets = {"target_ttft_ms": router.ttft_target, "target_tbt_ms": router.itl_target}
    for target in filter(None, map(_TARGET.fullmatch, _own_annotations(wanted))):
        targets[target[1]] = float(target[2])
    return Slo(**{name: max(MIN_TARGET_MS, value) for name, value in targets.items() if value is not None})


def _own_annotations(wanted: PreprocessedRequest) -> list[str]:
    """Annotations that name this worker; all others are for the frontend."""
    return [annotation for annotation in wanted.annotations or () if annotation.startswith(OWN_ANNOTATION)]


def _lane(wanted: PreprocessedRequest) -> Literal[-1, 0, 1]:
    """Lane by `priority` in `nvext.agent_hints`, else by `latency_sensitivity`, which arrives as `priority_jump`."""
    routing = wanted.routing
    hint = (routing.priority or routing.priority_jump or 0) if routing is not None else 0
    if not hint:
        return 0
    return 1 if hint > 0 else -1


_REASONS: dict[str, OutputFinishReason] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "cancelled",
    "error": "error",
}


@attrs.define
class Chunks:
    """Chunks of one answer, each checked against the contract before it is sent.

    A token's id is sent only together with its whole text. If the worker dies, the frontend sends the ids that it has
    to another worker as a prompt, and text that this one still held would be lost.
    """

    asked: MappedRequest
    _checker: OutputChecker
    _follower: TokenFollower = attrs.field(factory=TokenFollower, init=False)
    _incomplete: list[Token] = attrs.field(factory=list, init=False)
    """Tokens part of whose text the engine still holds."""
    _prompt: Prompt | None = attrs.field(default=None, init=False)

    def of(self, events: Sequence[Prompt | Token | Finished]) -> list[dict[str, Any]]:
        """Chunks for events that came together: all tokens with complete text in one. Raises `ContractViolation`."""
        tokens: list[Token] = []
        chunks: list[BackendOutput] = []
        for event in events:
            if isinstance(event, Prompt):
                self._prompt = event
                continue
            if isinstance(event, Token):
                for cleaned in self._follower.take(event):
                    self._incomplete.append(cleaned)
                    if not cleaned.holds:
                        tokens += self._incomplete
                        self._incomplete.clear()
                continue
            token, rest = self._follower.finish(event.usage.completion_tokens)
            tokens += self._incomplete if token is None else [*self._incomplete, token]
            self._incomplete.clear()
            if tokens:
                chunks.append(_output(tokens))
                tokens = []
            chunks.append(self._last(event, rest))
        if tokens:
            chunks.append(_output(tokens))
        return [chunk_of(self._checker.check(chunk)) for chunk in chunks]

    def _last(self, event: Finished, rest: str) -> BackendOutput:
        usage, asked = event.usage, self.asked
        return BackendOutput(
            (),
            text=rest or None,
            finish_reason=_REASONS[event.reason],
            completion_usage=CompletionUsage(
                usage.prompt_tokens - asked.added_tokens,
                usage.completion_tokens,
                usage.prompt_tokens - asked.added_tokens + usage.completion_tokens,
                PromptTokensDetails(max(0, usage.cached_tokens - asked.added_tokens)),
            ),
            engine_data={"uma": attrs.asdict(event.metrics) | {"warnings": list(event.warnings)}}
            | self._prompt_logprobs(),
        )

    def _prompt_logprobs(self) -> dict[str, Any]:
        """Log probabilities of the frontend's prompt tokens in Dynamo's form: by position and token id."""
        positions = None if self._prompt is None else self._prompt.logprobs
        if positions is None:
            return {}
        return {
            "prompt_logprobs": [position and _position(position) for position in positions[self.asked.added_tokens :]]
        }


def chunks_for(asked: MappedRequest, info: ServerInfo) -> Chunks:
    """`Chunks` for one answer."""
    return Chunks(asked, OutputChecker(info.model.vocab_size, asked.prompt_tokens))


def _output(tokens: Sequence[Token]) -> BackendOutput:
    with_logprobs = [token.logprobs for token in tokens if token.logprobs is not None]
    has_logprobs = len(with_logprobs) == len(tokens)
    return BackendOutput(
        tuple(token.token_id for token in tokens),
        text="".join(token.text for token in tokens),
        tokens=tuple(token.chosen.text for token in with_logprobs) if has_logprobs else None,
        log_probs=tuple(min(0.0, token.chosen.logprob) for token in with_logprobs) if has_logprobs else None,
        top_logprobs=tuple(map(_top, with_logprobs)) if has_logprobs else None,
    )


def _position(found: Logprobs) -> dict[str, Any]:
    return {
        str(token.token_id): {"logprob": min(0.0, token.logprob), "rank": token.rank, "decoded_token": token.text}
        for token in (*found.top, found.chosen)
    }


def _top(found: Logprobs) -> tuple[TopLogprob, ...]:
    return tuple(TopLogprob(token.rank, token.token_id, token.text, min(0.0, token.logprob)) for token in found.top)


def chunk_of(output: BackendOutput) -> dict[str, Any]:
    """A checked output as a chunk for Dynamo."""
    chunk = {"index": 0, **unstructure(output), "token_ids": list(output.token_ids)}
    for name in ("tokens", "log_probs"):
        if name in chunk:
            chunk[name] = list(chunk[name])
    if output.top_logprobs is not None:
        chunk["top_logprobs"] = [[attrs.asdict(token) for token in position] for position in output.top_logprobs]
    return chunk
