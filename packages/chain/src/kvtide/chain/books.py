"""What a chain decides by, as a value: two chains with equal books decide alike from here on (rows C10, C13).

| left out | because no decision can tell |
| - | - |
| virtual ids | what they stand for is told by the units they are bound to, and which bands bind one page |
| ordinals of forwards, events | a forward is told by its place among those in flight |
| signals, owners of claims | one is told by what it does to which units, and whether it is the same in two bands |
| holes | what of a span is nothing else |
| which ids are free, their order | ids mean nothing but identity |
| counts of what was done, epochs | for statistics, and to know a kept snapshot from a stale one |
| kept snapshots, looked-up units that stay | they say what the books say, or `verify_snapshots` finds them stale |
| counts of bound (sub-)pages by virtual page | the bound units, counted |
| through which forward the host has synchronised | it makes processing too early an error, and nothing else |
| whether a transfer ended since vacated units were collected, which batch one stands in | what nobody reads any more comes back all the same |
| batches of pages that wait for one forward | they return together (row L3) |

It looks at every unit of every span, in Python: for searches on tiny arenas, traces, and tests.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeAlias

from kvtide.chain.band import Band
from kvtide.chain.chain_bands import ChainBands
from kvtide.chain.takes import Owed
from kvtide.chain.units import units_of
from kvtide.ledger import FencedBytes, ForwardSteps, PendingBatch, fence_books, sorted_pages

Books: TypeAlias = tuple[object, ...]
"""Nested tuples of integers; None for what is unknown."""


def chain_books(
    bands: ChainBands,
    fences: FencedBytes,
    steps: ForwardSteps,
    debts: Iterable[dict[str, Owed]],
    free_ids: tuple[int, int],
) -> Books:
    """See the module's docstring; `free_ids` counts virtual pages and state slots that can be minted."""
    places = steps.places()
    numbers: dict[Hashable, int] = {}

    def name(one: Hashable) -> int:
        return numbers.setdefault(one, len(numbers))

    pages: dict[int, int] = {}
    return (
        free_ids,
        len(places),
        steps.in_flight_count,
        sum(forward <= steps.retired_through for forward in places),
        tuple(
            (
                band.first_page,
                band.end_page,
                _bound_books(band, ratio, pages),
                _pending_books(band.pending.batches(), places),
                sorted_pages(band.withheld_pages),
                band.usage.books(name),
            )
            for band, ratio in zip(bands, bands.ratios, strict=True)
        ),
        fence_books(fences.fences(), places, name),
        tuple(
            tuple(
                (band, sorted_pages(bands[band].ids.physical(units_of(owed.units()))))
                for band, owed in sorted(debt.items())
            )
            for debt in debts
        ),
    )


def _bound_books(band: Band, ratio: int, pages: dict[int, int]) -> tuple[int, ...]:
    """Who is bound to each unit of the span, −1 for nobody: pages in the order in which they are met, slots by their units."""
    bound = band.ids.virtual_in(band.first_page, band.end_page).tolist()
    if not ratio:
        return tuple(min(virtual, 0) for virtual in bound)
    return tuple(
        virtual if virtual < 0 else pages.setdefault(virtual // ratio, len(pages)) * ratio + virtual % ratio
        for virtual in bound
    )


def _pending_books(batches: Iterable[PendingBatch], places: dict[int, int]) -> Books:
    """Units that wait for each forward, oldest first."""
    found: dict[int, list[int]] = {}
    for batch in batches:
        found.setdefault(places[batch.forward], []).extend(batch.pages.tolist())
    return tuple((place, tuple(sorted(units))) for place, units in found.items())
