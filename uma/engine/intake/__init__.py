"""Intake: from a request to the decode thread's queue, on the Trio thread."""
