"""One allocator over every band (rows C1, C5, C11).

A take names how many virtual pages and state slots it wants. It is planned whole, on counts alone, and either refused with
nothing changed or committed by a half that cannot fail:

1. in place, if every band finds its units among its free pages and in the gap it grows into;
2. packed, if some layout of the arena holds everything: the schedule stream waits the forwards in flight, ends are compacted,
   floats relocated, and then each band takes in place.

A virtual page is bound in every attention band. Windows release theirs as requests advance; the *owner*, the band that holds
tokens longest, releases last, and the virtual page returns with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
import structlog

from kvtide.chain.band import Band
from kvtide.chain.errors import ChainError
from kvtide.chain.id_space import MASKED, SINK, IdSpace, UnitIds
from kvtide.chain.placement import plan_in_place, plan_packed, relocation_order
from kvtide.chain.refusal import BandFigures, TakeRefusal
from kvtide.device import Device, IntArray, Mirror
from kvtide.ledger import ForwardSteps, InvariantError
from kvtide.plan import ArenaLayout, Growth, PageSpan, pack

log = structlog.get_logger(__name__)


@attrs.frozen(eq=False)
class Taken:
    """What a take handed out: virtual ids, bound and zeroed."""

    pages: IntArray
    """Virtual pages, bound in every attention band."""

    state_slots: IntArray
    """Virtual state slots."""


@attrs.frozen(kw_only=True)
class BandStatistics:
    """One band, exactly."""

    name: str
    """Band."""

    live_units: int
    """Units in use."""

    free_units: int
    """Holes and pending units inside the span."""

    pending_units: int
    """Free units that a forward may still touch."""

    moved_units: int
    """Units moved since the start."""


@attrs.frozen(kw_only=True)
class ChainStatistics:
    """The chain at one moment."""

    bands: tuple[BandStatistics, ...]
    """In chain order."""

    moved_units: int
    """Units moved since the start, all bands."""

    moved_bytes: int
    """Their bytes."""

    rearrangements: int
    """Takes that were served by packing the bands."""


class ChainAllocator:
    """Every take and free of every band.

    It decides on the host, orders work on the device's schedule stream, reads no device memory and never blocks the host.
    """

    def __init__(
        self, layout: ArenaLayout, device: Device, mirrors: Mapping[str, Mirror], steps: ForwardSteps
    ) -> None:
        """Empty bands over `layout`, with `mirrors["ids:BAND"]` for each id table; zeroes the sinks.

        Raises `ChainError` for attention bands of different page sizes: a take binds one page in each of them.
        """
        sizes = {band.name: band.page_tokens for band in layout.bands if band.page_tokens is not None}
        if len(set(sizes.values())) > 1:
            raise ChainError(
                f"cannot allocate bands of different page sizes, tokens a page {sizes}: give all of them one"
            )
        self.layout = layout
        self._device = device
        self._steps = steps
        self._pages = IdSpace(SINK + 1, layout.virtual_page_count)
        self._slots = IdSpace(
            0, max((b.capacity_pages for b in layout.bands if b.page_tokens is None), default=0)
        )
        self._bands: dict[str, Band] = {}
        for band in layout.bands:
            is_state = band.page_tokens is None
            mirror = mirrors[f"ids:{band.name}"]
            ids = UnitIds(mirror.length, band.page_count, MASKED if is_state else SINK, mirror)
            self._bands[band.name] = Band(band, ids, steps, device)
            if band.has_sink:
                self._bands[band.name].zero_sink()
        self._state = next((band for band in self._bands.values() if band.layout.page_tokens is None), None)
        self._attention = [band for band in self._bands.values() if band.layout.page_tokens is not None]
        self._owner = self._bands[layout.owner] if layout.owner is not None else None
        self._rearrangements = 0

    # ── takes ──

    def take(self, *, pages: int = 0, state_slots: int = 0) -> Taken | TakeRefusal:
        """Mint `pages` virtual pages bound in every attention band, and `state_slots` state slots; all or nothing.

        The units come zeroed, ordered on the schedule stream behind everything that may still touch them. Raises `ChainError`
        for a negative count or a kind the chain lacks, `InvariantError` between a forward's launch and its recording.
        """
        self._steps.check_pages_may_change("a take")
        asked = self._asked(pages, state_slots)
        counts = [band.counts for band in self._bands.values()]
        spans = plan_in_place(self.layout, counts, asked)
        if spans is None:
            targets = plan_packed(self.layout, counts, asked)
            if targets is None:
                return self._refusal(asked)
            self._rearrange(targets, asked)
            spans = targets
        taken = Taken(self._pages.mint(pages), self._slots.mint(state_slots))
        for band, span, units in zip(self._bands.values(), spans, asked, strict=True):
            if units:
                band.take(taken.state_slots if band is self._state else taken.pages, span)
        return taken

    def units_fit(self, *, pages: int = 0, state_slots: int = 0) -> bool:
        """Whether `take` with the same figures would succeed now (C5)."""
        asked = self._asked(pages, state_slots)
        live = (band.live_count for band in self._bands.values())
        return pack(self.layout, [held + units for held, units in zip(live, asked, strict=True)]) is not None

    # ── frees ──

    def free_pages(self, band_name: str, virtual_pages: IntArray) -> None:
        """Release virtual pages in one band, at once and without a wait; the owner's release returns the virtual ids.

        Raises `ChainError`, with nothing changed, for a page that is named twice, out of range or not bound there, and for an
        owner's page that a window still holds; `InvariantError` between a forward's launch and its recording.
        """
        self._steps.check_pages_may_change("a free")
        band = self._band(band_name)
        if band is self._state:
            raise ChainError(f"band {band_name!r} holds state slots; free them with free_state_slots")
        self._check_bound(band, virtual_pages, "pages")
        if band is self._owner:
            for window in self._attention:
                if window is band:
                    continue
                held = virtual_pages[window.ids.is_bound(virtual_pages)]
                if len(held):
                    raise ChainError(
                        f"cannot free pages {_some(held)} of band {band_name!r}: band {window.layout.name!r} still holds them; "
                        "release them there first"
                    )
        band.free(virtual_pages)
        if band is self._owner:
            self._pages.give_back(virtual_pages)

    def free_state_slots(self, virtual_slots: IntArray) -> None:
        """Release state slots; errors as `free_pages`."""
        self._steps.check_pages_may_change("a free")
        if self._state is None:
            raise ChainError("the chain has no state band")
        self._check_bound(self._state, virtual_slots, "state slots")
        self._state.free(virtual_slots)
        self._slots.give_back(virtual_slots)

    def forward_processed(self, forward: int) -> None:
        """Return the pages that waited for `forward` or an earlier one; call it after `ForwardSteps.forward_processed`."""
        for band in self._bands.values():
            band.release_pending_through(forward)

    # ── questions ──

    def physical_units(self, band_name: str, virtual: IntArray) -> IntArray:
        """Physical ids in one band; an unbound page reads as the sink, 0, an unbound slot as −1."""
        return self._band(band_name).ids.physical(virtual)

    def live_units(self, band_name: str) -> IntArray:
        """Physical units in use in one band, ascending."""
        return self._band(band_name).live_pages()

    def span(self, band_name: str) -> PageSpan:
        """Where one band stands."""
        return self._band(band_name).span

    def statistics(self) -> ChainStatistics:
        """Exact figures of every band."""
        bands = self._bands.values()
        return ChainStatistics(
            bands=tuple(
                BandStatistics(
                    name=band.layout.name,
                    live_units=band.live_count,
                    free_units=band.counts.free_pages,
                    pending_units=len(band.pending),
                    moved_units=band.moved_pages,
                )
                for band in bands
            ),
            moved_units=sum(band.moved_pages for band in bands),
            moved_bytes=sum(band.moved_pages * band.layout.unit_bytes for band in bands),
            rearrangements=self._rearrangements,
        )

    def verify_byte_accounting(self) -> None:
        """Raise `InvariantError` unless every byte has at most one owner and every unit is counted once (C11)."""
        edge_byte, edge_name = self.layout.prefix_bytes, "reserved prefix"
        for band in self._bands.values():
            bound = len(band.live_pages())
            if bound != band.live_count:
                raise InvariantError(
                    "chain.units_counted_once",
                    f"band {band.layout.name!r} spans {band.span.page_count} units, {bound} bound and "
                    f"{band.counts.free_pages} free",
                    "a unit was lost or counted twice",
                )
            if not band.span.page_count:
                continue
            start_byte = band.layout.start_byte(band.span.first_page)
            if start_byte < edge_byte or band.layout.start_byte(band.span.end_page) > self.layout.arena_bytes:
                raise InvariantError(
                    "chain.bytes_conserved",
                    f"band {band.layout.name!r} spans bytes from {start_byte}, {edge_name} ends at {edge_byte}",
                    "a band grew into its neighbour",
                )
            edge_byte, edge_name = band.layout.start_byte(band.span.end_page), f"band {band.layout.name!r}"
        self._steps.check_idle(sum(len(band.pending) for band in self._bands.values()))

    # ── helpers ──

    def _rearrange(self, targets: tuple[PageSpan, ...], asked: tuple[int, ...]) -> None:
        """Give every band a place where its live units fit beside what it was asked for; live units keep their contents."""
        newest = self._steps.newest_recorded
        if newest is not None:
            self._device.wait_event(self._device.schedule_stream, newest.event)
            self._steps.wait_queued(newest.event)
        bands = list(self._bands.values())
        moved_before = sum(band.moved_pages for band in bands)
        for band in bands:
            band.settle_all()
            if band.layout.growth is not Growth.FLOAT:
                band.compact()
        floats = [
            place
            for place, band in enumerate(bands)
            if band.layout.growth is Growth.FLOAT and band.live_count
        ]
        for place in relocation_order(self.layout, [band.span for band in bands], targets, floats):
            bands[place].relocate(targets[place].first_page)
        self._rearrangements += 1
        log.info(
            "chain.rearranged",
            units_moved=sum(band.moved_pages for band in bands) - moved_before,
            asked=dict(zip(self._bands, asked, strict=True)),
        )

    def _asked(self, pages: int, state_slots: int) -> tuple[int, ...]:
        for count in (pages, state_slots):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ChainError(
                    f"cannot take {pages!r} pages and {state_slots!r} state slots: counts must be integers of 0 or more"
                )
        if (pages and self._owner is None) or (state_slots and self._state is None):
            raise ChainError(
                f"cannot take {pages} pages and {state_slots} state slots: the chain has bands {list(self._bands)}"
            )
        return tuple(state_slots if band is self._state else pages for band in self._bands.values())

    def _refusal(self, asked: tuple[int, ...]) -> TakeRefusal:
        return TakeRefusal(
            rule="no layout of the arena holds the take",
            arena_bytes=self.layout.arena_bytes - self.layout.prefix_bytes,
            bands=tuple(
                BandFigures(
                    name=band.layout.name,
                    unit_bytes=band.layout.unit_bytes,
                    asked=units,
                    live=band.live_count,
                    free=band.counts.free_pages,
                )
                for band, units in zip(self._bands.values(), asked, strict=True)
            ),
        )

    def _band(self, name: str) -> Band:
        if name not in self._bands:
            raise ChainError(f"no band {name!r}; the chain has {list(self._bands)}")
        return self._bands[name]

    @staticmethod
    def _check_bound(band: Band, virtual: IntArray, what: str) -> None:
        name = band.layout.name
        if virtual.ndim != 1 or virtual.dtype != np.int64:
            raise ChainError(
                f"cannot free {what} of band {name!r}: ids must be a one-dimensional int64 array, found {virtual.dtype} "
                f"{list(virtual.shape)}"
            )
        outside = virtual[(virtual < 0) | (virtual >= band.ids.virtual_count)]
        if len(outside):
            raise ChainError(
                f"cannot free {what} {_some(outside)} of band {name!r}: ids run from 0 to {band.ids.virtual_count - 1}"
            )
        unbound = virtual[~band.ids.is_bound(virtual)]
        if len(unbound):
            raise ChainError(
                f"cannot free {what} {_some(unbound)} of band {name!r}: not bound (freed twice, or never taken)"
            )
        entries, times = np.unique(virtual, return_counts=True)
        if len(entries) != len(virtual):
            raise ChainError(
                f"cannot free {what} {_some(entries[times > 1])} of band {name!r}: named twice in one free"
            )


def _some(ids: IntArray) -> str:
    """The first few ids, for an error's text."""
    shown = ", ".join(str(unit) for unit in ids[:8])
    return f"[{shown}]" if len(ids) <= 8 else f"[{shown}, … {len(ids)} in all]"
