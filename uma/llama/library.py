"""Which llama.cpp library this is and which CPU it runs on: read from files alone, so that it can be asked before the
library computes anything.
"""

from __future__ import annotations

import platform
import shlex
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

import llama_cpp.llama_cpp as lib

CPUINFO = Path("/proc/cpuinfo")
CPU_FIELDS = frozenset({
    "vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags", "bugs",  # x86
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features",  # Arm
    "isa", "uarch", "mvendorid", "marchid", "mimpid",  # RISC-V
    "cpu", "revision", "processor 0", "features",  # POWER, z
})  # fmt: skip
"""What of `/proc/cpuinfo` tells what a CPU computes; the rest is its number, its clock and its load."""
GPU_BACKENDS = ("cuda", "hip", "metal", "vulkan", "sycl", "musa", "cann", "opencl", "rpc", "webgpu")


def library_file() -> Path:
    """The library that the binding has loaded."""
    return Path(lib._lib._name).resolve()


def library_files() -> list[Path]:
    """The library and what ggml has laid beside it, by name."""
    main = library_file()
    found = {path.resolve() for path in main.parent.glob("*") if "ggml" in path.name and path.is_file()}
    return sorted(found | {main})


def may_have_gpu() -> bool:
    """Whether a GPU backend lies beside the library, or cannot be told because the library is all in one file."""
    names = [path.name for path in library_files()]
    has_parts = any("ggml-cpu" in name for name in names)
    return not has_parts or any(f"ggml-{backend}" in name for backend in GPU_BACKENDS for name in names)


@cache
def library_identity() -> list[list[str | int]]:
    """Path, size and time of change of each file: another build has another identity."""
    return [[str(path), (at := path.stat()).st_size, at.st_mtime_ns] for path in library_files()]


@cache
def cpu_identity(cpuinfo: Path = CPUINFO) -> list[str]:
    """What tells one CPU from another, each different core once: features, model and microcode on Linux."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [platform.platform(), platform.machine(), platform.processor()]
    cores = {"\n".join(line for line in core.splitlines() if _field(line) in CPU_FIELDS) for core in text.split("\n\n")}
    return sorted({platform.machine(), *cores} - {""})


def _field(line: str) -> str:
    return line.partition(":")[0].strip()


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """The CPU as it names itself."""
    for line in "\n".join(cpu_identity(cpuinfo)).splitlines():
        if _field(line) == "model name":
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


AMX_REPAIR = "-include " + shlex.quote(str(files("uma") / "data" / "amx_tile_config.h"))
"""A C++ flag that makes GCC 12 build AMX correctly, and that other compilers do not mind."""


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
