"""Requests that were admitted, on their way to the decode thread: the sequences that compute each of them, and the
stream that its events come back in. Belongs to the Trio thread that opened the engine.
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
"""Maximum time that a burst of requests is gathered, while more keep coming in or are being sent and read, before the
decode thread is woken."""
MAX_EXPLAINED = 1_000
"""Requests that can be explained, those that run besides."""


@attrs.frozen(eq=False)
class Prepared:
    """A request that was checked and admitted, with all that was made of its fields."""

    request: Request
    asked: Request
    """The request before it was made what the model's template can render."""
    tokens: array[int]
    most_tokens: int
    """Maximum tokens of it, prompt and output together."""
    adapters: AdapterSet
    """LoRA adapters that it is computed with."""
    grammar: GrammarState | None = None
    forced: Iterable[int] = ()
    """Tokens that the grammar leaves no choice about, before the first one that is sampled."""
    bias: Bias | None = None
    report: PromptReport | None = None
    spellings: Mapping[int, bytes] = attrs.field(factory=dict)
    """Bytes of special tokens that are part of the output's text."""
    bounds_thinking: Callable[[int | None], ThinkingBound] | None = None
    """See `TokenChoice.bounds_thinking`."""
    warnings: tuple[str, ...] = ()
    """Warnings for its last event: what the request asks for that has no effect."""
    message_ends: tuple[int, ...] = ()
    """See `Sequence.message_ends`."""
    pictures: tuple[PlacedPicture, ...] = ()
    """See `Sequence.pictures`."""
    left_out: LeftOut = LeftOut()
    spent_ms: Mapping[str, float] = attrs.field(factory=dict)
    """What its time went to until now (`types.CAUSES`)."""
    labels: tuple[LabelRead, ...] = ()
    """What is read for each of its answers, which have a prompt each then; else all have the same."""


class Preparing:
    """Where the time of a request goes before it is queued."""

    def __init__(self) -> None:
        self.by_cause: dict[str, float] = {}
        self._began_ms = self._since_ms = now_ms()

    @property
    def so_far_ms(self) -> float:
        """Since it began."""
        return now_ms() - self._began_ms

    def on(self, cause: str) -> None:
        """The time since the last call went to this."""
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
    """The request as it came, before what its model needs was made of it."""
    tokens: array[int] = attrs.field(factory=lambda: array("i"))
    """Tokens of its prompt and its first answer."""
    error: str = ""
    """The code of what refused it, before it was queued."""
    owner: Hashable = None
    """`net.client.OWNER`."""


class Submission:
    """Makes sequences, hands them to the decode thread, and knows them until their last event is read."""

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
        """Sequences whose last event has not been read, in order of arrival: those of this moment."""
        self._accounts: deque[Account] = deque(maxlen=MAX_EXPLAINED)
        """Accounts of the first answers of requests that came, the newest last."""
        self.on_over: list[Callable[[Over], None]] = []
        """Called once with each request that is over, be it before it was queued."""
        self._is_gathering = False
        """The decode thread is woken soon."""

    @property
    def adapters(self) -> set[AdapterSet]:
        """Sets of LoRA adapters of all that are open."""
        return {sequence.adapter_set for sequence in self._open}

    def submit(self, prepared: Prepared) -> RequestStream:
        """Hand a request to the decode thread: a sequence for each of its answers. Does not wait."""
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
        """Wake the decode thread once for a burst: its prompts are read in one batch, and its rows decode in step."""
        try:
            with trio.move_on_after(GATHER_SEC):
                await arrivals().gathered()
        finally:
            self._is_gathering = False
            self._worker.commands.wake()

    def refused(self, request: Request, spent_ms: float, error: str = "") -> None:
        """A request is over before it was queued: refused with an error of this code, or its reader has left."""
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
        """Account of the newest request with this id, or of the newest of all; None where it is not this `owner`'s,
        unless that is None. It runs, or is one of the last `MAX_EXPLAINED`.
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
        """A request with the engine's own bound of thinking where it has none."""
        bound = self._config.reasoning_budget
        if bound < 0 or sampling.max_reasoning_tokens is not None:
            return sampling
        return attrs.evolve(sampling, max_reasoning_tokens=bound)

    def _sequence(self, prepared: Prepared, index: int, seed: int) -> Sequence:
        """The sequence of one answer. The first has the request's own state, each other a copy of it."""
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
        """The tokens that an answer can have where the context has so many left, and a warning where that is less than
        it asks for.
        """
        limit = self._config.max_tokens
        most = min((limit or DEFAULT_MAX_TOKENS) if asked is None else asked, limit or left, left)
        if asked is None or asked <= most:
            return most, ()
        if most == limit:
            return most, (f"max_tokens: {asked:,} is over the limit of {limit:,} and was cut to it",)
        return most, (f"max_tokens: {asked:,} do not fit the context beside the prompt, which leaves {left:,}",)

    def _is_paced(self, request: Request) -> bool:
        """Whether tokens are given evenly, those of several answers together."""
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
        """The span that a request's end is reported to; empty where no listener asks for ends."""
        return [span_of(request.metadata)] if self.on_over else []

    def _over(self, asked: Request, sequences: list[Sequence], traceparent: list[str]) -> None:
        """A request is over, which can be said twice: `traceparent` is taken with the first."""
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
