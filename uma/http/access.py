"""Access control: the `Host` that a request names, the `Origin` of the page that sends it, and its key.

`Host` is what tells a browser that was lured here by a foreign name (DNS rebinding) from one that means this server.
A page of another origin must not even send: its requests would run although it cannot read their answers.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path

import attrs

from uma.config import RuntimeConfig
from uma.http.exchange import Exchange, Header
from uma.http.keys import KeyFile, presented_in
from uma.http.problem import Forbidden, Unauthorized
from uma.net.client import is_loopback
from uma.net.quota import ClientAccount

PREFLIGHT_SEC = 600
"""Time for which a browser can remember the answer to a preflight."""
EXPOSED = b"x-request-id, retry-after, retry-after-ms, x-uma-ignored, x-uma-model, x-uma-note"
"""Headers of answers that a page of an allowed origin can read."""


LOCAL = "localhost"
"""Among the allowed origins: every one of this machine, on whatever port."""


@attrs.frozen
class AccessRules:
    """Who can send requests to a server: the keys, `Host` names and origins that it takes."""

    keys: KeyFile | None
    """None: no key is asked for."""
    names: frozenset[str]
    """Names that `Host` can have beside loopback's and addresses; `*`: any."""
    origins: frozenset[str]
    """Whose pages can send; `*`: all, `LOCAL`: those that this machine serves itself."""

    @classmethod
    def of(cls, config: RuntimeConfig) -> AccessRules:
        """The rules that `config` has. Raises `ConfigError` where the keys cannot be read."""
        keys = KeyFile.open(Path(config.http_keys)) if config.http_keys else None
        bound = config.http.rpartition(":")[0].strip("[]").lower()
        return cls(
            keys, frozenset(filter(None, [*_listed(config.http_hosts), bound])), frozenset(_listed(config.http_cors))
        )

    def check_place(self, http: Exchange) -> None:
        """Raise `Forbidden` for a `Host` that this server does not have, or an `Origin` that must not send.

        What an allowed origin's browser needs to see is added to the answer's headers.
        """
        host = http.header(b"host")
        if host is not None and not self._is_ours(host):  # HTTP/1.0 can be without
            raise Forbidden(
                f"Host: {host[:200]!r} is not a name of this server; --http-hosts gives it more, or use its address"
            )
        origin = http.header(b"origin")
        if origin is None:
            self._check_site(http)
            return
        if origin.lower() in self.origins or "*" in self.origins or (LOCAL in self.origins and _is_local(origin)):
            http.extra_headers += _cors(origin, is_any="*" in self.origins)
        elif origin.lower().partition("://")[2] != (host or "").lower():  # "null" has no host
            raise Forbidden(f"Origin: pages of {origin[:200]!r} may not use this server; --http-cors allows them")

    def _check_site(self, http: Exchange) -> None:
        """Raise `Forbidden` for what a browser sends for a page elsewhere without its origin, such as a
        picture's address. A link there can lead to the page.
        """
        is_visit = http.path == "/" and http.header(b"sec-fetch-mode") == "navigate"
        if http.header(b"sec-fetch-site") == "cross-site" and not is_visit and "*" not in self.origins:
            raise Forbidden("Sec-Fetch-Site: pages of other sites may not use this server; --http-cors allows them")

    def _is_ours(self, host: str) -> bool:
        name, _ = host_parts(host)
        if name == "localhost" or name.endswith(".localhost") or name in self.names or "*" in self.names:
            return True
        try:
            ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            return False
        return True

    def is_preflight(self, http: Exchange) -> bool:
        """Whether a browser only asks for permission to send."""
        return http.scope["method"] == "OPTIONS" and http.header(b"access-control-request-method") is not None

    def preflight_headers(self, http: Exchange) -> list[Header]:
        """The answer to that. Without an allowed origin there is nothing in it, and the browser stays away."""
        if not any(name == b"access-control-allow-origin" for name, _ in http.extra_headers):
            return []
        wanted = http.header(b"access-control-request-headers") or ""
        # A page from the internet that calls a server of this network, or this machine, asks for that as well.
        is_private = http.header(b"access-control-request-private-network") == "true"
        return [
            *([(b"access-control-allow-private-network", b"true")] if is_private else []),
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", wanted.encode("latin-1")),
            (b"access-control-max-age", str(PREFLIGHT_SEC).encode()),
        ]

    def account(self, http: Exchange) -> ClientAccount | None:
        """The account of the request's key; None where no keys are asked for. Raises `Unauthorized`."""
        if self.keys is None or is_public(http.path):
            return None
        headers = {name: http.header(name.encode()) or "" for name in ("authorization", "x-api-key")}
        presented = presented_in(headers)
        if presented is None:
            raise Unauthorized("an API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY")
        account = self.keys.find(presented)
        if account is None:
            raise Unauthorized("this API key is not known; `uma key new NAME` makes one")
        return account


def is_public(path: str) -> bool:
    """Whether a path is public: a health check, also by a name whose 404 tells the right one, and the page's files,
    which hold nothing of the model.
    """
    return path in ("/", "/health", "/healthz", "/livez", "/readyz") or (
        path.startswith("/ui/") and not path.startswith("/ui/api/")
    )


def _listed(text: str) -> Iterator[str]:
    return (each.strip().lower() for each in text.split(",") if each.strip())


_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::(\d*))?", re.ASCII)


def host_parts(host: str) -> tuple[str, str]:
    """The name or address in lower case, and the port, which may be missing; both empty where `host` is malformed."""
    found = _HOST.fullmatch(host.lower())
    return ("", "") if found is None else (found[1] or found[2] or "", found[3] or "")


def _is_local(origin: str) -> bool:
    """Whether an origin is a loopback name or address."""
    scheme, _, host = origin.lower().partition("://")
    return scheme in ("http", "https") and is_loopback(host_parts(host)[0])


def _cors(origin: str, *, is_any: bool) -> list[Header]:
    allowed = b"*" if is_any else origin.encode("latin-1")
    return [
        (b"access-control-allow-origin", allowed),
        (b"access-control-expose-headers", EXPOSED),
        (b"vary", b"origin"),
    ]
