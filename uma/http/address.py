"""Where HTTP listens: `ADDRESS:PORT` as it is written, checked, and bound."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from pathlib import Path

import attrs

from uma.config import RuntimeConfig
from uma.errors import ConfigError
from uma.net.client import is_loopback
from uma.net.tcp_peer import ends_at, pids_of

BACKLOG = 512
"""Connections the system holds until they are accepted."""
MAX_COMMAND = 100
"""Maximum characters of another program's command line in an error."""


@attrs.frozen
class Address:
    """A host and a port; port 0 lets the system choose."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """`127.0.0.1:8080`, `[::1]:8080`, `name:8080`, `:8080` or `8080`. Raises `ConfigError`."""
        host, colon, port = text.rpartition(":")
        host = host if colon else ""
        is_ipv6 = host.startswith("[") and host.endswith("]")
        host = (host[1:-1] if is_ipv6 else host) or "127.0.0.1"
        if (":" in host and not is_ipv6) or not (port.isascii() and port.isdigit() and int(port) <= 65_535):
            why = "expected ADDRESS:PORT, such as 127.0.0.1:8080 or [::1]:8080, with a port of at most 65535"
            raise ConfigError.at("http", f"{why}, not {text!r}")
        return cls(host, int(port))

    def listen(self) -> socket.socket:
        """A listening socket. Raises `ConfigError` with the system's reason."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, *_, where = found[0]
            sock = socket.create_server(where[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            why, *_ = str(error.strerror or error).split(" (while")  # behind it Python tells the address again
            why += _holder(str(where[0]), self.port) if error.errno == errno.EADDRINUSE else ""
            raise ConfigError.at(
                "http", f"cannot listen on {self}: {why}; name another address or port (--http ADDRESS:PORT)"
            ) from error
        sock.setblocking(False)
        return sock

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _holder(host: str, port: int) -> str:
    """`, by process 12 (uma run --http)`, where Linux tells this user of it; else empty."""
    ends = [end for end in ends_at(((own, port), ("0.0.0.0", 0)) for own in (host, "0.0.0.0")) if end]
    for pid in pids_of(ends).values():
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
            return f", by process {pid} ({words[:MAX_COMMAND]})"
    return ""


def check(config: RuntimeConfig) -> Address:
    """The address that `config` has. Raises `ConfigError` where it must not be used as it is."""
    address = Address.parse(config.http)
    if bool(config.http_tls_cert) != bool(config.http_tls_key):
        missing = "http_tls_key" if config.http_tls_cert else "http_tls_cert"
        raise ConfigError.at(missing, "missing, for a certificate and its key: give both, or neither")
    if not (is_loopback(address.host) or config.http_keys or config.http_insecure):
        raise ConfigError.at(
            "http",
            f"{address} can be reached from other machines, and no keys are set: make some with "
            "`uma key new NAME` and give --http-keys, or allow everything with --http-insecure",
        )
    return address
