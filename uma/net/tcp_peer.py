"""User and process at the other end of a TCP connection from this machine, read from Linux's `/proc`.

The user is in the kernel's table of connections (about a millisecond). The process that owns a socket is searched among
all open files of that user's processes, which takes tens of milliseconds; so only what is displayed is searched.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import attrs

Address = tuple[str, int]
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""Tables of connections of IPv4 sockets, and of IPv6 sockets, whose peer can have an IPv4 address."""


@attrs.frozen
class TcpEnd:
    """One end of a connection on this machine."""

    uid: int
    inode: int
    """Inode of its socket."""


def ends_at(pairs: Iterable[tuple[Address, Address]]) -> list[TcpEnd | None]:
    """The client's end of each connection, given as the addresses of client and server. None where the client is not on
    this machine, is in another container or has closed the connection, or where the system does not tell.
    """
    tables = [_read(table) for table in TABLES]
    return [_find(tables, *pair) for pair in pairs]


def pids_of(ends: Collection[TcpEnd]) -> dict[TcpEnd, int]:
    """Processes that own these sockets, as far as this process can read their open files."""
    wanted = {f"socket:[{end.inode}]": end for end in ends}
    users = {end.uid for end in ends}
    found: dict[TcpEnd, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        if len(found) == len(wanted):
            break
        try:
            if process.stat().st_uid in users:
                for file in (process / "fd").iterdir():
                    if (end := wanted.get(str(file.readlink()))) is not None:
                        found.setdefault(end, int(process.name))
        except OSError:  # the process has ended, a file was closed, or access is denied
            continue
    return found


def _read(table: Path) -> str:
    try:
        return table.read_text(encoding="ascii")
    except OSError:
        return ""


def _find(tables: list[str], client: Address, server: Address) -> TcpEnd | None:
    try:
        places = [(ip_address(host.partition("%")[0]), port) for host, port in (client, server)]
    except ValueError:
        return None
    for table, spell in zip(tables, (_spelled4, _spelled6), strict=True):
        pair = [spell(address) for address, _ in places]
        if None in pair:
            continue
        line = " ".join(f"{address}:{port:04X}" for address, (_, port) in zip(pair, places, strict=True))
        at = table.find(f" {line} ")
        if at >= 0:
            *_, uid, _, inode = table[at:].split(maxsplit=9)[:9]
            return TcpEnd(int(uid), int(inode)) if int(inode) else None  # 0: the socket is closed, and its user unknown
    return None


def _words(packed: bytes) -> str:
    """An address as the kernel prints it: each four bytes as a hexadecimal number in native byte order."""
    return "".join(f"{int.from_bytes(packed[at : at + 4], sys.byteorder):08X}" for at in range(0, len(packed), 4))


def _spelled4(address: IPv4Address | IPv6Address) -> str | None:
    if isinstance(address, IPv6Address):
        mapped = address.ipv4_mapped
        return None if mapped is None else _words(mapped.packed)
    return _words(address.packed)


def _spelled6(address: IPv4Address | IPv6Address) -> str:
    return _words((IPv6Address(f"::ffff:{address}") if isinstance(address, IPv4Address) else address).packed)
