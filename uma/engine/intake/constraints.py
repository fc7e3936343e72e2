"""Constraints of a request's output, prepared before it is queued: its grammar and its logit bias.

An unknown grammar is compiled in a thread, if possible on a core that computes nothing else. Its own request waits for
that, as do others with the same grammar, and those with new grammars beyond the number of such cores. A request with a
known grammar, or none, does not wait.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, islice
from typing import Any

import attrs
import numpy as np
import trio

from uma.engine.intake.lanes import LaneLimiter, Slot
from uma.engine.worker.choice import Bias
from uma.errors import BadRequest
from uma.llama.grammar import GrammarCompiler, GrammarState, key_of
from uma.llama.vocab import Vocab
from uma.types import Grammar, SamplingParams

AT_ONCE_CHARS = 4096
"""Maximum size of a grammar that is looked up on the Trio thread, where its forced text is also tokenized."""


@attrs.define(eq=False)
class _Compiling:
    """A grammar that one request compiles and others wait for, without a slot."""

    ended: trio.Event = attrs.field(factory=trio.Event)
    refusal: BadRequest | None = None
    """Why it cannot be compiled, once that is known."""


class Constraints:
    """Prepares constraints for one vocabulary. Belongs to the Trio thread."""

    def __init__(self, vocab: Vocab, compiler: GrammarCompiler, at_once: int) -> None:
        """`at_once`: maximum grammars compiled at a time; each takes a whole core."""
        self._vocab = vocab
        self._compiler = compiler
        self._lanes = LaneLimiter(at_once)
        self._look = trio.CapacityLimiter(1)
        self._compiling: dict[str, _Compiling] = {}
        """Grammars that are being compiled, by `key_of`."""

    async def grammar(
        self, sampling: SamplingParams, before: str = "", lane: int = 0
    ) -> tuple[GrammarState | None, list[int]]:
        """Initial state of the grammar, and the tokens that it forces there. `before` is what can come before its text,
        as in `GrammarCompiler.compile`. Raises `BadRequest` with the place that cannot be served.
        """
        if sampling.grammar is None:
            return None, []
        if sampling.reproducible:  # not shared: its text depends on no other, and does not wait midway
            begin = partial(self._begin, _Compiling(), sampling, before)
            async with self._lanes.slot(lane) as slot:
                return await slot.in_thread(begin)
        while True:
            key, known = (
                self._known(sampling, before)
                if _is_short(sampling.grammar)
                else await trio.to_thread.run_sync(
                    self._known_in_turn, sampling, before, limiter=self._look, abandon_on_cancel=True
                )
            )
            if known is not None:
                return known
            async with self._lanes.slot(lane) as slot:
                compiling = self._compiling.get(key)
                if compiling is None:
                    return await self._compile(slot, key, sampling, before)
            await compiling.ended.wait()
            if compiling.refusal is not None:
                raise BadRequest(*compiling.refusal.lines)

    def _known(self, sampling: SamplingParams, before: str) -> tuple[str, tuple[GrammarState, list[int]] | None]:
        assert sampling.grammar is not None
        key = key_of(sampling.grammar, before)
        state = self._compiler.kept(key)
        return key, None if state is None else (state, _opening(state, sampling))

    def _known_in_turn(
        self, sampling: SamplingParams, before: str
    ) -> tuple[str, tuple[GrammarState, list[int]] | None]:
        with self._compiler.turn:
            return self._known(sampling, before)

    async def _compile(
        self, slot: Slot, key: str, sampling: SamplingParams, before: str
    ) -> tuple[GrammarState, list[int]]:
        compiling = self._compiling[key] = _Compiling()

        def end() -> None:
            del self._compiling[key]
            compiling.ended.set()

        slot.at_end = end  # not in `finally`: the request can be cancelled before the thread ends
        return await slot.in_thread(partial(self._begin, compiling, sampling, before))

    def _begin(self, compiling: _Compiling, sampling: SamplingParams, before: str) -> tuple[GrammarState, list[int]]:
        assert sampling.grammar is not None
        try:
            state = self._compiler.compile(sampling.grammar, before, is_shared=not sampling.reproducible)
            with self._compiler.turn:
                return state, _opening(state, sampling)
        except BadRequest as error:
            compiling.refusal = error
            raise

    def serves(self, grammar: Grammar) -> bool:
        """Whether a grammar can be served. Any thread; takes as long as compiling it."""
        return self._compiler.serves(grammar)

    def bias(self, sampling: SamplingParams) -> Bias | None:
        """Token ids and what is added to their logits. Raises `BadRequest` for an id outside the vocabulary, and for a
        text without tokens.
        """
        if not sampling.logit_bias:
            return None
        values: dict[int, float] = {}
        for key, value in sampling.logit_bias.items():
            for token in self._tokens_of(key):
                values[token] = values.get(token, 0.0) + value
        return np.array(list(values), np.int32), np.array(list(values.values()), np.float32)

    def _tokens_of(self, key: str) -> set[int]:
        if key.isascii() and key.isdigit():
            if int(key) >= self._vocab.n_tokens:
                raise BadRequest.at("logit_bias", f"{key} is not in the vocabulary of {self._vocab.n_tokens:,} tokens")
            return {int(key)}
        tokens = set(self._vocab.tokenize(key, add_special=False, parse_special=False).tolist())
        if not tokens:
            raise BadRequest.at("logit_bias", f"{key!r} has no token; give ids or texts")
        return tokens


def _opening(state: GrammarState, sampling: SamplingParams) -> list[int]:
    return state.force() if sampling.logprobs is None else []


def _is_short(grammar: Grammar) -> bool:
    """Whether it has at most `AT_ONCE_CHARS` characters, in a time that does not grow with the rest."""
    left = AT_ONCE_CHARS
    parts: list[Any] = [getattr(grammar, field.name) for field in attrs.fields(Grammar)]
    while parts and left >= 0:
        part = parts.pop()
        left -= len(part) if isinstance(part, str) else 1
        if isinstance(part, dict):
            parts += islice(chain(part, part.values()), left + 1)
        elif isinstance(part, list | tuple):
            parts += part[: left + 1]
    return left >= 0
