"""Measures UMA against raw `llama_decode` and against the servers a user would otherwise pick, side by side in one run.

`python -m benchmarks` is the one command; `README.md` says what each scenario measures and shows the last run.
"""
