"""The credit window between a sequence and its reader: a slow reader pauses its own sequence and no other.

The decode thread spends a credit for each event and pauses the sequence at none. The Trio thread gives credits back as
the reader reads, half a window at a time.
"""

from __future__ import annotations

CREDITS = 64
"""Maximum events a reader can be behind before its sequence pauses."""
LOW_CREDITS = CREDITS // 4
"""With this many credits or fewer nothing is buffered: the reader gets each event at once, so that it can catch up."""
RETURNED_EVENTS = CREDITS // 2
"""Events read for which credit is given back in one command."""
