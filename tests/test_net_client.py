"""Which TCP connections count as one client where all share something in turns."""

from __future__ import annotations

import pytest

from uma.net.client import client_at


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("192.0.2.7", "192.0.2.7", True),
        ("192.0.2.7", "192.0.2.8", False),
        ("::ffff:192.0.2.7", "192.0.2.7", True),
        ("2001:db8::1", "2001:db8::ffff:1", True),  # one machine may have all of its network's addresses
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("127.0.0.1", "127.0.0.1", False),  # two programs of this machine, as far as can be known
        ("::1", "::1", False),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", False),
        ("no address", "no address", False),
    ],
)
def test_another_machine_is_one_client_and_here_each_connection_is(one: str, other: str, is_same: bool) -> None:
    assert (client_at(one, 1) == client_at(other, 2)) == is_same
    assert client_at(one, 1) == client_at(one, 1)
