"""The engine's own policy on simulated machines: one, or as many as a router has. `simulate.py` runs it."""
