"""The byte work on an arena, beside loops that do one thing at a time (A6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvtide.arena import (
    SCRATCH_BYTES,
    copy_units,
    gather_pages,
    gather_tokens,
    kernels,
    token_slots,
    torch_dtype,
    translate_ids,
    unit_words,
    write_tokens,
    zero_units,
)
from kvtide.plan import DType

ORIGIN_BYTES = 48
UNIT_COUNT = 12


@st.composite
def safe_copies(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Pairs in an order in which no later source is an earlier target and no target comes twice: scattered ones, or a block
    that moves up or down over itself, in the order that a relocation uses.
    """
    if draw(st.booleans()):
        length = draw(st.integers(1, UNIT_COUNT - 1))
        first = draw(st.integers(0, UNIT_COUNT - length))
        target = draw(st.integers(0, UNIT_COUNT - length))
        sources = list(range(first, first + length))
        if target > first:
            sources.reverse()
        return sources, [source + target - first for source in sources]
    sources, targets = [], []
    for _ in range(draw(st.integers(0, UNIT_COUNT - 1))):
        free = [unit for unit in range(UNIT_COUNT) if unit not in targets]
        sources.append(draw(st.sampled_from(free)))
        targets.append(draw(st.sampled_from(free)))
    return sources, targets


def random_arena(unit_bytes: int, seed: int) -> torch.Tensor:
    """Random bytes, NaNs of every type among them, with odd ends before and behind the units."""
    size = ORIGIN_BYTES + UNIT_COUNT * unit_bytes + 13
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, np.uint8))


def unit_of(arena: npt.NDArray[np.uint8], unit_bytes: int, unit: int) -> npt.NDArray[np.uint8]:
    return arena[ORIGIN_BYTES + unit * unit_bytes : ORIGIN_BYTES + (unit + 1) * unit_bytes]


@pytest.mark.requirement("A6")
@settings(max_examples=300, deadline=None)
@given(
    copies=safe_copies(),
    unit_bytes=st.sampled_from([16, 48, 112]),
    scratch_units=st.sampled_from([0.5, 1, 2.5, 5, 100]),
    run_bytes=st.sampled_from([0, 100, 2**40]),
    seed=st.integers(0, 2**32),
)
def test_copies_in_a_safe_order_equal_copies_one_by_one(
    copies: tuple[list[int], list[int]], unit_bytes: int, scratch_units: float, run_bytes: int, seed: int
) -> None:
    """A block may move up or down over itself, as runs, in batches of any size or, when a unit exceeds the scratch, without
    it.
    """
    sources, targets = copies
    arena = random_arena(unit_bytes, seed)
    expected = arena.numpy().copy()
    for source, target in zip(sources, targets, strict=True):
        unit_of(expected, unit_bytes, target)[:] = unit_of(expected, unit_bytes, source).copy()
    with (
        mock.patch.object(kernels, "SCRATCH_BYTES", int(scratch_units * unit_bytes)),
        mock.patch.object(kernels, "RUN_BYTES", run_bytes),
    ):
        copy_units(
            arena,
            ORIGIN_BYTES,
            unit_bytes,
            torch.tensor(sources, dtype=torch.int64),
            torch.tensor(targets, dtype=torch.int64),
        )
    np.testing.assert_array_equal(arena.numpy(), expected)


class LargestAllocation(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    """Notes the largest storage that an operation returns and that is not `arena`'s."""

    def __init__(self, arena: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena.untyped_storage().data_ptr()
        self.byte_count = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **kwargs or {})
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() != self._arena:
            self.byte_count = max(self.byte_count, made.untyped_storage().nbytes())
        return made


@pytest.mark.requirement("A6")
@pytest.mark.parametrize(
    ("unit_bytes", "scratch"), [(2**11, SCRATCH_BYTES), (1008, 1040 * 1008), (2**12, 0), (2**20 + 16, 0)]
)
def test_a_copy_holds_no_more_beside_the_arena_than_the_budget_grants(unit_bytes: int, scratch: int) -> None:
    """Sizing charges `SCRATCH_BYTES` for moves; a move that took more would end the process when memory is shortest."""
    pair_count = 3 * (SCRATCH_BYTES // unit_bytes) // 2 + 4
    arena = torch.zeros(unit_bytes * pair_count * 2, dtype=torch.uint8)
    units = arena.view(pair_count, 2, unit_bytes)
    units[:, 0] = 7
    # No two pairs are neighbours.
    sources = torch.arange(pair_count) * 2
    with LargestAllocation(arena) as largest:
        copy_units(arena, 0, unit_bytes, sources, sources + 1)
    assert (units[:, 1] == 7).all()
    id_bytes = 8 * pair_count
    assert scratch <= largest.byte_count <= scratch + id_bytes


@pytest.mark.requirement("A6")
def test_neighbours_are_copied_without_scratch() -> None:
    """Compaction and relocation move blocks; as one copy they go at memory's speed, and take nothing beside the arena."""
    arena = torch.zeros(1024 * 16, dtype=torch.uint8)
    arena[: 1024 * 10] = torch.arange(10).repeat_interleave(1024).to(torch.uint8)
    sources = torch.arange(9, -1, -1)
    with LargestAllocation(arena) as largest:
        copy_units(arena, 0, 1024, sources, sources + 6)
    assert arena[1024 * 6 :].view(10, 1024).eq(torch.arange(10)[:, None]).all()
    assert largest.byte_count <= 8 * len(sources)


@pytest.mark.requirement("A6")
@settings(deadline=None)
@given(
    units=st.lists(st.integers(0, UNIT_COUNT - 1)),
    unit_bytes=st.sampled_from([16, 48, 112]),
    seed=st.integers(0, 2**32),
)
def test_zeroing_clears_the_named_units_and_no_other_byte(
    units: list[int], unit_bytes: int, seed: int
) -> None:
    """A byte too many is a neighbour's; a byte too few is a former tenant's NaN."""
    arena = random_arena(unit_bytes, seed)
    expected = arena.numpy().copy()
    for unit in units:
        unit_of(expected, unit_bytes, unit)[:] = 0
    zero_units(arena, ORIGIN_BYTES, unit_bytes, torch.tensor(units, dtype=torch.int64))
    np.testing.assert_array_equal(arena.numpy(), expected)


@pytest.mark.requirement("A2", "A6")
def test_unit_words_is_a_view_of_whole_units() -> None:
    """The remainder behind the last whole unit belongs to no page of the band."""
    arena = torch.zeros(ORIGIN_BYTES + 3 * 48 + 47, dtype=torch.uint8)
    words = unit_words(arena, ORIGIN_BYTES, 48)
    assert (list(words.shape), words.dtype) == ([3, 6], torch.int64)
    words[2] = -1
    assert arena.nonzero().flatten().tolist() == list(range(ORIGIN_BYTES + 96, ORIGIN_BYTES + 144))


@pytest.mark.requirement("A6", "A8")
@settings(deadline=None)
@given(
    table=st.lists(st.integers(-1, 2**31 - 1), min_size=1, max_size=6),
    data=st.data(),
)
def test_ids_are_translated_in_any_shape_and_a_masked_row_stays_masked(
    table: list[int], data: st.DataObject
) -> None:
    """A masked row that read entry −1 of the table would write another request's state."""
    ids = data.draw(st.lists(st.integers(-1, len(table) - 1), max_size=6))
    translated = translate_ids(
        torch.tensor(table, dtype=torch.int32), torch.tensor([ids, ids], dtype=torch.int64)
    )
    assert translated.dtype == torch.int64
    expected = [-1 if virtual < 0 else table[virtual] for virtual in ids]
    assert translated.tolist() == [expected, expected]


@pytest.mark.requirement("A3", "A6")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_slot_ids_are_64_bit_whatever_pages_are(dtype: torch.dtype) -> None:
    """2^31 slots are reached by 2^27 pages of 16 tokens, which an arena on one device has; tables of pages are int32."""
    pages, offsets = (torch.tensor(values, dtype=dtype) for values in ([0, 3, 2**31 - 1], [5, 0, 15]))
    slots = token_slots(pages, offsets, 16)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [5, 48, 2**35 - 1]


@st.composite
def token_writes(draw: st.DrawFn) -> tuple[DType, int, tuple[int, ...], list[int]]:
    """A plane's type, page size and shape a token, and distinct slots of its five pages."""
    page_tokens = draw(st.sampled_from([1, 2, 4, 16]))
    shape = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    slots = draw(st.lists(st.integers(0, 5 * page_tokens - 1), unique=True, max_size=12))
    return draw(st.sampled_from(DType)), page_tokens, shape, slots


@pytest.mark.requirement("A2", "A6")
@settings(deadline=None)
@given(case=token_writes(), seed=st.integers(0, 2**32))
def test_tokens_written_to_a_strided_plane_are_gathered_bit_for_bit(
    case: tuple[DType, int, tuple[int, ...], list[int]], seed: int
) -> None:
    """Pages of a plane lie a unit apart. The bytes are compared, since NaN patterns of quantised caches must survive."""
    dtype, page_tokens, shape, slots = case
    token_bytes = int(np.prod(shape, dtype=int)) * dtype.byte_width
    unit_bytes = (page_tokens * token_bytes + 15) // 16 * 16 + 32
    arena = random_arena(unit_bytes, seed)
    expected = arena.numpy().copy()
    dense = [int(np.prod(shape[axis:], dtype=int)) for axis in range(len(shape) + 1)]
    plane = arena[: arena.numel() // 4 * 4].view(torch_dtype(dtype))
    plane = plane.as_strided(
        (5, page_tokens, *shape),
        (unit_bytes // dtype.byte_width, *dense),
        (ORIGIN_BYTES + 16) // dtype.byte_width,
    )
    written = np.random.default_rng(seed + 1).integers(0, 256, (len(slots), token_bytes), np.uint8)
    values = torch.from_numpy(written.reshape(-1)).view(torch_dtype(dtype)).reshape(len(slots), *shape)

    write_tokens(plane, torch.tensor(slots, dtype=torch.int64), values)
    for place, slot in enumerate(slots):
        start = ORIGIN_BYTES + slot // page_tokens * unit_bytes + 16 + slot % page_tokens * token_bytes
        expected[start : start + token_bytes] = written[place]
    np.testing.assert_array_equal(arena.numpy(), expected)

    table = torch.tensor([slots, slots[::-1]], dtype=torch.int64)
    gathered = gather_tokens(plane, table)
    assert list(gathered.shape) == [2, len(slots), *shape]
    assert gathered.is_contiguous()
    raw = gathered.reshape(-1).view(torch.uint8).numpy().reshape(2, len(slots), token_bytes)
    np.testing.assert_array_equal(raw[0], written)
    np.testing.assert_array_equal(raw[1], written[::-1])


@pytest.mark.requirement("A6", "A8")
def test_masked_slots_write_nothing_and_read_as_zeros() -> None:
    """−1 as an index would be the last token of the last page, which is somebody's."""
    plane = torch.arange(12).view(3, 2, 2)
    write_tokens(plane, torch.tensor([-1, 2]), torch.full((2, 2), 99))
    assert plane.flatten().tolist() == [0, 1, 2, 3, 99, 99, 6, 7, 8, 9, 10, 11]
    assert gather_tokens(plane, torch.tensor([[5, -1]])).tolist() == [[[10, 11], [0, 0]]]
    assert gather_pages(plane, torch.tensor([-1, 2])).tolist() == [[[0, 0], [0, 0]], [[8, 9], [10, 11]]]


@pytest.mark.requirement("A6")
def test_a_strict_translation_masks_and_counts_ids_outside_the_table() -> None:
    """Wrong ids are counted where the host may look later, without a wait; they must not read a neighbour's table."""
    faults = torch.tensor([3])
    table = torch.tensor([7, 8], dtype=torch.int32)
    assert translate_ids(table, torch.tensor([1, 2, -1, -2, 0]), faults=faults).tolist() == [8, -1, -1, -1, 7]
    assert faults.item() == 5
