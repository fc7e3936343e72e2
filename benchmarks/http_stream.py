"""The least an HTTP client can do for a streaming answer: one POST a connection, chunks in, server-sent events out.

It is this small on purpose. The client's CPU time counts against a target, and a general HTTP library would charge the
peers for features that no benchmark uses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import orjson
import trio

from benchmarks.samples import Sample

HOST = "127.0.0.1"


class HttpError(Exception):
    """The server answered with a status other than 200, or broke off."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {body[:300]!r}")
        self.status = status


class _Reader:
    """Lines and counted bytes out of a stream."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            await self._more()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    async def take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            await self._more()
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    async def _more(self) -> None:
        data = await self._stream.receive_some(65_536)
        if not data:
            raise HttpError(0, b"the server closed the connection in the middle of an answer")
        self._buffer += data


@contextmanager
def ending(sample: Sample) -> Iterator[None]:
    """A block that sends a request and reads its answer. The sample ends with it, as failed where the server fails."""
    try:
        yield
    except HttpError as error:
        sample.fail(str(error))
    except (trio.BrokenResourceError, OSError) as error:
        sample.fail(f"connection lost: {error}")
    finally:
        sample.end()


@asynccontextmanager
async def post(port: int, path: str, body: object) -> AsyncIterator[AsyncIterator[bytes]]:
    """POST JSON; the payloads of the answer's `data:` events, without `[DONE]`. Leaving the block hangs up.

    Raises `HttpError` for a status other than 200.
    """
    stream = await trio.open_tcp_stream(HOST, port)
    async with stream:
        stream.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, True)
        payload = orjson.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        await stream.send_all(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        reader = _Reader(stream)
        await _check_head(reader)
        yield _events(reader)


async def _check_head(reader: _Reader) -> None:
    status = int((await reader.line()).split()[1])
    length, is_chunked = 0, False
    while header := await reader.line():
        name, _, value = header.lower().partition(b":")
        if name == b"content-length":
            length = int(value)
        is_chunked = is_chunked or (name == b"transfer-encoding" and b"chunked" in value)
    if status != 200:
        raise HttpError(status, await reader.take(length))
    if not is_chunked:
        raise HttpError(status, b"expected a chunked answer")


async def _events(reader: _Reader) -> AsyncIterator[bytes]:
    buffer = b""
    while size := int(await reader.line(), 16):
        buffer += await reader.take(size)
        await reader.line()
        # Servers end a line of an event stream with \n or with \r\n.
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield line[6:]
