"""Triton's programs give the bits of the torch reference (A6), in Triton's interpreter or, where there is one, on the GPU.

What they work on are bytes: NaNs of every type, masked rows and the bytes beside a target must come out as they should.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.arena import kernels, torch_dtype
from kvtide.arena.copy_plan import CopySegment, copy_segments
from kvtide.plan import DType

pytest.importorskip("triton", reason="Triton is not installed: its programs are tested where it is")
from kvtide.arena import triton_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ORIGIN_BYTES = 48
UNIT_COUNT = 12


def random_bytes(count: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, np.uint8))


def int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def apart(values: torch.Tensor) -> torch.Tensor:
    """The same, not dense: every other entry of memory that holds more."""
    return torch.stack([values, torch.full_like(values, -1)], -1)[..., 0]


def raw(values: torch.Tensor) -> bytes:
    return values.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def legal_copies(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Scattered pairs in a legal order, or a block that moves over itself as a relocated float does."""
    if draw(st.booleans()):
        length = draw(st.integers(1, UNIT_COUNT - 1))
        first, target = (draw(st.integers(0, UNIT_COUNT - length)) for _ in range(2))
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


@pytest.mark.requirement("A6")
@settings(max_examples=60, deadline=None)
@given(
    copies=legal_copies(),
    unit_bytes=st.sampled_from([16, 48, 4096, 3 * 8192 + 16]),
    scratch_units=st.integers(0, 4),
    seed=st.integers(0, 2**32),
)
def test_units_are_copied_as_in_torch(
    copies: tuple[list[int], list[int]], unit_bytes: int, scratch_units: int, seed: int
) -> None:
    """Pairs run at once on a GPU. A float that moves over itself must arrive whole, whatever the scratch holds."""
    sources, targets = map(int64, copies)
    expected = random_bytes(ORIGIN_BYTES + UNIT_COUNT * unit_bytes + 13, seed)
    arena = expected.clone().to(DEVICE)
    kernels.copy_units(expected, ORIGIN_BYTES, unit_bytes, sources, targets)
    triton_kernels.copy_units(
        arena,
        ORIGIN_BYTES,
        unit_bytes,
        sources.to(DEVICE),
        targets.to(DEVICE),
        segments=copy_segments(sources.numpy(), targets.numpy(), scratch_units),
        scratch=torch.zeros(scratch_units * unit_bytes // 8 + 1, dtype=torch.int64, device=DEVICE),
    )
    assert raw(arena) == raw(expected)


@pytest.mark.requirement("A6")
@settings(max_examples=40, deadline=None)
@given(
    units=st.lists(st.integers(0, UNIT_COUNT - 1)),
    unit_bytes=st.sampled_from([16, 48, 4096, 3 * 8192 + 16]),
    seed=st.integers(0, 2**32),
)
def test_units_are_zeroed_as_in_torch(units: list[int], unit_bytes: int, seed: int) -> None:
    """A byte too many is a neighbour's; a byte too few is a former tenant's NaN."""
    expected = random_bytes(ORIGIN_BYTES + UNIT_COUNT * unit_bytes + 13, seed)
    arena = expected.clone().to(DEVICE)
    kernels.zero_units(expected, ORIGIN_BYTES, unit_bytes, int64(units))
    triton_kernels.zero_units(arena, ORIGIN_BYTES, unit_bytes, int64(units).to(DEVICE))
    assert raw(arena) == raw(expected)


@pytest.mark.requirement("A6", "A8")
@settings(max_examples=60, deadline=None)
@given(
    table=st.lists(st.integers(-1, 2**31 - 1), min_size=1, max_size=6),
    strict=st.booleans(),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    is_dense=st.booleans(),
    data=st.data(),
)
def test_ids_are_translated_as_in_torch(
    table: list[int], strict: bool, dtype: torch.dtype, is_dense: bool, data: st.DataObject
) -> None:
    """Masked rows stay masked; strict, ids outside the table, whatever memory lies there, are masked and counted.

    Ids may be rows of a mirror, int32 and apart; what they become is int64 all the same, as attention kernels are told.
    """
    beyond = [2**31, 2**40, -(2**40)] if dtype == torch.int64 else [2**31 - 1, -(2**31)]
    wrong = st.sampled_from([-2, len(table), *beyond])
    right = st.integers(-1, len(table) - 1)
    values = data.draw(st.lists(st.one_of(right, wrong) if strict else right, max_size=6))
    repeats = data.draw(st.sampled_from([1, 2, 700]))
    ids = int64(values * repeats).to(dtype).reshape(2 if len(values) * repeats % 2 == 0 else 1, -1)
    outcomes = []
    for module, device in ((kernels, "cpu"), (triton_kernels, DEVICE)):
        faults = torch.zeros(1, dtype=torch.int64, device=device)
        translated = module.translate_ids(
            torch.tensor(table, dtype=torch.int32, device=device),
            ids.to(device) if is_dense else apart(ids.to(device)),
            faults=faults if strict else None,
        )
        assert translated.dtype == torch.int64
        outcomes.append((translated.tolist(), faults.item()))
    assert outcomes[0] == outcomes[1]
    inside = [-1 <= value < len(table) for value in values]
    assert outcomes[0][1] == repeats * inside.count(False)
    plain = [table[value] if ok and value >= 0 else -1 for value, ok in zip(values, inside, strict=True)]
    assert torch.tensor(outcomes[0][0]).flatten().tolist() == plain * repeats


@st.composite
def planes(draw: st.DrawFn) -> tuple[DType, tuple[int, ...], list[int], int]:
    """Type, shape `[page_count, page_tokens, …]`, page and token strides in elements, and first element of a plane."""
    dtype = draw(st.sampled_from(DType))
    page_tokens = draw(st.sampled_from([1, 2, 4, 16]))
    entry = tuple(draw(st.lists(st.integers(1, 9), max_size=2)))
    token = math.prod(entry) + draw(st.sampled_from([0, 0, 1, 8]))
    page = page_tokens * token + draw(st.integers(0, 3)) * 16
    return dtype, (5, page_tokens, *entry), [page, token], draw(st.integers(0, 2)) * 16


def view(
    region: torch.Tensor, dtype: DType, shape: tuple[int, ...], strides: list[int], first: int
) -> torch.Tensor:
    entry = shape[2:]
    dense = [math.prod(entry[axis + 1 :]) for axis in range(len(entry))]
    return region.view(torch_dtype(dtype)).as_strided(shape, (*strides, *dense), first)


@pytest.mark.requirement("A2", "A6")
@settings(max_examples=100, deadline=None)
@given(plane=planes(), is_dense=st.booleans(), data=st.data(), seed=st.integers(0, 2**32))
def test_tokens_are_written_and_gathered_as_in_torch(
    plane: tuple[DType, tuple[int, ...], list[int], int], is_dense: bool, data: st.DataObject, seed: int
) -> None:
    """Every type and width of entry, dense or not, at any alignment; a masked slot writes nothing and reads as zeros.

    Slots and pages may lie apart too, say as a column of a table.
    """
    dtype, shape, strides, first = plane
    slot = st.integers(0, shape[0] * shape[1] - 1)
    slots = int64(data.draw(st.lists(slot, unique=True, max_size=12)))
    slots[data.draw(st.lists(st.integers(0, len(slots) - 1), max_size=3)) if len(slots) else []] = -1
    asked = int64(data.draw(st.lists(st.one_of(slot, st.just(-1)), min_size=6, max_size=6))).view(2, 3)
    pages = int64(data.draw(st.lists(st.integers(-1, shape[0] - 1), max_size=4)))
    region = random_bytes((first + shape[0] * strides[0] + 64) * 8, seed)
    entry_bytes = math.prod(shape[2:]) * dtype.byte_width
    values = random_bytes(12 * entry_bytes, seed + 1).view(torch_dtype(dtype))
    values = values.reshape(12, *shape[2:])[: len(slots)]
    page_is_dense = strides[1] == math.prod(shape[2:])
    outcomes = []
    for module, device in ((kernels, "cpu"), (triton_kernels, DEVICE)):
        wanted = [slots, asked, *([pages] if page_is_dense else [])]
        there = [each.to(device) if is_dense else apart(each.to(device)) for each in wanted]
        plane_there = view(region.clone().to(device), dtype, shape, strides, first)
        outcomes.append(_used(module, plane_there, there[0], values.to(device), there[1:]))
    assert outcomes[0] == outcomes[1]


def _used(
    module: ModuleType,
    plane: torch.Tensor,
    slots: torch.Tensor,
    values: torch.Tensor,
    asked: list[torch.Tensor],
) -> list[object]:
    """Every byte of the plane's region after a write, and what is gathered then."""
    module.write_tokens(plane, slots, values)
    gathered = [module.gather_tokens(plane, asked[0])]
    gathered += [module.gather_pages(plane, pages) for pages in asked[1:]]
    region = plane.as_strided((plane.untyped_storage().nbytes() // plane.element_size(),), (1,), 0)
    assert all(each.is_contiguous() for each in gathered)
    return [raw(region), *((raw(each), each.shape, each.dtype) for each in gathered)]


@pytest.mark.requirement("A3", "A6")
@pytest.mark.skipif(DEVICE == "cpu", reason="in the interpreter a launch passes over the whole region")
def test_rows_past_2_33_bytes_are_reached() -> None:
    """Offsets in a program are 64-bit."""
    unit_bytes, unit_count = 1 << 20, 8200
    arena = torch.zeros(unit_bytes * unit_count, dtype=torch.uint8, device=DEVICE)
    arena[-unit_bytes:] = 7
    scratch = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    pair = np.array([unit_count - 1]), np.array([unit_count - 2])
    ids = [torch.from_numpy(each).to(DEVICE) for each in pair]
    triton_kernels.copy_units(arena, 0, unit_bytes, *ids, segments=copy_segments(*pair, 0), scratch=scratch)
    assert arena.count_nonzero() == 2 * unit_bytes


def test_an_entry_that_is_not_dense_is_refused() -> None:
    """A row of words would take bytes that are not the entry's."""
    plane = torch.zeros(3, 2, 4, 6, device=DEVICE)[..., :5]
    with pytest.raises(ValueError, match="must be dense"):
        triton_kernels.gather_tokens(plane, torch.zeros(1, dtype=torch.int64, device=DEVICE))


@pytest.mark.requirement("A6")
@pytest.mark.parametrize("first", [1, 2, 4, 8, 16])
def test_words_are_aligned_wherever_a_plane_starts(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """A GPU faults on a word that is not; the interpreter would not notice."""
    seen = []

    class Watched:
        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(source: Any, target: Any, *sizes: Any, **compiled: Any) -> None:
                word = source.dtype.primitive_bitwidth // 8
                assert source.data_ptr() % word == target.data_ptr() % word == 0
                seen.append(word * compiled["GRAIN"])

            return launch

    monkeypatch.setattr(triton_kernels.programs, "copy_rows", Watched())
    plane = torch.zeros(1024, dtype=torch.uint8, device=DEVICE)[first:].as_strided((3, 2, 32), (96, 32, 1))
    triton_kernels.gather_tokens(plane, torch.zeros(3, dtype=torch.int64, device=DEVICE))
    assert seen == [first]


@pytest.mark.requirement("A6")
def test_programs_are_launched_on_the_gpu_that_holds_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on torch's current GPU; a second GPU's tensors would be addressed from the first."""
    around: list[torch.Tensor] = []
    launched = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        around.append(tensor)
        yield
        around.pop()

    class Watched:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(*args: Any, **compiled: Any) -> None:
                (beside,) = around
                assert beside.data_ptr() in [arg.data_ptr() for arg in args if hasattr(arg, "data_ptr")]
                launched.append(self._name)

            return launch

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for name in ("copy_rows", "zero_rows", "translate"):
        monkeypatch.setattr(triton_kernels.programs, name, Watched(name))
    arena, one = torch.zeros(96, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    triton_kernels.zero_units(arena, 0, 48, one)
    triton_kernels.copy_units(
        arena, 0, 48, one, one + 1, segments=[CopySegment(0, 1, False)], scratch=torch.zeros(0)
    )
    triton_kernels.translate_ids(one.to(torch.int32), one)
    plane = arena.view(2, 4, 12)
    triton_kernels.write_tokens(plane, one, plane[0, :1])
    triton_kernels.gather_pages(plane, one)
    assert launched == ["zero_rows", "copy_rows", "translate", "copy_rows", "copy_rows"]


def test_values_of_another_shape_are_refused() -> None:
    """A program would read behind them."""
    plane, slots = torch.zeros(3, 2, 4, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"values of shape \[1, 3\]: these slots take \[1, 4\]"):
        triton_kernels.write_tokens(plane, slots, torch.zeros(1, 3, device=DEVICE))


@pytest.mark.requirement("A7")
def test_prewarming_touches_no_byte() -> None:
    """It happens over an arena whose sinks are zeroed already, and may come again."""
    arena = random_bytes(96 * 3, 5).to(DEVICE)
    before = raw(arena)
    ids = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    triton_kernels.prewarm_units(arena, 96, ids, torch.zeros(12, dtype=torch.int64, device=DEVICE))
    table = torch.full((4,), 9, dtype=torch.int32, device=DEVICE)
    triton_kernels.prewarm_table(table, ids, torch.zeros(2, dtype=torch.int32, device=DEVICE))
    assert raw(arena) == before
    assert table.tolist() == [9] * 4
