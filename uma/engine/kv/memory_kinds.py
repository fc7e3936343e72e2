"""Kinds of memory that llama.cpp has for sequences, and what each can do with its cells.

| kind | models | where a sequence can be cut, and another resume |
| --- | --- | --- |
| `Attention` | with keys and values of every token | behind any token |
| `GuardedWindow` | with sliding windows, in one buffer | the same, if the window before that token is complete |
| `Checkpointed` | with recurrent states, and small windows | at ends of sequences, and at checkpoints |

None is cut inside of a picture. `memory_kind` chooses the kind when a context is made; whatever differs by kind is a
method of that object. In one buffer (unified KV) several ids can hold the same cells. With a buffer for each id (split
KV) a copy goes through a state, which is there at once. Not through llama.cpp's own copy between buffers: it happens
with the next batch, and overwrites whatever was done with the cells until then.

Positions come from a `Prefix`, which is made of the tokens: with M-RoPE a picture has fewer positions than tokens. Not
from a table by id: it once had the positions of another request's pictures.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Generator, Iterator, Sequence
from typing import ClassVar

from uma.engine.kv.pictures import outside, position_in
from uma.engine.kv.prefix_tree import Match, Node, Prefix
from uma.engine.kv.snapshots import MAX_COPY_BYTES
from uma.llama.backend import MAX_SEQUENCES
from uma.llama.context import Context

PLENTY = 2**31 - 1
"""Number of cells of memory that never runs short."""
GUARD_SHARE = 4
"""Divisor of the window that gives the cells a guard can lag behind: a call for each token would cost too much."""
CHUNKED = ("llama4",)
"""Architectures whose window does not slide but restarts: all cells before it leave it at once."""


class Attention:
    """Sequence ids of a context, and the cells they hold: `prefix_tree.Cells`. Belongs to the decode thread."""

    can_be_cut: ClassVar[bool] = True
    """Whether a sequence can be cut, and another resume, behind any token."""
    survives_abort: bool = True
    """Whether the remains of an aborted batch can be cut off its sequences. Not with recurrent states: they change in
    place, and llama.cpp also moves states of sequences outside of the batch."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.is_split = not context.params.kv_unified
        """Whether each id has a buffer of its own: sequences of a batch must then be in the order of their ids, or it
        is computed in pieces."""
        self.total = PLENTY if self.is_split else context.n_ctx
        """Cells that all sequences share; with a buffer for each they never run short."""
        self.max_seq_cells = context.n_ctx_seq
        """Maximum cells of one sequence."""
        self._free_ids = list(range(context.n_sequences))
        self._scratch: int | None = None
        """Id through which parts of a state pass; None where sequences need all ids."""
        # (Where sequences need all ids, parts pass through a free one, or wait: see `can_load`. Without that check a
        # snapshot that could not be loaded evicted cache for each request with its prefix.)
        if self.can_be_cut and not self.is_split and 1 < context.n_sequences < MAX_SEQUENCES:
            self._scratch = self._free_ids.pop()
        self._n_ids = len(self._free_ids)

    # Ids

    @property
    def used_ids(self) -> int:
        """Number of sequence ids taken."""
        return self._n_ids - len(self._free_ids)

    @property
    def lowest_free_id(self) -> int | None:
        """Id that `take_id` would return; None if all are taken."""
        return self._free_ids[0] if self._free_ids else None

    def take_id(self) -> int:
        """Take the lowest free id."""
        return heapq.heappop(self._free_ids)

    def free(self, seq_id: int) -> None:
        """Empty an id, and return it."""
        self._empty(seq_id)
        heapq.heappush(self._free_ids, seq_id)

    def _empty(self, seq_id: int) -> None:
        self._context.seq_rm(seq_id)

    # Where sequences resume, and are cut

    def resume_point(self, tokens: array[int], match: Match) -> tuple[Node, int]:
        """Node and length of the longest prefix of `tokens` at which a sequence can resume; never all of them, because
        the last gives the logits.
        """
        node, length = match.node, outside(tokens, min(match.length, len(tokens) - 1))
        while node.parent is not None and node.start >= length:
            node = node.parent
        return node, length

    def end_before(self, node: Node, length: int) -> tuple[Node, int]:
        """Node and length to which an id that ends in `node` can be cut: at most `length` tokens, and at least the path
        to the node above.
        """
        assert node.parent is not None
        keep = outside(node.tokens, max(0, length - node.start))
        return (node, node.start + keep) if keep > 0 else (node.parent, node.start)

    def can_resume_at(self, seq_id: int, position: int) -> bool:
        """Whether a sequence that continues at this position, or shares what is before it, would compute correctly:
        windows before it are complete, and a recurrent state is that of the token before.
        """
        return True

    def copy(self, source: int, target: int, prefix: Prefix) -> bool:
        """See `Cells.copy`."""
        if self.is_split:
            is_there = self._context.state_set(target, self._context.state_get(source))
        else:
            self._context.seq_cp(source, target, 0, prefix.position)
            is_there = True
        if is_there and (self.is_split or prefix.checkpoint is not None):
            is_there = self.cut(target, prefix)
        if is_there:
            self.grown(target, prefix.position)
        else:
            self._empty(target)
        return is_there

    def cut(self, seq_id: int, prefix: Prefix) -> bool:
        """See `Cells.cut`."""
        return self._context.seq_rm(seq_id, prefix.position, -1)

    def cut_last(self, seq_id: int, prefix: Prefix) -> None:
        """Cut tokens of a draft, of the batch just computed, off a sequence; if it has a state, at most
        `Context.rolled_back`.

        llama.cpp reports success, but does not cut a state, for an older batch, and where a later ubatch of the same
        batch has moved the state. So a batch of drafts is one ubatch (`ModelRunner.verify`).
        """
        self._context.seq_rm(seq_id, prefix.position, -1)

    def grown(self, seq_id: int, length: int) -> None:
        """Note that a batch has given a sequence so many cells."""

    # Checkpoints

    def checkpoint_size(self, seq_id: int) -> int:
        """Bytes of a checkpoint."""
        return self._context.part_size(seq_id)

    def checkpoint(self, seq_id: int) -> bytes:
        """Checkpoint of a sequence's end, from which another sequence, or later this one, can resume there."""
        return self._context.part_get(seq_id)

    # States, of which snapshots consist

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a state for each token, without those of any length; at least 1."""
        params = self._context.params
        return max(1, self._context.model.shape.bytes_per_token(params.cache_type_k, params.cache_type_v))

    def state_size(self, tokens: int) -> int:
        """Expected bytes of the state of so many tokens, by the model's shape."""
        return tokens * self.bytes_per_token + self._context.model.shape.state_bytes

    @property
    def _part_tokens(self) -> int:
        """Positions in one part of a state: as many as are copied in some 10 ms."""
        return max(1, MAX_COPY_BYTES // self.bytes_per_token)

    def states(self, seq_id: int) -> Iterator[bytes]:
        """Copy all that a sequence holds, part by part. Batches can run between two parts."""
        if self._scratch is None:
            yield self._context.state_get(seq_id)
            return
        for start in range(0, self._context.seq_pos_max(seq_id) + 1, step := self._part_tokens):
            self._context.seq_cp(seq_id, self._scratch, start, start + step)
            part = self._context.state_get(self._scratch)
            self._context.seq_rm(self._scratch)
            yield part

    def can_load(self, parts: Sequence[bytes]) -> bool:
        """Whether there is an id through which the parts of a state can pass, beside the one to load."""
        return len(parts) == 1 or self._scratch is not None or len(self._free_ids) > 1

    def load(self, seq_id: int, parts: Sequence[bytes]) -> Generator[int, None, None]:
        """Load parts of a state into an empty sequence, one with each step: yields the part's bytes, or 0 if it does
        not fit, which leaves the sequence in an unknown state. Batches can run between two parts. With several parts
        `can_load` must be true before the sequence takes its id.
        """
        if self._scratch is None and len(parts) > 1 and not self._free_ids:
            yield 0  # others have taken ids since `can_load` was checked
            return
        passage = self.take_id() if self._scratch is None and len(parts) > 1 else self._scratch
        try:
            for part in parts:
                # The first part goes in directly: a single part needs no second id.
                through = seq_id if part is parts[0] or passage is None else passage
                is_there = self._context.state_set(through, part)
                if through != seq_id:
                    self._context.seq_cp(through, seq_id)
                    self._context.seq_rm(through)
                self.grown(seq_id, self._context.seq_pos_max(seq_id) + 1)
                yield len(part) if is_there else 0
        finally:
            if passage is not None and passage != self._scratch:
                self.free(passage)


class GuardedWindow(Attention):
    """Cells of a model with sliding windows, all of which stay as long as a sequence holds them.

    llama.cpp gives a cell that has left its sequence's window to any sequence that needs one (`find_slot` in
    llama-kv-cache.cpp), and everything before it in its sequence is then lost. But never a cell that two ids hold. So
    each id has a guard, in the upper half of the ids, that holds its cells too.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._window = Window(context)
        self._stride = self._window.guard_stride
        self._guarded = [0] * context.n_sequences
        """Number of cells of each id that its guard holds too."""

    def resume_point(self, tokens: array[int], match: Match) -> tuple[Node, int]:
        """See `Attention`. If the window is incomplete, everything is computed again."""
        node, length = super().resume_point(tokens, match)
        if length and not self.can_resume_at(node.any_id(), position_in(tokens, length)):
            return list(node.path())[-1], 0
        return node, length

    def can_resume_at(self, seq_id: int, position: int) -> bool:
        """See `Attention`."""
        return self._window.is_whole(seq_id, position)

    def cut(self, seq_id: int, prefix: Prefix) -> bool:
        """See `Cells.cut`."""
        if not self.can_resume_at(seq_id, prefix.position) or not super().cut(seq_id, prefix):
            return False
        self._unguard(seq_id, prefix.position)
        return True

    def grown(self, seq_id: int, length: int) -> None:
        """See `Attention`. The guard takes the cells that may soon leave the window."""
        if length - self._guarded[seq_id] >= self._stride:
            end = min(length, self._context.seq_pos_max(seq_id) + 1)  # positions, of which M-RoPE has fewer than tokens
            self._context.seq_cp(seq_id, self._guard(seq_id), self._guarded[seq_id], end)
            self._guarded[seq_id] = end

    def _empty(self, seq_id: int) -> None:
        super()._empty(seq_id)
        self._unguard(seq_id, 0)

    def _unguard(self, seq_id: int, position: int) -> None:
        if self._guarded[seq_id] > position:
            self._context.seq_rm(self._guard(seq_id), position, -1)
            self._guarded[seq_id] = position

    def _guard(self, seq_id: int) -> int:
        return self._context.n_sequences + seq_id

    @property
    def _part_tokens(self) -> int:
        return self._window.tokens  # of a longer run llama.cpp writes what its end attends to


class Checkpointed(Attention):
    """Cells of models whose sequences have more than cells: a recurrent state, which exists only for the end, or a
    small window of its own, whose older tokens are overwritten.
    """

    can_be_cut = False

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._window = None if context.model.shape.has_states else Window(context)
        self.survives_abort = self._window is not None
        # Cells of a window that ids share would never become free. And if llama.cpp keeps states of a batch's last
        # tokens, so that a draft can be cut off, it selects one only with the next batch: another id that shares them
        # would get the wrong one.
        self._copies_part = self._window is not None or context.rolled_back > 0

    def resume_point(self, tokens: array[int], match: Match) -> tuple[Node, int]:
        """See `Attention`."""
        node = match.end
        while outside(tokens, node.end) < node.end:  # a sequence that is being read ends inside of a picture
            assert node.parent is not None
            node = next(above for above in node.parent.path() if above.parent is None or above.is_end)
        return node, node.end

    def end_before(self, node: Node, length: int) -> tuple[Node, int]:
        """See `Attention`."""
        assert node.parent is not None
        above = next(other for other in node.parent.path() if other.parent is None or other.is_end or other.branches)
        return above, above.end

    def can_resume_at(self, seq_id: int, position: int) -> bool:
        """See `Attention`."""
        if self._window is not None:
            return self._window.is_whole(seq_id, position)
        return self._context.seq_pos_max(seq_id) < position

    def copy(self, source: int, target: int, prefix: Prefix) -> bool:
        """See `Cells.copy`."""
        if prefix.checkpoint is None and self._copies_part and not self.is_split:
            prefix = prefix._replace(checkpoint=self._context.part_get(source))
        return super().copy(source, target, prefix)

    def cut(self, seq_id: int, prefix: Prefix) -> bool:
        """See `Cells.cut`."""
        if prefix.checkpoint is not None and not self._context.part_set(seq_id, prefix.checkpoint):
            return False
        return self.can_resume_at(seq_id, prefix.position) and super().cut(seq_id, prefix)


class Window:
    """Sliding window of a context's layers."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.tokens = context.model.shape.window_tokens
        self._is_chunked = context.model.shape.architecture in CHUNKED

    @property
    def guard_stride(self) -> int:
        """Maximum cells at a sequence's end that its guard can lack: they are within the window."""
        return 1 if self._is_chunked else max(1, self.tokens // GUARD_SHARE)

    def is_whole(self, seq_id: int, position: int) -> bool:
        """Whether all cells that a token at this position attends to are there."""
        first = position // self.tokens * self.tokens if self._is_chunked else position - self.tokens + 1
        return self._context.seq_pos_min(seq_id) <= max(0, first)


def memory_kind(context: Context) -> Attention:
    """Memory of a context, by its kind."""
    return kind_of(context)(context)


def kind_of(context: Context) -> type[Attention]:
    """Kind of a context's memory."""
    if context.params.guards_window:
        return GuardedWindow
    return Attention if context.model.shape.memory == "attention" else Checkpointed
