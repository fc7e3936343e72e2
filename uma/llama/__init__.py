"""The only package that touches llama.cpp: owners for what it allocates, and its errors in plain words.

`Model` reads a file, `Context` computes, `Batch` carries tokens in, `Sampler` chooses tokens out. Each frees what it
owns when its `with` block is left. Nothing here knows of requests, sockets or Trio.
"""
