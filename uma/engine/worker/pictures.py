"""Pictures on the decode thread: each is encoded once, between two ticks, while readers have tokens in hand.

To encode one takes as long as the projector's whole pass, and nothing else is computed meanwhile. So before it the
policy lets streams decode ahead, by the time that the last one took (`Scheduler.plan`, `pause_ms`).
"""

from __future__ import annotations

from uma.engine.clock import now_ms
from uma.engine.worker.residency import Residency
from uma.engine.worker.sequence import Sequence
from uma.engine.worker.status import Status
from uma.llama.projector import Projector


class Encoder:
    """Encodes the pictures that prompts have come to. Belongs to the decode thread."""

    def __init__(self, projector: Projector | None, residency: Residency) -> None:
        self._projector = projector
        self._residency = residency
        self._token_ms: dict[bool, float] = {}
        """What the last picture took for each of its tokens, and the last sound; by whether it was one."""

    def next(self) -> Sequence | None:
        """The first sequence, by its deadline, that has come to a picture which is not encoded."""
        if self._projector is None:
            return None
        ready = [
            each
            for each in self._residency.active.values()
            if each.status is Status.PREFILLING and (at := each.picture) is not None and at.picture.embedding is None
        ]
        return min(ready, key=lambda each: (-each.lane, each.due_ms), default=None)

    @property
    def pause_ms(self) -> float:
        """Expected time of the next picture; 0 where there is none, and as long as none of its kind was encoded."""
        sequence = self.next() if self._token_ms else None
        if sequence is None or sequence.picture is None:
            return 0.0
        picture = sequence.picture.picture
        return self._token_ms.get(picture.is_sound, 0.0) * picture.n_tokens

    def step(self) -> bool:
        """Encode one picture, or a piece of a sound; False where there is none. What cannot be encoded ends its
        request.
        """
        sequence = self.next()
        if sequence is None or self._projector is None or sequence.picture is None:
            return False
        picture, began = sequence.picture.picture, now_ms()
        try:
            self._projector.encode(picture)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is this request's alone)
            self._residency.fail(sequence, error)
            return True
        took_ms = now_ms() - began
        self._token_ms[picture.is_sound] = took_ms / picture.n_tokens
        sequence.account.own_ms += took_ms
        return True
