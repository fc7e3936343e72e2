"""The pool of sequence ids and KV cells: what each holds, what is free, and the order of eviction.

Two tiers: cells, organised by the radix tree, and snapshots in host memory for what had to leave them. The tree counts
cells exactly, so `llama_decode` is not asked for what cannot fit. Owned by the decode thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence

import attrs

from uma.engine.kv.cells import SequenceCells
from uma.engine.kv.checkpoints import LEAST_SAVED_TOKENS, Checkpoints
from uma.engine.kv.events import KvListener, Run, Tier
from uma.engine.kv.pictures import PictureRun, is_squeezed, outside
from uma.engine.kv.prefix_tree import Node, PrefixTree, common_length
from uma.engine.kv.snapshot_copies import SnapshotCopies
from uma.engine.kv.snapshots import LEAST_GAIN_TOKENS, MOST_COPY_BYTES, Snapshot, SnapshotStore
from uma.llama.context import Context

PLENTY = 2**31 - 1
LEAST_SHARED_TOKENS = 8
"""Minimum length of a shared prefix: to compute a shorter one again costs less than to keep track of it."""
BORDER_TOKENS = 2_048
"""Maximum tokens of a long prompt between two checkpoints."""
FIRST_BORDER_TOKENS = 256
"""Tokens of a prompt to the first of its regular checkpoints; the next are twice as far, up to `BORDER_TOKENS`. So of
more tokens than these that two prompts have in common, though no message ends there, the second reads about half at
most, and the third nothing.
"""
LAST_TOKENS = 2
"""Tokens of the last batch of a prompt that is read alone: the fewest for which llama.cpp's attention does not depend
on the order of cells. With four, as llama-server reads last where a model has windows, it does, and a repeated question
has another answer. The last checkpoint of a prompt is as far before its end, if no message ends there.
"""
LEAST_EVICTED_TOKENS = 256
"""Minimum cells evicted at a time."""


@attrs.define
class Holding:
    """What a running sequence holds: its id, and the node of the tree it ends in."""

    seq_id: int
    tip: Node
    tier: Tier = Tier.CELLS
    """Where what it began with was."""


class KvPool:
    """Hands out sequence ids and cells, and keeps finished sequences as cache for as long as there is room.

    `cache_cells` bounds the cells that hold nothing but cache: attention walks over every cell in use, also those that
    are masked, so cache in cells costs every decoding stream a little, and a snapshot costs no stream anything. With 0
    nothing stays in cells, and where the store keeps nothing either there is no cache: only sequences that run at the
    same time share what they have in common.
    Without `keeps_answers` a prompt that is asked again is answered in the cells of its last answer, to the last bit as
    then; with it that answer stays beside the new one, and drafts can be made of it.
    """

    def __init__(
        self,
        context: Context,
        store: SnapshotStore,
        *,
        cache_cells: int,
        keeps_answers: bool = True,
    ) -> None:
        self.cells = SequenceCells(context)
        self._cache_cells = cache_cells
        self._keeps_answers = keeps_answers
        self.store = store
        # One order of events for both tiers, since they share their listeners.
        self._events = store.events
        self.tree = PrefixTree(self.cells, self._events, can_be_cut=self.cells.can_be_cut)
        self._checkpoints = Checkpoints(self.cells, self.tree, store)
        self._decoding: set[int] = set()
        """Ids of running sequences that decode: large copies would be a gap in their streams, and wait."""
        self._is_lone = False
        """Whether no more than one sequence runs, or ran last, at a time."""
        self._copies = SnapshotCopies(
            self.cells, self.tree, store, self._checkpoints, self._is_worth_saving, self._take_id
        )

    @property
    def is_split(self) -> bool:
        """Whether a batch must hold its sequences in the order of their ids, or be computed in pieces."""
        return not self.cells.is_unified

    @property
    def used_cells(self) -> int:
        """Cells that hold something."""
        return self.tree.total_tokens

    @property
    def free_cells(self) -> int:
        """Cells available at once: unused ones, and those that hold nothing but cache.

        With split KV every sequence has cells of its own, as many as its context is long: they never run short.
        """
        return self.cells.total - self.tree.protected_tokens if self.cells.is_unified else PLENTY

    def cells_needed(self, tokens: array[int]) -> int:
        """Cells of `free_cells` that a sequence with these tokens takes: all but those it shares with a running one."""
        node, length = self.match(tokens)
        while node.parent is not None and (node.locks == 0 or node.start >= length):
            node = node.parent
        return len(tokens) - min(length, node.end)

    def has_id(self) -> bool:
        """Whether another sequence can begin."""
        return self.cells.lowest_free_id is not None or bool(self.tree.cached)

    def match(self, tokens: array[int]) -> tuple[Node, int]:
        """The longest computed prefix of `tokens` worth sharing behind which a sequence can begin; never all, since the
        last token gives the logits.
        """
        node, length = self.tree.place(tokens)
        length = outside(tokens, length)
        while node.parent is not None and node.start >= length:
            node = node.parent
        is_short = length < LEAST_SHARED_TOKENS
        if is_short or (self.cells.can_be_cut and not self.cells.stands(self.tree.any_id(node), length)):
            return self.tree.root, 0
        return node, length

    def known_tokens(self, tokens: array[int]) -> int:
        """How many of `tokens` a sequence that began now would not have to compute."""
        kept = self._kept(tokens, 0)
        return max(self.match(tokens)[1], kept[1] if kept else 0)

    def nearest(self, tokens: array[int]) -> tuple[int, bool]:
        """How much of `tokens` what is cached or runs has in common with them, wherever a sequence can begin, and
        whether it goes on differently; else it ends there.
        """
        node, length = self.tree.match(tokens)
        differs = length < node.end or bool(node.children)
        if (kept := self.store.find(tokens, length)) is not None:
            length = common_length(kept[0].tokens, tokens)
            differs = length < len(kept[0].tokens)
        return length, differs

    def acquire(self, tokens: array[int], now_ms: float) -> tuple[Holding, int]:
        """An id for a sequence that will compute `tokens`, and how many of them it need not compute.

        They come from the sequence id that holds most of them, or from a snapshot where that saves clearly more.
        """
        self._copies.try_all_again()
        self._is_lone = self.cells.used_ids == len(self.tree.cached)
        is_repeated = self.tree.match(tokens)[1] == len(tokens) > 1
        begun = self._restored(tokens, now_ms) or self._begun(tokens, now_ms, is_repeated=is_repeated)
        if self._is_lone and not is_repeated:
            self._trim(until=None)  # what the last one was spared
        return begun

    def _restored(self, tokens: array[int], now_ms: float) -> tuple[Holding, int] | None:
        """`acquire` from a snapshot; None where that is not clearly more than the cells hold."""
        kept = self._kept(tokens, self.match(tokens)[1] + LEAST_GAIN_TOKENS - 1)
        if kept is None or (holding := self._restore(*kept, now_ms)) is None:
            return None
        self.store.used(kept[0], now_ms)
        holding.tier, kept[0].tier = kept[0].tier, Tier.MEMORY
        return holding, kept[1]

    def _begun(self, tokens: array[int], now_ms: float, *, is_repeated: bool) -> tuple[Holding, int]:
        """`acquire` from what the cells hold."""
        if is_repeated and not self._keeps_answers:
            self._drop_answers(tokens)
        node, length = self.match(tokens)
        seq_id = self._take_id(keep=node)
        if seq_id is None:
            # The only id left is the one that holds the prefix: its cells are given up.
            node, length = self.tree.root, 0
            seq_id = self._take_id(keep=None)
        assert seq_id is not None, "no sequence id is left"
        holding = Holding(seq_id, self.tree.start(seq_id, node, length, now_ms))
        self._checkpoints.used(holding.tip)
        return holding, holding.tip.end

    def lay_out(self, holding: Holding, pictures: tuple[PictureRun, ...]) -> None:
        """Say which pictures a sequence has that begins."""
        self.cells.lay_out(holding.seq_id, pictures)

    def _kept(self, tokens: array[int], least: int) -> tuple[Snapshot, int] | None:
        """The snapshot that has most of `tokens`, more than `least` of them, and how many."""
        kept = self.store.find(tokens, least)
        return kept if kept is None or (length := outside(tokens, kept[1])) == kept[1] else (kept[0], length)

    def borders(self, tokens: array[int], prompt_tokens: int, computed: int, ends: Collection[int]) -> list[int]:
        """Where a sequence stops to have a checkpoint taken (`stop_at`), the next one last: none where memory can be
        cut. `computed` of its tokens are there, and messages of its prompt end behind so many tokens as in `ends`.
        """
        if self.cells.can_be_cut or not self.store.is_enabled:
            return []
        ends = [end for end in ends if end <= prompt_tokens - LAST_TOKENS]  # no prompt begins behind that
        wanted = {*ends, *range(BORDER_TOKENS, prompt_tokens, BORDER_TOKENS)}
        border = FIRST_BORDER_TOKENS
        while border < BORDER_TOKENS:
            wanted.add(border)
            border *= 2
        if not any(prompt_tokens - end <= LEAST_SAVED_TOKENS for end in ends):
            wanted.add(prompt_tokens - LAST_TOKENS)
        found: list[int] = []
        for end in sorted(wanted):
            if computed < end < prompt_tokens and end - (found[-1] if found else computed) >= LEAST_SAVED_TOKENS:
                found.append(end)
        # Others have gone on differently from here: so can further ones.
        branch = min(self.tree.match(tokens)[1], prompt_tokens - 1)
        if branch - computed >= LEAST_SAVED_TOKENS:
            found = sorted({branch, *(each for each in found if abs(each - branch) >= LEAST_SAVED_TOKENS)})
        return found[::-1]

    def stop_at(self, holding: Holding) -> None:
        """A sequence that goes on is where others can begin later: take a checkpoint."""
        if not self.cells.can_be_cut:
            self._checkpoints.take(holding.tip, holding.seq_id)

    def give_up(self, holding: Holding, now_ms: float) -> None:
        """A sequence ends in an unknown state: as far as there is a checkpoint of it, it stays as cache."""
        ends = (each for each in holding.tip.path() if each.checkpoint is not None)
        node = next(ends, None)
        if node is None or node.checkpoint is None:
            self.release(holding, now_ms, keep=False)
            return
        is_back = self.cells.trim_to(holding.seq_id, node.end, node.checkpoint)
        if is_back:
            holding.tip = self.tree.truncate(holding.tip, holding.seq_id, node.end)
        self.release(holding, now_ms, keep=is_back)

    def distrust(self) -> None:
        """A batch was broken off: where memory is a state for each sequence, llama.cpp can have moved others in
        its midst. Cached ones go back to their checkpoints, or go.
        """
        for seq_id in list(self.tree.cached):
            node = self.tree.cached[seq_id]
            if node.checkpoint is None or not self.cells.trim_to(seq_id, node.end, node.checkpoint):
                self.tree.go_back(seq_id)

    def _drop_answers(self, tokens: array[int]) -> None:
        """A prompt is asked again: cached sequences that hold all of it leave the cells of its last tokens, which are
        computed again, and of what is behind them, for memory as far as that is worth it.

        The new answer has the same cells then. Without flash attention llama.cpp's sums depend on the order of cells,
        and with it several threads add up attention of a single row over parts of the buffer: in other cells the last
        bits differ, and at a near tie the text.
        """
        if not self.cells.is_unified:
            return
        shared = self.match(tokens)[1]
        length = min(shared, len(tokens) - LAST_TOKENS)
        while (found := self.tree.match(tokens))[1] == len(tokens) and not found[0].locks:
            # (A prompt that is too short to be shared can be the beginning of anything.)
            leaves = self.tree.leaves() if shared else self.tree.leaves()[-1:]
            leaf = next((each for each in leaves if found[0] in self.tree.cached[each].path()), None)
            if leaf is None:
                return
            self._save_before_drop(leaf)
            while (excess := self.tree.cached[leaf].end - length) > 0 and self.tree.shorten(leaf, excess):
                pass

    def borrow_id(self) -> int | None:
        """An empty sequence id for a computation that leaves nothing behind; None where running sequences have all."""
        return self._take_id(keep=None)

    def give_back_id(self, seq_id: int) -> None:
        """End of the loan: what the id holds is dropped."""
        self.cells.trim(seq_id, 0)

    def extend(self, holding: Holding, tokens: Sequence[int]) -> None:
        """Count tokens that a batch has computed for the holder."""
        holding.tip = self.tree.extend(holding.tip, holding.seq_id, tokens)
        self.cells.grown(holding.seq_id, holding.tip.end)

    def append(self, holding: Holding, token: int) -> None:
        """Count one token that a decode step has computed for the holder."""
        self._decoding.add(holding.seq_id)
        holding.tip = self.tree.append(holding.tip, holding.seq_id, token)
        self.cells.grown(holding.seq_id, holding.tip.end)

    def truncate(self, holding: Holding, length: int) -> bool:
        """Cut a running sequence to its first `length` tokens, 1 or more: to roll back what was computed in vain.

        False, and nothing changed, where memory cannot be cut (a recurrent state has no parts).
        """
        if not self.cells.roll_back(holding.seq_id, length):
            return False
        holding.tip = self.tree.truncate(holding.tip, holding.seq_id, length)
        return True

    def listen(self, listener: KvListener) -> None:
        """Call `listener` with all that cells and memory hold, and from now on with every change."""
        self._events.listeners = (*self._events.listeners, listener)
        for node in filter(self.tree.is_held, self.tree.nodes()):
            listener.stored(Tier.CELLS, Run(node.start, node.end, node.whole))
        for snapshot in self.store:
            listener.stored(Tier.MEMORY, Run(0, len(snapshot.tokens), snapshot.whole))

    def held(self) -> Iterator[array[int]]:
        """The tokens of all that cells and memory hold, each run from its sequence's beginning."""
        yield from (node.whole() for node in self.tree.nodes() if self.tree.is_held(node))
        yield from (snapshot.whole() for snapshot in self.store)

    def report_end(self) -> None:
        """Report to listeners that cells and memory are gone: the engine ends."""
        self._events.cleared(Tier.CELLS)
        self._events.cleared(Tier.MEMORY)

    def release(self, holding: Holding, now_ms: float, *, keep: bool) -> None:
        """The sequence ends; with `keep` what it computed stays as cache."""
        self._decoding.discard(holding.seq_id)
        keep = keep and holding.tip.end >= LEAST_SHARED_TOKENS and not self._is_off
        self.tree.finish(holding.tip, holding.seq_id, now_ms, keep=keep)
        self.trim_cache()

    @property
    def _is_off(self) -> bool:
        """Whether neither cells nor memory keep what has ended."""
        return self._cache_cells == 0 and not self.store.is_enabled

    def trim_cache(self, until: Callable[[], bool] | None = None) -> None:
        """Let cache beyond `cache_cells` leave its cells, the oldest first, for memory.

        With `until` no further sequence leaves once that is true: to free the cells of hundreds takes longer than a
        request can wait.

        A sequence whose snapshot cannot be taken now stays until there is time or the room is needed. What was used
        last stays: it is the conversation that goes on. In a buffer of its own cache is in no other sequence's way, and
        stays. With no cells for cache all of it leaves. Behind a sequence that ran alone nothing does until another
        begins: asked again, it would lie in the cells that were freed.
        """
        if not (self._is_lone and self._cache_cells):
            self._trim(until)

    def _trim(self, until: Callable[[], bool] | None) -> None:
        if self._cache_cells and not self.cells.is_unified:
            return
        newest = self.tree.newest() if self._cache_cells else None
        for seq_id in self.tree.leaves():
            if self._excess <= 0:
                return
            if seq_id != newest and self._save_before_drop(seq_id):
                while self._excess > 0 and self.tree.shorten(seq_id, self._excess):
                    pass
                if until is not None and until():
                    return

    @property
    def _excess(self) -> int:
        """Cache in cells beyond its limit."""
        return self.tree.evictable_tokens - self._cache_cells

    def own_cells(self, holding: Holding) -> int:
        """Cells that only this holding uses."""
        count = 0
        for node in holding.tip.path():
            if node.locks > 1:
                break
            count += len(node.tokens)
        return count

    def save(self, holding: Holding, now_ms: float) -> Snapshot | None:
        """Keep a snapshot of what a running sequence has computed, if it is worth it, fits, and stops no stream."""
        tokens = holding.tip.whole()
        if (
            is_squeezed(tokens)
            or self._would_stop_streams(len(tokens), but=holding.seq_id)
            or self.cells.waits_for_copy(holding.seq_id)
            or not self.store.accepts(tokens, len(tokens), 1)
        ):
            return None
        size = self._checkpoints.snapshot_size(holding.seq_id, holding.tip)
        if not self.store.has_place_for(size, len(tokens), 1, now_ms):
            return None
        ends = self._checkpoints.of_snapshot(holding.tip)
        snapshot = Snapshot(tokens, self.cells.states(holding.seq_id), 1, now_ms, ends=ends)
        return snapshot if self.store.add(snapshot) else None

    def save_cached(self) -> bool:
        """Copy, in idle times, a cached sequence that has no snapshot, or the next part of one.

        False if there is nothing to do.
        """
        return self._copies.go_on()

    def save_all_cached(self) -> None:
        """Add, at the end, a snapshot of each cached prefix to the store, which passes it on to the disk tier."""
        for seq_id, node in self.tree.cached.items():
            if self._is_worth_saving(node):
                self.store.add(self._snapshot_of(seq_id))

    def _is_worth_saving(self, node: Node) -> bool:
        """Whether a cached end is worth a snapshot before its cells are needed, and a place on disk.

        Cells that another id shares are not lost: the part that counts begins behind them.
        """
        own = node.alone()
        return not is_squeezed(node.whole()) and self.store.accepts(
            node.whole(), node.end - own[-1].start, max(each.reuses for each in own)
        )

    def _snapshot_of(self, seq_id: int) -> Snapshot:
        node, states = self.tree.cached[seq_id], self.cells.states(seq_id)
        ends = self._checkpoints.of_snapshot(node)
        return Snapshot(node.whole(), states, node.reuses, node.used_at, ends=ends)

    def make_room(self, cells: int) -> None:
        """Drop cache, the longest unused first, until `cells` cells are unused or no cache is left."""
        if self.cells.is_unified:
            self._evict(cells - (self.cells.total - self.used_cells))

    def drop_cache(self) -> bool:
        """Drop all cache from the cells; returns whether there was any."""
        had = bool(self.tree.cached)
        while (seq_id := self.tree.oldest()) is not None:
            self.tree.drop(seq_id)
        return had

    def _evict(self, cells: int) -> None:
        while cells > 0 and (seq_id := self.tree.oldest_leaf()) is not None:
            self._save_before_drop(seq_id)
            before = self.used_cells
            # A little more than needed: in a full pool the next tick would be back at once.
            self.tree.shorten(seq_id, max(cells, LEAST_EVICTED_TOKENS))
            cells -= before - self.used_cells

    def _save_before_drop(self, seq_id: int) -> bool:
        """Take a snapshot of a cached sequence that is about to go.

        Whether it can go: False where there is no time for the snapshot now.
        """
        node = self.tree.cached[seq_id]
        saves = node.end - node.alone()[-1].start
        if saves < LEAST_GAIN_TOKENS or not self.store.is_enabled or self.store.covers(node.whole()):
            return True
        if is_squeezed(node.whole()):  # its cells share positions, so it is read again
            return True
        if self.cells.waits_for_copy(seq_id) or self._would_stop_streams(node.end):
            return False
        size = self._checkpoints.snapshot_size(seq_id, node)
        if self.store.has_place_for(size, node.end, node.reuses, node.used_at):
            self.store.add(self._snapshot_of(seq_id), is_lasting=self._is_worth_saving(node))
        return True

    def _would_stop_streams(self, tokens: int, but: int | None = None) -> bool:
        """Whether a copy of so many tokens would be a gap in the streams of sequences that decode, `but` one."""
        return bool(self._decoding - {but}) and self.cells.expected_size(tokens) > MOST_COPY_BYTES

    def _restore(self, snapshot: Snapshot, length: int, now_ms: float) -> Holding | None:
        """A sequence with the first `length` tokens of a snapshot; None where there is no room for it."""
        whole = len(snapshot.tokens)
        if whole > self.cells.share:
            return None
        if self.cells.is_copying:
            # A state is written at once, but a queued copy only with the next batch, and over it.
            return None
        if self.cells.is_unified and whole > self.free_cells:
            return None
        self.make_room(whole)
        seq_id = self._take_id(keep=None)
        if seq_id is None:
            return None
        holding = Holding(seq_id, self.tree.start(seq_id, self.tree.root, 0, now_ms))
        if not self._load(seq_id, snapshot.parts):
            self.tree.finish(holding.tip, seq_id, now_ms, keep=False)
            return None
        ends = snapshot.ends or {}
        is_cut = length == whole or self.cells.trim(seq_id, length, ends.get(length))
        if not is_cut or not self.cells.stands(seq_id, length):
            self.tree.finish(holding.tip, seq_id, now_ms, keep=False)
            return None
        start = 0
        for end in sorted(each for each in ends if each <= length):
            self.extend(holding, snapshot.tokens[start:end])
            self._checkpoints.put(holding.tip, ends[end])
            start = end
        if start < length:
            self.extend(holding, snapshot.tokens[start:length])
        return holding

    def _load(self, seq_id: int, parts: Sequence[bytes]) -> bool:
        """Put a snapshot into an empty sequence. False where it does not fit."""
        if len(parts) == 1:
            return self.cells.load(seq_id, parts, None)
        spare = self._take_id(keep=None) if self.cells.is_unified else None
        is_loaded = self.cells.load(seq_id, parts, spare)
        if spare is not None:
            self.cells.trim(spare, 0)
        return is_loaded

    def _take_id(self, keep: Node | None) -> int | None:
        """A free id, if need be that of the cache unused longest; never one that alone holds `keep`.

        With split KV it is the lowest available: llama.cpp computes only neighbouring ids together.
        """
        needed = self._holder(keep)
        spare = [seq_id for seq_id in self.tree.cached if seq_id != needed]
        lowest = min(spare, default=PLENTY)
        free = self.cells.lowest_free_id
        if free is not None and (self.cells.is_unified or free < lowest):
            return self.cells.take_id()
        if not spare:
            return None
        oldest = min(spare, key=lambda seq_id: self.tree.cached[seq_id].used_at) if self.cells.is_unified else lowest
        self._save_before_drop(oldest)
        self.tree.drop(oldest)
        return self.cells.take_id()

    def _holder(self, node: Node | None) -> int | None:
        return None if node is None or node is self.tree.root else self.tree.any_id(node)
