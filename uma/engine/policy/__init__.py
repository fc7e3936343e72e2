"""What the next batch holds: pure functions and small pure objects over plain data.

- `scheduler` one tick: decode rows, how far ahead of their readers, and which piece of which prompts is read; turns of
              texts to embed
- `lead`      the pace of streams beside prompts, and the arithmetic of decoding ahead
- `order`     whose turn it is: lanes, fair shares among clients, deadlines, preemption
- `isolated`  turns of reproducible requests, which have a context of their own
- `cost`      how long a batch takes on this machine, learnt from those that ran
- `tuning`    every number of these
- `state`     their input: rows, cells, targets, and the service that each client has received
"""

from uma.engine.policy.cost import CostModel
from uma.engine.policy.scheduler import Plan, Scheduler
from uma.engine.policy.state import Row, State, Targets

__all__ = ["CostModel", "Plan", "Row", "Scheduler", "State", "Targets"]
