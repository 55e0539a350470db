"""What a request keeps on the device beside pages and state slots: values that are born there, one of each a row (row K2).

No upload writes them, so none can overtake a value that a forward has just made. A row that is handed out again is reset by the
next forward, before its kernels and outside every graph: the last forward of the row's former request may still run, and writes
them at its end. What a restored request had comes back with its units instead, on the copy stream, between two forwards: it is no
forward's work, however many are restored.

    forward stream   … forward N + 1 (row 3: former request)  ┤ forward N + 2: reset row 3 │ metadata │ layers │ row 3: new values
    host             … N processed: row 3 freed, handed out, marked ──┘
    forward stream   … forward N + 1 ┤                         ┤ forward N + 2: row 4 goes on
    copy stream                      └ row 4, restored: values ┘
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtide.device import IntArray
from kvtide.sizing import ROW_STATE_BYTES


class RowState:
    """Request-scoped values on the device, at fixed addresses, `[row_count]` int64 each."""

    def __init__(self, row_count: int, device: torch.device) -> None:
        """All zero, beside the arena on `device`."""
        self._values = torch.zeros((3, row_count), dtype=torch.int64, device=device)
        assert self._values.nbytes == ROW_STATE_BYTES * row_count, "the budget has been charged for it"
        self.lengths = self._values[0]
        """Tokens that forwards have written, in stream order."""
        self.last_tokens = self._values[1]
        """Token that the row's newest forward chose: the input of the next one, which need not wait for the host."""
        self.drawn_counts = self._values[2]
        """Tokens chosen for the request so far: the sampler's cursor."""

    def reset(self, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """Begin anew for `rows [count]`, behind `lengths [count]` tokens that others have written; on the forward stream."""
        self._values[:, rows] = 0
        self.lengths[rows] = lengths

    def save(self, row: int, kept: torch.Tensor) -> None:
        """Copy a row's values to `kept`, `ROW_STATE_BYTES` of host memory as uint8; on the forward stream, and nobody waits."""
        kept.view(torch.int64).copy_(self._values[:, row], non_blocking=True)

    def restore(self, row: int, kept: torch.Tensor) -> None:
        """Go on with what `save` or `begin_values` has put there; behind every forward before, and before the next."""
        self._values[:, row].copy_(kept.view(torch.int64), non_blocking=True)

    def advance(self, rows: torch.Tensor, written_tokens: int, chosen: torch.Tensor | None) -> None:
        """Note what a forward did to `rows [count]`: tokens written for each, and the tokens `chosen [count]`, if it chose any.

        On the forward stream, after the forward's kernels.
        """
        self.lengths[rows] += written_tokens
        if chosen is not None:
            self.last_tokens[rows] = chosen
            self.drawn_counts[rows] += 1


def begin_values(length: int, kept: torch.Tensor) -> None:
    """Put in `kept`, as `RowState.save` would, what a row begins with behind `length` tokens; by the host, at once."""
    kept.view(torch.int64).numpy()[:] = (length, 0, 0)


class RowBeginnings(NamedTuple):
    """What one forward is the first to have."""

    resets: IntArray
    """Rows, its own or others, that begin anew: it resets them."""

    restored: Mapping[int, object]
    """Of its own rows those that go on, and what they came from."""


class RowResets:
    """Rows whose device state is not their request's yet: another's, until a forward has reset it; or that of a backup, until a
    forward of the row goes on from it. One owner: the storage.
    """

    def __init__(self, row_count: int) -> None:
        """None."""
        self._marked: npt.NDArray[np.bool_] = np.zeros(row_count, np.bool_)
        self._restored: dict[int, object] = {}

    def mark(self, rows: IntArray) -> None:
        """Have `rows` reset by the next forward."""
        self._marked[rows] = True

    def restore(self, row: int, kept: object) -> None:
        """Have the next forward of `row` go on with what came from `kept`: it is not reset."""
        self._marked[row] = False
        self._restored[row] = kept

    def is_marked(self, row: int) -> bool:
        """Whether the next forward resets a row."""
        return bool(self._marked[row])

    def kept(self, row: int) -> object | None:
        """What a row came from of which no forward has been launched since; `None` for any other."""
        return self._restored.get(row)

    def over(self, rows: IntArray) -> None:
        """Keep no longer what `rows` came from: whoever has them next came from something else."""
        for row in rows.tolist() if self._restored else ():
            self._restored.pop(row, None)

    def take(self, rows: IntArray) -> RowBeginnings:
        """What the forward of `rows` does that is being launched; no other forward does it, unless it is given back."""
        resets = np.flatnonzero(self._marked)
        self._marked[resets] = False
        restored = {
            row: self._restored.pop(row)
            for row in (rows.tolist() if self._restored else ())
            if row in self._restored
        }
        return RowBeginnings(resets, restored)

    def give_back(self, beginnings: RowBeginnings) -> None:
        """The forward will not run: the next one resets its rows, and the next of each restored row goes on there."""
        self.mark(beginnings.resets)
        self._restored |= beginnings.restored
