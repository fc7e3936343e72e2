"""The decode thread's inbox: what other threads ask of it, taken up between two batches.

A command waits for the end of the batch that runs. Those that cannot wait for the end of a stride (several decode
steps without re-planning) set `is_called`, which ends the stride after its current step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

import attrs

from uma.engine.worker.sequence import Sequence
from uma.engine.worker.status import Status
from uma.errors import UmaError


@attrs.frozen
class SubmitSequence:
    """Queue a sequence."""

    sequence: Sequence


@attrs.frozen
class CancelSequence:
    """End a sequence at this tick boundary, with a `Finished` of reason `cancelled`. One that has ended is ignored."""

    sequence: Sequence


@attrs.frozen
class GiveCredit:
    """The sequence's reader has space for so many more events."""

    sequence: Sequence
    events: int


@attrs.frozen
class CloseThinking:
    """Close a sequence's thinking with its next token."""

    sequence: Sequence


@attrs.frozen
class CallFunction:
    """Call `act` on the decode thread, between two batches. Once the thread has ended, and where `act` raises, `refuse`
    is called instead. Without it a fault in `act` ends the engine.
    """

    act: Callable[[], object]
    refuse: Callable[[UmaError], None] | None = None


DecodeCommand = SubmitSequence | CancelSequence | GiveCredit | CloseThinking | CallFunction


class Commands:
    """An inbox with many writers and one reader. `take` and `wait` belong to the decode thread, the other methods to
    any thread.
    """

    __slots__ = ("_commands", "_on_cancel", "_on_submit", "_refuse", "_wakeup", "is_called")

    def __init__(
        self,
        on_cancel: Callable[[Sequence], None] = lambda _: None,
        on_submit: Callable[[Sequence], None] = lambda _: None,
    ) -> None:
        """Each is called by the thread that cancels or submits, before the command is there."""
        self._commands: deque[DecodeCommand] = deque()
        self._on_cancel, self._on_submit = on_cancel, on_submit
        self._refuse: Callable[[DecodeCommand], None] | None = None
        """What becomes of commands once no thread obeys them."""
        self._wakeup = threading.Event()
        self.is_called = False
        """A command has come for which no stride goes on."""

    def call(self, act: Callable[[], object], refuse: Callable[[UmaError], None] | None = None) -> None:
        """Post a `CallFunction`. It is taken up after the batch that runs, or at once by a thread that rests."""
        self._commands.append(CallFunction(act, refuse))
        self.wake()

    def end_thinking(self, sequence: Sequence) -> None:
        """Have a sequence's thinking closed."""
        self._commands.append(CloseThinking(sequence))
        self.wake()

    def refuse_all(self, refuse: Callable[[DecodeCommand], None]) -> None:
        """Once the decode thread has ended: give `refuse` every command that it has not taken, and each that comes."""
        self._refuse = refuse
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        while self._refuse is not None and self._commands:
            self._refuse(self._commands.popleft())

    def cancel(self, sequence: Sequence) -> None:
        """Have a sequence ended, in the middle of a batch where that computes nothing else."""
        self._on_cancel(sequence)
        self._commands.append(CancelSequence(sequence))
        self.wake()

    def submit(self, sequence: Sequence) -> None:
        """Hand over a sequence, without waking the thread: call `wake` once for all that come in one burst."""
        # Not a wakeup for each: the first of a burst was read alone then, and the others in the batch behind it.
        self._on_submit(sequence)
        self._commands.append(SubmitSequence(sequence))

    def credit(self, sequence: Sequence, events: int) -> None:
        """Hand over credit. It ends a stride only where it brings a parked sequence back: a running one has as much
        credit as its stride has steps.
        """
        self._commands.append(GiveCredit(sequence, events))
        if self._commands:
            if sequence.status is Status.PARKED:  # reading what it was would lose a call that comes between
                self.is_called = True
            self._wakeup.set()
            self._refuse_rest()

    def wake(self) -> None:
        """Have all that was handed over taken up soon."""
        # A command that the thread has taken by itself needs no wakeup, which would end the next rest and have the
        # thread begin with half of a burst.
        if self._commands:
            self.is_called = True
            self._wakeup.set()
            self._refuse_rest()

    def take(self) -> Iterator[DecodeCommand]:
        """Commands in the order in which they came, also those that come meanwhile, until none is left."""
        if self._wakeup.is_set():
            # Clear before draining: a racing `wake` then causes a spurious wakeup, never a lost one.
            self._wakeup.clear()
            self.is_called = False
        while self._commands:
            yield self._commands.popleft()

    def wait(self, timeout_sec: float | None = None) -> bool:
        """Rest until a command comes; False where none does within the time."""
        return self._wakeup.wait(timeout_sec)


@attrs.frozen
class SequenceControl:
    """One sequence's end of the inbox: `delivery.stream.Control`."""

    commands: Commands
    sequence: Sequence

    def cancel(self) -> None:
        """End the sequence at the next tick boundary: at once where the batch that runs computes nothing else."""
        self.commands.cancel(self.sequence)

    def end_thinking(self) -> None:
        """Close the sequence's thinking with its next token."""
        self.commands.end_thinking(self.sequence)

    def credit(self, events: int) -> None:
        """The reader has space for so many more events."""
        self.commands.credit(self.sequence, events)
