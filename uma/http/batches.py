"""OpenAI's batches: `/v1/batches`. They run one after the other, in the background lane, and outlive the server."""

from __future__ import annotations

import logging
import math
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Annotated

import attrs
import trio

from uma import json_bytes
from uma.constraints import Length
from uma.errors import BadRequest, UmaError, sole_error
from uma.http import files
from uma.http.dialect import Body
from uma.http.exchange import Exchange
from uma.http.fields import read
from uma.http.gateway import Gateway
from uma.http.in_memory import InMemory
from uma.http.problem import NotFound, RateLimited
from uma.jobs import BadInput, Form, Results, Runner, in_flight, model_of, read_rows
from uma.jobs.journal import journal_of
from uma.jobs.rows import PATHS
from uma.jobs.store import MAX_UNFINISHED, OVER, Batch, Status, Store, StoredFile
from uma.net.logfmt import log

logger = logging.getLogger("uma.http")

MAX_LISTED = 100
"""Maximum batches of one list."""
FULL_MS = 60_000
"""Time after which a client is asked to come again where too many batches have not ended."""
AGAIN_SEC = 60.0
"""Time after which a batch is tried again that could not go on: the disk was full, or there was another model."""


@attrs.frozen(kw_only=True)
class BatchBody:
    """The fields that do something; the window is kept and has no effect."""

    input_file_id: Annotated[str, Length(1, 100)]
    endpoint: str
    completion_window: Annotated[str, Length(1, 20)] = "24h"
    metadata: dict[str, str] | None = None


async def create(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/batches`."""
    body = await http.built(lambda fields: read(fields, BatchBody, http))
    store, owner = files.store_of(gateway), files.owner_of(http)
    if body.endpoint not in PATHS:
        raise BadRequest(f"endpoint: expected one of {', '.join(sorted(PATHS))}, not {body.endpoint[:100]!r}")
    if store.file(body.input_file_id, owner) is None:
        raise BadRequest("input_file_id: no such file: it was deleted, or is another key's")
    files.check_space(store)
    if len(store.unfinished(_served(gateway))) >= MAX_UNFINISHED:
        raise RateLimited(f"{MAX_UNFINISHED} batches have not ended; wait for one", retry_after_ms=FULL_MS)
    http.ignored.add("completion_window")
    batch = Batch(
        owner=owner,
        model=_served(gateway)[0],
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        metadata=body.metadata,
        total=await trio.to_thread.run_sync(_count, store.path(body.input_file_id)),
    )
    store.keep(batch.now("in_progress"))
    gateway.batches.arrived()
    await http.answer_json(batch_object(gateway, batch.now("in_progress")))


async def listing(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/batches`."""
    batches = files.store_of(gateway).batches(files.owner_of(http))
    await http.answer_json(files.page(batches, http.query, MAX_LISTED, lambda each: batch_object(gateway, each)))


async def show(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/batches/{id}`."""
    await http.answer_json(batch_object(gateway, _found(gateway, http)))


async def cancel(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/batches/{id}/cancel`: rows that run end, and no more begin."""
    batch = _found(gateway, http)
    if batch.status in OVER:
        raise BadRequest(f"id: the batch is {batch.status} already")
    batch = batch.now("cancelling")
    files.store_of(gateway).keep(batch)
    gateway.batches.cancel(batch.id)
    await http.answer_json(batch_object(gateway, batch))


def _found(gateway: Gateway, http: Exchange) -> Batch:
    batch = files.store_of(gateway).batch(http.scope["path_params"]["id"], files.owner_of(http))
    if batch is None:
        raise NotFound("no such batch: it is long over, or another key's")
    return batch


def batch_object(gateway: Gateway, batch: Batch) -> Body:
    """A batch as OpenAI tells of one."""
    tally = gateway.batches.tally(batch.id)
    completed, failed = (batch.completed, batch.failed) if tally is None else (tally.rows - tally.failed, tally.failed)
    statuses: tuple[Status, ...] = ("in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled")
    errors = None if batch.error is None else {"object": "list", "data": [{"code": "failed", "message": batch.error}]}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": errors,
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

    One that cannot go on says why in its `errors`, and is tried again after a while or when another one comes.
    """
    await gateway.readiness.wait()
    looked_at, left = set[str](), False
    while True:
        todo = [each for each in _unfinished(gateway) if each.id not in looked_at]
        if not todo:
            with trio.move_on_after(AGAIN_SEC if left else math.inf):
                await gateway.batches.arrival()
            looked_at, left = set(), False
            continue
        batch, store = todo[0], files.store_of(gateway)
        looked_at.add(batch.id)
        try:
            await _run(gateway, store, batch)
            continue
        except (UmaError, OSError) as error:
            why: BaseException = error
        except BaseExceptionGroup as group:
            why = sole_error(group)
            if not isinstance(why, UmaError | OSError):
                raise
        left = True
        _leave(store, batch, why)


def _leave(store: Store, batch: Batch, error: BaseException) -> None:
    """Tell why a batch cannot go on just now."""
    log(logger, logging.WARNING, "http.batch_left", batch=batch.id, reason=str(error))
    with suppress(OSError):
        store.keep(attrs.evolve(store.batch(batch.id, None) or batch, error=f"it cannot go on now: {error}"))


def _unfinished(gateway: Gateway) -> list[Batch]:
    """Batches to be run. A folder that is not there yet is not made for the sake of looking."""
    folder = gateway.config.http_jobs
    if gateway.store is None and not (folder and Path(folder).is_dir()):
        return []
    try:
        return files.store_of(gateway).unfinished(_served(gateway))
    except (UmaError, OSError) as error:
        log(logger, logging.WARNING, "http.batches_unusable", reason=str(error))
        return []


def _served(gateway: Gateway) -> list[str]:
    """The models whose batches run here, first the one that rows without a name are for."""
    return [gateway.names.name] if gateway.models is None else [each.name for each in gateway.models.listed()]


async def _run(gateway: Gateway, store: Store, batch: Batch) -> None:
    """Run a batch to its end, or until the server stops. Raises `UmaError` and `OSError` where it can go on later."""
    model = model_of(gateway.source) if gateway.models is None else batch.model
    header = {"version": 1, "model": model, "endpoint": batch.endpoint}
    with closing(Results.open(store.results(batch.id), header)) as results:
        account = None if gateway.keys is None else gateway.keys.named(batch.owner)
        why = None
        if gateway.keys is not None and account is None:
            why = "the key that it came with is gone"
        elif not store.path(batch.input_file_id).exists():
            why = "its input file is gone"
        elif batch.status == "in_progress":
            if batch.error is not None:  # of an attempt before
                batch = attrs.evolve(batch, error=None)
                store.keep(batch)
            with store.path(batch.input_file_id).open("rb") as rows:
                runner = Runner(
                    InMemory(gateway.app, "batch", gateway.source, account),
                    read_rows(rows),
                    Form(endpoint=batch.endpoint, defaults={} if gateway.models is None else {"model": batch.model}),
                    results,
                    in_flight(gateway.source, has_others=True),
                    prefix=f"{batch.id}-",
                )
                try:
                    is_done = await gateway.batches.run(batch.id, runner)
                except BadInput as error:
                    why, is_done = error.message, True  # it is no better the next time
            tally = runner.tally
            batch = attrs.evolve(
                store.batch(batch.id, None) or batch, completed=tally.rows - tally.failed, failed=tally.failed
            )
            if not is_done and batch.status == "in_progress":
                return  # the server is stopping
        await _end(store, batch, why)
    for each in (store.results(batch.id), journal_of(store.results(batch.id))):
        each.unlink(missing_ok=True)


async def _end(store: Store, batch: Batch, why: str | None) -> None:
    """Make a batch's files of its results, and tell that it is over; for which reason it failed, if it did."""
    output, error = (
        StoredFile(owner=batch.owner, name=f"{batch.id}_{kind}.jsonl", purpose="batch_output", size_bytes=0)
        for kind in ("output", "error")
    )
    paths = store.path(output.id), store.path(error.id)
    sizes = await trio.to_thread.run_sync(_split, store.results(batch.id), *paths)
    ids: list[str | None] = []
    for file, path, size in zip((output, error), paths, sizes, strict=True):
        if size:
            store.add_file(attrs.evolve(file, size_bytes=size))
        else:
            path.unlink()
        ids.append(file.id if size else None)
    status: Status = "failed" if why else "cancelled" if batch.status == "cancelling" else "completed"
    store.keep(batch.now(status, output_file_id=ids[0], error_file_id=ids[1], error=why))


def _split(results: Path, output: Path, error: Path) -> tuple[int, int]:
    """Good results to one file, the others to another; their lengths. Runs in a thread."""
    with results.open("rb") as lines, _private(output) as good, _private(error) as bad:
        for line in lines:
            response = json_bytes.loads(line)["response"]
            (good if response is not None and response["status_code"] < 400 else bad).write(line)
        return good.tell(), bad.tell()


def _private(path: Path) -> IO[bytes]:
    file = path.open("wb")
    path.chmod(0o600)
    return file


def _count(path: Path) -> int:
    """The rows of a file. Runs in a thread."""
    with path.open("rb") as rows, suppress(UmaError):
        return sum(1 for _ in read_rows(rows))
    return 0
