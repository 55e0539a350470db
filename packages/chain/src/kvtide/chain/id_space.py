"""Virtual ids: what requests hold, so that a page can move without rewriting a request (row C1).

The chain mints virtual pages; each attention band binds physical pages of its own to them, and an unbound one reads as the
sink, page 0. State slots have virtual ids of their own; an unbound one reads as −1, a masked row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.device import IntArray, Mirror

SINK = 0
"""Physical page an unbound virtual page reads as; also the virtual page that is never minted."""

MASKED = -1
"""Physical slot an unbound virtual state slot reads as."""


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


class UnitIds:
    """One band's map between virtual and physical ids, and its mirror on the device."""

    def __init__(self, virtual_count: int, page_count: int, unbound: int, mirror: Mirror) -> None:
        """Nothing bound; a virtual id that is not bound reads as `unbound`."""
        self._unbound = unbound
        self._mirror = mirror
        self._physical: npt.NDArray[np.int32] = np.full(virtual_count, unbound, np.int32)
        self._virtual: npt.NDArray[np.int32] = np.full(page_count, -1, np.int32)
        if unbound:
            mirror.stage(np.arange(virtual_count), np.full(virtual_count, unbound, np.int64))

    @property
    def virtual_count(self) -> int:
        """Size of the virtual id space."""
        return len(self._physical)

    def physical(self, virtual: IntArray) -> IntArray:
        """Physical ids of virtual ones."""
        return self._physical[virtual].astype(np.int64)

    def is_bound(self, virtual: IntArray) -> npt.NDArray[np.bool_]:
        """Which of the virtual ids are bound here."""
        return np.not_equal(self._physical[virtual], self._unbound)

    def bound_in(self, first_page: int, end_page: int) -> IntArray:
        """Physical ids of `[first_page, end_page)` that are bound, ascending."""
        return np.flatnonzero(self._virtual[first_page:end_page] >= 0) + first_page

    def bind(self, virtual: IntArray, physical: IntArray) -> None:
        """Bind unbound virtual ids to unbound physical ones."""
        self._physical[virtual] = physical
        self._virtual[physical] = virtual
        self._mirror.stage(virtual, physical)

    def unbind(self, virtual: IntArray) -> IntArray:
        """Unbind bound virtual ids; returns their physical ids."""
        physical = self.physical(virtual)
        self._physical[virtual] = self._unbound
        self._virtual[physical] = -1
        self._mirror.stage(virtual, np.full(len(virtual), self._unbound, np.int64))
        return physical

    def move(self, sources: IntArray, targets: IntArray) -> None:
        """Rebind what `sources` hold to `targets`; the sets may overlap."""
        virtual = self._virtual[sources].astype(np.int64)
        self._virtual[sources] = -1
        self._virtual[targets] = virtual
        self._physical[virtual] = targets
        self._mirror.stage(virtual, targets)
