"""A complete client of UMA in plain Python: `python plain_client.py SOCKET "Once upon a time"`."""

import json
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any


def ask(path: str, **request: Any) -> Iterator[dict[str, Any]]:
    """Send one request to the server on the socket at `path`, and give its events as they come."""
    payload = json.dumps({"id": "1", **request}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(struct.pack("<I", len(payload)) + payload)
        stream = connection.makefile("rb")
        while header := stream.read(4):
            yield json.loads(stream.read(*struct.unpack("<I", header)))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit('usage: python plain_client.py SOCKET "PROMPT"; `uma ps` lists sockets')
    for event in ask(sys.argv[1], prompt=sys.argv[2], max_tokens=64):
        if event["event"] == "error":
            sys.exit(f"{event['code']}: {event['message']}")
        if event["event"] in ("token", "eos"):
            print(event.get("text", "\n"), end="", flush=True)
