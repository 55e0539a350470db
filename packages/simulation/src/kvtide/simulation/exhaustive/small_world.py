"""One state of the search: the allocator that ships, who holds what, and what is under way; and what makes two states one.

A state has a clone of the allocator with its ledger, a device that knows the order of accesses, and a *shadow* that was not told by
either: which virtual units somebody holds, at most one host copy, one transfer and one fixed unit, forwards in flight. Its *canonical form*
is what the future depends on and nothing else:

| part | form |
| - | - |
| the allocator | `ChainAllocator.books` |
| order of accesses | `OrderedDevice.signature` |
| uses | kind, stage, where its units were and which are held still; of an event the works behind it, in the signature |
| who holds what | what the allocator binds: the checks have found them equal |
| contents | whose they are, the allocator says; nobody may read the rest: the checks have found it so |
"""

from __future__ import annotations

import hashlib
import marshal
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvtide.chain import ChainAllocator, Taken
from kvtide.device import Mirror, UnitGrid
from kvtide.ledger import ForwardSteps, LaunchRecord, NetworkTransfer
from kvtide.plan import ArenaLayout, SubPoolKind
from kvtide.simulation.exhaustive.ordered_device import NOBODYS, OrderedDevice, OrderedEvent, cells_of
from kvtide.simulation.exhaustive.shapes import Shape


class SmallBand(NamedTuple):
    """What never changes about a band."""

    place: int
    """In the chain."""

    name: str
    """Of the band."""

    grid: UnitGrid
    """Where its units lie."""

    ratio: int
    """(Sub-)pages a virtual page; 0 for state."""

    is_owner: bool
    """Whether it is the full-attention band."""


class SmallUse(NamedTuple):
    """A copy, a transfer or a fixed unit that is not over."""

    kind: str
    """`backup`, `load`, `send`, `receive` or `fix`."""

    stage: str
    """`announced`, `open`, or `quarantined`."""

    units: tuple[tuple[int, int], ...]
    """Place of the band and virtual unit of those that are held as when it began."""

    places: tuple[tuple[int, int], ...]
    """Place of the band and physical unit of all, when the ledger was told of them."""

    owner: object
    """What the ledger knows it by."""

    event: OrderedEvent | None = None
    """Its end, once it is open."""

    taken: Taken | None = None
    """The take that it was announced for, as long as that owes zeroing."""

    @property
    def is_fixed(self) -> bool:
        """Whether its units neither move nor are handed out."""
        return (
            self.kind == "fix"
            or self.stage == "quarantined"
            or (self.kind == "load" and self.stage == "announced")
        )

    @property
    def is_open_transfer(self) -> bool:
        """Whether an engine touches its units, and may be waited for."""
        return self.stage == "open" and self.kind in ("send", "receive")

    @property
    def is_filling(self) -> bool:
        """Whether its units are not to be read yet, or who they are for is gone."""
        return self.kind == "receive" or (self.kind == "load" and self.stage == "announced")


class Facts:
    """What never changes about a search's states."""

    def __init__(self, shape: Shape) -> None:
        """Of one shape."""
        self.shape = shape
        """Which."""
        self.layout: ArenaLayout = shape.layout()
        """Its bytes."""
        self.bands = tuple(
            SmallBand(
                place,
                band.name,
                UnitGrid(band.origin_bytes, band.unit_bytes),
                self.layout.sub_page_ratio(band) or 0,
                band.kind is SubPoolKind.FULL,
            )
            for place, band in enumerate(self.layout.bands)
        )
        """In chain order."""
        self.ids = tuple(np.arange(self.layout.id_count(band)) for band in self.layout.bands)
        """Virtual units of each."""
        self.state = next((band for band in self.bands if not band.ratio), None)
        """The state band, if there is one."""
        self.attention = tuple(band for band in self.bands if band.ratio)
        """The others; whoever frees goes through them in this order, so windows first."""
        self.owner = next((band for band in self.bands if band.is_owner), None)
        """The full-attention band, if there is one."""
        self.windows = tuple(band for band in self.attention if not band.is_owner)
        """Attention bands that let go of pages early."""
        self.mirrors: dict[str, Mirror] = {}
        """Nobody reads them."""


class SmallWorld:
    """See the module's docstring. `step` of `small_steps` changes it."""

    facts: Facts
    """What is the same in every state."""

    device: OrderedDevice
    """Who touched which bytes."""

    chain: ChainAllocator
    """The allocator that ships."""

    def __init__(self, facts: Facts) -> None:
        """Nothing held, nothing under way."""
        layout = facts.layout
        self.facts = facts
        self.device = OrderedDevice(layout.arena_bytes, layout.prefix_bytes)
        lengths = {f"ids:{band.name}": layout.id_count(band) for band in layout.bands}
        facts.mirrors = self.device.create_mirrors(lengths)
        waits = facts.shape.waits_for_transfers
        self.chain = ChainAllocator(
            layout,
            self.device,
            facts.mirrors,
            ForwardSteps(),
            wait_for_transfers=_waiter(self) if waits else None,
        )
        self.held: list[set[int]] = [set() for _ in facts.bands]
        """By place of the band: virtual units that somebody holds."""
        self.flying: list[tuple[LaunchRecord, OrderedEvent]] = []
        """Forwards in flight, oldest first."""
        self.copy: SmallUse | None = None
        """A backup or a load."""
        self.transfer: SmallUse | None = None
        """A send or a receive."""
        self.fixed: SmallUse | None = None
        """A fixed unit."""
        self.debt: tuple[Taken, tuple[tuple[int, int], ...]] | None = None
        """A take on a promise that is neither written nor paid, and its units."""
        self.waited = False
        """Whether a relief of the last step waited for a transfer."""
        self.tables: dict[int, list[int]] | None = {}
        """By place of the band: physical units of its virtual ones, once looked up; none within a step, which may move units."""

    def clone(self) -> SmallWorld:
        """The same state, which goes its own way."""
        clone = object.__new__(SmallWorld)
        clone.facts = self.facts
        clone.device = self.device.clone()
        waiter = _waiter(clone) if self.facts.shape.waits_for_transfers else None
        clone.chain = self.chain.clone(clone.device, self.facts.mirrors, wait_for_transfers=waiter)
        clone.held = [units.copy() for units in self.held]
        clone.flying = self.flying.copy()
        clone.copy, clone.transfer, clone.fixed = self.copy, self.transfer, self.fixed
        clone.debt = self.debt
        clone.waited, clone.tables = False, {}
        return clone

    # ── uses ──

    def uses(self) -> Iterator[SmallUse]:
        """Those that are not over."""
        for use in (self.copy, self.transfer, self.fixed):
            if use is not None:
                yield use

    def end_transfers(self, transfers: Sequence[NetworkTransfer]) -> None:
        """A relief waits for the open transfer."""
        assert self.transfer is not None, "the ledger has a transfer that nobody began"
        assert list(transfers) == [self.transfer.owner], "a relief waits for what it does not know"
        self.end_transfer()
        self.waited = True

    def end_transfer(self) -> None:
        """The host has seen the end of the open transfer, and the ledger is told."""
        assert self.transfer is not None, "a transfer is ended"
        assert self.transfer.event is not None, "it is open"
        self.device.host |= self.transfer.event.behind
        self.chain.uses.end(self.transfer.owner)  # type: ignore[arg-type]  # a transfer's owner is a signal
        self.transfer = None

    def forget(self, place: int, virtual: int) -> None:
        """A unit has been freed: whoever uses it uses what was held before."""
        unit = (place, virtual)
        self.held[place].discard(virtual)
        for name in ("copy", "transfer", "fixed"):
            use: SmallUse | None = getattr(self, name)
            if use is not None and unit in use.units:
                setattr(self, name, use._replace(units=tuple(one for one in use.units if one != unit)))
        if self.debt is not None and unit in self.debt[1]:
            left = tuple(one for one in self.debt[1] if one != unit)
            self.debt = (self.debt[0], left) if left else None

    def owed(self) -> set[tuple[int, int]]:
        """Places of bands and virtual units that came without zeroing, and that nobody has written."""
        owed = set() if self.debt is None else set(self.debt[1])
        return owed.union(*(use.units for use in self.uses() if use.taken is not None))

    # ── units ──

    def physical(self, place: int, virtual: Sequence[int]) -> list[int]:
        """Physical units of virtual ones, as the allocator has them."""
        table = self._table(place) if virtual else []
        return [table[unit] for unit in virtual]

    def placed(self, units: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Place of the band and physical unit of such pairs with virtual ones."""
        tables = {place: self._table(place) for place, _ in units}
        return tuple((place, tables[place][virtual]) for place, virtual in units)

    def cells(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """Cells of physical units."""
        return [cell for place, unit in places for cell in cells_of(self.facts.bands[place].grid, unit)]

    def by_unit(self, place: int) -> list[tuple[int, int]]:
        """Physical and virtual unit of all that is held in a band, in the order of their bytes."""
        held = self.held[place]
        if not held:
            return []
        table = self._table(place)
        return sorted([(table[virtual], virtual) for virtual in held])

    def _table(self, place: int) -> list[int]:
        """Physical unit of each virtual one of a band, as the allocator has it."""
        found = None if self.tables is None else self.tables.get(place)
        if found is None:
            found = self.chain.physical_units(self.facts.bands[place].name, self.facts.ids[place]).tolist()
            if self.tables is not None:
                self.tables[place] = found
        return found

    # ── canonical form ──

    def form(self) -> tuple[object, ...]:
        """The canonical form."""
        events = [event.behind for _, event in self.flying]
        uses: list[tuple[object, ...] | None] = []
        for use in (self.copy, self.transfer, self.fixed):
            if use is None:
                uses.append(None)
                continue
            if use.event is not None:
                events.append(use.event.behind)
            uses.append((use.kind, use.stage, use.places, self.placed(use.units)))
        return self.chain.books(), self.device.signature(events), tuple(uses)

    def digest(self) -> int:
        """64 bits of the canonical form's hash."""
        # Version 2 writes values alone; later ones also tell which objects are the same.
        form = marshal.dumps(self.form(), 2)  # type: ignore[arg-type]  # tuples of what it takes
        return int.from_bytes(hashlib.blake2b(form, digest_size=8).digest(), "little")


def contents_of(place: int, virtual: int) -> int:
    """What the cells of a unit in use hold, plus the cell's place in it."""
    return (place + 1 << 32) | virtual << 8


def fill(world: SmallWorld, place: int, virtual: int, physical: int) -> None:
    """A unit's cells are its own from now on."""
    cells = cells_of(world.facts.bands[place].grid, physical)
    first = contents_of(place, virtual)
    world.device.contents[cells.start : cells.stop] = range(first, first + len(cells))


def spoil(world: SmallWorld, place: int, physical: int) -> None:
    """A unit's cells are nobody's from now on."""
    cells = cells_of(world.facts.bands[place].grid, physical)
    world.device.contents[cells.start : cells.stop] = [NOBODYS] * len(cells)


def _waiter(world: SmallWorld) -> Callable[[Sequence[NetworkTransfer]], None]:
    """Ends a world's transfer; knows it weakly, so that millions of them go without a garbage collection."""
    known = weakref.ref(world)

    def wait(transfers: Sequence[NetworkTransfer]) -> None:
        own = known()
        assert own is not None, "a relief outlives its world"
        own.end_transfers(transfers)

    return wait
