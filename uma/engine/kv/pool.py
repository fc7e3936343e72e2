"""The pool of sequence ids and KV cells: what each holds, what is free, and the order of eviction.

It has two tiers: cells, organised by the prefix tree, and snapshots in host memory for what had to leave cells. The
tree counts cells exactly, so `llama_decode` is never asked for what cannot fit. Owned by the decode thread.
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
from uma.engine.kv.snapshots import MAX_COPY_BYTES, MIN_GAIN_TOKENS, Snapshot, SnapshotStore, is_worth
from uma.llama.context import Context

MIN_SHARED_TOKENS = 8
"""Minimum length of a shared prefix: a shorter one costs less to compute than to track."""
MIN_EVICTED_TOKENS = 256
"""Minimum cells evicted at a time."""
SPARE = 0.0
"""`used_at` of cells that no later request resumes: they are evicted first, and without a snapshot."""


@attrs.define
class SnapshotLoad:
    """A snapshot whose parts are loaded into cells between ticks."""

    snapshot: Snapshot
    length: int
    """Number of its tokens with which the sequence begins."""
    parts: Generator[int, None, None]
    """See `Attention.load`."""


@attrs.define
class Holding:
    """What a running sequence holds: its id, and the tree node in which it ends."""

    seq_id: int
    tip: Node
    tier: Tier = Tier.CELLS
    """Tier from which its prefix came."""
    adapters: int = 0
    """Number of its set of LoRA adapters."""
    adapted_from: int = 0
    """Index of the first token that is computed with it."""
    loading: SnapshotLoad | None = None
    """Snapshot that is being loaded into its cells, until it is complete and the tip is its end. No other sequence
    shares it until then."""

    @property
    def loading_cells(self) -> int:
        """Cells that are reserved for the snapshot."""
        return len(self.loading.snapshot.tokens) if self.loading is not None else 0


class KvPool:
    """Hands out sequence ids and cells, and keeps ended sequences as cache while there are cells for it.

    `cache_cells` bounds the cells that hold only cache. Attention passes over every cell in use, also masked ones, so
    cache in cells slows every decoding stream a little, while a snapshot slows none. With 0 nothing stays in cells; if
    the store keeps nothing either there is no cache, and only running sequences share prefixes. A repeated prompt is
    computed in the cells of its last answer, so that its numbers are the same to the last bit.
    """

    def __init__(self, context: Context, store: SnapshotStore, *, cache_cells: int) -> None:
        self.cells = memory_kind(context)
        # With a buffer for each sequence, cache slows no other one, and a repeated prompt gets other cells anyway.
        self._cache_cells = PLENTY if self.cells.is_split and cache_cells else cache_cells
        self.store = store
        # One order of events for both tiers, which share their listeners.
        self._events = store.events
        self.tree = PrefixTree(self.cells, self._events)
        self.checkpoints = Checkpoints(self.cells, self.tree, store)
        self._decoding: set[int] = set()
        """Ids of running sequences that decode: a large copy would be a gap in their streams, so it is postponed."""
        self._copied_bytes = 0
        """Bytes copied out of cells since a sequence last grew, i.e. since the last batch."""
        self._loading_cells = 0
        """Cells reserved for snapshots that are being loaded: no other sequence gets them between two parts."""
        self._copied_bytes_per_ms = 2.0**20
        """Speed of the last large load; a guess before the first."""
        self._is_lone = False
        """Whether at most one sequence runs, or ran last, at a time."""
        self.copies = SnapshotCopies(self.cells, self.tree, store, self.checkpoints, self._is_worth_saving)

    @property
    def used_cells(self) -> int:
        """Cells in use."""
        return self.tree.total_tokens + self._loading_cells

    @property
    def free_cells(self) -> int:
        """Cells available at once: unused ones, and those that hold only cache."""
        return self.cells.total - self.tree.protected_tokens - self._loading_cells

    def cells_needed(self, tokens: array[int]) -> int:
        """Cells of `free_cells` that a sequence with these tokens takes: all but those shared with running ones."""
        node, length = self.match(tokens)
        while node.parent is not None and (node.locks == 0 or node.start >= length):
            node = node.parent
        return len(tokens) - min(length, node.end)

    def has_id(self) -> bool:
        """Whether another sequence can begin."""
        return self.cells.lowest_free_id is not None or bool(self.tree.cached)

    def match(self, tokens: array[int]) -> tuple[Node, int]:
        """The longest computed prefix of `tokens` that is worth sharing and can be resumed; never all, because the last
        token gives the logits.
        """
        node, length = self.cells.resume_point(tokens, self.tree.match(tokens))
        return (node, length) if length >= MIN_SHARED_TOKENS else (self.tree.root, 0)

    def known_tokens(self, tokens: array[int]) -> int:
        """How many of `tokens` a sequence that began now would not have to compute."""
        kept = self._kept(tokens, 0)
        return max(self.match(tokens)[1], kept[1] if kept else 0)

    def nearest(self, tokens: array[int]) -> tuple[int, bool]:
        """Length of the longest prefix of `tokens` that is cached or running, whether it can be resumed or not; and
        whether that text goes on differently, rather than ending there.
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
        """An id for a sequence that will compute `tokens`, which are `keyed` by its adapters, and how many of them it
        need not compute. `adapters` and `adapted_from` are the sequence's, even if that is behind these tokens.

        The prefix comes from the sequence id that holds most of it, or from a snapshot that saves clearly more. A large
        snapshot has yet to be loaded afterwards: `Holding.loading`.
        """
        self.copies.try_all_again()
        self._is_lone = self.cells.used_ids == len(self.tree.cached)
        is_repeated = self.tree.match(tokens).length == len(tokens) > 1
        begun = self._restored(tokens, now_ms) or self._begun(tokens, now_ms, is_repeated=is_repeated)
        begun[0].adapters, begun[0].adapted_from = adapters, adapted_from
        if self._is_lone and not is_repeated:
            self._trim(until=None)  # postponed after the last lone sequence, see `trim_cache`
        return begun

    def _restored(self, tokens: array[int], now_ms: float) -> tuple[Holding, int] | None:
        """`acquire` from a snapshot; None if none saves clearly more than the cells do."""
        kept = self._kept(tokens, self.match(tokens)[1] + MIN_GAIN_TOKENS - 1)
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
            # The only free id is the one that holds the prefix: its cells are given up.
            node, length = self.tree.root, 0
            seq_id = self._take_id(keep=None)
        assert seq_id is not None, "no sequence id is left"
        holding = Holding(seq_id, self.tree.start(seq_id, node, length, now_ms))
        self.checkpoints.used(holding.tip)
        return holding, holding.tip.end

    def _kept(self, tokens: array[int], least: int) -> tuple[Snapshot, int] | None:
        """The snapshot that has most of `tokens`, more than `least`, and how many."""
        kept = self.store.find(tokens, least)
        return kept if kept is None or (length := outside(tokens, kept[1])) == kept[1] else (kept[0], length)

    def release_after_abort(self, holding: Holding, now_ms: float) -> None:
        """End a sequence in an unknown state: what its last checkpoint covers stays as cache."""
        node = next((node for node in holding.tip.path() if node.checkpoint is not None), None)
        is_back = node is not None and self.cells.cut(holding.seq_id, node.prefix())
        if node is not None and is_back:
            holding.tip = self.tree.truncate(holding.tip, holding.seq_id, node.end)
        self.release(holding, now_ms, keep=is_back)

    def invalidate_cached_states(self) -> None:
        """After an aborted batch in which llama.cpp can have moved states of other sequences: cut cached ones back to
        their checkpoints, or drop them.
        """
        for seq_id, node in list(self.tree.cached.items()):
            if node.checkpoint is None or not self.cells.cut(seq_id, node.prefix()):
                self.tree.shorten(seq_id, len(node.tokens))

    def _drop_answers(self, tokens: array[int]) -> None:
        """Before a prompt is repeated: free the cells of its last tokens, which are computed again, and of the answers
        behind them, where cached sequences hold them. They get a snapshot first, if they are worth one.

        So the new answer gets the same cells. Without flash attention llama.cpp's sums depend on the order of cells;
        with it, threads add up a single row's attention over parts of the buffer. In other cells the last bits differ,
        and at a near tie the text.
        """
        shared = self.match(tokens)[1]
        length = min(shared, len(tokens) - LAST_TOKENS)
        while (found := self.tree.match(tokens)).length == len(tokens) and not found.node.locks:
            # (A prompt that is too short to be shared can be the beginning of any text.)
            leaves = self.tree.leaves() if shared else self.tree.leaves()[-1:]
            leaf = next((seq_id for seq_id in leaves if found.node in self.tree.cached[seq_id].path()), None)
            if leaf is None:
                return
            self._save_before_drop(leaf)
            while (excess := self.tree.cached[leaf].end - length) > 0 and self.tree.shorten(leaf, excess):
                pass

    def borrow_id(self) -> int | None:
        """An empty sequence id for a computation that leaves nothing in memory; None if running sequences have all."""
        return self._take_id(keep=None)

    def give_back_id(self, seq_id: int) -> None:
        """Return a borrowed id; what it holds is dropped."""
        self.cells.free(seq_id)

    def extend(self, holding: Holding, tokens: Sequence[int]) -> None:
        """Add tokens that a batch has computed for a sequence."""
        if holding.adapters and holding.tip.end <= holding.adapted_from:
            tokens = keyed(tokens, holding.adapters, holding.adapted_from - holding.tip.end)
        holding.tip = self.tree.extend(holding.tip, holding.seq_id, tokens)
        self._copied_bytes = 0
        self.cells.grown(holding.seq_id, holding.tip.end)

    def append(self, holding: Holding, token: int) -> None:
        """Add one token that a decode step has computed for a sequence."""
        self._decoding.add(holding.seq_id)
        holding.tip = self.tree.append(holding.tip, holding.seq_id, token)
        self._copied_bytes = 0
        self.cells.grown(holding.seq_id, holding.tip.end)

    def truncate(self, holding: Holding, length: int) -> bool:
        """Cut a running sequence to its first `length` tokens, to undo a failed batch or the end of a draft.

        False, and nothing changes, if memory or a picture cannot be cut there.
        """
        whole = holding.tip.whole()
        if outside(whole, length) != length or not self.cells.cut(holding.seq_id, holding.tip.prefix(length)):
            return False
        if length:
            holding.tip = self.tree.truncate(holding.tip, holding.seq_id, length)
        return True

    def cut_draft(self, holding: Holding) -> None:
        """Cut off tokens of the last batch that were never added."""
        self.cells.cut_last(holding.seq_id, holding.tip.prefix())

    def listen(self, listener: KvListener) -> None:
        """Call `listener` with everything that cells and memory hold, and from now on with every change."""
        self._events.listeners = (*self._events.listeners, listener)
        for node in self._reported():
            listener.stored(Tier.CELLS, Run(node.start, node.end, node.whole))
        for snapshot in self.store:
            listener.stored(Tier.MEMORY, Run(0, len(snapshot.tokens), snapshot.whole))

    def held(self) -> Iterator[array[int]]:
        """Tokens of everything that cells and memory hold, each from its sequence's first token on."""
        yield from (node.whole() for node in self._reported())
        yield from (snapshot.whole() for snapshot in self.store)

    def _reported(self) -> Iterator[Node]:
        return (node for node in self.tree.nodes() if node.is_reported)

    def report_end(self) -> None:
        """Report that cells and memory are gone, because the engine ends."""
        self._events.cleared(Tier.CELLS)
        self._events.cleared(Tier.MEMORY)

    def release(
        self, holding: Holding, now_ms: float, *, keep: bool, is_expected: bool = False, spare_from: int | None = None
    ) -> None:
        """End a sequence. With `keep` its cells stay as cache; with `is_expected` this counts as used once already.

        What it has from its token `spare_from` on is evicted before all else.
        """
        holding.tip.reuses = max(holding.tip.reuses, is_expected)
        self._decoding.discard(holding.seq_id)
        self._end_loading(holding)
        keep = keep and holding.tip.end >= MIN_SHARED_TOKENS and not self._is_off
        self.tree.finish(holding.tip, holding.seq_id, now_ms, keep=keep)
        if spare_from is not None:
            for node in takewhile(lambda node: node.start >= spare_from, holding.tip.path()):
                node.used_at = SPARE
        self.trim_cache()

    @property
    def _is_off(self) -> bool:
        """Whether neither cells nor memory keep ended sequences."""
        return self._cache_cells == 0 and not self.store.is_enabled

    def trim_cache(self, until: Callable[[], bool] | None = None) -> None:
        """Evict cache beyond `cache_cells` from cells, the oldest first; it gets a snapshot if it is worth one.

        With `until` it stops once that is true: freeing the cells of hundreds of sequences takes longer than a request
        can wait.

        A sequence whose snapshot cannot be taken now stays until there is time, or its cells are needed. The sequence
        used last stays too, as the conversation that goes on, unless cells keep no cache. Nothing is evicted after a
        lone sequence until another begins: a repeat of its prompt must get the same cells, for the same numbers.
        """
        # Not below `cache_cells`: copying every ended sequence to host memory took 8 streams from 166 to 149 tokens a
        # second (SmolLM2, 2 cores), although fewer cells were passed over.
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
        """Cells that only this sequence uses."""
        count = holding.loading_cells
        for node in holding.tip.path():
            if node.locks > 1:
                break
            count += len(node.tokens)
        return count

    def save(self, holding: Holding, now_ms: float) -> Snapshot | None:
        """Snapshot of what a running sequence has computed: an existing one, or a new one if it is worth it, fits, and
        delays no stream.
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
        """Add a snapshot of each cached prefix to the store when the engine ends, for the disk tier. A common prefix
        goes with the first sequence: no cells that share it are left.
        """
        for seq_id, node in self.tree.cached.items():
            tokens, reuses = node.whole(), max(above.reuses for above in node.path())
            if not self.store.is_enabled or not is_worth(node.end - self.store.lasting_tokens(tokens), reuses):
                continue
            # A snapshot in memory that was only a copy of cells was never given to the disk.
            if (kept := self.store.covering(tokens)) is not None:
                self.store.keep_on_disk(kept)
            else:
                self.store.add(self._snapshot_of(seq_id, node, node.reuses, node.used_at))

    def _is_worth_saving(self, node: Node) -> bool:
        """Whether a cached sequence is worth a snapshot before its cells are needed, and a file.

        Cells that another id shares are not lost with it: only the part behind them counts.
        """
        own = node.alone()
        return self.store.accepts(node.whole(), node.end - own[-1].start, max(node.reuses for node in own))

    def _snapshot_of(self, seq_id: int, node: Node, reuses: int, used_ms: float) -> Snapshot:
        self._copied_bytes += self.cells.state_size(node.end)
        ends = self.checkpoints.of_snapshot(node)
        return Snapshot(node.whole(), tuple(self.cells.states(seq_id)), reuses, used_ms, ends=ends)

    def make_room(self, cells: int) -> None:
        """Evict cache, the longest unused first, until `cells` cells are unused or no cache is left."""
        self._evict(cells - (self.cells.total - self.used_cells))

    def drop_cache(self) -> bool:
        """Evict all cache from the cells; returns whether there was any."""
        had = list(self.tree.cached)
        for seq_id in had:
            self.tree.drop(seq_id)
        return bool(had)

    def forget_adapters(self, number: int) -> None:
        """Drop the cached prefixes of a set of LoRA adapters that no sequence uses."""
        for seq_id in [seq_id for seq_id, node in self.tree.cached.items() if set_of(node.whole()) == number]:
            self.tree.drop(seq_id)
        for snapshot in self.store:
            if set_of(snapshot.tokens) == number:
                self.store.drop(snapshot)

    def _evict(self, cells: int) -> None:
        while cells > 0 and (leaves := self.tree.leaves()):
            self._save_before_drop(seq_id := leaves[0])
            before = self.used_cells
            # A little more than needed: in a full pool the next tick would evict again.
            self.tree.shorten(seq_id, max(cells, MIN_EVICTED_TOKENS))
            cells -= before - self.used_cells

    def _save_before_drop(self, seq_id: int) -> bool:
        """Take a snapshot of a cached sequence that is about to be evicted, if it is worth one.

        Returns whether it can be evicted: False if there is no time for the snapshot now.
        """
        node = self.tree.cached[seq_id]
        saves = node.end - node.alone()[-1].start
        if node.used_at == SPARE or saves < MIN_GAIN_TOKENS or not self.store.is_enabled:
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
        """Whether copying so many tokens would make a gap in the streams of decoding sequences, `but` one."""
        # Copies are made between two batches. One of a gigabyte stopped all streams for seconds, and twelve small ones,
        # of sequences that ended together, for 190 ms.
        return bool(self._decoding - {but}) and self._copied_bytes + self.cells.state_size(tokens) > MAX_COPY_BYTES

    def _restore(self, snapshot: Snapshot, length: int, now_ms: float) -> Holding | None:
        """A sequence with the first `length` tokens of a snapshot: loaded already if that is quick, else still to be
        loaded. None if there are no cells for it, or it could not be loaded.
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
        while holding.loading is not None and snapshot.size_bytes <= MAX_COPY_BYTES:
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

        False if they cannot be loaded, or not cut to length: the sequence is then in an unknown state, and the snapshot
        is dropped, because each request with its prefix would evict cache and copy it again, to no avail.
        """
        assert holding.loading is not None
        loading, copied, began = holding.loading, 0, clock.now_ms()
        for size in loading.parts:
            copied += size
            if not size:
                self.store.drop(loading.snapshot)
                return False
            if copied >= MAX_COPY_BYTES:
                self._copied_bytes_per_ms = copied / max(clock.now_ms() - began, 0.001)
                return True
        return self._is_loaded(holding, loading.snapshot, loading.length)

    def _is_loaded(self, holding: Holding, snapshot: Snapshot, length: int) -> bool:
        """Finish a load: cut the snapshot to length, and add its tokens to the tree. False if that is impossible."""
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
        """Take a free id, if necessary that of the cache unused longest, but never the only one that holds `keep`.

        With split KV it is the lowest: llama.cpp computes only adjacent ids together.
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
