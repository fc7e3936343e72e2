"""Memory for logits is taken when they are computed, and holds the same logits then."""

from __future__ import annotations

from array import array

import numpy as np
import psutil
from reference import real_model

from uma.llama.batch import Batch
from uma.llama.context import Context, ContextParams
from uma.llama.model import Model
from uma.llama.outputs import LOGIT_BYTES, give_back_outputs

SEQUENCES = 256
PARAMS = ContextParams(n_ctx=256, n_batch=32, n_ubatch=32, n_seq_max=SEQUENCES, n_threads=1, n_threads_batch=1)


def logits(context: Context) -> bytes:
    batch = Batch(32)
    for seq_id in range(4):
        batch.add(array("i", [5, 6, 7 + seq_id]), 0, seq_id, last_logits=True)
    context.decode(batch)
    return np.array(context.logits(4)).tobytes()


def test_a_context_takes_no_memory_for_logits_that_are_not_computed() -> None:
    with Model.load(real_model("smollm2")) as model:
        with Context(model, PARAMS) as context:
            expected = logits(context)
        with Context(model, PARAMS) as context:
            process = psutil.Process()
            before = process.memory_info().rss
            give_back_outputs(context)
            spared = before - process.memory_info().rss
            assert spared > 0.9 * SEQUENCES * model.vocab.n_tokens * LOGIT_BYTES
            assert logits(context) == expected
