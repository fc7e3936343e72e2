"""From logits to what readers are given: each row's token, its text, and where a request ends by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows

import numpy as np

from uma.engine.delivery.outbox import AT_ONCE, HOLD_SHARE, Outbox
from uma.engine.delivery.stream import CREDITS
from uma.engine.worker.sequence import Sequence
from uma.llama.context import Context
from uma.llama.vocab import Vocab
from uma.metrics import EngineMetrics
from uma.types import FinishReason, Token

LOW_CREDITS = CREDITS // 4
"""A reader with room for no more events than this is given what there is at once."""


def choose_tokens(context: Context, sequences: Rows[Sequence], batch_indices: Rows[int]) -> list[int]:
    """Sample the rows of the batch just computed that have logits, which are these, in this order."""
    logits, vocab = context.logits(len(sequences)), context.model.vocab
    likeliest: list[int] = []
    tokens: list[int] = []
    for row, sequence in enumerate(sequences):
        if sequence.sampler is not None:
            if sequence.suppresses_end:
                logits[row, vocab.eog_ids] = -np.inf
            tokens.append(sequence.sampler.sample(context, batch_indices[row]))
            continue
        # Greedy rows all at once: one pass of numpy over the matrix instead of a call for each row.
        likeliest = likeliest or logits.argmax(axis=1).tolist()
        token = likeliest[row]
        if token in vocab.eog and sequence.suppresses_end:
            logits[row, vocab.eog_ids] = -np.inf
            token = int(logits[row].argmax())
        tokens.append(token)
    return tokens


def hold_ms(sequence: Sequence) -> float:
    """For how long its reader would not mind to be given nothing."""
    return HOLD_SHARE * sequence.row.target_tbt_ms if sequence.request.stream else math.inf


def tokens_alike(sequence: Sequence) -> int:
    """How many tokens may be sampled before one has to be accepted, for all of them mean the same until then.

    (The end of a text may be among them, but not a stop string: that is found in what they say.)
    """
    sampling, generated = sequence.request.sampling, sequence.generated
    if sampling.stop:
        return 1
    alike = sequence.max_tokens - generated
    if sampling.min_tokens > generated:
        alike = min(alike, sampling.min_tokens - generated)
    return min(alike, sequence.credits - LOW_CREDITS) if sequence.request.stream else alike


class Output:
    """Takes sampled tokens, and has what they mean handed to the readers. Belongs to the decode thread."""

    def __init__(self, vocab: Vocab, metrics: EngineMetrics, outbox: Outbox) -> None:
        self._vocab = vocab
        self._metrics = metrics
        self._outbox = outbox

    def accept(self, sequence: Sequence, token: int, now_ms: float) -> FinishReason | None:
        """Give the token's text to the reader. Returns why the request ends with it, if it does."""
        if token in self._vocab.eog:
            return "stop"
        sequence.tokens.append(token)
        text = sequence.text.push(self._vocab.piece(token))
        is_last = sequence.generated + 1 >= sequence.max_tokens
        if is_last and not sequence.text.stopped:
            text += sequence.text.finish()
        self._count(sequence, now_ms)
        self._give(sequence, token, text, now_ms)
        if sequence.text.stopped:
            return "stop"
        if is_last:
            return "length"
        sequence.row.remaining = 0
        return None

    def release_held(self, sequence: Sequence) -> None:
        """Give out what was held for a character or stop string that never came. It is no token, and not counted."""
        held = sequence.text.finish()
        if not held:
            return
        if sequence.request.stream:
            self._outbox.add(sequence.stream, Token(sequence.request.id, held, sequence.tokens[-1]))
        else:
            sequence.pieces.append(held)

    def _count(self, sequence: Sequence, now_ms: float) -> None:
        metrics, row = self._metrics, sequence.row
        sequence.generated += 1
        row.had_token(now_ms)
        if sequence.generated == 1:
            sequence.first_token_ms = now_ms
        if sequence.is_probe:
            return
        metrics.tokens_generated_total += 1
        if sequence.generated == 1:
            metrics.ttft_ms.observe(now_ms - row.arrived_ms)
        else:
            metrics.inter_token_ms.observe(row.last_gap_ms)

    def _give(self, sequence: Sequence, token: int, text: str, now_ms: float) -> None:
        if not sequence.request.stream:
            sequence.pieces.append(text)
            return
        is_urgent = sequence.generated == 1 or sequence.credits <= LOW_CREDITS
        due_ms = AT_ONCE if is_urgent else now_ms + hold_ms(sequence)
        self._outbox.add(sequence.stream, Token(sequence.request.id, text, token), due_ms)
        sequence.credits -= 1
        if sequence.credits <= 0:
            sequence.row.is_paused, sequence.paused_ms = True, now_ms
