"""Where the bytes that a forward reads come from, when requests share prefixes: whose forward wrote each page, and each state.

A replay on plain tensors has no pages. It has to know that a row goes on from what another request computed, because the same tokens
computed in other chunks, or beside other rows, may differ in their last bits. So a run keeps a log, by virtual ids, that owes nothing to
where a page lies: forwards note what they write, and the storage says which window pages were rehomed, which states copied.

    forward   row r: page 0 of request a ─┐                  the replay reads request a's tensors there,
              row r: page 1 of request r  ┴─ origins of r    once it has seen that a's prompt begins as r's does
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np

from kvtide.device import IntArray
from kvtide.storage import KVStorage, PreparedStep

NOBODY = -1


@attrs.frozen(kw_only=True)
class RowOrigins:
    """Of one row of one forward. Requests are told apart by ordinals of their admissions."""

    key: int
    """The row's own request."""

    pages: Mapping[str, tuple[int, ...]]
    """Band → whose forward wrote each page that holds earlier tokens, `NOBODY` where nothing is bound."""

    state: tuple[int, int] | None
    """Whose state the row begins with, and behind how many tokens; `None` where it has none, or goes on from its own."""


@attrs.frozen(kw_only=True)
class KeptOrigins:
    """Of a request whose memory is on the host: what the log says of it, to go on where it comes back."""

    key: int
    """The request."""

    writers: Mapping[str, IntArray]
    """Band → whose forward wrote each page of its row, or its state slot."""

    state_length: int
    """Tokens behind which its state was."""


class Origins:
    """The log of one run. The storage tells it what it rehomes and copies."""

    def __init__(self, storage: KVStorage) -> None:
        """Of an empty storage, which it watches from now on."""
        self._storage = storage
        layout = storage.layout
        self._writers: dict[str, IntArray] = {
            band.name: np.full(layout.id_count(band), NOBODY, np.int64) for band in layout.bands
        }
        state = storage.plan.state_sub_pool
        self._state = None if state is None else state.name
        self._state_lengths: IntArray = np.zeros(
            0 if state is None else len(self._writers[state.name]), np.int64
        )
        self._keys: dict[int, int] = {}
        self._begun: set[int] = set()
        self._admitted = 0
        storage.watch_sharing(self)

    def rehomed(self, band: str, sources: IntArray, targets: IntArray) -> None:
        """See `SharingObserver.rehomed`."""
        self._writers[band][targets] = self._writers[band][sources]

    def states_copied(self, sources: IntArray, targets: IntArray) -> None:
        """See `SharingObserver.states_copied`."""
        assert self._state is not None, "states are copied"
        writers = self._writers[self._state]
        writers[targets], self._state_lengths[targets] = writers[sources], self._state_lengths[sources]

    def admitted(self, row: int) -> None:
        """A request has got a row."""
        self._keys[row] = self._admitted
        self._admitted += 1

    def retracted(self, row: int) -> KeptOrigins:
        """A row is about to be backed up."""
        units = self._units(row)
        return KeptOrigins(
            key=self._keys[row],
            writers={name: self._writers[name][virtual] for name, virtual in units.items()},
            state_length=0 if self._state is None else int(self._state_lengths[units[self._state][0]]),
        )

    def restored(self, row: int, kept: KeptOrigins) -> None:
        """Its memory lies in units of this row's own, and was written by whom it was before."""
        self._keys[row] = kept.key
        for name, virtual in self._units(row).items():
            # A page that nothing is bound to has no id of its own.
            is_own = (virtual > 0) | (name == self._state)
            self._writers[name][virtual[is_own]] = kept.writers[name][is_own]
            if name == self._state:
                self._state_lengths[virtual] = kept.state_length

    def launched(self, step: PreparedStep) -> tuple[RowOrigins, ...]:
        """What a forward that is being launched reads; what it writes is its rows' from now on."""
        origins = tuple(
            self._row(row, start) for row, start in zip(step.rows.tolist(), step.starts.tolist(), strict=True)
        )
        for row, start, count in zip(
            step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True
        ):
            self._write(row, start, start + count)
        return origins

    def _units(self, row: int) -> dict[str, IntArray]:
        """Virtual units of a row by band: its pages in each, and its running state slot."""
        storage = self._storage
        pages = storage.requests.pages[row, : storage.requests.page_counts[row]].astype(np.int64)
        units = {pool.name: pages for pool in storage.plan.token_sub_pools}
        if self._state is not None:
            units[self._state] = storage.requests.state_slots[row : row + 1].copy()
        return units

    def _row(self, row: int, start: int) -> RowOrigins:
        storage, key = self._storage, self._keys[row]
        page_count = -(-start // storage.plan.page_tokens)
        pages = storage.requests.pages[row, :page_count]
        state = None
        if key not in self._begun and start and self._state is not None:
            slot = int(storage.requests.state_slots[row])
            state = (int(self._writers[self._state][slot]), int(self._state_lengths[slot]))
        self._begun.add(key)
        return RowOrigins(
            key=key,
            pages={
                pool.name: tuple(
                    np.where(
                        storage.chain.physical_units(pool.name, pages.astype(np.int64)) > 0,
                        self._writers[pool.name][pages],
                        NOBODY,
                    ).tolist()
                )
                for pool in storage.plan.token_sub_pools
            },
            state=state,
        )

    def _write(self, row: int, start: int, end: int) -> None:
        storage, key = self._storage, self._keys[row]
        page_tokens = storage.plan.page_tokens
        pages = storage.requests.pages[row, start // page_tokens : -(-end // page_tokens)]
        for pool in storage.plan.token_sub_pools:
            self._writers[pool.name][pages] = key
        if self._state is not None:
            slot = int(storage.requests.state_slots[row])
            self._writers[self._state][slot], self._state_lengths[slot] = key, end
