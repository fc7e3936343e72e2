"""Contracts between an engine and its frontends and routers: cards, requests, outputs, KV events, health, load.

Pure data and pure functions: no I/O, no clock, no llama.cpp. `docs/contracts.md` describes them for users.
"""
