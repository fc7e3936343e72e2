"""The words of the project: what is asked, what comes back, and the one interface between those who ask and who answer.

Everything here is frozen data without behaviour beyond checking itself. Times are milliseconds, sizes are bytes or
tokens, and each name says which.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import IntEnum
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import attrs

from uma.constraints import Json, Length, Range, Text, Values, check

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
HealthStatus = Literal["ok", "loading", "draining", "stalled"]

MAX_SEED = 2**32 - 1
ReasoningMode = Literal["auto", "off"]
Pace = Literal["auto", "off"]
"""Whether tokens computed ahead are handed out evenly."""
MAX_LOGPROBS = 20
MAX_ANSWERS = 128


def _tuple_or_none(items: Iterable[Any] | None) -> tuple[Any, ...] | None:
    return None if items is None else tuple(items)


@attrs.frozen
class ToolCall:
    """One call of a tool, as a model made it."""

    id: Annotated[str, Length(1, 128), Text()]
    name: Annotated[str, Length(1, 128), Text()]
    arguments: Annotated[str, Text()]
    """A JSON object, as the model wrote it."""

    def __attrs_post_init__(self) -> None:
        check(self)


@attrs.frozen
class Message:
    """One turn of a conversation, for the model's chat template."""

    role: Annotated[str, Length(1, 64), Text()]
    content: Annotated[str, Text()]
    tool_calls: Annotated[tuple[ToolCall, ...], Length(0, 128, "calls")] = attrs.field(
        default=(), converter=_tuple_or_none
    )
    """The calls that the assistant made in this turn."""
    tool_call_id: Annotated[str, Length(1, 128), Text()] | None = None
    """Of which call a message of role `tool` is the result."""
    name: Annotated[str, Length(1, 128), Text()] | None = None
    """Which tool's result it is."""

    def __attrs_post_init__(self) -> None:
        check(self)


@attrs.frozen
class Tool:
    """A function that the model can ask to have called."""

    name: Annotated[str, Length(1, 128), Text()]
    description: Annotated[str, Text()] = ""
    parameters: Annotated[dict[str, Any], Json(le=65_536)] | None = None
    """A JSON Schema of its arguments; None: it takes none."""

    def __attrs_post_init__(self) -> None:
        check(self)


def _strings(stop: str | Iterable[str] | None) -> Any:
    """`stop` as a tuple. What is neither text nor a list stays as it is, for `check` to refuse by name."""
    if stop is None or isinstance(stop, str):
        return () if stop is None else (stop,)
    return tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, bytes | Mapping) else stop


Temperature = Annotated[float, Range(0, 2)]
Share = Annotated[float, Range(0, 1)]
TopK = Annotated[int, Range(-1)]
RepetitionPenalty = Annotated[float, Range(gt=0, le=2)]
Penalty = Annotated[float, Range(-2, 2)]


@attrs.frozen
class SamplerSettings:
    """How the next token is chosen, every figure given. The defaults are greedy: no step changes anything."""

    temperature: Temperature = 0.0
    top_p: Share = 1.0
    top_k: TopK = 0
    min_p: Share = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is plain argmax over the logits, with no penalty to apply first."""
        return (
            self.temperature == 0
            and self.repetition_penalty == 1
            and self.frequency_penalty == 0
            and self.presence_penalty == 0
        )


SAMPLER_FIELDS = tuple(field.name for field in attrs.fields(SamplerSettings))
"""Fields of `SamplingParams` whose default is a setting of the engine (`RuntimeConfig` has one of each name)."""


GRAMMAR_FIELDS = ("json_schema", "json_object", "regex", "choice", "lark", "gbnf")
"""A grammar gives exactly one of these."""


@attrs.frozen
class Grammar:
    """What the output must look like, in exactly one of these ways (`ValueError` otherwise).

    The output is complete where it ends by `stop`; where `max_tokens` cuts it, the request ends by `length`.
    """

    json_schema: Annotated[dict[str, Any], Json(le=65_536)] | None = None
    """A JSON Schema; the output is JSON that validates against it, without white space between its parts."""
    json_object: Literal[True] | None = None
    """`true`: any JSON object."""
    regex: Annotated[str, Length(1), Text()] | None = None
    """A regular expression, in the syntax of Rust's `regex`, that the whole output matches."""
    choice: Annotated[tuple[Annotated[str, Length(1), Text()], ...], Length(1, 10_000, "strings")] | None = attrs.field(
        default=None, converter=_tuple_or_none
    )
    """The output is one of these strings."""
    lark: Annotated[str, Length(1), Text()] | None = None
    """A context-free grammar in llguidance's form of Lark's notation."""
    gbnf: Annotated[str, Length(1), Text()] | None = None
    """A context-free grammar in llama.cpp's notation."""

    def __attrs_post_init__(self) -> None:
        check(self)
        given = [name for name in GRAMMAR_FIELDS if getattr(self, name) is not None]
        if len(given) != 1:
            came = "these came: " + ", ".join(given) if given else "none was given"
            raise ValueError(f"grammar: give exactly one of {', '.join(GRAMMAR_FIELDS)}; {came}")


def _bias_by_name(bias: Mapping[int | str, float] | None) -> dict[str, float] | None:
    return bias if bias is None else {str(token): value for token, value in bias.items()}


@attrs.frozen
class SamplingParams:
    """How the next token is chosen and when to stop. Ranges are checked on construction (`ValueError`).

    The steps run in the order of llama.cpp's default chain: logit bias, grammar, penalties, DRY, top-n-sigma, top-k,
    typical-p, top-p, min-p, XTC, temperature, draw. Mirostat takes the place of all between DRY and the draw but
    temperature. A step that is off at its default is left out. A figure that is None is the engine's setting of the
    same name, which is greedy unless it was set.
    """

    max_tokens: Annotated[int, Range(1)] | None = None
    """Most tokens to generate; None: the engine's limit."""
    min_tokens: Annotated[int, Range(0)] = 0
    """The end of text is not sampled before this many tokens. Stop strings still end the output."""
    temperature: Temperature | None = None
    """0 is greedy: always the likeliest token."""
    top_p: Share | None = None
    top_k: TopK | None = None
    """Keep the k likeliest tokens; 0 or -1: all."""
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Range(0, MAX_SEED)] | None = None
    """None: one is drawn, and told in `Finished.seed`."""
    stop: Annotated[tuple[Annotated[str, Length(1, 1024)], ...], Length(0, 16, "strings")] = attrs.field(
        default=(), converter=_strings
    )
    """Strings that end the output and are not part of it."""
    ignore_eos: bool = False
    """Go on to `max_tokens`, whatever the model would like."""
    grammar: Grammar | None = None
    """What the output must look like. Its end ends the output, before any stop string that comes with it."""
    logprobs: Annotated[int, Range(0, MAX_LOGPROBS)] | None = None
    """With each generated token its log probability and those of so many likeliest tokens. None: neither."""
    prompt_logprobs: Annotated[int, Range(0, MAX_LOGPROBS)] | None = None
    """The same for each prompt token but the first, told in the `Prompt` event. The whole prompt is computed for it."""
    logit_bias: Annotated[dict[str, float], Length(0, 1024, "tokens"), Values(Range(-100, 100))] | None = attrs.field(
        default=None, converter=_bias_by_name
    )
    """Added to tokens' logits. A key is a token id in decimal digits, or a text, each of whose tokens it counts for."""
    n: Annotated[int, Range(1, MAX_ANSWERS)] = 1
    """Answers to the one prompt, which is read once. Answer i is drawn with `seed` + i."""
    best_of: Annotated[int, Range(1, MAX_ANSWERS)] | None = None
    """Answers drawn, of which the `n` of highest mean log probability are given. Not with `stream`."""
    echo: bool = False
    """Tell the prompt's text and tokens in a `Prompt` event, before the first token."""
    penalty_window: Annotated[int, Range(0, 65_536)] = 64
    """Tokens of prompt and output that repetition, frequency and presence penalties look back over."""
    typical_p: Annotated[float, Range(gt=0, le=1)] = 1.0
    """Keep the tokens nearest to the expected information that make up this probability; 1: all."""
    top_n_sigma: Annotated[float, Range(gt=0)] | None = None
    """Keep the tokens within so many standard deviations of the highest logit; None: all."""
    xtc_probability: Annotated[float, Range(0, 1)] = 0.0
    """How often all but the least likely of the tokens over `xtc_threshold` are dropped; 0: never."""
    xtc_threshold: Annotated[float, Range(0, 0.5)] = 0.1
    dynatemp_range: Annotated[float, Range(0, 2)] = 0.0
    """The temperature moves by as much as this up and down with the distribution's entropy; 0: it is fixed."""
    dynatemp_exponent: Annotated[float, Range(gt=0, le=10)] = 1.0
    mirostat: Literal[0, 1, 2] = 0
    """The version of Mirostat that draws; 0: none."""
    mirostat_tau: Annotated[float, Range(gt=0)] = 5.0
    """The surprise that Mirostat aims at, in bits."""
    mirostat_eta: Annotated[float, Range(gt=0, le=1)] = 0.1
    """How fast Mirostat corrects itself."""
    dry_multiplier: Annotated[float, Range(0, 100)] = 0.0
    """How strongly tokens that would go on repeating a passage are penalised (DRY); 0: not."""
    dry_base: Annotated[float, Range(1, 10)] = 1.75
    """By what the penalty grows with each token of the passage."""
    dry_allowed_length: Annotated[int, Range(1, 65_536)] = 2
    """Passages up to this length are not penalised."""
    dry_window: Annotated[int, Range(0, 65_536)] = 4096
    """Tokens of prompt and output in which DRY looks for passages."""
    dry_sequence_breakers: Annotated[tuple[Annotated[str, Length(1), Text()], ...], Length(0, 64, "strings")] = (
        attrs.field(default=("\n", ":", '"', "*"), converter=_strings)
    )
    """Strings that end a passage."""

    def __attrs_post_init__(self) -> None:
        check(self)

    def over(self, defaults: SamplerSettings) -> SamplingParams:
        """The same, with the defaults filled in where nothing was asked for. `self` where that changes nothing."""
        missing = {
            name: value
            for name in SAMPLER_FIELDS
            if getattr(self, name) is None and (value := getattr(defaults, name)) != getattr(_NEUTRAL, name)
        }
        return attrs.evolve(self, **missing) if missing else self

    @property
    def settled(self) -> SamplerSettings:
        """The figures for the sampler; what is None changes nothing."""
        given = {name: value for name in SAMPLER_FIELDS if (value := getattr(self, name)) is not None}
        return SamplerSettings(**given)

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is plain argmax over the logits, with no penalty to apply first."""
        return self.settled.is_greedy and self.dry_multiplier == 0


_NEUTRAL = SamplerSettings()


@attrs.frozen
class Slo:
    """What the asker hopes for; None: the engine's own target."""

    target_ttft_ms: Annotated[float, Range(gt=0)] | None = None
    """Time to first token."""
    target_tbt_ms: Annotated[float, Range(gt=0)] | None = None
    """Time between tokens. Where they come faster, several are handed over together, two fifths of it late at most."""

    def __attrs_post_init__(self) -> None:
        check(self)


class Priority(IntEnum):
    """Lanes: an interactive request goes before a normal one, a background one waits for both."""

    BACKGROUND = -1
    NORMAL = 0
    INTERACTIVE = 1


PROMPT_FIELDS = ("prompt", "messages", "token_ids")
"""A request gives exactly one of these."""


def prompt_problem(given: Sequence[str]) -> str | None:
    """What is wrong with a request that gives these of `PROMPT_FIELDS`, or None."""
    if len(given) == 1:
        return None
    came = "these came: " + ", ".join(given) if given else "none was given"
    return f"prompt: give exactly one of prompt, messages, token_ids; {came}"


@attrs.frozen
class Request:
    """One generation asked for. Exactly one of `prompt`, `messages`, `token_ids` is given (`ValueError` otherwise).

    `prompt` is taken as it stands (BOS is added where the model wants one); `messages` go through the model's chat
    template; `token_ids` are taken literally.
    """

    id: Annotated[str, Length(1, 128)]
    prompt: Annotated[str, Text()] | None = None
    messages: Annotated[tuple[Message, ...], Length(1, None, "messages")] | None = attrs.field(
        default=None, converter=_tuple_or_none
    )
    token_ids: Annotated[tuple[Annotated[int, Range(0)], ...], Length(1, None, "tokens")] | None = attrs.field(
        default=None, converter=_tuple_or_none
    )
    sampling: SamplingParams = SamplingParams()
    stream: bool = True
    """False: no `Token` events; `Finished` carries the whole text."""
    priority: Literal[-1, 0, 1] = 0
    slo: Slo = Slo()
    pace: Pace = "auto"
    """`auto`: while other prompts are read, tokens computed ahead are given evenly, `target_tbt_ms` apart at most.
    `off`: each as soon as it is computed."""
    tools: Annotated[tuple[Tool, ...], Length(0, 128, "tools")] = attrs.field(default=(), converter=_tuple_or_none)
    """What the model can ask to have called; with `messages` only. Its calls are told apart from the text."""
    tool_choice: Annotated[str, Length(1, 128), Text()] = "auto"
    """`auto`, `none`, `required`, or the name of the one tool that must be called. A grammar holds the model to it, and
    arguments to the tool's schema."""
    parallel_tool_calls: bool = True
    """False: the output ends with its first call."""
    reasoning: ReasoningMode | None = None
    """`auto`: what stands between the template's thinking marks is told apart from the text. `off`: the same, and the
    template is asked for no thinking, where it has a switch for that. None: thinking stays in the text."""
    metadata: Annotated[dict[str, Any], Json()] | None = None
    """Echoed in every event of the request on the wire."""

    def __attrs_post_init__(self) -> None:
        if problem := prompt_problem([name for name in PROMPT_FIELDS if getattr(self, name) is not None]):
            raise ValueError(problem)
        check(self)


MAX_TEXTS = 2048
"""Most texts or documents of one request."""


def _token_lists(lists: Iterable[Iterable[int]] | None) -> Any:
    return None if lists is None else tuple(tuple(each) if isinstance(each, list) else each for each in lists)


@attrs.frozen
class EmbedRequest:
    """Embeddings asked for. Exactly one of `texts` and `token_ids` is given (`ValueError` otherwise).

    Each text stands alone. One that does not fit the context refuses the whole request: none is ever cut.
    """

    id: Annotated[str, Length(1, 128)]
    texts: Annotated[tuple[Annotated[str, Text()], ...], Length(1, MAX_TEXTS, "texts")] | None = attrs.field(
        default=None, converter=_tuple_or_none
    )
    token_ids: (
        Annotated[
            tuple[Annotated[tuple[Annotated[int, Range(0)], ...], Length(1, None, "tokens")], ...],
            Length(1, MAX_TEXTS, "texts"),
        ]
        | None
    ) = attrs.field(default=None, converter=_token_lists)
    """Texts as token ids, taken literally."""
    dimensions: Annotated[int, Range(1)] | None = None
    """Keep the first so many figures of each embedding; None: all. What is kept is normalised after the cut."""
    normalize: bool = True
    """Scale each embedding to length 1."""
    priority: Literal[-1, 0, 1] = 0
    metadata: Annotated[dict[str, Any], Json()] | None = None
    """Echoed in every event of the request on the wire."""

    def __attrs_post_init__(self) -> None:
        if (self.texts is None) == (self.token_ids is None):
            raise ValueError("texts: give exactly one of texts and token_ids")
        check(self)


@attrs.frozen
class Embeddings:
    """The answer to an `EmbedRequest`: one embedding for each text, in their order."""

    id: str
    vectors: tuple[array[float], ...]
    """Each of 32-bit floats (`array("f")`)."""
    prompt_tokens: tuple[int, ...]
    """Tokens of each text."""


@attrs.frozen
class RerankRequest:
    """Documents to be ordered by how well each answers a query. It needs a model that was trained for that."""

    id: Annotated[str, Length(1, 128)]
    query: Annotated[str, Length(1), Text()]
    documents: Annotated[tuple[Annotated[str, Text()], ...], Length(1, MAX_TEXTS, "documents")] = attrs.field(
        converter=_tuple_or_none
    )
    top_n: Annotated[int, Range(1)] | None = None
    """Tell only so many, the best ones; None: all."""
    priority: Literal[-1, 0, 1] = 0
    metadata: Annotated[dict[str, Any], Json()] | None = None
    """Echoed in every event of the request on the wire."""

    def __attrs_post_init__(self) -> None:
        check(self)


@attrs.frozen
class Ranked:
    """A document's place in a ranking."""

    index: int
    """Of the document in the request."""
    score: float
    """What the model's classifier gave for it: higher is better; which range it has depends on the model."""


@attrs.frozen
class Ranking:
    """The answer to a `RerankRequest`."""

    id: str
    results: tuple[Ranked, ...]
    """The best first; of equal scores, the earlier document."""
    prompt_tokens: int
    """Tokens of all pairs of query and document."""


@attrs.frozen
class Usage:
    """Tokens counted. `cached_tokens` is the part of `prompt_tokens` that did not have to be computed."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@attrs.frozen
class Speculation:
    """What drafts were worth for a request. Its tokens are those that it would have been given without."""

    drafted: int = 0
    """Tokens that were guessed and verified."""
    accepted: int = 0
    """Those of them that the model's own sampler agreed to."""
    saved_ms: float = 0.0
    """Expected time of the same tokens one by one, less the time that was taken; negative where it took longer."""


@attrs.frozen
class RequestMetrics:
    """How one request was served."""

    queue_ms: float
    """From arrival to the first tick that computed something for it."""
    prefill_ms: float
    """From there to the first token."""
    decode_ms: float
    """From the first token to the last."""
    ttft_ms: float
    """From arrival to the first token; 0 where there was none."""
    batch_size: int
    """Most sequences it shared one batch with, itself included."""
    tokens_per_second: float
    """Completion tokens after the first, over `decode_ms`."""
    decode_iterations: int
    """Batches that computed one of its tokens, prefill chunks included."""
    qoe: float = 1.0
    """Quality of experience from 0 to 1, as Andes (arXiv 2404.16283) defines it: 1 where the reader, at the pace of
    `target_tbt_ms` from `target_ttft_ms` on, never waited for a token."""
    speculation: Speculation | None = None
    """Where tokens were drafted."""


@attrs.frozen
class TokenLogprob:
    """A token, and how likely the model found it at its place."""

    token_id: int
    text: str
    """The token alone, special ones by their spelling; a part of a character is U+FFFD."""
    bytes: tuple[int, ...]
    """The token's bytes, also where it holds only a part of a character."""
    logprob: float
    """Natural logarithm of its probability at temperature 1, before bias, grammar, penalty or cut; -9999 or more."""
    rank: int
    """1 for the likeliest token of the vocabulary."""


@attrs.frozen
class Logprobs:
    """One position of a text: the token that stands there, and the likeliest ones for it."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    """As many as were asked for, the likeliest first."""


@attrs.frozen
class Prompt:
    """The prompt, before the first token: only where `echo` or `prompt_logprobs` asked for it."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs | None, ...] | None = None
    """One for each token, where `prompt_logprobs` asked; None for the first, which nothing comes before."""


@attrs.frozen
class Token:
    """One generated token. `text` is whole characters and may be empty; joined, the texts are exactly the output.

    Text that is still held when the output ends (half a character, the beginning of a stop string) comes in one more
    event with the last token's id; usage does not count that one.
    """

    id: str
    text: str
    token_id: int
    index: int = 0
    """Of which of the request's `n` answers it is the next token."""
    logprobs: Logprobs | None = None
    """Where `logprobs` asked for it."""


@attrs.frozen
class ReasoningDelta:
    """The next piece of the model's thinking, where `reasoning` asked for it. The tokens' texts do not have it."""

    id: str
    text: str
    index: int = 0
    """Of which of the request's `n` answers."""


@attrs.frozen
class ToolCallDelta:
    """The next piece of a tool call: its name in the first, more of its arguments' JSON in each.

    A call that turns out to be none is in the text as the model wrote it, and not among `Finished.tool_calls`, and a
    warning says why.
    """

    id: str
    call: int
    """Which call of the answer, from 0."""
    call_id: str
    name: str
    arguments: str
    """To be put behind what came before."""
    index: int = 0
    """Of which of the request's `n` answers."""


@attrs.frozen
class Answer:
    """One of several answers to a request, at its end."""

    index: int
    reason: FinishReason
    seed: int
    completion_tokens: int
    text: str | None = None
    """Where `stream` was false; so are the two below."""
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[Logprobs, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    stop_string: str | None = None
    """Of the request's `stop` strings the one that ended it; None where something else did."""


@attrs.frozen
class Finished:
    """A request's last event. Of several answers, what it says itself is the first one's; `usage` counts all."""

    id: str
    reason: FinishReason
    usage: Usage
    metrics: RequestMetrics
    seed: int
    text: str | None = None
    """The whole output, where `stream` was false."""
    token_ids: tuple[int, ...] | None = None
    """All generated tokens, where `stream` was false."""
    warnings: tuple[str, ...] = ()
    logprobs: tuple[Logprobs, ...] | None = None
    """One for each of `token_ids`, where `stream` was false and `logprobs` asked for it."""
    answers: tuple[Answer, ...] = ()
    """All of them, by index, where `n` or `best_of` asked for more than one."""
    prompt: Prompt | None = None
    """Where `stream` was false, and `echo` or `prompt_logprobs` asked for it."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The whole calls of the request's `tools`, in order. `reason` is `stop` with them as without."""
    reasoning: str | None = None
    """The model's thinking, where `stream` was false and `reasoning` asked for it."""
    stop_string: str | None = None
    """Of the request's `stop` strings the one that ended it; None where something else did."""


Event = Prompt | Token | ReasoningDelta | ToolCallDelta | Finished


@attrs.frozen
class ModelInfo:
    """A loaded model's card, read from the file and the running context. Nothing here is typed in by hand."""

    name: str
    path: str
    architecture: str
    parameters: int
    size_bytes: int
    quantization: str
    context_length: int
    """Tokens the model was trained for."""
    vocab_size: int
    has_chat_template: bool
    license: str | None = None
    description: str | None = None
    is_builtin: bool = False


@attrs.frozen
class Capabilities:
    """What this server can do with this model, derived from both."""

    streaming: bool
    chat: bool
    """The model has a chat template of its own; without one a plain documented one is used."""
    cancel: bool
    tokenize: bool
    token_ids_input: bool
    prefix_sharing: str
    """`none`, `cells` (a common prefix is computed once) or `snapshots`; with the reason where it is not `cells`."""
    kv_unified: bool
    max_stop_sequences: int
    sampling_params: tuple[str, ...]
    """Fields of `SamplingParams` that are honoured."""
    grammars: tuple[str, ...] = ()
    """Fields of `Grammar` that are honoured."""
    max_logprobs: int = -1
    """Most likeliest tokens told with each; -1: no log probabilities."""
    max_answers: int = 1
    """Most answers (`n`, `best_of`) of one request."""
    echo: bool = False
    tools: tuple[str, ...] = ()
    """Values of `tool_choice` that are honoured, `named` for a tool's name; none: this model's calls are not parsed."""
    reasoning: bool = False
    """The model's template has thinking marks that are known."""
    generate: bool = True
    """False: the model embeds text and does not generate."""
    embeddings: bool = False
    pooling: str = "none"
    """How a text's token embeddings become one: `mean`, `cls` (the first token's), `last`, or `rank` (a score)."""
    embedding_dimensions: int = 0
    """Figures of an embedding."""
    rerank: bool = False
    speculation: str = "none"
    """How tokens are drafted: `prompt look-up` or `none`, with the reason where it is none."""


@attrs.frozen
class Limits:
    """The running configuration's bounds, as a client needs them."""

    n_ctx: int
    """Most tokens, prompt and output together, of one request."""
    max_tokens: int
    max_prompt_bytes: int
    max_frame_bytes: int
    max_sessions: int
    max_queue: int
    max_sequences: int = 0
    """Requests computed at once; 0 where an older server does not tell."""


@attrs.frozen
class ServerInfo:
    """Who answers: the model, what can be asked of it, and how much."""

    server: str
    """`uma/X.Y.Z`."""
    model: ModelInfo
    capabilities: Capabilities
    limits: Limits


@attrs.frozen
class Health:
    """The answer to a health question. With a probe, one token really went through the engine."""

    status: HealthStatus
    latency_ms: float
    tokens_generated: int


@attrs.frozen
class RunningRequest:
    """One request that has been started, and how far it is just now. All counts are tokens."""

    id: str
    priority: int
    prompt_tokens: int
    cached_tokens: int
    """The part of the prompt that did not have to be computed."""
    computed_tokens: int
    """The part of the prompt whose KV is held, cached tokens included; 0 while it is preempted."""
    generated_tokens: int
    age_ms: float
    """Since its arrival."""
    is_preempted: bool = False
    """Started, and waiting again: its KV cells went to a request of higher priority."""


@attrs.frozen
class Activity:
    """What an engine is working on just now, request by request, and how many requests wait for a first slot."""

    running: tuple[RunningRequest, ...]
    """In order of arrival."""
    waiting_interactive: int
    waiting_normal: int
    waiting_background: int


@attrs.frozen
class Tokenized:
    """Token ids of a text or conversation, as a request with it would use them."""

    token_ids: tuple[int, ...]
    text: str | None = None
    """What they stand for: a conversation as the chat template renders it, or the text of given ids; None for a prompt,
    which the caller has. Special tokens among given ids have no text."""
    added_tokens: int = 0
    """Of these ids, how many at the front come from the tokenizer and not from the prompt: the beginning of text."""


class EventStream(Protocol):
    """One request's events, in order: a `Prompt` where one was asked for, `Token`s, then exactly one `Finished`."""

    tap: Callable[[Token], bool] | None
    """Where set, it is offered each token as it comes, and says whether it took it. What it leaves, and the last event,
    are iterated as ever. It spares a task's turn for each token; it must neither wait nor raise."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """The stream is its own iterator."""

    async def __anext__(self) -> Event:
        """The next event. Raises an `UmaError` where the request failed. A cancelled wait loses no event."""

    def cancel(self) -> None:
        """End the request at the next token, and let the stream end with `Finished` of reason `cancelled`.

        For those who want the last event and its usage; leaving `generate`'s block cancels without one.
        """


@runtime_checkable
class Source(Protocol):
    """Whoever generates: an `Engine` in this process or a `Client` on a socket. Everything else is written against it.

    All methods belong to the Trio thread that opened the source.
    """

    @property
    def info(self) -> ServerInfo:
        """Who answers."""

    def generate(self, request: Request) -> AbstractAsyncContextManager[EventStream]:
        """`async with source.generate(request) as stream: async for event in stream: ...`

        The stream gives `Token`s and then exactly one `Finished`; a failure is raised as an `UmaError`, from entering
        the block or from the iteration. Leaving the block cancels: by the next tick boundary the sequence and its KV
        cells are gone.
        """

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """An embedding of each text. A cancelled call ends the work with the batch that runs.

        Raises `BadRequest` where the model gives none, `PromptTooLarge` for a text that does not fit the context, and
        `Overloaded`.
        """

    async def rerank(self, request: RerankRequest) -> Ranking:
        """The documents by how well they answer the query. Otherwise as `embed`."""

    async def tokenize(self, request: Request) -> Tokenized:
        """The token ids `generate` would compute for this request. Raises what `generate` would for a bad prompt."""

    async def health(self, *, probe: bool = True) -> Health:
        """Ask whether generation works; with `probe` by really generating one token."""

    async def metrics(self) -> Mapping[str, Any]:
        """A flat snapshot of counters, gauges and histograms (`uma.metrics`). Never waits for compute."""

    async def activity(self) -> Activity:
        """The requests that run just now, and how many wait. Never waits for compute."""
