"""HTTP's rules for rows of jobs that are no server's: an `RowAsk` of any source."""

from __future__ import annotations

import attrs

from uma.config import RuntimeConfig
from uma.http.app import ENDPOINTS, build_app
from uma.http.gateway import Gateway
from uma.http.in_memory import InMemory
from uma.jobs import RowAsk
from uma.types import Source

FIELDS = {path: tuple(attrs.fields_dict(body)) for _, path, _, body in ENDPOINTS if body is not None}
"""Names of the fields that the endpoints' bodies have."""


def ask_of(source: Source, config: RuntimeConfig, program: str) -> RowAsk:
    """Asks `source` under the rules of HTTP; `program` is what its requests are listed under."""
    inside = attrs.evolve(config, http="", http_keys="", http_tls_cert="", http_tls_key="", http_jobs="")
    return InMemory(build_app(Gateway.of(source, inside)), program, source)
