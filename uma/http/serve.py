"""HTTP beside the server: a listener, a task for each connection, and an orderly end.

Everything runs in the nursery of the caller: a connection's tasks are children of its own nursery, so ending one
connection, or all, ends the requests that ran there.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import stat
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import attrs
import trio

from uma.config import RuntimeConfig
from uma.errors import ConfigError
from uma.http.access import AccessRules
from uma.http.address import Address
from uma.http.address import check as check_address
from uma.http.app import build_app
from uma.http.batches import run_all
from uma.http.gateway import Gateway
from uma.http.http1 import HttpConnection
from uma.http.transport import Transport
from uma.net.accept import accept_forever
from uma.net.client import THIS_MACHINE, machine_at
from uma.net.file_watch import FileWatch
from uma.net.link import Flusher, Link, ReaderStalledError
from uma.net.logfmt import log
from uma.net.throttle import ClientLines
from uma.types import LoadProgress, Source

logger = logging.getLogger("uma.http")

CONNECTIONS_A_SESSION = 8
"""Maximum HTTP connections at once, for each of `max_sessions`: a client keeps several."""
EXPIRY_DAYS = 14
"""Time before a certificate's end from which on that is warned of. Programs that renew certificates do so earlier."""
NO_CHECK_TIME = 0x200000
"""OpenSSL's `X509_V_FLAG_NO_CHECK_TIME`: accept a certificate that has expired."""
FAREWELL_SEC = 1.0
"""How long the last answers of a stopping server can take to be read."""


def check(config: RuntimeConfig) -> Address:
    """Look at everything that HTTP needs, before a model is loaded in vain. Raises `ConfigError`."""
    address = check_address(config)
    AccessRules.of(config)
    Certificate.open(config)
    return address


@attrs.define(eq=False)
class Certificate:
    """TLS with the certificate and key that the files hold now. Belongs to one thread."""

    _cert: FileWatch
    _key: FileWatch
    _context: ssl.SSLContext

    @classmethod
    def open(cls, config: RuntimeConfig) -> Certificate | None:
        """The certificate that `config` names; None for no TLS. Raises `ConfigError` where it cannot be used."""
        if not config.http_tls_cert:
            return None
        cert, key = FileWatch(Path(config.http_tls_cert)), FileWatch(Path(config.http_tls_key))
        return cls(cert, key, _load(cert.path, key.path))

    def context(self) -> ssl.SSLContext:
        """TLS for a new connection; those that are open keep theirs.

        Files that have changed are read first. A pair that cannot be used, such as a new certificate beside the old
        key, is warned of, and the pair from before stays.
        """
        if [watch for watch in (self._cert, self._key) if watch.has_changed()]:
            try:
                self._context = _load(self._cert.path, self._key.path)
            except ConfigError as error:
                log(logger, logging.WARNING, "http.tls_not_reloaded", error=error.message)
            else:
                log(logger, logging.INFO, "http.tls_reloaded", cert=self._cert.path)
        return self._context

    def _expires_at(self) -> datetime:
        """The certificate's end, told by a handshake with itself: `ssl` reads no bare certificate. Without verdict of
        OpenSSL's on it, as where its key is thought too short, that is never.
        """
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | NO_CHECK_TIME
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        asking = client.wrap_bio(to_client, to_server)
        answering = self._context.wrap_bio(to_server, to_client, server_side=True)
        try:
            client.load_verify_locations(self._cert.path)
            for side in (asking, answering, asking):
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
            end = str((asking.getpeercert() or {})["notAfter"])
            return datetime.fromtimestamp(ssl.cert_time_to_seconds(end), UTC)
        except (OSError, ValueError, KeyError):
            return datetime.max.replace(tzinfo=UTC)

    def problems(self) -> Iterator[str]:
        """Faults of files that can be used all the same, each with what to do."""
        cert, key, end = self._cert.path, self._key.path, self._expires_at()
        if end < datetime.now(UTC) + timedelta(days=EXPIRY_DAYS):
            yield f"http_tls_cert: {cert}: the certificate expires at {end:%Y-%m-%d %H:%M} UTC; renew it"
        if os.name == "posix" and (mode := stat.S_IMODE(key.stat().st_mode)) & 0o007:
            yield f"http_tls_key: {key}: mode {mode:03o} lets other users use the private key: chmod o= {key}"


def _load(cert: Path, key: Path) -> ssl.SSLContext:
    # A new context each time: one whose `load_cert_chain` fails has lost the key that it had.
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    try:
        context.load_cert_chain(cert, key, "")  # no passphrase: OpenSSL would stop the server to ask
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        if isinstance(error, ssl.SSLError):
            is_other = error.reason == "KEY_VALUES_MISMATCH"
            no_pem = "one of the two is no PEM file, is cut off, or has a passphrase (OpenSSL: PEM lib)"
            why = "the key is another certificate's (key values mismatch)" if is_other else no_pem
        told = (
            f"{cert}, with the key {key}: {why}; name a certificate and its key, both as PEM and without a passphrase"
        )
        raise ConfigError.at("http_tls_cert", told) from error
    return context


class HttpService:
    """Serves one source over HTTP. All methods belong to the Trio thread that runs `serve`.

    With a `LoadProgress` in the source's place it answers while the model is being loaded: with status 503, but for
    the page's files, until `be_ready`.
    """

    def __init__(self, source: Source | LoadProgress, config: RuntimeConfig) -> None:
        self._config = config
        self._asked = check(config)
        self.gateway = Gateway.of(source, config)
        self._app = build_app(self.gateway)
        self._tls = Certificate.open(config)
        for problem in () if self._tls is None else self._tls.problems():
            log(logger, logging.WARNING, "http.tls_problem", reason=problem)
        self._accepting = trio.CancelScope()
        self._draining = trio.CancelScope()
        self._flusher = Flusher()
        self._connections: set[HttpConnection] = set()
        self._of_machine: Counter[Hashable] = Counter()
        """Connections by the machine at their other end."""
        self._gone = trio.lowlevel.ParkingLot()
        self.url = ""
        """Where it can be reached, once it listens."""

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `begin_drain`, then return when every connection has ended, or `drain_timeout_sec` is over.

        `started` is called once clients can connect. Raises `ConfigError` where the address cannot be had.
        """
        listener = self._asked.listen()
        try:
            self.url = _url(listener, is_tls=self._tls is not None)
            log(logger, logging.INFO, "http.ready", url=self.url)
            async with trio.open_nursery() as nursery:
                self.gateway.tasks = nursery
                nursery.start_soon(run_all, self.gateway)
                nursery.start_soon(self._flusher.run)
                task_status.started()
                with self._accepting:
                    await accept_forever(listener, lambda sock: self._admit(sock, nursery), self._note_shortage)
                listener.close()
                await self._drain()
                nursery.cancel_scope.cancel()
        finally:
            listener.close()
            if self.gateway.jobs is not None:
                self.gateway.jobs.close()
            log(logger, logging.INFO, "http.stopped", suppressed=self.gateway.lines.suppressed or None)

    def be_ready(self, source: Source) -> None:
        """The model is loaded: take requests from now on."""
        self.gateway.be_ready(source)

    def begin_drain(self) -> None:
        """Take no more connections and requests, and let `serve` come to its end. Called again: now."""
        if self._accepting.cancel_called:
            self._draining.cancel()
        self._accepting.cancel()

    async def _drain(self) -> None:
        log(logger, logging.INFO, "http.draining", requests=len(self.gateway.answering))
        for connection in list(self._connections):
            connection.drain()
        self.gateway.batches.drain()
        self._draining.deadline = trio.current_time() + self._config.drain_timeout_sec
        with self._draining:
            await self._all_gone()
        self.gateway.abort()
        with trio.move_on_after(FAREWELL_SEC):
            await self._all_gone()

    async def _all_gone(self) -> None:
        while self._connections:
            await self._gone.park()

    def _admit(self, sock: socket.socket, nursery: trio.Nursery) -> None:
        machine = machine_at(peer := _peer(sock))
        if self._is_full(machine):
            self.gateway.connections_refused_total += 1
            sock.close()  # a flood: even a refusal costs a file descriptor
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = Link(sock, self._config.max_tx_bytes, self._config.tx_timeout_sec, self._flusher)
        transport = Transport(link, None if self._tls is None else self._tls.context())
        lines = ClientLines(self.gateway.lines, peer)
        try:
            connection = HttpConnection(self._app, transport, lines, self._config.http_timeout_sec)
        except OSError:
            sock.close()  # its client is gone already
            return
        self._connections.add(connection)
        self._of_machine[machine] += 1
        self.gateway.connections_total += 1
        nursery.start_soon(self._host, connection, transport, lines, machine)

    def _is_full(self, machine: Hashable) -> bool:
        """Whether there are too many connections for one more of `machine`. Another machine can have half of them; this
        one has no bound of its own, since all its programs, and a proxy among them, share one address.
        """
        most = CONNECTIONS_A_SESSION * self._config.max_sessions
        is_over = machine != THIS_MACHINE and self._of_machine[machine] >= max(1, most // 2)
        return is_over or len(self._connections) >= most

    async def _host(
        self, connection: HttpConnection, transport: Transport, lines: ClientLines, machine: Hashable
    ) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_write, transport, lines, nursery.cancel_scope)
                await connection.run()
                nursery.cancel_scope.cancel()
        except Exception as fault:  # noqa: BLE001  (whatever it is, it is this connection's alone)
            lines.log(logger, logging.ERROR, "http.connection_crashed", fault=fault)
        finally:
            transport.link.close()
            self._connections.discard(connection)
            self._of_machine[machine] -= 1
            if not self._of_machine[machine]:
                del self._of_machine[machine]
            self._gone.unpark_all()

    def _note_shortage(self, error: OSError) -> None:
        self.gateway.lines.log(logger, logging.ERROR, "http.cannot_accept", reason=error.strerror)


def _peer(sock: socket.socket) -> str:
    """The client's address; none where it is gone already."""
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return ""


async def _write(transport: Transport, lines: ClientLines, connection: trio.CancelScope) -> None:
    try:
        await transport.write()
    except ReaderStalledError:
        lines.log(logger, logging.WARNING, "http.stalled", unsent_bytes=transport.link.unsent_bytes)
        connection.cancel()
    except OSError:
        connection.cancel()  # hung up: what ran for it has no reader


def _url(listener: socket.socket, *, is_tls: bool) -> str:
    return f"{'https' if is_tls else 'http'}://{Address(*listener.getsockname()[:2])}"
