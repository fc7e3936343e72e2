"""Many prompts at once: a bounded number of requests in flight, and each result as soon as it is there."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import attrs
import trio

from uma.errors import ConnectionLost, InternalError, Overloaded, ShuttingDown, UmaError
from uma.jobs import in_flight
from uma.llm.arguments import messages_of
from uma.llm.results import RequestOutput, completions_of, failed, prompt_fields
from uma.llm.thread import FOREVER, Deadline, SourceThread
from uma.net.controls import TABLE
from uma.types import Finished, Request, SamplingParams, Source

IN_FLIGHT_PER_SEQUENCE = 2
"""Requests given to a source at once, for each that it computes at once: the next one is always ready."""
MAX_AHEAD_PER_IN_FLIGHT = 8
"""Maximum results that wait for an earlier row's, for each request in flight: one long answer stops no others."""

GONE = (ConnectionLost, ShuttingDown)
"""Errors of rows whose server is gone or stops."""


@attrs.frozen
class GivenPrompt:
    """One prompt or conversation, as it was given, with the fields of its request."""

    index: int
    prompt: Any
    fields: dict[str, Any]
    sampling: SamplingParams


Raises = Callable[[UmaError], bool]
"""Whether an error ends the whole call, and is no row's own."""


def results_of(
    loop: SourceThread, rows: Iterator[GivenPrompt], deadline: Deadline = FOREVER, *, in_order: bool, raises: Raises
) -> Generator[RequestOutput, None, None]:
    """The result of each row: as they end, or in the order of the rows.

    `rows` is read in the caller's thread, and only as far as there is work for; it can be endless. Closing this
    iterator cancels what runs. Raises what ended the source, a row's error where that `raises`, after the results that
    are ready, and `TimedOut`.
    """
    most = in_flight(loop.source, per_sequence=IN_FLIGHT_PER_SEQUENCE)
    inbox, taken = trio.open_memory_channel[list[GivenPrompt]](math.inf)
    outbox, results = trio.open_memory_channel[RequestOutput](math.inf)
    scope = trio.CancelScope()
    loop.spawn(_serve, loop, taken, outbox, scope)
    early: dict[int, RequestOutput] = {}
    running = following = 0
    try:
        while True:
            space = min(most - running, most * MAX_AHEAD_PER_IN_FLIGHT - len(early))
            batch = list(islice(rows, max(space, 0)))
            if batch:
                loop.post(partial(inbox.send_nowait, batch))
                running += len(batch)
            if not running:
                return
            try:
                ended = loop.call(_take, results, deadline=deadline)
            except trio.EndOfChannel:
                raise loop.why_closed() from None
            running -= len(ended)
            fault = None
            for out in ended:
                if out.error is not None and raises(out.error):
                    fault = fault or out.error
                elif in_order:
                    early[out.index] = out
                else:
                    yield out
            while following in early:
                yield early.pop(following)
                following += 1
            if fault is not None:
                raise fault
    finally:
        loop.post(scope.cancel)


async def every_result(loop: SourceThread, rows: Iterator[GivenPrompt], raises: Raises) -> list[RequestOutput]:
    """All results, in order, for a task on the loop; cancelling it cancels what runs. Raises as `results_of` does."""
    found: list[RequestOutput] = []
    fault: list[UmaError] = []
    since = trio.current_time()

    async def work() -> None:
        for row in rows:
            out = attrs.evolve(await _generate_one(loop, row, since), index=row.index)
            if out.error is not None and raises(out.error):
                fault.append(out.error)
                nursery.cancel_scope.cancel()
            found.append(out)

    async with trio.open_nursery() as nursery:
        for _ in range(in_flight(loop.source, per_sequence=IN_FLIGHT_PER_SEQUENCE)):
            nursery.start_soon(work)
    if fault:
        raise fault[0]
    return sorted(found, key=lambda out: out.index)


async def _serve(
    loop: SourceThread,
    inbox: trio.MemoryReceiveChannel[list[GivenPrompt]],
    outbox: trio.MemorySendChannel[RequestOutput],
    scope: trio.CancelScope,
) -> None:
    since = trio.current_time()
    with scope, outbox:
        async with trio.open_nursery() as nursery:
            async for batch in inbox:
                for row in batch:
                    nursery.start_soon(_run, loop, row, since, outbox)


async def _run(
    loop: SourceThread, row: GivenPrompt, since: float, outbox: trio.MemorySendChannel[RequestOutput]
) -> None:
    outbox.send_nowait(attrs.evolve(await _generate_one(loop, row, since), index=row.index))


async def _take(results: trio.MemoryReceiveChannel[RequestOutput]) -> list[RequestOutput]:
    """The next result, and all others that are there."""
    taken = [await results.receive()]
    while results.statistics().current_buffer_used:
        taken.append(results.receive_nowait())
    return taken


async def _generate_one(loop: SourceThread, row: GivenPrompt, since: float) -> RequestOutput:
    """The row's result; `since` is when its call began."""
    prompt, fields = row.fields.get("token_ids", row.prompt), row.fields
    try:
        if "messages" in fields:
            prompt = messages_of(prompt)
            fields = {**fields, "messages": prompt}
        request = Request(id=f"llm-{loop.next_number()}", sampling=row.sampling, stream=False, **fields)
        while True:
            try:
                return _output(prompt, await _finished(await loop.live(since), request))
            except Overloaded as error:  # the others leave no space now: a job waits
                if error.retry_after_ms is None:
                    raise
                await trio.sleep(error.retry_after_ms / 1000)
    except (ShuttingDown, InternalError) as error:
        if isinstance(error, InternalError) and not loop.has_failed:
            return failed(prompt, error)
        if not loop.is_engine:
            return failed(prompt, error)
        # The engine ends, and with it the loop: that is no result, so this waits to be cancelled.
        await trio.sleep_forever()
    except UmaError as error:
        return failed(prompt, error)
    raise AssertionError("a stream ended without its last event")


async def _finished(source: Source, request: Request) -> Finished:
    async with source.generate(request) as stream:
        async for event in stream:
            if isinstance(event, Finished):
                return event
    raise AssertionError("a stream ended without its last event")


def _output(prompt: Any, event: Finished) -> RequestOutput:
    return RequestOutput(
        prompt,
        completions_of(event),
        usage=event.usage,
        metrics=event.metrics,
        seed=event.seed,
        warnings=event.warnings,
        **prompt_fields(event.prompt),
    )


def tell_of_failures(outputs: Sequence[RequestOutput]) -> None:
    """One `UserWarning` for all prompts that failed, attributed to the caller of `LLM`'s method. Raises the error of a
    server that is gone where that is all there is.
    """
    failed = [out.error for out in outputs if out.error is not None]
    if failed and len(failed) == len(outputs) and all(isinstance(error, GONE) for error in failed):
        raise failed[0]
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
