"""The child process that decodes pictures, from its parent's side: killed where it takes too long."""

from __future__ import annotations

import threading

from uma.child import Child, ChildBusyError, ChildClosedError, ChildEndedError
from uma.errors import BadRequest, InternalError, Overloaded
from uma.llama import picture_process
from uma.llama.projector import Pixels
from uma.media.files import MAX_PIXELS, check_file

DEADLINE_SEC = 5.0
"""Maximum CPU time for one picture. The largest that is allowed takes a fifth of it."""
RETRY_AFTER_MS = 5_000
"""Time after which to ask again where the machine was too busy."""


class PictureDecoder:
    """One child process, from the first picture on. Any thread; one picture at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child = Child(picture_process.__file__, None, deadline_sec=DEADLINE_SEC, max_answer_bytes=3 * MAX_PIXELS)

    def decode(self, data: bytes, id: str, field: str) -> Pixels:
        """A file's pixels; `id` is its hash. Raises `BadRequest` for what is no picture, or one too many for the child,
        and `Overloaded` where the machine had no time for it.
        """
        check_file(data, field)
        try:
            with self._lock:
                answer, pixels = self._child.ask_about({}, data)
        except TimeoutError:
            raise BadRequest(f"{field}: takes longer than {DEADLINE_SEC:g} s to be decoded") from None
        except ChildBusyError:
            raise Overloaded(
                f"{field}: this machine is too busy to decode pictures; ask again", retry_after_ms=RETRY_AFTER_MS
            ) from None
        except ChildEndedError as error:
            raise BadRequest(f"{field}: cannot be decoded: the process that tried has ended ({error})") from None
        except (ChildClosedError, OSError) as error:
            raise InternalError(
                f"{field}: no process can be started to decode it: {error or 'the engine ends'}"
            ) from None
        if "width" not in answer:
            raise BadRequest(f"{field}: {answer['problem']}; its file is broken")
        return Pixels(id, answer["width"], answer["height"], pixels)

    def close(self) -> None:
        """Kill the child, if there is one, and start no other. Harmless when repeated."""
        with self._lock:
            self._child.close()
