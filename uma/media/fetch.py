"""Fetches pictures and sounds by http(s) URL (`--media-urls`), bounded, and never from this machine or its networks.

A host name is resolved once, and the connection goes to the address that was checked; the same holds for each redirect.
No proxy is used, and nothing of the request is sent except the URL.
"""

from __future__ import annotations

import base64
import ssl
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit
from weakref import WeakValueDictionary

import attrs
import h11
import trio

from uma.errors import BadRequest, Overloaded
from uma.media.files import MAX_FILE_BYTES, MAX_REQUEST_BYTES, over_limit
from uma.net.client import CLIENT
from uma.types import Media, Request
from uma.version import __version__

DEADLINE_SEC = 20.0
"""Maximum time for all files of one request."""
MAX_REDIRECTS = 3
MAX_FETCHING = 8
"""Maximum requests that fetch at once."""
MAX_FETCHING_BY_CLIENT = 4
"""Maximum requests of one client that fetch at once, so that URLs of a server that never answers do not take all
turns."""
TURN_SEC = 20.0
"""Maximum time that a request waits for its turn to fetch."""

_PIECE_BYTES = 65_536
_QUICK_BYTES = 262_144
"""Maximum size of a file that is encoded as base64 on the Trio thread, which takes less time than another thread
costs."""
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_TRANSLATED = tuple(
    map(IPv6Network, ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16"))
)
"""Ranges of IPv6 addresses that embed an IPv4 address, to which a gateway or this machine would connect."""
_SPECIAL = tuple(map(IPv4Network, ("192.0.0.0/24", "192.88.99.0/24")))
"""Ranges for protocols and relays that some Python versions count as global."""
_ISATAP = frozenset((0x5EFE, 0x200_5EFE))
"""Third 32 bits of an address whose last 32 bits are an IPv4 address, in any network (RFC 5214)."""
_LOOPBACK = IPv4Address("127.0.0.1")

Address = IPv4Address | IPv6Address


def is_public(address: Address) -> bool:
    """Whether an address is on the internet: not this machine, not private, link-local or special, and not a
    translation of such an address.
    """
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.is_site_local or any(address in network for network in _TRANSLATED):
            return False
        if int(address) >> 32 & 0xFFFF_FFFF in _ISATAP:
            return False
    elif any(address in network for network in _SPECIAL):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


class Fetcher:
    """Fetches the files of requests. Belongs to one Trio thread."""

    def __init__(self, *, is_allowed: Callable[[Address], bool] = is_public) -> None:
        """`is_allowed` tells whether to connect to an address."""
        self._is_allowed = is_allowed
        self._turns = trio.CapacityLimiter(MAX_FETCHING)
        self._turns_of = WeakValueDictionary[Hashable, trio.CapacityLimiter]()
        """Limiters of clients that fetch or wait."""
        self._tls: ssl.SSLContext | None = None

    async def fetched(self, request: Request, first: int = 0) -> Request:
        """The request with files instead of URLs. Raises `BadRequest` for a URL that cannot be fetched, naming its
        message (counted from `first`), and `Overloaded` where no turn comes within `TURN_SEC`.
        """
        if not any(media_file.url for _, media_file in request.placed_media()):
            return request
        media, left = list[Media](), MAX_REQUEST_BYTES
        async with self._turn():
            place = ""
            with trio.move_on_after(DEADLINE_SEC) as patience:
                for field, media_file in request.placed_media(first):
                    if media_file.url is not None:
                        place = f"{field}.url"
                        data = await self.fetch(media_file.url, place, left)
                        left -= len(data)
                        media_file = attrs.evolve(media_file, url=None, data=await _base64_of(data))  # noqa: PLW2901
                    media.append(media_file)
            if patience.cancelled_caught:
                raise BadRequest.at(place, f"timeout: not fetched within {DEADLINE_SEC:g} s; send the file itself")
        return request.with_media(media)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """A block in which a request fetches. A client's requests wait for each other first, so that they do not all
        queue before those of other clients.
        """
        own = self._turns_of.setdefault(CLIENT.get(), trio.CapacityLimiter(MAX_FETCHING_BY_CLIENT))
        async with AsyncExitStack() as turn:
            with trio.move_on_after(TURN_SEC) as patience:
                await turn.enter_async_context(own)
                await turn.enter_async_context(self._turns)
            if patience.cancelled_caught:
                raise Overloaded(
                    f"too many files are being fetched: timeout after {TURN_SEC:g} s; send the file itself",
                    retry_after_ms=round(1_000 * DEADLINE_SEC),
                )
            yield

    async def fetch(self, url: str, field: str, left: int = MAX_REQUEST_BYTES) -> bytes:
        """The content of a URL, at most `left` bytes. Raises `BadRequest`, which quotes nothing of the other server's
        response.
        """
        for _ in range(MAX_REDIRECTS + 1):
            parts = _parts(url, field)
            try:
                response, body = await self._get(parts, field, left)
            except (OSError, ValueError, trio.BrokenResourceError, h11.ProtocolError) as error:
                # `OSError` includes errors of certificates.
                raise BadRequest.at(field, f"cannot be fetched from {parts.hostname}: {_reason(error)}") from None
            if response.status_code not in _REDIRECTS:
                if response.status_code != 200:
                    raise BadRequest.at(field, f"{parts.hostname} answers with status {response.status_code}")
                if not body:
                    raise BadRequest.at(field, f"{parts.hostname} answers with nothing")
                return body
            there = next((value for name, value in response.headers if name == b"location"), b"")
            try:
                url = urljoin(url, there.decode("latin-1"))
            except ValueError:
                raise BadRequest.at(field, f"{parts.hostname} leads on to what is no URL") from None
        raise BadRequest.at(field, f"leads on more than {MAX_REDIRECTS} times")

    async def _get(self, parts: SplitResult, field: str, left: int) -> tuple[h11.Response, bytes]:
        async with await self._connected(parts, field) as stream:
            peer = h11.Connection(h11.CLIENT)
            target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
            headers = [
                (b"Host", parts.netloc.encode("ascii")),
                (b"User-Agent", f"uma/{__version__}".encode()),
                (b"Accept", b"image/*, audio/*"),
                (b"Accept-Encoding", b"identity"),
                (b"Connection", b"close"),
            ]
            asked = peer.send(h11.Request(method="GET", target=target.encode("ascii"), headers=headers))
            await stream.send_all((asked or b"") + (peer.send(h11.EndOfMessage()) or b""))
            response, body = None, bytearray()
            while True:
                event = peer.next_event()
                if event is h11.NEED_DATA:
                    peer.receive_data(bytes(await stream.receive_some(_PIECE_BYTES)))
                elif isinstance(event, h11.Response):
                    response = event
                    if event.status_code != 200:
                        return response, b""
                elif isinstance(event, h11.Data):
                    body += event.data
                    if len(body) > min(left, MAX_FILE_BYTES):
                        raise over_limit(field, left)
                elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                    break
        if response is None:
            raise ValueError("it has hung up")
        return response, bytes(body)

    async def _connected(self, parts: SplitResult, field: str) -> trio.abc.Stream:
        context = await self._context() if parts.scheme == "https" else None
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
        for place in found:
            # All addresses are checked: a name with a private one beside a public one is an attack.
            if not self._is_allowed(ip_address(str(place[4][0]).partition("%")[0])):
                raise _refused(parts, field)
        sock = await _connected_to_one(found)
        stream = trio.SocketStream(sock)
        is_own = sock.getsockname()[0] == sock.getpeername()[0]  # a public address can be this machine's own
        if is_own and not self._is_allowed(_LOOPBACK):
            sock.close()
            raise _refused(parts, field)
        if context is None:
            return stream
        return trio.SSLStream(stream, context, server_hostname=host, https_compatible=True)

    async def _context(self) -> ssl.SSLContext:
        if self._tls is None:  # slow: reads all certificates of this machine
            self._tls = await trio.to_thread.run_sync(ssl.create_default_context)
        return self._tls


async def _base64_of(data: bytes) -> str:
    if len(data) > _QUICK_BYTES:
        return (await trio.to_thread.run_sync(base64.b64encode, data)).decode()
    return base64.b64encode(data).decode()


async def _connected_to_one(addresses: Sequence[Any]) -> trio.socket.SocketType:
    """A connection to the first address that accepts one. Raises the last address's `OSError`."""
    for at, (family, kind, protocol, _, address) in enumerate(addresses, 1):
        sock = trio.socket.socket(family, kind, protocol)
        try:
            await sock.connect(address)
        except BaseException as error:
            sock.close()
            if at < len(addresses) and isinstance(error, OSError):
                continue
            raise
        return sock
    raise OSError("it has no address")


def _parts(url: str, field: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_whole = False
    if not is_whole or "@" in parts.netloc or not all("!" <= character <= "~" for character in url):
        raise BadRequest.at(field, "expected an http or https URL in ASCII, without a name and password")
    return parts


def _refused(parts: SplitResult, field: str) -> BadRequest:
    return BadRequest.at(field, f"{parts.hostname} is an address of this machine or a private network's")


def _reason(error: Exception) -> str:
    error = error.__cause__ if isinstance(error.__cause__, Exception) else error  # of TLS
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__)[:200]
