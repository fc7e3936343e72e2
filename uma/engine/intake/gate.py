"""Admission control before the queue: whether a request is accepted, and when a refused one should retry.

A request is refused if its fields exclude each other, if the queue is full, or if its first token would come far later
than it asks for, while its client can still ask another server. Belongs to the Trio thread; figures of running
sequences are the decode thread's, and can be a tick old.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import attrs

from uma.config import RuntimeConfig
from uma.engine.clock import now_ms
from uma.engine.intake.overload import BEYOND_REPAIR, Load, full_queue_retry_ms, is_full, retry_after_ms, wait_ms
from uma.engine.policy import CostModel
from uma.engine.policy.tuning import TUNING
from uma.engine.worker.loop import DecodeWorker
from uma.engine.worker.sequence import Sequence
from uma.errors import BadRequest, Overloaded
from uma.metrics import EngineMetrics
from uma.net.client import CLIENT
from uma.types import Request, SamplingParams
from uma.wrong import Wrong

MAX_PROMPT_LOGPROBS = 131_072
"""Maximum log probabilities reported of one prompt: they are one event, of about a hundred bytes for each."""


@attrs.frozen(eq=False)
class Gate:
    """Refuses requests with `Overloaded`."""

    _config: RuntimeConfig
    _sequences: Collection[Sequence]
    """Sequences that were submitted and have not ended."""
    _worker: DecodeWorker
    _max_active: int
    _cost: CostModel
    _metrics: EngineMetrics

    def check_queue(self, lane: int) -> None:
        """Refuse a request that finds the queue full; see `is_full`."""
        active, limit = self._worker.active_count, self._config.max_queue
        # Requests that have just come, and start with the next tick, do not count as waiting.
        slots = max(0, self._max_active - active)
        waiting = len(self._sequences) - active - slots
        if waiting < limit:
            return
        # Requests of lower lanes are not ahead of it.
        queued = [sequence for sequence in self._sequences if sequence.started_ms == 0]
        ahead = sum(sequence.lane >= lane for sequence in queued) - slots
        is_first = not any(sequence.client == CLIENT.get() for sequence in queued)
        if is_full(lane, waiting, ahead, limit, is_first=is_first):
            service_ms, now = self._metrics.service_ms_ewma, now_ms()
            ages_ms = [now - sequence.started_ms for sequence in self._sequences if sequence.started_ms]
            raise Overloaded(
                f"the queue is full: {waiting:,} requests wait (max_queue is {limit:,})",
                retry_after_ms=full_queue_retry_ms(waiting, limit, service_ms, self._max_active, ages_ms),
            )

    def check_deadline(self, request: Request, prompt_tokens: int) -> None:
        """Refuse a request whose first token would come far too late for its own target."""
        target = request.slo.target_ttft_ms
        if target is None or request.priority < 0:
            return
        due_ms = now_ms() + target - request.priority * TUNING.lane_delay_ms
        wait = wait_ms(self._load_before(request.priority, due_ms), prompt_tokens, self._cost)
        if wait > BEYOND_REPAIR * target:
            raise Overloaded(
                f"the first token would take about {math.ceil(wait):,} ms; target_ttft_ms asks for {target:g}",
                retry_after_ms=retry_after_ms(wait, target),
            )

    def _load_before(self, lane: int, due_ms: float) -> Load:
        # (For sequences that have just come, the decode thread has not set a deadline yet.)
        ahead = [
            sequence
            for sequence in self._sequences
            if (
                sequence.due_ms - sequence.lane * TUNING.lane_delay_ms <= due_ms
                if sequence.due_ms
                else sequence.lane >= lane
            )
        ]
        # Background rows give up their slots, and part of these prompts will be cached, like earlier ones.
        running = sum(sequence.holding is not None and sequence.lane >= min(lane, 0) for sequence in self._sequences)
        uncached = 1 - self._metrics.cached_tokens_total / max(1, self._metrics.prompt_tokens_total)
        return Load(
            ahead_tokens=round(uncached * sum(sequence.prefill_left for sequence in ahead)),
            ahead_waiting=sum(sequence.started_ms == 0 for sequence in ahead),
            running=running,
            decoding=sum(sequence.generated > 0 for sequence in self._sequences),
            max_running=self._max_active,
            service_ms=self._metrics.service_ms_ewma,
            used_cells=self._worker.used_cells,
            tick_budget_ms=self._config.tick_budget_ms,
        )


def check_features(request: Request, max_active: int) -> None:
    """Raise `BadRequest` with a line for each field that another one, or the engine's size, rules out."""
    lines = _conflicts(request)
    if (count := request.sampling.drawn_answers) > max_active:
        name = "n" if count == request.sampling.n else "best_of"
        why = f"{count} answers need as many sequences, and {max_active} run here at once; ask for fewer, or run "
        lines.append(Wrong(name, why + "with a larger --max-sequences"))
    if lines:
        raise BadRequest(*lines)


def check_prompt(sampling: SamplingParams, prompt_tokens: int) -> None:
    """Raise `BadRequest` if a prompt has too many tokens for its log probabilities."""
    asked = sampling.prompt_logprobs
    if asked is not None and (asked + 1) * prompt_tokens > MAX_PROMPT_LOGPROBS:
        raise BadRequest.at(
            "prompt_logprobs",
            f"{asked} for each of {prompt_tokens:,} prompt tokens are more than "
            f"{MAX_PROMPT_LOGPROBS:,} in all; ask for fewer, or shorten the prompt",
        )


def _conflicts(request: Request) -> list[Wrong]:
    sampling = request.sampling
    lines = list[Wrong]()
    if any(request.placed_media()):
        lines += [
            Wrong(name, "beside pictures and sounds this cannot be told yet; leave it out")
            for name, value in (("echo", sampling.echo), ("prompt_logprobs", sampling.prompt_logprobs is not None))
            if value
        ]
        if sampling.reproducible:
            lines.append(Wrong("reproducible", "pictures and sounds cannot be read so yet; leave it out"))
    if sampling.grammar is not None and sampling.echo:
        lines.append(Wrong("echo", "a grammar is about the output alone; leave one of the two out"))
    if sampling.reproducible and (sampling.echo or sampling.prompt_logprobs is not None):
        name = "echo" if sampling.echo else "prompt_logprobs"
        lines.append(Wrong(name, "a reproducible request is told nothing of its prompt; leave one of the two out"))
    if sampling.best_of is not None and sampling.best_of > sampling.n and request.stream:
        lines.append(Wrong("best_of", "which answers are the best is known at their end; set stream to false"))
    return lines
