"""Parent side of the child processes that decode pictures and sounds. A child that takes too long is killed."""

from __future__ import annotations

import numpy as np

from uma.child import ChildBusyError, ChildClosedError, ChildEndedError, Children
from uma.errors import BadRequest, InternalError, Overloaded, ShuttingDown, told
from uma.llama import media_process
from uma.llama.media_process import SAMPLE_RATE, TOO_LARGE
from uma.llama.projector import Pixels, Samples
from uma.media.files import MAX_PIXELS, SOUNDS, check_file

DEADLINE_SEC = 5.0
"""Maximum CPU time for one file. The largest allowed picture takes a fifth of it, the longest sound a third."""
MAX_SOUND_SEC = 1_500
"""Maximum length of a sound. Decoded it takes as much memory as the largest picture."""
MIN_SOUND_SEC = 0.1
"""Minimum length of a sound: llama.cpp makes no sound of a single sample."""
LOUDEST = 2.0**15
"""Maximum absolute value of a sample. Full scale is 1.0. Real files of floats reach this value; far larger values are
not sound."""
RETRY_AFTER_MS = 5_000
"""`retry_after_ms` of a refusal because the machine is too busy."""


CHILDREN = 2
"""Maximum files that are decoded at once."""


class MediaDecoder:
    """A few child processes, each started on first use. Any thread; a thread that finds all busy waits."""

    def __init__(self, *, sees: bool, hears: bool) -> None:
        """`sees` and `hears`: whether the model takes pictures and sounds."""
        self._sees, self._hears = sees, hears
        program, setup = media_process.__file__, {"hears": hears}
        self._children = Children(CHILDREN, program, setup, deadline_sec=DEADLINE_SEC, max_answer_bytes=_MAX_BYTES)

    def decode(self, data: bytes, id: str, field: str) -> Pixels | Samples:
        """Decode a file; `id` is its hash. Raises `BadRequest` for a file that the model does not take or the child
        cannot decode, and `Overloaded` where the machine is too busy.
        """
        form = check_file(data, field, sees=self._sees, hears=self._hears)
        try:
            with self._children.taken() as child:
                answer, content = child.ask_about({"form": form, "max_bytes": _MAX_BYTES}, data)
        except TimeoutError:
            raise BadRequest.at(field, f"timeout: it takes longer than {DEADLINE_SEC:g} s to decode") from None
        except ChildBusyError:
            raise Overloaded(
                f"{field}: this machine is too busy to decode it; ask again", retry_after_ms=RETRY_AFTER_MS
            ) from None
        except ChildEndedError as error:
            raise BadRequest.at(field, f"cannot be decoded: the process that tried has ended ({error})") from None
        except ChildClosedError:
            raise ShuttingDown(f"{field}: the engine is stopping") from None
        except OSError as error:
            raise InternalError(f"{field}: no process can be started to decode it: {told(error)}") from None
        if "width" not in answer:
            problem = answer["problem"]
            most = f"is larger than {MAX_PIXELS:,} pixels or {MAX_SOUND_SEC:,} s"
            raise BadRequest.at(field, f"{most if problem == TOO_LARGE else problem}")
        if form not in SOUNDS:
            return Pixels(id, answer["width"], answer["height"], content)
        _check_sound(content, field)
        return Samples(id, answer["width"], content)

    def close(self) -> None:
        """Kill the children, whatever they are decoding, and start no others. Harmless when repeated."""
        self._children.close()


def _check_sound(content: bytes, field: str) -> None:
    """Raise `BadRequest` for a sound of a wrong length, or with samples that are not finite or too large: in a batch
    these would spoil all results.
    """
    samples = np.frombuffer(content, np.float32)
    if not MIN_SOUND_SEC * SAMPLE_RATE <= len(samples) <= MAX_SOUND_SEC * SAMPLE_RATE:
        took = f"{len(samples) / SAMPLE_RATE:,.3g} s"
        raise BadRequest.at(field, f"a sound of {took}; from {MIN_SOUND_SEC:g} to {MAX_SOUND_SEC:,} s can be read")
    if not np.abs(samples).max() <= LOUDEST:
        raise BadRequest.at(field, "has samples that are no sound: they are not from -1 to 1")


_MAX_BYTES = max(3 * MAX_PIXELS, 4 * SAMPLE_RATE * MAX_SOUND_SEC)
