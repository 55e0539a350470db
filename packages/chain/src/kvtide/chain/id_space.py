"""Virtual ids: what requests hold, so that a unit can move without a request being rewritten (row C1).

The chain mints virtual pages; each attention band binds units of its own to them, or to their *sub-pages* where its pages are
smaller (P10): virtual page v has sub-pages `v × ratio + i`. An unbound one reads as the sink, page 0. State slots have virtual
ids of their own; an unbound one reads as −1, a masked row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.chain.units import NO_UNITS, Units, units_of
from kvtide.device import IntArray, Mirror
from kvtide.ledger import clone_of

SINK = 0
"""Physical page that an unbound virtual page reads as; also the virtual page that is never minted."""

MASKED = -1
"""Physical slot that an unbound virtual state slot reads as."""

_FIRST_PIECE = 256  # pages looked at first where the outermost bound ones are sought


class IdSpace:
    """Virtual ids of one kind: which are minted, and which can be."""

    def __init__(self, first_id: int, id_count: int) -> None:
        """Ids `[first_id, id_count)`, all free; low ids are minted first."""
        self._free: IntArray = np.arange(id_count - 1, first_id - 1, -1, dtype=np.int64)
        self._free_count = len(self._free)

    @property
    def free_count(self) -> int:
        """Ids that can be minted."""
        return self._free_count

    def mint(self, count: int) -> IntArray:
        """Take `count` free ids; the caller has checked that there are as many."""
        ids = self._free[self._free_count - count : self._free_count][::-1].copy()
        self._free_count -= count
        return ids

    def give_back(self, ids: IntArray) -> None:
        """Return minted ids."""
        self._free[self._free_count : self._free_count + len(ids)] = ids[::-1]
        self._free_count += len(ids)

    def clone(self) -> IdSpace:
        """The same ids, which go their own way (row C13)."""
        return clone_of(self)


class UnitIds:
    """One band's map between virtual and physical ids, and its mirror on the device."""

    def __init__(self, page_count: int, unbound: int, mirror: Mirror) -> None:
        """Nothing bound; a virtual id, one for each entry of `mirror`, reads as `unbound` until it is."""
        self.unbound = unbound
        """What an unbound virtual id reads as; every bound one reads as more."""
        self._mirror = mirror
        self._physical: npt.NDArray[np.int32] = np.full(mirror.length, unbound, np.int32)
        self._virtual: npt.NDArray[np.int32] = np.full(page_count, -1, np.int32)
        if unbound:
            mirror.stage(np.arange(mirror.length), np.full(mirror.length, unbound, np.int64))

    @property
    def virtual_count(self) -> int:
        """Size of the virtual id space."""
        return len(self._physical)

    def physical(self, virtual: Units) -> IntArray:
        """Physical ids of virtual ones."""
        return self._physical[virtual.where].astype(np.int64)

    def is_bound(self, virtual: Units) -> npt.NDArray[np.bool_]:
        """Which of the virtual ids are bound here."""
        return np.not_equal(self._physical[virtual.where], self.unbound)

    def bound_in(self, first_page: int, end_page: int) -> IntArray:
        """Physical ids of `[first_page, end_page)` that are bound, ascending; none where it ends before it begins."""
        return (self._virtual[first_page : max(first_page, end_page)] >= 0).nonzero()[0] + first_page

    def virtual_in(self, first_page: int, end_page: int) -> npt.NDArray[np.int32]:
        """Virtual id of each physical one of `[first_page, end_page)`, −1 where it is unbound; a view, to read."""
        return self._virtual[first_page:end_page]

    def outermost_bound(self, first_page: int, end_page: int, count: int, *, from_high_end: bool) -> IntArray:
        """The `count` bound ones of `[first_page, end_page)` at its high end, or its low one, and perhaps some more, ascending.

        Looks at no more of the range than it needs, in pieces that grow.
        """
        parts: list[IntArray] = []
        found, piece_pages = 0, max(_FIRST_PIECE, 2 * count)
        while found < count and first_page < end_page:
            piece_pages = min(piece_pages, end_page - first_page)
            if from_high_end:
                parts.insert(0, self.bound_in(end_page - piece_pages, end_page))
                end_page -= piece_pages
                found += len(parts[0])
            else:
                parts.append(self.bound_in(first_page, first_page + piece_pages))
                first_page += piece_pages
                found += len(parts[-1])
            piece_pages *= 2
        return np.concatenate(parts) if parts else NO_UNITS

    def bind(self, virtual: Units, physical: Units) -> None:
        """Bind unbound virtual ids to unbound physical ones."""
        self._physical[virtual.where] = physical.ids.astype(np.int32)
        self._virtual[physical.where] = virtual.ids.astype(np.int32)
        self._mirror.stage(virtual.ids, physical.ids)

    def unbind(self, virtual: Units, physical: Units) -> None:
        """Unbind virtual ids that are bound to these physical ones."""
        self._physical[virtual.where] = self.unbound
        self._virtual[physical.where] = -1
        self._mirror.stage(virtual.ids, np.full(len(virtual.ids), self.unbound, np.int64))

    def move(self, sources: Units, targets: Units) -> None:
        """Rebind what `sources` hold to `targets`; no target is bound."""
        virtual = units_of(self._virtual[sources.where].astype(np.int64))
        self._virtual[sources.where] = -1
        self._virtual[targets.where] = virtual.ids
        self._physical[virtual.where] = targets.ids
        self._mirror.stage(virtual.ids, targets.ids)

    def names_twice(self, virtual: IntArray, physical: Units) -> bool:
        """Whether `virtual`, all of them bound to `physical`, name one twice. Changes nothing."""
        if isinstance(physical.where, slice):
            return False
        # Each unit is made to name its place in the list; a unit named twice can name only one of the two.
        places = np.arange(len(virtual), dtype=np.int32)
        self._virtual[physical.where] = places
        once = (self._virtual[physical.where] == places).all()
        self._virtual[physical.where] = virtual
        return not once

    def clone(self, mirror: Mirror) -> UnitIds:
        """The same map over another device's mirror, as long as this one's (row C13)."""
        clone = clone_of(self, _mirror=mirror)
        mirror.stage(np.arange(mirror.length), self._physical.astype(np.int64))
        return clone


class VirtualPages:
    """The virtual pages of a chain (row C1). Page 0 is never minted; it reads as the sink.

    Where a full-attention band owns them, its free gives them back. Elsewhere the (sub-)pages that bands bind are counted, and a
    page returns with the last.
    """

    def __init__(self, id_count: int, *, counted: bool) -> None:
        """Ids `[1, id_count)`, all free; `counted` without an owner."""
        self._space = IdSpace(SINK + 1, id_count)
        self._bound_counts: npt.NDArray[np.int32] | None = np.zeros(id_count, np.int32) if counted else None

    @property
    def free_count(self) -> int:
        """Pages that can be minted."""
        return self._space.free_count

    def mint(self, count: int) -> IntArray:
        """Take `count` free pages; the caller has checked that there are as many, and binds something of each."""
        return self._space.mint(count)

    def give_back(self, pages: IntArray) -> None:
        """Return pages that their owner has freed."""
        self._space.give_back(pages)

    def bound(self, virtual: IntArray, ratio: int) -> None:
        """Count (sub-)pages, `ratio` of them a page, that a band has bound."""
        if self._bound_counts is not None:
            np.add.at(self._bound_counts, virtual // ratio, 1)

    def unbound(self, virtual: IntArray, ratio: int) -> None:
        """Count out (sub-)pages that a band frees, and return the pages that are left with none."""
        if self._bound_counts is not None:
            pages = virtual // ratio
            np.subtract.at(self._bound_counts, pages, 1)
            left = np.unique(pages)
            self._space.give_back(left[self._bound_counts[left] == 0])

    def is_bound(self, pages: IntArray) -> npt.NDArray[np.bool_]:
        """Which of `pages` some band binds a part of; only where they are counted."""
        assert self._bound_counts is not None, "the owner knows"
        return self._bound_counts[pages] > 0

    def clone(self) -> VirtualPages:
        """The same pages, which go their own way (row C13)."""
        return clone_of(self, _space=self._space.clone())
