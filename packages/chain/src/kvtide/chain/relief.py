"""Making room: where every band stands for what it is asked for, and the moves that bring it there (rows C5, C6).

    1  in place      each band has its units free, or grows into the gap beside it; nobody's transfer is in the way
    2  refuse        no layout that can be reached serves: nothing has been touched
    3  recover       the schedule stream waits for the forwards that units pend or are vacated under; they are free from here on
    4  plan          around what transfers touch and receives hold; only if that fails, the host waits for transfers, and 1 to 4
                     begin again; only if none is open, held units move, and the holds with them
    5  realize       ends are compacted, floats relocated in an order in which none meets another

The five steps are the only road: a take, `ensure_capacity`, and a question are one search over one snapshot, so a yes is a
successful take. Which layout it is follows from counts and logical progress alone, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import structlog

from kvtide.chain.chain_bands import ChainBands
from kvtide.chain.move_order import move_order
from kvtide.chain.pricing import LayoutPlan, Rearrangement, feasible, first_plan, plan
from kvtide.chain.snapshot import ChainSnapshot
from kvtide.device import Device
from kvtide.ledger import FencedBytes, ForwardSteps, Hazard, InvariantError, NetworkTransfer
from kvtide.plan import Growth

log = structlog.get_logger(__name__)

Spans: TypeAlias = Sequence[tuple[int, int]]
"""First and end page of each band, in chain order."""

TransferWaiter: TypeAlias = Callable[[Sequence[NetworkTransfer]], None]
"""Returns once each of the transfers is over on every rank and has been ended in the chain; the host waits there. It may free
units, and takes none."""


class Relief:
    """The road to room in one chain. It decides on snapshots, and has bands move."""

    def __init__(
        self,
        bands: ChainBands,
        fences: FencedBytes,
        device: Device,
        steps: ForwardSteps,
        wait_for_transfers: TransferWaiter | None,
    ) -> None:
        """Over `bands`. Without a waiter, layouts that need one are none: what transfers touch stays where it is."""
        self._bands = bands
        self._fences = fences
        self._device = device
        self._steps = steps
        self._wait_for_transfers = wait_for_transfers
        self._snapshot: ChainSnapshot | None = None
        self._epoch = -1
        self.rearrangement_count = 0
        """Plans realized since the start that moved units, or could have."""

    # ── questions ──

    def snapshot(self) -> ChainSnapshot:
        """What pricing sees now; kept until a capacity fact of some band changes."""
        epoch = sum(band.epoch + band.usage.epoch for band in self._bands)
        if self._snapshot is None or epoch != self._epoch:
            self._snapshot, self._epoch = self._look(), epoch
        return self._snapshot

    def fits(self, asked: Sequence[int], snapshot: ChainSnapshot | None = None) -> bool:
        """Whether room can be made for units of each band, now or as `snapshot` says."""
        # Without a waiter, what transfers touch cannot be had.
        around = self._wait_for_transfers is None
        return feasible(self.snapshot() if snapshot is None else snapshot, asked, around_network=around)

    def verify(self) -> None:
        """Raise `InvariantError` if the snapshot that is kept is stale (C11)."""
        kept, fresh = self.snapshot(), self._look()
        if kept[1:] != fresh[1:]:  # The grids are the same object.
            raise InvariantError(
                "chain.snapshot_is_fresh",
                f"the snapshot kept says {kept.bands}, {kept.network_bytes}, the bands say {fresh.bands}, {fresh.network_bytes}",
                "a change of capacity did not move its epoch",
            )

    # ── the five steps ──

    def make_room(self, asked: Sequence[int]) -> Spans | None:
        """Spans in which each band has the units it is asked for, free or by growing; `None`, with nothing changed, if none can be."""
        if self._fences.transfer_count or any(band.usage.binds_layout for band in self._bands):
            found = self._plan_in_place(asked)
        else:
            found = self._grow_in_place(asked)
        if found is not None:
            return found
        if not self.fits(asked):
            return None
        self._recover()
        planned = first_plan(self.snapshot(), asked, around_network=True)
        if planned is None:
            if self._end_transfers():
                return self.make_room(asked)
            planned = first_plan(self.snapshot(), asked, around_network=False)
            assert planned is not None, "it fits, and only holds were in the way"
            self._realize(planned, moves_held=True)
        else:
            self._realize(planned)
        return [(span.first_page, span.end_page) for span in planned.spans]

    def _grow_in_place(self, asked: Sequence[int]) -> Spans | None:
        """Spans in place, on integers alone: the usual case.

        A band reuses its free units and grows at one side for the rest, into the gap there: an end at its open side, a float toward
        its larger gap. An empty float is put in the middle of its region, and until then its neighbours see through it. Where that
        does not serve, the search may find another way to stay in place.
        """
        spans: list[tuple[int, int]] = []
        left_edge = self._bands.layout.prefix_bytes
        for place, band in enumerate(self._bands):
            first_page, end_page = band.first_page, band.end_page
            grown = asked[place] - band.free_count
            if grown > 0:
                lowest = band.layout.lowest_page_from(left_edge)
                highest_end = band.layout.highest_end_to(self._bands.next_start_byte(place))
                if first_page == end_page and band.layout.growth is Growth.FLOAT:
                    first_page = end_page = lowest + (highest_end - lowest - grown) // 2
                if band.layout.growth is Growth.DOWN or (
                    band.layout.growth is Growth.FLOAT and first_page - lowest > highest_end - end_page
                ):
                    first_page -= grown
                else:
                    end_page += grown
                if first_page < lowest or end_page > highest_end:
                    return None
            if first_page < end_page:
                left_edge = band.layout.start_byte(end_page)
            spans.append((first_page, end_page))
        return spans

    def _plan_in_place(self, asked: Sequence[int]) -> Spans | None:
        """Spans in place where transfers or fixed units are about: none extends into their bytes, and no vacated unit is needed."""
        found = plan(self.snapshot(), asked, Rearrangement.NO_MOVE, around_network=True)
        if found is None:
            return None
        for band, span, units in zip(self._bands, found.spans, asked, strict=True):
            grown = span.page_count - (band.end_page - band.first_page)
            if units - grown > band.free_count:
                return None
        return [(span.first_page, span.end_page) for span in found.spans]

    def _recover(self) -> None:
        """Make free what waits on the schedule stream can make free: pending units, and vacated ones that a forward still reads.

        The host does not wait. What moves later waits for its own writers.
        """
        newest = self._steps.newest_unretired
        if newest is not None and any(band.usage.vacated_count for band in self._bands):
            self._device.wait_event(self._device.schedule_stream, newest.event)
            self._steps.wait_queued(newest.event)
        for band in self._bands:
            band.settle_all()

    def _end_transfers(self) -> bool:
        """Wait on the host for every open transfer, around which no layout goes; false where none is open, and nobody waited.

        Quarantined ones are never waited for.
        """
        transfers = {
            signal: None
            for band in self._bands
            for signal in band.usage.signals()
            if isinstance(signal, NetworkTransfer)
        }
        if not transfers:
            return False
        assert self._wait_for_transfers is not None, (
            "without a waiter, layouts go around transfers or are none"
        )
        self._wait_for_transfers(list(transfers))
        still_open = [
            transfer.name for transfer in transfers if any(transfer in band.usage for band in self._bands)
        ]
        if still_open:
            raise InvariantError(
                "chain.waiter_ends_transfers",
                f"transfers {still_open} were waited for and are still open",
                "the waiter returned without ending them",
            )
        return True

    def _realize(self, planned: LayoutPlan, *, moves_held: bool = False) -> None:
        if planned.step is Rearrangement.NO_MOVE:
            return
        bands = list(self._bands)
        moved_before = sum(band.moved_count for band in bands)
        for place in planned.flushed:
            bands[place].pack_into(*bands[place].compact_span(moves_held=moves_held))
        spans = [band.span for band in bands]
        for place in move_order(self._bands.layout, spans, planned.spans, planned.relocated):
            target = planned.spans[place]
            bands[place].pack_into(target.first_page, target.end_page)
        self.rearrangement_count += 1
        log.info(
            "chain.relief",
            step=planned.step.name,
            units_moved=sum(band.moved_count for band in bands) - moved_before,
            moved_bytes_bound=planned.moved_bytes,
            flushed=[bands[place].layout.name for place in planned.flushed],
            relocated=[bands[place].layout.name for place in planned.relocated],
        )

    # ── helpers ──

    def _look(self) -> ChainSnapshot:
        bands = tuple(band.snapshot() for band in self._bands)
        if not self._fences.transfer_count:
            return ChainSnapshot(self._bands.layout, bands)
        sent, quarantined = (
            tuple(zip(*(bound.tolist() for bound in self._fences.extents(hazard)), strict=True))
            for hazard in (Hazard.NETWORK, Hazard.FIXED)
        )
        return ChainSnapshot(self._bands.layout, bands, sent, quarantined)
