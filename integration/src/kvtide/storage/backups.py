"""Retraction backups: a row's memory kept on the host, whole, until the request is restored from it (rows K2, K5, H1, H2).

    back up   forward stream   … the row's last forward ┤ row state ──> host
              copy stream      waits for it, and for the schedule stream ┤ units ──> host        a COPY_READ of the units
    restore   schedule stream  take: waits, zeroing of nothing
              copy stream      waits for both streams ┤ host ──> units, row state               a COPY_WRITE of the units
              forward stream   the next forward waits for it, and resets nothing

What is kept is what the next token of the row reads, of every band: all of full attention, windows as far as they look back, the running
state; whoever owns them, so pages that are shared are copied too. What counts is what holds behind the last forward that was recorded,
though the host may not have seen its result: its token comes with the row state. A restored row owns all of its pages, and shares none
with the prefix tree. Ids are translated when the copy is submitted; from then on it is of those bytes, wherever units move.

Nothing waits on the host, but for memory where none is pinned yet. A backup may be restored before its own copy has finished: the copy
stream does one behind the other.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import attrs
import numpy as np
import structlog
import torch

from kvtide.arena import HostMemory, TensorDevice
from kvtide.chain import BandTake, ChainAllocator, Taken
from kvtide.device import IntArray, UnitGrid
from kvtide.ledger import Access
from kvtide.plan import ALIGNMENT_BYTES, BandLayout, SubPoolKind
from kvtide.sizing import ROW_STATE_BYTES, SizedPlan
from kvtide.storage.admission import ChainPrefillBudget, Promise
from kvtide.storage.errors import HostMemoryError, StorageError
from kvtide.storage.evicting_takes import EvictingTakes
from kvtide.storage.host_copies import HostCopies
from kvtide.storage.prefix_sharing import PrefixSharing
from kvtide.storage.refusals import AdmissionRefusal
from kvtide.storage.requests import NO_CHECKPOINT, RequestTable
from kvtide.storage.row_state import RowResets, RowState, begin_values
from kvtide.storage.row_units import RowUnits
from kvtide.storage.statistics import BackupStatistics

log = structlog.get_logger(__name__)

_NOTHING: IntArray = np.zeros(0, np.int64)
_ROW_STATE_SECTION = -(-ROW_STATE_BYTES // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@attrs.frozen(kw_only=True, eq=False)
class RowBackup:
    """What a retracted request had, in host memory. A value: it may be dropped, or restored, and restored again."""

    prompt_tokens: int
    """Tokens that may be written several at a time."""

    output_tokens: int
    """Its output limit."""

    written_tokens: int
    """Tokens that recorded forwards have written: where it goes on."""

    chunk_limit: int
    """Most prompt tokens that one forward of it might write."""

    checkpoint_length: int
    """Where its windows' retention floor was, or `NO_CHECKPOINT`."""

    pages: Mapping[str, IntArray]
    """By attention band, which of the row's pages are kept, counted from its first token."""

    slot_count: int
    """State slots that are kept: 1, or 0 without a state band."""

    memory: HostMemory = attrs.field(repr=False)
    """The row state, then each band's units in chain order."""

    storage: object = attrs.field(repr=False)
    """Whose it is: only that storage restores it."""

    @property
    def byte_count(self) -> int:
        """Bytes of host memory."""
        return self.memory.bytes.numel()

    @property
    def row_state(self) -> torch.Tensor:
        """The row's values on the device, `[ROW_STATE_BYTES]` uint8."""
        return self.memory.bytes[:ROW_STATE_BYTES]

    @property
    def minted(self) -> IntArray:
        """Pages that some band keeps: the others have no virtual page."""
        return np.unique(np.concatenate([_NOTHING, *self.pages.values()]))

    def unit_count(self, name: str) -> int:
        """Units of one band."""
        return len(self.pages[name]) if name in self.pages else self.slot_count


class _Part(NamedTuple):
    """Of what was taken for several backups."""

    backup: RowBackup
    """Whose."""

    virtual: IntArray
    """Virtual pages, one for each of `backup.minted`."""

    units: Mapping[str, IntArray]
    """Virtual units by band, in the order in which they are kept."""


class Backups:
    """Backs rows of one storage up and restores them; the storage alone calls it, and releases the rows."""

    def __init__(
        self,
        sized: SizedPlan,
        device: TensorDevice,
        chain: ChainAllocator,
        requests: RequestTable,
        *,
        row_state: RowState,
        row_resets: RowResets,
        units: RowUnits,
        takes: EvictingTakes,
        admission: ChainPrefillBudget,
        sharing: PrefixSharing | None,
        copies: HostCopies,
    ) -> None:
        """Nothing has been backed up."""
        self._sized = sized
        self._device = device
        self._chain = chain
        self._requests = requests
        self._row_state = row_state
        self._row_resets = row_resets
        self._units = units
        self._takes = takes
        self._admission = admission
        self._sharing = sharing
        self._copies = copies
        self._grid = sized.policy.grid_tokens(sized.plan)
        self._windows = [pool for pool in sized.plan.token_sub_pools if pool.kind is not SubPoolKind.FULL]
        self._backed_up = self._restored = self._bytes_out = self._bytes_in = 0

    def statistics(self) -> BackupStatistics:
        """What has been copied."""
        return BackupStatistics(
            backed_up_requests=self._backed_up,
            restored_requests=self._restored,
            backed_up_bytes=self._bytes_out,
            restored_bytes=self._bytes_in,
            copies_in_flight=self._copies.open_count,
        )

    # ── backing up ──

    def back_up(self, rows: IntArray) -> tuple[RowBackup, ...]:
        """Queue copies of all that rows hold, which are then to be released; raises `StorageError` for rows that are not whole, and
        `HostMemoryError`.

        Whatever is raised, rows and bytes are as before.
        """
        # Restored, and no forward since that was recorded: whatever a launch has left in its units, what they came from is still whole.
        known = {
            row: kept for row in rows.tolist() if isinstance(kept := self._row_resets.kept(row), RowBackup)
        }
        self._check_whole(rows, known.keys())
        planned = {row: self._plan(row) for row in rows.tolist() if row not in known}
        units = {row: self._held_units(row, backup) for row, backup in planned.items()}
        if planned:
            try:
                for row, backup in planned.items():
                    self._save_row_state(row, backup.row_state)
                self._copies.order()
                for row, backup in planned.items():
                    for band, grid, first_byte in self._sections(backup):
                        physical = self._chain.physical_units(band.name, units[row][band.name])
                        self._device.copy_to_host(
                            self._device.copy_stream, grid, physical, backup.memory, first_byte
                        )
                self._copies.begin(f"backup of rows {list(planned)}", Access.READ, _together(units.values()))
            except BaseException:
                self._copies.give_up()
                raise
        self._backed_up += len(rows)
        copied = sum(backup.byte_count for backup in planned.values())
        self._bytes_out += copied
        log.info("storage.backed_up", rows=rows.tolist(), bytes=copied)
        backups = known | planned
        return tuple(backups[row] for row in rows.tolist())

    def _check_whole(self, rows: IntArray, known: Container[int]) -> None:
        requests = self._requests
        held = rows[requests.prepared[rows] != requests.recorded[rows]]
        if len(held):
            raise StorageError(
                f"cannot back up rows {held.tolist()}: a step of theirs was neither recorded nor abandoned; abandon it first"
            )
        lost = [row for row in rows[requests.state_is_lost[rows]].tolist() if row not in known]
        if lost:
            raise StorageError(
                f"cannot back up rows {lost}: the forward of an aborted launch may have changed their states; retract them "
                "without a backup"
            )

    def _plan(self, row: int) -> RowBackup:
        requests, written = self._requests, int(self._requests.recorded[row])
        # Nobody notes checkpoints of a row that shared, then or again: hits are the tree's. Any other keeps what a hit would read where
        # its latest one should be.
        shares = self._sharing is not None and self._sharing.shares(row)
        checkpoint = int(requests.checkpoint_lengths[row])
        if shares:
            checkpoint = NO_CHECKPOINT
        elif checkpoint != NO_CHECKPOINT:
            assert self._grid is not None, "it has a floor"
            checkpoint = written // self._grid * self._grid
        pages = self._units.kept_pages(row, written, checkpoint)
        slots = int(requests.state_slots[row] >= 0)
        byte_count = _ROW_STATE_SECTION + sum(
            band.unit_bytes * (len(pages[band.name]) if band.name in pages else slots)
            for band in self._sized.layout.bands
        )
        return RowBackup(
            prompt_tokens=int(requests.prompts[row]),
            output_tokens=int(requests.limits[row] + 1 - requests.prompts[row]),
            written_tokens=written,
            chunk_limit=int(requests.chunk_limits[row]),
            checkpoint_length=checkpoint,
            pages=pages,
            slot_count=slots,
            memory=self._host_memory(row, byte_count),
            storage=self,
        )

    def _host_memory(self, row: int, byte_count: int) -> HostMemory:
        try:
            return self._device.allocate_host(byte_count)
        except (RuntimeError, MemoryError) as error:
            raise HostMemoryError(
                f"no {byte_count} bytes of host memory for a backup of row {row}; retract it without one, or free some: {error}"
            ) from error

    def _held_units(self, row: int, backup: RowBackup) -> dict[str, IntArray]:
        """Virtual units of what a backup keeps of a row, by band."""
        virtual = self._requests.pages[row].astype(np.int64)
        units = {name: virtual[pages] for name, pages in backup.pages.items()}
        state = self._sized.plan.state_sub_pool
        if state is not None:
            units[state.name] = self._requests.state_slots[row : row + 1].copy()
        return units

    def _save_row_state(self, row: int, kept: torch.Tensor) -> None:
        """What it is behind the row's last forward; of a row that no forward has reset yet, what it is to begin with."""
        if self._row_resets.is_marked(row):
            begin_values(int(self._requests.cached_tokens[row]), kept)
        else:
            self._device.queue_work(self._device.forward_stream, lambda: self._row_state.save(row, kept))

    # ── restoring ──

    def restore(self, backups: Sequence[RowBackup]) -> IntArray | AdmissionRefusal:
        """Rows that go on where these left off, all of them or a refusal; see `KVStorage.restore`.

        An error leaves everything as it was, but for a device call that fails inside the chain's take, of a wait or a move: the
        chain's books are then of no use, and the storage is over.
        """
        strangers = [backup for backup in backups if backup.storage is not self]
        if strangers:
            raise StorageError(
                f"cannot restore {len(strangers)} of {len(backups)} backups: they are of another storage, and their bytes of its "
                "pages; give each to the storage that made it"
            )
        promise = self._admission.offer_restored(
            [backup.prompt_tokens for backup in backups],
            [backup.output_tokens for backup in backups],
            [backup.written_tokens for backup in backups],
            chunk_tokens=min((backup.chunk_limit for backup in backups), default=1),
        )
        if isinstance(promise, AdmissionRefusal):
            return promise
        taken = self._take(backups)
        parts = self._parts(backups, taken)
        # The copies fill every unit, so none is owed its zeroing.
        self._chain.written(taken)
        rows = self._open(backups, taken.state_slots, promise)
        try:
            self._copies.order()
            for part in parts:
                for band, grid, first_byte in self._sections(part.backup):
                    physical = self._chain.physical_units(band.name, part.units[band.name])
                    self._device.copy_from_host(
                        self._device.copy_stream, part.backup.memory, first_byte, grid, physical
                    )
            # The caller may change the array that it is given, and the list that it gave, before this runs.
            kept = [(row, part.backup.row_state) for row, part in zip(rows.tolist(), parts, strict=True)]
            self._device.queue_work(self._device.copy_stream, lambda: self._restore_row_states(kept))
            self._copies.begin(
                f"restoring of rows {rows.tolist()}", Access.WRITE, _together(part.units for part in parts)
            )
        except BaseException:
            try:
                self._copies.give_up()
            finally:
                self._free(parts)
                self._requests.close(rows)
            raise
        self._begin(rows, parts, promise)
        copied = sum(backup.byte_count for backup in backups)
        self._restored += len(backups)
        self._bytes_in += copied
        log.info("storage.restored", rows=rows.tolist(), bytes=copied)
        return rows

    def _take(self, backups: Sequence[RowBackup]) -> Taken:
        """Units for all that is kept, none of them zeroed."""
        minted = [backup.minted for backup in backups]
        firsts = np.cumsum([0] + [len(pages) for pages in minted])
        bands = {}
        for pool in self._sized.plan.sub_pools:
            fresh = None
            if pool in self._windows:
                places = [
                    first + np.searchsorted(pages, backup.pages[pool.name])
                    for first, pages, backup in zip(firsts.tolist(), minted, backups, strict=False)
                ]
                fresh = np.concatenate([_NOTHING, *places])
            bands[pool.name] = BandTake(fresh=fresh, unwritten=_NOTHING)
        slot_count = sum(backup.slot_count for backup in backups)
        return self._takes.take_promised(int(firsts[-1]), slot_count, bands)

    def _parts(self, backups: Sequence[RowBackup], taken: Taken) -> list[_Part]:
        """Which of what was taken is whose."""
        state = self._sized.plan.state_sub_pool
        parts, first_page, first_slot = [], 0, 0
        for backup in backups:
            minted = backup.minted
            virtual = taken.pages[first_page : first_page + len(minted)]
            units = {name: virtual[np.searchsorted(minted, pages)] for name, pages in backup.pages.items()}
            if state is not None:
                units[state.name] = taken.state_slots[first_slot : first_slot + backup.slot_count]
            parts.append(_Part(backup, virtual, units))
            first_page += len(minted)
            first_slot += backup.slot_count
        return parts

    def _open(self, backups: Sequence[RowBackup], slots: IntArray, promise: Promise) -> IntArray:
        """Rows that hold nothing yet but these state slots."""
        prompts = np.array([backup.prompt_tokens for backup in backups], np.int64)
        return self._requests.open(
            prompts,
            prompts + np.array([backup.output_tokens - 1 for backup in backups], np.int64),
            slots if len(slots) else np.full(len(backups), -1, np.int64),
            chunk_limit=promise.chunk_limit,
            cached_tokens=np.array([backup.written_tokens for backup in backups], np.int64),
            has_checkpoints=False,
        )

    def _restore_row_states(self, kept: Sequence[tuple[int, torch.Tensor]]) -> None:
        for row, values in kept:
            self._row_state.restore(row, values)

    def _begin(self, rows: IntArray, parts: Sequence[_Part], promise: Promise) -> None:
        """Let rows hold these parts. It asks nothing of the device, and cannot fail."""
        self._requests.checkpoint_lengths[rows] = [part.backup.checkpoint_length for part in parts]
        self._admission.promise(rows, promise)
        self._units.begin(rows, slots_each=1)
        for row, part in zip(rows.tolist(), parts, strict=True):
            self._units.restore(row, part.backup.pages, part.backup.minted, part.virtual)
            self._row_resets.restore(row, part.backup)

    def _free(self, parts: Sequence[_Part]) -> None:
        """What was taken for rows that come to nothing: a virtual page returns with its last holder."""
        for part in parts:
            for pool in sorted(self._sized.plan.sub_pools, key=lambda pool: pool not in self._windows):
                units = part.units[pool.name]
                if not len(units):
                    continue
                if pool.page_tokens is None:
                    self._chain.free_state_slots(units)
                else:
                    self._chain.free_pages(pool.name, units)

    # ── where bytes lie ──

    def _sections(self, backup: RowBackup) -> Iterator[tuple[BandLayout, UnitGrid, int]]:
        """Bands of which something is kept, and the first byte of their units in host memory."""
        first_byte = _ROW_STATE_SECTION
        for band in self._sized.layout.bands:
            count = backup.unit_count(band.name)
            if count:
                yield band, UnitGrid(band.origin_bytes, band.unit_bytes), first_byte
            first_byte += count * band.unit_bytes


def _together(units: Iterable[Mapping[str, IntArray]]) -> dict[str, IntArray]:
    """By band, each once: rows share pages."""
    found: dict[str, list[IntArray]] = {}
    for each in units:
        for name, virtual in each.items():
            found.setdefault(name, []).append(virtual)
    return {name: np.unique(np.concatenate(lists)) for name, lists in found.items()}
