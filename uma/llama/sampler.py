"""Choosing the next token, by llama.cpp's own samplers in the order of its default chain.

Penalties, top-k, top-p, min-p, temperature, draw. A step that would change nothing is left out. Plain greedy rows
need none of this: `argmax` over `Context.logits` gives the same token for all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType

import llama_cpp.llama_cpp as lib

from uma.llama.context import Context
from uma.llama.vocab import Vocab
from uma.types import SamplerSettings, SamplingParams

PENALTY_WINDOW = 64
"""Penalties look back over this many tokens, prompt included: llama.cpp's default."""
MIN_DIVISOR = 1e-6
"""Smallest temperature or repetition penalty given to llama.cpp, which divides 32-bit logits by it. At this value the
likeliest token wins by any margin that those logits can hold; a smaller one would overflow to infinity, then NaN."""


class Sampler:
    """Owner of one sequence's sampler chain. Its state (random numbers, penalty window) goes on from token to token.

    The same parameters, seed, prompt and logits give the same tokens. Belongs to one thread at a time.
    """

    def __init__(self, vocab: Vocab, params: SamplingParams, seed: int, prompt_tail: Sequence[int] = ()) -> None:
        """`prompt_tail` is the end of the prompt, for the penalties: only its last 64 tokens count."""
        self._handle: int | None = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        settings = params.settled
        for step in _steps(settings, vocab.n_tokens, seed):
            lib.llama_sampler_chain_add(self._handle, step)
        for token in prompt_tail[-PENALTY_WINDOW:] if _has_penalties(settings) else ():
            lib.llama_sampler_accept(self._handle, int(token))

    def sample(self, context: Context, batch_index: int) -> int:
        """Choose the token that follows the batch's token at `batch_index`, and take it into account from now on.

        Changes made to that row of `Context.logits` count. Raises `ValueError` where no logits were asked for there.
        """
        if self._handle is None:
            raise ValueError("the sampler is closed")
        # llama.cpp ends the process for an index without logits, so it is asked first.
        if not lib.llama_get_logits_ith(context.handle, batch_index):
            raise ValueError(f"batch_index: no logits were asked for at {batch_index} of the last batch")
        return int(lib.llama_sampler_sample(self._handle, context.handle, batch_index))

    def close(self) -> None:
        """Free the chain. Harmless when repeated."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            lib.llama_sampler_free(handle)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _has_penalties(params: SamplerSettings) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def _steps(params: SamplerSettings, n_vocab: int, seed: int) -> Iterator[int]:
    if _has_penalties(params):
        yield lib.llama_sampler_init_penalties(
            n_vocab,
            PENALTY_WINDOW,
            max(params.repetition_penalty, MIN_DIVISOR),
            params.frequency_penalty,
            params.presence_penalty,
        )
    if params.temperature == 0:
        yield lib.llama_sampler_init_greedy()
        return
    if 0 < params.top_k < n_vocab:  # C's 32 bits would make 2**32 + 1 a top-k of 1
        yield lib.llama_sampler_init_top_k(params.top_k)
    if params.top_p < 1:
        yield lib.llama_sampler_init_top_p(params.top_p, 1)
    if params.min_p > 0:
        yield lib.llama_sampler_init_min_p(params.min_p, 1)
    if params.temperature != 1:
        yield lib.llama_sampler_init_temp(max(params.temperature, MIN_DIVISOR))
    yield lib.llama_sampler_init_dist(_fixed(seed))


def _fixed(seed: int) -> int:
    # llama.cpp takes its highest seed to mean "draw one", which would make that seed the only one that does not repeat.
    return seed if seed != lib.LLAMA_DEFAULT_SEED else 0x5EED
