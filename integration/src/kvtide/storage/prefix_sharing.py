"""Prefixes that rows share: hits at admission, checkpoints and pages that go over to the tree, room that comes of it (rows K7-K9).

    admit      match and lock → priced with the hit → accepted: pages into the row, checkpoint copied into the running slot
    recorded   a forward that ends on the grid: its state is copied into a tracking slot
    advance    windows retire; what was computed goes over to the tree, up to a checkpoint where the model has state
    release    what is left goes over, as far as a hit could end in it; the lock ends, the rest is freed

Pages that a row has handed over stay in its counts and its price as long as it needs them: they are what its promise was for. So does
the tail of each window that came with its hit, which it would have held had it computed it. The tree reports as held, and as
evictable, what no row accounts for.

Where a model has no state, a hit ends at any page, so prompts go over chunk by chunk; of a stage whose states other stages hold, on their
grid. With `no_buffer` the state is the running slot's: a copy of it goes over behind each chunk that ends a page, and at the end the slot
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from kvtide.chain import ChainAllocator
from kvtide.device import IntArray
from kvtide.sizing import CheckpointStrategy, SizedPlan
from kvtide.storage.evicting_takes import EvictingTakes
from kvtide.storage.handed_pages import HandedPages, SharingObserver
from kvtide.storage.prices import Hits
from kvtide.storage.requests import RequestTable
from kvtide.storage.row_units import RowUnits
from kvtide.storage.shared_rows import SharedRows
from kvtide.storage.statistics import SharingStatistics
from kvtide.storage.tracking_slots import NO_TRACKING_SLOT, TrackingSlots
from kvtide.storage.tree import NO_STATE, EvictionPolicy, PrefixTree, TreeLock, TreeShape


class PrefixSharing:
    """The tree and the rows that use it; a `PrefixCache`. One owner: the storage."""

    def __init__(
        self,
        sized: SizedPlan,
        chain: ChainAllocator,
        requests: RequestTable,
        *,
        units: RowUnits,
        takes: EvictingTakes,
        policy: EvictionPolicy | None,
    ) -> None:
        """An empty tree."""
        plan = sized.plan
        self.tree = PrefixTree(TreeShape.of(plan, sized.policy.grid_tokens(plan)), policy)
        """For statistics and questions."""
        self._chain = chain
        self._requests = requests
        self._units = units
        self._takes = takes
        self._page_tokens = plan.page_tokens
        self._grid = sized.policy.grid_tokens(plan)
        self._has_state = plan.state_sub_pool is not None
        self._copies_running = sized.policy.strategy is CheckpointStrategy.NO_BUFFER
        self.tracking = TrackingSlots(sized.policy, sized.max_running_requests, takes)
        """Slots of rows beside their running ones."""
        places = {pool.name: place for place, pool in enumerate(plan.sub_pools)}
        shape = self.tree.shape
        full_place = None if shape.full is None else places[shape.full]
        # Rows count windows in pages, the tree in units: alike while `check_supported` refuses windows of smaller pages.
        assert all(window.ratio == 1 for window in shape.windows), "multiply by the ratio first"
        self._window_places = [places[window.name] for window in shape.windows]
        self._state_place = None if shape.state is None else places[shape.state]
        self._names = list(places)
        self._rows = SharedRows(sized, full_place=full_place, window_places=self._window_places)
        self._pages = HandedPages(
            self.tree, self._rows, chain, requests, units=units, window_places=self._window_places
        )

    def watch(self, observer: SharingObserver) -> None:
        """Tell `observer` of copies and rehomed pages, from now on."""
        self._pages.observer = observer

    # ── what admission and takes ask (`PrefixCache`) ──

    def held_units(self) -> Mapping[str, int]:
        """See `PrefixCache.held_units`; negative where rows account for one unit twice."""
        held, charged = self.tree.held_units(), self._rows.charged.sum(axis=1).tolist()
        return {name: held[name] - charged[place] for place, name in enumerate(self._names)}

    def evictable_units(self) -> Mapping[str, int]:
        """See `PrefixCache.evictable_units`."""
        self._pin()
        return self.tree.evictable_units()

    def units_counted_on_again(self) -> Mapping[str, int]:
        """See `PrefixCache.units_counted_on_again`."""
        self._pin()
        return self.tree.units_counted_on_again()

    def evict_until(self, is_enough: Callable[[Mapping[str, int]], bool]) -> None:
        """See `PrefixCache.evict_until`."""
        self._pin()
        freed = self.tree.evict(is_enough)
        assert freed is not None, "it is asked only where all that is evictable would do"
        self._pages.free(freed)

    # ── a row's life ──

    def lock(self, prompts: Sequence[IntArray], extra_keys: Sequence[Hashable]) -> list[TreeLock]:
        """Hold the longest hit of each prompt before admission is asked; `unlock` what it refuses. A prompt's last token is computed."""
        locks: list[TreeLock] = []
        try:
            for prompt, extra_key in zip(prompts, extra_keys, strict=True):
                locks.append(self.tree.lock(self.tree.match(prompt[:-1], extra_key)))
        except BaseException:
            self.unlock(locks)
            raise
        return locks

    def unlock(self, locks: Sequence[TreeLock]) -> None:
        """Nothing came of it: the tree is as it was."""
        for lock in reversed(locks):
            self.tree.unlock(lock)

    def hits(self, locks: Sequence[TreeLock]) -> Hits:
        """What was locked, as admission counts it."""
        tails: IntArray = np.zeros((len(self._names), len(locks)), np.int64)
        for request, lock in enumerate(locks):
            tails[self._window_places, request] = lock.pages - np.array(lock.begins, np.int64)
        checkpoints: IntArray = np.zeros(len(self._names), np.int64)
        if self._state_place is not None:
            slots = {self.tree.state_slot(lock) for lock in locks} - {NO_STATE}
            checkpoints[self._state_place] = len(slots)
        return Hits(
            tokens=tuple(lock.pages * self._page_tokens for lock in locks),
            tails=tails,
            checkpoints=checkpoints,
        )

    def accept(self, locks: Sequence[TreeLock]) -> None:
        """Admission has said yes."""
        for lock in locks:
            self.tree.accept(lock)

    def copy_checkpoints(self, locks: Sequence[TreeLock], slots: IntArray) -> None:
        """Into the running slots of requests that begin with these hits; the tree need keep none for them any longer.

        Behind this call nothing can come in the way of `begin`.
        """
        kept = np.array([self.tree.state_slot(lock) for lock in locks], np.int64)
        is_hit = kept != NO_STATE
        self._copy(kept[is_hit], slots[is_hit])
        for lock in locks:
            self.tree.state_copied(lock)

    def begin(
        self, rows: IntArray, locks: Sequence[TreeLock], prompts: Sequence[IntArray], slots: IntArray
    ) -> None:
        """Rows were opened with these hits; `slots [rows, …]`: each one's running slot, then its tracking slots."""
        for place, (row, lock, prompt) in enumerate(zip(rows.tolist(), locks, prompts, strict=True)):
            branch = self.tree.admitted(lock) * self._page_tokens
            self._units.let_go(row, self._rows.open(row, lock, prompt, branch))
            pages = self.tree.pages(lock)
            if len(pages):
                row_array, count = np.array([row]), np.array([len(pages)])
                self._requests.append(row_array, count, pages)
                self._units.start_behind(row, len(pages))
                self._pages.forget_let_go(row)
            if self._has_state:
                self.tracking.begin(row, slots[place, 1:])

    def shares(self, row: int) -> bool:
        """Whether a row was admitted with its tokens."""
        return bool(self._rows.is_shared[row])

    def latest_checkpoints(self, rows: IntArray, lengths: IntArray, noted: IntArray) -> IntArray:
        """Where rows of these lengths have theirs: as `noted`, but rows that share prefixes at the latest point of the grid, to which
        they are priced. The checkpoint there was taken, or is forgone, and what a hit on the one before needs is the tree's.

        So while a row runs, whatever is evicted meanwhile, the tail that a hit there reads of each window stays.
        """
        if self._grid is None:
            return noted
        return np.where(self._rows.is_shared[rows], lengths // self._grid * self._grid, noted)

    def chunk_end(self, row: int, start: int, end: int) -> int:
        """Where a chunk that may reach from `start` to `end`, not past the prompt, is to end, so that its windows and state serve others.

        On the last point of the grid before `end`; before that where the prompt parts from what the tree knows, if no hit reached there:
        behind it windows would retire, and the state advance, past what both prompts have. At `start` where checkpoints lie on a grid and
        no chunk of so few tokens may end: off the grid ends a prompt's last one alone.
        """
        grid = self._page_tokens if self._grid is None else self._grid
        branch = int(self._rows.branches[row]) // grid * grid
        if start < branch < end:
            return branch
        last = end // grid * grid
        if self._grid is not None and end < self._requests.prompts[row]:
            return max(start, last)
        return last if (self._has_state or self._grid is not None) and last > start else end

    def recorded(self, rows: IntArray, ends: IntArray) -> None:
        """A forward was recorded that brings rows to `ends` tokens: keep the states that lie on the grid."""
        if not self._has_state or self._grid is None:
            return
        is_due = self._rows.is_shared[rows] & (ends % self._grid == 0)
        if not is_due.any():
            return
        rows = rows[is_due]
        of_rows = rows.tolist()
        before = self.tracking.counts(of_rows)
        try:
            slots = self.tracking.due(of_rows, ends[is_due].tolist())
            is_kept = slots >= 0
            on_their_way = rows[is_kept]
            try:
                self._copy(self._requests.state_slots[on_their_way], slots[is_kept])
            except BaseException:
                self.tracking.forgo(on_their_way.tolist())
                raise
            self.tracking.copied(on_their_way.tolist())
        finally:
            self._count_slots(rows, self.tracking.counts(of_rows) - before)

    def advance(self, rows: IntArray, chosen: IntArray | None) -> None:
        """Rows have come to their lengths, and their windows have retired; `chosen[i]`: the token behind row `rows[i]`'s, −1 for none."""
        is_shared = self._rows.is_shared[rows]
        rows, chosen = rows[is_shared], None if chosen is None else chosen[is_shared]
        lengths = self._requests.lengths[rows]
        if chosen is not None:
            self._rows.learn(rows, lengths, chosen)
        self._pages.let_go(rows)
        due = self._due(rows, lengths)
        if not due:
            return
        if self._copies_running and self._has_state:
            self._hand_over_copies(due)
        elif self._has_state:
            self._hand_over_checkpoints(due)
        else:
            for row, end, kept in self._pages.ends(due):
                self._pages.hand_over(row, end, kept)

    def release(self, rows: IntArray) -> None:
        """Rows are over: hand over what a hit could end in, and let go of the tree."""
        rows = rows[self._rows.is_shared[rows]]
        lengths = np.minimum(self._requests.lengths[rows], self._rows.known[rows]).tolist()
        over = list(zip(rows.tolist(), lengths, strict=True))
        for (row, length), (_, end, kept) in zip(over, self._pages.ends(over), strict=True):
            if not self._has_state:
                self._pages.hand_over(row, end, kept)
            elif (
                self._copies_running
                and length % self._page_tokens == 0
                # A forward that is recorded, or was queued in part, has taken the state further than the tokens go.
                and self._requests.state_is_of(row, length)
            ):
                slot = int(self._requests.state_slots[row])
                if end > self._rows.ends[row] and self._pages.hand_over(row, end, kept, slot):
                    self._requests.state_slots[row] = NO_STATE
                    self._count_slots(row, -1)
            if self._has_state:
                slots = self.tracking.end(row)
                self._free_slots(slots)
                self._count_slots(row, -len(slots))
            # The rest of its columns go with what they name; these would go on naming what the tree may let go of.
            named = min(int(self._rows.ends[row]), int(self._requests.page_counts[row]))
            self._requests.forget(np.array([row]), np.array([0]), np.array([named]))
            lock, charged = self._rows.close(row)
            self.tree.unlock(lock)
            self._units.let_go(row, charged)

    # ── questions ──

    def statistics(self) -> SharingStatistics:
        """Exact figures."""
        tree = self.tree.statistics()
        return SharingStatistics(
            matched_tokens=tree.matched_tokens,
            hit_tokens=tree.hit_tokens,
            restorable_tokens=tree.restorable_tokens,
            held_units=tree.held_units,
            evictable_units=self.evictable_units(),
            evicted_units=tree.evicted_units,
            stalled_checkpoints=dict(self.tracking.stalls),
        )

    def verify(self, rows: IntArray) -> None:
        """Raise `InvariantError` unless the tree's books are what its nodes say, and each lock is that of one of `rows`, those in use."""
        self._rows.verify(rows)
        self.tree.verify(self._rows.locks.values())

    # ── helpers ──

    def _pin(self) -> None:
        """Have the tree keep what would not come free if it let go of it."""
        uses = self._chain.uses
        if uses.bind_layout:
            self.tree.pin(uses.keeps, uses.moment)
        else:
            self.tree.unpin()

    def _due(self, rows: IntArray, lengths: IntArray) -> list[tuple[int, int]]:
        """Rows that have something to hand over, with their lengths; behind most steps none."""
        if self._grid is not None:
            is_due = lengths % self._grid == 0
        else:
            is_due = lengths <= self._requests.prompts[rows]
            if self._has_state:
                is_due &= lengths % self._page_tokens == 0
        return list(zip(rows[is_due].tolist(), lengths[is_due].tolist(), strict=True))

    def _hand_over_checkpoints(self, due: Sequence[tuple[int, int]]) -> None:
        """States at these lengths of rows, as far as they were not forgone; the rows then hold what they do at rest."""
        arrived: list[int] = []
        for row, end, kept in self._pages.ends(due):
            slot = self.tracking.arrived(row, end * self._page_tokens)
            if slot is None:
                continue
            arrived.append(row)
            if self._pages.hand_over(row, end, kept, slot):
                self._count_slots(row, -1)
            else:
                self.tracking.keep(row, slot)
        if not arrived:
            return
        before = self.tracking.counts(arrived)
        self._free_slots(self.tracking.give_up(arrived))
        self.tracking.replace(arrived)
        self._count_slots(np.array(arrived), self.tracking.counts(arrived) - before)

    def _hand_over_copies(self, due: Sequence[tuple[int, int]]) -> None:
        """Of running states, for requests that go on: one copy for each checkpoint that the tree has not, however many rows come to it.

        What finds no slot is forgone.
        """
        coming = [
            (found.prefix, row, end, kept)
            for row, end, kept in self._pages.ends(due)
            if (found := self._pages.checkpoint(row, end)) is not None
        ]
        # Evictions for slots, and hand-overs, change the nodes that these keys name, and not which rows come to one prefix: so keys
        # are asked for once, and what the tree has there anew.
        slots = self._slots_of_new([(key, row, end) for key, row, end, _ in coming])
        # The first row of each is copied.
        first_rows = {key: row for key, row, _, _ in reversed(coming)}
        targets = np.array(list(slots.values()), np.int64)
        try:
            self._copy(self._requests.state_slots[[first_rows[key] for key in slots]], targets)
        except BaseException:
            self._free_slots(targets)
            raise
        for key, row, end, kept in coming:
            slot = slots.get(key)
            if slot is None:
                slot = self._state_at(row, end)
            if slot == NO_STATE:
                self.tracking.stalls[NO_TRACKING_SLOT] += 1
                continue
            took = self._pages.hand_over(row, end, kept, slot)
            is_first = key in slots and first_rows[key] == row
            if is_first and not took:
                # Nobody else would free it.
                self._free_slots(np.array([slots.pop(key)]))
            assert took == is_first, "the tree has it by now, or has not"

    def _slots_of_new(self, wanted: Sequence[tuple[Hashable, int, int]]) -> dict[Hashable, int]:
        """Slots for those of `wanted`, each a checkpoint's key, a row and its page, that the tree has not; in order, as far as there are any."""
        slots: dict[Hashable, int] = {}
        try:
            while missing := {
                key: None
                for key, row, end in wanted
                if key not in slots and self._state_at(row, end) == NO_STATE
            }:
                taken = self._takes.try_most_slots(len(missing)).tolist()
                slots |= zip(list(missing)[: len(taken)], taken, strict=True)
                if len(taken) < len(missing):
                    break
                # To make room for these, one may have been evicted that the tree had: then that is wanted too.
        except BaseException:
            self._free_slots(np.array(list(slots.values()), np.int64))
            raise
        return slots

    def _state_at(self, row: int, end: int) -> int:
        found = self._pages.checkpoint(row, end)
        return NO_STATE if found is None else found.state

    def _count_slots(self, rows: int | IntArray, changes: int | IntArray) -> None:
        if self._state_place is not None:
            self._units.counts[self._state_place, rows] += changes

    def _free_slots(self, slots: IntArray) -> None:
        if len(slots):
            self._chain.free_state_slots(slots)

    def _copy(self, sources: IntArray, targets: IntArray) -> None:
        if not len(sources):
            return
        self._chain.copy_state_slots(sources, targets)
        if self._pages.observer is not None:
            self._pages.observer.states_copied(sources, targets)
