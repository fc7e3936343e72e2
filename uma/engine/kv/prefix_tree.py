"""Which KV cells hold which tokens: a radix tree over token ids, for running and finished sequences.

Every node is a run of cells that were computed once; a sequence is the path from the root to the node in which it ends.
A request takes the longest computed path, whether its sequence has finished, decodes or is being prefilled, and adds
its own branch there. Nodes on the path of a running sequence are protected. All others are cache, which is evicted from
the ends inwards, the longest unused first.

Where a sequence can resume and be cut depends on the kind of memory (`memory_kinds.py`). The tree knows nothing of
llama.cpp: it calls a `Cells` for everything that must happen to cells, so it can be tested alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, takewhile
from typing import NamedTuple, Protocol

from uma.engine.kv.events import KvEvents, Tier
from uma.engine.kv.pictures import position_in
from uma.prefix import common_size


class Prefix(NamedTuple):
    """Beginning of a sequence that is copied, or that stays when the rest is cut off."""

    length: int
    """Number of tokens in it."""
    position: int
    """Position of the token behind it: with M-RoPE a picture has fewer positions than tokens."""
    checkpoint: bytes | None
    """Checkpoint of the state at its end, if there is one."""


class Cells(Protocol):
    """Operations on the KV cache that the tree calls."""

    @property
    def can_be_cut(self) -> bool:
        """See `memory_kinds.Attention`."""

    def copy(self, source: int, target: int, prefix: Prefix) -> bool:
        """Let `target` share this prefix of `source`, which without a checkpoint ends there, or can be cut there.

        False if memory could not be copied: `target` is then empty.
        """

    def cut(self, seq_id: int, prefix: Prefix) -> bool:
        """Cut `seq_id` to this prefix. False if it cannot be cut there: with a checkpoint in the prefix its content is
        then unknown, and must be dropped; else nothing has changed.
        """

    def free(self, seq_id: int) -> None:
        """Drop all that `seq_id` holds, and return the id."""

    def end_before(self, node: Node, length: int) -> tuple[Node, int]:
        """See `memory_kinds.Attention`."""


class Node:
    """A run of cells. `ids` are the sequence ids that end here; `locks` counts running ones here and below."""

    __slots__ = (
        "checkpoint", "children", "ids", "is_reported", "locks", "parent", "reuses", "start", "tokens", "used_at",
        "worth",
    )  # fmt: skip

    def __init__(self, parent: Node | None, start: int, tokens: array[int]) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.children: dict[int, list[Node]] = {}
        """Children by first token. Two that were computed side by side can begin alike."""
        self.ids: set[int] = set()
        self.locks = 0
        self.reuses = 0
        self.used_at = 0.0
        self.checkpoint: bytes | None = None
        """Checkpoint from which a sequence can resume behind this run, where memory cannot be cut."""
        self.worth = 0.0
        """Worth of the checkpoint (`checkpoints.py`)."""
        self.is_reported = False
        """Whether listeners know the run: always if memory can be cut, else once a sequence can resume at its end, or
        further down."""

    @property
    def is_end(self) -> bool:
        """Whether a sequence can resume behind this run, even if memory cannot be cut."""
        return bool(self.ids) or self.checkpoint is not None

    @property
    def end(self) -> int:
        """Tokens from the root to the end of this run."""
        return self.start + len(self.tokens)

    def every_child(self) -> Iterator[Node]:
        """Children, whatever their first tokens."""
        return chain.from_iterable(self.children.values())

    def likely_children(self, tokens: array[int]) -> list[Node]:
        """Children that begin with the token that `tokens` has behind this run."""
        return self.children.get(tokens[self.end], []) if self.end < len(tokens) else []

    @property
    def branches(self) -> bool:
        """Whether it has more than one child."""
        return sum(map(len, self.children.values())) > 1

    def adopt(self, child: Node) -> None:
        """Add a run behind this one."""
        child.parent = self
        self.children.setdefault(child.tokens[0], []).append(child)

    def disown(self, child: Node) -> None:
        """Undo `adopt`, before the child's first token changes."""
        alike = self.children[child.tokens[0]]
        alike.remove(child)
        if not alike:
            del self.children[child.tokens[0]]

    def twins(self) -> list[Node]:
        """This run, which is not the root, and those beside it that begin with the same token."""
        assert self.parent is not None
        return self.parent.children[self.tokens[0]]

    def path(self) -> Iterator[Node]:
        """This node and all above it, up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def alone(self) -> list[Node]:
        """This node and those above it that no other sequence shares, without the root."""
        found = [self]
        while (above := found[-1].parent) is not None and above.parent is not None:
            if above.ids or above.branches:
                break
            found.append(above)
        return found

    def whole(self) -> array[int]:
        """All tokens from the root to the end of this run."""
        tokens: array[int] = array("i")
        for node in reversed(list(self.path())):
            tokens.extend(node.tokens)
        return tokens

    def prefix(self, length: int | None = None) -> Prefix:
        """The first `length` tokens of its path; None: all."""
        tokens = self.whole()[:length]
        checkpoint = self.checkpoint if len(tokens) == self.end else None
        return Prefix(len(tokens), position_in(tokens, len(tokens)), checkpoint)

    def any_id(self) -> int:
        """A sequence id that holds all cells up to the end of this run."""
        node = self
        while not node.ids:
            node = next(node.every_child())
        return next(iter(node.ids))


class Match(NamedTuple):
    """Longest computed prefix of some tokens, and the longest one at which any kind of memory can resume."""

    node: Node
    """Node in which the longest computed prefix ends."""
    length: int
    """Length of that prefix."""
    end: Node
    """Node at the end of the longest prefix, short of all tokens, where a sequence ends or has a checkpoint."""


def common_length(left: array[int], right: array[int], at: int = 0) -> int:
    """How many tokens `left` and `right[at:]` have in common at their beginning."""
    # As bytes, which are compared faster than an array's numbers.
    return common_size(left.tobytes(), right[at : at + len(left)].tobytes()) // left.itemsize


class PrefixTree:
    """All sequences that hold cells. Belongs to the thread that owns the KV cache."""

    def __init__(self, cells: Cells, events: KvEvents | None = None) -> None:
        self._cells = cells
        self._can_be_cut = cells.can_be_cut
        self._events = events or KvEvents()
        self.root = Node(None, 0, array("i"))
        self.total_tokens = 0
        """Cells in use, shared ones counted once."""
        self.protected_tokens = 0
        """Tokens on the path of a running sequence."""
        self.node_count = 0
        self.cached: dict[int, Node] = {}
        """Finished sequences whose cells are kept, by sequence id."""
        self.evictions = 0
        """Runs of cells given up, in whole or in part."""
        self.checkpoints: dict[Node, None] = {}
        """Nodes that have one."""
        self.checkpoint_bytes = 0

    @property
    def evictable_tokens(self) -> int:
        """Cells that hold only cache."""
        return self.total_tokens - self.protected_tokens

    def match(self, tokens: array[int]) -> Match:
        """The longest prefix of `tokens` that is computed."""
        best, most, end = self.root, 0, self.root
        # Two sequences can have computed the same tokens side by side, in runs of different lengths: the run with most
        # in common is not always on the longest path.
        ahead = [self.root]
        while ahead:
            for child in ahead.pop().likely_children(tokens):
                common = common_length(child.tokens, tokens, child.start)
                if child.start + common > most:
                    best, most = child, child.start + common
                if common == len(child.tokens):
                    ahead.append(child)
                    if child.is_end and end.end < child.end < len(tokens):
                        end = child
        return Match(best, most, end)

    def start(self, seq_id: int, node: Node, length: int, now_ms: float) -> Node:
        """Begin a running sequence with the first `length` tokens of `node`'s path. Returns the node in which it ends:
        the root if nothing could be copied.
        """
        if length == 0:
            node = self.root
        elif length < node.end:
            node = self._split(node, length)
        if length:
            prefix = node.prefix()
            if node.ids:  # a sequence ends here, so no checkpoint is needed
                prefix = prefix._replace(checkpoint=None)
            if self._cells.copy(node.any_id(), seq_id, prefix):
                node.reuses += 1
            else:
                node = self.root
        node.ids.add(seq_id)
        for above in node.path():
            above.used_at = now_ms
            self._lock(above, 1)
        return node

    def extend(self, tip: Node, seq_id: int, tokens: Sequence[int]) -> Node:
        """Add computed tokens to a running sequence; returns the node in which it ends now."""
        self.total_tokens += len(tokens)
        self.protected_tokens += len(tokens)
        if self._is_open(tip):
            tip.tokens.extend(tokens)
            self._grew(tip, len(tokens))
            return tip
        child = Node(tip, tip.end, array("i", tokens))
        child.used_at, child.locks, child.is_reported = tip.used_at, 1, self._can_be_cut
        tip.ids.discard(seq_id)
        child.ids.add(seq_id)
        tip.adopt(child)
        self.node_count += 1
        self._grew(child, len(tokens))
        return child

    @staticmethod
    def _is_open(tip: Node) -> bool:
        """Whether this run can grow with its only sequence, instead of getting a child."""
        return tip.parent is not None and not tip.children and len(tip.ids) == 1 and tip.checkpoint is None

    def append(self, tip: Node, seq_id: int, token: int) -> Node:
        """`extend` by one token: the path of every decode row."""
        if self._is_open(tip):
            tip.tokens.append(token)
            self.total_tokens += 1
            self.protected_tokens += 1
            self._grew(tip, 1)
            return tip
        return self.extend(tip, seq_id, (token,))

    def finish(self, tip: Node, seq_id: int, now_ms: float, *, keep: bool) -> bool:
        """End a running sequence. With `keep` its cells stay as cache; returns whether `seq_id` still holds them."""
        for above in tip.path():
            above.used_at = now_ms
            self._lock(above, -1)
        if not keep or tip is self.root or self._is_redundant(tip, seq_id):
            self._forget(tip, seq_id)
            return False
        self.cached[seq_id] = tip
        self._report(tip)
        self._drop_covered(tip)
        return True

    def newest(self) -> int | None:
        """The cached sequence id used last; None if nothing is cached."""
        return max(self.cached, key=lambda seq_id: self.cached[seq_id].used_at, default=None)

    def leaves(self) -> list[int]:
        """Cached ids whose ends can be evicted, the longest unused first."""
        ends = [seq_id for seq_id, node in self.cached.items() if not node.children and node.locks == 0]
        return sorted(ends, key=lambda seq_id: self.cached[seq_id].used_at)

    def drop(self, seq_id: int) -> None:
        """Drop a cached sequence id. Only cells that no other id holds become free."""
        self.evictions += 1
        self._forget(self.cached[seq_id], seq_id)

    def shorten(self, seq_id: int, tokens: int) -> bool:
        """Free up to `tokens` cells at the end of a cached leaf (see `leaves`).

        Returns whether `seq_id` still holds anything: from a run that is used up it moves to the parent, unless another
        id holds that. If memory cannot be cut, everything behind the checkpoint before goes.
        """
        self.evictions += 1
        node = self.cached[seq_id]
        above, length = self._cells.end_before(node, node.end - tokens)
        is_held = above is self.root or (above is not node and (above.ids or above.branches))
        if is_held or not self._cells.cut(seq_id, above.prefix(length)):
            self._forget(node, seq_id)
            return False
        if above is node:
            self._cut(node, length - node.start)
            return True
        node.ids.discard(seq_id)
        above.ids.add(seq_id)
        self.cached[seq_id] = above
        self._unreport(node)
        self._prune(node)
        return True

    def truncate(self, tip: Node, seq_id: int, length: int) -> Node:
        """Cut a running sequence to its first `length` tokens; returns the node in which it ends now.

        The caller has cut the cells of the sequence already; other sequences keep the shared ones. Raises `ValueError`
        unless `length` is from 1 to the sequence's end: `finish` ends a sequence.
        """
        if not 0 < length <= tip.end:
            raise ValueError(f"length: {length} must be from 1 to the sequence's {tip.end} tokens")
        keep = tip
        while keep.start >= length:
            assert keep.parent is not None
            keep = keep.parent
        if length < keep.end:
            if keep is tip and not tip.children and tip.ids == {seq_id}:
                cut = tip.end - length
                self._cut(tip, length - tip.start)
                self.protected_tokens -= cut
                return tip
            keep = self._split(keep, length)
        node = tip
        while node is not keep:
            assert node.parent is not None
            self._lock(node, -1)
            node = node.parent
        tip.ids.discard(seq_id)
        keep.ids.add(seq_id)
        self._prune(tip)
        return keep

    def set_checkpoint(self, node: Node, checkpoint: bytes) -> None:
        """Give a checkpoint to this run, which has none yet and does not grow any more."""
        node.checkpoint = checkpoint
        self.checkpoints[node] = None
        self.checkpoint_bytes += len(checkpoint)
        self._report(node)

    def drop_checkpoint(self, node: Node) -> None:
        """Drop a run's checkpoint, if it has one."""
        if node.checkpoint is not None:
            self.checkpoint_bytes -= len(node.checkpoint)
            del self.checkpoints[node]
            node.checkpoint = None
            self._unreport(node)

    # Events

    def _grew(self, node: Node, tokens: int) -> None:
        if node.is_reported:
            self._events.stored(Tier.CELLS, node.end - tokens, node.end, node.whole)

    def _report(self, node: Node) -> None:
        """Report this run and those above it: a sequence can resume behind it."""
        for above in reversed(
            list(takewhile(lambda above: not above.is_reported and above is not self.root, node.path()))
        ):
            above.is_reported = True
            self._events.stored(Tier.CELLS, above.start, above.end, above.whole)

    def _unreport(self, node: Node | None) -> None:
        """Report this run as removed, and those above it, as far as no other reason to report them is left."""
        while node is not None and node.is_reported and not self._is_of_use(node):
            node.is_reported = False
            self._events.removed(Tier.CELLS, node.start, node.end, node.whole)
            node = node.parent

    def _is_of_use(self, node: Node) -> bool:
        if self._can_be_cut or node.checkpoint is not None or not self.cached.keys().isdisjoint(node.ids):
            return True
        return any(child.is_reported for child in node.every_child())

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root."""
        stack = list(self.root.every_child())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.every_child())

    def _cut(self, node: Node, keep: int) -> None:
        """Drop all but the first `keep` tokens of a run without children."""
        if node.is_reported:
            self._events.removed(Tier.CELLS, node.start + keep, node.end, node.whole)
        self.drop_checkpoint(node)
        self.total_tokens -= len(node.tokens) - keep
        del node.tokens[keep:]

    def _lock(self, node: Node, change: int) -> None:
        was = node.locks > 0
        node.locks += change
        if was != (node.locks > 0):
            self.protected_tokens += len(node.tokens) if node.locks > 0 else -len(node.tokens)

    def _split(self, node: Node, length: int) -> Node:
        """Split a run at `length` tokens from the root; returns the upper part."""
        assert node.parent is not None
        at = length - node.start
        upper = Node(node.parent, node.start, node.tokens[:at])
        upper.locks, upper.used_at, upper.reuses = node.locks, node.used_at, node.reuses
        upper.is_reported = node.is_reported
        node.parent.disown(node)
        node.parent.adopt(upper)
        node.start, node.tokens = length, node.tokens[at:]
        upper.adopt(node)
        self.node_count += 1
        return upper

    def _is_redundant(self, tip: Node, seq_id: int) -> bool:
        """Whether other sequences hold all these tokens anyway."""
        if tip.children or tip.ids != {seq_id}:
            return True
        return any(
            twin is not tip
            and common_length(twin.tokens, tip.tokens) == len(tip.tokens)
            and (self._can_be_cut or (twin.is_end and twin.end == tip.end))
            for twin in tip.twins()
        )

    def _drop_covered(self, tip: Node) -> None:
        """Drop cached sequences that `tip` covers: prefixes of it, and the same tokens computed twice."""
        covered = [node for node in tip.path() if node is not tip and node is not self.root]
        for twin in tip.twins():
            is_end = twin is not tip and not twin.children and twin.locks == 0 and twin.checkpoint is None
            if is_end and common_length(twin.tokens, tip.tokens) == len(twin.tokens):
                covered.append(twin)
        for node in covered:
            for seq_id in node.ids & self.cached.keys():
                tip.reuses = max(tip.reuses, node.reuses)
                self._forget(node, seq_id)

    def _forget(self, tip: Node, seq_id: int) -> None:
        self._cells.free(seq_id)
        self.cached.pop(seq_id, None)
        tip.ids.discard(seq_id)
        self._unreport(tip)
        self._prune(tip)

    def _prune(self, node: Node) -> None:
        """Remove this node and those above it, as far as no id holds them."""
        while node.parent is not None and not node.ids and not node.children:
            parent = node.parent
            self.drop_checkpoint(node)  # first, because it can report the run as removed
            if node.is_reported:
                self._events.removed(Tier.CELLS, node.start, node.end, node.whole)
            parent.disown(node)
            self.total_tokens -= len(node.tokens)
            self.node_count -= 1
            node = parent
