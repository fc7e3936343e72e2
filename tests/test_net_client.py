"""Which TCP connections count as one client where all share something in turns."""

from __future__ import annotations

import pytest

from uma.net.client import MAX_ORIGIN_CHARS, client_at, origin, with_user


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


def test_a_user_is_named_before_the_endpoint_and_the_whole_stays_within_its_bound() -> None:
    assert with_user(origin("completions", "key", "curl 8"), "ann\n") == "curl 8 · key · user ann · completions"
    assert len(with_user(origin("x" * 1_000, "key", "curl 8"), "u" * 1_000)) == MAX_ORIGIN_CHARS
