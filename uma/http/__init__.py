"""UMA over HTTP: OpenAI's, Anthropic's, Ollama's and llama-server's dialects, as an ASGI app over `types.Source`.

A dialect is a file: it turns its JSON into `Request`s and events back into its JSON. Everything that dialects share
(errors, streams, limits, keys, model names) is written once, beside them. `serve` is its entry. Nothing is imported
here: the page's child process needs a few of its files, and none of the server.
"""
