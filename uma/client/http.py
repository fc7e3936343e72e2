"""The one HTTP client of this package and the commands: what asks a UMA server by its URL.

The server is asked directly, without the proxy that variables name: most stand on this machine.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, RemoteDisconnected
from pathlib import Path
from ssl import SSLCertVerificationError
from typing import Any
from urllib.parse import urlsplit

import attrs

from uma.errors import ConfigError, ConnectionLost, told


@attrs.frozen
class HttpClient:
    """A server at a URL. `timeout_sec` bounds each wait for it; `option` names the URL in errors."""

    url: str
    key: str | None = None
    timeout_sec: float = 120.0
    option: str = "--url"

    @contextmanager
    def ask(self, method: str, path: str, body: Any = None) -> Iterator[HTTPResponse]:
        """The answer to one request, whatever its status. Raises as `connection`."""
        with self.connection() as connection:
            yield self.begin(connection, method, path, body)

    @contextmanager
    def connection(self) -> Iterator[HTTPConnection]:
        """A connection, closed with the block: a thread that still reads it ends with it.

        Raises `ConfigError` for what is no URL of a server, and `ConnectionLost` where none answers in the block.
        """
        connection = self._made()
        try:
            yield connection
        except TimeoutError:
            raise ConnectionLost(f"{self.url}: timeout: no answer within {self.timeout_sec:g} s") from None
        except (OSError, HTTPException) as error:
            hint = "start a server with `uma run --http`"
            if isinstance(error, RemoteDisconnected) and self.url.startswith("http:"):
                hint = "one with a certificate (--http-tls-cert) is at https://"
            if isinstance(error, SSLCertVerificationError):
                hint = "the certificate is not trusted: set SSL_CERT_FILE to its CA's file, and use a name it is for"
            raise ConnectionLost(f"{self.url}: {told(error)}; {hint}") from error
        finally:
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()

    def begin(self, connection: HTTPConnection, method: str, path: str, body: Any = None) -> HTTPResponse:
        """The head of an answer; `body` is sent as JSON."""
        headers = {"content-type": "application/json"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        base = urlsplit(self.url).path.rstrip("/")
        connection.request(method, base + path, None if body is None else json.dumps(body), headers)
        return connection.getresponse()

    def read_json(self, method: str, path: str) -> Any:
        """The JSON of a successful answer. Raises as `connection`, and `ConnectionLost` for any other answer."""
        with self.ask(method, path) as response:
            self.check(response)
            try:
                return json.loads(response.read())
            except ValueError as error:
                raise ConnectionLost(f"{self.url}: no UMA server answers there: {error}") from None

    def check(self, response: HTTPResponse) -> None:
        """Raise `ConnectionLost` for an answer that is no success."""
        if response.status != 200:
            hint = "; give a file with the key as --key-file" if response.status in (401, 403) else ""
            raise ConnectionLost(f"{self.url}: answers {response.status}{hint}")

    def _made(self) -> HTTPConnection:
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError:  # of a port or an IPv6 address that is none
            host, port = None, None
        if host is None or parts.scheme not in ("http", "https"):
            raise ConfigError(
                f"{self.option}: {self.url!r} is no address of a server; give one such as http://127.0.0.1:8080"
            )
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        return kind(host, port, timeout=self.timeout_sec)


def read_key(path: Path | None) -> str | None:
    """The key in a file; None without one. Raises `ConfigError` where no header could carry what is there."""
    if path is None:
        return None
    try:
        key = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"--key-file: {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        key = ""
    if not key.isprintable() or not key:
        raise ConfigError(f"--key-file: {path} holds no key; it is one line, as `uma key new` printed it")
    return key
