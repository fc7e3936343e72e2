"""Aborts a batch whose requests are all cancelled, or all of the background lane when a request of another comes.

A cancel is a command, and the decode thread takes commands between two batches. A batch can take seconds, with a large
model on few cores, and other requests would wait for it although nothing that it computes is wanted. So the thread that
cancels has llama.cpp abort the batch. A batch with one request that is still wanted goes on, and so does one of several
sequences with recurrent states: llama.cpp moves the states of other sequences for it too, after an abort none of them
is known, and all these prompts would be read again.

In the same way a background batch gives way to a request of a higher lane, and is computed after it. A batch that has
not begun always does; one that runs is not aborted again and again.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from uma.engine.clock import now_ms
from uma.engine.policy.tuning import TUNING
from uma.engine.worker.sequence import Sequence
from uma.llama.context import Context


class BatchCanceller:
    """Cancelled sequences, new ones, and the batch that runs. `cancel` and `submitted` can be called from any thread;
    the other methods belong to the decode thread.
    """

    def __init__(self, context: Context, *, can_abort: bool = False) -> None:
        """`can_abort`: what an aborted batch of several sequences leaves in memory can be cut off."""
        self._context = context
        self._can_abort = can_abort
        self._gave_way_ms = -TUNING.held_ms
        self._cancelled: set[Sequence] = set()
        """Cancelled sequences whose command the decode thread has not taken."""
        self._submitted: set[Sequence] = set()
        """Submitted sequences, but for background ones, whose command the decode thread has not taken."""
        self._running: Collection[Sequence] = ()
        self._lock = threading.Lock()
        """Held while a batch is aborted, and while it ends: an abort is never meant for the batch after it."""
        self._is_aborted = False

    def cancel(self, sequence: Sequence) -> None:
        """Note a cancelled sequence, and abort a batch that has only such; call it before the command is posted."""
        with self._lock:
            self._cancelled.add(sequence)
            # Not a batch of several with states: a client that asked and left had all other streams read their texts
            # again.
            if (self._can_abort or len(self._running) == 1) and self._are_cancelled(self._running):
                self._is_aborted = True
                self._context.request_retry()

    def submitted(self, sequence: Sequence) -> None:
        """Note a submitted sequence, and abort a background batch for it; call it before the command is posted."""
        if sequence.lane < 0:
            return
        with self._lock:
            self._submitted.add(sequence)
            # Not each time: with a request every second or two, a long background batch would never complete.
            is_again = now_ms() - self._gave_way_ms < TUNING.held_ms
            if self._can_abort and not is_again and self._give_way(self._running):
                self._gave_way_ms = now_ms()
                self._is_aborted = True
                self._context.request_retry()

    def submit_taken(self, sequence: Sequence) -> None:
        """Note that the decode thread has taken the submission: the sequence can be in the next batch."""
        with self._lock:
            # Its cancel mark stays until `cancel_taken`: without it, a request that was cancelled before it was taken
            # was computed to the end of its batch.
            self._submitted.discard(sequence)

    def cancel_taken(self, sequence: Sequence) -> None:
        """Note that the decode thread has taken the cancel: the sequence is in no further batch."""
        with self._lock:
            self._cancelled.discard(sequence)

    def begin(self, sequences: Collection[Sequence]) -> bool:
        """Note that a batch begins. False if all of it is cancelled, or gives way: it must not be computed."""
        # Set before `_cancelled` is read: a cancel that comes in between sees the batch, and aborts it.
        self._running = sequences
        if self._are_cancelled(sequences) or self._give_way(sequences):
            self._is_aborted = True
        return not self._is_aborted

    def end(self) -> bool:
        """Note that the batch has come back; returns whether it was aborted. It can be complete all the same, if the
        abort came too late. The context must `resume` in either case.
        """
        with self._lock:
            self._running, is_aborted, self._is_aborted = (), self._is_aborted, False
        return is_aborted

    def _are_cancelled(self, sequences: Collection[Sequence]) -> bool:
        return bool(self._cancelled and sequences) and self._cancelled.issuperset(sequences)

    def _give_way(self, sequences: Collection[Sequence]) -> bool:
        return bool(self._submitted and sequences) and all(sequence.lane < 0 for sequence in sequences)
