"""The sequence ids of a context, and what llama.cpp does with the cells that they hold.

One buffer (unified KV) lets several ids hold the same cells; with a buffer for each id, sharing is copying. The pool
decides what is kept and what goes. Owned by the decode thread.

llama.cpp gives a cell that has left its sequence's window to any sequence that needs one (`find_slot` in
llama-kv-cache.cpp), and with it goes all that is before it in the sequence. But never a cell that two ids hold. So
each id has a guard that holds its cells too, and a prefix of a model with sliding windows can be cut and shared at any
token, as with plain attention. Where windows are small, and where each id has a buffer, there are no guards: then
sequences begin at checkpoints, as with recurrent states.

Of some architectures llama.cpp keeps the states of the last tokens of a batch too, so that a draft can be cut off
(`ContextParams.rolled_back`). It says that it has gone back where that was another batch's, or where the state was
moved since, and then it has not. A later piece (ubatch) of the same batch can move it too. So here only tokens of the
batch just computed are cut off so (`cut_last`), and that has one piece (`ModelRunner.verify`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from uma.engine.kv.pictures import PictureRun, position_of
from uma.llama.context import Context

GUARD_SHARE = 4
"""Part of a window by which a guard may lag behind: a call for each token would cost more than it has to."""
CHUNKED = ("llama4",)
"""Architectures whose window does not slide but restarts, so that all cells before it leave it at once."""


class SequenceCells:
    """Hands out sequence ids, and copies, cuts, saves and loads what they hold: `prefix_tree.Cells` on a context."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._uncopied: set[int] = set()
        """Ids whose cells llama.cpp copies only with the next batch: until then they must not be written or saved."""
        self._went_back: set[int] = set()
        """Ids whose state is one before that of their last batch's end: llama.cpp puts it in its place with a batch to
        come, and would give another id that shares it the wrong one."""
        self.is_unified = context.params.kv_unified
        self.total = context.n_ctx
        self.share = context.n_ctx_seq
        """Maximum cells of one sequence."""
        self._free_ids = list(range(context.n_sequences))
        self._guards = context.params.guards_window
        self._window = context.model.window_tokens
        self._is_chunked = context.model.info.architecture in CHUNKED
        self._stride = 1 if self._is_chunked else max(1, self._window // GUARD_SHARE)
        """Cells that a guard may lack at a sequence's end: they are inside its window."""
        self._guarded = [0] * context.n_sequences
        """Number of cells of each id that its guard holds too."""
        self._pictures: dict[int, tuple[PictureRun, ...]] = {}
        """Picture runs by id, where it has any: behind one, a token's position can be less than its index."""

    def lay_out(self, seq_id: int, pictures: tuple[PictureRun, ...]) -> None:
        """Replace the picture runs of a sequence, those to come included; none: a text alone."""
        if pictures:
            self._pictures[seq_id] = pictures
        else:
            self._pictures.pop(seq_id, None)

    def _position(self, seq_id: int, length: int) -> int:
        pictures = self._pictures.get(seq_id)
        return length if pictures is None else position_of(pictures, length)

    def _cuts_picture(self, seq_id: int, length: int) -> bool:
        return any(each.start < length < each.end for each in self._pictures.get(seq_id, ()))

    @property
    def used_ids(self) -> int:
        """Sequence ids taken."""
        return self._context.n_sequences - len(self._free_ids)

    @property
    def lowest_free_id(self) -> int | None:
        """The id that `take_id` would give; None where all are taken."""
        return self._free_ids[0] if self._free_ids else None

    def take_id(self) -> int:
        """The lowest free id. `trim` to 0 gives it back."""
        return heapq.heappop(self._free_ids)

    def copy(self, source: int, target: int, length: int, checkpoint: bytes | None = None) -> bool:
        """See `Cells.copy`. Unified KV shares cells at no cost; split KV copies a whole stream, then cuts its end.

        A window is always a copy, or shared cells of it would never be free again. With split KV it is copied through a
        state, since what waits for the next batch would be written over it.
        """
        # Only the pictures that are shared: `target` goes on with a text, or with pictures, of its own.
        self.lay_out(target, tuple(run for run in self._pictures.get(source, ()) if run.end <= length))
        is_there = True
        if self.is_unified:
            if checkpoint is None and (self._copies_windows or source in self._went_back):
                checkpoint = self._context.part_get(source)
            self._context.seq_cp(source, target, 0, self._position(source, length))
            self.grown(target, length)
        elif self._copies_windows:
            is_there = self._context.state_set(target, self._context.state_get(source))
        else:
            if checkpoint is None and source in self._went_back:
                checkpoint = self._context.part_get(source)
            self._context.seq_cp(source, target)
            self._uncopied |= {source, target}
        if checkpoint is not None:
            is_there = self._context.part_set(target, checkpoint) and is_there
        if not self.is_unified:
            is_there = self._context.seq_rm(target, self._position(target, length), -1) and is_there
        if not is_there:
            self._empty(target)
        return is_there

    def trim(self, seq_id: int, length: int, checkpoint: bytes | None = None) -> bool:
        """See `Cells.trim`. A sequence that is cut to nothing gives its id back."""
        if length and checkpoint is not None:
            return self.trim_to(seq_id, length, checkpoint)
        if length:
            return self.roll_back(seq_id, length)
        self._empty(seq_id)
        heapq.heappush(self._free_ids, seq_id)
        return True

    def _empty(self, seq_id: int) -> None:
        self._context.seq_rm(seq_id)
        self._went_back.discard(seq_id)
        self._unguard(seq_id, 0)
        self._pictures.pop(seq_id, None)

    def trim_to(self, seq_id: int, length: int, checkpoint: bytes) -> bool:
        """Cut a sequence whose state is not known to where a checkpoint was taken; False where it cannot be."""
        return self._context.part_set(seq_id, checkpoint) and self.roll_back(seq_id, length)

    def roll_back(self, seq_id: int, length: int) -> bool:
        """Cut a sequence that goes on; False, and nothing changed, where memory cannot be cut there."""
        if self._cuts_picture(seq_id, length) or not self.stands(seq_id, length):
            return False
        if not self._context.seq_rm(seq_id, self._position(seq_id, length), -1):
            return False
        self._unguard(seq_id, length)
        return True

    def cut_last(self, seq_id: int, length: int) -> None:
        """Cut tokens of the batch just computed off a sequence: a draft's, at most `Context.rolled_back` of them where
        it has a state.
        """
        self._context.seq_rm(seq_id, self._position(seq_id, length), -1)
        if self.has_states:
            self._went_back.add(seq_id)

    # Checkpoints: of what cannot be cut

    @property
    def can_be_cut(self) -> bool:
        """Whether a sequence can be cut and shared at any token; else only where it ends, and where there is a
        checkpoint of it.
        """
        return self._context.model.memory == "attention" or self._guards

    @property
    def _copies_windows(self) -> bool:
        """Whether windows are small: each is a copy."""
        return self._context.model.memory == "sliding-window" and not self._guards

    @property
    def has_states(self) -> bool:
        """Whether a sequence has a state that each batch replaces."""
        return self._context.model.has_states

    def checkpoint_size(self, seq_id: int) -> int:
        """Bytes of a checkpoint."""
        return self._context.part_size(seq_id)

    def checkpoint(self, seq_id: int) -> bytes:
        """Checkpoint of a sequence's end: with it another sequence, or this one later, can go on there."""
        return self._context.part_get(seq_id)

    # Windows

    def grown(self, seq_id: int, length: int) -> None:
        """A batch has given a sequence so many cells: its guard holds those that may soon leave its window."""
        self._went_back.discard(seq_id)
        if self._guards and length - self._guarded[seq_id] >= self._stride:
            self._context.seq_cp(seq_id, self._guard(seq_id), self._guarded[seq_id], length)
            self._guarded[seq_id] = length

    def _unguard(self, seq_id: int, length: int) -> None:
        if self._guarded[seq_id] > length:
            self._context.seq_rm(self._guard(seq_id), length, -1)
            self._guarded[seq_id] = length

    def _guard(self, seq_id: int) -> int:
        return self._context.n_sequences + seq_id

    def stands(self, seq_id: int, length: int) -> bool:
        """Whether a sequence that goes on behind its first `length` tokens, or another that shares them, would compute
        what it should: all that layers with a window attend to is there, and a state is that of the last of them.
        """
        if self.has_states:
            return self._context.seq_pos_max(seq_id) < length
        if self._context.model.memory != "sliding-window":
            return True
        first = length // self._window * self._window if self._is_chunked else length - self._window + 1
        return self._context.seq_pos_min(seq_id) <= max(0, first)

    # Copies that wait for the next batch

    @property
    def is_copying(self) -> bool:
        """Whether cells wait for the next batch to be copied: until then there is no state of them."""
        return bool(self._uncopied)

    def waits_for_copy(self, seq_id: int) -> bool:
        """Whether this id's cells do."""
        return seq_id in self._uncopied

    def batch_done(self) -> None:
        """A batch was computed, and with it the copies that waited for it."""
        self._uncopied.clear()

    # States: what snapshots are made of

    @property
    def has_parts(self) -> bool:
        """Whether a state of some of a sequence's cells can be taken, and later be joined to others."""
        return self.is_unified and self._context.model.memory == "attention"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a state for each token, beside what it takes whatever its length; at least 1."""
        params = self._context.params
        return max(1, self._context.model.kv_bytes_per_token(params.cache_type_k, params.cache_type_v))

    def expected_size(self, tokens: int) -> int:
        """Bytes of the state of so many tokens, as the model's shape lets expect."""
        return tokens * self.bytes_per_token + self._context.model.state_bytes

    def state_size(self, seq_id: int) -> int:
        """Bytes of a sequence's state."""
        if self._guards:
            return (self._context.seq_pos_max(seq_id) + 1) * self.bytes_per_token
        return self._context.state_size(seq_id)

    def states(self, seq_id: int) -> tuple[bytes, ...]:
        """A copy of all that a sequence holds. With a window it is one of each run of so many cells: of a longer one
        llama.cpp writes what the end attends to. They pass through the guard, which holds nothing meanwhile.
        """
        if not self._guards:
            return (self._context.state_get(seq_id),)
        guard, window, parts = self._guard(seq_id), self._window, []
        self._context.seq_rm(guard)
        for start in range(0, self._context.seq_pos_max(seq_id) + 1, window):
            self._context.seq_cp(seq_id, guard, start, start + window)
            parts.append(self._context.state_get(guard))
            self._context.seq_rm(guard)
        if self._guarded[seq_id]:
            self._context.seq_cp(seq_id, guard, 0, self._guarded[seq_id])
        return tuple(parts)

    def part(self, seq_id: int, start: int, end: int, spare: int) -> bytes:
        """A copy of some of a sequence's cells, through an empty id that shares them for the moment."""
        self._context.seq_cp(seq_id, spare, start, end)
        return self._context.state_get(spare)

    def load(self, seq_id: int, parts: Sequence[bytes], spare: int | None) -> bool:
        """Put a state's parts into an empty sequence, one after the other; several go through an empty id, `spare`.

        False where they do not fit.
        """
        if len(parts) > 1 and spare is None:
            return False
        if not self._context.state_set(seq_id, parts[0]):
            return False
        self._grown_to_end(seq_id)
        return all(self._append(part, spare, seq_id) for part in parts[1:] if spare is not None)

    def _append(self, part: bytes, spare: int, seq_id: int) -> bool:
        if not self._context.state_set(spare, part):
            return False
        self._context.seq_cp(spare, seq_id)
        self._grown_to_end(seq_id)
        return True

    def _grown_to_end(self, seq_id: int) -> None:
        if self._guards:
            self.grown(seq_id, self._context.seq_pos_max(seq_id) + 1)
