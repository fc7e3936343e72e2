"""llama.cpp's work memory: where it begins, and that nothing else of the process is touched.

What changes a slot does so in a process of its own: the other tests compute with this one's.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from harness import CHECKOUT, PATIENCE_SEC
from uma.llama import backend, library, linker, work_memory

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in linker.POINTERS, reason="Linux on x86 and Arm alone"
)

COMPUTES = """
import ctypes, sys, threading
from pathlib import Path
from uma.llama import backend, linker, work_memory
from uma.llama.batch import Batch
from uma.llama.context import Context, ContextParams
from uma.llama.model import Model

c = ctypes.CDLL(None)
c.valloc.restype, c.valloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
c.free.argtypes = (ctypes.c_void_p,)
c.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
backend.start()
found = work_memory._wanted(work_memory._functions())
assert len(found) in (0, 2), found
(give_back, _), (slot, _) = found or ((0, 0), (0, 0))

def address(function): return ctypes.cast(function, ctypes.c_void_p).value
def put(slot, function): assert linker.fill(slot, function) == ""
def computes():
    params = ContextParams(n_ctx=256, n_batch=64)
    with Model.load(Path(sys.argv[1]), extra_buffers="none") as model, Context(model, params) as context:
        batch = Batch(64)
        batch.add([5] * 64, 0, 0, last_logits=True)
        return context.decode(batch)
"""


def in_a_process(code: str, model: Path, python: Path = Path(sys.executable), **variables: str) -> str:
    """What it printed."""
    command = [str(python), "-c", COMPUTES + code, str(model)]
    env = {**os.environ, **variables}
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=PATIENCE_SEC, env=env
    ).stdout.strip()


def test_it_is_aligned_once_llama_cpp_is_ready() -> None:
    backend.start()
    assert work_memory.is_aligned()


def test_what_computes_takes_its_memory_through_the_slots_that_are_filled_in(tiny: Path) -> None:
    told = in_a_process(
        """
taken, given = [], []
def take(size):
    taken.append(c.valloc(size))
    return taken[-1]
def give(place):
    given.append(place)
    c.free(place)
kept = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(take), ctypes.CFUNCTYPE(None, ctypes.c_void_p)(give)
put(give_back, address(kept[1]))
put(slot, address(kept[0]))
print(computes(), len(taken) > 0, sorted(taken) == sorted(place for place in given if place))
""",
        tiny,
    )
    assert told == "0 True True"


def test_what_the_slot_leads_to_begins_at_a_page(tiny: Path) -> None:
    told = in_a_process(
        """
take = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(linker.content(slot))
places = [take(size) for size in (1, 1000, 200_000, 1_114_240)]
print({place % 4096 for place in places})
for place in places:
    c.free(place)
""",
        tiny,
    )
    assert told == "{0}"


def test_slots_that_the_linker_has_protected_are_filled_in_by_any_thread_and_protected_again(tiny: Path) -> None:
    told = in_a_process(
        """
put(slot, address(c.malloc))
assert not work_memory.is_aligned()
assert computes() == 0  # whatever else has its slot in that page is bound now
pages = {each & -linker.PAGE_BYTES for each in (slot, give_back)}
for page in pages:
    assert c.mprotect(page, linker.PAGE_BYTES, linker.PROT_READ) == 0
held, seen, lock, align = [], [], work_memory._lock, work_memory._align
class Held:
    def __enter__(self):
        lock.acquire()
        held.append(True)
    def __exit__(self, *_):
        held.pop()
        lock.release()
def watched():
    seen.append(len(held))
    return align()
work_memory._lock, work_memory._align = Held(), watched
threads = [threading.Thread(target=work_memory.align) for _ in range(4)]
for each in threads: each.start()
for each in threads: each.join()
print(work_memory.is_aligned(), seen, {linker._protection(page) for page in pages} == {linker.PROT_READ})
for page in pages:
    c.mprotect(page, linker.PAGE_BYTES, linker.PROT_READ | linker.PROT_WRITE)
print(computes())
""",
        tiny,
    )
    assert told.split("\n") == ["True [1, 1, 1, 1] True", "0"]


CHECKS_MEMORY = "libc_malloc_debug.so.0"
"""glibc's allocator that ends the process where memory goes back by another function than it came from."""


PLACES = [*Path("/lib").glob(f"{platform.machine()}*/{CHECKS_MEMORY}"), *Path("/lib64").glob(CHECKS_MEMORY)]


@pytest.mark.skipif(not PLACES, reason=f"there is no {CHECKS_MEMORY}")
def test_memory_goes_back_to_where_it_came_from(tiny: Path) -> None:
    told = in_a_process(
        f"print({CHECKS_MEMORY!r} in Path('/proc/self/maps').read_text(), work_memory.is_aligned(), computes())",
        tiny,
        LD_PRELOAD=CHECKS_MEMORY,
        MALLOC_CHECK_="3",
    )
    assert told == "True True 0"


SYSTEM_PYTHON = Path(f"/usr/bin/python3.{sys.version_info.minor}")


@pytest.mark.skipif(not SYSTEM_PYTHON.exists(), reason=f"there is no {SYSTEM_PYTHON}")
def test_a_python_that_lies_at_a_fixed_address_is_no_allocator(tiny: Path) -> None:
    """Debian's is such a program, and has a stub of its own of `free`."""
    if subprocess.run([SYSTEM_PYTHON, "-c", "import ctypes, ssl"], capture_output=True, check=False).returncode:
        pytest.skip(f"{SYSTEM_PYTHON} has only a part of the standard library")
    paths = os.pathsep.join([CHECKOUT, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    told = in_a_process("print(work_memory.is_aligned(), computes())", tiny, SYSTEM_PYTHON, PYTHONPATH=paths)
    assert told == "True 0"


def test_a_function_that_the_program_has_itself_is_the_one_that_libraries_call() -> None:
    found = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
    assert linker.definition("Py_IsInitialized") == found
    assert linker.definition("no_such_function") == 0


COMPILER = shutil.which("cc") or shutil.which("gcc")
WITHOUT_VALLOC = """
#include <stddef.h>
void *__libc_malloc(size_t); void *__libc_realloc(void *, size_t); void __libc_free(void *);
static const size_t MARK = 0x5eed;
void *malloc(size_t n) { size_t *p = __libc_malloc(n + 16); if (!p) return p; p[1] = MARK; return p + 2; }
void free(void *p) { size_t *q = p; if (p && q[-1] == MARK) { q[-1] = 0; __libc_free(q - 2); } }
void *calloc(size_t n, size_t m) {
    char *p = malloc(n * m); for (size_t i = 0; p && i < n * m; i++) p[i] = 0; return p; }
void *realloc(void *p, size_t n) {
    if (!p) return malloc(n); size_t *q = __libc_realloc((size_t *)p - 2, n + 16); return q ? q + 2 : q; }
"""
"""An allocator that takes back what has its mark before it, and nothing else."""


@pytest.mark.skipif(
    COMPILER is None or not hasattr(ctypes.CDLL(None), "__libc_malloc"), reason="no C compiler, or not glibc"
)
def test_an_allocator_without_valloc_of_its_own_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    source, made = tmp_path / "part.c", tmp_path / "part.so"
    source.write_text(WITHOUT_VALLOC)
    assert COMPILER is not None
    subprocess.run([COMPILER, "-O1", "-fno-builtin", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    told = in_a_process(
        "print('part.so' in Path('/proc/self/maps').read_text(), work_memory.is_aligned(), computes())",
        tiny,
        LD_PRELOAD=str(made),
    )
    assert told == "True False 0"


def test_it_is_asked_for_from_a_folder_that_is_gone(tiny: Path, tmp_path: Path) -> None:
    told = in_a_process(
        f"""
import os
os.chdir({str(tmp_path)!r})
os.rmdir({str(tmp_path)!r})
work_memory.align()
print(work_memory.is_aligned())
""",
        tiny,
    )
    assert told == "True"


def test_only_the_cpu_backend_of_this_library_is_changed() -> None:
    backend.start()
    file = Path(os.fsdecode(work_memory._backend_file()))
    assert file.resolve() in library.library_files()
    assert "ggml-cpu" in file.name or file.resolve() == library.library_file()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"_backend_file": lambda: b"/nowhere/libggml-cpu.so"}, "no slots"),
        ({"_backend_file": lambda: b""}, "no slots"),
        ({"NEW_ARRAY": b"_Zna"}, "no slots"),
        ({"DELETE_ARRAY": b"_ZdaPvNot"}, "no slots"),
        ({"ALLOCATE": "no_such_function"}, "not Linux on x86 or Arm"),
        ({"platform.machine": lambda: "another"}, "not Linux on x86 or Arm"),
    ],
)
def test_a_library_of_another_make_is_left_as_it_is(
    change: dict[str, object], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.start()
    for name, value in change.items():
        monkeypatch.setattr(f"uma.llama.work_memory.{name}", value)
    filled: list[object] = []

    def fill(slot: int, function: int) -> str:
        filled.append((slot, function))
        return ""

    monkeypatch.setattr(linker, "content", lambda slot: 0)
    monkeypatch.setattr(linker, "fill", fill)
    assert why in work_memory._align()
    assert not work_memory.is_aligned()
    assert not filled


def test_memory_whose_protection_is_not_told_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    word = ctypes.c_uint64(7)
    monkeypatch.setattr("uma.llama.mappings.MAPPINGS", tmp_path / "none")
    assert "does not tell how memory is protected" in linker.fill(ctypes.addressof(word), 8)
    assert word.value == 7
