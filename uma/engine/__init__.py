"""The engine: a loaded model, its decode thread, and the requests it serves. See `engine.py` for the way of a token."""

from uma.engine.engine import Engine
from uma.engine.open import open_engine

__all__ = ["Engine", "open_engine"]
