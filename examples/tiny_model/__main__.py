"""The whole recipe in one command: vocabulary, training, measures, GGUF file, page of samples.

With `--continue-from` a model that the recipe made before is trained further instead, with the vocabulary it has.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from random import Random

# Before torch is loaded: threads that wait must not spin, or the training starves on a machine that others use too.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from . import dialogue, samples
from . import tokenizer as vocabulary
from .export import export, restore
from .model import Shape, TinyLlama
from .train import CONTINUATION, STAGES, perplexity, tokens, train

HERE = Path(__file__).parent
SEED = 2026
HELD_OUT_SEED = 77_000_001


def main() -> None:
    options = _options()
    options.build.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    began = time.monotonic()
    torch.manual_seed(SEED)
    if options.continue_from:
        stages, (model, tokenizer) = CONTINUATION, restore(options.continue_from)
    else:
        stages, model = STAGES, TinyLlama(Shape())
        tokenizer = vocabulary.train(Shape().vocab, documents=30_000, seed=SEED)
    tokenizer.save(str(options.build / "tokenizer.json"))
    train(model, tokenizer, stages, SEED, options.build)
    minutes = (time.monotonic() - began) / 60
    rng = Random(HELD_OUT_SEED)
    seen_kinds = perplexity(model, tokenizer, [dialogue.document(rng, dialogue.LAST, spelled=True) for _ in range(400)])
    new_pairs = perplexity(model, tokenizer, [dialogue.held_out_document(rng) for _ in range(150)])
    export(model, tokenizer, options.gguf)
    print(f"{tokens(stages)} tokens in {minutes:.1f} minutes; {options.gguf.stat().st_size} bytes")
    print(f"held-out perplexity {seen_kinds:.3f}; on heroes in places they were never trained in {new_pairs:.3f}")
    samples.write(options.gguf, options.samples)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.tiny_model", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--continue-from", type=Path, metavar="GGUF", help="train this file further, not from nothing")
    parser.add_argument("--build", type=Path, default=HERE / "build", help="where vocabulary and checkpoints go")
    parser.add_argument("--gguf", type=Path, default=HERE.parent.parent / "uma" / "data" / "uma-story.gguf")
    parser.add_argument("--samples", type=Path, default=HERE / "SAMPLES.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
