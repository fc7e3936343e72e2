"""llama.cpp's work memory on page boundaries: where the CPU's attention keeps its tiles while it reads prompts.

ggml takes that memory by C++'s `operator new[]`. From glibc, memory of this size (a megabyte) begins 16 bytes behind a
page boundary, so that vectors of 32 and 64 bytes lie across two cache lines: on an AMD EPYC 512 tokens behind 4,096
take 1.72 s there and 1.44 s on a boundary. ggml has no setting for it. But a library calls another's function through
a slot of its own, which the dynamic linker has filled in: `align` fills in the slot of `operator new[]`, in the library
of ggml's CPU backend and in no other, with the C library's `valloc`, which takes as much memory and begins at a page.
What it returns goes back by `free`, as what `operator new[]` returns does.

Only for Linux on 64 bits, where the linker's tables are those of ELF; macOS gives memory of this size whole pages. In a
library of another make nothing is changed, and it computes as it did, only slower.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import llama_cpp.llama_cpp as lib

from uma.llama import library

logger = logging.getLogger("uma.llama")

NEW_ARRAY = b"_Znam"
"""`operator new[](unsigned long)`, as C++ names it for the linker."""
ALLOCATE = "valloc"
PAGE_BYTES = 4096
"""The smallest page there is: what a slot's protection is looked up and changed by."""
MAPPINGS = Path("/proc/self/maps")

# The ELF specification's names and numbers, for 64 bits.
DT_NULL, DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL = 0, 2, 5, 6, 7, 8, 23
PROT_READ, PROT_WRITE = 1, 2
RTLD_DI_LINKMAP = 2


class _LinkMap(ctypes.Structure):
    """A loaded library, as `link.h` has it: a member of the list of all."""


_LinkMap._fields_ = [
    ("l_addr", ctypes.c_uint64),
    ("l_name", ctypes.c_char_p),
    ("l_ld", ctypes.c_uint64),
    ("l_next", ctypes.POINTER(_LinkMap)),
    ("l_prev", ctypes.POINTER(_LinkMap)),
]


class _Dynamic(ctypes.Structure):
    """`Elf64_Dyn`: an entry of the table that leads to all others."""

    _fields_ = (("tag", ctypes.c_int64), ("value", ctypes.c_uint64))


_RELOCATION = struct.Struct("=QQq")
"""`Elf64_Rela`: a slot, relative to where the library lies; in the upper half of the next word the number of the symbol
that it is for; an addend."""
_SYMBOL = struct.Struct("=IBBHQQ")
"""`Elf64_Sym`: first of all where its name begins among the names."""


def align() -> None:
    """Have the CPU backend's work memory begin at page boundaries from now on; memory it has already stays where it is.

    Any thread, any number of times; once ggml's backends are loaded, and before a context computes. Where it cannot be
    done nothing changes, and the log says why.
    """
    if why := _align():
        logger.debug("llama.cpp's work memory lies as malloc gives it: %s", why)


def is_aligned() -> bool:
    """Whether the CPU backend in this process takes its work memory at page boundaries."""
    allocate = _allocate_address()
    slots = list(_slots()) if allocate else []
    return bool(slots) and all(_content(slot) == allocate for slot in slots)


def _align() -> str:
    """What `align` does; why it was not done, or nothing."""
    allocate = _allocate_address()
    if not allocate:
        return "this system is not Linux on 64 bits with valloc"
    slots = list(_slots())
    if not slots:
        return f"{library.library_file().parent}: no library with a slot for operator new[]"
    for slot in slots:
        if _content(slot) == allocate:
            continue
        if why := _fill(slot, allocate):
            return why
    return ""


def _allocate_address() -> int:
    if sys.platform != "linux" or sys.maxsize <= 2**32:
        return 0
    function = getattr(ctypes.CDLL(None), ALLOCATE, None)
    return (ctypes.cast(function, ctypes.c_void_p).value or 0) if function else 0


def _content(slot: int) -> int:
    return ctypes.c_uint64.from_address(slot).value


def _fill(slot: int, value: int) -> str:
    """Write into a slot, which some builds have the linker protect once it is filled in. Why not, or nothing."""
    protection = _protection(slot)
    if protection is None:
        return f"{MAPPINGS} does not tell how memory is protected"
    c = ctypes.CDLL(None, use_errno=True)
    c.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    page = slot & -PAGE_BYTES
    if not protection & PROT_WRITE and c.mprotect(page, PAGE_BYTES, protection | PROT_WRITE):
        return f"the slot at {slot:#x} cannot be written to (errno {ctypes.get_errno()})"
    # One aligned word, which a thread that calls through the slot reads as it was or as it is.
    ctypes.c_uint64.from_address(slot).value = value
    if not protection & PROT_WRITE:
        c.mprotect(page, PAGE_BYTES, protection)
    return ""


def _protection(address: int) -> int | None:
    """What can be done with the memory there, in the bits of `mprotect`; None where the system does not tell."""
    try:
        lines = MAPPINGS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        where, may, *_ = line.split()
        first, end = (int(word, 16) for word in where.split("-"))
        if first <= address < end:
            return sum(1 << at for at, letter in enumerate("rwx") if may[at] == letter)
    return None


def _slots() -> Iterator[int]:
    """Addresses of the slots through which the CPU backend calls `operator new[]`."""
    for loaded in _libraries():
        tables = dict(_dynamic(loaded))
        if DT_SYMTAB not in tables or DT_STRTAB not in tables:
            continue
        for start, size in ((DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)):
            if start in tables and size in tables:
                yield from _slots_of(loaded.l_addr, tables, tables[start], tables[size])


def _slots_of(base: int, tables: dict[int, int], first: int, size: int) -> Iterator[int]:
    symbols, names = tables[DT_SYMTAB], tables[DT_STRTAB]
    for offset, info, _ in _RELOCATION.iter_unpack(ctypes.string_at(first, size)):
        index = info >> 32
        if not index:
            continue
        name = ctypes.c_uint32.from_address(symbols + index * _SYMBOL.size).value
        # With the zero that ends it: a name that only begins like this one is another.
        if ctypes.string_at(names + name, len(NEW_ARRAY) + 1) == NEW_ARRAY + b"\0":
            yield base + offset


def _dynamic(loaded: _LinkMap) -> Iterator[tuple[int, int]]:
    """A library's own tables, by tag: addresses where they are tables, else sizes."""
    at = loaded.l_ld
    while (entry := _Dynamic.from_address(at)).tag != DT_NULL:
        is_address = entry.tag in (DT_STRTAB, DT_SYMTAB, DT_RELA, DT_JMPREL)
        # glibc has turned them into addresses of this process, musl leaves them relative to the library.
        yield entry.tag, entry.value + (loaded.l_addr if is_address and entry.value < loaded.l_addr else 0)
        at += ctypes.sizeof(_Dynamic)


def _libraries() -> list[_LinkMap]:
    """The loaded libraries that hold ggml's CPU backend: those of that name, or else all of llama.cpp in one."""
    whole = library.library_file()
    beside = [(loaded, path) for loaded in _loaded() if (path := _path(loaded)) and path.parent == whole.parent]
    parts = [loaded for loaded, path in beside if "ggml-cpu" in path.name]
    return parts or [loaded for loaded, path in beside if path == whole]


def _path(loaded: _LinkMap) -> Path | None:
    name = (loaded.l_name or b"").decode("utf-8", "replace")
    return Path(name).resolve() if "/" in name else None


def _loaded() -> Iterator[_LinkMap]:
    """All libraries of this process."""
    dlinfo = getattr(ctypes.CDLL(None), "dlinfo", None)
    if dlinfo is None:
        return
    dlinfo.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    one = ctypes.POINTER(_LinkMap)()
    if dlinfo(lib._lib._handle, RTLD_DI_LINKMAP, ctypes.byref(one)):
        return
    while one.contents.l_prev:
        one = one.contents.l_prev
    while one:
        yield one.contents
        one = one.contents.l_next
