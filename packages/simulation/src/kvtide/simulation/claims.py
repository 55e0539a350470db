"""What uses keep others from, by where their units were: for the exhaustive answer, and for a check after each action."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvtide.device import IntArray
from kvtide.plan import ArenaLayout
from kvtide.simulation.bands import NONE, SimulatedBand
from kvtide.simulation.failures import CheckFailedError
from kvtide.simulation.rank import Rank
from kvtide.simulation.reach import Need
from kvtide.simulation.shadow import Shadow
from kvtide.simulation.uses import Part, Use, UseBook


def places_of(rank: Rank, use: Use) -> dict[str, IntArray]:
    """Band → where a use's units stand on a rank, as the host has it."""
    return {part.band.name: rank.chain.physical_units(part.band.name, part.units) for part in use.parts}


def held_places(book: UseBook, rank: Rank) -> list[tuple[Use, dict[str, IntArray]]]:
    """Where what is held stands."""
    return [(use, places_of(rank, use)) for use in book.uses if use.is_held]


def moved_holds(before: Sequence[tuple[Use, dict[str, IntArray]]], rank: Rank) -> list[Use]:
    """Uses of which anything held has moved since `held_places` said `before`."""
    return [
        use
        for use, places in before
        if any(not np.array_equal(found, places[name]) for name, found in places_of(rank, use).items())
    ]


def immovable(
    book: UseBook,
    layout: ArenaLayout,
    rank: Rank,
    live: Sequence[int],
    *,
    around_transfers: bool,
    around_holds: bool = False,
) -> tuple[list[Need], list[tuple[int, int]]]:
    """Each band's `live` units and what of it may not move, and byte ranges outside all spans that nobody may write.

    A hold follows a move that must be made, so what is held may move, unless `around_holds`.
    """
    stays: dict[str, set[int]] = {band.name: set() for band in layout.bands}
    blocked = []
    for use, part, places in _claims(book, rank, around_transfers=around_transfers):
        if use.is_held and not around_holds:
            continue
        span = rank.chain.span(part.band.name)
        grid = part.band.grid
        for page in places.tolist():
            if span.first_page <= page < span.end_page:
                stays[part.band.name].add(page)
            else:
                start = grid.origin_bytes + page * grid.unit_bytes
                blocked.append((start, start + grid.unit_bytes))
    needs = []
    for band, count in zip(layout.bands, live, strict=True):
        free = stays[band.name] - set(rank.chain.live_units(band.name).tolist())
        needs.append(Need(count + len(free), tuple(sorted(stays[band.name]))))
    return needs, blocked


def check_claims(book: UseBook, shadow: Shadow, bands: Sequence[SimulatedBand], rank: Rank) -> None:
    """Raise `CheckFailedError` where a fixed unit has moved, or somebody holds bytes that a use keeps from others."""
    claims = list(_claims(book, rank, around_transfers=True))
    if not claims:
        return
    owners, starts, ends = _live_extents(shadow, bands, rank)
    for use, part, places in claims:
        grid, tag = part.band.grid, part.band.tag
        first = grid.origin_bytes + places * grid.unit_bytes
        low = np.searchsorted(ends, first, side="right")
        high = np.searchsorted(starts, first + grid.unit_bytes)
        held = part.still_held(shadow)
        if part.band.name in use.elsewhere:
            held &= ~use.elsewhere[part.band.name]
        counts = high - low
        first_owner = owners[np.minimum(low, len(owners) - 1)] if len(owners) else np.full((len(low), 2), -1)
        is_own = (counts == 1) & (first_owner[:, 0] == tag) & (first_owner[:, 1] == part.units)
        # What a send reads may move elsewhere; nobody else may come.
        wrong = np.where(held, ~is_own & ((counts > 0) | use.is_fixed), counts > 0)
        if wrong.any():
            place = int(np.flatnonzero(wrong)[0])
            there = [tuple(owner) for owner in owners[low[place] : high[place]].tolist()]
            raise CheckFailedError(
                "disturbed_use",
                f"unit {int(places[place])} of band {part.band.name!r}, which was virtual unit {int(part.units[place])} for "
                f"{use.name} ({use.stage.value}), now lies under {_described(there)}",
            )


def check_keeps(book: UseBook, shadow: Shadow, band: SimulatedBand, rank: Rank) -> None:
    """Raise `CheckFailedError` where the chain is wrong about which units of a band would not come free: what stays, and what is held."""
    claimed = [NONE]
    for _, part, places in _claims(book, rank, around_transfers=True):
        if part.band is band:
            claimed.append(places)
    units = np.flatnonzero(shadow.bound[band.name])
    kept = rank.chain.uses.keeps(band.name, units)
    wrong = kept != np.isin(rank.chain.physical_units(band.name, units), np.concatenate(claimed))
    if wrong.any():
        place = int(np.flatnonzero(wrong)[0])
        raise CheckFailedError(
            "capacity_answer",
            f"virtual unit {int(units[place])} of band {band.name!r} {'would not' if kept[place] else 'would'} come free, as the chain has "
            "it, and those who use it have it otherwise",
        )


def _claims(book: UseBook, rank: Rank, *, around_transfers: bool) -> Iterator[tuple[Use, Part, IntArray]]:
    for use in book.uses:
        if use.is_fixed or (around_transfers and use.is_touched):
            for part in use.parts:
                name = part.band.name
                # A hold follows a move that must be made.
                here = rank.chain.physical_units(name, part.units) if use.is_held else use.places[name]
                yield use, part, here


def _live_extents(
    shadow: Shadow, bands: Sequence[SimulatedBand], rank: Rank
) -> tuple[IntArray, IntArray, IntArray]:
    """Tag and virtual unit of everything held, `[count, 2]`, and where each begins and ends in bytes, ascending."""
    owners, starts, ends = [], [], []
    for band in bands:
        held = np.flatnonzero(shadow.bound[band.name])
        start = band.grid.origin_bytes + rank.chain.physical_units(band.name, held) * band.grid.unit_bytes
        owners.append(np.stack([np.full(len(held), band.tag), held], axis=1))
        starts.append(start)
        ends.append(start + band.grid.unit_bytes)
    start = np.concatenate(starts)
    order = np.argsort(start, kind="stable")
    return np.concatenate(owners)[order], start[order], np.concatenate(ends)[order]


def _described(owners: Sequence[tuple[int, ...]]) -> str:
    return " and ".join(f"band {tag}'s virtual unit {unit}" for tag, unit in owners) or "nobody"
