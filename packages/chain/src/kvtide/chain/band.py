"""Bands: one sub-pool's units inside the arena (rows C2, C3).

    grow-up end      [first_page ………… end_page) →            anchored at its lowest page
    grow-down end              ← [first_page ………… page_count)  anchored at its highest page
    float                ← [first_page ………… end_page) →        anchored nowhere, placed when first needed

Every unit of the *span* is live, a hole, pending (freed, but a forward may still touch it) or vacated (moved away from, but
somebody may still read it). A free at an open side of the span gives the bytes back at once, fenced while anybody uses them;
anywhere else it leaves a hole, which the next take uses first.

A band decides nothing about room: the chain hands it a span that holds what it is asked for. It decides which units, and queues
on the schedule stream the waits that the ledger asks for. Nothing here waits on the host.
"""

from __future__ import annotations

import numpy as np

from kvtide.chain.hole_set import HoleSet
from kvtide.chain.id_space import MASKED, SINK, UnitIds
from kvtide.chain.units import NO_UNITS, Units, bounds, joined, run_of, units_of
from kvtide.device import Device, IntArray, Mirror, UnitGrid
from kvtide.ledger import (
    Consumer,
    FencedBytes,
    ForwardSteps,
    InvariantError,
    PageUsage,
    PendingPages,
    choose_holes,
    clearance,
    clone_of,
    queue_stream_waits,
)
from kvtide.plan import BandLayout, Growth, PageSpan

_NONE = Units(NO_UNITS, NO_UNITS)


class Band:
    """An end of the chain. The chain allocator is the only one that mutates it."""

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
        self.moved_count = self.zeroed_count = self.settle_count = 0
        """Since the start: units moved, units zeroed on hand-out, waits queued for pending units."""
        self._device = device
        self._steps = steps
        self._grid = UnitGrid(layout.origin_bytes, layout.unit_bytes)
        self.usage = PageUsage(steps, layout.page_count, name=layout.name, grid=self._grid, fences=fences)
        """The band's ledger."""
        self._holes = HoleSet(layout.page_count, from_high_end=self._grows_down)
        if layout.has_sink:
            device.zero_units(device.schedule_stream, self._grid, np.zeros(1, np.int64))

    def clone(self, device: Device, mirror: Mirror, fences: FencedBytes, steps: ForwardSteps) -> Band:
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
        """Free units inside the span that nothing but a copy or transfer may still touch."""
        return len(self._holes)

    @property
    def free_count(self) -> int:
        """Units that a take can have without the band growing: holes, then pending units."""
        return len(self._holes) + len(self.pending)

    def live_pages(self) -> IntArray:
        """Physical units in use, ascending."""
        return self.ids.bound_in(self.first_page, self.end_page)

    # ── takes and frees ──

    def take(self, virtual: Units, span: tuple[int, int], unwritten: IntArray | None) -> None:
        """Bind a unit to each of `virtual`: holes, then settled pending units, then the growth to `span`, first and end page.

        Units at the places `unwritten` are zeroed, all of them for None. Work is queued on the schedule stream, behind whatever
        may still touch the units. A planned take cannot fail.
        """
        count = len(virtual.ids)
        if count > len(self._holes) and len(self.pending):
            self._settle(count - len(self._holes))
        from_holes = min(count, len(self._holes))
        taken = units_of(self._take_holes(from_holes)) if from_holes else _NONE
        if from_holes < count:
            taken = joined(taken, self._grow_to(*span))
        self.ids.bind(virtual, taken)
        self.live_count += count
        units = taken.ids
        zeroed = units if unwritten is None else units[unwritten]
        is_clear = self.usage.is_clear
        if not is_clear:
            # What the forward writes whole needs no more than the forward does; its stream stands behind this one.
            self._clear(Consumer.FORWARD, units)
        self._zero(zeroed, is_clear)

    def zero(self, units: IntArray) -> None:
        """Zero physical units, behind whatever may still touch them."""
        self._zero(units, self.usage.is_clear)

    def free(self, virtual: Units, units: Units) -> None:
        """Unbind virtual ids from their units at once; the units pend while a recorded forward may touch them.

        The caller has checked that they are bound, each named once, and may be freed.
        """
        self.ids.unbind(virtual, units)
        self.live_count -= len(units.ids)
        newest = self._steps.newest_recorded
        if newest is not None:
            self.pending.add(units.ids, newest)
        else:
            self._add_holes(units)

    def release_pending_through(self, forward: int) -> None:
        """Make holes of the units that waited for `forward`, which has been processed, or for one before it."""
        if len(self.pending):
            self._add_holes(units_of(self.pending.release_through(forward)))
        self._collect_vacated()

    def settle_all(self) -> None:
        """Make holes of every pending unit, and of every vacated one that no send reads; the host does not wait.

        The caller has made the schedule stream wait for the newest forward in flight.
        """
        if len(self.pending):
            self._settle(len(self.pending))
            self._retreat()
        self._collect_vacated()

    # ── moves ──

    def pack_into(self, first_page: int, end_page: int) -> None:
        """Make `[first_page, end_page)` the span: live units outside move to free ones inside, the rest of it is holes.

        The caller has cleared the span of other bands and of pending units. Sources and targets are disjoint, so the copies need
        no order among themselves; what moves is behind its writers, where it goes behind its readers.
        """
        live = self.live_pages()
        outside = live[(live < first_page) | (live >= end_page)]
        self._holes.remove_outside(first_page, end_page)
        self._holes.add(run_of(first_page, min(self.first_page, end_page)))
        self._holes.add(run_of(max(self.end_page, first_page), end_page))
        beyond = np.concatenate(
            [
                np.arange(self.first_page, min(first_page, self.end_page)),
                np.arange(max(end_page, self.first_page), self.end_page),
            ]
        )
        if len(outside):
            self._move(units_of(outside), units_of(np.sort(self._holes.take(len(outside)))))
        self.usage.fence(beyond)
        self.first_page, self.end_page = first_page, end_page

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """Copy live units onto other live ones, behind every forward that may write either."""
        self._wait_writers(np.concatenate([sources, targets]))
        self._clear(Consumer.SCHEDULE_COPY, targets)
        self._device.copy_units(self._device.schedule_stream, self._grid, sources, targets)

    def verify_counts(self) -> None:
        """Raise `InvariantError` unless every unit of the span is live, a hole, pending or vacated, and counted once (C11)."""
        free = np.concatenate(
            [self._holes.nearest(len(self._holes)), self.pending.pages(), self.usage.vacated_pages()]
        )
        live = self.live_pages()
        units = np.concatenate([live, free])
        if len(live) != self.live_count or not np.array_equal(
            np.sort(units), np.arange(self.first_page, self.end_page)
        ):
            raise InvariantError(
                "chain.units_counted_once",
                f"band {self.layout.name!r} spans units [{self.first_page}, {self.end_page}): {len(live)} bound, "
                f"{self.live_count} counted live, {len(self._holes)} holes, {len(self.pending)} pending",
                "a unit was lost or counted twice",
            )

    # ── helpers ──

    @property
    def _anchor(self) -> int:
        """Where an empty span stands."""
        return self.layout.page_count if self._grows_down else self.layout.first_page

    def _settle(self, unit_count: int) -> None:
        """Make holes of the oldest pending batches that cover `unit_count`; the schedule stream waits their forwards."""
        units, event = self.pending.settle(unit_count)
        if event is not None:
            self._device.wait_event(self._device.schedule_stream, event)
            self._steps.wait_queued(event)
            self.settle_count += 1
        self._holes.add(units_of(units))

    def _zero(self, units: IntArray, is_clear: bool) -> None:
        if len(units):
            if not is_clear:
                self._clear(Consumer.ZERO, units)
            self._device.zero_units(self._device.schedule_stream, self._grid, units)
            self.zeroed_count += len(units)

    def _take_holes(self, unit_count: int) -> IntArray:
        """The best holes: those that make nobody wait for an unretired forward or a transfer first, then nearest the anchor."""
        if not self.usage.steers_choice:
            return self._holes.take(unit_count)
        looked_at = 2 * unit_count
        while True:
            chosen = choose_holes(Consumer.ZERO, self.usage, self._holes.nearest(looked_at), unit_count)
            if chosen.clear_count == unit_count or looked_at >= len(self._holes):
                break
            looked_at *= 4
        self._holes.remove(units_of(chosen.pages))
        return chosen.pages

    def _grow_to(self, first_page: int, end_page: int) -> Units:
        """Extend the span; the new units, nearest the anchor first."""
        if self.first_page == self.end_page:
            grown = (
                run_of(end_page - 1, first_page - 1, -1) if self._grows_down else run_of(first_page, end_page)
            )
        elif first_page < self.first_page:
            grown = run_of(self.first_page - 1, first_page - 1, -1)
        else:
            grown = run_of(self.end_page, end_page)
        self.first_page, self.end_page = first_page, end_page
        return grown

    def _move(self, sources: Units, targets: Units) -> None:
        self._wait_writers(sources.ids)
        self._clear(Consumer.SCHEDULE_COPY, targets.ids)
        self._device.copy_units(self._device.schedule_stream, self._grid, sources.ids, targets.ids)
        self.ids.move(sources, targets)
        self.moved_count += len(sources.ids)
        self.usage.vacate(sources.ids, targets.ids)

    def _wait_writers(self, units: IntArray) -> None:
        """The schedule stream waits for whatever may still write `units`."""
        writers = self.usage.writers(units)
        if writers.forward is not None:
            self._device.wait_event(self._device.schedule_stream, writers.forward.event)
            self._steps.wait_queued(writers.forward.event)
        for copy in writers.copies:
            self._device.wait_event(self._device.schedule_stream, copy.finish)

    def _clear(self, consumer: Consumer, units: IntArray) -> None:
        """The schedule stream waits for what the ledger says `consumer` must wait for before it writes `units`."""
        queue_stream_waits(
            clearance(consumer, self.usage, units), self.usage, self._device, self._device.schedule_stream
        )

    def _collect_vacated(self) -> None:
        self._add_holes(units_of(self.usage.take_ready_vacated()))

    def _add_holes(self, units: Units) -> None:
        if not len(units.ids):
            return
        if isinstance(units.where, slice) and self._leaves_at_once(*bounds(units.where)):
            self.give_back(units)
        else:
            self._holes.add(units)
        self._retreat()

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


class FloatBand(Band):
    """A band between the ends: it grows at either side and gives back at both; empty, it stands nowhere."""

    def _retreat(self) -> None:
        super()._retreat()
        if self.first_page == self.end_page:
            self.first_page = self.end_page = self._anchor
