"""The mixed load by `llama_decode` alone, with the promise that people's answers go on while prompts are read.

All rows that have been read take each step together, which costs least a token. Before each piece of a prompt they run
as far ahead as people's tokens, one every `pace_ms`, must last; a question is read at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import attrs

Rows = list[tuple[int, int, int, int]]
"""Tokens with their positions, sequences, and whether logits are wanted."""


@attrs.frozen
class MixedJob:
    """People who ask one question after the other, and prompts that are there from the start, each with an answer."""

    people: list[list[list[int]]]
    """For each their questions."""
    answer_tokens: int
    others: list[tuple[list[int], int]]
    """Prompts, and how many tokens to generate after each."""
    piece_tokens: int
    pace_ms: float


@attrs.frozen
class MixedResult:
    """Seconds until everything was done, and how late a person's token was at worst."""

    all_done_s: float
    worst_gap_ms: float
    generated: int


class Decoder(Protocol):
    """What computes; see `raw.RawDecoder`."""

    def batch_of(self, rows: Rows) -> None:
        """Compute a batch."""

    def forget(self, sequence: int) -> None:
        """Remove a sequence from memory."""


@attrs.define
class _Row:
    sequence: int
    position: int
    left: int
    """Tokens still to be generated."""


@attrs.define
class _Mixed:
    decoder: Decoder
    job: MixedJob
    began_s: float = attrs.field(factory=time.perf_counter)
    rows: list[_Row] = attrs.field(factory=list)
    due_s: float = 0.0
    """When people are given the next token of those that are computed."""
    last_s: float = 0.0
    """When they were given the last one; 0: nobody waits for one."""
    step_s: float = 0.0
    piece_s: float = 0.0
    """What the last of each took."""
    worst_gap_s: float = 0.0
    generated: int = 0

    def run(self) -> MixedResult:
        questions = [deque(each) for each in self.job.people]
        pieces = self._pieces()
        piece = next(pieces, None)
        while True:
            self._ask(questions)
            if piece is not None and (not self._has_people() or self._lasts()):
                self._read(*piece)
                piece = next(pieces, None)
            elif self.rows:
                self._step(is_paced=piece is not None)
            else:
                return MixedResult(time.perf_counter() - self.began_s, self.worst_gap_s * 1000, self.generated)

    def _has_people(self) -> bool:
        return any(row.sequence < len(self.job.people) for row in self.rows)

    def _lasts(self) -> bool:
        return self.due_s >= time.perf_counter() + self.piece_s + self.step_s

    def _ask(self, questions: list[deque[list[int]]]) -> None:
        """Read the next question of each person who waits for no answer, all in one batch."""
        busy = {row.sequence for row in self.rows}
        asked = [(person, each.popleft()) for person, each in enumerate(questions) if each and person not in busy]
        if not asked:
            return
        batch: Rows = []
        for person, prompt in asked:
            self.decoder.forget(person)
            batch += [(token, at, person, int(at == len(prompt) - 1)) for at, token in enumerate(prompt)]
        self.decoder.batch_of(batch)
        self.rows += [_Row(person, len(prompt), self.job.answer_tokens - 1) for person, prompt in asked]
        self.generated += len(asked)
        self._give(is_paced=True)

    def _pieces(self) -> Iterator[tuple[int, list[int], int, int]]:
        """Sequence, tokens, where they stand, and after the last piece of a prompt its answer's length, else 0."""
        for number, (prompt, answer) in enumerate(self.job.others, len(self.job.people)):
            for at in range(0, len(prompt), self.job.piece_tokens):
                tokens = prompt[at : at + self.job.piece_tokens]
                yield number, tokens, at, answer if at + len(tokens) == len(prompt) else 0

    def _read(self, sequence: int, tokens: list[int], at: int, answer: int) -> None:
        began = time.perf_counter()
        batch: Rows = [(token, at + index, sequence, 0) for index, token in enumerate(tokens)]
        if answer:
            batch[-1] = (*batch[-1][:3], 1)
            self.rows.append(_Row(sequence, at + len(tokens), answer - 1))
            self.generated += 1
        self.decoder.batch_of(batch)
        self.piece_s = time.perf_counter() - began

    def _step(self, *, is_paced: bool) -> None:
        began = time.perf_counter()
        self.decoder.batch_of([(1, row.position, row.sequence, 1) for row in self.rows])
        self.step_s = time.perf_counter() - began
        self.generated += len(self.rows)
        for row in self.rows:
            row.position, row.left = row.position + 1, row.left - 1
        self._give(is_paced=is_paced)
        self.rows = [row for row in self.rows if row.left > 0]

    def _give(self, *, is_paced: bool) -> None:
        """People are given their next token: at its time, or without a pace at once."""
        if not self._has_people():
            self.last_s = self.due_s = 0.0
            return
        now_s = time.perf_counter()
        given_s = max(now_s, self.due_s) if is_paced else now_s
        if self.last_s:
            self.worst_gap_s = max(self.worst_gap_s, given_s - self.last_s)
        self.last_s, self.due_s = given_s, given_s + self.job.pace_ms / 1000


def run_mixed(decoder: Decoder, job: MixedJob) -> MixedResult:
    """What such a schedule reaches."""
    return _Mixed(decoder, job).run()
