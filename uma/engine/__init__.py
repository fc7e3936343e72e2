"""The engine: a loaded model, its decode thread, and its requests. docs/architecture.md has the path of a token."""

from uma.engine.engine import Engine
from uma.engine.open import open_engine

__all__ = ["Engine", "open_engine"]
