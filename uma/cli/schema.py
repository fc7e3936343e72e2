"""`uma schema`: the JSON Schemas of the protocol's messages and of the contracts, from the classes that check them."""

from __future__ import annotations

import argparse

from uma.cli.sanitize import json_text
from uma.contracts.schema import contract_schemas
from uma.errors import ConfigError
from uma.protocol.schema import schemas
from uma.wrong import nearest


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    known = contract_schemas() if options.contracts else schemas()
    if options.name is not None and options.name not in known:
        near = nearest(options.name, known) or f"; there are {', '.join(known)}"
        what = "contract" if options.contracts else "message"
        raise ConfigError(f"no such {what}: {options.name}{near}")
    print(json_text(known if options.name is None else known[options.name], indent=2))
    return 0
