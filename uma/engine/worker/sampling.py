"""From logits to tokens: greedy rows all at once, the others by their own sampler chain.

How a row's result is extended:

- A constraint on the next token (the end of text that must not come yet, a grammar) is a mask: set the excluded
  columns of `logits[row]` to -inf before the row's token is chosen. The logits are llama.cpp's own memory, so a sampler
  chain sees the mask.
- A row can be given several tokens at once. Tokens that are certain without computing (the only continuation that a
  grammar allows) are appended to the row's tuple after the sampled one. All of them are given to the reader in this
  step; the next batch computes them together, and samples after the last.
- `logprob` and `top` stay None and empty unless the request asks for them: nothing is computed for the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np

from uma.engine.worker.sequence import Sequence
from uma.llama.context import Context


class Sampled(NamedTuple):
    """One token that a sequence continues with."""

    token: int
    logprob: float | None = None
    """Natural logarithm of the token's probability before sampling parameters; None where not asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their `logprob`, most likely first, as many as were asked for."""


Given = tuple[Sampled, ...] | Exception
"""What a step gives a row: its next tokens, one as a rule; or the fault that ends this sequence alone."""


def sample(context: Context, sequences: Rows[Sequence], batch_indices: Rows[int]) -> list[Given]:
    """Sample the rows of the batch just computed that have logits, which are these, in this order."""
    logits = context.logits(len(sequences))
    eog = context.model.vocab.eog
    likeliest: list[int] = []
    given: list[Given] = []
    for row, sequence in enumerate(sequences):
        try:
            if sequence.sampler is not None:
                if sequence.suppresses_end:
                    logits[row, context.model.vocab.eog_ids] = -np.inf
                token = sequence.sampler.sample(context, batch_indices[row])
            else:
                # Greedy rows all at once: one pass of numpy over the matrix instead of a call for each row.
                likeliest = likeliest or logits.argmax(axis=1).tolist()
                token = likeliest[row]
                if token in eog and sequence.suppresses_end:
                    logits[row, context.model.vocab.eog_ids] = -np.inf
                    token = int(logits[row].argmax())
        except Exception as error:  # noqa: BLE001  (whatever it is, it is this row's alone)
            given.append(error)
        else:
            given.append((Sampled(token),))
    return given
