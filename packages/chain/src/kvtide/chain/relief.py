"""Making room: where every band stands for what it is asked for, and the moves that bring it there (rows C5, C6).

    1  in place      each band has its units free, or grows into the gap beside it; nobody's transfer is in the way
    2  refuse        no layout that can be reached serves: nothing has been touched
    3  recover       the schedule stream waits for the forwards that units pend or are vacated under; they are free from here on
    4  plan          around what transfers touch and receives hold; if that fails, around transfers alone, and holds move along; if
                     that fails too, the host waits for transfers, and 1 to 4 begin again
    5  realize       ends are compacted, floats relocated in an order in which none meets another

The five steps are the only road: a take, `ensure_capacity`, and a question are one search over one snapshot, so a yes is a
successful take. Which layout it is follows from counts and logical progress alone, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import structlog

from kvtide.chain.band import Band
from kvtide.chain.chain_bands import ChainBands
from kvtide.chain.move_order import move_order
from kvtide.chain.pricing import LayoutPlan, Rearrangement, feasible, first_plan, plan
from kvtide.chain.snapshot import ChainSnapshot
from kvtide.device import Device
from kvtide.ledger import (
    FencedBytes,
    ForwardSteps,
    Hazard,
    InvariantChecks,
    InvariantError,
    NetworkTransfer,
    clone_of,
)
from kvtide.plan import Growth

log = structlog.get_logger(__name__)

Spans: TypeAlias = Sequence[tuple[int, int]]
"""First and end page of each band, in chain order."""

FLUSH_REACH = 16
"""A flush for a take retreats so many times as far as the take needs: less, and the next take flushes again; more, and units move
whose neighbours would have freed them. Measured in `benchmarks/chain_moves.py`."""

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
        *,
        checks: InvariantChecks,
    ) -> None:
        """Over `bands`. Without a waiter, layouts that need one are none: what transfers touch stays where it is."""
        self._bands = bands
        self._fences = fences
        self._device = device
        self._steps = steps
        self._wait_for_transfers = wait_for_transfers
        self._checks = checks
        self._snapshots: dict[bool, ChainSnapshot] = {}
        self._epoch = -1
        self.rearrangement_count = 0
        """Plans realized since the start that compact or relocate a band."""
        self.host_wait_count = 0
        """Times that the host waited for transfers."""

    def clone(
        self,
        bands: ChainBands,
        fences: FencedBytes,
        device: Device,
        steps: ForwardSteps,
        wait_for_transfers: TransferWaiter | None,
    ) -> Relief:
        """The same road over clones of the bands, whose epochs are those of these: what is kept of their state stays good (row C13)."""
        return clone_of(
            self,
            _bands=bands,
            _fences=fences,
            _device=device,
            _steps=steps,
            _wait_for_transfers=wait_for_transfers,
        )

    # ── questions ──

    def snapshot(self, *, holds_stay: bool = False) -> ChainSnapshot:
        """What pricing sees now; kept until a capacity fact of some band changes.

        Held units move like any other, unless `holds_stay` counts them among what transfers touch.
        """
        epoch = self._epoch_now()
        if epoch != self._epoch:
            self._snapshots.clear()
            self._epoch = epoch
        found = self._snapshots.get(holds_stay)
        if found is None:
            found = self._snapshots[holds_stay] = self._look(holds_stay=holds_stay)
        return found

    def fits(self, asked: Sequence[int], snapshot: ChainSnapshot | None = None) -> bool:
        """Whether room can be made for units of each band, now or as `snapshot` says."""
        return feasible(
            self.snapshot() if snapshot is None else snapshot, asked, around_network=self.goes_around
        )

    @property
    def goes_around(self) -> bool:
        """Whether what transfers touch cannot be had: nobody would wait for them."""
        return self._wait_for_transfers is None

    def keep(self) -> None:
        """Look, and keep both kinds of snapshots, so that a later `verify` can tell what has changed without a word."""
        for holds_stay in (False, True):
            self.snapshot(holds_stay=holds_stay)

    def verify(self) -> None:
        """Raise `InvariantError` if a snapshot that is kept is stale, and would be used (C11)."""
        if self._epoch != self._epoch_now():
            return
        for band in self._bands:
            band.forget_staying()
        for holds_stay, kept in self._snapshots.items():
            fresh = self._look(holds_stay=holds_stay)
            if kept[1:] != fresh[1:]:  # The grids are the same object.
                raise InvariantError(
                    "chain.snapshot_is_fresh",
                    f"the snapshot kept says {kept[1:]}, the bands say {fresh[1:]}",
                    "a change of capacity did not move its epoch",
                )

    # ── the five steps ──

    def make_room(self, asked: Sequence[int]) -> Spans | None:
        """Spans in which each band has the units it is asked for, free or by growing; `None` if none can be.

        Then nothing has changed, unless the host has waited for transfers and what ended with them took the room.
        """
        while True:
            found = self._stay_in_place(asked)
            if found is not None:
                return found
            if not self.fits(asked):
                return None
            self._recover()
            for holds_stay in (True, False):
                planned = first_plan(self.snapshot(holds_stay=holds_stay), asked, around_network=True)
                if planned is not None:
                    self._realize(planned, holds_stay=holds_stay)
                    return [(span.first_page, span.end_page) for span in planned.spans]
            self._end_transfers()

    def _stay_in_place(self, asked: Sequence[int]) -> Spans | None:
        """Spans in place: by plain growth where nothing binds the layout, else, or where that does not serve, by a search."""
        binds = self._fences.transfer_count or any(band.usage.binds_layout for band in self._bands)
        return (None if binds else self._grow_in_place(asked)) or self._plan_in_place(asked)

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
        """Spans in place as the search finds them: none extends into bytes of a transfer, and no vacated unit is needed."""
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
        reader = max(
            (band.usage.newest_reader for band in self._bands if band.usage.vacated_count), default=-1
        )
        if reader > self._steps.retired_through:
            event = self._steps.recorded(reader).event
            self._device.wait_event(self._device.schedule_stream, event)
            self._steps.wait_queued(event)
        for band in self._bands:
            band.settle_all()

    def _end_transfers(self) -> None:
        """Wait on the host for every open transfer, around which no layout goes. Quarantined ones are never waited for."""
        transfers = {
            signal: None
            for band in self._bands
            for signal in band.usage.signals()
            if isinstance(signal, NetworkTransfer)
        }
        if self._wait_for_transfers is None or not transfers:
            raise InvariantError(
                "chain.yes_is_a_layout",
                f"room fits and no plan makes it; {len(transfers)} transfers are open",
                "a question and the plans see different snapshots",
            )
        self.host_wait_count += 1
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

    def _realize(self, planned: LayoutPlan, *, holds_stay: bool) -> None:
        if planned.step is Rearrangement.NO_MOVE:
            return
        bands = list(self._bands)
        if self._checks.checks("band.geometry_ready"):
            for place in (*planned.flushed, *planned.relocated):
                if len(bands[place].pending):
                    self._checks.broken(
                        "band.geometry_ready",
                        f"band {bands[place].layout.name!r} is packed with {len(bands[place].pending)} units pending",
                        "it was not settled first",
                    )
        units_before, bytes_before = sum(band.moved_count for band in bands), _moved_bytes(bands)
        for place in planned.flushed:
            bands[place].pack_into(*self._flush_target(place, planned, holds_stay=holds_stay))
        spans = [band.span for band in bands]
        for place in move_order(self._bands.layout, spans, planned.spans, planned.relocated):
            target = planned.spans[place]
            bands[place].pack_into(target.first_page, target.end_page)
        self.rearrangement_count += 1
        moved = _moved_bytes(bands) - bytes_before
        if moved > planned.moved_bytes and self._checks.checks("chain.moves_as_planned"):
            self._checks.broken(
                "chain.moves_as_planned",
                f"a relief under {planned.step.name} moves {moved} bytes, its plan was chosen for at most {planned.moved_bytes}",
                "the price of a rearrangement left something out, so that another plan may have been the cheaper one",
            )
        log.info(
            "chain.relief",
            step=planned.step.name,
            units_moved=sum(band.moved_count for band in bands) - units_before,
            moved_bytes=moved,
            moved_bytes_bound=planned.moved_bytes,
            flushed=[bands[place].layout.name for place in planned.flushed],
            relocated=[bands[place].layout.name for place in planned.relocated],
        )

    # ── helpers ──

    def _epoch_now(self) -> int:
        return sum([band.epoch + band.usage.epoch for band in self._bands])

    def _flush_target(self, place: int, planned: LayoutPlan, *, holds_stay: bool) -> tuple[int, int]:
        """First and end page of an end once it is flushed: back `FLUSH_REACH` times as far as others need, if it can go so far."""
        bands, layout = list(self._bands), self._bands.layout
        band = bands[place]
        first_page, end_page = band.compact_span(holds_stay=holds_stay)
        others = [
            (layout.bands[other].start_byte(span.first_page), layout.bands[other].start_byte(span.end_page))
            for other, span in enumerate(planned.spans)
            if other != place and span.page_count
        ]
        if band.layout.growth is Growth.UP:
            needed = band.end_page - band.layout.highest_end_to(
                min((start for start, _ in others), default=layout.arena_bytes)
            )
            return first_page, max(end_page, band.end_page - FLUSH_REACH * needed)
        needed = (
            band.layout.lowest_page_from(max((end for _, end in others), default=layout.prefix_bytes))
            - band.first_page
        )
        return min(first_page, band.first_page + FLUSH_REACH * needed), end_page

    def _look(self, *, holds_stay: bool) -> ChainSnapshot:
        bands = tuple(band.snapshot(holds_stay=holds_stay) for band in self._bands)
        if not self._fences.transfer_count:
            return ChainSnapshot(self._bands.layout, bands)
        sent, quarantined = (
            tuple(zip(*(bound.tolist() for bound in self._fences.extents(hazard)), strict=True))
            for hazard in (Hazard.NETWORK, Hazard.FIXED)
        )
        return ChainSnapshot(self._bands.layout, bands, sent, quarantined)


def _moved_bytes(bands: Sequence[Band]) -> int:
    return sum(band.moved_count * band.layout.unit_bytes for band in bands)
