"""A server on a socket, with the same interface as an engine in this process."""

from uma.client.client import Client
from uma.client.dial import connect, connect_child, dialled
from uma.client.several import ModelsThere, models_there

__all__ = ["Client", "ModelsThere", "connect", "connect_child", "dialled", "models_there"]
