"""A decode step at fixed addresses and of fixed shape, as a captured graph needs it (row K13).

    metadata phase, not captured    translate ids ── fill: rows of the step, then padding ──┐
    buffers                         token ids, positions, write slots, page tables, state slots
    layers, could be captured       read nothing of the step but the buffers ◄──────────────┘

Places behind the step's rows are padding: token 0 at position 0, whose entries are written to the sink and read from there, and whose
state slot is −1, read as zeros and never written. What a padded place computes is dropped. It must be finite,
as token 0 of any sound model is: torch's attention loads the sink with weight zero for rows too, and 0 × NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from kvtide.engine.batch import ForwardInputs, Padding
from kvtide.storage import ForwardIds, ForwardStateSlots, KVStorage


@attrs.frozen(eq=False)
class FixedIds:
    """What the layers of every decode step index by; `LayerIds` at fixed addresses."""

    write_slots: Mapping[str, torch.Tensor]
    """By band, `[places]`."""

    page_tables: Mapping[str, torch.Tensor]
    """By band, `[places, columns]`."""

    state_slots: ForwardStateSlots | None
    """`[places]`; `None` without a state band."""


class DecodeBuffers:
    """The buffers of one storage, beside its tables. One step at a time: the next is filled behind it on the forward stream."""

    def __init__(self, storage: KVStorage) -> None:
        """Room for every row that may run; all of it padding. Made on the forward stream, which alone fills and reads it."""
        with storage.device.on_stream(storage.device.forward_stream):
            self._allocate(storage)

    def _allocate(self, storage: KVStorage) -> None:
        sized, tables = storage.sized, storage.device.tables
        rows, columns = sized.max_running_requests, sized.pages_per_row
        device = tables["rows"].device
        bands = [pool.name for pool in storage.plan.token_sub_pools]

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.padding = Padding(row_count=rows, page_columns=columns)
        """The shape that every step has."""
        self.ids = FixedIds(
            write_slots={band: zeros(rows) for band in bands},
            page_tables={band: zeros(rows, columns) for band in bands},
            state_slots=None if storage.plan.state_sub_pool is None else ForwardStateSlots(zeros(rows) - 1),
        )
        """What the layers index by."""
        self.inputs = ForwardInputs(zeros(rows, 1), zeros(rows, 1))
        """What the model is given."""

    def fill(self, ids: ForwardIds, inputs: ForwardInputs) -> None:
        """Bring in a decode step: the end of its metadata phase, on the forward stream."""
        for band, slots in self.ids.write_slots.items():
            _fill(slots, ids.write_slots[band], 0)
            _fill(self.ids.page_tables[band], ids.page_tables[band], 0)
        if self.ids.state_slots is not None and ids.state_slots is not None:
            _fill(self.ids.state_slots.slots, ids.state_slots.slots, -1)
        for fixed, values in zip(attrs.astuple(self.inputs), attrs.astuple(inputs), strict=True):
            _fill(fixed, values, 0)


def _fill(fixed: torch.Tensor, values: torch.Tensor, padding: int) -> None:
    """Set the first rows, and of tables their first columns, to `values`, everything else to `padding`."""
    fixed.fill_(padding)
    fixed[tuple(slice(size) for size in values.shape)].copy_(values)
