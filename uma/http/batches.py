"""OpenAI's batches: `/v1/batches`. They run one at a time, in the background lane, and outlive the server."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Annotated

import attrs
import trio

from uma.constraints import Length
from uma.errors import BadRequest, UmaError, sole_error
from uma.http import files
from uma.http.dialect import Body
from uma.http.exchange import Exchange
from uma.http.gateway import Gateway
from uma.http.in_memory import InMemory
from uma.http.problem import NotFound, RateLimited
from uma.http.reader import read
from uma.jobs import BadInput, Results, RowForm, Runner, in_flight, model_of, read_rows
from uma.jobs.rows import PATHS, BadRow
from uma.jobs.store import MAX_UNFINISHED, OVER, JobFolder, JobStatus, RowFault, Store, StoredBatch
from uma.net.logfmt import log

logger = logging.getLogger("uma.http")

MAX_LISTED = 100
"""Maximum batches of one list."""
FULL_MS = 60_000
"""Time after which a client is asked to come again where too many batches have not ended."""
AGAIN_SEC = 60.0
"""Time after which a batch is tried again that could not go on: the disk was full, or there was another model."""
TURN_SEC = 30.0
"""Time for which an owner's batch runs while another owner waits. Rows that run at its end come to theirs, so that a
shorter turn would leave the model idle for much of it."""
MAX_ROWS = 50_000
"""Maximum lines of a batch, as OpenAI has it; so are the next: pairs of metadata, and characters of their names and
values."""
MAX_FAULTS = 100
"""Maximum wrong rows that a batch's `errors` name."""
MAX_PAIRS, MAX_NAME, MAX_VALUE = 16, 64, 512


@attrs.frozen(kw_only=True)
class BatchBody:
    """Body of `POST /v1/batches`; its window is kept and has no effect."""

    input_file_id: Annotated[str, Length(1, 100)]
    endpoint: str
    completion_window: Annotated[str, Length(1, 20)] = "24h"
    metadata: dict[str, str] | None = None


async def create(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/batches`."""
    body = await http.built(lambda fields: read(fields, BatchBody, http.ignored))
    if body.endpoint not in PATHS:
        raise BadRequest.at("endpoint", f"expected one of {', '.join(sorted(PATHS))}, not {body.endpoint[:100]!r}")
    _check_metadata(body.metadata or {})
    http.ignored.add("completion_window")
    batch = StoredBatch(
        owner=files.owner_of(http),
        model=_served(gateway)[0],
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        metadata=body.metadata,
    )
    batch = await files.jobs_of(gateway).do(partial(_made, batch))
    gateway.batches.arrived()
    await http.answer_json(batch_object(gateway, batch))


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_PAIRS:
        raise BadRequest.at("metadata", f"expected at most {MAX_PAIRS} pairs, not {len(metadata):,}")
    for name, value in metadata.items():
        if len(name) > MAX_NAME or len(value) > MAX_VALUE:
            raise BadRequest.at(
                "metadata",
                f"expected names of at most {MAX_NAME} characters and values of {MAX_VALUE}; "
                f"{name[:MAX_NAME]!r} has {len(name):,} and {len(value):,}",
            )


def _made(batch: StoredBatch, store: Store) -> StoredBatch:
    """A new batch, in one turn of the store: nothing comes between the bounds and it."""
    if store.file(batch.input_file_id, batch.owner) is None:
        raise BadRequest.at("input_file_id", "no such file: it was deleted, or is another key's")
    files.check_space(store, batch.owner)
    if len(store.unfinished(owner=batch.owner)) >= MAX_UNFINISHED:
        raise RateLimited(f"{MAX_UNFINISHED} batches have not ended; wait for one", retry_after_ms=FULL_MS)
    total, faults = _judged(store.path(batch.input_file_id), batch.endpoint)
    batch = attrs.evolve(batch, total=total, faults=faults).now("failed" if faults else "in_progress")
    store.keep(batch)
    return batch


def _judged(path: Path, endpoint: str) -> tuple[int, list[RowFault]]:
    """The rows of a file, and what is wrong with it: one row that can be no request, and none runs, as OpenAI has it.
    Raises `BadRequest` where the file is none of a batch at all.
    """
    with path.open("rb") as file:
        lines = 0
        while piece := file.read(files.PIECE_BYTES):
            lines += piece.count(b"\n")
            if lines > MAX_ROWS:  # before rows are told apart, which takes far longer
                raise BadRequest.at(
                    "input_file_id", f"the file has over {MAX_ROWS:,} lines, a batch's maximum; split it"
                )
        file.seek(0)
        form, rows, faults = RowForm(endpoint=endpoint), 0, list[RowFault]()
        try:
            for row in read_rows(file, takes_gzip=False):
                rows += 1
                try:
                    form.asked(row)
                except BadRow as error:
                    faults.append(RowFault(error.code, f"line {row.line:,}: {error}", row.line))
                    if len(faults) == MAX_FAULTS:
                        break
        except BadInput as error:
            raise BadRequest.at("input_file_id", f"{error.message}") from None
    return rows, faults if rows else [RowFault("empty_file", "the file has no rows")]


async def listing(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/batches`."""
    limit, after, owner = files.limit_of(http.query, MAX_LISTED), http.query.get("after"), files.owner_of(http)
    found, has_more = await files.jobs_of(gateway).do(lambda store: store.batches(owner, limit, after))
    await http.answer_json(files.page_of([batch_object(gateway, each) for each in found], has_more=has_more))


async def show(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/batches/{id}`."""
    await http.answer_json(batch_object(gateway, await files.jobs_of(gateway).do(partial(_found, http))))


async def cancel(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/batches/{id}/cancel`: no more rows begin, and those that run have 30 s; else it ends here."""
    id = http.scope["path_params"]["id"]
    gateway.batches.stop(id)
    is_running = gateway.batches.is_current(id)

    def cancelled(store: Store) -> StoredBatch:
        store.check_own()
        batch = _found(http, store)
        if batch.status in OVER:
            raise BadRequest.at("id", f"the batch is {batch.status} already")
        batch = batch.now("cancelling")
        if not is_running:
            return store.finish(batch)
        store.keep(batch)
        return batch

    batch = await files.jobs_of(gateway).do(cancelled)
    gateway.batches.arrived()  # a run that has ended meanwhile left it to the next
    await http.answer_json(batch_object(gateway, batch))


def _found(http: Exchange, store: Store) -> StoredBatch:
    batch = store.batch(http.scope["path_params"]["id"], files.owner_of(http))
    if batch is None:
        raise NotFound("no such batch: it is long over, or another key's")
    return batch


def batch_object(gateway: Gateway, batch: StoredBatch) -> Body:
    """A batch as OpenAI tells of one."""
    tally = gateway.batches.tally(batch.id)
    completed, failed = batch.completed, batch.failed
    if tally is not None:
        completed, failed = tally.ended_rows - tally.ended_failed, tally.ended_failed
    statuses: tuple[JobStatus, ...] = ("in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled")
    faults = batch.faults if batch.error is None else [RowFault("failed", batch.error)]
    errors = {"object": "list", "data": [{**attrs.asdict(each), "param": None} for each in faults]}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": errors if faults else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        **{f"{each}_at": batch.times.get(each) for each in statuses},
        "expires_at": None,
        "expired_at": None,
        "request_counts": {"total": batch.total, "completed": completed, "failed": failed},
        "metadata": batch.metadata,
    }


async def run_all(gateway: Gateway) -> None:
    """Run batches as they come, and first those that an earlier server has left; to be cancelled.

    Owners take turns. A batch that cannot go on says why in its `errors`, and is tried again after a while or when
    another one comes. No fault ends the server, which has more to do than this.
    """
    if (jobs := gateway.jobs) is None:
        return
    await gateway.readiness.wait()
    queue, turns = gateway.batches, dict[str, int]()
    while not queue.is_draining:
        batch: StoredBatch | None = None
        is_paused = False
        try:
            todo = await _unfinished(gateway, jobs)
            if todo:
                batch = min(todo, key=lambda each: turns.get(each.owner, 0))
                turns[batch.owner] = max(turns.values(), default=0) + 1
                await _run(gateway, jobs, batch)
                continue
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  (whatever it is, it is the batches' alone)
            is_paused = batch is None
            await _pause(gateway, jobs, batch, error)
        if batch is None:
            with trio.move_on_after(AGAIN_SEC if queue.left or is_paused else math.inf):
                await queue.arrival()
            queue.left.clear()


async def _pause(gateway: Gateway, jobs: JobFolder, batch: StoredBatch | None, error: BaseException) -> None:
    """Tell why batches, or this one, cannot go on just now. Raises `error` where it is a cancellation alone."""
    why: BaseException = error
    if isinstance(error, BaseExceptionGroup):
        fault = error.split(trio.Cancelled)[1]
        if fault is None:
            raise error
        why = sole_error(fault)
    is_known = isinstance(why, UmaError | OSError)
    fields = {"batch": None if batch is None else batch.id, "reason": str(why)}
    log(logger, logging.WARNING, "batch.paused", fault=None if is_known else why, **fields)
    if batch is None:
        return
    gateway.batches.left.add(batch.id)
    reason = str(why) if is_known else "a fault in the server itself; its log says more"

    def told(store: Store) -> None:
        now = store.batch(batch.id, None)
        if now is not None and now.status not in OVER:
            store.keep(attrs.evolve(now, error=f"paused: {reason}"))

    with suppress(UmaError):
        await jobs.do(told)


async def _unfinished(gateway: Gateway, jobs: JobFolder) -> list[StoredBatch]:
    """Batches to be run, but for those that cannot go on. A folder that is not there is not made for looking. Raises
    `StoreTaken` where another process runs them.
    """
    if not await jobs.is_there():
        return []

    served = _served(gateway)  # on Trio's thread, to which the names of several models belong

    def found(store: Store) -> list[StoredBatch]:
        batches = store.unfinished(served)
        if batches:
            store.check_own()
        return batches

    return [each for each in await jobs.do(found) if each.id not in gateway.batches.left]


def _served(gateway: Gateway) -> list[str]:
    """The models whose batches run here, first the one that rows without a name are for."""
    return [gateway.names.name] if gateway.models is None else [each.name for each in gateway.models.listed()]


async def _run(gateway: Gateway, jobs: JobFolder, batch: StoredBatch) -> None:
    """Run a batch to its end, until it is another owner's turn, or until the server stops. Raises `UmaError` and
    `OSError` where it can go on later.
    """
    with gateway.batches.taking(batch.id):
        is_done, why = await _run_rows(gateway, jobs, batch.id)

        def ended(store: Store) -> None:
            now = store.batch(batch.id, None)
            if now is not None and now.status not in OVER and (is_done or now.status == "cancelling"):
                store.finish(now, why)

        await jobs.do(ended)


async def _run_rows(gateway: Gateway, jobs: JobFolder, id: str) -> tuple[bool, str | None]:
    """Whether no row is left to be run, and why that is so where it is a failure."""
    batch, rows, out = await jobs.do(partial(_begun, id))
    if batch is None or batch.status != "in_progress":
        return False, None  # it was cancelled since
    account = None if gateway.keys is None else gateway.keys.named(batch.owner)
    if rows is None:
        return True, "its input file is gone"
    if gateway.keys is not None and account is None:
        rows.close()
        return True, "the key that it came with is gone"
    model = model_of(gateway.source) if gateway.models is None else batch.model
    header = {"version": 1, "model": model, "endpoint": batch.endpoint}
    opening = partial(Results.open, out, header, anew="cancel this batch and create another")
    with rows:
        async with _opened(opening) as results, trio.open_nursery() as nursery:
            runner = Runner(
                InMemory(gateway.app, "batch", gateway.source, account),
                read_rows(rows, takes_gzip=False),
                RowForm(endpoint=batch.endpoint, defaults={} if gateway.models is None else {"model": batch.model}),
                results,
                in_flight(gateway.source, has_others=True),
                prefix=f"{id}-",
            )
            nursery.start_soon(_end_turn, gateway, jobs, batch.owner, runner)
            try:
                return await gateway.batches.run(runner), None
            except BadInput as error:
                return True, error.message  # not retryable
            finally:
                nursery.cancel_scope.cancel()
    raise AssertionError("the nursery's block has returned")


@asynccontextmanager
async def _opened(opening: Callable[[], Results]) -> AsyncIterator[Results]:
    """What `opening` returns, for the block. A disk that stalls holds up no end: what comes too late is closed then."""
    found, is_over = list[Results](), False

    def opened() -> Results:
        found.append(results := opening())
        if is_over:
            results.close()
        return results

    try:
        yield await trio.to_thread.run_sync(opened, abandon_on_cancel=True)
    finally:
        is_over = True
        for results in found:
            results.close()


def _begun(id: str, store: Store) -> tuple[StoredBatch | None, BufferedReader | None, Path]:
    """A batch as it is now, without the error of an attempt before; its rows, and where its results are."""
    batch, out, rows = store.batch(id, None), store.results(id), None
    if batch is not None and batch.status == "in_progress":
        if batch.error is not None:
            batch = attrs.evolve(batch, error=None)
            store.keep(batch)
        with suppress(FileNotFoundError):
            rows = store.path(batch.input_file_id).open("rb")
    return batch, rows, out


async def _end_turn(gateway: Gateway, jobs: JobFolder, owner: str, runner: Runner) -> None:
    """Stop `runner` after `TURN_SEC`, or as soon from then on as another owner waits."""
    while True:
        await trio.sleep(TURN_SEC)
        with suppress(UmaError):
            if any(each.owner != owner for each in await _unfinished(gateway, jobs)):
                runner.stop()
                return
