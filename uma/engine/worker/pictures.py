"""Pictures on the decode thread: each is encoded once, in pieces, between which everything else goes on.

A pass of a projector takes from a fraction of a second to a minute. llama.cpp calls back between the nodes of its
graph, and there, on the same thread, the loop runs turns until the readers of streams have tokens for the time of the
next piece (`Scheduler.plan`, `pause_ms`). So the time of a picture need not be known before it is encoded. A GPU
encodes a picture in one piece, whose time is predicted by the last one's.
"""

from __future__ import annotations

from collections.abc import Callable

from uma.engine.clock import now_ms
from uma.engine.recorder import DECODE
from uma.engine.worker.account import Instruments
from uma.engine.worker.sequence import Sequence
from uma.engine.worker.slots import Slots
from uma.llama.projector import Picture, Projector


class Encoder:
    """Encodes the next pictures of prompts. Belongs to the decode thread."""

    def __init__(self, projector: Projector | None, slots: Slots, instruments: Instruments) -> None:
        self._projector = projector
        self._slots = slots
        self._instruments = instruments
        self._token_ms: dict[bool, float] = {}
        """Time (ms) per token of the last picture (False) and of the last sound (True), of a projector that encodes in
        one piece."""
        self._gave_way: Picture | None = None
        """The picture whose pass gave way last: it is encoded again from its start, and gives way no more."""
        self._began_ms = 0.0
        """When the running piece began."""

    def next(self) -> Sequence | None:
        """The sequence that is due first, by lane and deadline, among those whose next picture is not encoded."""
        if self._projector is None:
            return None
        ready = [sequence for sequence in self._slots.active.values() if sequence.awaits_encoding]
        return min(ready, key=lambda sequence: (-sequence.lane, sequence.due_ms), default=None)

    def pause_ms(self, piece_ms: float) -> float:
        """Time for which streams wait for the next piece, if one takes `piece_ms`; 0 where there is nothing to
        encode.
        """
        sequence = self.next()
        if sequence is None or sequence.picture is None or self._projector is None:
            return 0.0
        if self._projector.is_cut:
            return piece_ms
        picture = sequence.picture.picture
        return max(piece_ms, self._token_ms.get(picture.is_sound, 0.0) * picture.n_tokens)

    def step(self, is_over: Callable[[float], bool], between: Callable[[], bool]) -> bool:
        """Encode one picture, or a piece of a sound; False if there is none. If it cannot be encoded, its request ends.

        A piece goes on until `is_over`, which is called with the time of its begin. Then `between` is called; if it
        returns False, the engine stops. Raises what `between` raises.
        """
        sequence = self.next()
        if sequence is None or self._projector is None or sequence.picture is None:
            return False
        picture, fault = sequence.picture.picture, list[BaseException]()
        self._began_ms = now_ms()

        def go_on() -> bool:
            if not is_over(self._began_ms):
                return True
            self._ends_piece(sequence)
            try:
                goes_on = between()
            except BaseException as error:  # noqa: BLE001  (raised again below, behind llama.cpp's frames)
                fault.append(error)
                return False
            self._began_ms = now_ms()
            return goes_on and self._is_wanted(picture) and not self._gives_way(picture)

        try:
            is_whole = self._projector.encode(picture, go_on)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is this request's alone)
            self._slots.fail(sequence, error)
            return True
        if fault:
            raise fault[0]
        if is_whole:
            self._ends_piece(sequence)
            if not self._projector.is_cut:
                self._token_ms[picture.is_sound] = (now_ms() - self._began_ms) / picture.n_tokens
        return True

    def _ends_piece(self, sequence: Sequence) -> None:
        ended = now_ms()
        sequence.account.own_ms += ended - self._began_ms
        if (recorder := self._instruments.recorder) is not None:
            recorder.span(DECODE, "picture", self._began_ms, ended)

    def _gives_way(self, picture: Picture) -> bool:
        """Whether a request of a higher lane waits for another picture. llama.cpp encodes one at a time, so this pass
        is then thrown away.
        """
        head = self.next()
        # Once: a pass cannot be resumed, and one that gave way each time would never end.
        if head is None or picture is self._gave_way:
            return False
        lanes = [
            sequence.lane
            for sequence in self._slots.active.values()
            if sequence.picture and sequence.picture.picture is picture
        ]
        if head.lane <= max(lanes, default=head.lane):
            return False
        self._gave_way = picture
        return True

    def _is_wanted(self, picture: Picture) -> bool:
        """Whether a sequence still waits for the picture: its requests can have been cancelled meanwhile."""
        placed = (sequence.picture for sequence in self._slots.active.values())
        return any(waiting is not None and waiting.picture is picture for waiting in placed)
