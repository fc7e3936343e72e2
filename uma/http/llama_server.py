"""llama-server's own endpoints: health, metrics, properties, and its native completion."""

from __future__ import annotations

from uma.http.exchange import Exchange
from uma.http.gateway import Gateway


async def health(gateway: Gateway, http: Exchange) -> None:
    """`GET /health`: 200 while the source takes requests, 503 otherwise. Computes nothing."""
    found = await gateway.source.health(probe=False)
    await http.answer_json({"status": found.status}, status=200 if found.status == "ok" else 503)
