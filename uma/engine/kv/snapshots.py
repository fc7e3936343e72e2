"""The second tier: KV of prefixes that had to leave their cells, in host memory.

Restoring a thousand tokens takes about a millisecond, computing them about a second. The store keeps what saves most:
length times number of uses. Belongs to the decode thread.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator

import attrs

from uma.engine.kv.events import KvEvents, Tier
from uma.engine.kv.prefix_index import PrefixIndex
from uma.llama.pages import trim_heap

MIN_WORTH = 128.0
"""Minimum tokens that a snapshot is expected to save to be worth its memory and copying."""
UNUSED_REUSES = 0.25
"""Expected uses of a prefix that no request has used again yet: most prompts never return."""
MIN_GAIN_TOKENS = 48
"""Minimum tokens that a snapshot must save beyond cells or memory to be taken, restored, or read from disk."""
MAX_LOST_TOKENS = 256
"""Maximum tokens to compute again where a longer snapshot replaces a shorter one."""
MAX_HUSKS = 64
"""Maximum snapshots that could not be restored and are remembered, so that their files are not read again."""
MAX_COPY_BYTES = 32 * 2**20
"""Maximum bytes copied between two batches, in 10 to 50 ms: requests and streams wait for the end of a copy."""


def usable(length: int, common: int, ends: Collection[int] | None) -> int:
    """Tokens of a snapshot of `length` tokens that can be restored for a prompt that has `common` of them: all of
    these, or, if memory cannot be cut, the tokens up to one of its `ends`.
    """
    if ends is None or common >= length:
        return min(length, common)
    return max((end for end in ends if end <= common), default=0)


@attrs.define(eq=False)
class Snapshot:
    """The KV of `tokens`."""

    tokens: array[int]
    parts: tuple[bytes, ...]
    """States as `Context.state_get` gave them: of all tokens, or of consecutive runs of them."""
    reuses: int = 0
    """Number of times that it was used, in cells or here."""
    used_ms: float = 0.0
    is_on_disk: bool = False
    is_lasting: bool = False
    """Whether it is on disk, or was passed on to be written."""
    tier: Tier = Tier.MEMORY
    """Tier from which it came, until its first use: read from disk for a prompt, or kept in memory."""
    pins: int = 0
    """Number of preempted sequences that wait for it; it stays while there are any."""
    ends: dict[int, bytes] | None = None
    """Checkpoints by length, with which a sequence can resume before the snapshot's end. None where memory can be cut
    anywhere."""

    def serves_for(self, size: int) -> bool:
        """Whether it makes a snapshot of its first `size` tokens needless, or nearly so."""
        found = self.usable(size)
        return size == len(self.tokens) or (found > 0 and size - found <= MAX_LOST_TOKENS)

    def usable(self, common: int) -> int:
        """How many tokens can be restored for a prompt that has `common` of them."""
        return usable(len(self.tokens), common, self.ends)

    def whole(self) -> array[int]:
        """Tokens of the snapshot, for `kv.events.Run`."""
        return self.tokens

    @property
    def size_bytes(self) -> int:
        """Size of its data and tokens."""
        return _size(sum(map(len, (*self.parts, *(self.ends or {}).values()))), len(self.tokens))

    @property
    def worth(self) -> tuple[float, float]:
        """Tokens that it is expected to save; of equals the one used later is worth more."""
        return _worth(len(self.tokens), self.reuses, self.used_ms)


def is_worth(saves_tokens: int, reuses: int) -> bool:
    """Whether a snapshot that saves `saves_tokens`, and was used `reuses` times, is worth taking."""
    return saves_tokens * (reuses + UNUSED_REUSES) >= MIN_WORTH


def _size(data_bytes: int, n_tokens: int) -> int:
    return data_bytes + 4 * n_tokens


def _worth(n_tokens: int, reuses: int, used_ms: float) -> tuple[float, float]:
    return n_tokens * (reuses + UNUSED_REUSES), used_ms


class SnapshotStore:
    """Snapshots up to `capacity_bytes`; the least worth is evicted first, of equals the one unused longest.

    Pinned ones stay: preempted sequences wait for them.
    """

    def __init__(self, capacity_bytes: int, *, on_added: Callable[[Snapshot], None] | None = None) -> None:
        self.events = KvEvents()
        """Events of snapshots that are stored and removed; those of cells go to the same listeners."""
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes: Callable[[], int] = lambda: 0
        """Returns how much of the memory checkpoints use now."""
        self._on_added = on_added
        self._index: PrefixIndex[Snapshot] = PrefixIndex()
        self._husks: deque[Snapshot] = deque(maxlen=MAX_HUSKS)
        self.size_bytes = 0
        self.hits = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._index)

    @property
    def is_enabled(self) -> bool:
        """Whether anything can be kept."""
        return self.capacity_bytes > 0

    @property
    def _free_for_all(self) -> int:
        """Bytes available to snapshots."""
        return self.capacity_bytes - self.reserved_bytes()

    def make_way(self) -> None:
        """Evict snapshots until they fit what `reserved_bytes` leaves, after that has grown."""
        self._shrink(0)

    def halve(self) -> None:
        """Give half of the memory back to the system; the least worth is evicted."""
        self._shrink(self._free_for_all - self.size_bytes // 2)
        trim_heap()

    def find(self, tokens: array[int], longer_than: int) -> tuple[Snapshot, int] | None:
        """The snapshot that saves most of `tokens`, and how many; None if none saves more than `longer_than`."""
        found = self._index.most_useful(tokens, Snapshot.usable)
        return found if found is not None and found[1] > longer_than else None

    def covering(self, tokens: array[int]) -> Snapshot | None:
        """A snapshot that holds all of `tokens`."""
        return self._index.covering(tokens, Snapshot.usable)

    def accepts(self, tokens: array[int], saves_tokens: int, reuses: int) -> bool:
        """Whether a snapshot of `tokens`, which saves `saves_tokens` and was used `reuses` times, is worth taking."""
        return self.is_enabled and is_worth(saves_tokens, reuses) and self.covering(tokens) is None

    def has_place_for(self, data_bytes: int, n_tokens: int, reuses: int, used_ms: float) -> bool:
        """Whether such a snapshot fits without evicting any that is worth more."""
        size = _size(data_bytes, n_tokens)
        if self.size_bytes + size <= self._free_for_all:
            return True
        limit = _worth(n_tokens, reuses, used_ms)
        kept = sum(other.size_bytes for other in self._index if other.pins or other.worth >= limit)
        return kept + size <= self._free_for_all

    def add(self, snapshot: Snapshot, *, is_lasting: bool = True) -> bool:
        """Add a snapshot. Those it covers are dropped, those least worth evicted as needed. Returns whether it fits.

        One with exactly the same tokens is replaced, or kept instead if it is pinned. With `is_lasting` the snapshot
        also goes to disk.
        """
        same = self._index.get(snapshot.tokens)
        if same is not None and same.pins:
            return True
        if self.size_bytes + snapshot.size_bytes > self._free_for_all:
            loose = sum(other.size_bytes for other in self._index if not other.pins)
            if self.size_bytes - loose + snapshot.size_bytes > self._free_for_all:
                return False
        for other, size in list(self._index.beginnings(snapshot.tokens)):
            if not other.pins and snapshot.serves_for(size):
                self._remove(other)
        self._shrink(snapshot.size_bytes)
        self._index.put(snapshot.tokens, snapshot)
        self.size_bytes += snapshot.size_bytes
        self.events.stored(Tier.MEMORY, 0, len(snapshot.tokens), snapshot.whole)
        if is_lasting:
            self.keep_on_disk(snapshot)
        return True

    def keep_on_disk(self, snapshot: Snapshot) -> None:
        """Pass a snapshot on to the disk tier, unless it is there already."""
        if self._on_added is not None and not snapshot.is_on_disk and not snapshot.is_lasting:
            self._on_added(snapshot)
        snapshot.is_lasting = True

    def lasting_tokens(self, tokens: array[int]) -> int:
        """How many of `tokens` a snapshot on disk can restore."""
        found = self._index.most_useful(tokens, lambda kept, common: kept.usable(common) if kept.is_lasting else 0)
        return found[1] if found else 0

    def used(self, snapshot: Snapshot, now_ms: float) -> None:
        """Note that a snapshot was restored."""
        snapshot.reuses += 1
        snapshot.used_ms = now_ms
        self.hits += 1

    def drop(self, snapshot: Snapshot) -> None:
        """Drop a snapshot that cannot be restored. One on disk is remembered, so that its file is not read again."""
        if self._index.get(snapshot.tokens) is snapshot:  # cache evicted for it can have replaced it
            self._remove(snapshot)
        if snapshot.is_on_disk:
            snapshot.parts = ()
            self._husks.append(snapshot)

    def _shrink(self, size_bytes: int) -> None:
        """Evict the least worth until `size_bytes` more fit, as far as pins allow."""
        while self.size_bytes + size_bytes > self._free_for_all:
            least = min(
                (snapshot for snapshot in self._index if not snapshot.pins),
                key=lambda snapshot: snapshot.worth,
                default=None,
            )
            if least is None:
                return
            self._remove(least)
            self.evictions += 1

    def _remove(self, snapshot: Snapshot) -> None:
        self.events.removed(Tier.MEMORY, 0, len(snapshot.tokens), snapshot.whole)
        self._index.discard(snapshot.tokens)
        self.size_bytes -= snapshot.size_bytes
