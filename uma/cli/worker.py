"""`uma worker`: a backend worker of NVIDIA Dynamo."""

from __future__ import annotations

import argparse
import os
import socket

from uma.cli.options import load_settings
from uma.errors import ConfigError

INSTALL = "pip install '.[dynamo]' && pip install --no-deps ai-dynamo==1.6.1"
MAX_SYSTEM_PORT = 32_767


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    config = load_settings(options).config
    if options.block_size < 1:
        raise ConfigError(f"--block-size: {options.block_size} must be 1 or more")
    _check_system_port(os.environ.get("DYN_SYSTEM_PORT"))
    address = address_of(options.host)
    try:
        from uma.bridges.dynamo.worker import WorkerOptions, run_worker  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"worker needs {error.name}: {INSTALL}") from None
    run_worker(  # and end the process
        config,
        WorkerOptions(
            options.namespace,
            options.component,
            options.served_name,
            options.block_size,
            options.tokenizer_dir and options.tokenizer_dir.absolute(),
            address,
            options.discovery_backend,
            options.request_plane,
            options.event_plane,
        ),
    )


def address_of(host: str) -> str:
    """The IP address of a machine's name, IPv4 where it has one: Dynamo's event plane takes no names.

    Raises `ConfigError` where the name has no address. Waits for the system's resolver.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no host name"
        raise ConfigError(
            f"--host: {host} has no address: {reason}; give the address that the frontend reaches"
        ) from None
    (*_, address) = min(found, key=lambda each: each[0] is not socket.AF_INET)
    return str(address[0])


def _check_system_port(value: str | None) -> None:
    """Dynamo reads a signed 16-bit number, and ends the process at a larger one."""
    if value is not None and not (value.lstrip("-").isdecimal() and int(value) <= MAX_SYSTEM_PORT):
        raise ConfigError(f"DYN_SYSTEM_PORT: {value!r} must be a number of at most {MAX_SYSTEM_PORT}")
