"""What is accepted of llama.cpp's server tests: files left out, numbers that the model decides, and differences."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

LEFT_OUT: Mapping[str, str] = {
    "test_lora.py": "scales of LoRA adapters that are set for all requests",
    "test_mcp_servers.py": "llama-server as a client of MCP servers",
    "test_router.py": "models that are downloaded, and their router's own list and presets",
    "test_stream.py": "answers that are read again by the id of a conversation",
    "test_sleep.py": "a model that is unloaded while idle",
    "test_speculative.py": "a draft model that is downloaded",
    "test_tools_builtin.py": "tools that the server itself runs",
    "test_vision_api.py": "a model and pictures that are downloaded",
}
"""Files that are not run, for what UMA does not have, or for what these tests fetch; and what that is."""

_FIRST_CHUNK = {
    'assert choice["delta"]["content"] is None': 'assert looks_empty(choice["delta"]["content"])',
    'assert data["choices"][0]["delta"]["content"] is None': (
        'assert looks_empty(data["choices"][0]["delta"]["content"])'
    ),
    "assert choice.delta.content is None": "assert looks_empty(choice.delta.content)",
}
LOOKS: Mapping[str, Mapping[str, str]] = {
    "unit/test_chat_completion.py": {
        "== n_prompt": "== looks(n_prompt)",
        "== n_cache\n": "== looks(n_cache)\n",
        **_FIRST_CHUNK,
    },
    "unit/test_ctx_shift.py": {"== n_token_output": "== (n_token_output if n_predict > 0 else looks(n_token_output))"},
    "unit/test_completion.py": {"== n_prompt": "== looks(n_prompt)"},
    "unit/test_rerank.py": {
        "== n_tokens": "== looks(n_tokens)",
        'least_relevant["index"] == 3': 'least_relevant["index"] == looks(3)',
        'most_relevant["index"] == 2': 'most_relevant["index"] == looks(2)',
    },
    "unit/test_embedding.py": {
        "== n_tokens": "== looks(n_tokens)",
        "== 2 * 9": "== looks(2 * 9)",
        "assert data[0]['embedding'] == data[1]['embedding']": (
            "assert data[0]['embedding'] == pytest.approx(data[1]['embedding'], abs=EPSILON)"
        ),
    },
    "unit/test_security.py": {
        """Headers": "Authorization",
    })
    assert res.status_code == 200""": """Headers": "Authorization",
    })
    assert res.status_code in (200, 204)""",
        """in (200, 204)
    assert "Access-Control-Allow-Origin" not in res.headers""": """in (200, 204, 403)
    assert "Access-Control-Allow-Origin" not in res.headers""",
    },
    "utils.py": {
        "dict(response.headers)": "response.headers",
        "if choice['delta'].get('content') is not None:": "if not looks_empty(choice['delta'].get('content')):",
    },
}
"""By file, what is replaced in the tests' text: numbers that only the model's vocabulary and weights decide, the last
bits of an embedding, which depend on where a text lies in a batch, the empty content of a chat's first chunk, which is
OpenAI's `""` and not null, a preflight's status, 204 or 403, and a header's spelling, whose case does not count."""

DIFFERENCES: Sequence[tuple[str, str]] = (
    ("test_slot_save|test_clear_and_restore", "slots are neither saved nor erased: prefixes are found by their tokens"),
    ("test_proxy|test_cors_proxy", "answers of other servers are not fetched for a page"),
    ("test_compat_gcp", "no /predict for Vertex AI"),
    ("vision|local_media_file|with_image", "without a projector pictures are refused, or named in a text's place"),
    ("test_ctx_shift_enabled", "the context is not shifted: nothing of a conversation is forgotten in silence"),
    ("n_probs_post", "log probabilities are the model's own, before the sampler; post_sampling_probs is refused"),
    ("pooling_none", "one embedding for each text"),
    ("test_server_slots|test_metrics_disabled", "/slots and /metrics are always there, behind the keys"),
    ("test_metrics_prometheus_format", "of llama-server's figures those that are the same here"),
    ("test_no_ui|static_assets", "the page is always there, and is another one"),
    ("test_server_multiple_addresses", "one address for HTTP"),
    ("test_server_model_aliases_and_tags", "each alias is an entry of the list of models; there are no tags"),
    ("test_server_props", "no seed for the whole server: each request has its own"),
    ("cors_origins_defaults", "no origins but those that are named, by default"),
    ("Allow-Origin", "where all origins are allowed, the answer says so and not which one asked"),
    ("test_responses_stream_with_llama_telemetry", "an answer that is cut is response.incomplete, as OpenAI has it"),
    ("assistant_prefill.prefill1", "parts of a text are lines"),
    ("command.*tools2|c4ai.*tools2", "tools are refused where the form of a model's calls is not known"),
    ("test_add_generation_prompt.*False", "/apply-template gives the prompt of a chat, which always opens an answer"),
    ("test_invalid_chat_completion_req.messages7", "several messages of one role are left to the template"),
    ("generation_rate", "predicted_ms is what all tokens take at the rate of those after the first"),
    ("Allow-Credentials", "pages of other origins send no cookies: keys are in a header"),
    ("Allow-Methods|Allow-Headers", "the methods that there are, and the headers that the page asks for"),
    (
        "test_completion_response_fields.*32|test_chat_template$",
        "a prompt is told as it was sent, without BOS",
    ),
    ("test_ignore_eos_populates", "ignore_eos is a setting of its own, no list of biases"),
    ("test_anthropic_empty_messages", "a conversation has a message"),
    ("test_return_progress", "a prompt's progress is told by time, not batch by batch"),
)
"""Patterns of tests' names, and why these fail."""


def reason_for(test: str) -> str | None:
    """Why it is right that this test fails; None where it is not."""
    return next((reason for pattern, reason in DIFFERENCES if re.search(pattern, test)), None)
