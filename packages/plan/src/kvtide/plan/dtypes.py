"""Element types of planes, without torch: a name the field knows and a width in bytes."""

from __future__ import annotations

import enum


class DType(enum.Enum):
    """An element type; the value is its torch name."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8_E4M3 = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT8 = "int8"
    UINT8 = "uint8"

    @property
    def byte_width(self) -> int:
        """Bytes of one element."""
        return _BYTE_WIDTHS[self]


_BYTE_WIDTHS = {
    DType.FLOAT32: 4,
    DType.BFLOAT16: 2,
    DType.FLOAT16: 2,
    DType.FLOAT8_E4M3: 1,
    DType.FLOAT8_E5M2: 1,
    DType.INT8: 1,
    DType.UINT8: 1,
}
