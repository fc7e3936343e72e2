"""`uma engine-zmq`: as `uma run`, and RustInfer's messages on a ZeroMQ socket beside it."""

from __future__ import annotations

import argparse
from functools import partial
from urllib.parse import urlsplit

from uma.cli import say, words
from uma.cli.default_model import with_default
from uma.cli.options import load_settings
from uma.cli.run import announce
from uma.cli.sanitize import sanitize_line
from uma.cli.source import shown_progress
from uma.config import Loaded, RuntimeConfig
from uma.errors import ConfigError
from uma.net.client import is_loopback
from uma.types import ServerInfo, Source


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    loaded = with_default(load_settings(options))
    config = loaded.config
    check_endpoint(options.bind, is_insecure=options.insecure)
    try:
        from uma.bridges.rustinfer.engine import OVERSIZE_FACTOR, RustInferEngine  # noqa: PLC0415
        from uma.bridges.rustinfer.socket import RouterSocket  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"engine-zmq needs {error.name}: pip install '.[zmq]'") from None
    from uma.engine import Engine  # noqa: PLC0415  (slow to import, as all below)
    from uma.server import end_with, run_server  # noqa: PLC0415
    from uma.server.connection import MAX_SESSION_REQUESTS  # noqa: PLC0415

    longest = OVERSIZE_FACTOR * config.frame_bytes(takes_media=True)
    socket = RouterSocket(options.bind, longest, stall_timeout_sec=config.tx_timeout_sec)

    def engine(source: Source, config: RuntimeConfig) -> RustInferEngine:
        assert isinstance(source, Engine)
        return RustInferEngine(
            source,
            source.tokenize_rendered,
            socket,
            source.info.limits.max_frame_bytes,
            MAX_SESSION_REQUESTS,
            config.drain_timeout_sec,
        )

    on_ready = partial(_announce, loaded, socket.endpoint)
    return end_with(run_server(config, on_ready, beside=[engine], progress=shown_progress(config.model)))


def check_endpoint(endpoint: str, *, is_insecure: bool) -> None:
    """Raise `ConfigError` for an endpoint that other machines can reach, unless that is asked for."""
    scheme, _, place = endpoint.partition("://")
    if scheme not in ("ipc", "tcp", "inproc") or not place:
        raise ConfigError(f"--bind: {endpoint!r} must be ipc://PATH or tcp://ADDRESS:PORT")
    if scheme != "tcp" or is_insecure:
        return
    host = urlsplit(endpoint).hostname or ""
    if host != "lo" and not is_loopback(host):
        raise ConfigError(
            f"--bind: {endpoint} can be reached from other machines, and there is no authentication; "
            "--insecure allows it"
        )


def _announce(loaded: Loaded, endpoint: str, info: ServerInfo) -> None:
    announce(loaded, info)
    if not words.is_json_log(loaded.config):
        say.plain(sanitize_line(f"zmq     {endpoint}"))
