"""The only room that touches llama.cpp: owners for what it allocates, and its errors in plain words.

`Model` reads a file, `Context` computes, `Batch` carries tokens in, `Sampler` chooses tokens out. Each frees what it
owns when its `with` block is left. Nothing here knows of requests, sockets or Trio.
"""

from __future__ import annotations

import os

SPINS = "1000"
"""How often libgomp's threads look again, at each step of the graph, before they sleep: some 30 microseconds.

Its default, 300,000, is no faster on an idle machine and a disaster on a busy one: a thread that waits for another
whose core is taken by some other program burns its own core all the while. Measured on 2 cores, decode of one sequence
of a 100 M model: 3.5 ms either way when idle; beside a busy program 14 ms (worst 18), by default 40 to 90 (worst
1,200).
"""


def _load_library() -> None:
    """Load llama.cpp, with libgomp told how long to spin unless the user has told it.

    libgomp reads its variables once, when it is loaded; the variable is taken away again so that no child inherits it.
    """
    told = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    if not told:
        os.environ["GOMP_SPINCOUNT"] = SPINS
    import llama_cpp.llama_cpp  # noqa: F401, PLC0415  (must come after the variable)

    if not told:
        del os.environ["GOMP_SPINCOUNT"]


_load_library()
