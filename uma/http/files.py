"""OpenAI's files, as far as batches need them: `/v1/files`."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path

import attrs
import trio

from uma.errors import BadRequest
from uma.http.dialect import Body
from uma.http.exchange import Exchange
from uma.http.gateway import Gateway
from uma.http.multipart import FormReader
from uma.http.problem import BodiesFull, BodyTooLarge, Forbidden, NotFound, Unsupported
from uma.jobs.rows import GZIP, NO_GZIP
from uma.jobs.store import MAX_FILE_BYTES, MAX_FILES, MAX_STORE_BYTES, JobFolder, Store, StoredFile, StoreFault
from uma.json_bytes import dumps

PIECE_BYTES = 262_144
"""Length of the pieces in which contents are written and sent."""
MAX_LISTED = 10_000
"""Maximum files of one list."""
MAX_ARRIVING = 4
"""Maximum files that come at once of one client: a key, or without keys a machine."""
MAX_ARRIVING_IN_ALL = 32
"""Maximum files that come at once, so that the store is never much over its bounds."""
RETRY_MS = 1000
"""Time after which a client whose file is refused for that is asked to come again."""
CLEAN_SEC = 1.0
"""Maximum time in which a stopping server removes an upload's part; the next start removes it otherwise."""


def jobs_of(gateway: Gateway) -> JobFolder:
    """The folder of files and batches. Raises `Unsupported` where there is to be none."""
    if gateway.jobs is None:
        raise Unsupported("this server keeps no files; --http-jobs names a folder for them")
    return gateway.jobs


def owner_of(http: Exchange) -> str:
    """Whose files and batches a request can reach: its key's; without keys they are everyone's."""
    return "" if http.account is None else http.account.name


def check_space(store: Store, owner: str) -> None:
    """Raise `StoreTaken` where another process has the store, and `Forbidden` where the owner's part of it is full."""
    store.check_own()
    files, size_bytes = store.used(owner)
    if files >= MAX_FILES or size_bytes >= MAX_STORE_BYTES:
        raise Forbidden(
            f"{MAX_FILES:,} files and {MAX_STORE_BYTES:,} bytes of them at most are kept for a key; DELETE frees some"
        )


async def create(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/files`: a form of a file and its purpose, written to the disk as it comes."""
    jobs, owner, form = jobs_of(gateway), owner_of(http), await _form(http)
    length = http.header(b"content-length") or "0"
    if length.isdigit() and int(length) > MAX_FILE_BYTES:
        raise _too_large()
    arriving = StoredFile(owner=owner, name="", purpose="", size_bytes=0)
    with _arriving(jobs, http.owner):
        part = await jobs.do(partial(_begin, arriving))
        try:
            await _received(http, form, _Part(jobs, part))
            name, purpose = _checked(form)
            file = attrs.evolve(arriving, name=name, purpose=purpose, size_bytes=part.tell())
            await jobs.do(partial(_keep, file, part))
        except BaseException:
            with trio.move_on_after(CLEAN_SEC, shield=True), suppress(StoreFault):
                await jobs.do(partial(_discard, part))
            raise
    await http.answer_json(file_object(file))


@contextmanager
def _arriving(jobs: JobFolder, client: Hashable) -> Iterator[None]:
    """A block in which another file of this client comes. Raises `BodiesFull` where it has enough on their way."""
    of_client = jobs.arriving.get(client, 0)
    if of_client >= MAX_ARRIVING or sum(jobs.arriving.values()) >= MAX_ARRIVING_IN_ALL:
        message = f"{MAX_ARRIVING} files of a client, and {MAX_ARRIVING_IN_ALL} in all, can come at once; send it again"
        raise BodiesFull(message, retry_after_ms=RETRY_MS)
    jobs.arriving[client] = of_client + 1
    try:
        yield
    finally:
        jobs.arriving[client] -= 1
        if not jobs.arriving[client]:
            del jobs.arriving[client]


def _begin(file: StoredFile, store: Store) -> FileIO:
    check_space(store, file.owner)
    part = FileIO(f"{store.path(file.id)}.part", "wb")
    Path(str(part.name)).chmod(0o600)
    return part


def _keep(file: StoredFile, part: FileIO, store: Store) -> None:
    part.close()
    check_space(store, file.owner)  # others have come meanwhile
    store.add_file(file, Path(str(part.name)))


def _discard(part: FileIO, store: Store) -> None:
    part.close()
    Path(str(part.name)).unlink(missing_ok=True)


@attrs.frozen
class FileForm:
    """Fields of the form that a file comes in."""

    file: bytes
    purpose: str


@attrs.define(eq=False)
class _Part:
    """A file's contents on their way to the disk, in pieces that are worth a turn of the store's thread."""

    _jobs: JobFolder
    _file: FileIO
    _unwritten: bytearray = attrs.field(factory=bytearray, init=False)
    _is_begun: bool = attrs.field(default=False, init=False)

    def add(self, data: bytes) -> None:
        """Keep `data`, to be written soon."""
        self._unwritten += data

    async def write(self, *, is_last: bool) -> None:
        """Write what is there, once it is enough or the last. Raises `BadRequest` for gzip."""
        if len(self._unwritten) < PIECE_BYTES and not is_last:
            return
        data, self._unwritten = self._unwritten, bytearray()
        if not self._is_begun and data.startswith(GZIP):
            raise BadRequest.at("file", f"{NO_GZIP}")
        self._is_begun = True
        await self._jobs.do(lambda _: _write(self._file, data))


def _write(file: FileIO, data: bytearray) -> None:
    unwritten = memoryview(data)
    while unwritten:
        unwritten = unwritten[file.write(unwritten) :]


async def _form(http: Exchange) -> FormReader:
    """A reader of the form that comes. Raises `BadRequest` for another body, once that is read."""
    try:
        return FormReader(http.header(b"content-type"))
    except BadRequest:
        await http.body()
        raise


async def _received(http: Exchange, form: FormReader, part: _Part) -> None:
    """Read the whole form. Raises `BodyTimeout` where it stalls, or comes slower than `MIN_BYTES_PER_SEC` beyond the
    first moments; `BodyTooLarge`, and `ClientGoneError`.
    """
    form.write = part.add
    received_bytes, began = 0, trio.current_time()
    while not http.has_body:
        piece = await http.piece(began, received_bytes)
        received_bytes += len(piece)
        if received_bytes > MAX_FILE_BYTES:  # of the whole form: what stands around the file is not endless either
            raise _too_large()
        form.feed(piece)
        await part.write(is_last=http.has_body)
    if not form.is_whole:
        raise BadRequest("the form is broken: its end is missing")


def _checked(form: FormReader) -> tuple[str, str]:
    """The file's name, and its purpose. Raises `BadRequest`."""
    if form.file_name is None:
        raise BadRequest.at("file", "is missing")
    if (purpose := form.fields.get("purpose")) != "batch":
        raise BadRequest.at("purpose", f"expected batch, not {str(purpose)[:100]!r}: files are kept for batches alone")
    return form.file_name[:1000], purpose


async def listing(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/files`."""
    asked = http.query
    limit, after, is_rising = limit_of(asked, MAX_LISTED), asked.get("after"), asked.get("order") == "asc"

    def listed(store: Store) -> bytes:  # as JSON: a long list takes long to write, too
        files, has_more = store.files(owner_of(http), limit, after, asked.get("purpose"), is_rising=is_rising)
        return dumps(page_of([file_object(each) for each in files], has_more=has_more))

    await http.answer(await jobs_of(gateway).do(listed))


async def show(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/files/{id}`."""
    await http.answer_json(file_object(await jobs_of(gateway).do(partial(_found, http))))


async def remove(gateway: Gateway, http: Exchange) -> None:
    """`DELETE /v1/files/{id}`. The input of a batch that has not ended stays."""

    def removed(store: Store) -> StoredFile:
        store.check_own()
        file = _found(http, store)
        store.remove_file(file)
        return file

    file = await jobs_of(gateway).do(removed)
    await http.answer_json({"id": file.id, "object": "file", "deleted": True})


async def content(gateway: Gateway, http: Exchange) -> None:
    """`GET /v1/files/{id}/content`."""
    jobs = jobs_of(gateway)

    def opened(store: Store) -> FileIO:
        return FileIO(store.path(_found(http, store).id))

    with await jobs.do(opened) as contents:
        size = os.fstat(contents.fileno()).st_size
        await http.start(200, b"application/octet-stream", [(b"content-length", str(size).encode())])
        while piece := await jobs.do(lambda _: contents.read(PIECE_BYTES)):
            await http.write(piece)
    await http.write(b"", is_last=True)


def _found(http: Exchange, store: Store) -> StoredFile:
    """The file that the path names. Raises `NotFound`."""
    file = store.file(http.scope["path_params"]["id"], owner_of(http))
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


def limit_of(asked: Mapping[str, str], most: int) -> int:
    """How many entries of a list are asked for. Raises `BadRequest`."""
    limit = asked.get("limit", str(most))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= most):
        raise BadRequest.at("limit", f"expected a number from 1 to {most:,}, not {limit[:50]!r}")
    return int(limit)


def page_of(data: Sequence[Body], *, has_more: bool) -> Body:
    """A part of a list as OpenAI pages it."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": has_more}


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(f"file: is over {MAX_FILE_BYTES:,} bytes with the form around it")
