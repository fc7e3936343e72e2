"""What a server tells of itself: its model, capabilities and limits, its health, and the requests that run."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Literal

import attrs

from uma.types.fields import short_repr
from uma.types.loading import LoadState
from uma.types.sampling import DEFAULT_MAX_TOKENS

_PART = re.compile(r"-\d{5}-of-\d{5}$")
"""What the name of a part of a split model ends with."""
_BLOB = re.compile(r"sha256-[0-9a-f]{64}")
"""The name of a model's file in Ollama's folder."""

MAX_TEMPLATE_CHARS = 65_536
"""Maximum length of a chat template that is told: it is a part of each session's first answer. The longest of known
models have some 20,000."""

PAUSED = "the server is paused: nothing is computed; `uma resume` continues"
"""Sentence about a server whose `Health` has `paused_sec`."""
MAX_PAUSE_SEC = 365 * 86_400.0
"""The longest that a server computes nothing by one word."""
MAX_TRACE_SEC = 60
"""Maximum length of a trace: longer ones are larger than what shows them can take."""

HealthStatus = Literal["ok", "loading", "draining", "stalled"]
EMBEDDINGS, RERANKER = "embeddings", "reranker"
"""Kinds of models that only embed, or rank."""
ModelState = Literal["unloaded", "loading", "loaded", "leaving"]
"""State of one of several models. `leaving`: it takes no more requests, and ends once those that run have ended."""


@attrs.frozen
class ModelInfo:
    """A loaded model's card, read from the file and the running context. Nothing here is typed in by hand."""

    name: str
    """See `listed_name`: lists, requests and logs call it so."""
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
    gpu_bytes: int = 0
    """Weights that lie in the memory of GPUs."""
    title: str = ""
    """Name that the file gives itself; requests can use it, too."""


def listed_name(path: str, title: str, *, is_builtin: bool) -> str:
    """Name that a model is listed by: `builtin`, or its file's name without the ending and a part's number; its own
    title where the file is called by a checksum.
    """
    file = re.sub(r"\.gguf$", "", PurePath(path).name, flags=re.IGNORECASE)
    return "builtin" if is_builtin else title if title and _BLOB.fullmatch(file) else _PART.sub("", file)


@attrs.frozen
class FillIn:
    """The tokens with which a model fills in the middle of a text."""

    prefix: int
    """Before the text that comes before the gap."""
    suffix: int
    """Before the text that comes behind it."""
    middle: int
    """Before what fills it."""
    repository: int | None = None
    """Before a repository's name; None where the model has none, as with the next."""
    file: int | None = None
    """Before a file's name."""


@attrs.frozen
class MemoryPlan:
    """What texts take of memory, all of it from the server's start; the weights are not counted."""

    kind: str
    """What the model keeps of a text: `attention` (keys and values of each token), `sliding-window` (the same, and some
    layers need them of the last tokens alone), `recurrent` (a state of one size for each sequence) or `hybrid` (both).
    """
    cells: int
    """Tokens that KV is kept of, of all sequences together."""
    kv_bytes: int
    window_cells: int = 0
    """Cells of layers with a sliding window: as many as `cells`, or no more than the windows of all sequences."""
    states: int = 0
    """Recurrent states: one of each sequence that can run, and one more for each token of a draft."""
    state_bytes: int = 0
    """Bytes of all of them."""


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
    """`none`, `cells` (a common prefix is computed once) or `copies` of them, each also `and checkpoints` (likewise, up
    to where a message ends or other prompts went on differently); with the reason where it is no cells.
    """
    kv_unified: bool
    max_stop_sequences: int
    sampling_params: tuple[str, ...]
    """Fields of `SamplingParams` that are honoured."""
    suggested_sampling: dict[str, float] = attrs.field(factory=dict)
    """Fields of `SamplingParams` as the operator has set them, else as the model's file has them: what `uma chat`, `uma
    generate`, `LLM` and HTTP ask for. A request that asks for nothing gets the operator's alone."""
    grammars: tuple[str, ...] = ()
    """Fields of `Grammar` that are honoured."""
    max_logprobs: int = -1
    """Maximum number of likeliest tokens reported with each; -1: no log probabilities."""
    max_answers: int = 1
    """Maximum answers (`n`, `best_of`) of one request."""
    echo: bool = False
    tools: tuple[str, ...] = ()
    """Values of `tool_choice` that are honoured, `named` for a tool's name; none: this model's calls are not parsed."""
    reasoning: bool = False
    """The model's template has thinking marks that are known."""
    reasoning_switch: bool = False
    """The model's template has a switch by which `reasoning: off` asks it for no thinking, and `on` for some."""
    template_variables: tuple[str, ...] = ()
    """Names that the model's template reads beside the conversation, for `chat_template_kwargs`."""
    reasoning_efforts: tuple[str, ...] = ()
    """Words that the model's template takes for how much to think, the least first; none where it asks for none."""
    generate: bool = True
    """False: the model embeds text and does not generate."""
    embeddings: bool = False
    pooling: str = "none"
    """How a text's token embeddings become one: `mean`, `cls` (the first token's), `last`, or `rank` (a score)."""
    embedding_dimensions: int = 0
    """Figures of an embedding."""
    rerank: bool = False
    decisions: int = 0
    """Version of the wording of decisions' prompts; 0: the server or the model takes none."""
    speculation: str = "none"
    """How tokens are drafted: by `prompt look-up`, and by which draft model; or `none`, with the reason."""
    vision: bool = False
    """Messages can have pictures."""
    audio: bool = False
    """Messages can have sounds."""
    media_urls: bool = False
    """Pictures and sounds can be named by http(s) URLs."""
    fill_in: FillIn | None = None
    """The model's tokens for filling in the middle; None: it has none."""
    adapters: tuple[str, ...] = ()
    """Names of the model's LoRA adapters: each is asked for as a model of its own, `model+NAME`."""
    memory: MemoryPlan | None = None
    """What texts take of memory; None: an encoder, which keeps none, or an older server, which does not tell."""


@attrs.frozen
class Limits:
    """The running configuration's bounds, as a client needs them."""

    n_ctx: int
    """Maximum tokens, prompt and output together, of one request."""
    max_tokens: int
    """Maximum tokens of one answer: `--max-tokens`, without it as many as `n_ctx`; or the bound of this session's user,
    where that is less."""
    max_prompt_bytes: int
    max_frame_bytes: int
    max_sessions: int
    max_queue: int
    max_sequences: int = 0
    """Requests computed at once; 0 where an older server does not tell."""
    has_max_tokens: bool = True
    """Whether `--max-tokens` is set, as it always is with an older server, which does not tell."""
    max_priority: Literal[-1, 0, 1] = 1
    """Highest priority that the user of this session can ask for; a request that names none gets no higher one."""
    max_reproducible_tokens: int = 0
    """Maximum tokens, prompt and output together, of a request with `reproducible`; 0: there are none."""

    @property
    def default_max_tokens(self) -> int:
        """Maximum tokens of an answer whose request gives no number."""
        return self.max_tokens if self.has_max_tokens else min(DEFAULT_MAX_TOKENS, self.max_tokens)


@attrs.frozen(repr=False)
class ServerInfo:
    """A server or engine: its model, what can be asked of it, and how much."""

    server: str
    """`uma/X.Y.Z`."""
    model: ModelInfo
    capabilities: Capabilities
    limits: Limits
    chat_template: str = ""
    """Text of the chat template in use (Jinja): the model's own, or the plain one. Empty where there is none, where it
    is over `MAX_TEMPLATE_CHARS`, or where an older server does not tell."""
    models: tuple[str, ...] = ()
    """Names of all models that requests can ask for; none: this one alone."""

    __repr__ = short_repr


@attrs.frozen
class ListedModel:
    """One of several models of a server."""

    name: str
    path: str
    size_bytes: int
    kind: str = ""
    """`dense`, `MoE`, `embeddings` and the like, as `uma models` says."""
    quantization: str = ""
    context_length: int = 0
    """Tokens the model was trained for."""
    architecture: str = ""
    parameters: int = 0
    """0 where that is not known yet."""
    info: ServerInfo | None = None
    """Card of the model, where it is loaded."""
    loading_percent: int | None = None
    """How much of it is loaded, where it is being loaded."""
    state: ModelState = "unloaded"
    memory_bytes: int = 0
    """The most that it has taken, with what its cache can still come to take, or is expected to once it is loaded; 0:
    that is not known."""
    taken_bytes: int = 0
    """What its process took when it was measured last, of what it shares its part; 0: it is not loaded, or the system
    does not tell."""
    fits: bool = True
    """Whether it takes no more than all of them together can have."""
    aliases: tuple[str, ...] = ()
    """Other names that it was given."""
    adapters: tuple[str, ...] = ()
    """Names of its LoRA adapters, as `Capabilities.adapters` has them."""
    vision: bool = False
    """Whether it sees pictures; before its first load, as the header of the projector beside it says."""
    thinks: bool = False
    """Whether it thinks before it answers; before its first load, as its chat template says."""
    is_base: bool = False
    """Whether it has no chat template, and so goes on with a text rather than answering."""
    has_tools: bool = False
    """Whether its chat template tells it of tools."""
    also: tuple[str, ...] = ()
    """Other whole names of its file."""
    running: int = 0
    """Requests that have it loaded, those that wait in its queue included."""
    waiting: int = 0
    """Requests that wait until it is loaded."""
    is_pinned: bool = False
    """Whether it stays loaded, whatever else needs its memory."""
    leaves_in_sec: float | None = None
    """Time until it leaves if no request comes; None: it leaves once its memory is needed, or it is not loaded."""
    failure: str = ""
    """Why its last load or its process failed, or why no memory holds it; empty: none of that is so."""
    retry_in_sec: float = 0.0
    """Time for which no load of it is tried after a failure."""
    not_pinned: str = ""
    """Why it is not pinned as its settings ask, in words; empty: it is, or they do not ask."""
    yielded: str = ""
    """What it has done for other programs, and why (`--yield-memory`): left, or dropped prefixes; empty: nothing."""
    waits_for: str = ""
    """What its load waits for, in words: memory that others have, their loads, or requests of its old file; empty:
    nothing."""

    @property
    def load(self) -> LoadState:
        """How far its load is, as it is told."""
        return LoadState(self.loading_percent or 0, self.waits_for)


@attrs.frozen
class Health:
    """The answer to a health query. With a probe, the engine really generated one token."""

    status: HealthStatus
    latency_ms: float
    tokens_generated: int
    loading_percent: int | None = None
    """How much of the model is loaded; None unless `status` is `loading`."""
    paused_sec: float = 0.0
    """How long nothing is computed yet, as a pause was asked for."""


@attrs.frozen
class RunningRequest:
    """One request that has been started, and how far it is just now. All counts are tokens."""

    id: str
    priority: int
    prompt_tokens: int
    cached_tokens: int
    """The part of the prompt that did not have to be computed."""
    computed_tokens: int
    """The part of the prompt that is computed, cached tokens included; 0 while it is preempted. Of tokens that are
    being computed as many as the layers that are done are worth, in the first batch of its size fewer; beside a GPU
    and on macOS none of them. Where a batch is broken off they are computed again."""
    generated_tokens: int
    age_ms: float
    """Since its arrival."""
    is_preempted: bool = False
    """Started, and waiting again: its KV cells went to a request of higher priority."""
    waits_for: str = ""
    """Why nothing of it is computed now: `slot` (all slots are taken), `cells` (its prompt does not fit beside what
    runs), `adapters` (two other sets of LoRA adapters take turns), `prefix` (another request computes what its
    prompt begins with), `prompt` (another prompt is read first), `grammar` (it is compiled again), `reader` (its
    reader is behind), `paused` (the server is) or `loading` (its model is loaded first). Empty: it is computed."""
    behind: str = ""
    """Id of the request whose prompt is read first, where it waits for a `prompt`; where it waits for `loading`, what
    the load does, in words."""
    origin: str = ""
    """Where it comes from, in words for people: the program, the key, the endpoint or the socket."""
    number: int = 0
    """Number of the request, or of each of several answers, in this server: ids can be equal. 0 where an older server
    does not tell."""
    ttft_ms: float | None = None
    """Time from arrival to the first token; None: there is none yet."""
    worst_gap_ms: float = 0.0
    """Longest time between two of its tokens."""
    model: str = ""
    """Name of its model, of a server that has several."""


@attrs.frozen
class Activity:
    """What an engine is working on just now, request by request, and how many requests wait for a first slot."""

    running: tuple[RunningRequest, ...]
    """Running requests in order of arrival."""
    waiting_interactive: int
    waiting_normal: int
    waiting_background: int
    waiting: tuple[RunningRequest, ...] = ()
    """The next of those that wait for a first slot, in the order in which they start; the counts are of all."""
