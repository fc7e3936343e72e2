"""The network: a Llama in plain PyTorch, small enough to be read in one go.

It follows llama.cpp's `llama` architecture to the letter (RMSNorm, grouped-query attention, SwiGLU, tied embeddings),
because the weights are exported without being rearranged. The one place where that matters is RoPE: llama.cpp rotates
*neighbouring* pairs (0,1), (2,3), ... for this architecture, not the two halves of a head, so this code does too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The model's dimensions; all multiples of 32, the block that Q8_0 quantizes."""

    vocab: int = 2048
    dim: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 704
    context: int = 2048
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class RMSNorm(nn.Module):  # type: ignore[misc]  # torch is not typed here
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [context, head_dim / 2]."""
    frequency = shape.rope_base ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angle = torch.arange(shape.context).float()[:, None] * frequency[None, :]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on neighbouring pairs. `x` is [batch, heads, tokens, head_dim]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(nn.Module):  # type: ignore[misc]  # torch is not typed here
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.q = nn.Linear(shape.dim, shape.heads * shape.head_dim, bias=False)
        self.k = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.v = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.q(x).view(batch, tokens, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class FeedForward(nn.Module):  # type: ignore[misc]  # torch is not typed here
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):  # type: ignore[misc]  # torch is not typed here
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(shape.dim, shape.norm_eps)
        self.attn = Attention(shape)
        self.ffn_norm = RMSNorm(shape.dim, shape.norm_eps)
        self.ffn = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin, mask)
        return x + self.ffn(self.ffn_norm(x))


class TinyLlama(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Token ids [batch, tokens] in, logits [batch, tokens, vocab] out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.dim, shape.norm_eps)
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init_weights()

    def _init_weights(self) -> None:
        """Small normal weights; what writes into the residual stream is scaled down by its depth."""
        residual_std = 0.02 / (2 * self.shape.layers) ** 0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=residual_std if into_residual else 0.02)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        tokens = ids.shape[1]
        x = self.embed(ids)
        cos, sin = self.cos[:tokens].to(x.dtype), self.sin[:tokens].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return F.linear(self.norm(x), self.embed.weight)

    def loss(self, ids: Tensor, mask: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Mean cross-entropy, in nats, of each token given those before it that `mask` lets it see.

        `ids` is [batch, tokens + 1]. `mask` is [batch, 1, tokens, tokens], true where one may look; None: all before.
        `weights`, like `ids`, says how much each token counts in the mean; None: all the same.
        """
        logits = self(ids[:, :-1], mask)
        each = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        if weights is None:
            return each.mean()
        counts = weights[:, 1:].flatten()
        return (each * counts).sum() / counts.sum()
