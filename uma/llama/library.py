"""Which llama.cpp library this is, which CPU it runs on, and the command that builds it for this machine."""

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
"""A C++ flag that makes GCC 12 build AMX correctly, and that other compilers do not mind."""


def library_file() -> Path:
    """The library that the binding has loaded."""
    return Path(lib._lib._name).resolve()


def cpu_field(name: str, cpuinfo: Path = CPUINFO) -> str:
    """This field of the first CPU in `/proc/cpuinfo`; empty where there is none (macOS, Arm's model name)."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """The CPU as it names itself."""
    return cpu_field("model name", cpuinfo) or platform.processor() or platform.machine()


def rebuild_command(variables: str = "") -> str:
    """The command that builds the pinned llama-cpp-python for this CPU; `variables` go ahead of it."""
    try:
        pinned = f"llama-cpp-python=={version('llama-cpp-python')}"
    except PackageNotFoundError:
        pinned = "llama-cpp-python"
    # Not `pip` alone: the shell's can belong to another environment than the one that this process runs in.
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    options = "--force-reinstall --no-cache-dir --no-deps --no-binary llama-cpp-python"
    return f"{variables} {pip} {options} {pinned}".strip()
