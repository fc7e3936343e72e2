"""UMA loads a language model once and lets every program on the machine share it.

Everything public is here, imported on first use, so that `import uma` and `uma --help` stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from uma.version import __version__

if TYPE_CHECKING:
    from uma.client import Client, connect
    from uma.config import RuntimeConfig
    from uma.engine import Engine, open_engine
    from uma.errors import UmaError
    from uma.llm import LLM
    from uma.types import Finished, Message, Request, SamplingParams, Slo, Source, Token

_HOME = {
    "LLM": "uma.llm",
    "Client": "uma.client",
    "connect": "uma.client",
    "RuntimeConfig": "uma.config",
    "Engine": "uma.engine",
    "open_engine": "uma.engine",
    "UmaError": "uma.errors",
    "Finished": "uma.types",
    "Message": "uma.types",
    "Request": "uma.types",
    "SamplingParams": "uma.types",
    "Slo": "uma.types",
    "Source": "uma.types",
    "Token": "uma.types",
}

__all__ = [
    "LLM",
    "Client",
    "Engine",
    "Finished",
    "Message",
    "Request",
    "RuntimeConfig",
    "SamplingParams",
    "Slo",
    "Source",
    "Token",
    "UmaError",
    "__version__",
    "connect",
    "open_engine",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'uma' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
