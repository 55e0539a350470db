"""One rank's side of sharing: the storage's own parts over the simulation's chain, and the verbs that its scheduler calls.

    request table, row units, prefix sharing with its tree, tracking slots    … as they ship
    admission                                                                 room is asked for, nothing is promised

Others in the world take what they like, so a promise means nothing here: a take that would have been promised is asked for first, and
a slot that is not to be had is a stall, as it is in service where fixed units stand in the way.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Literal

import numpy as np

from kvtide.chain import Taken, TakeRefusal
from kvtide.device import IntArray, Mirror
from kvtide.plan import SubPool
from kvtide.simulation import Rank, World
from kvtide.storage.evicting_takes import EvictingTakes
from kvtide.storage.prefix_sharing import PrefixSharing
from kvtide.storage.prices import Prices
from kvtide.storage.requests import RequestTable
from kvtide.storage.row_units import RowUnits
from kvtide.storage.simulated.meanings import Meanings
from kvtide.storage.simulated.settings import SharingSettings
from kvtide.storage.simulated.watched_chain import WatchedChain
from kvtide.storage.steps import check_step


class RowsOfWorld:
    """The storage's rows, each in some row of the world's table; a `Mirror`."""

    def __init__(self, mirror: Mirror, row_count: int, column_count: int) -> None:
        """No row stands anywhere yet."""
        self._mirror = mirror
        self._columns = column_count
        self.rows: IntArray = np.zeros(row_count, np.int64)
        """The world's row of each."""

    @property
    def length(self) -> int:
        """Entries."""
        return len(self.rows) * self._columns

    def stage(self, indices: IntArray, values: IntArray) -> None:
        """As a mirror's."""
        rows, columns = np.divmod(indices, self._columns)
        self._mirror.stage(self.rows[rows] * self._columns + columns, values)


class TakesBesideOthers(EvictingTakes):
    """Takes of which none was promised."""

    def __init__(self, chain: WatchedChain, state: SubPool | None) -> None:
        """No cache."""
        super().__init__(chain.as_chain)
        self._state = state

    def try_slots(self, count: int) -> IntArray | None:
        """`None` also where others have taken what would have been promised."""
        assert self._state is not None, "slots are taken of a state band"
        return super().try_slots(count) if self.has_room({self._state.name: count}) else None


class SharingRank:
    """See the module's docstring."""

    def __init__(self, world: World, rank: Rank, settings: SharingSettings, meanings: Meanings) -> None:
        """No row, an empty tree."""
        sized = settings.sized
        self._world = world
        self._settings = settings
        self.chain = WatchedChain(world, rank, meanings)
        rows = sized.max_running_requests
        self.rows = RowsOfWorld(rank.rows, rows, rank.column_count)
        chain = self.chain.as_chain
        self.requests = RequestTable(rows, rank.column_count, self.rows)
        self.units = RowUnits(sized, self.requests, chain, writes_whole_pages=settings.writes_whole_pages)
        state = sized.plan.state_sub_pool
        self.takes = TakesBesideOthers(self.chain, state)
        self.sharing = PrefixSharing(
            sized,
            chain,
            self.requests,
            units=self.units,
            takes=self.takes,
            policy=settings.make_policy(),
        )
        self.takes.use(self.sharing)
        self._prices = Prices(sized, recomputes=False)
        self._slots_each = sized.policy.rule.slots if state is not None else 0
        self._state_name = None if state is None else state.name

    # ── verbs ──

    def admit(
        self, world_row: int, prompt: IntArray, outputs: int, extra_key: Hashable, *, whole: bool
    ) -> int | None:
        """A row that begins with what the tree has of `prompt`; `None` where it has no room, for all of its life if `whole`."""
        locks = self.sharing.lock([prompt], [extra_key])
        hits = self.sharing.hits(locks)
        price = self.price(len(prompt), outputs, hits.tokens[0])
        # Of its price the tails of its hit are there.
        rest = {
            name: units - tail
            for (name, units), tail in zip(price.items(), hits.tails[:, 0].tolist(), strict=True)
        }
        if not self.takes.has_room(rest if whole else self._slots()):
            self.sharing.unlock(locks)
            return None
        self.sharing.accept(locks)
        slots = np.full((1, 1), -1, np.int64)
        if self._slots_each:
            slots = self.takes.take_slots(self._slots_each).reshape(1, -1)
        self.sharing.copy_checkpoints(locks, slots[:, 0])
        rows = self.requests.open(
            np.array([len(prompt)]),
            np.array([len(prompt) + outputs - 1]),
            slots[:, 0],
            chunk_limit=self._settings.sized.chunk_tokens,
            cached_tokens=np.array(hits.tokens),
            has_checkpoints=self._settings.grid is not None,
        )
        self.rows.rows[rows] = world_row
        self.units.begin(rows, self._slots_each)
        self.sharing.begin(rows, locks, [prompt], slots)
        return int(rows[0])

    def chunk(self, row: int, most: int) -> int:
        """Tokens of a row's next step: of its prompt at most `most`, one behind it; 0 at its end."""
        start, prompt = int(self.requests.prepared[row]), int(self.requests.prompts[row])
        if start >= prompt:
            return int(start < self.requests.limits[row])
        end = min(prompt, start + min(most, int(self.requests.chunk_limits[row])))
        return self.sharing.chunk_end(row, start, end) - start

    def prepare(self, rows: IntArray, counts: IntArray) -> Taken | Literal[False] | None:
        """Pages for `counts[i]` more tokens of row `rows[i]`: what was taken, false for no room, `None` where the rows have some."""
        settings = self._settings
        overlap = 2 if settings.sized.policy.overlap else 1
        check_step(self.requests, rows, counts, grid_tokens=settings.grid, forwards_in_flight=overlap)
        ends = self.requests.prepared[rows] + counts
        take, taken = self.units.take_of_step(rows, ends), None
        if take is not None:
            if not self.takes.has_room(self._world.units_asked(take.page_count, 0, take.bands)):
                return False
            answer = self.takes.take_pages(take.page_count, take.bands)
            if isinstance(answer, TakeRefusal):
                return False
            taken = answer
            self.units.taken(rows, take, taken.pages)
        self.requests.prepared[rows] = ends
        self.requests.open_steps[rows] += 1
        return taken

    def recorded(self, rows: IntArray, ends: IntArray) -> tuple[tuple[int, int], ...]:
        """A forward that brings rows to `ends` tokens was recorded; running slots whose states were copied, and the copies' slots."""
        self.requests.recorded[rows] = ends
        self.requests.state_in_doubt[rows] = False
        self.sharing.recorded(rows, ends)
        return tuple(self.chain.copies())

    def abandoned(self, rows: IntArray, starts: IntArray, *, is_launched: bool) -> None:
        """The rows' last steps, behind `starts` tokens, will not run."""
        if is_launched:
            self.requests.state_in_doubt[rows] = True
        self.units.give_back(rows, starts)
        self.requests.prepared[rows] = starts
        self.requests.open_steps[rows] -= 1

    def advance(self, rows: IntArray, lengths: IntArray, chosen: IntArray | None) -> None:
        """A forward that brought rows to `lengths` was processed; `chosen`: the token behind each, −1 where none is told, `None` for no row."""
        checkpoints = self.sharing.latest_checkpoints(rows, lengths, self.requests.checkpoint_lengths[rows])
        retired = self.units.retired(rows, lengths, checkpoints)
        self.requests.lengths[rows] = lengths
        self.requests.checkpoint_lengths[rows] = checkpoints
        self.requests.open_steps[rows] -= 1
        self.units.retire(retired)
        self.sharing.advance(rows, chosen)

    def release(self, rows: IntArray) -> None:
        """Rows are over."""
        self.sharing.release(rows)
        self.units.release(rows)
        self.requests.close(rows)

    def make_room(self, asked: Mapping[str, int]) -> bool | None:
        """Have the tree evict until so many units fit; `None` where they do, whether it could otherwise."""
        chain = self.chain
        if chain.admits(asked, {}):
            return None
        if not self.takes.has_room(asked):
            return False
        self.sharing.evict_until(lambda freed: chain.fits_after_frees(asked, freed))
        return True

    def evict_all(self) -> None:
        """Have the tree let go of all that nobody needs."""
        evictable = self.sharing.evictable_units()
        self.sharing.evict_until(lambda freed: all(freed[name] >= count for name, count in evictable.items()))

    # ── questions ──

    def price(self, prompt_tokens: int, outputs: int, cached: int) -> dict[str, int]:
        """Most units by band that a request holds, window tails of its hit among them, as admission prices it."""
        sized = self._settings.sized
        (demand,) = self._prices.demands([prompt_tokens], [outputs], sized.chunk_tokens, [cached])
        return dict(zip([band.name for band in sized.layout.bands], demand.units, strict=True))

    def stalls(self) -> dict[str, int]:
        """Checkpoints forgone and slots not replaced, so far."""
        return dict(self.sharing.tracking.stalls)

    def decided(self) -> tuple[object, ...]:
        """What must be alike on every rank, as a value."""
        tree = self.sharing.statistics()
        requests = self.requests
        return (
            tree,
            self.stalls(),
            requests.pages.tolist(),
            requests.state_slots.tolist(),
            requests.checkpoint_lengths.tolist(),
            self.units.counts.tolist(),
        )

    def _slots(self) -> dict[str, int]:
        return {} if self._state_name is None else {self._state_name: self._slots_each}
