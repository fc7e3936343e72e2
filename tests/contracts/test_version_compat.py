"""Versions: how two sides agree, and that the page's matrix says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from http_server import Answered, HttpServer, RawHttp
from hypothesis import given
from hypothesis import strategies as st

from uma.contracts.card import CARD_VERSION
from uma.contracts.versions import CONTRACT_VERSIONS, PROTOCOL_HEADER, SERVER_HEADER, negotiate_version
from uma.errors import VersionMismatch

PAGE = (Path(__file__).parents[2] / "docs" / "contracts.md").read_text(encoding="utf-8")


def matrix() -> list[tuple[str, tuple[str, ...], str]]:
    """The rows of the page's compatibility matrix: a client's version, a server's versions, the outcome."""
    section = PAGE.partition("## Versions\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    return [(client, tuple(re.findall(r"[\d.]+", servers)), outcome) for client, servers, outcome in rows]


def test_the_matrix_has_rows() -> None:
    assert len(matrix()) >= 6


@pytest.mark.parametrize(("client", "servers", "outcome"), matrix())
def test_each_row_of_the_matrix_is_so(client: str, servers: tuple[str, ...], outcome: str) -> None:
    if outcome == "refused":
        with pytest.raises(VersionMismatch, match=PROTOCOL_HEADER):
            negotiate_version(client, servers)
    else:
        assert negotiate_version(client, servers) == outcome


def test_the_page_names_the_versions_spoken_here() -> None:
    assert f"These contracts have the version {', '.join(f'`{version}`' for version in CONTRACT_VERSIONS)};" in PAGE
    assert CARD_VERSION in CONTRACT_VERSIONS


VERSIONS = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: f"{pair[0]}.{pair[1]}")


@given(VERSIONS, st.lists(VERSIONS, min_size=1))
def test_the_outcome_is_the_highest_of_the_client_s_major(client: str, servers: list[str]) -> None:
    same = [each for each in servers if each.split(".")[0] == client.split(".", maxsplit=1)[0]]
    if same:
        assert negotiate_version(client, servers) == max(same, key=lambda each: int(each.split(".")[1]))
    else:
        with pytest.raises(VersionMismatch):
            negotiate_version(client, servers)


@pytest.mark.parametrize("word", ["", "1", "one", "1.0.0", "-1.0", "1.x", "9" * 80])
def test_what_is_no_version_is_refused_and_quoted_in_part(word: str) -> None:
    with pytest.raises(VersionMismatch) as refused:
        negotiate_version(word)
    assert len(refused.value.message) < 200


def answered(http_server: HttpServer, **headers: str) -> Answered:
    connection = RawHttp(http_server.port)
    connection.send("GET", "/v1/models", **headers)
    got = connection.answer()
    connection.close()
    return got


def test_every_http_answer_names_the_versions_of_contract_and_server(http_server: HttpServer) -> None:
    headers = answered(http_server).headers
    assert headers[PROTOCOL_HEADER.lower()] == CONTRACT_VERSIONS[-1]
    assert headers[SERVER_HEADER.lower()].startswith("uma/")


@pytest.mark.parametrize(("version", "status"), [("1.0", 200), ("1.7", 200), ("2.0", 400), ("new", 400)])
def test_a_client_with_another_major_is_refused_over_http(http_server: HttpServer, version: str, status: int) -> None:
    assert answered(http_server, **{PROTOCOL_HEADER: version}).status == status
