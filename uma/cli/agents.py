"""The coding agents that `uma launch` starts: how each is told of a server, without a change to what is the user's.

Everything goes by variables, by options, or by a file in a temporary folder that ends with the agent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from uma.errors import ConfigError


@attrs.frozen
class AgentPlace:
    """Where an agent finds its model."""

    url: str
    """The server's, without a path."""
    model: str
    context_tokens: int
    key: str
    folder: Path
    """Folder for files of the agent's configuration."""


@attrs.frozen
class Start:
    """What an agent is started with, beside the user's own arguments and variables."""

    options: Sequence[str] = ()
    variables: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen
class Agent:
    """A program that `uma launch` knows."""

    program: str
    install: str
    """The command that installs it."""
    start: Callable[[AgentPlace], Start]


CLAUDES_LEAST_TOKENS = 65_536
"""Minimum context that Claude Code is told of: it keeps some 33,000 tokens of it for an answer and its compaction, and
would refuse its own first prompt of 18,000. Untold, it shortens a conversation once the server says that it is too
long.
"""

MIN_TOKENS = 20_000
"""Context that an agent's first prompt and a first answer need: its instructions and tools alone are 8,000 to 18,000
tokens.
"""

HERMES_POLICY = Path("/etc/hermes")
"""Folder of an administrator's settings for Hermes, in whose place those for one session would be read."""


def _claude(place: AgentPlace) -> Start:
    sizes = ["CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_AUTO_COMPACT_WINDOW"]
    models = ["ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"]
    models += [f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")]
    return Start(
        variables={
            "ANTHROPIC_BASE_URL": place.url,
            "ANTHROPIC_AUTH_TOKEN": place.key,
            "ANTHROPIC_API_KEY": "",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **dict.fromkeys(models, place.model),
            **dict.fromkeys(sizes if place.context_tokens >= CLAUDES_LEAST_TOKENS else (), str(place.context_tokens)),
        }
    )


def _codex(place: AgentPlace) -> Start:
    provider = {"name": "UMA", "base_url": f"{place.url}/v1", "wire_api": "responses", "env_key": "UMA_AGENT_KEY"}
    settings = {
        "model": place.model,
        "model_context_window": place.context_tokens,
        "model_provider": "uma",
        **{f"model_providers.uma.{name}": value for name, value in provider.items()},
    }
    pairs = [("-c", f"{name}={json.dumps(value)}") for name, value in settings.items()]  # JSON's scalars are TOML's
    return Start([text for pair in pairs for text in pair], {"UMA_AGENT_KEY": place.key})


def _opencode(place: AgentPlace) -> Start:
    model = {"name": place.model, "limit": {"context": place.context_tokens, "output": _output_tokens(place)}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "UMA",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": place.key},
        "models": {place.model: model},
    }
    name = f"uma/{place.model}"
    config = {
        "provider": {"uma": provider},
        "model": name,
        "small_model": name,
        "share": "disabled",
        "autoupdate": False,
    }
    return Start(variables={"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"})


def _aider(place: AgentPlace) -> Start:
    name, file = f"openai/{place.model}", place.folder / "aider.json"
    sizes = {"max_input_tokens": place.context_tokens, "max_output_tokens": _output_tokens(place)}
    file.write_text(json.dumps({name: {**sizes, "litellm_provider": "openai", "mode": "chat"}}))
    options = ["--model", name, "--weak-model", name, "--model-metadata-file", str(file)]
    options += ["--no-show-model-warnings", "--no-analytics", "--no-check-update"]
    return Start(options, {"OPENAI_API_BASE": f"{place.url}/v1", "OPENAI_API_KEY": place.key})


def _qwen(place: AgentPlace) -> Start:
    file = place.folder / "qwen.json"  # what the user and the project set goes before it
    file.write_text(json.dumps({"model": {"generationConfig": {"contextWindowSize": place.context_tokens}}}))
    variables = {"OPENAI_BASE_URL": f"{place.url}/v1", "OPENAI_API_KEY": place.key, "OPENAI_MODEL": place.model}
    return Start(
        ["--auth-type", "openai", "--model", place.model], {**variables, "QWEN_CODE_SYSTEM_DEFAULTS_PATH": str(file)}
    )


def _pi(place: AgentPlace) -> Start:
    file = place.folder / "uma.js"
    file.write_text(f"export default (pi) => pi.registerProvider('uma', {json.dumps(_pi_provider(place))});\n")
    return Start(["--extension", str(file), "--provider", "uma", "--model", place.model], {"UMA_AGENT_KEY": place.key})


def _pi_provider(place: AgentPlace) -> dict[str, Any]:
    model = {
        "id": place.model,
        "name": place.model,
        "reasoning": False,
        "input": ["text"],
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
        "contextWindow": place.context_tokens,
        "maxTokens": _output_tokens(place),
    }
    url = f"{place.url}/v1"
    return {"baseUrl": url, "apiKey": "UMA_AGENT_KEY", "api": "openai-completions", "models": [model]}


def _copilot(place: AgentPlace) -> Start:
    """Offline: without a sign-in, and with nothing told to GitHub."""
    names = {
        "BASE_URL": f"{place.url}/v1",
        "TYPE": "openai",
        "API_KEY": place.key,
        "MAX_PROMPT_TOKENS": str(place.context_tokens - _output_tokens(place)),
        "MAX_OUTPUT_TOKENS": str(_output_tokens(place)),
    }
    variables = {f"COPILOT_PROVIDER_{name}": value for name, value in names.items()}
    return Start(variables={**variables, "COPILOT_MODEL": place.model, "COPILOT_OFFLINE": "true"})


def _continue(place: AgentPlace) -> Start:
    model = {
        "name": place.model,
        "provider": "openai",
        "model": place.model,
        "apiBase": f"{place.url}/v1",
        "apiKey": place.key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": place.context_tokens, "maxTokens": _output_tokens(place)},
    }
    file = place.folder / "continue.yaml"  # whose JSON is YAML
    file.write_text(json.dumps({"name": "UMA", "version": "1.0.0", "schema": "v1", "models": [model]}))
    return Start(["--config", str(file)])


def _cline(place: AgentPlace) -> Start:
    """Without its hub, a process that would outlive the agent and keep the address of a server that is gone."""
    name = "openai-compatible"
    settings = {"provider": name, "model": place.model, "baseUrl": f"{place.url}/v1", "apiKey": place.key}
    provider = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    file = place.folder / "cline.json"
    file.write_text(json.dumps({"version": 1, "lastUsedProvider": name, "modes": {}, "providers": {name: provider}}))
    variables = {"CLINE_PROVIDER_SETTINGS_PATH": str(file), "CLINE_SESSION_BACKEND_MODE": "local"}
    return Start(["--provider", name, "--model", place.model], variables)


def _hermes(place: AgentPlace) -> Start:
    model = {
        "provider": "custom",
        "default": place.model,
        "base_url": f"{place.url}/v1",
        "api_key": place.key,
        "context_length": place.context_tokens,
    }
    if HERMES_POLICY.is_dir():
        raise ConfigError(
            f"hermes: an administrator's settings in {HERMES_POLICY} would not hold; set its model by hand"
        )
    (place.folder / "config.yaml").write_text(json.dumps({"model": model}))
    return Start(variables={"HERMES_MANAGED_DIR": str(place.folder)})


def _output_tokens(place: AgentPlace) -> int:
    """A quarter of the context is kept for an answer."""
    return max(1, place.context_tokens // 4)


AGENTS: Mapping[str, Agent] = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Agent("codex", "npm install -g @openai/codex", _codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode),
    "aider": Agent("aider", "python -m pip install aider-install && aider-install", _aider),
    "qwen": Agent("qwen", "npm install -g @qwen-code/qwen-code", _qwen),
    "pi": Agent("pi", "npm install -g @mariozechner/pi-coding-agent", _pi),
    "copilot": Agent("copilot", "npm install -g @github/copilot", _copilot),
    "continue": Agent("cn", "npm install -g @continuedev/cli", _continue),
    "cline": Agent("cline", "npm install -g cline", _cline),
    "hermes": Agent("hermes", "python -m pip install hermes-agent", _hermes),
}
"""Agents by the name that `uma launch` takes."""
