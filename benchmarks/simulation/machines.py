"""Machines as curves: how long a batch takes on each. Their figures come from measurements, named beside them."""

from __future__ import annotations

from bisect import bisect_left

import attrs

READ_TOKENS = 512
"""Prompt tokens that are computed at once while no row decodes."""

Curve = tuple[tuple[int, float], ...]
"""Points (tokens, milliseconds) as measured; straight lines between and beyond them."""


def at(curve: Curve, tokens: float) -> float:
    """The curve's milliseconds."""
    right = min(max(1, bisect_left(curve, (tokens, 0.0))), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    return max(0.0, y0 + (tokens - x0) * (y1 - y0) / (x1 - x0))


@attrs.frozen
class Machine:
    """How long a batch really takes, in milliseconds; the policy has to find out."""

    name: str
    decode: Curve
    """A batch of decode rows, before attention."""
    cell_ms: float
    """Each cell in use that a decode batch attends over."""
    prefill: tuple[tuple[int, Curve], ...]
    """A chunk of a prompt, at several positions in it."""
    cells: int
    places: int

    def decode_ms(self, rows: int, cells: int) -> float:
        """A batch of decode rows, with so many cells in use by all of them."""
        return at(self.decode, rows) + cells * self.cell_ms

    def prefill_ms(self, tokens: int, position: float) -> float:
        """A chunk after `position` tokens of its prompt."""
        return at(tuple((where, at(curve, tokens)) for where, curve in self.prefill), position)

    def mixed_ms(self, rows: int, tokens: int, position: float, cells: int) -> float:
        """Decode rows and a chunk in one batch: the weights are read once for both."""
        return self.prefill_ms(rows + tokens, position * tokens / (rows + tokens)) + cells * self.cell_ms

    def read_ms(self, prompt: int) -> float:
        """A whole prompt, alone, at the best rate."""
        return sum(self.prefill_ms(min(READ_TOKENS, prompt - done), done) for done in range(0, prompt, READ_TOKENS))


MACHINES = {
    # This repository's own measurements: a 100 M-parameter Llama (Q8_0), flash attention, 2 x86 cores. Decode was
    # measured with 300 cells a stream, which are taken off here.
    "cpu": Machine(
        "2-core CPU, 100 M Llama",
        decode=((1, 3.6), (8, 15.6), (32, 31.4)),
        cell_ms=1e-3,
        prefill=(
            (0, ((8, 12), (16, 15), (32, 25), (64, 43), (128, 80), (256, 164), (512, 357))),
            (1_000, ((8, 20), (16, 29), (32, 52), (64, 68), (128, 125), (256, 250), (512, 509))),
            (3_000, ((8, 35), (16, 59), (32, 111), (64, 128), (128, 223), (256, 441), (512, 970))),
        ),
        cells=16_384,
        places=32,
    ),
    # From what is published with llama.cpp's own changes for an RTX 4090 and Q4_0:
    # - 16 to 512 tokens, Llama 3 8B: ggml-org/llama.cpp#7676 (1,937 3,428 5,420 7,444 9,602 10,359 tokens/s);
    #   #15131 has about 8.2 ms for anything from 10 to 16 tokens.
    # - 2 and 4 tokens against 1: 5 % and 6 % more (Llama 7B, #6646: 146.4 279.2 552.0 tokens/s).
    # - 1 token after 32,768 others, Llama 3 8B: 9.73 ms (#17505, 102.8 tokens/s). Reading their 4 GiB of KV takes 4.3
    #   of it at the 1,008 GB/s of the card, which leaves 5.4 for a token without them.
    # - Attention of prefill: what #17505 has for an RTX 3090 (16 and 512 tokens after 32,768: 18.3 and 354 ms) comes to
    #   about 1.5e-5 ms a token and position; half of that is assumed here, for twice the tensor throughput.
    # Cells are those that fit beside the weights in 24 GB at 128 KiB each.
    "gpu": Machine(
        "RTX 4090, Llama 3 8B",
        decode=((1, 5.4), (2, 5.7), (4, 5.8), (10, 8.2), (16, 8.3), (32, 9.3), (64, 11.8), (128, 17.2)),
        cell_ms=1.3e-4,
        prefill=(
            (0, ((8, 7.4), (16, 8.3), (32, 9.3), (64, 11.8), (128, 17.2), (256, 26.7), (512, 49.4))),
            (4_000, ((8, 7.6), (16, 8.8), (32, 10.3), (64, 13.7), (128, 21.0), (256, 34.4), (512, 64.8))),
        ),
        cells=131_072,
        places=64,
    ),
}
