"""The decode thread: its loop and everything that it alone touches."""
