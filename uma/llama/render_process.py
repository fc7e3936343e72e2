"""The child process that renders conversations, from its parent's side: killed where it takes too long."""

from __future__ import annotations

from typing import Any

from uma.child import Child, ChildBusyError, ChildClosedError, ChildEndedError
from uma.errors import Overloaded
from uma.llama import sandbox
from uma.llama.sandbox import MAX_TEXT_CHARS, RefusedError, UnusableError

DEADLINE_SEC = 2.0
"""Maximum CPU time for one rendering. The longest conversation that a frame holds takes a tenth of it."""
RETRY_AFTER_MS = 5_000
"""Time after which to ask again where the machine was too busy for a rendering."""
MAX_ANSWER_BYTES = 8 * MAX_TEXT_CHARS


class RenderProcess:
    """One child process, or none at the moment. Belongs to one thread at a time.

    `setup` is the template's source and its tokens for the beginning and the end of text.
    """

    def __init__(self, setup: list[str]) -> None:
        self._child = Child(sandbox.__file__, setup, deadline_sec=DEADLINE_SEC, max_answer_bytes=MAX_ANSWER_BYTES)

    def start(self) -> None:
        """Start the child if there is none. Does not wait for it. Raises `UnusableError` where that is impossible."""
        try:
            self._child.start()
        except ChildClosedError:
            raise UnusableError("cannot be rendered: the model is closed") from None
        except OSError as error:
            raise UnusableError(f"cannot be rendered: no process can be started for it: {error}") from error

    def render(self, conversation: dict[str, Any]) -> str:
        """The text of a conversation. Raises `UnusableError`, also for a child that had to be killed, or died, and
        `Overloaded` where the machine had no time for it.
        """
        self.start()
        try:
            answer = self._child.ask(conversation)
        except TimeoutError:
            raise UnusableError(f"fails: it takes longer than {DEADLINE_SEC:g} s for these messages") from None
        except ChildBusyError:
            raise Overloaded(
                "messages: this machine is too busy to apply the chat template; ask again",
                retry_after_ms=RETRY_AFTER_MS,
            ) from None
        except ChildEndedError as error:
            raise UnusableError(f"fails: its process ended ({error})") from None
        if "refusal" in answer:
            raise RefusedError(answer["refusal"])
        if "text" not in answer:
            raise UnusableError(answer["problem"])
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """Kill the child, if there is one, and start no other. Harmless when repeated."""
        self._child.close()
