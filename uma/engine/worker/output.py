"""Turns sampled tokens into events: text for the reader, and the end of a request that ends by its tokens."""

from __future__ import annotations

import math

from uma.engine.delivery.outbox import Outbox
from uma.engine.delivery.pacing import due_ms, reader_ms, uniform_steps
from uma.engine.worker.sampling import SampledToken
from uma.engine.worker.sequence import PromptReport, Sequence
from uma.engine.worker.status import Status
from uma.llama.vocab import Vocab
from uma.metrics import EngineMetrics
from uma.types import Finished, FinishReason, Prompt, Token


def steps_ahead(sequence: Sequence) -> float:
    """Decode steps that the sequence can run before one of its tokens must be checked."""
    sampling = sequence.request.sampling
    return uniform_steps(
        generated=sequence.generated,
        max_tokens=sequence.max_tokens,
        min_tokens=sampling.min_tokens,
        credits=sequence.credits if sequence.request.stream else math.inf,
        is_checked_each_token=bool(sampling.stop),
    )


class Output:
    """Turns tokens into events, and buffers these in the outbox. Belongs to the decode thread."""

    def __init__(self, vocab: Vocab, metrics: EngineMetrics, outbox: Outbox) -> None:
        self._vocab = vocab
        self._metrics = metrics
        self._outbox = outbox
        self.pace_ms = 0.0
        """Minimum time between two tokens at a reader, by the plan in force; 0: each is given as it comes."""

    def accept(self, sequence: Sequence, given: tuple[SampledToken, ...], now_ms: float) -> FinishReason | None:
        """Give a step's tokens to the reader, in order. If the request ends with one of them, returns the reason, and
        drops the tokens after it.
        """
        if sequence.report is not None:
            self._tell_prompt(sequence, sequence.report)
        if sequence.max_tokens == 0:  # only its prompt was wanted
            return "length" if sequence.choice.labels is None else "stop"
        for sampled in given:
            reason = self._accept(sequence, sampled, now_ms)
            if reason is not None:
                return reason
        if sequence.credits <= 0 and sequence.status is Status.DECODING:
            sequence.fall_behind(now_ms)
        return None

    def _accept(self, sequence: Sequence, sampled: SampledToken, now_ms: float) -> FinishReason | None:
        token = sampled.token
        if token in self._vocab.eog:
            return "stop"
        sequence.tokens.append(token)
        is_last = sequence.generated + 1 >= sequence.max_tokens
        piece = sequence.answer.spellings.get(token) or self._vocab.piece(token)
        text = sequence.answer.text.push(piece)
        if is_last or sampled.is_end:
            text += sequence.answer.text.finish()
        given_ms = now_ms
        if sequence.is_paced:
            given_ms = reader_ms(sequence.last_token_ms, now_ms, self.pace_ms)
        self._count(sequence, given_ms)
        self._give(sequence, sampled, text, now_ms)
        if sampled.is_end or sequence.answer.text.stopped:
            return "stop"
        return "length" if is_last else None

    def _count(self, sequence: Sequence, now_ms: float) -> None:
        sequence.had_token(now_ms)
        metrics = self._metrics
        metrics.tokens_generated_total += 1
        if sequence.generated == 1:
            metrics.ttft_ms.observe(now_ms - sequence.arrived_ms)
        else:
            metrics.inter_token_ms.observe(sequence.last_gap_ms)

    def _give(self, sequence: Sequence, sampled: SampledToken, text: str, now_ms: float) -> None:
        logprobs = sampled.logprobs
        if not sequence.request.stream:
            sequence.answer.pieces.append(text)
            if logprobs is not None:
                sequence.answer.logprobs.append(logprobs)
            return
        due = due_ms(
            now_ms,
            sequence.hold_ms,
            is_first=sequence.generated == 1,
            is_early=sequence.last_token_ms > now_ms,
            credits=sequence.credits,
        )
        event = Token(sequence.request.id, text, sampled.token, sequence.index, logprobs, sequence.answer.text.holds)
        self._outbox.add(sequence.stream, event, due, sequence.last_token_ms)
        sequence.spend_credit()

    def _tell_prompt(self, sequence: Sequence, report: PromptReport) -> None:
        """Give the reader the report about its prompt, once it is complete."""
        if report.is_reported or report.pending(sequence.prompt_tokens):
            return
        report.is_reported = True
        if sequence.request.stream:
            self._outbox.add(sequence.stream, self._prompt(sequence, report))
            sequence.spend_credit()

    def _prompt(self, sequence: Sequence, report: PromptReport) -> Prompt:
        return report.event(sequence.request.id, sequence.tokens[: sequence.prompt_tokens])

    def last_event(self, sequence: Sequence, reason: FinishReason, now_ms: float) -> Finished:
        """The event that ends a request, after text that was held back for it was given out.

        A cancelled reader gets no such text: the stream would count it as a token computed ahead.
        """
        is_streamed, report, left_out = sequence.request.stream, sequence.report, sequence.account.left_out
        if report is not None:
            self._tell_prompt(sequence, report)
        if reason != "cancelled":
            self._release_held(sequence)
        return Finished(
            id=sequence.request.id,
            reason=reason,
            usage=sequence.usage(),
            metrics=sequence.metrics(now_ms),
            seed=sequence.choice.seed,
            text=None if is_streamed else "".join(sequence.answer.pieces),
            token_ids=None if is_streamed else tuple(sequence.tokens[sequence.prompt_tokens :]),
            warnings=_warnings(sequence),
            logprobs=tuple(sequence.answer.logprobs) if sequence.choice.wants_logprobs and not is_streamed else None,
            stop_string=sequence.answer.text.stopped_by if reason == "stop" else None,
            prompt=self._prompt(sequence, report)
            if report is not None and report.is_reported and not is_streamed
            else None,
            dropped_messages=left_out.dropped_messages,
            summary=left_out.summary,
        )

    def _release_held(self, sequence: Sequence) -> None:
        """Give out text held back for a character or stop string that never came. It does not count as a token."""
        held = sequence.answer.text.finish()
        if not held:
            return
        if sequence.request.stream:
            event = Token(sequence.request.id, held, sequence.tokens[-1], sequence.index)
            self._outbox.add(sequence.stream, event, not_before_ms=sequence.last_token_ms)
        else:
            sequence.answer.pieces.append(held)


def _warnings(sequence: Sequence) -> tuple[str, ...]:
    """Warnings for its last event."""
    thinking = sequence.choice.thinking
    return (*sequence.warnings, thinking.warning) if thinking is not None and thinking.warning else sequence.warnings
