"""The decode thread's inbox: commands of other threads, which it takes between two batches.

A command waits for the end of the batch that runs. Those that cannot wait for the end of a stride (several decode
steps without re-planning) set `is_called`, which ends the stride after its current step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

import attrs

from uma.errors import UmaError


@attrs.frozen
class WorkerCommand:
    """A call of `act` on the decode thread, between two batches. If the thread has ended, or `act` raises, `refuse` is
    called instead. Without `refuse` an exception in `act` ends the engine.
    """

    act: Callable[[], object]
    refuse: Callable[[UmaError], None] | None = None


class Commands:
    """An inbox with many writers and one reader. `take` and `wait` belong to the decode thread, the other methods to
    any thread.
    """

    __slots__ = ("_commands", "_error", "_wakeup", "is_called")

    def __init__(self) -> None:
        self._commands: deque[WorkerCommand] = deque()
        self._error: UmaError | None = None
        """What commands are refused with once no thread obeys them."""
        self._wakeup = threading.Event()
        self.is_called = False
        """A command has come that ends the running stride."""

    def add(self, act: Callable[[], object], refuse: Callable[[UmaError], None] | None = None) -> None:
        """Post a command without waking the thread: call `wake` once for all that come in one burst."""
        self._commands.append(WorkerCommand(act, refuse))

    def call(
        self,
        act: Callable[[], object],
        refuse: Callable[[UmaError], None] | None = None,
        *,
        ends_stride: bool = True,
    ) -> None:
        """Post a command. It is taken after the batch that runs, or after the stride if it does not end one, and at
        once by a thread that rests.
        """
        self.add(act, refuse)
        self.wake(ends_stride=ends_stride)

    def wake(self, *, ends_stride: bool = True) -> None:
        """Have all that was posted taken up soon."""
        # Not for a command that the thread has taken already: that wakeup would end its next rest, and have it begin
        # with half of a burst.
        if self._commands:
            if ends_stride:  # not `|=`: a call that comes between its read and its write would be lost
                self.is_called = True
            self._wakeup.set()
            self._refuse_rest()

    def refuse_all(self, error: UmaError) -> None:
        """Once the decode thread has ended: refuse every command that it has not taken, and each that comes."""
        self._error = error
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        while self._error is not None and self._commands:
            if (refuse := self._commands.popleft().refuse) is not None:
                refuse(self._error)

    def take(self) -> Iterator[WorkerCommand]:
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
