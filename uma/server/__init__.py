"""The server: Trio and the protocol, nothing of llama."""

from uma.server.main import end_with, run_server
from uma.server.server import Server

__all__ = ["Server", "end_with", "run_server"]
