"""Ids for one forward's kernels, translated once per sub-pool (row K3).

Rows hold virtual ids; kernels index by physical ones. A forward's metadata phase reads the mirrors on the device, once for each band;
no kernel translates. Once that phase is over the mirrors may speak of other requests, so whatever the forward does later uses what was
resolved then. What a forward writes lies in pages that it reads, so a written slot is found in the table that has just been translated:

    row of the forward   0           1           …
    page table           [ 7 3 9 4 ] [ 5 8 0 0 ]      physical pages of one band; places of written pages, alike for all bands, are sent
    written slot             │ × page_tokens + offset
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from kvtide.arena import TensorDevice, gather_pages, token_slots, translate_ids, write_tokens
from kvtide.device import IntArray
from kvtide.ledger import InvariantChecks
from kvtide.plan import KVStoragePlan
from kvtide.storage.row_state import RowState


@attrs.frozen(eq=False)
class ForwardStateSlots:
    """Where the states of one forward's rows lie, for every reader and writer of that forward, however late it comes (row K4).

    After the read end a row may name another request: nobody looks its slot up again.
    """

    slots: torch.Tensor
    """Physical state slots, `[row_count]` int64; −1 for a padded row."""

    def gather(self, plane: torch.Tensor) -> torch.Tensor:
        """A copy of each row's state, `[row_count, …]`, of `plane [slot_count, …]`; zeros for a padded row."""
        return gather_pages(plane, self.slots)

    def scatter(self, plane: torch.Tensor, values: torch.Tensor) -> None:
        """Replace each row's state in `plane` by `values [row_count, …]`; a padded row's go nowhere."""
        write_tokens(plane.unsqueeze(1), self.slots, values)


@attrs.frozen(eq=False)
class ForwardIds:
    """What one forward's kernels index by. Physical: right until a page moves, which no page does before it is recorded."""

    write_slots: Mapping[str, torch.Tensor]
    """By band: slots of the tokens written, `[token_count]` int64, row after row; slot = page × page_tokens + offset."""

    page_tables: Mapping[str, torch.Tensor]
    """By band: pages read, `[row_count, page_count]` int64 from each row's first token; 0, the sink, where none is bound."""

    state_slots: ForwardStateSlots | None
    """`None` without a state band."""

    rows: torch.Tensor
    """Rows of the forward, `[row_count]` int64, to index `RowState` by."""


@attrs.frozen(eq=False, kw_only=True)
class UnresolvedIds:
    """The ids of a launched forward, before its metadata phase has read the mirrors."""

    rows: IntArray
    """Rows of the forward."""

    page_columns: int
    """Pages of the row that has most."""

    write_places: IntArray
    """Place among `rows` of the row of each token written."""

    write_positions: IntArray
    """Position in its row of each token written."""

    state_slots: IntArray
    """Virtual state slot of each row."""

    reset_rows: IntArray
    """Rows handed out since the launch before that begin anew, in this forward or not."""

    reset_lengths: IntArray
    """Tokens that each of them was given with a hit."""

    translator: IdTranslator
    """Of the storage that launched it."""

    def resolve(self) -> ForwardIds:
        """Reset the rows that were handed out, and translate: the forward's metadata phase, before its kernels.

        It runs on the forward's stream, whichever is torch's current one. The upload is ordered before that stream, and the next upload
        behind the read end. The ids hold for work on that stream: queue the kernels under `device.on_stream(device.forward_stream)`.
        No part of a CUDA graph: its replays would read these ids again, so on a GPU `RuntimeError` is raised while that stream
        captures one.
        """
        return self.translator.translate(self)


class IdTranslator:
    """Reads the mirrors of one device for forwards."""

    def __init__(
        self,
        device: TensorDevice,
        plan: KVStoragePlan,
        pages_per_row: int,
        row_state: RowState,
        checks: InvariantChecks,
    ) -> None:
        """The tables of `device` are as `kvtide.sizing.mirror_lengths` names them for the bands of `plan`.

        With `storage.translated_ids` checked, ids outside their table are masked and counted.
        """
        self._device = device
        self._row_state = row_state
        self._checks = checks
        tables = device.tables
        state = plan.state_sub_pool
        self._page_ids = {pool.name: tables[f"ids:{pool.name}"] for pool in plan.token_sub_pools}
        self._slot_ids = None if state is None else tables[f"ids:{state.name}"]
        self._rows = tables["rows"].view(-1, pages_per_row)
        # A row's page is a page of every band, while `check_supported` refuses windows of smaller pages.
        self._page_tokens = plan.page_tokens
        self._faults: torch.Tensor | None = None
        if checks.checks("storage.translated_ids"):
            with device.on_stream(device.forward_stream):
                self._faults = torch.zeros(1, dtype=torch.int64, device=tables["rows"].device)

    def verify(self) -> None:
        """Act on ids that were translated and are not in their tables; for idle times, since the host reads their count."""
        if self._faults is None:
            return
        with self._device.on_stream(self._device.forward_stream):
            faults = int(self._faults.item())
        if faults:
            self._checks.broken(
                "storage.translated_ids",
                f"{faults} ids of forwards lay outside their tables and were masked",
                "a row or a table was written by someone else, or an id was used after its page was freed",
            )

    def translate(self, ids: UnresolvedIds) -> ForwardIds:
        """See `UnresolvedIds.resolve`; every tensor lies where the tables do."""
        with self._device.on_stream(self._device.forward_stream):
            return self._translate(ids)

    def _translate(self, ids: UnresolvedIds) -> ForwardIds:
        columns = ids.write_positions // self._page_tokens
        sent = (
            ids.rows,
            ids.write_places * ids.page_columns + columns,
            ids.write_positions - columns * self._page_tokens,
            ids.state_slots,
            ids.reset_rows,
            ids.reset_lengths,
        )
        rows, write_pages, write_offsets, virtual_slots, reset_rows, reset_lengths = self._device.send(
            self._device.forward_stream, sent
        )
        if len(ids.reset_rows):
            self._row_state.reset(reset_rows, reset_lengths)
        virtual_tables = self._rows[:, : ids.page_columns].index_select(0, rows)
        write_slots: dict[str, torch.Tensor] = {}
        page_tables: dict[str, torch.Tensor] = {}
        for name, table in self._page_ids.items():
            page_tables[name] = translated = translate_ids(table, virtual_tables, faults=self._faults)
            pages = translated.view(-1).index_select(0, write_pages)
            write_slots[name] = token_slots(pages, write_offsets, self._page_tokens)
        state_slots: ForwardStateSlots | None = None
        if self._slot_ids is not None:
            state_slots = ForwardStateSlots(translate_ids(self._slot_ids, virtual_slots, faults=self._faults))
        return ForwardIds(write_slots, page_tables, state_slots, rows)
