"""What the next batch holds: pure functions and small pure objects over plain data.

No clock, no llama, no I/O: time comes in as an argument, so the decode worker, tests and a simulator drive the same
code. `plan` is the whole of it; the parts it is made of stand in files of their own:

- `cost`   how long a batch will take on this machine, learnt from the ticks that ran
- `embed`  when texts to embed have their turn, and which request's come first
- `guard`  when a late stream suspends prefill, with hysteresis
- `mixed`  whether a decode step and a piece of the prompts share a batch
- `order`  admission and prefill priority, and preemption order
- `pace`   how often readers are given tokens while prompts are read, and which targets that keeps
- `lead`   how far to decode ahead of them
- `overload` when a request is refused, and when to try again
- `piece`  how much of the prompts a tick reads, and how far rows decode ahead for it
- `prefill` which prompts a tick reads, and how many tokens of each
- `plan`   one tick: decode rows, then prefill chunks within the budget of time and of KV cells
"""

from uma.engine.policy.cost import CostModel
from uma.engine.policy.guard import LatencyGuard
from uma.engine.policy.plan import Plan, Scheduler
from uma.engine.policy.state import PlainRow, Row, State, Targets

__all__ = ["CostModel", "LatencyGuard", "PlainRow", "Plan", "Row", "Scheduler", "State", "Targets"]
