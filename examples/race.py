"""Three prompts race; the first to finish wins, and the losers are cancelled at their next token.

python examples/race.py                 # in this process, on the built-in model
python examples/race.py SOCKET          # on a running server: the code is the same
"""

from __future__ import annotations

import sys

import trio

import uma

PROMPTS = (
    "Tell me a story about a fox in the forest",
    "Tell me a story about an owl in the harbour",
    "What is UMA?",
)


async def race(source: uma.Source) -> tuple[int, str]:
    """The index of the prompt whose answer was complete first, and that answer."""
    winner: tuple[int, str] | None = None

    async def run(index: int, prompt: str, scope: trio.CancelScope) -> None:
        nonlocal winner
        message = uma.Message("user", prompt)
        request = uma.Request(f"racer-{index}", messages=(message,), sampling=uma.SamplingParams(max_tokens=200))
        text = ""
        async with source.generate(request) as stream:
            async for event in stream:
                if isinstance(event, uma.Token):
                    text += event.text
        winner = winner or (index, text)
        scope.cancel()  # leaving the losers' `generate` blocks is all it takes to cancel them

    async with trio.open_nursery() as nursery:
        for index, prompt in enumerate(PROMPTS):
            nursery.start_soon(run, index, prompt, nursery.cancel_scope)
    assert winner is not None
    return winner


async def main() -> None:
    """Race on the server named on the command line, else in this process."""
    source = uma.connect(sys.argv[1]) if len(sys.argv) > 1 else uma.open_engine()
    async with source as opened:
        index, text = await race(opened)
        print(f"{PROMPTS[index]!r} won:\n{text}")


if __name__ == "__main__":
    trio.run(main)
