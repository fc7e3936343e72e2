"""Training: fresh text for every step, so that nothing can be learnt by heart, and a measure of text never seen.

Documents are packed into rows, each seeing only itself. Most rows are short, because that is fast; every few steps the
rows are as long as the context, so that late positions are trained too. The seeds fix data, order and initial weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
CHECKPOINT_STEPS = 100


@dataclass(frozen=True)
class Stage:
    """A part of the training: how long, on what, and as how many tokens a short answer counts.

    Each begins with a short warm-up and optimizers that remember nothing. In the last part of it, as large as `fading`
    says, the rate falls to nothing.
    """

    steps: int
    mixture: tuple[int, ...]
    short_answer: int
    spelled: bool = False
    fading: float = 0.0
    rate: float = 1.0  # of the peak rate
    warm_up: int = 100  # steps


# Questions come first, for they need the most practice; then stories, whose heroes must be kept; then all together.
STAGES: tuple[Stage, ...] = (
    Stage(900, dialogue.QUESTIONS_FIRST, short_answer=100),
    Stage(1000, dialogue.BALANCED, short_answer=60),
    Stage(1700, dialogue.LAST, short_answer=100, spelled=True, fading=0.5),
)
# Further training of a model that is whole: at a lower rate, which falls from the beginning.
CONTINUATION: tuple[Stage, ...] = (
    Stage(200, dialogue.CONTINUED, short_answer=100, spelled=True, warm_up=20, fading=1.0, rate=0.4),
)


def tokens(stages: tuple[Stage, ...]) -> int:
    return STEP_TOKENS * sum(stage.steps for stage in stages)


def token_stream(tokenizer: Tokenizer, stage: Stage, seed: int) -> Iterator[np.ndarray]:
    """Endless documents, as arrays [2, tokens]: token ids, and how much each of them counts."""
    rng = Random(seed)
    marks = _Marks(tokenizer, stage.short_answer)
    while True:
        batch = [dialogue.document(rng, stage.mixture, spelled=stage.spelled) for _ in range(500)]
        for encoded in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            ids = np.array(encoded.ids)
            yield np.stack((ids, marks.weights(ids)))


class _Marks:
    """Which tokens matter. In a chat those of the answers do; what people ask need not be foretold.

    A short answer counts as much as a story of some length: for its few tokens the whole question must be understood.
    """

    def __init__(self, tokenizer: Tokenizer, short_answer: int) -> None:
        self._short_answer = short_answer
        self._turn, self._end = tokenizer.token_to_id(dialogue.TURN), tokenizer.token_to_id(dialogue.END)
        self._answer = tokenizer.encode("assistant", add_special_tokens=False).ids[0]

    def weights(self, ids: np.ndarray) -> np.ndarray:
        turns = np.flatnonzero(ids == self._turn)
        if not len(turns):
            return np.ones(len(ids))
        weights = np.full(len(ids), 0.2)
        for begin, end in zip(turns, np.flatnonzero(ids == self._end), strict=True):
            if ids[begin + 1] == self._answer:
                weights[begin + 1 : end + 1] = np.clip(self._short_answer / (end - begin), 1.0, 4.0)
        return weights


def rows(stream: Iterator[np.ndarray]) -> Iterator[tuple[Tensor, Tensor]]:
    """The batch of each step: token ids and weights, each [rows, tokens + 1].

    A row begins with a document; its last one may be cut short.
    """
    step = 0
    while True:
        length = Shape().context if step % LONG_EVERY == LONG_EVERY - 1 else ROW_TOKENS
        batch = np.stack([_row(stream, length + 1) for _ in range(STEP_TOKENS // length)])
        yield torch.from_numpy(batch[:, 0].astype(np.int64)), torch.from_numpy(batch[:, 1].astype(np.float32))
        step += 1


def _row(stream: Iterator[np.ndarray], length: int) -> np.ndarray:
    documents: list[np.ndarray] = []
    while sum(document.shape[1] for document in documents) < length:
        documents.append(next(stream))
    return np.concatenate(documents, axis=1)[:, :length]


def within_document(ids: Tensor, first: int) -> Tensor:
    """The attention mask [rows, 1, tokens, tokens]: back to the beginning of one's own document and no further.

    Without it a model this small takes far longer to find out that "the fox" is the fox of *this* story.
    """
    document = (ids == first).cumsum(dim=1)
    same = document[:, :, None] == document[:, None, :]
    return same.tril()[:, None]


def schedule(step: int, stage: Stage) -> float:
    """The share of the peak rate: a short warm-up, the peak itself, and at the end straight down to nearly nothing."""
    warm = (step + 1) / stage.warm_up
    left = (stage.steps - step) / (stage.steps * stage.fading) if stage.fading else 1.0
    return stage.rate * max(0.01, min(1.0, warm, left))


def optimizers(model: TinyLlama) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, which learns more from each token; AdamW for embedding and norms."""
    matrices = [weight for name, weight in model.named_parameters() if weight.dim() == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.02, momentum=0.95),
        torch.optim.AdamW(others, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train(model: TinyLlama, tokenizer: Tokenizer, stages: tuple[Stage, ...], seed: int, build: Path) -> None:
    """The stages one after another. Prints a line now and then, and leaves checkpoints in `build`."""
    for number, stage in enumerate(stages):
        train_stage(model, tokenizer, stage, seed + number, build)


def train_stage(model: TinyLlama, tokenizer: Tokenizer, stage: Stage, seed: int, build: Path) -> None:
    compute_loss = torch.compile(model.loss, dynamic=False)
    optimizer_list = optimizers(model)
    peak = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizer_list]
    batches = rows(token_stream(tokenizer, stage, seed))
    first = tokenizer.get_vocab()[dialogue.BOS]
    began, recent = time.monotonic(), []
    for step in range(stage.steps):
        for optimizer, rates in zip(optimizer_list, peak, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule(step, stage)
        ids, weights = next(batches)
        mask = within_document(ids[:, :-1], first)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compute_loss(ids, mask, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizer_list:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent.append(loss.item())
        if (step + 1) % 25 == 0:
            rate = (step + 1) * STEP_TOKENS / (time.monotonic() - began)
            print(
                f"step {step + 1}/{stage.steps}  loss {sum(recent) / len(recent):.4f}  {rate:.0f} tokens/s", flush=True
            )
            recent.clear()
        if (step + 1) % CHECKPOINT_STEPS == 0 or step + 1 == stage.steps:
            torch.save(model.state_dict(), build / "model.pt")


@torch.no_grad()  # type: ignore[untyped-decorator]
def perplexity(model: TinyLlama, tokenizer: Tokenizer, documents: list[str]) -> float:
    """The perplexity per token, each document read alone from its beginning."""
    total, count = 0.0, 0
    for document in documents:
        ids = tokenizer.encode(document, add_special_tokens=False).ids[: model.shape.context]
        total += model.loss(torch.tensor([ids])).item() * (len(ids) - 1)
        count += len(ids) - 1
    return math.exp(total / count)
