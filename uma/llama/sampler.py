"""Samples the next token, with llama.cpp's samplers in the order of its default chain.

Penalties, DRY, top-n-sigma, top-k, typical-p, top-p, min-p, XTC, temperature, draw. With Mirostat: penalties, DRY,
temperature, Mirostat; llama.cpp's own chain has no penalties and DRY there. Steps that would change nothing are left
out. Plain greedy rows do not need this: `argmax` over `Context.logits` gives the same token for all of them at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import llama_cpp.llama_cpp as lib

from uma.closing import Closing
from uma.llama.context import Context
from uma.llama.vocab import Vocab
from uma.types import SamplerSettings, SamplingParams

POSSIBLE = 1e-10
"""Tokens below this fraction of the highest probability are dropped before typical-p, XTC and Mirostat. Tokens that a
grammar excludes have probability 0: llama.cpp would take its logarithm there, or find such a token the least likely
choice."""
MIROSTAT_TOKENS = 100
"""Number of likeliest tokens from which Mirostat 1 estimates the distribution: llama.cpp's default."""
MIN_DIVISOR = 1e-6
"""Minimum temperature or repetition penalty passed to llama.cpp, which divides 32-bit logits by it. At this value the
likeliest token wins by any margin that those logits can have; a smaller one would overflow to infinity, then NaN."""


class Sampler(Closing):
    """Owner of one sequence's sampler chain. Its state (random numbers, penalty window) continues from token to token.

    The same parameters, seed, prompt and logits give the same tokens. Belongs to one thread at a time.
    """

    def __init__(self, vocab: Vocab, params: SamplingParams, seed: int, prompt_tail: Sequence[int] = ()) -> None:
        """`prompt_tail` is the end of the prompt, for penalties and DRY. Only as much of it counts as their windows
        hold.
        """
        self._handle: int | None = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        for step in _steps(params, vocab, seed):
            lib.llama_sampler_chain_add(self._handle, step)
        window = _window(params)
        for token in prompt_tail[-window:] if window else ():
            lib.llama_sampler_accept(self._handle, int(token))
        if not params.penalize_prompt and _has_penalties(params.settled):
            # Resets penalties, the first step of the chain; DRY, the second, still searches the prompt.
            lib.llama_sampler_reset(lib.llama_sampler_chain_get(self._handle, 0))

    def sample(self, context: Context, batch_index: int) -> int:
        """Sample the token that follows the batch's token at `batch_index`, and advance the chain's state.

        Uses changes to that row of `Context.logits`. Raises `ValueError` where no logits were computed there.
        """
        if self._handle is None:
            raise ValueError("the sampler is closed")
        # Checked first: llama.cpp ends the process for an index without logits.
        if not lib.llama_get_logits_ith(context.handle, batch_index):
            raise ValueError(f"batch_index: no logits were asked for at {batch_index} of the last batch")
        return int(lib.llama_sampler_sample(self._handle, context.handle, batch_index))

    def accept(self, token: int) -> None:
        """Advance the chain's state by a token that was chosen elsewhere. Draws no random number."""
        if self._handle is None:
            raise ValueError("the sampler is closed")
        lib.llama_sampler_accept(self._handle, token)

    def close(self) -> None:
        """Free the chain. Harmless when repeated."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            lib.llama_sampler_free(handle)


def _window(params: SamplingParams) -> int:
    """Number of tokens before the first sampled one that a step uses."""
    penalties = params.penalty_window if params.penalize_prompt and _has_penalties(params.settled) else 0
    return max(penalties, params.dry_window if params.dry_multiplier > 0 else 0)


def _has_penalties(params: SamplerSettings) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def _steps(params: SamplingParams, vocab: Vocab, seed: int) -> Iterator[int]:
    settings = params.settled
    if _has_penalties(settings):
        yield lib.llama_sampler_init_penalties(
            vocab.n_tokens,
            params.penalty_window,
            max(settings.repetition_penalty, MIN_DIVISOR),
            settings.frequency_penalty,
            settings.presence_penalty,
        )
    if params.dry_multiplier > 0:
        yield _dry(params, vocab)
    if settings.temperature == 0:
        yield lib.llama_sampler_init_greedy()
    elif params.mirostat:
        yield lib.llama_sampler_init_min_p(POSSIBLE, 1)
        yield _temperature(params)
        yield _mirostat(params, vocab.n_tokens, seed)
    else:
        yield from _cuts(params, vocab.n_tokens, seed)
        if settings.temperature != 1 or params.dynatemp_range > 0:
            yield _temperature(params)
        yield lib.llama_sampler_init_dist(_fixed(seed))


def _cuts(params: SamplingParams, n_vocab: int, seed: int) -> Iterator[int]:
    settings = params.settled
    if params.top_n_sigma is not None:
        yield lib.llama_sampler_init_top_n_sigma(params.top_n_sigma)
    if 0 < settings.top_k < n_vocab:  # C's 32 bits would turn 2**32 + 1 into a top-k of 1
        yield lib.llama_sampler_init_top_k(settings.top_k)
    if params.typical_p < 1:
        yield lib.llama_sampler_init_min_p(POSSIBLE, 1)
        yield lib.llama_sampler_init_typical(params.typical_p, 1)
    if settings.top_p < 1:
        yield lib.llama_sampler_init_top_p(settings.top_p, 1)
    if settings.min_p > 0:
        yield lib.llama_sampler_init_min_p(settings.min_p, 1)
    if params.xtc_probability > 0:
        yield lib.llama_sampler_init_min_p(POSSIBLE, 1)
        yield lib.llama_sampler_init_xtc(params.xtc_probability, params.xtc_threshold, 1, _fixed(seed))


def _temperature(params: SamplingParams) -> int:
    temperature = max(params.settled.temperature, MIN_DIVISOR)
    made: int = lib.llama_sampler_init_temp_ext(temperature, params.dynatemp_range, params.dynatemp_exponent)
    return made


def _mirostat(params: SamplingParams, n_vocab: int, seed: int) -> int:
    made: int
    if params.mirostat == 1:
        made = lib.llama_sampler_init_mirostat(
            n_vocab, _fixed(seed), params.mirostat_tau, params.mirostat_eta, MIROSTAT_TOKENS
        )
    else:
        made = lib.llama_sampler_init_mirostat_v2(_fixed(seed), params.mirostat_tau, params.mirostat_eta)
    return made


def _dry(params: SamplingParams, vocab: Vocab) -> int:
    breakers = [breaker.encode() for breaker in params.dry_sequence_breakers]
    with vocab.opened() as handle:
        made: int = lib.llama_sampler_init_dry(
            handle,
            params.dry_multiplier,
            params.dry_base,
            params.dry_allowed_length,
            params.dry_window,
            (ctypes.c_char_p * len(breakers))(*breakers),
            len(breakers),
        )
    return made


def _fixed(seed: int) -> int:
    # llama.cpp's highest seed means "random seed", so it would be the only one that does not repeat.
    return seed if seed != lib.LLAMA_DEFAULT_SEED else 0x5EED
