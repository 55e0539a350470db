"""Takes that have a prefix cache make room: where nothing is left to take, what the cache chooses is evicted first (rows K5, K8)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvtide.chain import BandTake, ChainAllocator, Taken, TakeRefusal
from kvtide.device import IntArray
from kvtide.ledger import InvariantError
from kvtide.storage.errors import StorageError
from kvtide.storage.prefix_cache import PrefixCache

_NOTHING: IntArray = np.zeros(0, np.int64)


class EvictingTakes:
    """Takes from one chain, and the cache, if any, whose units may be evicted for them."""

    def __init__(self, chain: ChainAllocator) -> None:
        """No cache."""
        self._chain = chain
        self._cache: PrefixCache | None = None
        self._state_names = [band.name for band in chain.layout.bands if band.page_tokens is None]

    def use(self, cache: PrefixCache) -> None:
        """Evict what `cache` chooses, from now on; raises `StorageError` for a second cache."""
        if self._cache is not None:
            raise StorageError("cannot use a second prefix cache: what one evicts the other may have counted")
        self._cache = cache

    def held_units(self) -> Mapping[str, int]:
        """Units of the cache that no row accounts for, by band."""
        return {} if self._cache is None else self._cache.held_units()

    def evictable_units(self) -> Mapping[str, int]:
        """Of them, those that it could free now."""
        return {} if self._cache is None else self._cache.evictable_units()

    def counted_on_again(self, name: str) -> int:
        """Units of one band that rows count on beside those in use, since they share some."""
        return 0 if self._cache is None else self._cache.units_counted_on_again().get(name, 0)

    def has_room(self, units: Mapping[str, int]) -> bool:
        """Whether so many units fit, by band, once all that is evictable has been evicted."""
        return self._chain.admits(units, self.evictable_units())

    def take_slots(self, count: int) -> IntArray:
        """State slots that were promised this moment; raises `InvariantError` where they are refused."""
        answer = self._take(0, count, None)
        if isinstance(answer, TakeRefusal):
            raise _broken_promise(answer)
        return answer.state_slots

    def try_slots(self, count: int) -> IntArray | None:
        """The same, not zeroed: the caller copies a state onto each before anybody reads it.

        `None` where fixed units or transfers have come in the way. Raises `InvariantError` where nothing has.
        """
        answer = self._take(0, count, {name: BandTake(unwritten=_NOTHING) for name in self._state_names})
        if isinstance(answer, Taken):
            # What is copied there is a whole state, so none is owed its zeroing.
            self._chain.written(answer)
            return answer.state_slots
        if not self._chain.uses.bind_layout:
            raise _broken_promise(answer)
        return None

    def try_most_slots(self, count: int) -> IntArray:
        """As many of `count` slots as can be had, as `try_slots`: all with one take, unless something has come in the way."""
        if not count:
            return _NOTHING
        slots = self.try_slots(count)
        if slots is not None:
            return slots
        found = [_NOTHING]
        # All but one, at most: together they were not to be had.
        while len(found) < count and (slots := self.try_slots(1)) is not None:
            found.append(slots)
        return np.concatenate(found)

    def take_promised(self, pages: int, slots: int, bands: Mapping[str, BandTake]) -> Taken:
        """Pages and state slots that were promised this moment; raises `InvariantError` where they are refused."""
        answer = self._take(pages, slots, bands)
        if isinstance(answer, TakeRefusal):
            raise _broken_promise(answer)
        return answer

    def take_pages(self, pages: int, bands: Mapping[str, BandTake] | None) -> Taken | TakeRefusal:
        """Pages that were promised. Refused, with nothing evicted, only where fixed units or transfers have come in the way since.

        Raises `InvariantError` for any other refusal.
        """
        answer = self._take(pages, 0, bands)
        if isinstance(answer, TakeRefusal) and not self._chain.uses.bind_layout:
            raise _broken_promise(answer)
        return answer

    def _take(self, pages: int, slots: int, bands: Mapping[str, BandTake] | None) -> Taken | TakeRefusal:
        answer = self._chain.take(pages=pages, state_slots=slots, bands=bands)
        if isinstance(answer, Taken) or self._cache is None:
            return answer
        asked = {band.name: band.asked for band in answer.bands}
        with self._chain.capacity_decision("an eviction"):
            evictable = self.evictable_units()
            if not self._chain.admits(asked, evictable):
                return answer
            # What others were promised needs no look: to take what one was promised leaves the sum as it was (ADR 7).
            self._cache.evict_until(lambda freed: self._chain.fits_after_frees(asked, freed))
        answer = self._chain.take(pages=pages, state_slots=slots, bands=bands)
        if isinstance(answer, TakeRefusal) and not self._chain.uses.bind_layout:
            raise InvariantError(
                "storage.evicted_enough",
                f"a prefix cache said that it could evict {dict(evictable)}, evicted, and this take found no room: {answer}",
                "the cache freed less than it was asked for, or counted as evictable what a transfer, a load or a hit keeps",
            )
        return answer


def _broken_promise(refusal: TakeRefusal) -> InvariantError:
    return InvariantError(
        "storage.admission_guarantee",
        f"an admitted request was refused: {refusal}",
        "a checkpoint was reached and not noted (checkpoints_taken, where a policy has an interval), units were taken that nobody was "
        "promised, a cache locked what it had offered, or a demand was priced too low",
    )
