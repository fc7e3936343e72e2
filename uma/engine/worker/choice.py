"""What decides one sequence's next tokens, beside its logits. `worker.sampling` chooses them by it."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import attrs
import numpy as np
import numpy.typing as npt

from uma.engine.worker.thinking import ThinkingBound
from uma.llama.grammar import GrammarState
from uma.llama.sampler import Sampler

Bias = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


@attrs.define(slots=True, eq=False)
class SharedStart:
    """What reproducible prompts of one decision begin with: computed once, and copied for each of the others."""

    tokens: int
    """Tokens that all of them begin with."""
    computed: int = 0
    """Tokens that `memory` holds: whole batches of them."""
    memory: bytes | None = None


@attrs.define(slots=True, eq=False)
class LabelRead:
    """Log probabilities that are read of a prompt's last row, instead of a choice: nothing is written behind it."""

    prompt: array[int]
    tokens: npt.NDArray[np.intp]
    """Tokens that are read of the row."""
    logprobs: list[float] = attrs.field(factory=list)
    """Log probability of each, once the row is computed."""
    cached_tokens: int = 0
    """Tokens of the prompt that came from the cache."""
    spare_from: int | None = None
    """First token of the prompt that nobody comes back to; none for one question, which stays for the state."""
    start: SharedStart | None = None
    """Where the prompt is reproducible: what it has in common with the others."""


@attrs.define(slots=True, eq=False)
class TokenChoice:
    """Sampler, grammar, bias and bound of thinking of one sequence, and the tokens that are certain to come next."""

    seed: int = 0
    wants_logprobs: bool = False
    sampler: Sampler | None = None
    """None: greedy."""
    grammar: GrammarState | None = None
    """State of the grammar behind all tokens of the sequence and of `forced`."""
    forced: list[int] = attrs.field(factory=list)
    """Next tokens that the grammar leaves no choice about, not yet given to the reader."""
    bias: Bias | None = None
    """Token ids, and what is added to their logits."""
    bounds_thinking: Callable[[int | None], ThinkingBound] | None = None
    """Makes what `thinking` is, for an answer that has just begun; None where the model does not think."""
    thinking: ThinkingBound | None = None
    """The bound of its thinking, if there is one."""
    closing: list[int] = attrs.field(factory=list)
    """Next tokens of the mark that closes its thinking, where each is computed by itself."""
    labels: LabelRead | None = None
    """What is read of the row behind the prompt, where nothing more is wanted."""
    is_plain: bool = attrs.field(init=False)
    """Whether its next token needs its logits as they are, and nothing else is asked of them or depends on them."""

    def __attrs_post_init__(self) -> None:
        self.is_plain = not (self.is_constrained or self.wants_logprobs or self.thinking or self.labels)

    @property
    def is_constrained(self) -> bool:
        """Whether a bias or a grammar changes its logits."""
        return self.grammar is not None or self.bias is not None

    @property
    def forces(self) -> bool:
        """Whether forced tokens are given without computing what comes before them. Not where their log probability is
        asked.
        """
        return not self.wants_logprobs

    def bound_thinking(self, limit: int | None) -> ThinkingBound | None:
        """Bound its thinking from now on, where the model thinks; returns the bound that holds."""
        if self.thinking is None and self.bounds_thinking is not None:
            self.thinking, self.is_plain = self.bounds_thinking(limit), False
        return self.thinking
