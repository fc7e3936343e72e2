"""`uma contract check`: proves what a running server says of itself, and that it refuses what it does not offer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import attrs

from uma.cli.sanitize import json_text, sanitize
from uma.cli.table import GAP, print_wrapped
from uma.client.http import HttpClient, read_key
from uma.client.http_probe import HttpProbe
from uma.client.probe import SocketProbe
from uma.config import load
from uma.contracts.claims import claims_of
from uma.contracts.proofs import Claim, DisprovenError, Question, ServerReply
from uma.errors import ConfigError
from uma.types import ServerInfo

COLUMNS = ("claim", "declared", "proven", "what was seen")
WIDTHS = (36, 8, 6, 0)
"""Length of these at least."""
FALSE_CLAIM = 1


class Probe(Protocol):
    """A way to ask a running server."""

    def introduce(self) -> ServerInfo:
        """What the server says of itself."""

    def ask(self, question: Question) -> ServerReply:
        """All events of the answer."""


@attrs.frozen
class Finding:
    """How the proof of one claim went."""

    claim: str
    declared: str
    is_true: bool
    seen: str


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    found: list[Finding] = []
    for finding in check(_probe(options)):
        if not options.json:  # each as it is found: some take long
            for row in (_row(finding),) if found else (COLUMNS, _row(finding)):
                print_wrapped(GAP.join(map(str.ljust, row, WIDTHS)))
        found.append(finding)
    if options.json:
        print(json_text([attrs.asdict(finding) for finding in found], indent=2))
    wrong = [finding for finding in found if not finding.is_true]
    print(f"{len(found)} claims, {len(wrong)} false", file=sys.stderr)
    return FALSE_CLAIM if wrong else 0


def _probe(options: argparse.Namespace) -> Probe:
    if options.http is None:
        if options.key_file is not None:
            raise ConfigError("--key-file: is for --http alone; the socket asks for no key")
        return SocketProbe(options.socket or Path(load().config.socket))
    return HttpProbe(HttpClient(options.http, read_key(options.key_file), option="--http"))


def check(probe: Probe) -> Iterator[Finding]:
    """Prove every claim of the server, one after the other."""
    for claim in claims_of(probe.introduce()):
        yield prove(claim, probe)


def prove(claim: Claim, probe: Probe) -> Finding:
    """Ask all that the claim's proof wants to know."""
    proof = claim.prove()
    try:
        question = next(proof)
        while True:
            question = proof.send(probe.ask(question))
    except StopIteration as end:
        return Finding(claim.name, claim.declared, True, end.value)
    except DisprovenError as error:
        return Finding(claim.name, claim.declared, False, str(error))


def _row(finding: Finding) -> tuple[str, ...]:
    seen = sanitize(finding.seen.replace("\n", " "))
    return finding.claim, finding.declared, "yes" if finding.is_true else "FALSE", seen[:100]
