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
        """Translate. Call it on the forward's stream, before its kernels: the upload is ordered before that stream, and the
        next upload waits for the forward.
        """
        return self.translator.translate(self)


class IdTranslator:
    """Reads the mirrors of one device, once for what a forward writes and once for what it reads."""

    def __init__(
        self, device: TensorDevice, page_tokens: Mapping[str, int | None], pages_per_row: int
    ) -> None:
        """The tables of `device` are as `kvtide.sizing.mirror_lengths` names them; `page_tokens` by band."""
        self._device = device
        tables = device.tables
        self._ids = {name: tables[f"ids:{name}"] for name in page_tokens}
        self._rows = tables["rows"].view(-1, pages_per_row)
        self._page_tokens = page_tokens

    def translate(self, ids: UnresolvedIds) -> ForwardIds:
        """See `UnresolvedIds.resolve`; every tensor lies where the tables do."""
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
                state_slots = translate_ids(table, virtual_slots)
                continue
            page_tables[name] = translate_ids(table, virtual_tables)
            pages = translate_ids(table, self._rows[write_rows, write_positions // tokens])
            write_slots[name] = token_slots(pages, write_positions % tokens, tokens)
        return ForwardIds(write_slots, page_tables, state_slots)
