"""What rows hold of each band: which pages a step takes, which its forward writes, and what is given up when (rows K7, L8).

    positions of a row       0 ─────────────────── kept ────────── length ── end of the step
    full                     [ bound ──────────────────────────────────────── )
    window, in pages         sink …… sink [ bound ─────────────────────────── )
    window, in activations   sink …… sink [ tail ───────── ) sink … [ tail ── )

What no later token reads is given up once its forward is processed: of a window W at length n the tokens before n − W + 1, of an
attention chunk those before its stretch. Where a policy keeps checkpoints on a grid, a hit on the row's latest one reads what a query
there would, and windows retire no further: the *retention floor*. Where the backend reads a chunk in activations, a window binds
only the chunk's tail, what is kept behind it; the rest reads as the sink, and its writes go there. An abandoned step gives back what it
took, so a row holds pages up to its prepared tokens and no further.

Frees are *segment frees*: runs of positions of rows, all of a verb checked before the first is carried out, so that a breach found in
one band leaves every other as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.chain import SINK, BandTake, ChainAllocator
from kvtide.device import IntArray
from kvtide.ledger import InvariantError
from kvtide.plan import SubPool, SubPoolKind
from kvtide.sizing import ChunkReads, SizedPlan
from kvtide.storage.requests import RequestTable, spread
from kvtide.storage.steps import PreparedStep

BoolArray = npt.NDArray[np.bool_]


class StepTake(NamedTuple):
    """What a step takes for its rows. Nothing has been taken."""

    new_pages: IntArray
    """Pages that each row's sequence grows by."""

    minted: BoolArray | None
    """Of all those, row after row, which some band binds; `None` for all. The others have no virtual page: nothing will read them."""

    page_count: int
    """Virtual pages to mint."""

    bands: Mapping[str, BandTake] | None
    """How each band binds them; `None` for whole, and zeroed."""

    bound: Sequence[IntArray]
    """Pages of each row that each attention band binds, in chain order."""


class Segment(NamedTuple):
    """A segment free of one band. Nothing has been freed."""

    place: int
    """Of the band in the chain."""

    rows: IntArray
    """Rows."""

    first: IntArray
    """First page of each row that it gives up."""

    ends: IntArray
    """One past the last."""

    virtual: IntArray
    """The virtual pages that are bound there."""

    freed: IntArray
    """How many of each row."""


class RowUnits:
    """Units by row and band. One owner: the storage; who changes rows goes through it."""

    def __init__(
        self, sized: SizedPlan, requests: RequestTable, chain: ChainAllocator, *, writes_whole_pages: bool
    ) -> None:
        """No row holds anything."""
        self._plan = sized.plan
        self._grid = sized.policy.grid_tokens(sized.plan)
        self._tails_only = sized.policy.chunk_reads is ChunkReads.ACTIVATIONS
        self._writes_whole_pages = writes_whole_pages
        self._requests = requests
        self._chain = chain
        self._owner_name = sized.layout.owner
        pools = list(enumerate(sized.plan.sub_pools))
        self._tokens = [(place, pool) for place, pool in pools if pool.kind is not SubPoolKind.STATE]
        # The owner last: a virtual page returns with it.
        self._releases = sorted(self._tokens, key=lambda entry: entry[1] is sized.plan.owner)
        self._retiring = [entry for entry in self._releases if entry[1].kind is not SubPoolKind.FULL]
        self.counts: IntArray = np.zeros((len(pools), sized.max_running_requests), np.int64)
        """Units that each row holds, `[bands, rows]`, bands in chain order."""
        self._first: IntArray = np.zeros_like(self.counts)
        """First page that each row may still hold."""

    # ── taking ──

    def take_of_step(self, rows: IntArray, ends: IntArray) -> StepTake | None:
        """What rows take so that row `rows[i]` reaches `ends[i]` tokens; `None` where they have room."""
        page_tokens = self._plan.page_tokens
        new_pages = np.maximum(0, -(-ends // page_tokens) - self._requests.page_counts[rows])
        if not self._tokens or not new_pages.any():
            return None
        # The forward fills all but the last page of a row that ends inside it, which is zeroed.
        ends_inside = (new_pages > 0) & (ends % page_tokens != 0)
        last = (np.cumsum(new_pages) - 1)[ends_inside]
        if self._tails_only and (ends <= self._requests.prompts[rows]).any():
            return self._tails(rows, ends, new_pages, last)
        bands = None
        if self._writes_whole_pages:
            bands = {pool.name: BandTake(unwritten=last) for _, pool in self._tokens}
        return StepTake(new_pages, None, int(new_pages.sum()), bands, [new_pages] * len(self._tokens))

    def taken(self, rows: IntArray, take: StepTake, virtual: IntArray) -> None:
        """Give rows what their step took: `virtual` pages, as many as it mints."""
        if take.minted is not None:
            minted, virtual = virtual, np.full(len(take.minted), SINK, np.int64)
            virtual[take.minted] = minted
        self._requests.append(rows, take.new_pages, virtual)
        for (place, _), bound in zip(self._tokens, take.bound, strict=True):
            self.counts[place, rows] += bound

    def begin(self, rows: IntArray, slots_each: int) -> None:
        """Count the state slots that rows begin with."""
        if self._plan.state_sub_pool is not None:
            self.counts[self._plan.sub_pools.index(self._plan.state_sub_pool), rows] = slots_each

    def start_behind(self, row: int, pages: int) -> None:
        """The first `pages` of a row are a prefix cache's: what it holds itself starts behind them."""
        for place, _ in self._tokens:
            self._first[place, row] = max(self._first[place, row], pages)

    def first_held(self, place: int, row: int) -> int:
        """First page that a row may still hold of the band at `place`."""
        return int(self._first[place, row])

    def first_kept_pages(self, rows: IntArray, places: Sequence[int]) -> IntArray:
        """First page of each row that it still reads of the windows at `places`, or a hit on its latest checkpoint; `[places, rows]`."""
        at = _floor(self._requests.lengths[rows], self._requests.checkpoint_lengths[rows])
        kept: IntArray = np.zeros((len(places), len(rows)), np.int64)
        for which, place in enumerate(places):
            kept[which] = self._first_kept(self._plan.sub_pools[place], at)
        return kept

    # ── backups ──

    def kept_pages(self, row: int, length: int, checkpoint: int) -> dict[str, IntArray]:
        """Of a row's first `length` tokens, the pages that a token behind them reads, or a hit on a checkpoint at that length.

        By attention band, counted from the row's beginning; whoever owns them.
        """
        virtual = self._requests.pages[row, : -(-length // self._plan.page_tokens)].astype(np.int64)
        kept = {}
        for place, pool in self._tokens:
            first = self._first_kept_of(place, length, checkpoint)
            kept[pool.name] = first + np.flatnonzero(self._is_bound(pool.name, virtual[first:]))
        return kept

    def restore(self, row: int, kept: Mapping[str, IntArray], minted: IntArray, virtual: IntArray) -> None:
        """Give a row that has just been opened at its length what was kept of one: `virtual` pages stand for its pages `minted`."""
        length, checkpoint = self._requests.lengths[row], self._requests.checkpoint_lengths[row]
        pages = np.full(-(-length // self._plan.page_tokens), SINK, np.int64)
        pages[minted] = virtual
        self._requests.append(np.array([row]), np.array([len(pages)]), pages)
        for place, pool in self._tokens:
            self.counts[place, row] += len(kept[pool.name])
            self._first[place, row] = self._first_kept_of(place, int(length), int(checkpoint))

    def _first_kept_of(self, place: int, length: int, checkpoint: int) -> int:
        pool = self._plan.sub_pools[place]
        if pool.kind is SubPoolKind.FULL:
            return 0
        return int(self._first_kept(pool, _floor(np.array(length), np.array(checkpoint))))

    def let_go(self, row: int, units: IntArray) -> None:
        """A row needs `units`, by band, of what a prefix cache holds of its price, no more."""
        self.counts[:, row] -= units

    def writes_of_step(self, step: PreparedStep) -> Mapping[str, IntArray]:
        """What a step's forward writes, by band: the pages that its tokens fall into, and its rows' state slots."""
        first = step.starts // self._plan.page_tokens
        last = (step.starts + step.counts - 1) // self._plan.page_tokens
        pages = self._requests.held(step.rows, first, last + 1)
        writes = {pool.name: pages for _, pool in self._tokens}
        if self._tails_only:
            writes = {name: pages[self._is_bound(name, pages)] for name in writes}
        if self._plan.state_sub_pool is not None:
            writes[self._plan.state_sub_pool.name] = self._requests.state_slots[step.rows]
        return writes

    # ── giving up ──

    def retired(self, rows: IntArray, lengths: IntArray, checkpoints: IntArray) -> Sequence[Segment]:
        """The window pages that neither a token behind `lengths` reads nor a hit on the rows' latest `checkpoints`; `retire` frees them.

        Raises `InvariantError` for one that is not bound.
        """
        at = _floor(lengths, checkpoints)
        segments = []
        for place, pool in self._retiring:
            ends = self._first_kept(pool, at)
            moves = ends > self._first[place, rows]
            if moves.any():
                moving = rows[moves]
                segments.append(self._segment(place, pool, moving, self._first[place, moving], ends[moves]))
        return segments

    def retire(self, segments: Sequence[Segment]) -> None:
        """Free what `retired` found. A forward in flight may still load it, so it pends until that is over."""
        self._free(segments)

    def give_back(self, rows: IntArray, lengths: IntArray) -> None:
        """Free the pages of rows behind their first `lengths[i]` tokens, which are prepared and of which nobody has given up the end."""
        first, ends = -(-lengths // self._plan.page_tokens), self._requests.page_counts[rows]
        behind = ends > first
        rows, first, ends = rows[behind], first[behind], ends[behind]
        if not len(rows):
            return
        segments = [self._segment(place, pool, rows, first, ends) for place, pool in self._releases]
        self._free(segments, at_end=True)
        self._requests.truncate(rows, first)

    def release(self, rows: IntArray) -> None:
        """Free everything that rows hold."""
        ends = self._requests.page_counts[rows]
        segments = [
            self._segment(place, pool, rows, self._first[place, rows], ends) for place, pool in self._releases
        ]
        self._check_whole(rows, segments)
        self._free(segments)
        self._first[:, rows] = 0
        state = self._plan.state_sub_pool
        if state is not None:
            slots = self._requests.state_slots[rows]
            self._chain.free_state_slots(slots[slots >= 0])
            self.counts[self._plan.sub_pools.index(state), rows] = 0

    # ── helpers ──

    def _first_kept(self, pool: SubPool, at: IntArray) -> IntArray:
        """First page that a query at position `at` reads, as `kvtide.sizing` prices it; or writes, of a window of one token."""
        if pool.window_tokens is not None:
            return np.maximum(0, at - pool.window_tokens + 1) // self._plan.page_tokens
        assert pool.chunk_tokens is not None, "full attention reads all"
        return (at - at % pool.chunk_tokens) // self._plan.page_tokens

    def _tails(self, rows: IntArray, ends: IntArray, new_pages: IntArray, last: IntArray) -> StepTake:
        """Of a chunk's new pages, windows bind those kept behind it; of a step past the prompt, all."""
        kept_at = ends if self._grid is None else ends - ends % self._grid
        kept_at = np.where(ends <= self._requests.prompts[rows], kept_at, 0)
        of_row, columns = spread(np.arange(len(rows)), self._requests.page_counts[rows], new_pages)
        bound = [
            np.ones(len(columns), np.bool_)
            if pool.kind is SubPoolKind.FULL
            else columns >= self._first_kept(pool, kept_at)[of_row]
            for _, pool in self._tokens
        ]
        minted = np.logical_or.reduce(bound)
        is_last: BoolArray = np.zeros(len(columns), np.bool_)
        is_last[last] = True
        bands = {}
        for (_, pool), is_bound in zip(self._tokens, bound, strict=True):
            unwritten = np.flatnonzero(is_last[is_bound]) if self._writes_whole_pages else None
            fresh = None if pool.kind is SubPoolKind.FULL else np.flatnonzero(is_bound[minted])
            bands[pool.name] = BandTake(fresh=fresh, unwritten=unwritten)
        counts = [np.bincount(of_row[is_bound], minlength=len(rows)) for is_bound in bound]
        return StepTake(new_pages, minted, int(minted.sum()), bands, counts)

    def _segment(self, place: int, pool: SubPool, rows: IntArray, first: IntArray, ends: IntArray) -> Segment:
        """Pages `[first[i], ends[i])` of rows in one band; raises `InvariantError` for one that is not bound."""
        freed = ends - first
        virtual = self._requests.held(rows, first, ends) if freed.any() else freed[:0]
        if len(virtual):
            is_bound = self._is_bound(pool.name, virtual)
            if self._tails_only:
                of_row = np.repeat(np.arange(len(rows)), freed)
                virtual, freed = virtual[is_bound], np.bincount(of_row[is_bound], minlength=len(rows))
            elif not is_bound.all():
                raise InvariantError(
                    "chain.window_segment_bound",
                    f"rows {rows.tolist()} give up virtual pages {virtual.tolist()} of band {pool.name!r}, which has not bound "
                    f"{virtual[~is_bound].tolist()}",
                    "they were freed behind the storage's back, or a row was written by someone else",
                )
        return Segment(place, rows, first, ends, virtual, freed)

    def _check_whole(self, rows: IntArray, segments: Sequence[Segment]) -> None:
        """Raise `InvariantError` unless a release frees all that rows hold, and no window keeps what the owner gives up."""
        for segment in segments:
            if (segment.freed != self.counts[segment.place, rows]).any():
                name = self._plan.sub_pools[segment.place].name
                raise InvariantError(
                    "chain.window_segment_bound",
                    f"rows {rows.tolist()} hold {self.counts[segment.place, rows].tolist()} pages of band {name!r}, of which "
                    f"{segment.freed.tolist()} are bound",
                    "they were freed behind the storage's back, or a row was written by someone else",
                )
        owned = segments[-1].virtual if segments else np.zeros(0, np.int64)
        for segment in segments[:-1]:
            name = self._plan.sub_pools[segment.place].name
            kept = int(np.count_nonzero(self._is_bound(name, owned))) - len(segment.virtual)
            if kept:
                raise InvariantError(
                    "chain.window_segment_released",
                    f"rows {rows.tolist()} give up {len(owned)} virtual pages, of which band {name!r} would keep {kept}",
                    "window pages were bound behind the storage's back, or their count was lost",
                )

    def _free(self, segments: Sequence[Segment], *, at_end: bool = False) -> None:
        """Free segments at the beginning of what rows hold, or at its end."""
        for segment in segments:
            name = self._plan.sub_pools[segment.place].name
            self._chain.free_pages(name, segment.virtual)
            if not at_end:
                self._first[segment.place, segment.rows] = segment.ends
            self.counts[segment.place, segment.rows] -= segment.freed
            if name == self._owner_name:
                self._requests.forget(segment.rows, segment.first, segment.ends)

    def _is_bound(self, name: str, virtual: IntArray) -> BoolArray:
        return np.not_equal(self._chain.physical_units(name, virtual), SINK)


def _floor(lengths: IntArray, checkpoints: IntArray) -> IntArray:
    """Where a query reads what rows of these lengths keep: behind them, or behind their latest checkpoints; `NO_CHECKPOINT` lies behind all."""
    at: IntArray = np.minimum(lengths, checkpoints)
    return at
