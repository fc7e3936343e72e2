"""Tiny GGUF files of the kinds in which only some layers attend, for what llama.cpp makes of their shapes.

    path = write_hybrid(tmp_path / "model.gguf", "qwen35", state=64)

The keys of their headers and the shapes of their tensors are such as real ones have; the weights are random, and so
loud that each token depends on all before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt

from models import (
    CHATML,
    CONV,
    EMBED,
    FF,
    HEAD,
    HEADS,
    INNER,
    KV_HEADS,
    N_VOCAB,
    WINDOW,
    finish,
    write_metadata,
    write_tokenizer,
)

Hybrid = Literal["qwen35", "qwen35moe", "qwen3next", "nemotron_h", "granitehybrid", "lfm2"]
Predicting = Literal["qwen35", "qwen35moe", "step35"]
"""Kinds that can have prediction heads: one, or three (`step35`, which has no states, but sliding windows)."""
Sizes = dict[str, tuple[int, ...]]
Values = dict[str, npt.NDArray[np.float32]]

PLANS: dict[Hybrid | Predicting, str] = {
    "qwen35": "SSSASSSA",
    "qwen35moe": "SSSASSSA",
    "qwen3next": "SSSASSSA",
    "nemotron_h": "SFSFAF",
    "granitehybrid": "SSAS",
    "lfm2": "SSAS",
    "step35": "AAAA",
}
"""What each layer is: with a state, with attention, or a feed-forward network alone."""
DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next")
MIXTURES = ("qwen35moe", "qwen3next")
VALUE_HEADS, EXPERTS, EXPERT_FF = 2, 4, 32
HEADS_OF = {"step35": 3}
"""Prediction heads of a kind that has not one."""


def write_hybrid(
    path: Path, kind: Hybrid | Predicting, *, state: int = 16, context_length: int = 512, predicts: bool = False
) -> Path:
    """Write a model and return its path. `state` sets how large a sequence's state is; that of `lfm2` has one size.
    With `predicts`, one of `Predicting` has heads that predict tokens at random.
    """
    sizes = _sizes(kind, PLANS[kind], state)
    if predicts:
        sizes |= _prediction_layers(kind, len(PLANS[kind]))
    rng = np.random.default_rng(0)
    values = {name: _values(name, size, rng) for name, size in sizes.items()}
    return _write(path, kind, _shape(kind, state), values, context_length)


def write_predicting(path: Path, kind: Predicting = "qwen35", *, context_length: int = 512) -> Path:
    """Write a model whose prediction heads are copies of its only layer of worth: they predict what the model says."""
    plan, rng = ("AA" if kind == "step35" else "SA"), np.random.default_rng(0)
    sizes = _sizes(kind, plan, 16) | _prediction_layers(kind, len(plan))
    values = {name: _values(name, size, rng) for name, size in sizes.items()}
    # Tokens have a mean square of 1, which a head's norm leaves as it is, and the first layer changes nothing.
    values["token_embd"] /= np.sqrt(np.mean(values["token_embd"] ** 2, axis=1, keepdims=True))
    for name, value in values.items():
        if name.startswith(("blk.0.ssm_out", "blk.0.attn_output", "blk.0.ffn_down")):
            value[:] = 0
    for layer in range(2, 2 + HEADS_OF.get(kind, 1)):
        copied = {name: value for name, value in values.items() if name.startswith("blk.1.")}
        values |= {name.replace("blk.1.", f"blk.{layer}."): value for name, value in copied.items()}
        values[f"blk.{layer}.nextn.eh_proj"] = np.hstack([np.eye(EMBED), np.zeros((EMBED, EMBED))]).astype(np.float32)
    shape = _shape(kind, 16) | {"block_count": len(plan), "full_attention_interval": 2}
    return _write(path, kind, shape, values, context_length)


def _write(path: Path, kind: Hybrid | Predicting, shape: dict[str, Any], values: Values, context_length: int) -> Path:
    writer = gguf.GGUFWriter(path, kind)
    heads = sum(".nextn.eh_proj" in name for name in values)
    if heads:
        shape |= {"block_count": shape["block_count"] + heads, "nextn_predict_layers": heads}
    if kind == "step35":  # in every second layer, and in the heads
        layers = shape["block_count"]
        shape["attention.sliding_window_pattern"] = [at % 2 == 1 or at >= layers - heads for at in range(layers)]
    metadata = {f"{kind}.{key}": value for key, value in shape.items()}
    write_metadata(writer, "attention", context_length, FF, metadata)
    write_tokenizer(writer, "gpt2", "gpt-2", True, CHATML)
    for name, value in values.items():
        is_bare = name.endswith((".bias", "ssm_a", "ssm_d"))
        writer.add_tensor(name if is_bare else f"{name}.weight", value)
    finish(writer)
    return path


def _sizes(kind: Hybrid | Predicting, plan: str, state: int) -> Sizes:
    sizes: Sizes = {"token_embd": (N_VOCAB, EMBED), "output": (N_VOCAB, EMBED)}
    sizes["token_embd_norm" if kind == "lfm2" else "output_norm"] = (EMBED,)
    for index, layer in enumerate(plan):
        sizes |= {f"blk.{index}.{name}": size for name, size in _layer(kind, layer, state).items()}
    return sizes


def _prediction_layers(kind: Hybrid | Predicting, first: int) -> Sizes:
    own: Sizes = {"nextn.eh_proj": (EMBED, 2 * EMBED), "nextn.enorm": (EMBED,), "nextn.hnorm": (EMBED,)}
    layer, layers = _layer(kind, "A", 0) | own, range(first, first + HEADS_OF.get(kind, 1))
    return {f"blk.{at}.{name}": size for at in layers for name, size in layer.items()}


def _values(name: str, size: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    if name.endswith("ssm_a"):  # how fast each head forgets
        return -rng.uniform(0.05, 1.0, size).astype(np.float32)
    if name.endswith("ssm_dt.bias"):
        return rng.uniform(-4.0, -1.0, size).astype(np.float32)
    if name.endswith(".bias"):
        return np.zeros(size, np.float32)
    if len(size) == 1 or name.endswith(("norm", "ssm_d")):
        return np.ones(size, np.float32)
    gain = 1.0 if name == "token_embd" else 2.0 / size[-1] ** 0.5
    return (gain * rng.standard_normal(size)).astype(np.float32)


def _shape(kind: Hybrid | Predicting, state: int) -> dict[str, Any]:
    plan = PLANS[kind]
    shape: dict[str, Any] = {
        "block_count": len(plan),
        "attention.head_count_kv": [KV_HEADS if layer == "A" else 0 for layer in plan],
        "rope.dimension_count": HEAD,
    }
    if kind == "lfm2":
        return shape | {"shortconv.l_cache": 3}
    if kind == "step35":
        heads = {"attention.key_length": HEAD, "attention.value_length": HEAD, "attention.head_count_kv": KV_HEADS}
        return shape | heads | {"attention.sliding_window": WINDOW, "expert_feed_forward_length": FF}
    shape |= {
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "ssm.conv_kernel": CONV,
        "ssm.state_size": state,
        "ssm.group_count": 1,
        "ssm.inner_size": state * VALUE_HEADS if kind in DELTA_NETS else INNER,
        "ssm.time_step_rank": VALUE_HEADS,
    }
    if kind in DELTA_NETS:
        shape |= {"full_attention_interval": 4, "attention.head_count_kv": KV_HEADS}
    sections = {"rope.dimension_sections": [6, 5, 5, 0]}
    experts = {
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": EXPERT_FF,
        "expert_shared_feed_forward_length": EXPERT_FF,
    }
    own: dict[Hybrid, dict[str, Any]] = {
        "qwen35": sections,
        "qwen35moe": sections | experts,
        "qwen3next": experts,
        "granitehybrid": {"embedding_scale": 1.0, "residual_scale": 1.0, "attention.scale": 0.125, "logit_scale": 1.0},
        "nemotron_h": {
            "attention.layer_norm_epsilon": 1e-5,
            "feed_forward_length": [FF if layer == "F" else 0 for layer in plan],
        },
    }
    return shape | own.get(kind, {})


def _layer(kind: Hybrid | Predicting, layer: str, state: int) -> Sizes:
    sizes: Sizes = {"attn_norm": (EMBED,)}
    if kind != "nemotron_h":
        sizes["post_attention_norm" if kind in DELTA_NETS else "ffn_norm"] = (EMBED,)
    if layer == "A":
        sizes |= _attention(kind)
    elif layer == "S":
        sizes |= _recurrent(kind, state)
    if kind == "nemotron_h":
        return sizes | ({"ffn_up": (FF, EMBED), "ffn_down": (EMBED, FF)} if layer == "F" else {})
    return sizes | (_experts() if kind in MIXTURES else _feed_forward(FF, ""))


def _attention(kind: Hybrid | Predicting) -> Sizes:
    gate = 2 if kind in DELTA_NETS else 1
    norms = {"attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,)} if kind in (*DELTA_NETS, "lfm2") else {}
    return norms | {
        "attn_q": (HEADS * HEAD * gate, EMBED),
        "attn_k": (KV_HEADS * HEAD, EMBED),
        "attn_v": (KV_HEADS * HEAD, EMBED),
        "attn_output": (EMBED, HEADS * HEAD),
    }


def _recurrent(kind: Hybrid | Predicting, state: int) -> Sizes:
    if kind == "lfm2":
        return {
            "shortconv.conv": (EMBED, 3),
            "shortconv.in_proj": (3 * EMBED, EMBED),
            "shortconv.out_proj": (EMBED, EMBED),
        }
    if kind in DELTA_NETS:
        value = state * VALUE_HEADS
        mixed, heads = 2 * state + value, (VALUE_HEADS, EMBED)
        own: Sizes = (
            {"ssm_beta": heads, "ssm_alpha": heads} if kind != "qwen3next" else {"ssm_ba": (2 * VALUE_HEADS, EMBED)}
        )
        return own | {
            "attn_qkv": (mixed, EMBED), "attn_gate": (value, EMBED), "ssm_conv1d": (mixed, CONV), "ssm_norm": (state,),
            "ssm_dt.bias": (VALUE_HEADS,), "ssm_a": (VALUE_HEADS,), "ssm_out": (EMBED, value),
        }  # fmt: skip
    mixed = INNER + 2 * state
    return {
        "ssm_in": (INNER + mixed + VALUE_HEADS, EMBED), "ssm_conv1d": (mixed, CONV), "ssm_conv1d.bias": (mixed,),
        "ssm_dt.bias": (VALUE_HEADS,), "ssm_a": (VALUE_HEADS, 1), "ssm_d": (VALUE_HEADS, 1), "ssm_norm": (1, INNER),
        "ssm_out": (EMBED, INNER),
    }  # fmt: skip


def _feed_forward(width: int, suffix: str) -> Sizes:
    return {
        f"ffn_gate{suffix}": (width, EMBED),
        f"ffn_up{suffix}": (width, EMBED),
        f"ffn_down{suffix}": (EMBED, width),
    }


def _experts() -> Sizes:
    each = {name: (EXPERTS, *size) for name, size in _feed_forward(EXPERT_FF, "_exps").items()}
    routers = {"ffn_gate_inp": (EXPERTS, EMBED), "ffn_gate_inp_shexp": (1, EMBED)}
    return each | _feed_forward(EXPERT_FF, "_shexp") | routers
