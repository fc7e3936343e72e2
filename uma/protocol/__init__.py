"""The wire, without I/O: bytes and events in, events and bytes out. `session` says how a program drives it."""
