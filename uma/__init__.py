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
        UmaError,
        UnknownModel,
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

_HOME = {
    "LLM": "uma.llm",
    "Completion": "uma.llm",
    "RequestOutput": "uma.llm",
    "Client": "uma.client",
    "connect": "uma.client",
    "RuntimeConfig": "uma.config",
    "Engine": "uma.engine",
    "open_engine": "uma.engine",
    "BadRequest": "uma.errors",
    "ConfigError": "uma.errors",
    "ConnectionLost": "uma.errors",
    "IdleTimeout": "uma.errors",
    "ModelError": "uma.errors",
    "Overloaded": "uma.errors",
    "PromptTooLarge": "uma.errors",
    "TemplateError": "uma.errors",
    "UmaError": "uma.errors",
    "UnknownModel": "uma.errors",
    "JobChanged": "uma.jobs.journal",
    "DecisionQuestion": "uma.types",
    "Finished": "uma.types",
    "Grammar": "uma.types",
    "Message": "uma.types",
    "Request": "uma.types",
    "SamplingParams": "uma.types",
    "Slo": "uma.types",
    "Source": "uma.types",
    "Token": "uma.types",
    "Tool": "uma.types",
    "ToolCall": "uma.types",
}

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
    "Token",
    "Tool",
    "ToolCall",
    "UmaError",
    "UnknownModel",
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
