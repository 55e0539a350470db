"""What admission and takes need of a cache of prefixes: the seam between them and the prefix tree (rows K5, K8).

A cache holds units that no row in service accounts for. Admission counts those that it could give up as free; a take that finds no
room has it give them up. Both are questions about one moment, so this is what the cache promises: *units in use, less what it could
give up, and what rows count on again, become more only by an admission that was asked after its prefix had been locked, or by a take
of what a row was promised*. Whatever else happens to a row leaves that sum as it was, beside what is outstanding: a checkpoint or pages
that go over to the cache, and a shared window page that one of its rows retires, whose promise is outstanding again.

A load, a transfer or whoever else fixes units of the cache takes them out of what it could give up, and asks first, as an admission
does (ADR 7). A backup does not: it reads, and what it reads can be given up and handed out, behind its copy on the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol


class PrefixCache(Protocol):
    """Units by band name; bands left out have none."""

    def held_units(self) -> Mapping[str, int]:
        """Units that the cache holds and no row in service accounts for."""

    def evictable_units(self) -> Mapping[str, int]:
        """Of them those that it could free now, all together: no row has locked them, nothing has fixed them, and no load or transfer
        touches them. Those that a backup reads are among them.
        """

    def units_counted_on_again(self) -> Mapping[str, int]:
        """Units that several rows need, once for each row but one that may give its claim up and take another unit instead.

        Admission keeps room for so many beside what is outstanding.
        """

    def evict_until(self, is_enough: Callable[[Mapping[str, int]], bool]) -> None:
        """Choose victims one after another until `is_enough` of the units that they would free, then free them.

        Called only while all that is evictable would be enough. The order is the cache's, alike on every rank. Where a take finds no
        room behind it, the caller raises `InvariantError` in the cache's name.
        """
