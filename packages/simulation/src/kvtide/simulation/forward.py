"""One modelled forward: a metadata phase that reads the mirrors, then a body that reads and writes the units they name.

    schedule stream   … uploads ──┐                      ┌── barrier: uploads, zeroing, moves of what comes next
    forward stream                └─ metadata ─(read end)─┴─ body ─(end)

What it must find is fixed when it is launched, by virtual ids, and is the same on every rank. Where, each rank's metadata phase
reads from its mirrors when it runs; that it differs from the host's tables of the launch is a failure of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from kvtide.device import IntArray, ModelledEvent, RunningWork
from kvtide.simulation.bands import NONE, SimulatedBand
from kvtide.simulation.failures import CheckFailedError
from kvtide.simulation.rank import ROWS, Rank
from kvtide.simulation.requests import BatchEntry
from kvtide.simulation.shadow import Bools, Shadow, Words, check_words

_PADDING = np.uint64(0x0000_7777_7777_7777)
"""What padded token rows write to a sink."""


@attrs.frozen(kw_only=True, eq=False)
class BandWork:
    """What a forward does in one band."""

    band: SimulatedBand
    """Which."""

    looked_up: IntArray
    """Virtual units that the metadata phase translates, unbound ones among them."""

    read_places: IntArray
    """Places in `looked_up` of the units that the body reads."""

    expected: Words
    """What it must find there, `[len(read_places), words]`."""

    write_places: IntArray
    """Places in `looked_up` of the units that the body writes."""

    mask: Bools
    """Which of their words, `[len(write_places), words]`."""

    numbers: Words
    """With what, one number a unit."""

    @property
    def written(self) -> IntArray:
        """Virtual units it writes."""
        return self.looked_up[self.write_places]


@attrs.frozen(kw_only=True, eq=False)
class ForwardWork:
    """What a forward does, the same on every rank."""

    rows: tuple[tuple[int, IntArray], ...]
    """Row and virtual pages of each request."""

    bands: tuple[BandWork, ...]
    """Those in which it touches anything."""


def plan_forward(
    bands: Sequence[SimulatedBand], shadow: Shadow, entries: Sequence[BatchEntry]
) -> ForwardWork:
    """A forward over `entries`: it reads all that they hold, then writes their new tokens."""
    works = [
        _state_work(band, shadow, entries) if band.is_state else _token_work(band, shadow, entries)
        for band in bands
    ]
    return ForwardWork(
        rows=tuple((entry.request.row, entry.request.pages.copy()) for entry in entries),
        bands=tuple(work for work in works if len(work.looked_up)),
    )


def submit_metadata(rank: Rank, work: ForwardWork, name: str) -> list[IntArray]:
    """Queue the metadata phase; physical units of each band's `looked_up`, as the host has them now."""
    device = rank.device
    physical = [rank.chain.physical_units(each.band.name, each.looked_up) for each in work.bands]

    def metadata(_: RunningWork) -> None:
        rows = rank.mirror(ROWS)
        for row, pages in work.rows:
            first = row * rank.column_count
            _check_ids(f"{name} in row {row}", rows[first : first + len(pages)], pages)
        for each, units in zip(work.bands, physical, strict=True):
            found = rank.mirror(f"ids:{each.band.name}")[each.looked_up]
            _check_ids(f"{name} in the ids of band {each.band.name!r}", found, units)

    names = [ROWS, *(f"ids:{each.band.name}" for each in work.bands)]
    device.submit(
        device.forward_stream,
        f"metadata of {name}",
        reads=[device.mirror_span(each) for each in names],
        run=metadata,
    )
    return physical


def submit_body(rank: Rank, work: ForwardWork, physical: Sequence[IntArray], name: str) -> ModelledEvent:
    """Queue the rest; the event behind it."""
    device = rank.device
    places = [
        (each, units[each.read_places], units[each.write_places])
        for each, units in zip(work.bands, physical, strict=True)
    ]

    def body(_: RunningWork) -> None:
        for each, reads, writes in places:
            units = rank.units[each.band.name]
            check_words(
                f"{name} on rank {rank.place}",
                each.band,
                each.looked_up[each.read_places],
                each.expected,
                units[reads],
            )
            if each.band.has_sink:
                units[0] = _PADDING
            units[writes] = np.where(each.mask, each.numbers[:, None], units[writes])

    device.submit(
        device.forward_stream,
        name,
        reads=[span for each, reads, _ in places for span in device.unit_spans(each.band.grid, reads)],
        writes=[span for each, _, writes in places for span in device.unit_spans(each.band.grid, writes)],
        run=body,
    )
    return device.record_event(device.forward_stream)


def _token_work(band: SimulatedBand, shadow: Shadow, entries: Sequence[BatchEntry]) -> BandWork:
    looked_up = [entry.request.sub_pages(band) for entry in entries]
    positions = [np.arange(len(units)) * band.page_tokens for units in looked_up]
    starts, ends = (
        np.repeat([getattr(entry, side) for entry in entries], [len(units) for units in looked_up])
        for side in ("start", "end")
    )
    units = np.concatenate([*looked_up, NONE])
    position = np.concatenate([*positions, NONE])
    bound = shadow.bound[band.name][units]
    is_written = bound & (position < ends) & (position + band.page_tokens > starts) & (ends > starts)
    write_places = np.flatnonzero(is_written)
    token = position[write_places, None] + band.token_of_word
    return _work(
        band,
        shadow,
        looked_up=units,
        read_places=np.flatnonzero(bound & ~shadow.undefined[band.name][units]),
        write_places=write_places,
        mask=(token >= starts[write_places, None]) & (token < ends[write_places, None]),
    )


def _state_work(band: SimulatedBand, shadow: Shadow, entries: Sequence[BatchEntry]) -> BandWork:
    running = [entry.request.state_slots[0] for entry in entries]
    others = [slot for entry in entries for slot in entry.written_slots]
    slots = np.array(running + others, np.int64)
    return _work(
        band,
        shadow,
        looked_up=slots,
        read_places=np.arange(len(running)),
        write_places=np.arange(len(slots)),
        mask=np.ones((len(slots), band.words), np.bool_),
    )


def _work(
    band: SimulatedBand,
    shadow: Shadow,
    *,
    looked_up: IntArray,
    read_places: IntArray,
    write_places: IntArray,
    mask: Bools,
) -> BandWork:
    return BandWork(
        band=band,
        looked_up=looked_up,
        read_places=read_places,
        expected=shadow.words[band.name][looked_up[read_places]],
        write_places=write_places,
        mask=mask,
        numbers=shadow.numbers(band, len(write_places)),
    )


def _check_ids(reader: str, found: IntArray, expected: IntArray) -> None:
    if not np.array_equal(found, expected):
        place = int(np.flatnonzero(found != expected)[0])
        raise CheckFailedError(
            "stale_mirror",
            f"the metadata phase of {reader} reads {int(found[place])} at entry {place}, the host had {int(expected[place])}",
        )
