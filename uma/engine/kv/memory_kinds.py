"""Kinds of memory that llama.cpp keeps of sequences, and what can be done with the cells of each.

| kind | models | a sequence can be cut, and another begin with it |
| --- | --- | --- |
| `Attention` | with keys and values of every token | behind any token |
| `GuardedWindow` | with sliding windows, in one buffer | the same, where the window before that token is whole |
| `Checkpointed` | with recurrent states, and small windows | where a sequence ends, and where a checkpoint was taken |

None is cut inside of a picture. `memory_kind` chooses one when a context is made; what differs by kind is asked of that
object. In one buffer (unified KV) several ids hold the same cells. With a buffer for each id (split KV) a copy goes
through a state, which is there at once. llama.cpp's own copy between buffers is made with the next batch: over whatever
is done with the cells until then.

Positions come with each `Prefix`, which is made of the tokens themselves: with M-RoPE a picture has fewer positions
than tokens. Kept beside the ids, they were once those of another request's pictures.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Generator, Iterator, Sequence
from typing import ClassVar

from uma.engine.kv.pictures import outside, position_in
from uma.engine.kv.prefix_tree import Match, Node, Prefix
from uma.engine.kv.snapshots import MOST_COPY_BYTES
from uma.llama.backend import MAX_SEQUENCES
from uma.llama.context import Context

PLENTY = 2**31 - 1
"""Number of cells that never run short."""
GUARD_SHARE = 4
"""Part of a window by which a guard may lag behind: a call for each token would cost more than it has to."""
CHUNKED = ("llama4",)
"""Architectures whose window does not slide but restarts, so that all cells before it leave it at once."""


class Attention:
    """Sequence ids of a context, and the cells that they hold: `prefix_tree.Cells`. Belongs to the decode thread."""

    can_be_cut: ClassVar[bool] = True
    """Whether a sequence can be cut, and another begin, behind any token."""
    survives_abort: bool = True
    """Whether what a batch that was broken off has left can be cut off its sequences. Recurrent states are changed in
    place, and llama.cpp moves those of sequences that are not in the batch to compute it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.is_split = not context.params.kv_unified
        """Whether each id has a buffer of its own: a batch must hold sequences in the order of their ids then, or be
        computed in pieces."""
        self.total = PLENTY if self.is_split else context.n_ctx
        """Cells that all sequences share; with a buffer for each they never run short."""
        self.max_seq_cells = context.n_ctx_seq
        """Maximum cells of one sequence."""
        self._free_ids = list(range(context.n_sequences))
        self._scratch: int | None = None
        """Id that holds cells only while a part of a state passes through it; None where sequences need all ids."""
        # (Where sequences need all ids, parts pass through a free one, or wait: `can_load`. Tried in vain, a snapshot
        # evicted cache for each request that began like it.)
        if self.can_be_cut and not self.is_split and 1 < context.n_sequences < MAX_SEQUENCES:
            self._scratch = self._free_ids.pop()
        self._n_ids = len(self._free_ids)

    # Ids

    @property
    def used_ids(self) -> int:
        """Sequence ids taken."""
        return self._n_ids - len(self._free_ids)

    @property
    def lowest_free_id(self) -> int | None:
        """The id that `take_id` would give; None where all are taken."""
        return self._free_ids[0] if self._free_ids else None

    def take_id(self) -> int:
        """The lowest free id."""
        return heapq.heappop(self._free_ids)

    def free(self, seq_id: int) -> None:
        """Drop all that an id holds, and give it back."""
        self._empty(seq_id)
        heapq.heappush(self._free_ids, seq_id)

    def _empty(self, seq_id: int) -> None:
        self._context.seq_rm(seq_id)

    # Where sequences begin and end

    def resume_point(self, tokens: array[int], match: Match) -> tuple[Node, int]:
        """Node and length of the longest prefix of `tokens` behind which a sequence can begin; never all of them, since
        the last gives the logits.
        """
        node, length = match.node, outside(tokens, min(match.length, len(tokens) - 1))
        while node.parent is not None and node.start >= length:
            node = node.parent
        return node, length

    def end_before(self, node: Node, length: int) -> tuple[Node, int]:
        """Node and length of the longest path to which an id that ends in `node` can be cut: of at most `length` tokens
        and no shorter than the path to the node above.
        """
        assert node.parent is not None
        keep = outside(node.tokens, max(0, length - node.start))
        return (node, node.start + keep) if keep > 0 else (node.parent, node.start)

    def can_resume_at(self, seq_id: int, position: int) -> bool:
        """Whether a sequence that goes on at this position, or another that shares what is before it, would compute
        what it should: all that layers with a window attend to is there, and a state is that of the token before.
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
        """Cut tokens of the batch just computed off a sequence: a draft's, at most `Context.rolled_back` of them where
        it has a state.

        Of an older batch llama.cpp says that it has cut a state, too, and has not; nor where a later piece (ubatch) of
        the same batch has moved it. So a batch of drafts has one piece (`ModelRunner.verify`).
        """
        self._context.seq_rm(seq_id, prefix.position, -1)

    def grown(self, seq_id: int, length: int) -> None:
        """A batch has given a sequence so many cells."""

    # Checkpoints

    def checkpoint_size(self, seq_id: int) -> int:
        """Bytes of a checkpoint."""
        return self._context.part_size(seq_id)

    def checkpoint(self, seq_id: int) -> bytes:
        """Checkpoint of a sequence's end: with it another sequence, or this one later, can go on there."""
        return self._context.part_get(seq_id)

    # States: what snapshots are made of

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a state for each token, beside what it takes whatever its length; at least 1."""
        params = self._context.params
        return max(1, self._context.model.shape.bytes_per_token(params.cache_type_k, params.cache_type_v))

    def state_size(self, tokens: int) -> int:
        """Bytes of the state of so many tokens, as the model's shape lets expect."""
        return tokens * self.bytes_per_token + self._context.model.shape.state_bytes

    @property
    def _part_tokens(self) -> int:
        """Positions of a part of a state: as many as are copied in some 10 ms."""
        return max(1, MOST_COPY_BYTES // self.bytes_per_token)

    def states(self, seq_id: int) -> Iterator[bytes]:
        """Copies of all that a sequence holds, in parts, one after the other. Batches may come between two."""
        if self._scratch is None:
            yield self._context.state_get(seq_id)
            return
        for start in range(0, self._context.seq_pos_max(seq_id) + 1, step := self._part_tokens):
            self._context.seq_cp(seq_id, self._scratch, start, start + step)
            part = self._context.state_get(self._scratch)
            self._context.seq_rm(self._scratch)
            yield part

    def can_load(self, parts: Sequence[bytes]) -> bool:
        """Whether a state's parts have an id to pass through now, beside the one that `load` puts them into."""
        return len(parts) == 1 or self._scratch is not None or len(self._free_ids) > 1

    def load(self, seq_id: int, parts: Sequence[bytes]) -> Generator[int, None, None]:
        """Put a state's parts into an empty sequence, one with each step: the bytes of that part, or 0 where it does
        not fit. What the sequence holds then is not known. Batches may come between two. Several parts need `can_load`,
        asked before the sequence took its id.
        """
        if self._scratch is None and len(parts) > 1 and not self._free_ids:
            yield 0  # others have begun since `can_load` was asked
            return
        passage = self.take_id() if self._scratch is None and len(parts) > 1 else self._scratch
        try:
            for part in parts:
                # The first of all as it is: where there is one part alone no other id is needed.
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
    llama-kv-cache.cpp), and with it goes all that is before it in the sequence. But never a cell that two ids hold. So
    each id has a guard, in the upper half of the ids, that holds its cells too.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._window = Window(context)
        self._stride = self._window.guard_stride
        self._guarded = [0] * context.n_sequences
        """Number of cells of each id that its guard holds too."""

    def resume_point(self, tokens: array[int], match: Match) -> tuple[Node, int]:
        """See `Attention`. Where the window is not whole, all is read again."""
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
        """See `Attention`: the guard holds the cells that may soon leave the window."""
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
    """Cells of a model whose sequences have more than cells: a recurrent state, of which there is only that of its
    end, or a small window of its own, in which older tokens are overwritten.
    """

    can_be_cut = False

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._window = None if context.model.shape.has_states else Window(context)
        self.survives_abort = self._window is not None
        # A window that ids share would never be free again. And where llama.cpp keeps states of a batch's last tokens,
        # so that a draft can be cut off, it puts the right one in its place with a batch to come: another id that
        # shares it would have the wrong one.
        self._copies_part = self._window is not None or context.rolled_back > 0

    def resume_point(self, tokens: array[int], match: Match) -> tuple[Node, int]:
        """See `Attention`."""
        node = match.end
        while outside(tokens, node.end) < node.end:  # a sequence that is read has come to there
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
    """Cells that layers with a sliding window attend to."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.tokens = context.model.shape.window_tokens
        self._is_chunked = context.model.shape.architecture in CHUNKED

    @property
    def guard_stride(self) -> int:
        """Cells that a guard may lack at a sequence's end: they are inside its window."""
        return 1 if self._is_chunked else max(1, self.tokens // GUARD_SHARE)

    def is_whole(self, seq_id: int, position: int) -> bool:
        """Whether all is there that a token at this position attends to."""
        first = position // self.tokens * self.tokens if self._is_chunked else position - self.tokens + 1
        return self._context.seq_pos_min(seq_id) <= max(0, first)


def memory_kind(context: Context) -> Attention:
    """The kind of a context's memory."""
    return kind_of(context)(context)


def kind_of(context: Context) -> type[Attention]:
    """The class of a context's memory."""
    if context.params.guards_window:
        return GuardedWindow
    return Attention if context.model.shape.memory == "attention" else Checkpointed
