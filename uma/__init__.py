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
    from uma.errors import (
        BadRequest,
        ConfigError,
        ConnectionLost,
        IdleTimeout,
        ModelError,
        Overloaded,
        PromptTooLarge,
        TemplateError,
        TimedOut,
        UmaError,
        UnknownModel,
        WrongKind,
        WrongPlace,
        WrongValues,
    )
    from uma.jobs.journal import JobChanged
    from uma.llm import LLM, Completion, RequestOutput
    from uma.types import (
        DecisionQuestion,
        Finished,
        Grammar,
        Message,
        Request,
        SamplingParams,
        Slo,
        Source,
        Token,
        Tool,
        ToolCall,
    )

_NAMES = {
    "uma.llm": "LLM Completion RequestOutput",
    "uma.client": "Client connect",
    "uma.config": "RuntimeConfig",
    "uma.engine": "Engine open_engine",
    "uma.errors": "BadRequest ConfigError ConnectionLost IdleTimeout ModelError Overloaded PromptTooLarge "
    "TemplateError TimedOut UmaError UnknownModel WrongKind WrongPlace WrongValues",
    "uma.jobs.journal": "JobChanged",
    "uma.types": "DecisionQuestion Finished Grammar Message Request SamplingParams Slo Source Token Tool ToolCall",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "LLM",
    "BadRequest",
    "Client",
    "Completion",
    "ConfigError",
    "ConnectionLost",
    "DecisionQuestion",
    "Engine",
    "Finished",
    "Grammar",
    "IdleTimeout",
    "JobChanged",
    "Message",
    "ModelError",
    "Overloaded",
    "PromptTooLarge",
    "Request",
    "RequestOutput",
    "RuntimeConfig",
    "SamplingParams",
    "Slo",
    "Source",
    "TemplateError",
    "TimedOut",
    "Token",
    "Tool",
    "ToolCall",
    "UmaError",
    "UnknownModel",
    "WrongKind",
    "WrongPlace",
    "WrongValues",
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


def __dir__() -> list[str]:
    return sorted(__all__)
