"""What decides a sequence's next token beside the logits. `worker.sampling` chooses tokens by it."""

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
    """Tokens that all reproducible prompts of a decision begin with: computed once, then copied to the others."""

    tokens: int
    """Tokens that all of them begin with."""
    computed: int = 0
    """Tokens that `memory` holds: whole batches of them."""
    memory: bytes | None = None


@attrs.define(slots=True, eq=False)
class LabelRead:
    """Log probabilities that are read from the last row of a prompt, instead of a choice: no token follows it."""

    prompt: array[int]
    tokens: npt.NDArray[np.intp]
    """Tokens that are read of the row."""
    logprobs: list[float] = attrs.field(factory=list)
    """Log probability of each, once the row is computed."""
    cached_tokens: int = 0
    """Tokens of the prompt that came from the cache."""
    spare_from: int | None = None
    """First token of the prompt that no later request resumes; None: all of it stays, for questions about its state."""
    start: SharedStart | None = None
    """Common beginning of the decision's prompts, where they are reproducible."""


@attrs.define(slots=True, eq=False)
class TokenChoice:
    """Sampler, grammar, bias and bound of thinking of one sequence, and the tokens that are known to come next."""

    seed: int = 0
    wants_logprobs: bool = False
    sampler: Sampler | None = None
    """None: greedy."""
    grammar: GrammarState | None = None
    """State of the grammar behind the sequence's tokens and `forced`."""
    forced: list[int] = attrs.field(factory=list)
    """Forced tokens, the only ones that the grammar allows, which the reader has not been given yet."""
    bias: Bias | None = None
    """Token ids, and what is added to their logits."""
    bounds_thinking: Callable[[int | None], ThinkingBound] | None = None
    """Makes `thinking` when an answer begins; None where the model does not think."""
    thinking: ThinkingBound | None = None
    """The bound of its thinking, if there is one."""
    closing: list[int] = attrs.field(factory=list)
    """Next tokens of the mark that closes its thinking, which are given one a step."""
    labels: LabelRead | None = None
    """What is read of the row behind the prompt, where no answer is wanted."""
    is_plain: bool = attrs.field(init=False)
    """Whether the next token depends on the unchanged logits alone (the fast path of `worker.sampling`)."""

    def __attrs_post_init__(self) -> None:
        self.is_plain = not (self.is_constrained or self.wants_logprobs or self.thinking or self.labels)

    @property
    def is_constrained(self) -> bool:
        """Whether a bias or a grammar changes its logits."""
        return self.grammar is not None or self.bias is not None

    @property
    def forces(self) -> bool:
        """Whether forced tokens are given before the tokens in front of them are computed. Not where log probabilities
        are asked for.
        """
        return not self.wants_logprobs

    def bound_thinking(self, limit: int | None) -> ThinkingBound | None:
        """Bound thinking from now on, if the model thinks; returns the bound that holds."""
        if self.thinking is None and self.bounds_thinking is not None:
            self.thinking, self.is_plain = self.bounds_thinking(limit), False
        return self.thinking
