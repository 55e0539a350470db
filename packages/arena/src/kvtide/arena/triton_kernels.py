"""Byte work on an arena, in Triton (row A6): the functions of `kernels`, bit for bit, for tensors on a GPU.

Nothing here waits for the device or allocates beyond what it returns. Work is queued on torch's current stream of the GPU that
holds the tensors, whichever GPU is torch's current one. Under `TRITON_INTERPRET=1`, set before this module is imported, the
same programs run on host tensors; tests use that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import triton
import triton.language as tl

from kvtide.arena import triton_programs as programs
from kvtide.arena.copy_plan import CopySegment
from kvtide.arena.kernels import unit_words

TILE_WORDS = 2048
"""Words that one program moves."""

_ID_BLOCK = 1024
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def copy_units(
    arena: torch.Tensor,
    origin_bytes: int,
    unit_bytes: int,
    sources: torch.Tensor,
    targets: torch.Tensor,
    *,
    segments: Sequence[CopySegment],
    scratch: torch.Tensor,
) -> None:
    """Copy unit `sources[i]` to `targets[i]`, both int64 on the arena's device, as if one after another.

    `segments` are those of `copy_segments` for these pairs and the units that `scratch`, int64, holds. State slots are units
    of their band, and are copied so too.
    """
    units = unit_words(arena, origin_bytes, unit_bytes).unsqueeze(1)
    held = scratch[: scratch.numel() // (unit_bytes // 8) * (unit_bytes // 8)].view(-1, 1, unit_bytes // 8)
    for segment in segments:
        pairs = slice(segment.first_pair, segment.end_pair)
        if segment.through_scratch:
            _copy_rows(units, held, segment.end_pair - segment.first_pair, source_ids=sources[pairs])
            _copy_rows(held, units, segment.end_pair - segment.first_pair, target_ids=targets[pairs])
        else:
            _copy_rows(units, units, segment.end_pair - segment.first_pair, sources[pairs], targets[pairs])


def zero_units(arena: torch.Tensor, origin_bytes: int, unit_bytes: int, units: torch.Tensor) -> None:
    """Fill whole units, int64 ids on the arena's device, with zero bytes."""
    words = unit_words(arena, origin_bytes, unit_bytes)
    _zero_rows(words, units.numel(), units)


def translate_ids(
    table: torch.Tensor, ids: torch.Tensor, *, faults: torch.Tensor | None = None
) -> torch.Tensor:
    """See `token_kernels.translate_ids`."""
    ids = ids.contiguous()
    translated = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    if ids.numel():
        _launch(
            programs.translate,
            (-(-ids.numel() // _ID_BLOCK),),
            table,
            table,
            ids,
            translated,
            translated if faults is None else faults,
            ids.numel(),
            table.numel(),
            IS_STRICT=faults is not None,
            BLOCK=_ID_BLOCK,
        )
    return translated


def write_tokens(plane: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """See `token_kernels.write_tokens`; a token's entry must be dense in `plane`, else `ValueError`."""
    wanted = [slots.numel(), *plane.shape[2:]]
    if list(values.shape) != wanted:
        raise ValueError(f"cannot write values of shape {list(values.shape)}: these slots take {wanted}")
    # A copy, where the values are not dense: what the model computes seldom is not.
    dense = values.to(plane.dtype).contiguous().unsqueeze(1)
    _copy_rows(dense, plane, slots.numel(), target_ids=slots.contiguous())


def gather_tokens(plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """See `token_kernels.gather_tokens`; a token's entry must be dense in `plane`, else `ValueError`."""
    gathered = torch.empty((slots.numel(), 1, *plane.shape[2:]), dtype=plane.dtype, device=plane.device)
    _copy_rows(plane, gathered, slots.numel(), source_ids=slots.contiguous())
    return gathered.view(*slots.shape, *plane.shape[2:])


def gather_pages(plane: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """See `token_kernels.gather_pages`; a page must be dense in `plane`, else `ValueError`."""
    return gather_tokens(plane.unsqueeze(1), pages)


def prewarm_units(arena: torch.Tensor, unit_bytes: int, ids: torch.Tensor, scratch: torch.Tensor) -> None:
    """Compile and load what `copy_units` and `zero_units` launch for units of this size; touches no byte."""
    units = arena[:unit_bytes].view(torch.int64).view(1, 1, -1)
    _copy_rows(units, units, 0, ids, ids)
    _zero_rows(units[0], 0, ids)
    if scratch.numel() >= units.numel():
        held = scratch[: units.numel()].view(units.shape)
        _copy_rows(units, held, 0, source_ids=ids)
        _copy_rows(held, units, 0, target_ids=ids)


def prewarm_table(table: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Compile and load what `write_tokens` launches to write `values` to `table`, one entry a row; touches no byte."""
    _copy_rows(values.view(-1, 1), table.view(-1, 1), 0, target_ids=ids)


# --- launches -----------------------------------------------------------------------------------------------------


@attrs.frozen
class _Side:
    """Where the rows of one tensor `[page_count, page_tokens, …]` lie, in bytes."""

    row: int
    page: int
    token: int
    tokens: int
    address: int


def _side(rows: torch.Tensor) -> _Side:
    entry = rows.shape[2:]
    dense = 1
    for size, stride in zip(reversed(entry), reversed(rows.stride()[2:]), strict=True):
        if size != 1 and stride != dense:
            raise ValueError(
                f"entries of shape {list(entry)} lie at strides {list(rows.stride()[2:])}: they must be dense to be moved "
                "as rows of words"
            )
        dense *= size
    width = rows.element_size()
    return _Side(
        row=math.prod(entry) * width,
        page=rows.stride(0) * width,
        token=rows.stride(1) * width,
        tokens=rows.shape[1],
        address=rows.data_ptr(),
    )


def _copy_rows(
    source: torch.Tensor,
    target: torch.Tensor,
    row_count: int,
    source_ids: torch.Tensor | None = None,
    target_ids: torch.Tensor | None = None,
) -> None:
    """Copy `row_count` rows of `source` to `target`; without ids, row i of a side whose pages hold one row each."""
    read, write = _side(source), _side(target)
    if not read.row:
        return
    grain = math.gcd(
        16, read.row, read.page, read.token, read.address, write.page, write.token, write.address
    )
    word, grain_words = min(grain, 8), max(grain // 8, 1)
    row_grains = read.row // grain
    columns, rows, grid = _tiles(row_count, row_grains * grain_words)
    ids = source_ids if source_ids is not None else target_ids
    _launch(
        programs.copy_rows,
        grid,
        target,
        triton.reinterpret(source, _WORDS[word]),
        triton.reinterpret(target, _WORDS[word]),
        ids if source_ids is None else source_ids,
        ids if target_ids is None else target_ids,
        row_count,
        row_grains,
        read.tokens,
        read.page // grain,
        read.token // grain,
        write.tokens,
        write.page // grain,
        write.token // grain,
        HAS_SOURCE_IDS=source_ids is not None,
        HAS_TARGET_IDS=target_ids is not None,
        SOURCE_IS_PAGED=read.tokens > 1,
        TARGET_IS_PAGED=write.tokens > 1,
        GRAIN=grain_words,
        ROWS=rows,
        COLUMNS=columns,
    )


def _zero_rows(words: torch.Tensor, row_count: int, ids: torch.Tensor) -> None:
    """Zero rows of `words [unit_count, unit_words]`, int64, whose rows are multiples of 16 bytes."""
    grains = words.shape[1] // 2
    columns, rows, grid = _tiles(row_count, words.shape[1])
    _launch(
        programs.zero_rows,
        grid,
        words,
        words,
        ids,
        row_count,
        grains,
        grains,
        GRAIN=2,
        ROWS=rows,
        COLUMNS=columns,
    )


def _launch(
    program: Any, grid: tuple[int], beside: torch.Tensor, *arguments: object, **constants: object
) -> None:
    """Launch `grid` programs on the GPU that holds `beside`; Triton alone would take torch's current one."""
    with torch.cuda.device_of(beside):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        program[grid](*arguments, **constants)


def _tiles(row_count: int, row_words: int) -> tuple[int, int, tuple[Any]]:
    """Columns and rows of one program, and how many programs; one at least, which finds no row."""
    columns = min(TILE_WORDS, triton.next_power_of_2(row_words))
    rows = TILE_WORDS // columns
    return columns, rows, (max(1, -(-row_count // rows) * -(-row_words // columns)),)
