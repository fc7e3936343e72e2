"""OpenAI's files, as far as batches need them: `/v1/files`."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import attrs
import trio

from uma.errors import BadRequest, InternalError
from uma.http.dialect import Body
from uma.http.exchange import ClientGoneError, Exchange
from uma.http.gateway import Gateway
from uma.http.multipart import FormReader
from uma.http.problem import BodiesFull, BodyTimeout, BodyTooLarge, Forbidden, NotFound, Unsupported
from uma.jobs.store import MAX_FILE_BYTES, MAX_FILES, MAX_STORE_BYTES, OVER, Store, StoredFile

T = TypeVar("T")

PIECE_BYTES = 262_144
"""Length of the pieces in which contents are sent."""
MAX_LISTED = 10_000
"""Maximum files of one list."""
MAX_ARRIVING, RETRY_MS = 4, 1000
"""Maximum files that come at once, so that the store is never much over its bound; after which time a client whose
file is refused for that is asked to come again."""


def store_of(gateway: Gateway) -> Store:
    """The store, made at its first use. Raises `Unsupported` where there is to be none, `InternalError` where it cannot
    be used.
    """
    if gateway.store is None:
        if not gateway.config.http_jobs:
            raise Unsupported("this server keeps no files; --http-jobs names a folder for them")
        try:
            gateway.store = Store(Path(gateway.config.http_jobs))
        except (OSError, sqlite3.Error) as error:
            raise InternalError(f"the folder of files (http_jobs) cannot be used: {error}") from None
        gateway.at_end.append(gateway.store.close)
    return gateway.store


def owner_of(http: Exchange) -> str:
    """Whose files and batches a request can reach: its key's; without keys they are everyone's."""
    return "" if http.account is None else http.account.name


def check_space(store: Store) -> None:
    """Raise `Forbidden` where the store is full."""
    if len(store.files(None)) >= MAX_FILES or store.size_bytes() >= MAX_STORE_BYTES:
        raise Forbidden(
            f"this server keeps {MAX_FILES:,} files and {MAX_STORE_BYTES:,} bytes of them at most; DELETE frees some"
        )


async def create(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/files`: a form of a file and its purpose, written to the disk as it comes."""
    store, form = store_of(gateway), await _form(http)
    check_space(store)
    if store.arriving >= MAX_ARRIVING:
        raise BodiesFull(f"{MAX_ARRIVING} files are on their way just now; send it again", retry_after_ms=RETRY_MS)
    length = http.header(b"content-length") or "0"
    if length.isdigit() and int(length) > MAX_FILE_BYTES:
        raise _too_large()
    arriving = StoredFile(owner=owner_of(http), name="", purpose="", size_bytes=0)
    path = store.path(arriving.id)
    store.arriving += 1
    try:
        with path.open("wb") as contents:
            path.chmod(0o600)
            form.write = contents.write
            await _received(http, form)
        name, purpose = _checked(form)
        file = attrs.evolve(arriving, name=name, purpose=purpose, size_bytes=path.stat().st_size)
        store.add_file(file)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    finally:
        store.arriving -= 1
    await http.answer_json(file_object(file))


async def _form(http: Exchange) -> FormReader:
    """A reader of the form that comes. Raises `BadRequest` for another body, once that is read."""
    try:
        return FormReader(http.header(b"content-type"))
    except BadRequest:
        await http.body()
        raise


async def _received(http: Exchange, form: FormReader) -> None:
    """Read the whole form. Raises `BodyTimeout` where nothing comes for long, `BodyTooLarge`, and `ClientGoneError`."""
    is_last, received_bytes = False, 0
    while not is_last:
        with trio.move_on_after(http.timeout_sec) as patience:
            message = await http.receive()
        if patience.cancelled_caught:
            raise BodyTimeout(f"the file did not come on within {http.timeout_sec:g} s (http_timeout_sec)")
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece = message.get("body", b"")
        received_bytes += len(piece)
        if received_bytes > MAX_FILE_BYTES:  # of the whole form: what stands around the file is not endless either
            raise _too_large()
        form.feed(piece)
        is_last = not message.get("more_body", False)
    http.body_was_read()
    if not form.is_whole:
        raise BadRequest("the form is broken: its end is missing")


def _checked(form: FormReader) -> tuple[str, str]:
    """The file's name, and its purpose. Raises `BadRequest`."""
    if form.file_name is None:
        raise BadRequest("file: is missing")
    if (purpose := form.fields.get("purpose")) != "batch":
        raise BadRequest(f"purpose: expected batch, not {str(purpose)[:100]!r}: files are kept for batches alone")
    return form.file_name[:1000], purpose


async def listing(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/files`."""
    asked = http.query
    files = [each for each in store_of(gateway).files(owner_of(http)) if asked.get("purpose") in (None, each.purpose)]
    if asked.get("order") == "asc":
        files.reverse()
    await http.answer_json(page(files, asked, MAX_LISTED, file_object))


async def show(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/files/{id}`."""
    await http.answer_json(file_object(found(gateway, http)))


async def remove(gateway: Gateway, http: Exchange) -> None:
    """`DELETE /v1/files/{id}`. The input of a batch that has not ended stays."""
    file, store = found(gateway, http), store_of(gateway)
    for batch in store.batches(file.owner):
        if batch.input_file_id == file.id and batch.status not in OVER:
            raise BadRequest(f"id: batch {batch.id} reads this file; cancel it first")
    store.remove_file(file.id)
    await http.answer_json({"id": file.id, "object": "file", "deleted": True})


async def content(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/files/{id}/content`."""
    file = found(gateway, http)
    async with await trio.open_file(store_of(gateway).path(file.id), "rb") as contents:
        await http.start(200, b"application/octet-stream", [(b"content-length", str(file.size_bytes).encode())])
        while piece := await contents.read(PIECE_BYTES):
            await http.write(piece)
    await http.write(b"", is_last=True)


def found(gateway: Gateway, http: Exchange) -> StoredFile:
    """The file that the path names. Raises `NotFound`."""
    file = store_of(gateway).file(http.scope["path_params"]["id"], owner_of(http))
    if file is None:
        raise NotFound("no such file: it was deleted, or is another key's")
    return file


def file_object(file: StoredFile) -> Body:
    """A file as OpenAI tells of one."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": file.created_at,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "expires_at": None,
    }


def page(entries: Sequence[T], asked: dict[str, str], most: int, file_object: Callable[[T], Body]) -> dict[str, Any]:
    """A list as OpenAI pages it: `limit` entries behind the one whose id is `after`. Raises `BadRequest`."""
    limit = asked.get("limit", str(most))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= most):
        raise BadRequest(f"limit: expected a number from 1 to {most:,}, not {limit[:50]!r}")
    shown = [file_object(each) for each in entries]
    ids = [each["id"] for each in shown]
    start = ids.index(asked["after"]) + 1 if asked.get("after") in ids else 0
    data = shown[start : start + int(limit)]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": start + int(limit) < len(shown)}


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(f"file: is over {MAX_FILE_BYTES:,} bytes with the form around it")
