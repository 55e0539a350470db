"""The programs that run on a GPU (row A6), each over rows of whole words; `triton_kernels` launches them.

A *row* is what is moved at once: a unit, a token's entry, a table entry. Row `id` of a side lies at
`(id // tokens) × page stride + (id % tokens) × token stride`; a side without ids has row i at place i. Sizes are counted in
*grains* of `GRAIN` words, so that the compiler knows that a grain of two int64 starts 16-byte aligned and loads it at once.

One program serves `ROWS × COLUMNS` words. Sizes are int64 and never specialised on: a program is compiled once for each
width and power of two of a row, whatever the batch (row A7).
"""

from __future__ import annotations

import triton
import triton.language as tl

_SIZES = [
    "row_count",
    "row_grains",
    "source_tokens",
    "source_page",
    "source_token",
    "target_tokens",
    "target_page",
    "target_token",
]
_IDS = ["source_ids", "target_ids"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_IDS)
def copy_rows(
    source,
    target,
    source_ids,
    target_ids,
    row_count: tl.int64,
    row_grains: tl.int64,
    source_tokens: tl.int64,
    source_page: tl.int64,
    source_token: tl.int64,
    target_tokens: tl.int64,
    target_page: tl.int64,
    target_token: tl.int64,
    HAS_SOURCE_IDS: tl.constexpr,
    HAS_TARGET_IDS: tl.constexpr,
    SOURCE_IS_PAGED: tl.constexpr,
    TARGET_IS_PAGED: tl.constexpr,
    GRAIN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy rows; a source of −1 reads as zeros, a target of −1 is not written. No row written may be read by the launch."""
    row_words = row_grains * GRAIN
    blocks = tl.cdiv(row_words, COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    rows = (program // blocks) * ROWS + tl.arange(0, ROWS)
    columns = (program % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = rows < row_count
    is_column = columns < row_words
    from_rows = rows
    if HAS_SOURCE_IDS:
        from_rows = tl.load(source_ids + rows, mask=is_row, other=-1)
    to_rows = rows
    if HAS_TARGET_IDS:
        to_rows = tl.load(target_ids + rows, mask=is_row, other=-1)
    reads = is_row & (from_rows >= 0)
    writes = is_row & (to_rows >= 0)
    # A division of 64-bit integers takes longer than a small row, so pages of one row do without.
    read_at = from_rows * source_page
    if SOURCE_IS_PAGED:
        read_at = (from_rows // source_tokens) * source_page + (from_rows % source_tokens) * source_token
    write_at = to_rows * target_page
    if TARGET_IS_PAGED:
        write_at = (to_rows // target_tokens) * target_page + (to_rows % target_tokens) * target_token
    words = tl.load(
        source + read_at[:, None] * GRAIN + columns[None, :],
        mask=reads[:, None] & is_column[None, :],
        other=0,
    )
    tl.store(
        target + write_at[:, None] * GRAIN + columns[None, :],
        words,
        mask=writes[:, None] & is_column[None, :],
    )


@triton.jit(
    do_not_specialize=["row_count", "row_grains", "stride"], do_not_specialize_on_alignment=["target_ids"]
)
def zero_rows(
    target,
    target_ids,
    row_count: tl.int64,
    row_grains: tl.int64,
    stride: tl.int64,
    GRAIN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Fill rows, `stride` grains apart, with zero words."""
    row_words = row_grains * GRAIN
    blocks = tl.cdiv(row_words, COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    rows = (program // blocks) * ROWS + tl.arange(0, ROWS)
    columns = (program % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = rows < row_count
    to_rows = tl.load(target_ids + rows, mask=is_row, other=0)
    tl.store(
        target + (to_rows * stride)[:, None] * GRAIN + columns[None, :],
        tl.zeros((ROWS, COLUMNS), dtype=target.dtype.element_ty),
        mask=is_row[:, None] & (columns < row_words)[None, :],
    )


@triton.jit(
    do_not_specialize=["id_count", "entry_count"],
    do_not_specialize_on_alignment=["table", "ids", "translated", "faults"],
)
def translate(
    table,
    ids,
    translated,
    faults,
    id_count: tl.int64,
    entry_count: tl.int64,
    IS_STRICT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`table[ids]`; −1 stays. Strict, an id outside the table becomes −1 and counts in `faults`."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_id = places < id_count
    virtual = tl.load(ids + places, mask=is_id, other=-1)
    looked_up = is_id & (virtual >= 0)
    if IS_STRICT:
        wrong = is_id & ((virtual < -1) | (virtual >= entry_count))
        looked_up = looked_up & (virtual < entry_count)
        tl.atomic_add(faults, tl.sum(wrong.to(tl.int64), axis=0))
    physical = tl.load(table + virtual, mask=looked_up, other=-1)
    tl.store(translated + places, physical.to(tl.int64), mask=is_id)
