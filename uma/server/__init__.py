"""The server: Trio and the protocol, nothing of llama."""

from uma.server.main import run_server
from uma.server.server import Server

__all__ = ["Server", "run_server"]
