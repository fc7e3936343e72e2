"""The servers that are measured, each behind the same small interface: start, ask, stop."""
