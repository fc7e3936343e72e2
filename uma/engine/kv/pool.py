"""The pool of sequence ids and KV cells: what each holds, what is free, and the order of eviction.

Two tiers: cells, organised by the radix tree, and snapshots in host memory for what had to leave them. The tree counts
cells exactly, so `llama_decode` is not asked for what cannot fit. Owned by the decode thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import takewhile

import attrs

from uma.engine import clock
from uma.engine.kv.adapter_keys import keyed, set_of
from uma.engine.kv.checkpoints import LAST_TOKENS, Checkpoints
from uma.engine.kv.events import KvListener, Run, Tier
from uma.engine.kv.memory_kinds import PLENTY, memory_kind
from uma.engine.kv.pictures import outside, position_in
from uma.engine.kv.prefix_tree import Node, Prefix, PrefixTree, common_length
from uma.engine.kv.snapshot_copies import SnapshotCopies
from uma.engine.kv.snapshots import LEAST_GAIN_TOKENS, MOST_COPY_BYTES, Snapshot, SnapshotStore, is_worth
from uma.llama.context import Context

LEAST_SHARED_TOKENS = 8
"""Minimum length of a shared prefix: to compute a shorter one again costs less than to keep track of it."""
LEAST_EVICTED_TOKENS = 256
"""Minimum cells evicted at a time."""
SPARE = 0.0
"""Time of last use of what nobody will ask for again: it leaves the cache first, and without a copy."""


@attrs.define
class SnapshotLoad:
    """A snapshot whose parts are put into cells between ticks."""

    snapshot: Snapshot
    length: int
    """How many of its tokens the sequence begins with."""
    parts: Generator[int, None, None]
    """See `Attention.load`."""


@attrs.define
class Holding:
    """What a running sequence holds: its id, and the node of the tree it ends in."""

    seq_id: int
    tip: Node
    tier: Tier = Tier.CELLS
    """Where what it began with was."""
    adapters: int = 0
    """Number of the set of LoRA adapters that it is computed with."""
    adapted_from: int = 0
    """First token with which that is so."""
    loading: SnapshotLoad | None = None
    """What it begins with, until all of that is in its cells: then the tip is its end. No other sequence begins there
    meanwhile."""

    @property
    def loading_cells(self) -> int:
        """Cells that are kept for what is loaded."""
        return len(self.loading.snapshot.tokens) if self.loading is not None else 0


class KvPool:
    """Hands out sequence ids and cells, and keeps finished sequences as cache for as long as there is room.

    `cache_cells` bounds the cells that hold nothing but cache: attention walks over every cell in use, also those that
    are masked, so cache in cells costs every decoding stream a little, and a snapshot costs no stream anything. With 0
    nothing stays in cells, and where the store keeps nothing either there is no cache: only sequences that run at the
    same time share what they have in common.
    A prompt that is asked again is answered in the cells of its last answer, to the last bit as then.
    """

    def __init__(self, context: Context, store: SnapshotStore, *, cache_cells: int) -> None:
        self.cells = memory_kind(context)
        # In a buffer of its own cache is in no other sequence's way, and a repeated prompt has other cells anyway.
        self._cache_cells = PLENTY if self.cells.is_split and cache_cells else cache_cells
        self.store = store
        # One order of events for both tiers, since they share their listeners.
        self._events = store.events
        self.tree = PrefixTree(self.cells, self._events)
        self.checkpoints = Checkpoints(self.cells, self.tree, store)
        self._decoding: set[int] = set()
        """Ids of running sequences that decode: large copies would be a gap in their streams, and wait."""
        self._copied_bytes = 0
        """Bytes that were copied out of the cells since a sequence last grew, which is since the last batch."""
        self._loading_cells = 0
        """Cells that are kept for what is loaded: no other sequence gets them between two parts."""
        self._copied_bytes_per_ms = 2.0**20
        """Speed of the last large load; before the first a guess."""
        self._is_lone = False
        """Whether no more than one sequence runs, or ran last, at a time."""
        self.copies = SnapshotCopies(self.cells, self.tree, store, self.checkpoints, self._is_worth_saving)

    @property
    def used_cells(self) -> int:
        """Cells that hold something."""
        return self.tree.total_tokens + self._loading_cells

    @property
    def free_cells(self) -> int:
        """Cells available at once: unused ones, and those that hold nothing but cache."""
        return self.cells.total - self.tree.protected_tokens - self._loading_cells

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
        node, length = self.cells.resume_point(tokens, self.tree.match(tokens))
        return (node, length) if length >= LEAST_SHARED_TOKENS else (self.tree.root, 0)

    def known_tokens(self, tokens: array[int]) -> int:
        """How many of `tokens` a sequence that began now would not have to compute."""
        kept = self._kept(tokens, 0)
        return max(self.match(tokens)[1], kept[1] if kept else 0)

    def nearest(self, tokens: array[int]) -> tuple[int, bool]:
        """How much of `tokens` what is cached or runs has in common with them, wherever a sequence can begin, and
        whether it goes on differently; else it ends there.
        """
        node, length, _ = self.tree.match(tokens)
        differs = length < node.end or bool(node.children)
        if (kept := self.store.find(tokens, length)) is not None:
            length = common_length(kept[0].tokens, tokens)
            differs = length < len(kept[0].tokens)
        return length, differs

    def acquire(
        self, tokens: array[int], now_ms: float, adapters: int = 0, adapted_from: int = 0
    ) -> tuple[Holding, int]:
        """An id for a sequence that will compute `tokens`, `keyed` by its adapters, and how many of them it need not
        compute. `adapters` and `adapted_from` are the sequence's, also where that is behind these tokens.

        They come from the sequence id that holds most of them, or from a snapshot where that saves clearly more. A
        large snapshot is still to be loaded then: `Holding.loading`.
        """
        self.copies.try_all_again()
        self._is_lone = self.cells.used_ids == len(self.tree.cached)
        is_repeated = self.tree.match(tokens).length == len(tokens) > 1
        begun = self._restored(tokens, now_ms) or self._begun(tokens, now_ms, is_repeated=is_repeated)
        begun[0].adapters, begun[0].adapted_from = adapters, adapted_from
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
        if is_repeated and not self.cells.is_split:
            self._drop_answers(tokens)
        node, length = self.match(tokens)
        seq_id = self._take_id(keep=node)
        if seq_id is None:
            # The only id left is the one that holds the prefix: its cells are given up.
            node, length = self.tree.root, 0
            seq_id = self._take_id(keep=None)
        assert seq_id is not None, "no sequence id is left"
        holding = Holding(seq_id, self.tree.start(seq_id, node, length, now_ms))
        self.checkpoints.used(holding.tip)
        return holding, holding.tip.end

    def _kept(self, tokens: array[int], least: int) -> tuple[Snapshot, int] | None:
        """The snapshot that has most of `tokens`, more than `least` of them, and how many."""
        kept = self.store.find(tokens, least)
        return kept if kept is None or (length := outside(tokens, kept[1])) == kept[1] else (kept[0], length)

    def release_after_abort(self, holding: Holding, now_ms: float) -> None:
        """A sequence ends in an unknown state: as far as there is a checkpoint of it, it stays as cache."""
        node = next((node for node in holding.tip.path() if node.checkpoint is not None), None)
        is_back = node is not None and self.cells.cut(holding.seq_id, node.prefix())
        if node is not None and is_back:
            holding.tip = self.tree.truncate(holding.tip, holding.seq_id, node.end)
        self.release(holding, now_ms, keep=is_back)

    def invalidate_cached_states(self) -> None:
        """A batch was broken off in whose midst llama.cpp can have moved states of other sequences: cached ones go back
        to their checkpoints, or go.
        """
        for seq_id, node in list(self.tree.cached.items()):
            if node.checkpoint is None or not self.cells.cut(seq_id, node.prefix()):
                self.tree.shorten(seq_id, len(node.tokens))

    def _drop_answers(self, tokens: array[int]) -> None:
        """A prompt is asked again: cached sequences that hold all of it leave the cells of its last tokens, which are
        computed again, and of what is behind them, for memory as far as that is worth it.

        The new answer has the same cells then. Without flash attention llama.cpp's sums depend on the order of cells,
        and with it several threads add up attention of a single row over parts of the buffer: in other cells the last
        bits differ, and at a near tie the text.
        """
        shared = self.match(tokens)[1]
        length = min(shared, len(tokens) - LAST_TOKENS)
        while (found := self.tree.match(tokens)).length == len(tokens) and not found.node.locks:
            # (A prompt that is too short to be shared can be the beginning of anything.)
            leaves = self.tree.leaves() if shared else self.tree.leaves()[-1:]
            leaf = next((seq_id for seq_id in leaves if found.node in self.tree.cached[seq_id].path()), None)
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
        self.cells.free(seq_id)

    def extend(self, holding: Holding, tokens: Sequence[int]) -> None:
        """Count tokens that a batch has computed for the holder."""
        if holding.adapters and holding.tip.end <= holding.adapted_from:
            tokens = keyed(tokens, holding.adapters, holding.adapted_from - holding.tip.end)
        holding.tip = self.tree.extend(holding.tip, holding.seq_id, tokens)
        self._copied_bytes = 0
        self.cells.grown(holding.seq_id, holding.tip.end)

    def append(self, holding: Holding, token: int) -> None:
        """Count one token that a decode step has computed for the holder."""
        self._decoding.add(holding.seq_id)
        holding.tip = self.tree.append(holding.tip, holding.seq_id, token)
        self._copied_bytes = 0
        self.cells.grown(holding.seq_id, holding.tip.end)

    def truncate(self, holding: Holding, length: int) -> bool:
        """Cut a running sequence to its first `length` tokens: to roll back what was computed in vain.

        False, and nothing changed, where memory cannot be cut there, or a picture would be.
        """
        whole = holding.tip.whole()
        if outside(whole, length) != length or not self.cells.cut(holding.seq_id, holding.tip.prefix(length)):
            return False
        if length:
            holding.tip = self.tree.truncate(holding.tip, holding.seq_id, length)
        return True

    def cut_draft(self, holding: Holding) -> None:
        """Cut off tokens of the last batch that were not counted."""
        self.cells.cut_last(holding.seq_id, holding.tip.prefix())

    def listen(self, listener: KvListener) -> None:
        """Call `listener` with all that cells and memory hold, and from now on with every change."""
        self._events.listeners = (*self._events.listeners, listener)
        for node in self._reported():
            listener.stored(Tier.CELLS, Run(node.start, node.end, node.whole))
        for snapshot in self.store:
            listener.stored(Tier.MEMORY, Run(0, len(snapshot.tokens), snapshot.whole))

    def held(self) -> Iterator[array[int]]:
        """The tokens of all that cells and memory hold, each run from its sequence's beginning."""
        yield from (node.whole() for node in self._reported())
        yield from (snapshot.whole() for snapshot in self.store)

    def _reported(self) -> Iterator[Node]:
        return (node for node in self.tree.nodes() if node.is_reported)

    def report_end(self) -> None:
        """Report to listeners that cells and memory are gone: the engine ends."""
        self._events.cleared(Tier.CELLS)
        self._events.cleared(Tier.MEMORY)

    def release(
        self, holding: Holding, now_ms: float, *, keep: bool, is_expected: bool = False, spare_from: int | None = None
    ) -> None:
        """The sequence ends; with `keep` what it computed stays as cache, where `is_expected` as what was used once.

        What it has from its token `spare_from` on leaves the cache before all else.
        """
        holding.tip.reuses = max(holding.tip.reuses, is_expected)
        self._decoding.discard(holding.seq_id)
        self._end_loading(holding)
        keep = keep and holding.tip.end >= LEAST_SHARED_TOKENS and not self._is_off
        self.tree.finish(holding.tip, holding.seq_id, now_ms, keep=keep)
        if spare_from is not None:
            for node in takewhile(lambda node: node.start >= spare_from, holding.tip.path()):
                node.used_at = SPARE
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
        last stays: it is the conversation that goes on. With no cells for cache all of it leaves. Do not trim after a
        lone sequence until another begins: a repeat of its prompt should reuse the same cells (same numerics).
        """
        # Within `cache_cells` nothing leaves: copying whatever had ended to host memory took 8 streams from 166 to 149
        # tokens a second (SmolLM2, 2 cores), though streams pass by fewer cells then and less CPU time is used.
        if not (self._is_lone and self._cache_cells):
            self._trim(until)

    def _trim(self, until: Callable[[], bool] | None) -> None:
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
        count = holding.loading_cells
        for node in holding.tip.path():
            if node.locks > 1:
                break
            count += len(node.tokens)
        return count

    def save(self, holding: Holding, now_ms: float) -> Snapshot | None:
        """A snapshot of what a running sequence has computed: one that is there, or a new one, if it is worth it, fits,
        and stops no stream.
        """
        tip, tokens = holding.tip, holding.tip.whole()
        if (kept := self.store.covering(tokens)) is not None:
            return kept
        if self._would_stop_streams(len(tokens), but=holding.seq_id) or not self.store.accepts(tokens, len(tokens), 1):
            return None
        if not self.store.has_place_for(self.checkpoints.snapshot_size(tip), len(tokens), 1, now_ms):
            return None
        snapshot = self._snapshot_of(holding.seq_id, tip, 1, now_ms)
        return snapshot if self.store.add(snapshot) else None

    def save_all_cached(self) -> None:
        """Add, at the end, a snapshot of each cached prefix to the store, which passes it on to the disk tier. What
        several have in common goes with the first of them, for no cells are left that share it.
        """
        for seq_id, node in self.tree.cached.items():
            tokens, reuses = node.whole(), max(above.reuses for above in node.path())
            if not self.store.is_enabled or not is_worth(node.end - self.store.lasting_tokens(tokens), reuses):
                continue
            # One in memory that was no more than a copy of cells ends with them.
            if (kept := self.store.covering(tokens)) is not None:
                self.store.keep_on_disk(kept)
            else:
                self.store.add(self._snapshot_of(seq_id, node, node.reuses, node.used_at))

    def _is_worth_saving(self, node: Node) -> bool:
        """Whether a cached end is worth a snapshot before its cells are needed, and a place on disk.

        Cells that another id shares are not lost: the part that counts begins behind them.
        """
        own = node.alone()
        return self.store.accepts(node.whole(), node.end - own[-1].start, max(node.reuses for node in own))

    def _snapshot_of(self, seq_id: int, node: Node, reuses: int, used_ms: float) -> Snapshot:
        self._copied_bytes += self.cells.state_size(node.end)
        ends = self.checkpoints.of_snapshot(node)
        return Snapshot(node.whole(), tuple(self.cells.states(seq_id)), reuses, used_ms, ends=ends)

    def make_room(self, cells: int) -> None:
        """Drop cache, the longest unused first, until `cells` cells are unused or no cache is left."""
        self._evict(cells - (self.cells.total - self.used_cells))

    def drop_cache(self) -> bool:
        """Drop all cache from the cells; returns whether there was any."""
        had = list(self.tree.cached)
        for seq_id in had:
            self.tree.drop(seq_id)
        return bool(had)

    def forget_adapters(self, number: int) -> None:
        """Drop what cells and memory hold of a set of LoRA adapters, with which no sequence runs."""
        for seq_id in [seq_id for seq_id, node in self.tree.cached.items() if set_of(node.whole()) == number]:
            self.tree.drop(seq_id)
        for snapshot in self.store:
            if set_of(snapshot.tokens) == number:
                self.store.drop(snapshot)

    def _evict(self, cells: int) -> None:
        while cells > 0 and (leaves := self.tree.leaves()):
            self._save_before_drop(seq_id := leaves[0])
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
        if node.used_at == SPARE or saves < LEAST_GAIN_TOKENS or not self.store.is_enabled:
            return True
        if self.store.covering(node.whole()) is not None:
            return True
        if self._would_stop_streams(node.end):
            return False
        if self.store.has_place_for(self.checkpoints.snapshot_size(node), node.end, node.reuses, node.used_at):
            snapshot = self._snapshot_of(seq_id, node, node.reuses, node.used_at)
            self.store.add(snapshot, is_lasting=self._is_worth_saving(node))
        return True

    def _would_stop_streams(self, tokens: int, but: int | None = None) -> bool:
        """Whether a copy of so many tokens would be a gap in the streams of sequences that decode, `but` one."""
        # Copies are made between two batches: one of a gigabyte stopped all streams for seconds, and twelve small ones,
        # of sequences that ended together, for 190 ms.
        return bool(self._decoding - {but}) and self._copied_bytes + self.cells.state_size(tokens) > MOST_COPY_BYTES

    def _restore(self, snapshot: Snapshot, length: int, now_ms: float) -> Holding | None:
        """A sequence with the first `length` tokens of a snapshot, which are there at once where copying them is quick,
        else still to be loaded. None where there is no room for it, or it could not be loaded.
        """
        whole = len(snapshot.tokens)
        if whole > min(self.cells.max_seq_cells, self.free_cells) or not self.cells.can_load(snapshot.parts):
            return None
        self.make_room(whole)
        seq_id = self._take_id(keep=None)
        if seq_id is None:
            return None
        loading = SnapshotLoad(snapshot, length, self.cells.load(seq_id, snapshot.parts))
        holding = Holding(seq_id, self.tree.start(seq_id, self.tree.root, 0, now_ms), loading=loading)
        self._loading_cells += whole
        while holding.loading is not None and snapshot.size_bytes <= MOST_COPY_BYTES:
            if not self.load_next(holding):
                self._end_loading(holding)
                self.tree.finish(holding.tip, seq_id, now_ms, keep=False)
                return None
        return holding

    def load_ms(self, holding: Holding) -> float:
        """Expected time of `load_next`."""
        parts = holding.loading.snapshot.parts if holding.loading is not None else ()
        return max(map(len, parts), default=0) / self._copied_bytes_per_ms

    def load_next(self, holding: Holding) -> bool:
        """Load the next parts of a snapshot, as many as are copied in some 10 ms, and at least one.

        False where they cannot be loaded, or not cut to length: the snapshot is dropped, else each request with its
        prefix would evict cache and copy it, in vain. What the sequence holds then is not known.
        """
        assert holding.loading is not None
        loading, copied, began = holding.loading, 0, clock.now_ms()
        for size in loading.parts:
            copied += size
            if not size:
                self.store.drop(loading.snapshot)
                return False
            if copied >= MOST_COPY_BYTES:
                self._copied_bytes_per_ms = copied / max(clock.now_ms() - began, 0.001)
                return True
        return self._is_loaded(holding, loading.snapshot, loading.length)

    def _is_loaded(self, holding: Holding, snapshot: Snapshot, length: int) -> bool:
        """All of a snapshot is in cells: from now on others can begin there."""
        ends, tokens = snapshot.ends or {}, snapshot.tokens[:length]
        prefix = Prefix(length, position_in(tokens, length), ends.get(length))
        is_there = length == len(snapshot.tokens) or self.cells.cut(holding.seq_id, prefix)
        if not is_there or not self.cells.can_resume_at(holding.seq_id, prefix.position):
            self.store.drop(snapshot)
            return False
        self._end_loading(holding)
        start = 0
        for end in sorted({length, *(end for end in ends if end <= length)}):
            self.extend(holding, tokens[start:end])
            if end in ends:
                self.checkpoints.put(holding.tip, ends[end])
            start = end
        return True

    def _end_loading(self, holding: Holding) -> None:
        self._loading_cells -= holding.loading_cells
        if holding.loading is not None:
            holding.loading.parts.close()
            holding.loading = None

    def _take_id(self, keep: Node | None) -> int | None:
        """A free id, if need be that of the cache unused longest; never one that alone holds `keep`.

        With split KV it is the lowest available: llama.cpp computes only neighbouring ids together.
        """
        needed = None if keep is None or keep is self.tree.root else keep.any_id()
        spare = [seq_id for seq_id in self.tree.cached if seq_id != needed]
        lowest, free = min(spare, default=PLENTY), self.cells.lowest_free_id
        if free is not None and not (self.cells.is_split and lowest < free):
            return self.cells.take_id()
        if not spare:
            return None
        oldest = lowest if self.cells.is_split else min(spare, key=lambda seq_id: self.tree.cached[seq_id].used_at)
        self._save_before_drop(oldest)
        self.tree.drop(oldest)
        return self.cells.take_id()
