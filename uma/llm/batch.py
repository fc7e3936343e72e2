"""Many prompts at once: a bounded number of requests in flight, results in the order of the prompts."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import trio

from uma.engine import Engine
from uma.errors import BadRequest, InternalError, ShuttingDown, UmaError
from uma.llm.arguments import message_of
from uma.llm.results import RequestOutput, completions_of, failed, told_of
from uma.net.harmful import TABLE
from uma.types import Finished, Request, SamplingParams

IN_FLIGHT_PER_SEQUENCE = 2
"""Requests given to the engine at once, for each that it computes at once: the next one is always ready."""


async def generate_all(
    engine: Engine,
    asked: list[tuple[Any, dict[str, Any]]],
    params: Iterable[SamplingParams],
    advance: Callable[[], None],
) -> list[RequestOutput]:
    """The results of all prompts, in their order; `advance` is called after each. Runs on the engine's loop."""
    results: list[RequestOutput | None] = [None] * len(asked)
    work = enumerate(zip(asked, params, strict=True))

    async def worker(jobs: Iterator[tuple[int, tuple[tuple[Any, dict[str, Any]], SamplingParams]]]) -> None:
        for index, ((prompt, fields), sampling) in jobs:
            results[index] = await _generate_one(engine, f"llm-{index}", prompt, fields, sampling)
            advance()

    # As many tasks as can be useful: memory stays bounded however many prompts there are.
    most = min(IN_FLIGHT_PER_SEQUENCE * engine.config.max_sequences, engine.config.max_queue)
    async with trio.open_nursery() as nursery:
        for first in (each for _, each in zip(range(most), iter(lambda: next(work, None), None), strict=False)):
            nursery.start_soon(worker, chain([first], work))
    return [result for result in results if result is not None]


async def _generate_one(
    engine: Engine, request_id: str, prompt: Any, fields: dict[str, Any], sampling: SamplingParams
) -> RequestOutput:
    try:
        if "messages" in fields:
            prompt = tuple(map(message_of, prompt))
            fields = {**fields, "messages": prompt}
        request = Request(id=request_id, sampling=sampling, stream=False, **fields)
        async with engine.generate(request) as stream:
            async for event in stream:
                if isinstance(event, Finished):
                    return RequestOutput(
                        prompt,
                        completions_of(event),
                        usage=event.usage,
                        metrics=event.metrics,
                        seed=event.seed,
                        warnings=event.warnings,
                        **told_of(event.prompt),
                    )
    except (ShuttingDown, InternalError) as error:
        if isinstance(error, InternalError) and not engine.worker.has_failed:
            return failed(prompt, error)
        # The engine ends, and with it the loop: that is no result, so this waits to be cancelled.
        await trio.sleep_forever()
    except ValueError as error:
        return failed(prompt, BadRequest(str(error)))
    except UmaError as error:
        return failed(prompt, error)
    raise AssertionError("a stream ended without its last event")


def warn_of_failures(outputs: Sequence[RequestOutput]) -> None:
    """One `UserWarning` for all prompts that failed, attributed to the caller of `LLM`'s method."""
    failed = [out.error for out in outputs if out.error is not None]
    if failed:
        warnings.warn(
            f"{len(failed):,} of {len(outputs):,} prompts failed, the first because: {str(failed[0]).translate(TABLE)} "
            "(each result that failed has an `error`)",
            stacklevel=4,
        )


@contextmanager
def progress_bar(total: int, wanted: bool | None) -> Iterator[Callable[[], None]]:
    """A callable that advances the bar by one; it can be called from another thread."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda: None
        return
    from rich.console import Console  # noqa: PLC0415  (needed only where the bar is shown)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=total)
        yield lambda: progress.advance(task)
