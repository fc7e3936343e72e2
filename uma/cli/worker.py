"""`uma worker`: a backend worker of NVIDIA Dynamo."""

from __future__ import annotations

import argparse
import os
import socket
from ipaddress import ip_address

from uma.cli import say
from uma.cli.default_model import with_default
from uma.cli.options import DYNAMO_PLANES, load_settings, plane_variable
from uma.errors import ConfigError

INSTALL = "pip install '.[dynamo]' && pip install --no-deps ai-dynamo==1.6.1"
MAX_SYSTEM_PORT = 32_767


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    config = with_default(load_settings(options)).config
    if options.block_size < 1:
        raise ConfigError(f"--block-size: {options.block_size} must be 1 or more")
    _check_system_port(os.environ.get("DYN_SYSTEM_PORT"))
    for name, (_, choices) in DYNAMO_PLANES.items():
        _check_plane(plane_variable(name), getattr(options, name.replace("-", "_")), choices)
    address = address_of(options.host)
    if config.log_format == "json":  # UMA's lines go to Dynamo's log, which is set up when it is imported
        os.environ.setdefault("DYN_LOGGING_JSONL", "1")
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
    """The IP address of a machine's name, for Dynamo's event plane takes no names: rather one that other machines reach
    than a loopback address, and rather IPv4 than IPv6.

    Raises `ConfigError` where the name has no address, and warns where a name has loopback addresses alone, as many
    systems give their own name one in `/etc/hosts`. Waits for the system's resolver.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no host name"
        raise ConfigError(
            f"--host: {host} has no address: {reason}; give the address that the frontend reaches"
        ) from None
    (*_, place) = min(found, key=lambda info: (ip_address(info[4][0]).is_loopback, info[0] is not socket.AF_INET))
    address = str(place[0])
    if ip_address(address).is_loopback and host not in ("localhost", address):
        say.warn(f"--host: {host} is {address} here, which no other machine reaches; give the machine's own address")
    return address


def _check_plane(variable: str, value: str, choices: tuple[str, ...]) -> None:
    """An option is checked as it is read; what is none of the words came by Dynamo's variable."""
    if value not in choices:
        raise ConfigError(f"{variable}: {value!r} must be one of {', '.join(choices)}")


def _check_system_port(value: str | None) -> None:
    """Dynamo reads a signed 16-bit number, and ends the process at a larger one."""
    if value is not None and not (value.lstrip("-").isdecimal() and int(value) <= MAX_SYSTEM_PORT):
        raise ConfigError(f"DYN_SYSTEM_PORT: {value!r} must be a number of at most {MAX_SYSTEM_PORT}")
