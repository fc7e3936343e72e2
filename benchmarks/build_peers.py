"""Builds the peers UMA is measured against, from the same source and with the same flags as the library UMA runs on.

`llama-server` and `llama-batched-bench` come from the llama.cpp tree inside llama-cpp-python's own source package, so
a difference in the results is a difference in scheduling, never in kernels. `python -m llama_cpp.server` gets a virtual
environment of its own. Everything lies in the benchmarks' cache folder and is made once.

Where UMA leaves out one of llama.cpp's extra buffer types because its code is faulty here, the peers are built without
it: they would use it and die, and the option that keeps them alive (`--no-repack`) costs the sound types' speed too.

Run with `python -m benchmarks.build_peers`. Needs a C++ compiler, CMake and a Python package index; nothing else is
fetched (the web page and TLS of llama-server are left out, both of which would look for more).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.cache import LLAMA_CPP_PYTHON, cache_dir, peer_binary, peer_python
from benchmarks.reference import fetch_source
from uma.llama import library, trust
from uma.llama.trust import Verdict

TARGETS = ("llama-server", "llama-batched-bench")

FLAGS = (
    # What llama-cpp-python's own build passes: a release build of shared libraries, without curl. GGML_NATIVE and
    # OpenMP stay at llama.cpp's defaults there, and so they do here.
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_COMMON=ON",
    # The tools, and nothing that has to be downloaded or that no measurement uses.
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
)

MACROS = {"AMX": "-U__AMX_INT8__"}
"""Compiler flags that leave out an extra buffer type: with GGML_NATIVE the compiler's own macro decides on AMX."""
OPTIONS = {"CPU_REPACK": "-DGGML_CPU_REPACK=OFF"}
"""CMake's, for others."""


def flags_for(verdict: Verdict) -> tuple[str, ...]:
    """Flags of a build that computes with the extra buffer types that UMA's library has and that are sound there."""
    faulty = dict(verdict.faults)
    macros = [MACROS[name] for name in faulty if name in MACROS]
    if "AMX" in verdict.usable:
        macros.append(library.AMX_REPAIR)  # or GCC 12 would build peers that die
    options = tuple(OPTIONS[name] for name in faulty if name in OPTIONS)
    if not macros:
        return options
    return (*options, f"-DCMAKE_C_FLAGS={' '.join(macros)}", f"-DCMAKE_CXX_FLAGS={' '.join(macros)}")


def build_llama_cpp(cache: Path, jobs: int) -> None:
    """Configure and compile `TARGETS` into the cache's `build` folder; a second call is quick."""
    tree = fetch_source()
    build = cache / "build"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    subprocess.run(
        ["cmake", *generator, "-S", str(tree), "-B", str(build), *FLAGS, *flags_for(trust.verdict())], check=True
    )
    subprocess.run(["cmake", "--build", str(build), "-j", str(jobs), "--target", *TARGETS], check=True)


def make_peer_venv(cache: Path) -> None:
    """A virtual environment with `llama_cpp.server`, of the version UMA is pinned to."""
    if not peer_python().exists():
        subprocess.run([sys.executable, "-m", "venv", str(cache / "peer-venv")], check=True)
    pip = [str(peer_python()), "-m", "pip", "install", "--quiet"]
    flags = flags_for(trust.verdict())
    if flags:
        # pip keeps wheels by version alone, so one that was built with other flags must not be taken from its cache.
        pip += ["--no-cache-dir", "--no-binary", "llama-cpp-python"]
    wanted = f"llama-cpp-python[server]=={LLAMA_CPP_PYTHON}"
    subprocess.run([*pip, wanted], env={**os.environ, "CMAKE_ARGS": shlex.join(flags)} if flags else None, check=True)


def main() -> int:
    """Build what is missing. Exit code 1 with one sentence where a tool is missing or a step fails."""
    if not shutil.which("cmake"):
        print("build_peers: cmake is missing; install it, and a C++ compiler, to build llama-server", file=sys.stderr)
        return 1
    cache = cache_dir()
    try:
        build_llama_cpp(cache, os.cpu_count() or 1)
        make_peer_venv(cache)
    except subprocess.CalledProcessError as error:
        print(f"build_peers: {error.cmd[0]} failed with exit code {error.returncode}", file=sys.stderr)
        return 1
    for target in TARGETS:
        print(peer_binary(target))
    print(f"{peer_python()} -m llama_cpp.server")
    return 0


if __name__ == "__main__":
    sys.exit(main())
