"""UMA, but its readers are told of a batch's tokens in the middle of the next batch, and not as that begins.

Batches with a part of a prompt in them take 40 ms and more on the CPUs that are measured.
"""

from __future__ import annotations

import sys

from uma.cli import main
from uma.engine.delivery import bell

LATE_NS = 20_000_000

if __name__ == "__main__":
    bell.RING_NS = LATE_NS
    sys.exit(main())
