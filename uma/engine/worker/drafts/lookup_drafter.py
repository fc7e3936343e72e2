"""Prompt look-up as a drafter: a `Lookup` follows each decode row's text, and its guesses take no time."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from weakref import WeakKeyDictionary

from uma.engine.kv.pool import KvPool
from uma.engine.worker.chances import Chances
from uma.engine.worker.drafts.drafter import NOTHING, Guess
from uma.engine.worker.lookup import CHANCES, Lookup
from uma.engine.worker.sequence import Sequence
from uma.llama.vocab import Vocab

LIKELY = 0.75
"""Minimum chance of its first token for which a guess ends a stride: the policy then says whether it is verified."""


class LookupDrafter:
    """A `Drafter`. Texts are followed from the first time that drafts could pay."""

    def __init__(self, pool: KvPool, vocab: Vocab) -> None:
        self._pool = pool
        self._vocab = vocab
        self._chances = Chances(CHANCES)
        """Of all texts: what a new one begins with."""
        self._guesses: WeakKeyDictionary[Sequence, Guess] = WeakKeyDictionary()
        """The last of each row."""

    def prospects(self, sequence: Sequence, most: int) -> Rows[float]:
        """Those of the guess itself."""
        lookup = self._lookup(sequence)
        tokens = lookup.guess(most)
        for index, token in enumerate(tokens):
            if token in self._vocab.eog:
                tokens = tokens[:index]
                break
        if tokens and sequence.grammar is not None:
            tokens = tokens[: sequence.grammar.common(tokens)]
        found = self._guesses[sequence] = Guess(tokens, lookup.chances(len(tokens))) if tokens else NOTHING
        return found.chances

    def step_ms(self, rows: int) -> float:
        """Nothing is computed."""
        return 0.0

    def guess(self, rows: Rows[tuple[Sequence, int]], plain_ms: float, within_ms: float) -> list[Guess]:
        """What `prospects` found."""
        found = [(self._guesses[sequence], most) for sequence, most in rows]
        return [Guess(each.tokens[:most], each.chances[:most]) for each, most in found]

    def takes_in(self, sequence: Sequence, token: int) -> bool:
        """Whether the text has come to where it repeats, most probably."""
        lookup = sequence.lookup
        if lookup is None:
            return False
        lookup.push(token)
        return lookup.agreed > 0 and lookup.chances(1)[0] >= LIKELY

    def abort(self) -> None:
        """There is nothing to end."""

    def _lookup(self, sequence: Sequence) -> Lookup:
        lookup = sequence.lookup
        if lookup is None:
            lookup = sequence.lookup = Lookup(sequence.tokens, self._chances)
            if ahead := self._pool.continuation(sequence.tokens, sequence.max_tokens):
                lookup.follow(ahead)
        else:
            lookup.catch_up(sequence.tokens)
        return lookup
