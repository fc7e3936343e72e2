"""Memory of outputs that nothing has been written to yet.

A context has memory for the logits of a token of each of its sequence ids, 256 MiB with 256 ids of a vocabulary of
262,144 tokens, and llama.cpp fills it with zeros when it makes it. Most of these ids never have an output in the same
batch as all others. Pages given back to Linux read as zeros, and are there again as soon as they are written to.
"""

from __future__ import annotations

import ctypes

import llama_cpp.llama_cpp as lib

from uma.llama import backend
from uma.llama.context import Context
from uma.llama.hugepages import give_back

LOGIT_BYTES = 4


def give_back_outputs(context: Context) -> None:
    """Take no memory for outputs until they are computed. For a context that has not computed anything."""
    logits = ctypes.cast(lib.llama_get_logits(context.handle), ctypes.c_void_p).value
    if logits is None or backend.has_gpu():  # whose driver has pinned these pages
        return
    give_back(logits, logits + context.n_seq_max * context.model.vocab.n_tokens * LOGIT_BYTES)
