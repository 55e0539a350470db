"""What a refusal says beside no, compared with every layout there is: whether waiting helps, how much could be had, what would have to go."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from kvtide.chain import TakeRefusal
from kvtide.plan import ArenaLayout
from kvtide.simulation.claims import immovable
from kvtide.simulation.failures import CheckFailedError
from kvtide.simulation.rank import Rank
from kvtide.simulation.reach import Need, some_layout_holds
from kvtide.simulation.uses import UseBook


def check_refusal(
    refusal: TakeRefusal,
    asked: Mapping[str, int],
    *,
    layout: ArenaLayout,
    freeable: Mapping[str, int],
    holds: Callable[[Mapping[str, int], Mapping[str, int]], bool],
) -> None:
    """Raise `CheckFailedError` where a refusal of `asked` units by band misleads whoever reads it.

    `freeable` is how many units of each band could come free at once, `holds` whether some layout holds `asked` with some of them freed.
    """
    counts = [asked.get(band.name, 0) for band in layout.bands]
    if refusal.is_final == _empty_holds(layout, counts):
        raise CheckFailedError(
            "capacity_answer",
            f"a refusal of {dict(asked)} is {'' if refusal.is_final else 'not '}final, an empty arena tells otherwise",
        )
    most = max(counts)
    parts = next(
        part
        for part in range(most, -1, -1)
        if _empty_holds(layout, [count * part // most for count in counts])
    )
    largest = {
        band.name: count * parts // most for band, count in zip(layout.bands, counts, strict=True) if count
    }
    if refusal.largest() != largest:
        raise CheckFailedError(
            "capacity_answer",
            f"of {dict(asked)} an empty arena holds {largest}, the refusal says {refusal.largest()}",
        )
    serves = refusal.would_serve()
    for band, freeable_count in freeable.items():
        fewest = serves.get(band)
        if fewest is None:
            is_right = not holds(asked, {band: freeable_count})
        else:
            is_right = (
                0 < fewest <= freeable_count
                and holds(asked, {band: fewest})
                and not holds(asked, {band: fewest - 1})
            )
        if not is_right:
            raise CheckFailedError(
                "capacity_answer",
                f"a refusal of {dict(asked)} says that {fewest or 'no number of'} units of band {band!r}, freed, would do, "
                f"of {freeable_count} that could be",
            )


def freeable_units(book: UseBook, layout: ArenaLayout, rank: Rank) -> dict[str, int]:
    """By band, units in use that are neither fixed nor under a transfer."""
    needs, _ = immovable(book, layout, rank, [0] * len(layout.bands), around_transfers=True)
    return {
        band.name: int(np.count_nonzero(~np.isin(rank.chain.live_units(band.name), need.stays)))
        for band, need in zip(layout.bands, needs, strict=True)
    }


def _empty_holds(layout: ArenaLayout, counts: list[int]) -> bool:
    return some_layout_holds(layout, [Need(count) for count in counts], [])
