"""The prefix tree: which prompts' memory is kept for reuse, over all sub-pools at once (row K8).

| call | when | changes |
| - | - | - |
| `match` | a request is to be admitted | nothing |
| `lock` | admission is about to be asked, with the hit or with none | what is needed |
| `accept` | it has said yes | that the hit was used |
| `admitted` | the request has its row | the statistics |
| `state_copied` | the copy of the hit's checkpoint is queued | that the checkpoint may go |
| `advance` | its next token reads less of the windows | what is needed |
| `checkpoint` | its state may be worth a slot | nothing |
| `insert` | its pages are the tree's from now on, at a checkpoint or at its end | who holds them |
| `unlock` | it is over, or was not admitted: then the tree is as it was before `lock` | what is needed |
| `pin`, `unpin` | room is about to be asked for, while units are fixed or under a transfer | what is needed |
| `evict` | room is asked for | what is held |

The tree decides, and touches no memory: its answers name virtual units that the storage frees, rehomes or copies. It never looks at
the device or the clock, so ranks that are told the same answer the same. A node that a forward in flight reads may be evicted: its
pages pend in the chain until that forward is over.

Every prompt belongs to an *extra key*, an adapter or a tenant's salt: prompts of different extra keys share nothing. Keys are compared as those of a
dictionary: 1, 1.0 and True are one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence

import attrs
import numpy as np

from kvtide.device import IntArray
from kvtide.ledger import InvariantError
from kvtide.storage.errors import StorageError
from kvtide.storage.tree.eviction import Enough, Evictor
from kvtide.storage.tree.inserting import Handed, Inserted, Insertion, place_state
from kvtide.storage.tree.locks import Locks, TreeBooks, TreeLock
from kvtide.storage.tree.matching import Checkpoint, Match, match_along, prefix_behind, walk
from kvtide.storage.tree.nodes import NO_STATE, Node, join, nodes_below, root_of, split
from kvtide.storage.tree.pins import Keeps, Pins
from kvtide.storage.tree.policies import EvictionPolicy, LeastRecentlyUsed
from kvtide.storage.tree.shape import TreeShape
from kvtide.storage.tree.verifying import counted, verify_locks

_NO_TOKENS: IntArray = np.empty(0, np.int64)


@attrs.frozen(kw_only=True)
class TreeStatistics:
    """A tree at one moment; tokens and units since the start."""

    nodes: int
    """Nodes, roots apart."""

    held_units: Mapping[str, int]
    """In the tree, by band."""

    needed_units: Mapping[str, int]
    """Of them, those that running requests need."""

    matched_tokens: int
    """Tokens of prompts that requests were admitted with."""

    hit_tokens: int
    """Of them, those that needed no prefill."""

    restorable_tokens: Mapping[str, int]
    """By band, how many it could have restored by itself: a kind far above `hit_tokens` was held up by another."""

    evicted_units: Mapping[str, int]
    """By band."""


class PrefixTree:
    """See the module's docstring. One owner: the storage."""

    def __init__(self, shape: TreeShape, policy: EvictionPolicy | None = None) -> None:
        """Empty; without a policy, what was not used for longest is evicted first."""
        self.shape = shape
        """Its slots."""
        self._page_bytes = shape.page_tokens * 8
        self._roots: dict[Hashable, Node] = {}
        self._keys: dict[Node, Hashable] = {}
        self._books = TreeBooks(shape)
        self._locks = Locks(shape, self._books)
        self._pins = Pins(shape, self._locks)
        self._pinned_at: tuple[Hashable, int] | None = None
        self._evictor = Evictor(shape, self._books, LeastRecentlyUsed() if policy is None else policy)
        self._names = (shape.full, *(window.name for window in shape.windows), shape.state)
        self._epoch = 0
        self._matched_tokens = self._hit_tokens = 0
        self._restorable: Counter[str] = Counter()
        self._evicted: Counter[str] = Counter()

    # ── a request's life ──

    def match(self, tokens: Sequence[int] | IntArray, extra_key: Hashable = None) -> Match:
        """The longest prefix of `tokens`, in whole pages, that every sub-pool can restore; changes nothing.

        A request computes one token at least: leave a prompt's last one out.
        """
        root = self._roots.get(extra_key)
        if root is None:
            root = root_of(self.shape)
        raw = self._raw(tokens)
        return match_along(
            walk(root, raw, self._page_bytes), root, self.shape, extra_key=extra_key, epoch=self._epoch
        )

    def lock(self, match: Match) -> TreeLock:
        """Need a hit, or what was computed behind none: nothing of it is evicted meanwhile. Until `accept` that is no use of it.

        Its checkpoint, if the model has state, is `state_slot(lock)`: copy it, then call `state_copied`. Raises `StorageError` for a
        match from before the tree changed.
        """
        self._check_current(match)
        root = self._roots.get(match.extra_key)
        if root is None:
            root = self._roots[match.extra_key] = root_of(self.shape)
            self._keys[root] = match.extra_key
        node, cut = match.node if match.hit_pages else root, None
        if match.hit_pages < node.end:
            node = cut = split(node, match.hit_pages - node.first, self.shape)
            self._evictor.node_count += 1
        self._epoch += 1
        lock = self._locks.open(root, node, match)
        lock.cut = cut
        return lock

    def accept(self, lock: TreeLock) -> None:
        """Admission has said yes: the hit counts as used, and a node that ends with it stays."""
        self._check_open(lock)
        self._locks.used(lock, self._evictor.policy.stamp())
        if lock.cut is not None:
            self._evictor.queue.add_all(lock.cut)
            lock.cut = None

    def admitted(self, lock: TreeLock) -> int:
        """The lock's request begins: count its hit. Pages that it shares with others, as far as the tree knew when it was matched."""
        match, page_tokens = lock.match, self.shape.page_tokens
        assert match is not None, "a pin is nobody's request"
        self._matched_tokens += match.shared_pages * page_tokens
        self._hit_tokens += match.hit_pages * page_tokens
        for name, pages in zip(self.shape.bands, match.restorable_pages, strict=True):
            self._restorable[name] += pages * page_tokens
        return match.shared_pages

    def pages(self, lock: TreeLock) -> IntArray:
        """Virtual pages of the lock's prefix; 0 for those of which nothing is held."""
        parts, node = [], lock.node
        while node.parent is not None:
            parts.append(node.pages)
            node = node.parent
        return np.concatenate([_NO_TOKENS, *reversed(parts)])

    def state_slot(self, lock: TreeLock) -> int:
        """Virtual state slot of the checkpoint that the lock's request starts from; −1 for none."""
        return NO_STATE if lock.state_node is None else lock.state_node.state

    def state_copied(self, lock: TreeLock) -> None:
        """The copy of the checkpoint is queued, or will not be: the tree need not keep it for this request."""
        self._check_open(lock)
        node = self._locks.end_copy(lock)
        if node is not None:
            self._evictor.queue.add_all(node)

    def advance(self, lock: TreeLock, first_units: Sequence[int]) -> None:
        """The request reads no unit of a window before `first_units`, one a window, any more."""
        self._check_open(lock)
        for node in self._locks.advance(lock, tuple(first_units)):
            self._evictor.queue.add_all(node)

    def checkpoint(self, lock: TreeLock, tokens: Sequence[int] | IntArray) -> Checkpoint:
        """Where `insert` would keep a state of these tokens behind the lock; changes nothing."""
        self._check_open(lock)
        return prefix_behind(lock.node, self._raw(tokens), self._page_bytes)

    def insert(
        self,
        lock: TreeLock,
        tokens: Sequence[int] | IntArray,
        pages: IntArray,
        *,
        held_from: Sequence[int],
        needed_from: Sequence[int],
        state: int = NO_STATE,
    ) -> Inserted:
        """Take over what a request computed behind its lock, which then reaches to the end of it.

        Args:
            lock: the request's.
            tokens: of `pages`, as many as fill them.
            pages: its virtual pages behind the lock's.
            held_from: first unit of each window, counted from the beginning of the prompt, that the request binds.
            needed_from: first unit of each window that it goes on to need; none before `held_from` behind the lock.
            state: virtual slot of its state behind the last token; −1 for none.

        Raises `StorageError`, with nothing changed, where these do not go together.
        """
        self._check_open(lock)
        raw = self._raw(tokens)
        self._check_handed(lock, len(tokens), len(pages), held_from, needed_from)
        if state != NO_STATE and self.shape.state is None:
            raise StorageError(f"cannot insert state slot {state}: the plan has no state")
        handed = Handed(
            shape=self.shape,
            raw=raw,
            first=lock.pages,
            pages=np.asarray(pages, np.int64),
            held=tuple(held_from),
        )
        self._epoch += 1
        stamp = self._evictor.policy.stamp()
        for node in self._locks.advance(lock, tuple(needed_from)):
            self._evictor.queue.add_all(node)
        insertion = Insertion(handed, self._books.held, stamp)
        node = insertion.run(lock.node)
        self._evictor.node_count += len(insertion.new_nodes)
        took_state = place_state(node, state)
        if took_state:
            self._books.held[-1] += 1
        if state != NO_STATE:
            node.stamps[-1] = stamp
        lock.begins = [
            max(begin, needed) if needed < node.end * window.ratio else node.end * window.ratio
            for begin, needed, window in zip(lock.begins, needed_from, self.shape.windows, strict=True)
        ]
        self._locks.extend(lock, node, stamp)
        for each in (*insertion.new_nodes, *insertion.met, node):
            self._evictor.queue.add_all(each)
        return insertion.answer(took_state)

    def unlock(self, lock: TreeLock) -> None:
        """The request is over; what only it needed can be evicted. Of locks that nobody has accepted, end the last one first."""
        self._check_open(lock)
        touched = self._locks.close(lock)
        if lock.cut is not None:
            self.unpin()
            if join(lock.cut):
                self._evictor.node_count -= 1
                self._epoch += 1
        for node in touched:
            self._evictor.queue.add_all(node)
        self._evictor.prune(lock.node)
        self._evictor.bare_roots.append(lock.root)
        self._forget_bare_roots()

    # ── room ──

    def pin(self, keeps: Keeps, moment: Hashable) -> None:
        """Need, for nobody, each node that holds a unit that `keeps` says would not come free, until `unpin` or another moment.

        `moment`: alike while `keeps` would answer the same; then nothing is asked unless the tree has changed. Costs what the tree has of
        nodes otherwise.
        """
        if self._pinned_at == (moment, self._epoch):
            return
        self.unpin()
        self._pins.set([node for node in nodes_below(self._roots.values()) if not node.is_root], keeps)
        self._pinned_at = (moment, self._epoch)

    def unpin(self) -> None:
        """Everything would come free."""
        for node in self._pins.drop():
            self._evictor.queue.add_all(node)
        self._pinned_at = None

    def evict(self, is_enough: Enough) -> dict[str, IntArray] | None:
        """Let go of the least, in the policy's order, for which `is_enough` says yes; virtual units by band, to be freed in this order.

        `is_enough` is asked about units by band, and must not change anything. `None`, with nothing changed, where all that no request
        needs would not be enough.
        """
        freed = self._evictor.evict(is_enough)
        if freed is not None:
            self._epoch += 1
            for name, units in freed.items():
                self._evicted[name] += len(units)
            self._forget_bare_roots()
        return freed

    def evictable_units(self) -> dict[str, int]:
        """Units by band that no request needs: all of them can be evicted."""
        books = self._books
        return self._by_band([held - needed for held, needed in zip(books.held, books.needed, strict=True)])

    def units_counted_on_again(self) -> dict[str, int]:
        """Window units by band that must fit beside those in use: what one request lets go of while another keeps it, it takes anew."""
        return self._by_band(self._books.again)

    def held_units(self) -> dict[str, int]:
        """Units by band that the tree holds."""
        return self._by_band(self._books.held)

    # ── questions ──

    def statistics(self) -> TreeStatistics:
        """Exact figures."""
        return TreeStatistics(
            nodes=self._evictor.node_count,
            held_units=self.held_units(),
            needed_units=self._by_band(self._books.needed),
            matched_tokens=self._matched_tokens,
            hit_tokens=self._hit_tokens,
            restorable_tokens={name: self._restorable[name] for name in self.shape.bands},
            evicted_units={name: self._evicted[name] for name in self.shape.bands},
        )

    def verify(self, locks: Collection[TreeLock]) -> None:
        """Raise `InvariantError` unless the books are what the nodes say, looked at one by one, and these what `locks` need.

        `locks`: every lock that somebody is going to end. One that nobody has would keep its prefix for ever.
        """
        verify_locks(self.shape, self._roots.values(), [*locks, *self._pins.open])
        books, nodes = counted(self.shape, self._roots.values())
        found = {name: getattr(self._books, name) for name in ("held", "needed", "again")}
        expected = {name: getattr(books, name) for name in ("held", "needed", "again")}
        if found != expected or nodes != self._evictor.node_count:
            raise InvariantError(
                "tree.books",
                f"{found} by slot in {self._evictor.node_count} nodes are on the books, the {nodes} nodes say {expected}",
                "a lock, an insertion or an eviction missed a node",
            )

    # ── helpers ──

    def _raw(self, tokens: Sequence[int] | IntArray) -> bytes:
        array = np.asarray(tokens)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise StorageError(
                f"tokens must be a one-dimensional list of whole numbers, found {array.dtype} {list(array.shape)}"
            )
        whole = len(array) // self.shape.page_tokens * self.shape.page_tokens
        return array[:whole].astype(np.int64, copy=False).tobytes()

    def _by_band(self, units: Sequence[int]) -> dict[str, int]:
        return {name: count for name, count in zip(self._names, units, strict=True) if name is not None}

    def _check_handed(
        self,
        lock: TreeLock,
        token_count: int,
        page_count: int,
        held_from: Sequence[int],
        needed_from: Sequence[int],
    ) -> None:
        windows = self.shape.windows
        if token_count != page_count * self.shape.page_tokens:
            raise StorageError(
                f"cannot insert {page_count} pages of {token_count} tokens: each page has {self.shape.page_tokens}"
            )
        if not len(held_from) == len(needed_from) == len(windows):
            raise StorageError(
                f"cannot insert with units of {len(held_from)} and {len(needed_from)} windows: the tree has {len(windows)}"
            )
        for window, held, needed in zip(windows, held_from, needed_from, strict=True):
            end = (lock.pages + page_count) * window.ratio
            if max(needed, lock.pages * window.ratio) < min(held, end):
                raise StorageError(
                    f"cannot insert pages whose units of {window.name!r} from {needed} on are needed: they are held from {held} on"
                )

    def _check_current(self, match: Match) -> None:
        if match.epoch != self._epoch:
            raise StorageError("cannot use a match from before the tree changed: match again")

    @staticmethod
    def _check_open(lock: TreeLock) -> None:
        if not lock.is_open:
            raise StorageError("cannot use a lock that is over: its request was unlocked before")

    def _forget_bare_roots(self) -> None:
        """Of extra keys of which nothing is held or needed any more."""
        for root in self._evictor.bare_roots:
            if not root.children and not root.locks and root in self._keys:
                del self._roots[self._keys.pop(root)]
        self._evictor.bare_roots.clear()
