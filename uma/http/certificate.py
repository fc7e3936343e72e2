"""The certificate of a server with TLS: two files, which the server reads again as soon as one of them has changed."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import attrs

from uma.config import RuntimeConfig
from uma.errors import ConfigError
from uma.net.file_watch import FileWatch
from uma.net.logfmt import log

logger = logging.getLogger("uma.http")


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


def _load(cert: Path, key: Path) -> ssl.SSLContext:
    # A new context each time: one whose `load_cert_chain` fails has lost the key that it had.
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    try:
        context.load_cert_chain(cert, key, _no_passphrase)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        told = f"{cert}, with the key {key}: {why}; name a certificate and its key, both as PEM"
        raise ConfigError.at("http_tls_cert", told) from error
    return context


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase, for which OpenSSL would stop the server to ask; store it without one")
