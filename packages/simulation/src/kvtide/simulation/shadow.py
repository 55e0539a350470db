"""What every live unit must hold: the dumbest model of the arena's contents, by virtual ids.

Every write fills words with a number of its own: the band's tag in the top byte, a serial below. So a wrong word says whose it
is: another unit's of the band, another band's, or memory that nobody ever wrote (the modelled device starts as 0xFF, a NaN in
every float type). A unit that a take handed out is zero; one that the taker promised to write whole, with a forward or a copy, is
*undefined* until then, and nobody may look at it.

    word    0x02_00000000000017      band 2's, write 0x17
            0x00000000_00000000      zeroed on hand-out, not written since
            0xFF…                    never written
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtide.device import IntArray
from kvtide.simulation.bands import SimulatedBand
from kvtide.simulation.failures import CheckFailedError

Words = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

_TAG_SHIFT = 56
_NEVER_WRITTEN = 0xFF


class Shadow:
    """Contents and bindings of every virtual unit, one for all ranks."""

    def __init__(self, bands: Sequence[SimulatedBand]) -> None:
        """Nothing is bound."""
        self.words: dict[str, Words] = {
            band.name: np.zeros((band.id_count, band.words), np.uint64) for band in bands
        }
        """Band → words by virtual unit, `[id_count, words]`; as every write launched so far leaves them."""
        self.bound: dict[str, Bools] = {band.name: np.zeros(band.id_count, np.bool_) for band in bands}
        """Band → which virtual units somebody holds."""
        self.undefined: dict[str, Bools] = {band.name: np.zeros(band.id_count, np.bool_) for band in bands}
        """Band → which of them nobody may read yet."""
        self.tenures: dict[str, IntArray] = {band.name: np.zeros(band.id_count, np.int64) for band in bands}
        """Band → how often each virtual unit has been handed out."""
        self._serial = 0

    def bind(self, band: str, units: IntArray, promised: IntArray) -> None:
        """A take has handed out `units`, zeroed but for those `promised` to be written whole."""
        self.bound[band][units] = True
        self.tenures[band][units] += 1
        self.undefined[band][units] = False
        self.undefined[band][promised] = True
        self.words[band][units] = 0

    def unbind(self, band: str, units: IntArray) -> None:
        """They have been freed."""
        self.bound[band][units] = False
        self.undefined[band][units] = False

    def rehome(self, band: str, sources: IntArray, targets: IntArray) -> None:
        """What `sources` named is called `targets` from now on."""
        self.bound[band][targets] = True
        self.tenures[band][targets] += 1
        self.undefined[band][targets] = self.undefined[band][sources]
        self.words[band][targets] = self.words[band][sources]
        self.unbind(band, sources)

    def pay(self, band: str, units: IntArray) -> None:
        """Those of `units` that are undefined were zeroed after all."""
        self.words[band][units[self.undefined[band][units]]] = 0
        self.undefined[band][units] = False

    def numbers(self, band: SimulatedBand, count: int) -> Words:
        """Numbers that no unit was filled with before."""
        first = self._serial + 1
        self._serial += count
        return np.arange(first, first + count, dtype=np.uint64) | np.uint64(band.tag << _TAG_SHIFT)

    def write(self, band: SimulatedBand, units: IntArray, mask: Bools, numbers: Words) -> None:
        """The words of `mask`, `[len(units), words]`, have been filled with `numbers`, one a unit."""
        words, undefined = self.words[band.name], self.undefined[band.name]
        words[units] = np.where(mask, numbers[:, None], words[units])
        assert mask[undefined[units]].all(), "a promise to write a unit whole was not kept"
        undefined[units] = False

    def copy(self, band: str, sources: IntArray, targets: IntArray) -> None:
        """Units were copied."""
        self.words[band][targets] = self.words[band][sources]
        self.undefined[band][targets] = False


def check_words(reader: str, band: SimulatedBand, units: IntArray, expected: Words, found: Words) -> None:
    """Raise `CheckFailedError` unless `found` is `expected`, `[len(units), words]`, naming the first unit that differs."""
    if np.array_equal(expected, found):
        return
    places, columns = np.nonzero(expected != found)
    tags = found[places, columns] >> np.uint64(_TAG_SHIFT)
    alien = (tags != band.tag) & (tags != 0)
    first = int(np.argmax(alien)) if alien.any() else 0
    place, column = int(places[first]), int(columns[first])
    check = "cross_dtype_bytes" if alien.any() else "lost_write"
    raise CheckFailedError(
        check,
        f"{reader} finds {_word(int(found[place, column]))} in band {band.name!r} virtual unit {int(units[place])} word "
        f"{column}, where {_word(int(expected[place, column]))} must be ({len(np.unique(places))} of {len(units)} units differ)",
    )


def _word(word: int) -> str:
    tag, serial = word >> _TAG_SHIFT, word & ((1 << _TAG_SHIFT) - 1)
    if tag == _NEVER_WRITTEN:
        return "memory that was never written"
    return "zero" if not word else f"write {serial} of band {tag}"
