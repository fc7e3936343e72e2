"""The page in the browser: a chat and a live view of the engine, from its own files alone. `endpoints` is its entry."""
