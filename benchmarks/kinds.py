"""Random-weight models of the kinds that people run: plain attention, sliding windows, hybrids, mixtures of experts.

They are small enough for two cores and compute what real ones compute, with SmolLM2's vocabulary and a template that
thinks. The weights are loud (strong queries, keys and outputs), so that each token depends on all before it: from a
wrong state another text follows. What matters of them is which tokens a server reads again and what memory it takes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import attrs
import gguf

from benchmarks.cache import cache_dir
from benchmarks.gguf_file import File
from benchmarks.reference import fetch_model

Kind = Literal[
    "llama", "gemma3", "gpt-oss", "qwen3moe", "qwen35", "qwen3next", "nemotron_h", "granitehybrid", "lfm2"
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)

PLANS: dict[Kind, str] = {
    "llama": "A" * 8,
    "gemma3": "A" * 12,
    "gpt-oss": "A" * 8,
    "qwen3moe": "A" * 8,
    "qwen35": "DDDADDDA",
    "qwen3next": "DDDADDDA",
    "nemotron_h": "MFMFAFMFMFAF",
    "granitehybrid": "MMAMMMAM",
    "lfm2": "CCACCACA",
}
"""Each layer's kind: A attention, D gated delta net, M Mamba 2, C short convolution, F a feed-forward network alone."""
EXPERTS: dict[Kind, tuple[int, int]] = {"gpt-oss": (4, 256), "qwen3moe": (2, 256), "qwen3next": (2, 128)}
"""Experts that a token uses, of `ALL_EXPERTS`, and their width, for kinds whose feed-forward networks are mixtures."""
DELTA_NETS = ("qwen35", "qwen3next")
WIDTH, HEADS, KV_HEADS, HEAD, FEED_FORWARD, ALL_EXPERTS, WINDOW = 256, 4, 2, 64, 512, 8, 128
CONTEXT = 32_768
VERSION = 1
"""Part of the cached file's name: raise it when what is written changes."""

TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif -%}"
)
"""ChatML. With `enable_thinking` an answer begins within its thinking, which no later prompt holds."""


@attrs.frozen
class State:
    """Dimensions of a recurrent state."""

    size: int
    groups: int
    heads: int


def _state(kind: Kind, *, is_large: bool) -> State:
    if kind in DELTA_NETS:
        return State(128, 4, 16) if is_large else State(64, 2, 4)
    return State(64, 2 if kind == "nemotron_h" else 1, 8)


def kind_model(kind: Kind, *, is_large: bool = False) -> Path:
    """The file of a kind, from the cache or written now. `is_large`: with a state of 6 MiB a sequence (qwen35 alone),
    where real ones have 20 to 100.
    """
    path = cache_dir() / f"{kind}{'-large' if is_large else ''}-v{VERSION}.gguf"
    return _written(path, lambda partial: write_kind(partial, kind, fetch_model("smollm2"), is_large=is_large))


def gemma() -> Path:
    """The real Gemma 3 270M, which has no template of its own, with `TEMPLATE` in its own special tokens."""
    return _written(cache_dir() / f"gemma-3-270m-v{VERSION + 1}.gguf", _write_gemma)


def _written(path: Path, write: Callable[[Path], None]) -> Path:
    if not path.exists():
        # Written beside and renamed, so that a run broken off leaves no half file under the real name.
        partial = path.with_suffix(f".{os.getpid()}.partial")
        write(partial)
        partial.rename(path)
    return path


def write_kind(
    path: Path, kind: Kind, vocabulary: Path, *, is_large: bool = False, most_gain: float = math.inf
) -> None:
    """Write the file of a kind, with the vocabulary of another file. With a `most_gain` of 1 it is not loud."""
    file = File(path, kind, most_gain)
    plan, state = PLANS[kind], _state(kind, is_large=is_large)
    n_vocab = file.copy_fields(vocabulary, lambda name: name.startswith("tokenizer."), TEMPLATE)
    file.header(vocab_size=n_vocab, context_length=CONTEXT, embedding_length=WIDTH, block_count=len(plan))
    _attention_header(file, kind, plan)
    _own_header(file, kind, state)
    is_gemma = kind == "gemma3"
    file.matrix("token_embd.weight", n_vocab, WIDTH, gain=0.5 if is_gemma else 8)
    for index, layer in enumerate(plan):
        _write_layer(file, kind, layer, f"blk.{index}.", state)
    file.full("token_embd_norm.weight" if kind == "lfm2" else "output_norm.weight", WIDTH)
    file.matrix("output.weight", n_vocab, WIDTH, gain=3)
    file.close()


def _attention_header(file: File, kind: Kind, plan: str) -> None:
    all_attend = "A" * len(plan) == plan or kind in DELTA_NETS
    file.header(
        attention__head_count=HEADS,
        attention__head_count_kv=KV_HEADS if all_attend else [KV_HEADS if layer == "A" else 0 for layer in plan],
        attention__key_length=HEAD,
        attention__value_length=HEAD,
        attention__layer_norm_rms_epsilon=1e-6,
        rope__freq_base=150_000.0 if kind == "gpt-oss" else 1e6,
        rope__dimension_count=HEAD,
    )
    if kind in ("gemma3", "gpt-oss"):
        file.header(attention__sliding_window=WINDOW)


def _own_header(file: File, kind: Kind, state: State) -> None:
    ff = [FEED_FORWARD if layer == "F" else 0 for layer in PLANS[kind]] if kind == "nemotron_h" else FEED_FORWARD
    file.header(feed_forward_length=ff)
    if kind in EXPERTS:
        used, width = EXPERTS[kind]
        file.header(expert_count=ALL_EXPERTS, expert_used_count=used, expert_feed_forward_length=width)
    if kind in DELTA_NETS or "M" in PLANS[kind]:
        file.header(
            ssm__conv_kernel=4,
            ssm__state_size=state.size,
            ssm__group_count=state.groups,
            ssm__time_step_rank=state.heads,
            ssm__inner_size=state.size * state.heads,
        )
    if kind in DELTA_NETS:
        file.header(full_attention_interval=4)
    if kind == "qwen35":
        file.header(rope__dimension_sections=[11, 11, 10, 0])
    elif kind == "qwen3next":
        file.header(expert_shared_feed_forward_length=EXPERTS[kind][1])
    elif kind == "nemotron_h":
        file.header(attention__layer_norm_epsilon=1e-6)
    elif kind == "granitehybrid":
        file.header(embedding_scale=1.0, residual_scale=1.0, attention__scale=0.125, logit_scale=1.0)
    elif kind == "lfm2":
        file.header(shortconv__l_cache=3)


def _write_layer(file: File, kind: Kind, layer: str, block: str, state: State) -> None:
    file.full(block + "attn_norm.weight", WIDTH)
    if kind in DELTA_NETS or kind == "gpt-oss":
        file.full(block + "post_attention_norm.weight", WIDTH)
    elif kind != "nemotron_h":
        file.full(block + "ffn_norm.weight", WIDTH)
    if kind == "gemma3":
        file.full(block + "post_attention_norm.weight", WIDTH, 3)
        file.full(block + "post_ffw_norm.weight", WIDTH, 3)
    if layer == "A":
        _attention(file, kind, block)
    elif layer == "D":
        _delta_net(file, kind, block, state)
    elif layer == "M":
        _mamba(file, block, state)
    elif layer == "C":
        file.matrix(block + "shortconv.conv.weight", WIDTH, 3, gain=2)
        file.matrix(block + "shortconv.in_proj.weight", 3 * WIDTH, WIDTH, gain=1.5)
        file.matrix(block + "shortconv.out_proj.weight", WIDTH, WIDTH, gain=2)
    if kind in EXPERTS:
        _experts(file, kind, block)
    elif kind != "nemotron_h" or layer == "F":
        names = ("up", "down") if kind == "nemotron_h" else ("gate", "up", "down")
        _feed_forward(file, block, names, FEED_FORWARD)


def _attention(file: File, kind: Kind, block: str) -> None:
    gated = 2 if kind in DELTA_NETS else 1
    file.matrix(block + "attn_q.weight", HEADS * HEAD * gated, WIDTH, gain=2)
    file.matrix(block + "attn_k.weight", KV_HEADS * HEAD, WIDTH, gain=2)
    file.matrix(block + "attn_v.weight", KV_HEADS * HEAD, WIDTH)
    file.matrix(block + "attn_output.weight", WIDTH, HEADS * HEAD, gain=2)
    if kind in (*DELTA_NETS, "gemma3", "qwen3moe", "lfm2"):
        file.full(block + "attn_q_norm.weight", HEAD, 1.6)
        file.full(block + "attn_k_norm.weight", HEAD, 1.6)
    if kind == "gpt-oss":
        file.full(block + "attn_output.bias", WIDTH, 0)
        file.uniform(block + "attn_sinks.weight", HEADS, -1, 1)


def _feed_forward(file: File, block: str, names: Sequence[str], width: int, ending: str = "", *experts: int) -> None:
    for name in names:
        rows, columns = (WIDTH, width) if name == "down" else (width, WIDTH)
        file.matrix(f"{block}ffn_{name}{ending}.weight", *experts, rows, columns)


def _experts(file: File, kind: Kind, block: str) -> None:
    width = EXPERTS[kind][1]
    file.matrix(block + "ffn_gate_inp.weight", ALL_EXPERTS, WIDTH, gain=2)
    _feed_forward(file, block, ("gate", "up", "down"), width, "_exps", ALL_EXPERTS)
    if kind == "qwen3next":
        file.matrix(block + "ffn_gate_inp_shexp.weight", 1, WIDTH)
        _feed_forward(file, block, ("gate", "up", "down"), width, "_shexp")
    elif kind == "gpt-oss":
        file.full(block + "ffn_gate_inp.bias", ALL_EXPERTS, 0)
        for name, size in (("gate", width), ("up", width), ("down", WIDTH)):
            file.full(f"{block}ffn_{name}_exps.bias", (ALL_EXPERTS, size), 0)


def _delta_net(file: File, kind: Kind, block: str, state: State) -> None:
    key, value = state.size * state.groups, state.size * state.heads
    file.matrix(block + "attn_qkv.weight", 2 * key + value, WIDTH)
    file.matrix(block + "attn_gate.weight", value, WIDTH)
    if kind == "qwen35":
        file.matrix(block + "ssm_beta.weight", state.heads, WIDTH)
        file.matrix(block + "ssm_alpha.weight", state.heads, WIDTH)
    else:
        file.matrix(block + "ssm_ba.weight", 2 * state.heads, WIDTH)
    file.matrix(block + "ssm_conv1d.weight", 2 * key + value, 4)
    file.uniform(block + "ssm_dt.bias", state.heads, -4, -1)
    file.uniform(block + "ssm_a", state.heads, -1, -0.05)
    file.full(block + "ssm_norm.weight", state.size)
    file.matrix(block + "ssm_out.weight", WIDTH, value, gain=2)


def _mamba(file: File, block: str, state: State) -> None:
    inner = state.size * state.heads
    mixed = inner + 2 * state.groups * state.size
    file.matrix(block + "ssm_in.weight", inner + mixed + state.heads, WIDTH)
    file.matrix(block + "ssm_conv1d.weight", mixed, 4)
    file.full(block + "ssm_conv1d.bias", mixed, 0)
    file.uniform(block + "ssm_dt.bias", state.heads, -4, -1)
    file.uniform(block + "ssm_a", (state.heads, 1), -1, -0.05)
    file.full(block + "ssm_d", (state.heads, 1))
    file.full(block + "ssm_norm.weight", (state.groups, inner // state.groups))
    file.matrix(block + "ssm_out.weight", WIDTH, inner, gain=2)


def _write_gemma(path: Path) -> None:
    source = fetch_model("gemma3")
    file = File(path, "gemma3")
    template = TEMPLATE.replace("<|im_start|>", "<start_of_turn>").replace("<|im_end|>", "<end_of_turn>")
    file.copy_fields(source, lambda name: name != "general.architecture" and not name.startswith("GGUF."), template)
    for tensor in gguf.GGUFReader(source).tensors:
        file.add(tensor.name, tensor.data, tensor.tensor_type)
    file.close()
