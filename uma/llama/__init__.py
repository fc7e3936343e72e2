"""The only package that uses llama.cpp: owners of what it allocates, and its errors in plain words.

`Model` reads a file, `Context` computes, `Batch` has the tokens to compute, `Sampler` chooses tokens. Each frees its
memory at the end of its `with` block. Nothing here knows of requests, sockets or Trio.
"""
