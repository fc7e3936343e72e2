"""Decisions on Trio's side: each question is one or several prompts, and the row of logits behind each is read.

All prompts of a decision begin with its state, so one reads it and the others follow. They are submitted as the answers
of one request, as many as can run at once: lanes, targets, fair shares, cancelling and `uma explain` work as for any
request. Names of several tokens need further rows along them, which are read with their question's: later, other
prompts would have evicted it. Belongs to the Trio thread that opened the engine.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

import attrs
import numpy as np

from uma.engine.adapters import AdapterSets
from uma.engine.delivery.stream import RequestStream
from uma.engine.intake.decision_prompt import DecisionPrompts, DecisionReader
from uma.engine.intake.gate import Gate
from uma.engine.intake.prompt import PromptReader
from uma.engine.policy import labels
from uma.engine.policy.labels import AskedPrompt
from uma.engine.reproducible import ReproducibleContext
from uma.engine.submission import Prepared, Submission
from uma.engine.worker.choice import LabelRead, SharedStart
from uma.metrics import EngineMetrics
from uma.types import Decision, DecisionRequest, Decisions, Request, SamplingParams, Usage

MAX_AT_ONCE = 64
"""Maximum prompts of one decision queued at once: hundreds would fill the queue."""
Rows = dict[AskedPrompt, dict[labels.Path, LabelRead]]
"""Reads of each prompt, by the path along its labels."""


@attrs.frozen(eq=False)
class DecisionService:
    """Answers requests for decisions."""

    _reader: DecisionReader
    _prompts: PromptReader
    _requests: Submission
    _gate: Gate
    _isolated: ReproducibleContext
    _ends: Sequence[int]
    """Tokens that can end a turn."""
    _metrics: EngineMetrics
    _max_active: int
    _adapters: AdapterSets

    async def decide(self, request: DecisionRequest) -> Decisions:
        """See `types.Source.decide`."""
        self._gate.check_queue(request.priority)
        prompts = await self._reader.read(request)
        rows = Rows()
        reads = self._reads(prompts, rows, SharedStart(prompts.border) if request.reproducible else None)
        window = await self._window(request, reads)
        while window:
            stream = self._submitted(request, prompts, window)
            try:
                window = await self._window(request, reads)  # while these are read
                async for _ in stream:
                    pass
            finally:
                stream.abandon()
        every = [read for along in rows.values() for read in along.values()]
        usage = Usage(sum(len(read.prompt) for read in every), sum(read.cached_tokens for read in every), 0)
        return Decisions(request.id, tuple(self._decided(request, rows)), usage)

    def _reads(self, prompts: DecisionPrompts, rows: Rows, start: SharedStart | None) -> Iterator[LabelRead]:
        """All reads, question by question; each prompt's are added to `rows`."""
        for asked in prompts.asked:
            reads = rows[asked] = {}
            spare_from = prompts.border if asked.question else None
            for path, tokens in labels.rows_of(asked.spellings, self._ends):
                prompt = prompts.state + asked.tokens + array("i", path)
                reads[path] = LabelRead(prompt, np.array(tokens, np.intp), spare_from=spare_from, start=start)
                yield reads[path]

    async def _window(self, request: DecisionRequest, reads: Iterator[LabelRead]) -> list[LabelRead]:
        """The next of `reads`, as many as can run at once; empty at their end."""
        # Not for all questions at once: that took so long that a stream beside it got its tokens late.
        most, count = min(MAX_AT_ONCE, self._max_active), len(request.questions)
        chars = sum(map(len, request.texts)) * min(most, count) // count
        window = await self._prompts.in_thread(lambda: list(islice(reads, most)), chars, request.priority)
        longest = max((len(read.prompt) for read in window), default=0)
        self._prompts.check_fits(longest)
        if request.reproducible:
            await self._isolated.ready_for(longest)
        return window

    def _submitted(
        self, request: DecisionRequest, prompts: DecisionPrompts, window: Sequence[LabelRead]
    ) -> RequestStream:
        """Submit a window of prompts, as answers without tokens; returns the stream that ends with them."""
        self._metrics.requests_total += 1
        asked = Request(
            request.id,
            prompt="",
            sampling=SamplingParams(max_tokens=0, temperature=0, n=len(window), reproducible=request.reproducible),
            priority=request.priority,
            slo=request.slo,
            stream=False,
            metadata=request.metadata,
            model=request.model,
        )
        self._gate.check_deadline(asked, len(window[0].prompt))
        return self._requests.submit(
            Prepared(
                asked,
                asked,
                window[0].prompt,
                most_tokens=max(len(read.prompt) for read in window) + 1,
                adapters=self._adapters.asked(request.model),
                message_ends=(prompts.border,),
                pictures=prompts.pictures,
                labels=tuple(window),
            )
        )

    def _decided(self, request: DecisionRequest, rows: Rows) -> Iterator[Decision]:
        of_question: list[list[tuple[list[float], float]]] = [[] for _ in request.questions]
        for asked, reads in rows.items():
            found = {path: dict(zip(read.tokens.tolist(), read.logprobs, strict=True)) for path, read in reads.items()}
            placed = labels.logprobs_of(asked.spellings, found, self._ends)
            shares = labels.by_option(labels.softmax(placed, request.temperature * asked.temperature), asked.order)
            of_question[asked.question].append((shares, min(1.0, math.exp(labels.log_sum(placed)))))
        for question, orders in zip(request.questions, of_question, strict=True):
            mean, mass = labels.mean([shares for shares, _ in orders]), sum(known for _, known in orders) / len(orders)
            is_refused = mass < request.min_label_mass
            yield Decision(question.kind, mean, mass, is_refused=is_refused, name=question.name)
