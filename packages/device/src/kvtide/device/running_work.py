"""What queued work does to bytes once its turn has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtide.device.byte_spans import ByteArray, ByteSpan
from kvtide.device.protocols import IntArray
from kvtide.device.races import UndeclaredAccessError


class RunningWork:
    """Bytes, as running work may touch them: what it declared, or what it finds."""

    def __init__(
        self,
        name: str,
        reads: Sequence[ByteSpan],
        writes: Sequence[ByteSpan],
        note_late: Callable[[ByteSpan, bool], None] | None,
    ) -> None:
        self._name = name
        self._declared = {False: reads, True: writes}
        self._note_late = note_late
        self._noted: set[tuple[int, int, int, bool]] = set()

    def read(self, span: ByteSpan) -> ByteArray:
        """A copy of the bytes of `span`; view it as any dtype."""
        self._check(span, is_write=False)
        return span.buffer.bytes[span.start_byte : span.end_byte].copy()

    def write(self, span: ByteSpan, values: npt.NDArray[np.generic] | int) -> None:
        """Fill `span` with one byte value, or with the bytes of an array of just as many."""
        self._check(span, is_write=True)
        fill_span(span, values)

    def _check(self, span: ByteSpan, *, is_write: bool) -> None:
        if any(declared.covers(span) for declared in self._declared[is_write]):
            return
        if self._note_late is None:
            raise UndeclaredAccessError(
                f"{self._name} {'writes' if is_write else 'reads'} bytes [{span.start_byte}, {span.end_byte}) of "
                f"{span.buffer.name}, which it did not declare: name them in reads= or writes=, or say discovers=True"
            )
        key = (id(span.buffer), span.start_byte, span.end_byte, is_write)
        if key not in self._noted:
            self._noted.add(key)
            self._note_late(span, is_write)


def fill_span(span: ByteSpan, values: npt.NDArray[np.generic] | int) -> None:
    """Write one byte value, or the bytes of an array, to a span; `ValueError` for an array of other length."""
    target = span.buffer.bytes[span.start_byte : span.end_byte]
    if isinstance(values, int):
        target[:] = values
    elif values.nbytes != span.byte_count:
        raise ValueError(f"cannot write {values.nbytes} bytes to a span of {span.byte_count}")
    else:
        target[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def check_copy_order(sources: IntArray, targets: IntArray) -> None:
    """The seam's rule for lists of one length: no later source is an earlier target, and no target comes twice."""
    written: dict[int, int] = {}
    for place, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
        if source in written:
            raise ValueError(
                f"cannot copy unit {source} as pair {place}: pair {written[source]} has written it; order the pairs"
            )
        if target in written:
            raise ValueError(f"cannot copy to unit {target} twice, as pairs {written[target]} and {place}")
        written[target] = place
