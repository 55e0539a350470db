"""What admission and takes need of a cache of prefixes: the seam between them and the prefix tree (rows K5, K8).

A cache holds units that no row in service accounts for. Admission counts those that it could give up as free; a take that finds no
room has it give them up. Both are questions about one moment, so this is what the cache promises: *what it could give up
becomes less only by what it gives up, or by an admission that was asked after its prefix had been locked.* Whatever else happens
to a row, a checkpoint that the cache takes over among it, leaves `held by others + promised and not yet held` as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol


class PrefixCache(Protocol):
    """Units by band name; bands left out have none."""

    def held_units(self) -> Mapping[str, int]:
        """Units that the cache holds and no row in service accounts for."""

    def evictable_units(self) -> Mapping[str, int]:
        """Of them those that it could free now, all together: nobody has locked them, no copy or transfer touches them."""

    def units_counted_on_again(self) -> Mapping[str, int]:
        """Units that several rows need, once for each row but one that may give its claim up and take another unit instead.

        Admission keeps room for so many beside what is outstanding.
        """

    def evict_until(self, is_enough: Callable[[Mapping[str, int]], bool]) -> None:
        """Choose victims one after another until `is_enough` of the units that they would free, then free them.

        Called only while all that is evictable would be enough. The order is the cache's, alike on every rank.
        """
