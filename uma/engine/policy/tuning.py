"""Every number of the scheduler, in one place.

Each says what it is, in which unit, and what it is worth. Shares are of time or of a target, between 0 and 1.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Tuning:
    """What the scheduler is tuned by. The defaults were chosen with `benchmarks.simulate` and on real models."""

    # The pace of streams beside prompts

    pace_share: float = 0.9
    """Time between two tokens of a stream while prompts are read, as a share of its target. The rest is for timers and
    wakeups."""
    longest_pace_ms: float = 250.0
    """Maximum time (ms) between paced tokens. A longer target asks for throughput, not for slower reading."""
    prompt_share: float = 0.4
    """Minimum share of the time for prompts beside streams with default targets. No request names those, so on a slow
    machine they give way."""
    lower_prompt_share: float = 0.2
    """Share of the time for prompts that are all of lower lanes than the streams."""
    lower_isolated_share: float = 0.25
    """Maximum share of the time for reproducible requests, each batch of which holds up all others, while sequences of
    higher lanes run."""
    least_prompt_share: float = 0.1
    """Share of the time for prompts beside a target that a request names. It bounds the wait for a first token."""
    late_decode_share: float = 0.25
    """Minimum share of the time for decoding where it alone takes longer than the target; up to twice as much where
    streams are as many as prompts. It bounds what many prompts do to a stream."""
    neighbour_prompt_share: float = 0.875
    """Minimum share of the time for prompts while another program takes a core, at most until `neighbour_pace_ms`."""
    neighbour_pace_ms: float = 200.0
    """Longest time between tokens (ms) to which `neighbour_prompt_share` slows a stream."""

    # Decoding ahead

    safety: float = 1.1
    """Time that tokens computed ahead last, as a multiple of a piece's predicted time. Below 1 readers would wait."""
    comfort: float = 1.5
    """Factor of safety where the longest lead allows it: on a busy machine some batches take longer than predicted.
    With 1.1 the worst gap of simulated storms is 1.1 to 2.4 times as long where one batch in thirty takes six times as
    long; prompts are read as fast within 1 %."""
    lead_steps: int = 8
    """Maximum tokens of a row that are computed and not delivered: they are lost when the reader cancels. Twice as many
    decode steps are added before a piece at most, because steps take longer than predicted."""
    lead_ms: float = 2_000.0
    """Maximum lead (ms) of more than `lead_steps` tokens, up to twice as many: enough to cover a tile of a prompt where
    a step takes half of its reader's target."""

    # Pieces of prompts

    piece_share: float = 0.125
    """Usual longest time of a piece, as a share of the target for the first token: the next request waits for its
    end."""
    shorter: float = 0.6
    """Factor of `piece_share` while a reader's next request is expected. Without it the 95th percentile of first tokens
    of chats beside a document is 1.4 times as long (simulated, 100 M parameters on two cores)."""
    expected_ms: float = 2_000.0
    """Time (ms) after an answer in which its reader's next request is expected."""
    patience: float = 2.0
    """Maximum time of a piece, as a multiple of the usual one, where it reads faster; twice that for one whole tile."""
    worth_waiting: float = 0.25
    """Minimum gain in throughput of a piece that is longer than usual, as a share of its relative excess time."""
    piece_steps: float = 4.0
    """Minimum time of a piece beside streams that are late anyway, in decode steps of one row."""

    encode_ms: float = 60.0
    """Time (ms) of a piece of a picture's encoding, between two ticks: a few tokens computed ahead cover it, and a
    request that comes meanwhile waits no longer."""

    # Late streams

    late: float = 1.5
    """Time since a stream's last token, as a multiple of its target, from which no prompt is read."""
    held_ms: float = 2_000.0
    """Maximum time (ms) between two tokens of a background stream, whatever else is at risk."""

    # Order of service

    due_factor: float = 4.0
    """A prompt without a target is due when it has waited this many times as long as reading it takes, so that short
    ones overtake long ones that are not due."""
    lane_delay_ms: float = 60_000.0
    """Waiting time (ms) after which a request counts as one lane higher. It bounds starvation."""
    give_way_ms: float = 500.0
    """Minimum time (ms) that a request waits before background rows are preempted for it: on a machine that is not full
    a slot is free by then."""
    reserve_tokens: int = 16
    """Cells left free for each running row before another begins."""


TUNING = Tuning()
"""The defaults."""
