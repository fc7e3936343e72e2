"""Package data: the built-in demonstration model, `uma-story.gguf`. Its recipe is `examples/tiny_model`."""
