"""Uses of a band's pages by host copies and network transfers, opened and closed by their signals (rows L4, H1, T1)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.device import IntArray
from kvtide.ledger.clearance_table import Hazard
from kvtide.ledger.cloning import clone_of
from kvtide.ledger.errors import InvariantError
from kvtide.ledger.page_lists import named_twice
from kvtide.ledger.signals import NetworkTransfer, Signal
from kvtide.ledger.use_index import UseIndex

_FEW = 256  # below, a set is quicker than NumPy's own calls
_FIRST_USES = 64


class SignalUses:
    """Uses of one band that a signal ends. It never waits, on host or stream."""

    def __init__(self, name: str, page_count: int) -> None:
        """No use of pages `[0, page_count)` of band `name`."""
        self._name = name
        self._index = UseIndex(page_count)
        # A use is a small number: what ends it, its nodes in the index, and its hazard.
        self._signals: dict[int, Signal] = {}
        self._nodes: dict[int, IntArray] = {}
        self._hazards: npt.NDArray[np.int8] = np.zeros(_FIRST_USES, np.int8)
        self._free_uses: list[int] = []
        self.use_of: dict[Signal, int] = {}
        """Signals of the uses not over; read by others."""
        self.transfer_count = 0
        """Uses by transfers that are not over."""

    def clone(self) -> SignalUses:
        """The same uses, which go their own way; signals are shared."""
        return clone_of(self, _index=clone_of(self._index))

    def __len__(self) -> int:
        """Uses not over."""
        return len(self.use_of)

    def __contains__(self, signal: Signal) -> bool:
        """Whether the signal has a use that is not over."""
        return signal in self.use_of

    def signals(self) -> tuple[Signal, ...]:
        """Signals of the uses not over, in the order in which they were recorded."""
        return tuple(self.use_of)

    def pages_by_signal(self) -> list[tuple[Signal, IntArray]]:
        """Each signal with its pages that have not left, in the order in which they were recorded."""
        return [(signal, self._index.pages_of(self._present(use))) for signal, use in self.use_of.items()]

    def record(self, signal: Signal, pages: IntArray) -> None:
        """Open a use; raises `InvariantError`, with nothing changed, for a second one and for a page named twice."""
        if signal in self.use_of:
            raise InvariantError(
                "usage.one_record_a_use",
                f"{signal.name!r} has a use of band {self._name!r} already",
                "a submission was recorded twice; name all of its pages in one call",
            )
        use = self._free_uses[-1] if self._free_uses else len(self.use_of)
        nodes = self._index.add(use, pages)
        if nodes is None:
            raise named_twice(self._name, pages, signal.name)
        if self._free_uses:
            self._free_uses.pop()
        elif use == len(self._hazards):
            self._hazards = np.concatenate([self._hazards, np.zeros(use, np.int8)])
        self._signals[use], self._nodes[use] = signal, nodes
        self._hazards[use] = signal.hazard
        self.use_of[signal] = use
        self.transfer_count += isinstance(signal, NetworkTransfer)

    def end(self, signal: Signal) -> IntArray:
        """Close a use; its pages that have not left. Raises `InvariantError` for a signal without one."""
        if signal not in self.use_of:
            raise InvariantError(
                "usage.ended_once",
                f"{signal.name!r} has no use of band {self._name!r} to end",
                "it was ended twice, or recorded in another band",
            )
        use = self.use_of.pop(signal)
        pages = self._index.remove(self._present(use))
        del self._nodes[use]
        del self._signals[use]
        self._free_uses.append(use)
        self.transfer_count -= isinstance(signal, NetworkTransfer)
        return pages

    def hazards_on(self, pages: IntArray) -> tuple[IntArray, npt.NDArray[np.int8], list[Signal]]:
        """Places in `pages` and the hazard at each, one entry for each page and use, and the signals among them, each once."""
        places, nodes = self._index.find(pages)
        uses = self._index.uses_of(nodes)
        signals = self._signals
        return places, self._hazards[uses], [signals[use] for use in _distinct(uses)]

    def by_signal(self, pages: IntArray) -> list[tuple[Signal, IntArray]]:
        """Each signal with a use of some of `pages`, and its places in `pages`."""
        return [(self._signals[use], places) for use, places, _ in self._groups(pages)]

    def leave(self, pages: IntArray) -> list[tuple[Signal, IntArray]]:
        """Take `pages` out of every use, which stays open without them; each signal that named some, and their places."""
        left = []
        for use, places, nodes in self._groups(pages):
            self._index.remove(nodes)
            left.append((self._signals[use], places))
        return left

    def under_transfer(self, pages: IntArray) -> npt.NDArray[np.bool_]:
        """Which of `pages` a transfer reads or writes; shape and order of `pages`."""
        places, nodes = self._index.find(pages)
        found = np.zeros(len(pages), np.bool_)
        found[places[self._hazards[self._index.uses_of(nodes)] == Hazard.NETWORK]] = True
        return found

    def transfer_pages(self) -> IntArray:
        """Every page that a transfer reads or writes and that has not left, ascending."""
        nodes = [
            self._present(use) for signal, use in self.use_of.items() if isinstance(signal, NetworkTransfer)
        ]
        return np.unique(self._index.pages_of(np.concatenate(nodes))) if nodes else np.empty(0, np.int64)

    def _present(self, use: int) -> IntArray:
        """Nodes of a use whose pages have not left."""
        nodes = self._nodes[use]
        present: IntArray = nodes[self._index.uses_of(nodes) == use]
        return present

    def _groups(self, pages: IntArray) -> list[tuple[int, IntArray, IntArray]]:
        """Each use of some of `pages`, its places in them and its nodes there."""
        places, nodes = self._index.find(pages)
        uses = self._index.uses_of(nodes)
        order = np.argsort(uses, kind="stable")
        uses = uses[order]
        starts = np.flatnonzero(np.diff(uses, prepend=-1))
        split = (np.split(array[order], starts[1:]) for array in (places, nodes))
        return list(zip(uses[starts].tolist(), *split, strict=False))


def _distinct(numbers: IntArray) -> list[int]:
    """Each number once, ascending."""
    if len(numbers) > _FEW:
        numbers = np.unique(numbers)
    return sorted(set(numbers.tolist()))
