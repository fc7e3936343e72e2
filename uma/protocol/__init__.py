"""The wire protocol without I/O: bytes and events in, events and bytes out. `session` shows how a program drives it."""
