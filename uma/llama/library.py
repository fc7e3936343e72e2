"""Identifies the llama.cpp library and the CPU, and has the command that builds the library for this machine."""

from __future__ import annotations

import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

import llama_cpp.llama_cpp as lib

CPUINFO = Path("/proc/cpuinfo")

AMX_REPAIR = "-include " + shlex.quote(str(files("uma") / "data" / "amx_tile_config.h"))
"""C++ flag that makes GCC 12 build AMX correctly; other compilers ignore it."""


def library_file() -> Path:
    """File of the library that the binding has loaded."""
    return Path(lib._lib._name).resolve()


def cpu_field(name: str, cpuinfo: Path = CPUINFO) -> str:
    """This field of the first CPU in `/proc/cpuinfo`; empty where there is none (macOS, Arm's model name)."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """Name of the CPU."""
    return cpu_field("model name", cpuinfo) or platform.processor() or platform.machine()


def rebuild_command(variables: str = "") -> str:
    """Command that builds the pinned llama-cpp-python for this CPU; `variables` are put before it."""
    try:
        pinned = f"llama-cpp-python=={version('llama-cpp-python')}"
    except PackageNotFoundError:
        pinned = "llama-cpp-python"
    # Not `pip` alone: that can belong to another environment than this process.
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    options = "--force-reinstall --no-cache-dir --no-deps --no-binary llama-cpp-python"
    return f"{variables} {pip} {options} {pinned}".strip()
