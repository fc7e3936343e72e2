"""Admitted requests on their way to the decode thread: the sequences that compute each, and the stream of its events.
Belongs to the Trio thread that opened the engine.
"""

from __future__ import annotations

import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial

import attrs
import trio

from uma.config import RuntimeConfig
from uma.engine.adapters import AdapterSet
from uma.engine.clock import now_ms
from uma.engine.delivery.answers import AnswerGroup, AnswerPort
from uma.engine.delivery.detokenize import TextStream
from uma.engine.delivery.pacing import CREDITS
from uma.engine.delivery.stream import Lateness, RequestStream
from uma.engine.worker.account import Account, LeftOut
from uma.engine.worker.choice import Bias, LabelRead, TokenChoice
from uma.engine.worker.loop import DecodeWorker, SequenceControl
from uma.engine.worker.sequence import AnswerBuffer, PlacedPicture, PromptReport, Sequence
from uma.engine.worker.thinking import ThinkingBound
from uma.llama.grammar import GrammarState
from uma.metrics import EngineMetrics
from uma.net.arrivals import arrivals
from uma.net.client import CLIENT, ORIGIN, OWNER, USER, span_of
from uma.types import DEFAULT_MAX_TOKENS, MAX_SEED, Request, RequestMetrics, SamplingParams, Usage

GATHER_SEC = 0.02
"""Maximum time (s) to gather a burst of requests, while further ones are received and read, before the decode thread is
woken."""
MAX_EXPLAINED = 1_000
"""Maximum requests that can be explained, beside the running ones."""


@attrs.frozen(eq=False)
class Prepared:
    """A checked and admitted request, with everything that was prepared from its fields."""

    request: Request
    asked: Request
    """The request as it came, before it was rewritten for the model's template."""
    tokens: array[int]
    most_tokens: int
    """Maximum tokens of prompt and output together."""
    adapters: AdapterSet
    """LoRA adapters by which it is computed."""
    grammar: GrammarState | None = None
    forced: Iterable[int] = ()
    """Forced tokens: the only ones that the grammar allows before the first sampled token."""
    bias: Bias | None = None
    report: PromptReport | None = None
    spellings: Mapping[int, bytes] = attrs.field(factory=dict)
    """Bytes of special tokens that are part of the output's text."""
    bounds_thinking: Callable[[int | None], ThinkingBound] | None = None
    """See `TokenChoice.bounds_thinking`."""
    warnings: tuple[str, ...] = ()
    """Warnings for its last event: parts of the request that have no effect."""
    message_ends: tuple[int, ...] = ()
    """See `Sequence.message_ends`."""
    pictures: tuple[PlacedPicture, ...] = ()
    """See `Sequence.pictures`."""
    left_out: LeftOut = LeftOut()
    spent_ms: Mapping[str, float] = attrs.field(factory=dict)
    """Time spent so far, by cause (`types.CAUSES`)."""
    labels: tuple[LabelRead, ...] = ()
    """Reads of each answer, which then has a prompt of its own; otherwise all answers share one."""


class Preparing:
    """Measures the time of a request before it is queued, by cause."""

    def __init__(self) -> None:
        self.by_cause: dict[str, float] = {}
        self._began_ms = self._since_ms = now_ms()

    @property
    def so_far_ms(self) -> float:
        """Time since the request came."""
        return now_ms() - self._began_ms

    def on(self, cause: str) -> None:
        """Attribute the time since the last call to `cause`."""
        now = now_ms()
        self.by_cause[cause] = self.by_cause.get(cause, 0.0) + now - self._since_ms
        self._since_ms = now


@attrs.frozen
class Over:
    """A request that is over, however it ended."""

    request: Request
    origin: str
    traceparent: str
    """Trace parent as `net.client.span_of` has it."""
    reason: str
    """Reason of its last answer, as in `Finished`; `cancelled` where its reader left."""
    usage: Usage
    """Usage of all its answers."""
    metrics: RequestMetrics
    """Metrics of the first answer."""
    began_at: float
    """Seconds since 1970, as the next."""
    ended_at: float
    asked: Request
    """The request as it came, before it was rewritten for the model's template."""
    tokens: array[int] = attrs.field(factory=lambda: array("i"))
    """Tokens of its prompt and first answer."""
    error: str = ""
    """Code of the error that refused it before it was queued."""
    owner: Hashable = None
    """`net.client.OWNER`."""


class Submission:
    """Makes sequences, passes them to the decode thread, and tracks them until their last event is read."""

    def __init__(
        self,
        config: RuntimeConfig,
        worker: DecodeWorker,
        metrics: EngineMetrics,
    ) -> None:
        self._config = config
        self._worker = worker
        self._metrics = metrics
        self._next_key = 1
        self._seeds = random.Random()
        self._open: dict[Sequence, None] = {}
        self.open = self._open.keys()
        """Sequences whose last event has not been read, in order of arrival; a live view."""
        self._accounts: deque[Account] = deque(maxlen=MAX_EXPLAINED)
        """Accounts of requests by their first answers, the newest last."""
        self.on_over: list[Callable[[Over], None]] = []
        """Called once with each request that is over, also before it was queued."""
        self._is_gathering = False
        """Whether the decode thread will be woken soon."""

    @property
    def adapters(self) -> set[AdapterSet]:
        """Sets of LoRA adapters of all open sequences."""
        return {sequence.adapter_set for sequence in self._open}

    def submit(self, prepared: Prepared) -> RequestStream:
        """Pass a request to the decode thread, with a sequence for each answer. Does not wait."""
        sampling = self._bounded(prepared.request.sampling.over(self._config.sampler))
        if sampling is not prepared.request.sampling:
            prepared = attrs.evolve(prepared, request=attrs.evolve(prepared.request, sampling=sampling))
        seed = sampling.seed if sampling.seed is not None else self._seeds.randrange(MAX_SEED)
        sequences = [
            self._sequence(prepared, index, (seed + index) % (MAX_SEED + 1)) for index in range(sampling.drawn_answers)
        ]
        request = prepared.request
        stream = self._stream(request, prepared.asked, sequences)
        for sequence in sequences:
            self._open[sequence] = None
        self._accounts.append(sequences[0].account)
        for sequence in sequences:
            self._worker.submit(sequence)
        if not self._is_gathering:
            self._is_gathering = True
            trio.lowlevel.spawn_system_task(self._wake, name="a burst's one wakeup")
        return stream

    async def _wake(self) -> None:
        """Wake the decode thread once for a burst: its prompts are read in one batch, and its rows decode together."""
        try:
            with trio.move_on_after(GATHER_SEC):
                await arrivals().gathered()
        finally:
            self._is_gathering = False
            self._worker.commands.wake()

    def refused(self, request: Request, spent_ms: float, error: str = "") -> None:
        """Report a request that is over before it was queued: refused with an error, or left by its reader."""
        if self.on_over:
            ended_at, reason = time.time(), "error" if error else "cancelled"
            span, nothing = span_of(request.metadata), RequestMetrics(0.0, 0.0, 0.0, 0.0, 0, 0.0, 0)
            began_at = ended_at - spent_ms / 1000
            usage, origin = Usage(0, 0, 0), ORIGIN.get()
            times, owner = (began_at, ended_at), OWNER.get()
            self._tell(Over(request, origin, span, reason, usage, nothing, *times, request, error=error, owner=owner))

    def _tell(self, over: Over) -> None:
        for listener in self.on_over:
            listener(over)

    def account(self, id: str, owner: Hashable) -> Account | None:
        """Account of the newest request with this id, or of the newest of all, which runs or is one of the last
        `MAX_EXPLAINED`. None if it is not this `owner`'s, unless `owner` is None.
        """
        running = (sequence.account for sequence in reversed(self._open) if sequence.index == 0)
        return next(
            (
                account
                for account in (*reversed(self._accounts), *running)
                if id in ("", account.id) and owner in (None, account.owner)
            ),
            None,
        )

    def _bounded(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters, with the engine's limit of thinking if the request has none."""
        bound = self._config.reasoning_budget
        if bound < 0 or sampling.max_reasoning_tokens is not None:
            return sampling
        return attrs.evolve(sampling, max_reasoning_tokens=bound)

    def _sequence(self, prepared: Prepared, index: int, seed: int) -> Sequence:
        """The sequence of one answer. The first uses the request's own objects, each other one copies."""
        request, tokens, grammar, is_first = prepared.request, prepared.tokens, prepared.grammar, index == 0
        labels = prepared.labels[index] if prepared.labels else None
        tokens = tokens if labels is None else labels.prompt
        adapters, adapted_from = prepared.adapters.placed(tokens)
        sampling = request.sampling
        most, cut = self._most_tokens(request.sampling.max_tokens, prepared.most_tokens - len(tokens))
        key, self._next_key = self._next_key, self._next_key + 1
        arrived_ms = now_ms()
        account = Account(
            request.id,
            OWNER.get(),
            request.priority,
            ORIGIN.get(),
            request.sampling.n,
            len(tokens),
            request.sampling.reproducible,
            self._config.record_text,
            arrived_ms,
            prepared.spent_ms,
            self._worker.totals,
            prepared.left_out,
            labels is not None,
        )
        return Sequence(
            key=key,
            account=account,
            request=request,
            tokens=tokens if is_first or labels is not None else array("i", tokens),
            prompt_tokens=len(tokens),
            max_tokens=most,
            arrived_ms=arrived_ms,
            target_tbt_ms=request.slo.target_tbt_ms or self._config.tick_budget_ms,
            credits=CREDITS,
            choice=TokenChoice(
                seed=seed,
                wants_logprobs=sampling.logprobs is not None or sampling.drawn_answers > sampling.n,
                grammar=grammar if grammar is None or is_first else grammar.fork(),
                forced=list(prepared.forced),
                bias=prepared.bias,
                bounds_thinking=prepared.bounds_thinking,
                labels=labels,
            ),
            answer=AnswerBuffer(TextStream(sampling.stop), prepared.spellings),
            is_paced=self._is_paced(request),
            warnings=(*cut, *prepared.warnings),
            index=index,
            client=CLIENT.get(),
            user=USER.get(),
            report=prepared.report if is_first else None,
            message_ends=prepared.message_ends,
            pictures=prepared.pictures,
            adapter_set=adapters,
            adapted_from=adapted_from,
        )

    def _most_tokens(self, asked: int | None, left: int) -> tuple[int, tuple[str, ...]]:
        """Maximum tokens of an answer if the context has `left`, and a warning if that is less than it asks for."""
        limit = self._config.max_tokens
        most = min((limit or DEFAULT_MAX_TOKENS) if asked is None else asked, limit or left, left)
        if asked is None or asked <= most:
            return most, ()
        if most == limit:
            return most, (f"max_tokens: {asked:,} is over the limit of {limit:,} and was cut to it",)
        return most, (f"max_tokens: {asked:,} do not fit the context beside the prompt, which leaves {left:,}",)

    def _is_paced(self, request: Request) -> bool:
        """Whether tokens are delivered at even intervals, for all answers alike."""
        is_wanted = "off" not in (request.pace, self._config.pace)
        return is_wanted and request.stream and not request.sampling.reproducible

    def _stream(self, request: Request, asked: Request, sequences: list[Sequence]) -> RequestStream:
        controls = [SequenceControl(self._worker, sequence) for sequence in sequences]
        over = partial(self._over, asked, sequences, self._span(request))
        if len(sequences) == 1:
            (sequence,) = sequences
            sequence.stream = stream = RequestStream(controls[0], over, self._count_dropped, self._lateness(sequence))
            return stream
        group = AnswerGroup(request, controls, over, self._count_dropped)
        for index, sequence in enumerate(sequences):
            sequence.stream = AnswerPort(group, index, partial(self._forget, sequence), self._lateness(sequence))
        return group.stream

    def _lateness(self, sequence: Sequence) -> Lateness:
        return Lateness(sequence.target_tbt_ms, self._count_late)

    def _count_late(self) -> None:
        self._metrics.tokens_late_total += 1

    def _count_dropped(self, tokens: int) -> None:
        self._metrics.tokens_dropped_total += tokens

    def _span(self, request: Request) -> list[str]:
        """Span to which the end of the request is reported; empty without listeners."""
        return [span_of(request.metadata)] if self.on_over else []

    def _over(self, asked: Request, sequences: list[Sequence], traceparent: list[str]) -> None:
        """Called when a request is over, possibly twice: the first call takes `traceparent`."""
        self._forget(*sequences)
        if traceparent:
            self._tell(_over(asked, sequences, traceparent.pop()))

    def _forget(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self._open.pop(sequence, None)


def _over(asked: Request, sequences: list[Sequence], traceparent: str) -> Over:
    first, now = sequences[0], now_ms()
    reasons = [sequence.account.reason or "cancelled" for sequence in sequences]
    usage = Usage(first.prompt_tokens, first.cached_tokens, sum(sequence.generated for sequence in sequences))
    reason = "error" if "error" in reasons else reasons[0]
    ended_at = time.time()
    began_at = ended_at - (now - first.arrived_ms) / 1000
    metrics = first.account.final.metrics if first.account.final is not None else first.metrics(now)
    origin, owner = first.account.origin, first.account.owner
    times, tokens = (began_at, ended_at), first.tokens
    return Over(first.request, origin, traceparent, reason, usage, metrics, *times, asked, tokens, owner=owner)
