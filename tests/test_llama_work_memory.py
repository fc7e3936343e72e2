"""llama.cpp's work memory: where it begins, and that nothing else of the process is touched.

What changes a slot does so in a process of its own: the other tests compute with this one's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness import PATIENCE_SEC
from uma.llama import backend, library, work_memory

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sys.maxsize <= 2**32, reason="the linker's tables of Linux on 64 bits"
)

COMPUTES = """
import ctypes, sys
from pathlib import Path
from uma.llama import backend, work_memory
from uma.llama.batch import Batch
from uma.llama.context import Context, ContextParams
from uma.llama.model import Model

c = ctypes.CDLL(None)
c.valloc.restype, c.valloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
c.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
backend.start()
slot, = work_memory._slots()

def word(): return ctypes.c_uint64.from_address(slot).value
def computes():
    with Model.load(Path(sys.argv[1])) as model, Context(model, ContextParams(n_ctx=256, n_batch=64)) as context:
        batch = Batch(64)
        batch.add([5] * 64, 0, 0, last_logits=True)
        return context.decode(batch)
"""


def in_a_process(code: str, model: Path) -> str:
    """What it printed."""
    command = [sys.executable, "-c", COMPUTES + code, str(model)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_SEC).stdout.strip()


def test_it_is_aligned_once_llama_cpp_is_ready() -> None:
    backend.start()
    assert work_memory.is_aligned()


def test_what_computes_takes_its_memory_through_the_slot_that_is_filled_in(tiny: Path) -> None:
    told = in_a_process(
        """
asked = []
def take(size):
    asked.append(size)
    return c.valloc(size)
kept = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(take)
ctypes.c_uint64.from_address(slot).value = ctypes.cast(kept, ctypes.c_void_p).value
code = computes()
print(code, len(asked) > 0 and max(asked) > 1000)
""",
        tiny,
    )
    assert told == "0 True"


def test_what_the_slot_leads_to_begins_at_a_page(tiny: Path) -> None:
    told = in_a_process(
        """
take = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(word())
c.free.argtypes = (ctypes.c_void_p,)
places = [take(size) for size in (1, 1000, 200_000, 1_114_240)]
print({place % work_memory.PAGE_BYTES for place in places})
for place in places:
    c.free(place)
""",
        tiny,
    )
    assert told == "{0}"


def test_a_slot_that_the_linker_has_protected_is_filled_in_and_protected_again(tiny: Path) -> None:
    told = in_a_process(
        """
page = slot & -work_memory.PAGE_BYTES
ctypes.c_uint64.from_address(slot).value = ctypes.cast(c.malloc, ctypes.c_void_p).value
assert not work_memory.is_aligned()
# Read-only, and not to run: whatever else has its slot in that page is bound first.
assert computes() == 0
assert c.mprotect(page, work_memory.PAGE_BYTES, work_memory.PROT_READ) == 0
work_memory.align()
print(work_memory.is_aligned(), work_memory._protection(slot) == work_memory.PROT_READ)
c.mprotect(page, work_memory.PAGE_BYTES, work_memory.PROT_READ | work_memory.PROT_WRITE)
print(computes())
""",
        tiny,
    )
    assert told.split() == ["True", "True", "0"]


def test_only_the_cpu_backend_of_this_library_is_changed() -> None:
    backend.start()
    names = {Path((loaded.l_name or b"").decode()).name for loaded in work_memory._libraries()}
    assert names
    assert all("ggml-cpu" in name for name in names) or names == {library.library_file().name}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"library.library_file": lambda: Path("/nowhere/libllama.so")}, "no library with a slot"),
        ({"NEW_ARRAY": b"_Zna"}, "no library with a slot"),
        ({"ALLOCATE": "no_such_function"}, "not Linux on 64 bits with valloc"),
    ],
)
def test_a_library_of_another_make_is_left_as_it_is(
    change: dict[str, object], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.start()
    for name, value in change.items():
        monkeypatch.setattr(f"uma.llama.work_memory.{name}", value)
    assert why in work_memory._align()
    assert not work_memory.is_aligned()


def test_memory_whose_protection_is_not_told_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.start()
    (slot,) = work_memory._slots()
    before = work_memory._content(slot)
    monkeypatch.setattr(work_memory, "MAPPINGS", tmp_path / "none")
    assert "does not tell how memory is protected" in work_memory._fill(slot, before + 1)
    assert work_memory._content(slot) == before
