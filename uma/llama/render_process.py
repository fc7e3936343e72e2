"""Parent side of the child processes that render conversations. A child that takes too long is killed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from uma.child import ChildBusyError, ChildClosedError, ChildEndedError, Children
from uma.errors import Overloaded, told
from uma.llama import sandbox
from uma.llama.sandbox import MAX_TEXT_CHARS, RefusedError, UnusableError

DEADLINE_SEC = 2.0
"""Maximum CPU time for one rendering. The longest conversation in a frame takes a tenth of it."""
RETRY_AFTER_MS = 5_000
"""`retry_after_ms` of a refusal because the machine is too busy."""
RENDERERS = 2
"""Maximum child processes: as many as prompts are prepared at once, so that the thread that is kept free of background
work also finds a process. The second one is started on demand."""
MAX_ANSWER_BYTES = 8 * MAX_TEXT_CHARS


class RenderProcesses:
    """A few child processes, each started on first use. Any thread; a thread that finds all busy waits.

    `setup` is the template's source, and its texts for the beginning and the end of text.
    """

    def __init__(self, setup: list[str]) -> None:
        self._children = Children(
            RENDERERS, sandbox.__file__, setup, deadline_sec=DEADLINE_SEC, max_answer_bytes=MAX_ANSWER_BYTES
        )

    def start(self) -> None:
        """Start a child if there is none, without waiting for it. If that fails, `render` reports it."""
        with self._children.taken() as child, suppress(ChildClosedError, OSError):
            child.start()

    def render(self, conversation: dict[str, Any]) -> str:
        """Text of a conversation. Raises `UnusableError`, also for a child that had to be killed or died, and
        `Overloaded` where the machine is too busy.
        """
        try:
            with self._children.taken() as child:
                answer = child.ask(conversation)
        except ChildClosedError:
            raise UnusableError("cannot be rendered: the model is closed") from None
        except TimeoutError:
            raise UnusableError(f"fails: it takes longer than {DEADLINE_SEC:g} s for these messages") from None
        except OSError as error:
            raise UnusableError(f"cannot be rendered: no process can be started for it: {told(error)}") from error
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
        """Kill the children, whatever they are rendering, and start no others. Harmless when repeated."""
        self._children.close()
