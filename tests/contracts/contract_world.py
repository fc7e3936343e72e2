"""What the tests of the contracts share: a server's description, and requests and outputs that are right."""

from __future__ import annotations

from typing import Any

from uma.types import Capabilities, Limits, ModelInfo, ServerInfo

N_VOCAB = 512


def server_info(**capabilities: Any) -> ServerInfo:
    """A server that declares the minimum, and `capabilities` beyond it."""
    least: dict[str, Any] = {
        "streaming": True,
        "chat": True,
        "cancel": True,
        "tokenize": True,
        "token_ids_input": True,
        "prefix_sharing": "cells",
        "kv_unified": True,
        "max_stop_sequences": 16,
        "sampling_params": ("temperature", "max_tokens"),
    }
    model = ModelInfo("Tiny 1.5 (F32)", "/somewhere/tiny.gguf", "llama", 1000, 4000, "F32", 2048, N_VOCAB, True)
    limits = Limits(1024, 512, 1_000_000, 1_048_576, 256, 1024)
    return ServerInfo("uma/0", model, Capabilities(**(least | capabilities)), limits)


def request(**fields: Any) -> dict[str, Any]:
    """A request as Dynamo 1.6.1 sends it, with `fields` in place of its own."""
    plain: dict[str, Any] = {
        "model": "tiny",
        "token_ids": [1, 300, 20],
        "stop_conditions": {
            "max_tokens": 8,
            "stop": ["\n"],
            "stop_token_ids": None,
            "stop_token_ids_visible": None,
            "stop_token_ids_hidden": [2],
            "min_tokens": None,
            "ignore_eos": None,
            "max_thinking_tokens": None,
        },
        "sampling_options": {
            "n": None,
            "best_of": None,
            "temperature": 0.20000000298023224,
            "top_p": None,
            "top_k": None,
            "min_p": None,
            "presence_penalty": None,
            "frequency_penalty": None,
            "repetition_penalty": None,
            "seed": 7,
            "use_beam_search": None,
            "length_penalty": None,
            "include_stop_str_in_output": None,
            "guided_decoding": None,
        },
        "output_options": {
            "logprobs": None,
            "prompt_logprobs": None,
            "skip_special_tokens": None,
            "formatted_prompt": None,
            "return_tokens_as_token_ids": None,
        },
        "eos_token_ids": [2],
        "mdc_sum": "0123",
        "annotations": [],
        "router_config_override": None,
        "routing": {"dp_rank": 0, "priority": 5, "priority_jump": 5.0, "expected_output_tokens": 100},
    }
    return plain | fields


def last_output(**fields: Any) -> dict[str, Any]:
    """The end of an answer of two tokens to a prompt of three."""
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return {"token_ids": [], "finish_reason": "stop", "completion_usage": usage} | fields
