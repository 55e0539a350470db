"""One allocator over every band (rows C1, C2, C5, C9, C11, C13).

| call | when | refuses | waits for |
| - | - | - | - |
| `take` | units are needed | what no layout holds, by a `TakeRefusal` | the schedule stream, for what it must |
| `ensure_capacity` | units will be needed | as `take` | the same |
| `units_fit` | to know whether a take would be served | – | nothing |
| `written`, `pay_zero_debt` | the taking forward is recorded, or will not run | – | the latter: the schedule stream |
| `forward_recorded`, `forward_processed` | after the calls of `ForwardSteps` | – | nothing |
| `copy_state_slots` | a state is copied to another slot | – | the schedule stream, for the slots' writers |
| `rehome_window` | a window's pages come to stand for other virtual pages | – | nothing |
| `free_pages`, `free_state_slots` | units are given up | – | nothing |

A take names virtual pages to mint, which (sub-)pages of them and of older ones each window binds, and state slots. It is planned
whole, on counts alone, and either refused with nothing changed or committed by a half that cannot fail: in place, if every band finds its units among its free ones and in the gap it grows into; otherwise by relief, which moves as few
bytes as serve, if any layout that can be reached holds everything (`kvtide.chain.relief`).

With a full-attention band, the *owner*, a virtual page is bound there from mint to free, windows release it first, and it returns
with the owner's free. Without one it returns once no band binds any of it.

Misuse raises `ChainError` before anything changes, and `InvariantError` between a forward's launch and its recording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from kvtide.chain.band import Band, FloatBand
from kvtide.chain.books import Books, chain_books
from kvtide.chain.chain_bands import ChainBands, sub_pages
from kvtide.chain.checks import (
    bound_units,
    check_may_read,
    check_may_write,
    checked,
    is_count,
    units_to_free,
)
from kvtide.chain.errors import ChainError
from kvtide.chain.estimates import Estimates
from kvtide.chain.id_space import IdSpace, VirtualPages
from kvtide.chain.refusal import TakeRefusal, refusal_of
from kvtide.chain.rehoming import plan_rehoming
from kvtide.chain.relief import Relief, Spans, TransferWaiter
from kvtide.chain.snapshot import reclaimed_snapshot
from kvtide.chain.statistics import ChainStatistics, band_statistics
from kvtide.chain.takes import BandTake, Owed, Taken, ZeroDebts, asked_of_bands
from kvtide.chain.units import Units, some, units_of
from kvtide.chain.uses import ChainUses
from kvtide.device import Device, IntArray, Mirror
from kvtide.ledger import (
    CheckLevel,
    FencedBytes,
    ForwardSteps,
    InvariantChecks,
    InvariantError,
    PageUsage,
    RecordedForward,
    clone_of,
)
from kvtide.plan import ArenaLayout, Growth, PageSpan

MAX_FLUSH_MOVES = 4096
"""Units that an opportunistic flush moves in a band at most, unless it is told otherwise."""

_NO_CHECKS = InvariantChecks(CheckLevel.OFF)


class ChainAllocator:
    """Every take and free of every band; see the module's docstring.

    It decides on the host, orders work on the device's schedule stream, reads no device memory and never blocks the host. Lists
    of units are one-dimensional int64 arrays, which the caller may not write to afterwards.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        device: Device,
        mirrors: Mapping[str, Mirror],
        steps: ForwardSteps,
        *,
        checks: InvariantChecks = _NO_CHECKS,
        wait_for_transfers: TransferWaiter | None = None,
    ) -> None:
        """Empty bands over `layout`, with `mirrors["ids:BAND"]` for each id table; zeroes the sinks.

        Without `wait_for_transfers`, what a transfer touches stays where it is until it is over, and a take that would need it is
        refused; with it the host waits there, where no layout goes around transfers.
        """
        self.layout = layout
        self.steps = steps
        """The forwards that the bands follow."""
        self._device = device
        self._checks = checks
        self._fences = FencedBytes(steps)
        self._bands = ChainBands(
            layout,
            [
                (FloatBand if band.growth is Growth.FLOAT else Band)(
                    band,
                    mirrors[f"ids:{band.name}"],
                    device,
                    self._fences,
                    steps,
                )
                for band in layout.bands
            ],
        )
        self._pages = VirtualPages(layout.virtual_page_count, counted=self._bands.owner is None)
        state = self._bands.state
        self._slots = IdSpace(0, state.layout.capacity_pages if state is not None else 0)
        self._debts = ZeroDebts()
        self._estimates = Estimates(self._bands, self._pages, checks)
        self._wait_for_transfers = wait_for_transfers
        self._relief = Relief(self._bands, self._fences, device, steps, wait_for_transfers, checks=checks)
        self.uses = ChainUses(self._bands)
        """Copies, transfers, reservations and holds of its units."""

    def clone(
        self,
        device: Device,
        mirrors: Mapping[str, Mirror],
        *,
        wait_for_transfers: TransferWaiter | None = None,
    ) -> ChainAllocator:
        """The same chain over another device's bytes and mirrors, which goes its own way from here (row C13).

        Its `steps` are a clone too; signals and events are shared. Where this chain would wait for transfers, the clone calls
        `wait_for_transfers`, or without one takes them for over: it waits for nobody. A chain that would refuse goes on refusing.
        Costs a copy of the id tables and books.
        """
        steps = self.steps.clone()
        fences = self._fences.clone(steps)
        bands = self._bands.clone(
            [band.clone(device, mirrors[f"ids:{band.layout.name}"], fences, steps) for band in self._bands]
        )
        pages = self._pages.clone()
        uses = ChainUses(bands)
        waiter = self._wait_for_transfers and (wait_for_transfers or uses.end_each)
        return clone_of(
            self,
            steps=steps,
            _device=device,
            _fences=fences,
            _bands=bands,
            _pages=pages,
            _slots=self._slots.clone(),
            _debts=self._debts.clone(),
            _estimates=Estimates(bands, pages, self._checks),
            _wait_for_transfers=waiter,
            _relief=self._relief.clone(bands, fences, device, steps, waiter),
            uses=uses,
        )

    # ── takes ──

    def take(
        self, *, pages: int = 0, state_slots: int = 0, bands: Mapping[str, BandTake] | None = None
    ) -> Taken | TakeRefusal:
        """Mint `pages` virtual pages and `state_slots` state slots and bind what `bands` says; all of it or a refusal.

        Without `bands`, every attention band binds every (sub-)page of the new pages; with it, a window that it does not name binds
        none. The owner binds every new page either way. Units come zeroed but for what the taking forward writes whole
        (`BandTake.unwritten`), ordered on the schedule stream behind everything that may still touch them.
        """
        self.steps.check_pages_may_change("a take")
        asked = asked_of_bands(self._bands, self._pages, pages, state_slots, bands)
        waits_before = self._relief.host_wait_count
        spans = self._make_room([ask.unit_count for ask in asked])
        if isinstance(spans, TakeRefusal):
            return spans
        if self._relief.host_wait_count > waits_before:
            # What ended with the transfers may have freed what the take names: it is refused as an error, nothing being taken.
            asked_of_bands(self._bands, self._pages, pages, state_slots, bands)
        minted, slots = units_of(self._pages.mint(pages)), units_of(self._slots.mint(state_slots))
        debt: dict[str, Owed] = {}
        for band, ratio, ask, span in zip(self._bands, self._bands.ratios, asked, spans, strict=True):
            if not ask.unit_count:
                continue
            virtual = ask.virtual(minted if ratio else slots, ratio)
            unwritten = ask.how.unwritten
            band.take(virtual, span, unwritten)
            if ratio:
                self._pages.bound(virtual.ids, ratio)
            if unwritten is not None and len(unwritten) < ask.unit_count:
                debt[band.layout.name] = Owed(virtual.ids, unwritten)
        taken = Taken(minted.ids, slots.ids)
        if debt:
            self._debts.open(taken, debt)
        return taken

    def units_fit(self, units: Mapping[str, int]) -> bool:
        """Whether a take of so many units by band would be served now (C5); bands left out take none."""
        return self._relief.fits(self._counts(units))

    def admits(self, units: Mapping[str, int], evictable: Mapping[str, int]) -> bool:
        """Whether a take of so many units would be served once `evictable` units, by band, had been freed: admission's question.

        Units under a transfer are not evictable: leave them out. Raises `ChainError` for more than a band holds beside its fixed ones.
        """
        snapshot = reclaimed_snapshot(
            self._relief.snapshot(), self._counts(evictable), around_network=self._relief.goes_around
        )
        return self._relief.fits(self._counts(units), snapshot)

    def fits_after_frees(self, units: Mapping[str, int], freed: Mapping[str, int]) -> bool:
        """The same, as an eviction asks it: whether the victims chosen so far, `freed` units by band, are enough to stop."""
        return self.admits(units, freed)

    def prealloc_fits(self, units: Mapping[str, int], held_back: Mapping[str, int]) -> bool:
        """Whether a take would be served and leave room for `held_back` units by band, which pending work was promised (T8)."""
        beside = self._counts(held_back)
        return self._relief.fits([ask + more for ask, more in zip(self._counts(units), beside, strict=True)])

    def ensure_capacity(self, units: Mapping[str, int]) -> TakeRefusal | None:
        """Rearrange now, if needed, so that a take of so many units by band is served in place; refused, nothing has changed."""
        self.steps.check_pages_may_change("ensure_capacity")
        made = self._make_room(self._counts(units))
        return made if isinstance(made, TakeRefusal) else None

    def flush_opportunistic(self, max_moves: int = MAX_FLUSH_MOVES) -> int:
        """Close holes while there is nothing better to do; how many units moved, `max_moves` a band at most.

        It never waits for an unretired forward and never moves what somebody holds; the schedule stream may wait for copies.
        """
        self.steps.check_pages_may_change("a flush")
        if not is_count(max_moves):
            raise ChainError(
                f"cannot flush at most {max_moves!r} units a band: an integer of 0 or more is needed"
            )
        return sum(
            band.flush_opportunistic(max_moves)
            for band in self._bands
            if band.layout.growth is not Growth.FLOAT
        )

    # ── what forwards do to units ──

    def written(self, taken: Taken) -> None:
        """The taking forward is recorded: it writes what came without zeroing."""
        self._debts.close(taken)

    def pay_zero_debt(self, taken: Taken) -> None:
        """The taking forward will not run: zero what came without, as far as it is still held.

        What was queued of an aborted launch must be ordered before: the schedule stream has waited for it. Raises `ChainError`, with
        the debt still open, while units of it are fixed or under a transfer.
        """
        self.steps.check_pages_may_change("zeroing")
        owed_units = []
        for name, owed in self._debts.of(taken).items():
            band, virtual = self._bands[name], owed.units()
            units = band.ids.physical(units_of(virtual))
            check_may_write(band, virtual, units, "zero")
            owed_units.append((band, units))
        self._debts.close(taken)
        for band, units in owed_units:
            band.zero(units)

    def forward_recorded(self, forward: RecordedForward, writes: Mapping[str, IntArray | None]) -> None:
        """What a recorded forward writes, by band, as virtual (sub-)pages and slots; `None` where it is unknown (row L7).

        A band left out is not written. Call it before anything moves. Raises `ChainError` for what is not bound.
        """
        units = {
            name: None if virtual is None else self._bound(self._bands[name], virtual, "write").ids
            for name, virtual in writes.items()
        }
        for name, written in units.items():
            self._bands[name].usage.record_forward_writes(forward, written)

    def forward_processed(self, forward: int) -> None:
        """Return the units that waited for `forward` or an earlier one; call it after `ForwardSteps.forward_processed`."""
        self.steps.check_processed(forward)
        for band in self._bands:
            band.release_pending_through(forward)

    def copy_state_slots(self, sources: IntArray, targets: IntArray) -> None:
        """Copy the state in each virtual slot of `sources` to that of `targets`, which are named once and are no sources.

        One source may go to several targets. On the schedule stream, behind every recorded forward that may write either; a forward reads no target that it does not
        write, and whatever else reads one is the caller's to wait for. A target owes no zeroing afterwards.
        """
        self.steps.check_pages_may_change("a state copy")
        state = self._state_band()
        both = np.concatenate([sources, targets])
        units = self._bound(state, both, "copy").ids
        if (
            len(sources) != len(targets)
            or len(np.unique(targets)) != len(targets)
            or np.isin(targets, sources).any()
        ):
            raise ChainError(
                f"cannot copy state slots {some(sources)} to {some(targets)}: a target each, no target twice, and none a source"
            )
        check_may_read(state, sources, units[: len(sources)], "copy")
        check_may_write(state, targets, units[len(sources) :], "copy to")
        if len(sources):
            state.copy(units[: len(sources)], units[len(sources) :])
            self._debts.forget(state.layout.name, targets)

    def rehome_window(self, band_name: str, sources: IntArray, targets: IntArray) -> None:
        """Let what a window binds to the virtual (sub-)pages `sources` stand for `targets` from now on, place by place.

        Nothing is taken or moved, and what is known of the units stays known. Raises `ChainError`, with nothing changed, for a source
        that is not bound there, a target that is, or whose page is not minted, and for a page named twice.
        """
        self.steps.check_pages_may_change("a rehoming")
        planned = plan_rehoming(self._bands, self._pages, band_name, sources, targets)
        if len(sources):
            planned.carry_out(self._pages, self._bands.ratio(planned.band))
            if self._debts:
                self._debts.rename(band_name, sources, targets)

    # ── frees ──

    def free_pages(self, band_name: str, virtual: IntArray) -> None:
        """Release virtual (sub-)pages in one band, at once and without a wait; the last release of a virtual page returns it.

        Raises `ChainError`, with nothing changed, for a page that is out of range, not bound there, named twice or reserved, and
        for an owner's page that a window still holds.
        """
        self.steps.check_pages_may_change("a free")
        band = self._bands[band_name]
        if band is self._bands.state:
            raise ChainError(f"band {band_name!r} holds state slots; free them with free_state_slots")
        freed = checked(band, virtual, "free")
        units = units_to_free(band, freed)
        if band is self._bands.owner:
            self._check_released(freed)
            self._pages.give_back(virtual)
        else:
            self._pages.unbound(virtual, self._bands.ratio(band))
        self._free(band, freed, units)

    def free_state_slots(self, virtual_slots: IntArray) -> None:
        """Release state slots; errors as `free_pages`."""
        self.steps.check_pages_may_change("a free")
        state = self._state_band()
        freed = checked(state, virtual_slots, "free")
        units = units_to_free(state, freed)
        self._slots.give_back(virtual_slots)
        self._free(state, freed, units)

    # ── questions ──

    def physical_units(self, band_name: str, virtual: IntArray) -> IntArray:
        """Physical ids in one band; an unbound page reads as the sink, 0, an unbound slot as −1."""
        return self._bands[band_name].ids.physical(units_of(virtual))

    def live_units(self, band_name: str) -> IntArray:
        """Physical units in use in one band, ascending."""
        return self._bands[band_name].live_pages()

    def span(self, band_name: str) -> PageSpan:
        """Where one band stands."""
        return self._bands[band_name].span

    def ledger(self, band_name: str) -> PageUsage:
        """The uses of one band's pages that are not over."""
        return self._bands[band_name].usage

    def statistics(self) -> ChainStatistics:
        """Exact figures of every band."""
        return ChainStatistics(
            bands=tuple(band_statistics(band) for band in self._bands),
            arena_bytes=self.layout.arena_bytes - self.layout.prefix_bytes,
            free_page_ids=self._pages.free_count,
            free_slot_ids=self._slots.free_count,
            owed_units=self._debts.unit_count,
            rearrangements=self._relief.rearrangement_count,
        )

    def books(self) -> Books:
        """What it decides by, as nested tuples of integers: equal books, equal answers from here on (C13). Looks at every unit."""
        free_ids = self._pages.free_count, self._slots.free_count
        return chain_books(self._bands, self._fences, self.steps, self._debts.debts(), free_ids)

    def verify_byte_accounting(self) -> None:
        """Raise `InvariantError` unless every byte has at most one owner, every unit is counted once and no snapshot is stale (C11)."""
        self.verify_units()
        self.verify_snapshots()
        self.keep_snapshots()

    def verify_units(self) -> None:
        """The part of `verify_byte_accounting` that looks at bytes and units."""
        edge_byte, edge_name = self.layout.prefix_bytes, "reserved prefix"
        for band in self._bands:
            band.verify_counts()
            if band.first_page == band.end_page:
                continue
            name, start_byte = band.layout.name, band.layout.start_byte(band.first_page)
            end_byte = band.layout.start_byte(band.end_page)
            if start_byte < edge_byte or end_byte > self.layout.arena_bytes:
                raise InvariantError(
                    "chain.bytes_conserved",
                    f"band {name!r} spans bytes [{start_byte}, {end_byte}), {edge_name} ends at {edge_byte}",
                    "a band grew into its neighbour",
                )
            edge_byte, edge_name = end_byte, f"band {name!r}"
        self.steps.check_idle(sum(len(band.pending) for band in self._bands))

    def keep_snapshots(self) -> None:
        """Look at what every question is answered from, as if all were asked: `verify_snapshots` tells later if it went stale."""
        self._relief.keep()

    def verify_snapshots(self) -> None:
        """Raise `InvariantError` if a question would now be answered from what the chain was before: an epoch did not move (C11)."""
        self._relief.verify()

    # ── estimates: for logs, metrics and error text (C9) ──

    def capacity_decision(self, what: str) -> AbstractContextManager[None]:
        """Within it `what` is decided: an estimate that is read breaks `capacity.observe_only_read`."""
        return self._estimates.decision(what)

    def available_size(self) -> int:
        """About how many more tokens every attention band could hold together."""
        return self._estimates.pages("available_size") * self.layout.page_tokens

    def full_available_size(self) -> int:
        """About how many more tokens full attention could hold, nothing else growing; 0 without it."""
        owner = self._bands.owner
        return 0 if owner is None else self._estimates.tokens("full_available_size", owner)

    def window_available_size(self, band_name: str) -> int:
        """About how many more tokens one attention band could hold, nothing else growing."""
        return self._estimates.tokens("window_available_size", self._bands[band_name])

    def estimated_units_available(self, band_name: str) -> int:
        """About how many more units one band could take, nothing else growing."""
        return self._estimates.units("estimated_units_available", self._bands[band_name])

    def usage(self) -> float:
        """Share of the arena's bytes, behind its prefix, that is in use."""
        return self._estimates.used_share("usage")

    # ── helpers ──

    def _make_room(self, asked: Sequence[int]) -> Spans | TakeRefusal:
        """Where each band is to stand for what it is asked for, units having moved if they must; or why that cannot be."""
        made = self._relief.make_room(asked)
        if made is not None:
            return made
        return refusal_of(
            self._bands, asked, self._relief.snapshot(), around_network=self._relief.goes_around
        )

    def _counts(self, units: Mapping[str, int]) -> list[int]:
        for name, count in units.items():
            self._bands[name]
            if not is_count(count):
                raise ChainError(
                    f"cannot ask for {count!r} units of band {name!r}: an integer of 0 or more is needed"
                )
        return [units.get(name, 0) for name in self._bands.names]

    def _free(self, band: Band, virtual: Units, units: Units) -> None:
        band.free(virtual, units)
        if self._debts:
            self._debts.forget(band.layout.name, virtual.ids)

    @staticmethod
    def _bound(band: Band, virtual: IntArray, verb: str) -> Units:
        return bound_units(band, checked(band, virtual, verb), verb)

    def _state_band(self) -> Band:
        if self._bands.state is None:
            raise ChainError("the chain has no state band")
        return self._bands.state

    def _check_released(self, virtual_pages: Units) -> None:
        """Raise `ChainError` for pages that a window still holds: they return with the owner's free."""
        for window, ratio in self._bands.windows:
            parts = virtual_pages if ratio == 1 else units_of(sub_pages(virtual_pages.ids, ratio))
            held = window.ids.is_bound(parts)
            if held.any():
                owner = self._bands.owner
                assert owner is not None, "only an owner's pages are checked"
                raise ChainError(
                    f"cannot free pages {some(np.unique(parts.ids[held] // ratio))} of band {owner.layout.name!r}: band "
                    f"{window.layout.name!r} still holds them; release them there first"
                )
