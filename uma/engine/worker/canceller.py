"""Aborts a batch whose requests are all cancelled, or all of the background lane when a request of another comes.

A cancel is a command, and the decode thread takes commands up between two batches. A batch can take seconds, with a
large model on few cores, and where nothing that it computes is wanted any more, all other requests would wait for it.
So the thread that cancels has llama.cpp abort it. A batch with one request that is still wanted goes on. So does one of
several sequences with recurrent states: to compute it, llama.cpp moves states of others too, and in the midst of
that none is known, so that all others would be read again.

In the same way a background batch gives way to a request of a higher lane, and is computed after it. One that has not
begun always does; one that runs is not aborted again and again.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from uma.engine.clock import now_ms
from uma.engine.policy.tuning import TUNING
from uma.engine.worker.sequence import Sequence
from uma.llama.context import Context


class BatchCanceller:
    """Sequences that are cancelled, those that come, and the batch that runs. `cancel` and `submitted` can be called
    from any thread; the other methods belong to the decode thread.
    """

    def __init__(self, context: Context, *, can_abort: bool = False) -> None:
        """Make a canceller. With `can_abort`, what a batch of several sequences has left in memory can be cut off."""
        self._context = context
        self._can_abort = can_abort
        self._gave_way_ms = -TUNING.held_ms
        self._cancelled: set[Sequence] = set()
        """Cancelled sequences whose command has not been taken up."""
        self._submitted: set[Sequence] = set()
        """Sequences that are handed over and not taken up yet, but for background ones."""
        self._running: Collection[Sequence] = ()
        self._lock = threading.Lock()
        """Held while a batch is aborted, and while it ends: an abort is never meant for the batch after it."""
        self._is_aborted = False

    def cancel(self, sequence: Sequence) -> None:
        """A sequence is cancelled; its command follows."""
        with self._lock:
            self._cancelled.add(sequence)
            # Not a batch of several with states: a client that asked and left had all other streams read their texts
            # again.
            if (self._can_abort or len(self._running) == 1) and self._are_cancelled(self._running):
                self._is_aborted = True
                self._context.request_retry()

    def submitted(self, sequence: Sequence) -> None:
        """A sequence is handed over; its command follows."""
        if sequence.lane < 0:
            return
        with self._lock:
            self._submitted.add(sequence)
            # Not each time: with a request every second or two, a long background batch would never come to its end.
            is_again = now_ms() - self._gave_way_ms < TUNING.held_ms
            if self._can_abort and not is_again and self._give_way(self._running):
                self._gave_way_ms = now_ms()
                self._is_aborted = True
                self._context.request_retry()

    def submit_taken(self, sequence: Sequence) -> None:
        """The command that hands it over was taken up: it can be in the next batch."""
        with self._lock:
            # The mark of a cancel stays (`cancel_taken`): forgotten here, a batch of a request that was cancelled
            # before it was taken up was computed to its end.
            self._submitted.discard(sequence)

    def cancel_taken(self, sequence: Sequence) -> None:
        """The command that cancels it was taken up: it is in no further batch."""
        with self._lock:
            self._cancelled.discard(sequence)

    def begin(self, sequences: Collection[Sequence]) -> bool:
        """A batch of these goes to llama.cpp; False where none of it is wanted now: then it must not."""
        # Set before reading what was cancelled: a cancel that comes between the two sees the batch, and aborts it.
        self._running = sequences
        if self._are_cancelled(sequences) or self._give_way(sequences):
            self._is_aborted = True
        return not self._is_aborted

    def end(self) -> bool:
        """The batch has come back; whether it was aborted. It can be whole all the same, where the abort came too late;
        the context must `resume` in either case.
        """
        with self._lock:
            self._running, is_aborted, self._is_aborted = (), self._is_aborted, False
        return is_aborted

    def _are_cancelled(self, sequences: Collection[Sequence]) -> bool:
        return bool(self._cancelled and sequences) and self._cancelled.issuperset(sequences)

    def _give_way(self, sequences: Collection[Sequence]) -> bool:
        return bool(self._submitted and sequences) and all(sequence.lane < 0 for sequence in sequences)
