"""The recipe for UMA's built-in demonstration model: `python -m examples.tiny_model`."""
