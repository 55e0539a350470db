"""Where a band's units are: its span, its free units by kind, what pricing sees of it (rows C2, C3, C11).

Every unit of the *span* is of one kind:

| kind | | taken |
| - | - | - |
| live | bound to a virtual unit | – |
| hole | free; at most a copy may still touch it | first |
| pending | freed, but a forward may still touch it | next, once a stream waits for that forward |
| vacated | moved away from, but a forward or a send may still read it | once that is over |
| withheld | free, but fixed or under a transfer | once that is over |

A unit that is let go at an open side of the span leaves it at once, and its bytes are fenced while anybody uses them; anywhere
else it stays as a hole. So the span never ends in a hole, and never retreats over a unit that pends or is withheld.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

from kvtide.chain.hole_set import HoleSet
from kvtide.chain.id_space import MASKED, SINK, UnitIds
from kvtide.chain.snapshot import BandSnapshot, extents_of
from kvtide.chain.units import NO_UNITS, Units, bounds, run_of, units_of
from kvtide.device import Device, IntArray, Mirror, UnitGrid
from kvtide.ledger import (
    FencedBytes,
    ForwardSteps,
    InvariantError,
    PageUsage,
    PendingPages,
    clone_of,
)
from kvtide.plan import BandLayout, Growth, PageSpan


class Staying(NamedTuple):
    """Units of a band that a layout has to go around, ascending, and the runs that they form."""

    epoch: int
    """Of the ledger."""

    fixed: IntArray
    """Promised to stay."""

    sent: IntArray
    """Under a transfer."""

    touched: IntArray
    """Under a transfer, or held until a peer is told of them."""

    fixed_extents: tuple[PageSpan, ...]
    sent_extents: tuple[PageSpan, ...]
    touched_extents: tuple[PageSpan, ...]


class BandUnits:
    """The books of one band. `Band` changes them."""

    def __init__(
        self,
        layout: BandLayout,
        mirror: Mirror,
        device: Device,
        fences: FencedBytes,
        steps: ForwardSteps,
    ) -> None:
        """An empty band whose virtual ids are the entries of `mirror`; zeroes its sink."""
        self.layout = layout
        self._grows_down = layout.growth is Growth.DOWN
        self._opens_below = layout.growth is not Growth.UP
        self._opens_above = layout.growth is not Growth.DOWN
        self.ids = UnitIds(layout.page_count, SINK if layout.has_sink else MASKED, mirror)
        self.pending = PendingPages()
        """Freed units that a forward may still touch."""
        self.first_page = self.end_page = self._anchor
        """The span: units from the lowest to the highest that is not given back."""
        self.live_count = 0
        """Units in use."""
        self.epoch = 0
        """Rises with every change of what pricing sees of the band, but those in its ledger."""
        self.moved_count = self.zeroed_count = self.settle_count = 0
        """Since the start: units moved, units zeroed on hand-out, waits queued for pending units."""
        self._device = device
        self._steps = steps
        self._grid = UnitGrid(layout.origin_bytes, layout.unit_bytes)
        self.usage = PageUsage(steps, layout.page_count, name=layout.name, grid=self._grid, fences=fences)
        """The band's ledger."""
        self._withheld = NO_UNITS
        self._stays: Staying | None = None
        self._holes = HoleSet(layout.page_count, from_high_end=self._grows_down)
        if layout.has_sink:
            device.zero_units(device.schedule_stream, self._grid, np.zeros(1, np.int64))

    def clone(self, device: Device, mirror: Mirror, fences: FencedBytes, steps: ForwardSteps) -> Self:
        """The same band over other bytes, which goes its own way (row C13)."""
        return clone_of(
            self,
            ids=self.ids.clone(mirror),
            pending=self.pending.clone(),
            usage=self.usage.clone(steps, fences),
            _device=device,
            _steps=steps,
            _holes=self._holes.clone(),
        )

    # ── questions ──

    @property
    def span(self) -> PageSpan:
        """Where the band stands."""
        return PageSpan(first_page=self.first_page, end_page=self.end_page)

    @property
    def hole_count(self) -> int:
        """Free units inside the span that nothing but a copy may still touch."""
        return len(self._holes)

    @property
    def free_count(self) -> int:
        """Units that a take can have without the band growing: holes, then pending units."""
        return len(self._holes) + len(self.pending)

    @property
    def withheld_count(self) -> int:
        """Free units that are fixed or under a transfer."""
        return len(self._withheld)

    @property
    def withheld_pages(self) -> IntArray:
        """The free units that are fixed or under a transfer."""
        return self._withheld

    def live_pages(self) -> IntArray:
        """Physical units in use, ascending."""
        return self.ids.bound_in(self.first_page, self.end_page)

    def snapshot(self, *, holds_stay: bool) -> BandSnapshot:
        """What pricing needs to know; costs nothing that grows with the band.

        What a receive holds counts as under a transfer where `holds_stay`; without it, it moves like any other unit.
        """
        vacated = self.usage.vacated_count
        free = self.free_count + vacated
        span_units = self.end_page - self.first_page
        if not self.usage.binds_layout:
            return BandSnapshot(self.first_page, self.end_page, span_units - free, free)
        staying = self._staying()
        network_free = 0
        if vacated:
            free -= int(np.count_nonzero(self.usage.is_vacated(staying.fixed)))
            left_behind = staying.sent[self.usage.is_vacated(staying.sent)]
            network_free = int(np.count_nonzero(~self.usage.is_fixed(left_behind)))
        if len(self._withheld):
            under_transfer = int(np.count_nonzero(~self.usage.is_fixed(self._withheld)))
            free += under_transfer
            network_free += under_transfer
        return BandSnapshot(
            self.first_page,
            self.end_page,
            span_units - free,
            free,
            staying.fixed_extents,
            staying.touched_extents if holds_stay else staying.sent_extents,
            network_free,
        )

    def compact_span(self, *, holds_stay: bool) -> tuple[int, int]:
        """The least span of an end: its units packed at its anchor, as far as those that stay let it. First and end page.

        Units that are neither live nor holes stay where they are and take room: withheld ones, and vacated ones that a send reads.
        """
        kept = self.live_count + len(self._withheld) + self.usage.vacated_count
        stays = NO_UNITS
        if self.usage.binds_layout:
            staying = self._staying()
            stays = np.concatenate([staying.fixed, staying.touched if holds_stay else staying.sent])
        if self._grows_down:
            return min(self._anchor - kept, int(stays.min(initial=self._anchor))), self._anchor
        return self._anchor, max(self._anchor + kept, int(stays.max(initial=self._anchor - 1)) + 1)

    def forget_staying(self) -> None:
        """Look up anew what may not move, whether or not the ledger says that it has changed: for checks of that."""
        self._stays = None

    def verify_counts(self) -> None:
        """Raise `InvariantError` unless every unit of the span is counted once, as live or as one kind of free (C11)."""
        live = self.live_pages()
        holes = self._holes.within(self.first_page, self.end_page)
        kinds = (live, holes, self.pending.pages(), self.usage.vacated_pages(), self._withheld)
        if (
            len(live) != self.live_count
            or len(holes) != len(self._holes)
            or not np.array_equal(np.sort(np.concatenate(kinds)), np.arange(self.first_page, self.end_page))
        ):
            counts = ", ".join(
                f"{len(units)} {kind}"
                for units, kind in zip(
                    kinds, ("bound", "holes", "pending", "vacated", "withheld"), strict=True
                )
            )
            raise InvariantError(
                "chain.units_counted_once",
                f"band {self.layout.name!r} spans units [{self.first_page}, {self.end_page}), counts {self.live_count} live and "
                f"{len(self._holes)} holes, and has {counts} there",
                "a unit was lost or counted twice",
            )

    # ── letting go ──

    @property
    def _anchor(self) -> int:
        """Where an empty span stands."""
        return self.layout.page_count if self._grows_down else self.layout.first_page

    def _staying(self) -> Staying:
        """What may not move now; looked up anew once the ledger has changed."""
        if self._stays is None or self._stays.epoch != self.usage.epoch:
            fixed, sent, held = self.usage.fixed_pages(), self.usage.transfer_pages(), self.usage.held_pages()
            touched = np.union1d(sent, held) if len(held) else sent
            self._stays = Staying(
                self.usage.epoch,
                fixed,
                sent,
                touched,
                extents_of(fixed),
                extents_of(sent),
                extents_of(touched),
            )
        return self._stays

    def _collect_vacated(self) -> None:
        self._add_holes(units_of(self.usage.take_ready_vacated()))

    def _let_go(self, units: Units) -> None:
        """Units that nobody holds any more: they pend while a recorded forward may touch them."""
        newest = self._steps.newest_recorded
        if newest is not None:
            self.pending.add(units.ids, newest)
        else:
            self._add_holes(units)

    def _without_withheld(self, units: Units) -> Units:
        """Those of some free units that are neither fixed nor under a transfer; the others are withheld."""
        if not self.usage.binds_layout:
            return units
        withheld = self.usage.withheld(units.ids)
        if not withheld.any():
            return units
        self._withheld = np.concatenate([self._withheld, units.ids[withheld]])
        self.epoch += 1
        return units_of(units.ids[~withheld])

    def _add_holes(self, units: Units) -> None:
        units = self._without_withheld(units)
        if not len(units.ids):
            return
        self.epoch += 1
        if isinstance(units.where, slice) and self._leaves_at_once(*bounds(units.where)):
            self.give_back(units)
        else:
            self._holes.add(units)
        self._retreat()

    def _leave(self, first_page: int, end_page: int) -> None:
        """Make `[first_page, end_page)` the span after moves; free units that it leaves are fenced while anybody uses them."""
        below = (self.first_page, min(first_page, self.end_page))
        above = (max(end_page, self.first_page), self.end_page)
        for first, end in (below, above):
            if first < end:
                self._holes.clear(first, end)
                if self.usage.vacated_count or not self.usage.is_clear:
                    self.usage.fence(np.arange(first, end))
        self.first_page, self.end_page = first_page, end_page
        self.epoch += 1

    def _leaves_at_once(self, low: int, high: int) -> bool:
        """Let a run of free units leave the span if it lies at an open side; whether it did."""
        if self._opens_below and low == self.first_page:
            self.first_page = high + 1
        elif self._opens_above and high == self.end_page - 1:
            self.end_page = low
        else:
            return False
        return True

    def _retreat(self) -> None:
        """Give back the holes at the open sides of the span."""
        if self._opens_above:
            run = self._holes.run_below(self.end_page, self.first_page)
            if run:
                self.end_page -= run
                self._remove_and_give_back(run_of(self.end_page, self.end_page + run))
        if self._opens_below:
            run = self._holes.run_above(self.first_page, self.end_page)
            if run:
                self.first_page += run
                self._remove_and_give_back(run_of(self.first_page - run, self.first_page))

    def _remove_and_give_back(self, units: Units) -> None:
        self._holes.remove(units)
        self.give_back(units)

    def give_back(self, units: Units) -> None:
        """Note that free units have left the span, fenced while anybody uses them."""
        if not self.usage.is_clear:
            self.usage.fence(units.ids)
