"""What the figures were measured on, so that what they mean elsewhere need not be guessed."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from benchmarks.cache import peer_binary
from benchmarks.models import BenchModel, parameters
from uma.llama import devices, extra_buffers


def describe(model: BenchModel, threads: int) -> dict[str, str]:
    """Machine, library and model in words."""
    gpus = ", ".join(gpu.description for gpu in devices.gpus())
    return {
        **({"gpu": gpus} if gpus else {}),
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
        "threads": str(threads),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": _python(),
        "uma": _uma_version(),
        "llama_cpp_python": version("llama-cpp-python"),
        "llama_server": _server_version(),
        "extra_buffers": _extra_buffers(),
        "model": f"{model.shape.name}, {parameters(model.shape) / 1e6:.0f} M parameters, "
        f"{model.shape.vocab:,} tokens of vocabulary, {model.weights}",
    }


def folder_name(machine: dict[str, str]) -> str:
    """The name of a processor's folder of results: its figures stand beside those of others, never mixed with them.

    Folders from before the name had family and model are replaced by hand when such a machine is measured again.
    """
    return re.sub(r"[^a-z0-9]+", "-", processor(machine).lower().replace("(r)", "").replace("(tm)", "")).strip("-")


def processor(machine: dict[str, str]) -> str:
    """What the model is computed on: the GPU where there is one."""
    return machine.get("gpu", machine["cpu"])


def _extra_buffers() -> str:
    """llama.cpp's extra buffer types that all servers here compute with."""
    return ", ".join(extra_buffers.chosen("auto")) or "none"


def _python() -> str:
    """Its version, and whether it is the distribution's: those are built with profiles, and what a plain `configure`
    and `make` builds takes a third longer for the same Python code.
    """
    is_distributed = sys.base_prefix == "/usr"
    return f"{platform.python_version()}{', of the distribution' if is_distributed else ''}"


def _uma_version() -> str:
    try:
        return version("uma-serve")
    except PackageNotFoundError:
        return "source tree"


def _cpu_name() -> str:
    """The CPU as it names itself, with family and model where it has them: names do not tell generations apart."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    lines = [line.partition(":") for line in info.read_text().split("\n\n")[0].splitlines()]
    fields = {name.strip(): value.strip() for name, _, value in lines}
    name = fields.get("model name") or platform.machine()
    return f"{name}, family {fields['cpu family']} model {fields.get('model', '?')}" if "cpu family" in fields else name


def _server_version() -> str:
    if not peer_binary("llama-server").exists():
        return "not built"
    command = [str(peer_binary("llama-server")), "--version"]
    printed = subprocess.run(command, capture_output=True, text=True, check=False)
    first = (printed.stdout + printed.stderr).strip().splitlines()[:1]
    return first[0] if first else "unknown"
