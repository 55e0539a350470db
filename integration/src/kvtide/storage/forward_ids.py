"""Ids for one forward's kernels, translated once per sub-pool (row K3).

Rows hold virtual ids; kernels index by physical ones. A forward's metadata phase reads the mirrors on the device, once for
what it writes and once for what it reads; no kernel translates.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from kvtide.arena import token_slots, translate_ids
from kvtide.chain import SINK


@attrs.frozen(eq=False)
class ForwardIds:
    """What one forward's kernels index by. Physical: right until a page moves, which no page does before it is recorded."""

    write_slots: Mapping[str, torch.Tensor]
    """By band: slots of the tokens written, `[token_count]` int64, row after row; slot = page × page_tokens + offset."""

    page_tables: Mapping[str, torch.Tensor]
    """By band: pages read, `[row_count, page_count]` int64 from each row's first token; 0, the sink, where none is bound."""

    state_slots: torch.Tensor | None
    """State slots, `[row_count]` int64; `None` without a state band."""


class IdTranslator:
    """Reads the mirrors of one device."""

    def __init__(
        self, tables: Mapping[str, torch.Tensor], page_tokens: Mapping[str, int | None], pages_per_row: int
    ) -> None:
        """`tables` as `kvtide.sizing.mirror_lengths` names them; `page_tokens` by band."""
        self._ids = {name: tables[f"ids:{name}"] for name in page_tokens}
        self._rows = tables["rows"].view(-1, pages_per_row)
        self._page_tokens = page_tokens

    def translate(
        self,
        rows: torch.Tensor,
        page_counts: torch.Tensor,
        write_rows: torch.Tensor,
        write_positions: torch.Tensor,
        virtual_slots: torch.Tensor,
    ) -> ForwardIds:
        """Ids of a forward over `rows [row_count]` that writes token `write_positions[i]` of row `write_rows[i]`.

        `page_counts [row_count]` are the pages that each row holds, `virtual_slots [row_count]` the rows' state slots.
        """
        columns = torch.arange(int(page_counts.max()))
        is_held = columns < page_counts[:, None]
        virtual_tables = torch.where(is_held, self._rows[rows[:, None], columns], SINK)
        write_slots: dict[str, torch.Tensor] = {}
        page_tables: dict[str, torch.Tensor] = {}
        state_slots = None
        for name, ids in self._ids.items():
            tokens = self._page_tokens[name]
            if tokens is None:
                state_slots = translate_ids(ids, virtual_slots)
                continue
            page_tables[name] = translate_ids(ids, virtual_tables)
            pages = translate_ids(ids, self._rows[write_rows, write_positions // tokens])
            write_slots[name] = token_slots(pages, write_positions % tokens, tokens)
        return ForwardIds(write_slots, page_tables, state_slots)
