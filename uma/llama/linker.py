"""The slots through which a loaded library calls functions of others, read from the dynamic linker's own tables.

A library that calls a function of another one does so through a word of its own memory, which the linker fills in with
the function's address. The tables that lead to it are those of the ELF specification for 64 bits, whose names are used
here; tables in memory are read as the linker left them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
from collections.abc import Collection, Iterator

from uma.llama import mappings as memory

PAGE_BYTES = mmap.PAGESIZE
"""What protection is changed by."""
PROT_READ, PROT_WRITE = 1, 2
DT_NULL, DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL = 0, 2, 5, 6, 7, 8, 23
RTLD_DI_LINKMAP = 2
MASK = 2**64 - 1
POINTERS = {"x86_64": (1, 6, 7), "aarch64": (257, 1025, 1026)}
"""By machine, the types of relocation that fill in a word with an address: absolute, GLOB_DAT, JUMP_SLOT. Others patch
instructions.
"""

_RELOCATION = struct.Struct("=QQq")
"""`Elf64_Rela`: a slot, relative to where the library lies; in the upper half of the next word the number of the symbol
that it is for, in the lower its type; an addend."""
_SYMBOL = struct.Struct("=IBBHQQ")
"""`Elf64_Sym`: first of all where its name begins among the names."""


class _LinkMap(ctypes.Structure):
    """`link_map`: a loaded library."""

    _fields_ = (
        ("addr", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("dynamic", ctypes.c_uint64),
        ("next", ctypes.c_void_p),
    )


class _Entry(ctypes.Structure):
    """`Elf64_Dyn`: an entry of the table that leads to all others."""

    _fields_ = (("tag", ctypes.c_int64), ("value", ctypes.c_uint64))


class _Info(ctypes.Structure):
    """`Dl_info`: where an address lies."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    )


def file_of(address: int) -> bytes:
    """The file of the library that an address lies in; empty where it lies in none."""
    dladdr, info = getattr(ctypes.CDLL(None), "dladdr", None), _Info()
    if dladdr is None:
        return b""
    dladdr.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return info.file or b"" if dladdr(address, ctypes.byref(info)) else b""


def definition(name: str) -> int:
    """The address of the function that libraries call by this name; 0 where nothing has it.

    That is what `dlsym` gives, but where the program lies at a fixed address and calls the function: then it gives the
    program's stub, which leads to the first library's function of this name.
    """
    program = ctypes.CDLL(None)
    address, libraries = _address(program, name), list(_libraries())
    if file_of(address) in libraries or not _slots_of(_link_map(program), [name.encode()]):
        return address
    for file in libraries:
        try:
            address = _address(ctypes.CDLL(os.fsdecode(file), mode=os.RTLD_NOLOAD), name)
        except OSError:  # what the kernel puts there is no file
            continue
        if file_of(address) == file:  # and not in one that it needs
            return address
    return 0


def _address(library: ctypes.CDLL, name: str) -> int:
    function = getattr(library, name, None)
    return ctypes.cast(function, ctypes.c_void_p).value or 0 if function else 0


def _libraries() -> Iterator[bytes]:
    """The files of loaded libraries, in the order in which the linker looks for names in them."""
    each = _link_map(ctypes.CDLL(None))
    while each is not None:
        if each.name:  # the program itself has none
            yield each.name
        each = _LinkMap.from_address(each.next) if each.next else None


def slots(file: bytes, names: Collection[bytes]) -> list[tuple[bytes, int]]:
    """Each slot through which this loaded library calls a function of one of these names: the name, and its address."""
    return _slots_of(_loaded(file), names)


def _slots_of(loaded: _LinkMap | None, names: Collection[bytes]) -> list[tuple[bytes, int]]:
    if loaded is None:
        return []
    tables = dict(_tables(loaded))
    if DT_SYMTAB not in tables or DT_STRTAB not in tables:
        return []
    found: list[tuple[bytes, int]] = []
    for start, size in ((DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)):
        if start in tables and tables.get(size, 0) % _RELOCATION.size == 0:
            relocations = ctypes.string_at(tables[start], tables.get(size, 0))
            found += [each for each in _named(loaded.addr, tables, relocations) if each[0] in names]
    return found


def content(slot: int) -> int:
    """The address of the function that a slot leads to."""
    return ctypes.c_uint64.from_address(slot).value


def fill(slot: int, function: int) -> str:
    """Have a slot lead to another function. Why it cannot, or nothing.

    Some builds have the linker protect their slots, which is undone for as long as it takes: one thread at a time.
    """
    protection = _protection(slot)
    if protection is None:
        return f"{memory.MAPPINGS} does not tell how memory is protected"
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    page, is_protected = slot & -PAGE_BYTES, not protection & PROT_WRITE
    if is_protected and protect(page, PAGE_BYTES, protection | PROT_WRITE):
        return f"the slot at {slot:#x} cannot be written to: {os.strerror(ctypes.get_errno())}"
    # One aligned word: a thread that calls through the slot meanwhile reads it as it was or as it is.
    ctypes.c_uint64.from_address(slot).value = function
    if is_protected:
        protect(page, PAGE_BYTES, protection)
    return ""


def _protection(address: int) -> int | None:
    """What can be done with the memory there, in the bits of `mprotect`; None where the system does not tell."""
    for each in memory.mappings():
        if each.start <= address < each.end:
            return sum(1 << at for at, letter in enumerate("rwx") if each.may[at] == letter)
    return None


def _loaded(file: bytes) -> _LinkMap | None:
    try:
        # Loads nothing: it is there already, or this fails.
        return _link_map(ctypes.CDLL(os.fsdecode(file), mode=os.RTLD_NOLOAD)) if file else None
    except OSError:
        return None


def _link_map(library: ctypes.CDLL) -> _LinkMap | None:
    dlinfo = getattr(ctypes.CDLL(None), "dlinfo", None)
    if dlinfo is None:
        return None
    dlinfo.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    found = ctypes.POINTER(_LinkMap)()
    return None if dlinfo(library._handle, RTLD_DI_LINKMAP, ctypes.byref(found)) else found.contents


def _tables(loaded: _LinkMap) -> Iterator[tuple[int, int]]:
    """A library's tables by tag: addresses in this process, or sizes."""
    at = loaded.dynamic
    while (entry := _Entry.from_address(at)).tag != DT_NULL:
        value = entry.value
        if entry.tag in (DT_STRTAB, DT_SYMTAB, DT_RELA, DT_JMPREL):
            # glibc has turned them into addresses, musl leaves them relative to the library: whichever lies near this
            # table is the address.
            value = min(value, (value + loaded.addr) & MASK, key=lambda each: abs(each - loaded.dynamic))
        yield entry.tag, value
        at += ctypes.sizeof(_Entry)


def _named(base: int, tables: dict[int, int], relocations: bytes) -> Iterator[tuple[bytes, int]]:
    symbols, names = tables[DT_SYMTAB], tables[DT_STRTAB]
    pointers = POINTERS.get(platform.machine(), ())
    for offset, info, _ in _RELOCATION.iter_unpack(relocations):
        index, kind = info >> 32, info & 0xFFFFFFFF
        if index and kind in pointers:
            name = ctypes.c_uint32.from_address(symbols + index * _SYMBOL.size).value
            yield ctypes.string_at(names + name), (base + offset) & MASK
