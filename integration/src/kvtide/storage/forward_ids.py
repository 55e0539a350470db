"""Ids for one forward's kernels, translated once per sub-pool (row K3).

Rows hold virtual ids; kernels index by physical ones. A forward's metadata phase reads the mirrors on the device, once for
what it writes and once for what it reads; no kernel translates.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from kvtide.arena import TensorDevice, token_slots, translate_ids
from kvtide.device import IntArray
from kvtide.ledger import InvariantChecks


@attrs.frozen(eq=False)
class ForwardIds:
    """What one forward's kernels index by. Physical: right until a page moves, which no page does before it is recorded."""

    write_slots: Mapping[str, torch.Tensor]
    """By band: slots of the tokens written, `[token_count]` int64, row after row; slot = page × page_tokens + offset."""

    page_tables: Mapping[str, torch.Tensor]
    """By band: pages read, `[row_count, page_count]` int64 from each row's first token; 0, the sink, where none is bound."""

    state_slots: torch.Tensor | None
    """State slots, `[row_count]` int64; `None` without a state band."""


@attrs.frozen(eq=False, kw_only=True)
class UnresolvedIds:
    """The ids of a launched forward, before its metadata phase has read the mirrors."""

    rows: IntArray
    """Rows of the forward."""

    page_columns: int
    """Pages of the row that has most."""

    write_rows: IntArray
    """Row of each token written."""

    write_positions: IntArray
    """Position in its row of each token written."""

    state_slots: IntArray
    """Virtual state slot of each row."""

    translator: IdTranslator
    """Of the storage that launched it."""

    def resolve(self) -> ForwardIds:
        """Translate, on the forward's stream, whichever is torch's current one; call it before the forward's kernels.

        The upload is ordered before that stream, and the next upload waits for the forward. The ids hold for work on that
        stream: queue the kernels under `device.on_stream(device.forward_stream)`. No part of a CUDA graph: its replays would
        read these ids again, so on a GPU `RuntimeError` is raised while that stream captures one.
        """
        return self.translator.translate(self)


class IdTranslator:
    """Reads the mirrors of one device, once for what a forward writes and once for what it reads."""

    def __init__(
        self,
        device: TensorDevice,
        page_tokens: Mapping[str, int | None],
        pages_per_row: int,
        checks: InvariantChecks,
    ) -> None:
        """The tables of `device` are as `kvtide.sizing.mirror_lengths` names them; `page_tokens` by band.

        With `storage.translated_ids` checked, ids outside their table are masked and counted.
        """
        self._device = device
        self._checks = checks
        tables = device.tables
        self._ids = {name: tables[f"ids:{name}"] for name in page_tokens}
        self._rows = tables["rows"].view(-1, pages_per_row)
        self._page_tokens = page_tokens
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
        rows, write_rows, write_positions, virtual_slots = self._device.send(
            self._device.forward_stream, [ids.rows, ids.write_rows, ids.write_positions, ids.state_slots]
        )
        virtual_tables = self._rows[rows, : ids.page_columns]
        write_slots: dict[str, torch.Tensor] = {}
        page_tables: dict[str, torch.Tensor] = {}
        state_slots = None
        for name, table in self._ids.items():
            tokens = self._page_tokens[name]
            if tokens is None:
                state_slots = translate_ids(table, virtual_slots, faults=self._faults)
                continue
            page_tables[name] = translate_ids(table, virtual_tables, faults=self._faults)
            pages = translate_ids(
                table, self._rows[write_rows, write_positions // tokens], faults=self._faults
            )
            write_slots[name] = token_slots(pages, write_positions % tokens, tokens)
        return ForwardIds(write_slots, page_tables, state_slots)
