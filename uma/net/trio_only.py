"""Check that Trio runs: UMA's async interface works under Trio only, and the error names the alternatives."""

from __future__ import annotations

import sys

import trio

from uma.errors import WrongPlace

INSTEAD = (
    "use uma.LLM, which works anywhere: `llm = await asyncio.to_thread(uma.LLM, model)`, then "
    "`await asyncio.to_thread(llm.generate, prompts)`; or run Trio in a thread of its own"
)


def require_trio(function: str) -> None:
    """Raise `WrongPlace` where Trio does not run, with the way to go for asyncio programs."""
    if trio.lowlevel.in_trio_run():
        return
    if _is_asyncio():
        raise WrongPlace(f"uma.{function} needs Trio, and this is asyncio; {INSTEAD}")
    raise WrongPlace(f"uma.{function} needs Trio: call it in an async function that trio.run runs, or use uma.LLM")


def require_asyncio() -> None:
    """Raise `WrongPlace` where asyncio does not run, with the way to go for Trio's programs."""
    if not _is_asyncio():
        raise WrongPlace(
            "LLM's async methods need asyncio, which does not run here; with Trio use uma.open_engine(config), or "
            "uma.connect(socket) for a server"
        )


def _is_asyncio() -> bool:
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
