"""The contracts between an engine and what stands in front of it: cards, requests, outputs, KV events, health, metrics.

Pure data and pure functions: no I/O, no clock, no llama.cpp. `docs/contracts.md` is the page for people.
"""
