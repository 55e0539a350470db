"""Bands: one sub-pool's units inside the arena (rows C2, C3).

    grow-up end      [first_page ………… end_page) →            anchored at its lowest page
    grow-down end              ← [first_page ………… page_count)  anchored at its highest page
    float                ← [first_page ………… end_page) →        anchored nowhere, placed when first needed

A band decides nothing about room: the chain hands it a span that holds what it is asked for. It decides which units, and queues
on the schedule stream the waits that the ledger asks for. Nothing here waits on the host.
"""

from __future__ import annotations

import numpy as np

from kvtide.chain.band_units import BandUnits
from kvtide.chain.units import NO_UNITS, Units, joined, run_of, units_of
from kvtide.device import IntArray
from kvtide.ledger import (
    Consumer,
    InvariantError,
    choose_holes,
    clearance,
    queue_stream_waits,
)

_NONE = Units(NO_UNITS, NO_UNITS)


class Band(BandUnits):
    """An end of the chain. The chain allocator is the only one that mutates it."""

    # ── takes and frees ──

    def take(self, virtual: Units, span: tuple[int, int], unwritten: IntArray | None) -> None:
        """Bind a unit to each of `virtual`: holes, then settled pending units, then the growth to `span`, first and end page.

        Units at the places `unwritten` are zeroed, all of them for None. Work is queued on the schedule stream, behind whatever
        may still touch the units. A planned take cannot fail.
        """
        count = len(virtual.ids)
        settles = count > len(self._holes) and len(self.pending) > 0
        if settles:
            self._settle(count - len(self._holes))
        from_holes = min(count, len(self._holes))
        taken = units_of(self._take_holes(from_holes)) if from_holes else _NONE
        if from_holes < count:
            taken = joined(taken, self._grow_to(*span))
        self.ids.bind(virtual, taken)
        self.live_count += count
        self.epoch += 1
        if settles:
            self._retreat()
        self._zero_taken(taken.ids, unwritten)

    def zero(self, units: IntArray) -> None:
        """Zero physical units, behind whatever may still touch them."""
        if len(units):
            if not self.usage.is_clear:
                self._clear(Consumer.ZERO, units)
            self._device.zero_units(self._device.schedule_stream, self._grid, units)
            self.zeroed_count += len(units)

    def free(self, virtual: Units, units: Units) -> None:
        """Unbind virtual ids from their units at once; the units pend while a recorded forward may touch them.

        The caller has checked that they are bound, each named once, and may be freed.
        """
        self.ids.unbind(virtual, units)
        self.live_count -= len(units.ids)
        self.epoch += 1
        self._let_go(self._without_withheld(units))

    def release_withheld(self) -> None:
        """Let go of the free units that are no longer fixed or under a transfer: a use, a reservation, a quarantine is over."""
        self._collect_vacated()
        if len(self._withheld):
            units, self._withheld = self._withheld, NO_UNITS
            self.epoch += 1
            self._let_go(self._without_withheld(units_of(units)))

    def release_pending_through(self, forward: int) -> None:
        """Make holes of the units that waited for `forward`, which has been processed, or for one before it."""
        if len(self.pending):
            self._add_holes(units_of(self.pending.release_through(forward)))
        self._collect_vacated()

    def settle_all(self) -> None:
        """Make holes of every pending unit, and of every vacated one that no send reads; the host does not wait.

        Those that a forward may still read come back if the caller has made the schedule stream wait for the newest one.
        """
        if len(self.pending):
            self._settle(len(self.pending))
            self._retreat()
        self._collect_vacated()

    # ── moves ──

    def pack_into(self, first_page: int, end_page: int) -> None:
        """Make `[first_page, end_page)` the span: live units outside move to free ones inside, which leaves the rest of it holes.

        The caller has cleared the span of other bands, and the band of pending units. Units that stay lie inside. Sources and
        targets are disjoint, so the copies need no order among themselves; what moves is behind its writers, where it goes behind
        its readers. The schedule stream waits, the host does not.
        """
        below = (self.first_page, min(first_page, self.end_page))
        above = (max(end_page, self.first_page), self.end_page)
        outside = np.concatenate([self.ids.bound_in(*below), self.ids.bound_in(*above)])
        for first, end in (below, above):
            self._holes.clear(first, end)
        self._holes.add(run_of(first_page, min(self.first_page, end_page)))
        self._holes.add(run_of(max(self.end_page, first_page), end_page))
        if len(outside):
            targets = np.sort(self._take_holes(len(outside), Consumer.SCHEDULE_COPY), kind="stable")
            self._move(units_of(outside), units_of(targets))
        self._leave(first_page, end_page)

    def flush_opportunistic(self, max_moves: int) -> int:
        """Move at most `max_moves` of the outermost live units of an end into its innermost holes; how many moved.

        It never waits for an unretired forward: it stops at a unit that one may write, at a fixed one, and at one that a receive or a
        load writes, and moves into no hole that somebody still touches. A band with pending units, or with pages that await
        publication, is left alone.
        """
        if not len(self._holes) or len(self.pending) or self.usage.has_holds:
            return 0
        live = self.ids.outermost_bound(
            self.first_page, self.end_page, max_moves + 1, from_high_end=self._opens_above
        )
        outermost = live if self._grows_down else live[::-1]
        holes = self._clear_holes(min(max_moves, len(outermost)))
        sources = outermost[: len(holes)]
        inward = holes > sources if self._grows_down else holes < sources
        count = len(inward) if inward.all() else int(np.argmin(inward))
        stops = self.usage.stopping(sources[:count])
        if stops.any():
            count = int(np.argmax(stops))
        if not count:
            return 0
        holes = holes[:count]
        self._holes.remove(units_of(holes))
        # Outermost and innermost first they rise and fall; ascending, both make the longest runs.
        sources, targets = (
            units if units[0] <= units[-1] else units[::-1] for units in (sources[:count], holes)
        )
        self._holes.add(units_of(self._move(units_of(sources), units_of(targets))))
        stays = np.concatenate([outermost[count : count + 1], targets, self._withheld])
        if self._grows_down:
            self._leave(int(stays.min()), self.end_page)
        else:
            self._leave(self.first_page, int(stays.max()) + 1)
        return count

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """Copy live units onto other live ones, behind every forward that may write either."""
        self._wait_writers(np.concatenate([sources, targets]))
        self._clear(Consumer.SCHEDULE_COPY, targets)
        self._device.copy_units(self._device.schedule_stream, self._grid, sources, targets)

    # ── helpers ──

    def _settle(self, unit_count: int) -> None:
        """Make holes of the oldest pending batches that cover `unit_count`; the schedule stream waits their forwards."""
        units, event = self.pending.settle(unit_count)
        if event is not None:
            self._device.wait_event(self._device.schedule_stream, event)
            self._steps.wait_queued(event)
            self.settle_count += 1
        self.epoch += 1
        self._holes.add(units_of(units))

    def _zero_taken(self, units: IntArray, unwritten: IntArray | None) -> None:
        """Zero what a take hands out at the places `unwritten`; the rest the forward writes, whose stream stands behind this one."""
        if unwritten is None:
            self.zero(units)
            return
        if not self.usage.is_clear and len(unwritten) < len(units):
            self._clear(Consumer.FORWARD, np.delete(units, unwritten))
        self.zero(units[unwritten])

    def _take_holes(self, unit_count: int, consumer: Consumer = Consumer.ZERO) -> IntArray:
        """The best holes: those that make `consumer` wait for no unretired forward first, then nearest the anchor."""
        if not self.usage.steers_choice:
            return self._holes.take(unit_count)
        looked_at = 2 * unit_count
        while True:
            chosen = choose_holes(consumer, self.usage, self._holes.nearest(looked_at), unit_count)
            if chosen.clear_count == unit_count or looked_at >= len(self._holes):
                break
            looked_at *= 4
        self._holes.remove(units_of(chosen.pages))
        return chosen.pages

    def _clear_holes(self, unit_count: int) -> IntArray:
        """At most so many of the holes nearest the anchor, none of which anybody still touches: a move for gain waits for nobody."""
        holes = self._holes.nearest(unit_count)
        if self.usage.is_clear:
            return holes
        return np.delete(holes, self.usage.hazards_on(holes).places)

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

    def _move(self, sources: Units, targets: Units) -> IntArray:
        """Copy units and rebind what they hold; the sources that nobody reads any more."""
        self._wait_writers(sources.ids)
        self._clear(Consumer.SCHEDULE_COPY, targets.ids)
        self._device.copy_units(self._device.schedule_stream, self._grid, sources.ids, targets.ids)
        self.ids.move(sources, targets)
        self.moved_count += len(sources.ids)
        return self.usage.vacate(sources.ids, targets.ids)

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
        found = clearance(consumer, self.usage, units)
        if found.host_waits or len(found.excluded):
            raise InvariantError(
                "band.plan_clears_transfers",
                f"{consumer.value} of units of band {self.layout.name!r} meets transfers "
                f"{[transfer.name for transfer in found.host_waits]} and {len(found.excluded)} fixed units",
                "a plan extended into bytes that a transfer still touches, or a withheld unit was handed out",
            )
        queue_stream_waits(found, self.usage, self._device, self._device.schedule_stream)


class FloatBand(Band):
    """A band between the ends: it grows at either side and gives back at both; empty, it stands nowhere."""

    def _retreat(self) -> None:
        super()._retreat()
        if self.first_page == self.end_page:
            self.first_page = self.end_page = self._anchor
