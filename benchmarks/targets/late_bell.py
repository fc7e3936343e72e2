"""UMA, but its readers are told of a batch's tokens in the middle of the next batch, and not as that begins.

Batches with a part of a prompt in them take 40 ms and more on the CPUs that are measured.
"""

from __future__ import annotations

import sys
import threading

from uma.cli import main
from uma.engine.delivery.bell import Bell

LATE_SEC = 0.02

if __name__ == "__main__":
    ring = Bell.ring
    setattr(Bell, "ring", lambda bell: threading.Timer(LATE_SEC, ring, (bell,)).start())  # noqa: B010
    sys.exit(main())
