"""The second tier: KV of prefixes that had to leave their cells, kept in host memory.

Restoring a thousand tokens takes about a millisecond, computing them about a second. What is kept is what saves most:
length times how often it was used again. Belongs to the decode thread.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator

import attrs

from uma.engine.kv.events import KvEvents, Tier
from uma.engine.kv.prefix_index import PrefixIndex
from uma.llama.pages import trim_heap

LEAST_WORTH = 128.0
"""Tokens that a snapshot must be likely to save; for less, memory and copying are not spent."""
UNUSED_REUSES = 0.25
"""Worth of a prefix that no request has used again yet: a conversation can go on, but most prompts never return."""
LEAST_GAIN_TOKENS = 48
"""Minimum tokens that a snapshot must save beyond what cells or memory do, to be taken, restored, or read from disk."""
MOST_LOST_TOKENS = 256
"""Maximum tokens that have to be computed again where a longer snapshot has taken the place of a shorter one."""
MAX_HUSKS = 64
"""Maximum snapshots that could not be restored whose files are known not to be worth reading."""
MOST_COPY_BYTES = 32 * 2**20
"""Maximum bytes copied at a stretch, in 10 to 50 ms: a request that comes meanwhile, or a stream, waits for its end."""


def usable(length: int, common: int, ends: Collection[int] | None) -> int:
    """Tokens that can be restored of a snapshot of `length`, of which a prompt has `common`: where memory cannot
    be cut all, or up to one of its `ends`.
    """
    if ends is None or common >= length:
        return min(length, common)
    return max((end for end in ends if end <= common), default=0)


@attrs.define(eq=False)
class Snapshot:
    """The KV of `tokens`."""

    tokens: array[int]
    parts: tuple[bytes, ...]
    """States as `Context.state_get` gave them: of all tokens, or of one run of them after the other."""
    reuses: int = 0
    """How often it was found again, in its cells and here."""
    used_ms: float = 0.0
    is_on_disk: bool = False
    is_lasting: bool = False
    """Whether it is on disk, or was given to be written there."""
    tier: Tier = Tier.MEMORY
    """Where it comes from, until it is used: read from disk for a prompt, or kept in memory."""
    pins: int = 0
    """Preempted sequences that wait for it. As long as there are any it stays."""
    ends: dict[int, bytes] | None = None
    """Where memory cannot be cut, checkpoints by the lengths at which a sequence can begin with them, beside the whole.
    None where it can be cut anywhere."""

    def serves_for(self, size: int) -> bool:
        """Whether a snapshot of its first `size` tokens is needless beside this one, or nearly so."""
        found = self.usable(size)
        return size == len(self.tokens) or (found > 0 and size - found <= MOST_LOST_TOKENS)

    def usable(self, common: int) -> int:
        """How many tokens can be restored for a prompt that has so many of them."""
        return usable(len(self.tokens), common, self.ends)

    def whole(self) -> array[int]:
        """Tokens of the snapshot, for `kv.events.Run`."""
        return self.tokens

    @property
    def size_bytes(self) -> int:
        """What it counts for: its data and its tokens."""
        return _size(sum(map(len, (*self.parts, *(self.ends or {}).values()))), len(self.tokens))

    @property
    def worth(self) -> tuple[float, float]:
        """Tokens it is likely to save; among equals the one used later is worth more."""
        return _worth(len(self.tokens), self.reuses, self.used_ms)


def is_worth(saves_tokens: int, reuses: int) -> bool:
    """Whether a snapshot is worth taking that would save so many tokens as often as it was used."""
    return saves_tokens * (reuses + UNUSED_REUSES) >= LEAST_WORTH


def _size(data_bytes: int, n_tokens: int) -> int:
    return data_bytes + 4 * n_tokens


def _worth(n_tokens: int, reuses: int, used_ms: float) -> tuple[float, float]:
    return n_tokens * (reuses + UNUSED_REUSES), used_ms


class SnapshotStore:
    """Snapshots up to `capacity_bytes`; the least worth goes first, among equals the one unused longest.

    Those with pins stay: preempted sequences wait for them.
    """

    def __init__(self, capacity_bytes: int, *, on_added: Callable[[Snapshot], None] | None = None) -> None:
        self.events = KvEvents()
        """Events of what is stored and removed here; those of cells go to the same listeners."""
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes: Callable[[], int] = lambda: 0
        """How much of the memory is used otherwise at this moment."""
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
        """Whether anything can be kept at all."""
        return self.capacity_bytes > 0

    @property
    def _free_for_all(self) -> int:
        """Bytes that snapshots can have."""
        return self.capacity_bytes - self.reserved_bytes()

    def make_way(self) -> None:
        """Drop snapshots beyond the memory that `reserved_bytes` leaves, which has grown."""
        self._shrink(0)

    def halve(self) -> None:
        """Give half of the memory back to the system: those least worth go."""
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
        """Whether a snapshot of `tokens` is worth taking, that would save `saves_tokens` as often as it was used."""
        return self.is_enabled and is_worth(saves_tokens, reuses) and self.covering(tokens) is None

    def has_place_for(self, data_bytes: int, n_tokens: int, reuses: int, used_ms: float) -> bool:
        """Whether a snapshot like this could be kept without giving up any that is worth more."""
        size = _size(data_bytes, n_tokens)
        if self.size_bytes + size <= self._free_for_all:
            return True
        limit = _worth(n_tokens, reuses, used_ms)
        kept = sum(other.size_bytes for other in self._index if other.pins or other.worth >= limit)
        return kept + size <= self._free_for_all

    def add(self, snapshot: Snapshot, *, is_lasting: bool = True) -> bool:
        """Keep a snapshot; those it covers go, and if need be those least worth. Returns whether it is kept.

        One with the very same tokens is replaced, unless it is pinned: then that one stays. What `is_lasting` goes to
        the disk tier too.
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
        """Pass a snapshot to the disk tier, unless it is there."""
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
        """Drop a snapshot that cannot be restored. Of one on disk a husk stays, so that its file is not read again."""
        if self._index.get(snapshot.tokens) is snapshot:  # the cache that made room for it can have taken its place
            self._remove(snapshot)
        if snapshot.is_on_disk:
            snapshot.parts = ()
            self._husks.append(snapshot)

    def _shrink(self, size_bytes: int) -> None:
        """Make place for so much: those least worth go, as far as they can."""
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
