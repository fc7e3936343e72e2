"""`uma worker`: a backend worker of NVIDIA Dynamo."""

from __future__ import annotations

import argparse
import os

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
            options.host,
            options.discovery_backend,
            options.request_plane,
            options.event_plane,
        ),
    )


def _check_system_port(value: str | None) -> None:
    """Dynamo reads a signed 16-bit number, and ends the process at a larger one."""
    if value is not None and not (value.lstrip("-").isdecimal() and int(value) <= MAX_SYSTEM_PORT):
        raise ConfigError(f"DYN_SYSTEM_PORT: {value!r} must be a number of at most {MAX_SYSTEM_PORT}")
