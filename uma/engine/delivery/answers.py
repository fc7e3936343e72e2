"""Several answers to one prompt: the events of their sequences become one stream with one last event.

Each answer is a sequence with its own credit window. Everything here belongs to the Trio thread.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import islice

import attrs

from uma.engine.delivery.outbox import EarlyEventBuffer
from uma.engine.delivery.stream import Control, Lateness, RequestStream
from uma.errors import UmaError
from uma.types import Answer, Event, Finished, Prompt, Request, RequestMetrics, Speculation, Token, Usage


class AnswerGroup:
    """The answers to one request: `Control` of their stream, and destination of their events."""

    def __init__(
        self,
        request: Request,
        controls: Sequence[Control],
        on_end: Callable[[], None],
        on_drop: Callable[[int], None],
    ) -> None:
        self._request = request
        self._controls = controls
        self._finished: dict[int, Finished] = {}
        self._order: deque[int] = deque()
        """Answers, by index, of the events that were given and whose credit has not been returned, in order."""
        self._is_over = False
        self.ports: list[AnswerPort] = []
        """Destinations of the answers' events; each adds itself."""
        self.on_drop = on_drop
        self._early: deque[tuple[int, Event]] | None = deque() if _tells_prompt(request) else None
        """Events before the one about the prompt, if there is one: it comes from the first answer's sequence."""
        self.stream = RequestStream(self, on_end, on_drop)

    def deliver(self, index: int, event: Event | UmaError) -> None:
        """Deliver an event of the answer `index`."""
        if self._early is not None:
            if not isinstance(event, Prompt | UmaError) and not (isinstance(event, Finished) and index == 0):
                self._early.append((index, event))
                return
            early, self._early = self._early, None
            self.deliver(index, event)
            for earlier in early:
                self.deliver(*earlier)
            return
        if self._is_over:
            return
        if isinstance(event, UmaError):
            self._is_over = True
            self.cancel()
            self.stream.deliver(event)
        elif isinstance(event, Finished):
            self._finished[index] = event
            if len(self._finished) == len(self._controls):
                self._is_over = True
                self.stream.deliver(joined(self._request, [last for _, last in sorted(self._finished.items())]))
        else:
            self._order.append(index)
            self.stream.deliver(event)

    def cancel(self) -> None:
        """End all answers at the next tick boundary, and drop tokens that were computed ahead."""
        for port in self.ports:
            port.early.leave()
        for control in self._controls:
            control.cancel()

    def end_thinking(self) -> None:
        """Close the thinking of each answer with its next token."""
        for control in self._controls:
            control.end_thinking()

    def fail(self, error: UmaError) -> None:
        """End all answers with an error, because an event of one could not be delivered."""
        self._is_over = True  # before waiting events are released: an end among them must not be delivered instead
        self.stream.fail(error)

    def credit(self, events: int) -> None:
        """Return credit for `events` events that the reader has taken, to the answers whose events came first."""
        taken = list(islice(self._order, events))
        for _ in taken:
            self._order.popleft()
        for index, count in Counter(taken).items():
            self._controls[index].credit(count)


def _tells_prompt(request: Request) -> bool:
    sampling = request.sampling
    return request.stream and (sampling.echo or sampling.prompt_logprobs is not None)


@attrs.define(eq=False)
class AnswerPort:
    """Destination of one sequence's events, each given at its time. `forget` is called when the sequence has ended."""

    group: AnswerGroup
    index: int
    forget: Callable[[], None]
    lateness: Lateness
    early: EarlyEventBuffer = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.early = EarlyEventBuffer(self.deliver, self.group.on_drop)
        self.group.ports.append(self)

    def take(self, event: Event | UmaError, not_before_ms: float, now_ms: float) -> bool:
        """See `RequestStream.take`."""
        return self.early.take(event, not_before_ms, now_ms)

    def release(self, until_ms: float) -> None:
        """See `RequestStream.release`."""
        self.early.release(until_ms, until_ms)

    def fail(self, error: UmaError) -> None:
        """See `RequestStream.fail`: all answers end."""
        self.group.fail(error)

    def end_thinking(self) -> None:
        """See `RequestStream.end_thinking`: in all answers."""
        self.group.end_thinking()

    def deliver(self, event: Event | UmaError, at_ms: float) -> None:
        """Called by the engine: the next event is due, at `at_ms`."""
        if type(event) is Token and at_ms < math.inf:
            self.lateness.had_token(at_ms)
        if isinstance(event, Finished | UmaError):
            self.forget()
        if isinstance(event, Finished):
            event = self.early.without_dropped(event)
        self.group.deliver(self.index, event)


def joined(request: Request, drawn: Sequence[Finished]) -> Finished:
    """One last event for all answers; with `best_of`, for the `n` of the highest mean log probability, in order."""
    kept = list(drawn)
    if len(kept) > request.sampling.n:
        kept = sorted(kept, key=_mean_logprob, reverse=True)[: request.sampling.n]
    if request.sampling.logprobs is None:
        kept = [attrs.evolve(last, logprobs=None) for last in kept]
    usage = Usage(
        drawn[0].usage.prompt_tokens,
        drawn[0].usage.cached_tokens,
        sum(last.usage.completion_tokens for last in drawn),
        summary_tokens=drawn[0].usage.summary_tokens,
    )
    answers = tuple(
        Answer(
            index,
            last.reason,
            last.seed,
            last.usage.completion_tokens,
            last.text,
            last.token_ids,
            last.logprobs,
            stop_string=last.stop_string,
        )
        for index, last in enumerate(kept)
    )
    metrics = _metrics([last.metrics for last in drawn])
    warnings = tuple(dict.fromkeys(line for last in kept for line in last.warnings))
    return attrs.evolve(
        kept[0], usage=usage, metrics=metrics, answers=answers, prompt=drawn[0].prompt, warnings=warnings
    )


def _mean_logprob(finished: Finished) -> float:
    known = finished.logprobs or ()
    return sum(position.chosen.logprob for position in known) / max(1, len(known))


def _metrics(several: Sequence[RequestMetrics]) -> RequestMetrics:
    """Metrics of all answers together: the first one's time to first token, and the decoding of all."""
    return attrs.evolve(
        several[0],
        decode_ms=max(one.decode_ms for one in several),
        batch_size=max(one.batch_size for one in several),
        tokens_per_second=round(sum(one.tokens_per_second for one in several), 2),
        decode_iterations=max(one.decode_iterations for one in several),
        speculation=_speculation([one.speculation for one in several if one.speculation is not None]),
    )


def _speculation(several: Sequence[Speculation]) -> Speculation | None:
    if not several:
        return None
    return Speculation(
        sum(one.drafted for one in several),
        sum(one.accepted for one in several),
        round(sum(one.saved_ms for one in several), 3),
    )
