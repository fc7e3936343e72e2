"""Training: fresh text for every step, so that nothing can be learnt by heart, and a measure of text never seen.

Documents are packed into rows, each seeing only itself. Most rows are short, because that is fast; every few steps the
rows are as long as the context, so that late positions are trained too. The seeds fix data, order and initial weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import dialogue
from .model import Shape, TinyLlama

STEP_TOKENS = 4096
ROW_TOKENS = 512
LONG_EVERY = 8  # one step in so many has rows of the whole context
PEAK_RATE = 2.5e-3
MATRIX_RATE = 1e-2
WARMUP_STEPS = 100
CHECKPOINT_STEPS = 100


def token_stream(tokenizer: Tokenizer, seed: int) -> Iterator[np.ndarray]:
    """Endless documents, as arrays of token ids."""
    rng = Random(seed)
    while True:
        batch = [dialogue.document(rng) for _ in range(500)]
        for encoded in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield np.array(encoded.ids, dtype=np.int64)


def rows(stream: Iterator[np.ndarray]) -> Iterator[Tensor]:
    """The batch of each step, [rows, tokens + 1]. A row begins with a document; its last one may be cut short."""
    step = 0
    while True:
        length = Shape().context if step % LONG_EVERY == LONG_EVERY - 1 else ROW_TOKENS
        yield torch.from_numpy(np.stack([_row(stream, length + 1) for _ in range(STEP_TOKENS // length)]))
        step += 1


def _row(stream: Iterator[np.ndarray], length: int) -> np.ndarray:
    documents: list[np.ndarray] = []
    while sum(map(len, documents)) < length:
        documents.append(next(stream))
    return np.concatenate(documents)[:length]


def within_document(ids: Tensor, first: int) -> Tensor:
    """The attention mask [rows, 1, tokens, tokens]: back to the beginning of one's own document and no further.

    Without it a model this small takes far longer to find out that "the fox" is the fox of *this* story.
    """
    document = (ids == first).cumsum(dim=1)
    same = document[:, :, None] == document[:, None, :]
    return same.tril()[:, None]


def schedule(step: int, steps: int) -> float:
    """The share of the peak rate: a short warm-up, then a cosine down to a fiftieth."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))


def optimizers(model: TinyLlama) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, which learns more from each token; AdamW for embedding and norms."""
    matrices = [weight for name, weight in model.named_parameters() if weight.dim() == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.02, momentum=0.95),
        torch.optim.AdamW(others, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train(shape: Shape, tokenizer: Tokenizer, tokens: int, seed: int, build: Path) -> TinyLlama:
    """Trains on that many tokens. Prints a line now and then, and leaves checkpoints in `build`."""
    torch.manual_seed(seed)
    model = TinyLlama(shape)
    compute_loss = torch.compile(model.loss, dynamic=False)
    optimizer_list = optimizers(model)
    peak = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizer_list]
    batches = rows(token_stream(tokenizer, seed))
    first = tokenizer.token_to_id(dialogue.BOS)
    steps = tokens // STEP_TOKENS
    began, recent = time.monotonic(), []
    for step in range(steps):
        for optimizer, rates in zip(optimizer_list, peak, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule(step, steps)
        ids = next(batches)
        mask = within_document(ids[:, :-1], first)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compute_loss(ids, mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizer_list:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent.append(loss.item())
        if (step + 1) % 25 == 0:
            rate = (step + 1) * STEP_TOKENS / (time.monotonic() - began)
            print(f"step {step + 1}/{steps}  loss {sum(recent) / len(recent):.4f}  {rate:.0f} tokens/s", flush=True)
            recent.clear()
        if (step + 1) % CHECKPOINT_STEPS == 0 or step + 1 == steps:
            torch.save(model.state_dict(), build / "model.pt")
    return model


@torch.no_grad()  # type: ignore[untyped-decorator]
def perplexity(model: TinyLlama, tokenizer: Tokenizer, documents: list[str]) -> float:
    """The perplexity per token, each document read alone from its beginning."""
    total, count = 0.0, 0
    for document in documents:
        ids = tokenizer.encode(document, add_special_tokens=False).ids[: model.shape.context]
        total += model.loss(torch.tensor([ids])).item() * (len(ids) - 1)
        count += len(ids) - 1
    return math.exp(total / count)
