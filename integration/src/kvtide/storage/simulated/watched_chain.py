"""A rank's allocator as the storage's parts see it: all that they change is noted, and what they ask is compared with every layout.

Ranks are called one after the other, and the first one's calls move the world's model along. The others' must be the same calls: each
keeps a log, which are compared behind every verb.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from kvtide.chain import BandTake, ChainAllocator, Taken, TakeRefusal
from kvtide.device import IntArray
from kvtide.simulation import CheckFailedError, Rank, SimulatedBand, World
from kvtide.storage.simulated.meanings import Meanings


class WatchedChain:
    """Stands for the chain of one rank; what is not here is the chain's own."""

    def __init__(self, world: World, rank: Rank, meanings: Meanings) -> None:
        """Nothing called."""
        self._world = world
        self._rank = rank
        self._chain = rank.chain
        self._meanings = meanings
        self._leads = rank is world.ranks[0]
        self._band = {band.name: band for band in world.bands}
        self.log: list[tuple[Any, ...]] = []
        """What was called, with what, for what."""
        self.promised: dict[str, IntArray] = {}
        """Of the last take: band → virtual units that its forward is to write whole; of the first rank's alone."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chain, name)

    @property
    def as_chain(self) -> ChainAllocator:
        """For the storage's parts."""
        return cast("ChainAllocator", self)

    def copies(self) -> Iterator[tuple[int, int]]:
        """State slots copied since the log was cleared, from and to."""
        for what, *ids in self.log:
            if what == "copy":
                yield from zip(*ids, strict=True)

    # ── what changes something ──

    def take(
        self, *, pages: int = 0, state_slots: int = 0, bands: Mapping[str, BandTake] | None = None
    ) -> Taken | TakeRefusal:
        """As the chain's; refused exactly where no layout holds it, and then nothing has changed."""
        if not self._leads:
            return self._taken(self._chain.take(pages=pages, state_slots=state_slots, bands=bands))
        world = self._world
        asked = world.units_asked(pages, state_slots, bands)
        fits, before = world.some_layout_holds(asked), self._rank.fingerprint()
        answer = self._chain.take(pages=pages, state_slots=state_slots, bands=bands)
        if isinstance(answer, Taken) != fits:
            raise CheckFailedError(
                "capacity_answer", f"{'some' if fits else 'no'} layout holds {asked}, the take says {answer}"
            )
        if isinstance(answer, Taken):
            units, self.promised = world.note_taken(answer, bands)
            for name, bound in units.items():
                self._meanings.taken(self._band[name], bound)
        elif self._rank.fingerprint() != before:
            raise CheckFailedError("changed_by_refusal", "a refused take of a sharer changed rank 0")
        elif not self._rank.waited:
            # The world hears of transfers that were waited for once the verb is over, and does not know yet what is open.
            world.note_refused(answer, asked)
        return self._taken(answer)

    def free_pages(self, band_name: str, virtual: IntArray) -> None:
        """As the chain's."""
        self._chain.free_pages(band_name, virtual)
        self._freed(self._band[band_name], virtual)

    def free_state_slots(self, virtual: IntArray) -> None:
        """As the chain's."""
        self._chain.free_state_slots(virtual)
        self._freed(self._state, virtual)

    def rehome_window(self, band_name: str, sources: IntArray, targets: IntArray) -> None:
        """As the chain's."""
        self._chain.rehome_window(band_name, sources, targets)
        self.log.append(("rehome", band_name, sources.tolist(), targets.tolist()))
        if self._leads:
            self._world.note_rehomed(self._band[band_name], sources, targets)
            self._meanings.moved(self._band[band_name], sources, targets)
            self._world.facts["tree: units rehomed"] += len(sources)

    def copy_state_slots(self, sources: IntArray, targets: IntArray) -> None:
        """As the chain's."""
        self._chain.copy_state_slots(sources, targets)
        self.log.append(("copy", sources.tolist(), targets.tolist()))
        if self._leads:
            self._world.note_copied(sources, targets)
            self._meanings.copied(self._state, sources, targets)

    # ── what asks ──

    def admits(self, units: Mapping[str, int], evictable: Mapping[str, int] | None = None) -> bool:
        """As the chain's; an exhaustive answer agrees."""
        return self._agreed("admits", self._chain.admits(units, evictable or {}), units, evictable or {})

    def fits_after_frees(self, units: Mapping[str, int], freed: Mapping[str, int]) -> bool:
        """As the chain's; an exhaustive answer agrees."""
        return self._agreed("fits_after_frees", self._chain.fits_after_frees(units, freed), units, freed)

    # ── helpers ──

    @property
    def _state(self) -> SimulatedBand:
        state = self._world.state
        assert state is not None, "state slots are there"
        return state

    def _taken(self, answer: Taken | TakeRefusal) -> Taken | TakeRefusal:
        ids = (answer.pages.tolist(), answer.state_slots.tolist()) if isinstance(answer, Taken) else ()
        self.log.append(("take", *ids))
        return answer

    def _freed(self, band: SimulatedBand, virtual: IntArray) -> None:
        self.log.append(("free", band.name, virtual.tolist()))
        if self._leads:
            self._world.note_freed(band, virtual)
            self._meanings.freed(band, virtual)

    def _agreed(
        self, question: str, answer: bool, units: Mapping[str, int], freed: Mapping[str, int]
    ) -> bool:
        self.log.append((question, answer))
        if self._leads and answer != self._world.some_layout_holds(units, freed):
            raise CheckFailedError(
                "capacity_answer",
                f"{question} says {answer} to {dict(units)} less {dict(freed)}, {'no' if answer else 'some'} layout holds them",
            )
        return answer
