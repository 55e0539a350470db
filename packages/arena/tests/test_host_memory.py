"""Copies between the arena and host memory (V1, H1, H2), on the CPU device and, over a stand-in for a GPU, on the CUDA device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.arena import CPUDevice, HostMemory, KVArena, TensorDevice
from kvtide.device import IntArray, UnitGrid

ARENA_BYTES = 600
GRIDS = [UnitGrid(0, 48), UnitGrid(16, 32), UnitGrid(112, 80)]


def arena(seed: int) -> KVArena:
    return KVArena(torch.from_numpy(np.random.default_rng(seed).integers(0, 256, ARENA_BYTES, np.uint8)))


@st.composite
def some_units(draw: st.DrawFn) -> tuple[UnitGrid, IntArray]:
    """Any units of a grid, each once, in any order."""
    grid = draw(st.sampled_from(GRIDS))
    every = st.integers(0, grid.unit_count(ARENA_BYTES) - 1)
    return grid, np.array(draw(st.lists(every, unique=True)), np.int64)


def check_units_go_and_come_back(
    device: TensorDevice, grid: UnitGrid, units: IntArray, first_byte: int
) -> None:
    """Byte by byte, and nothing beside them changes."""
    before = device.arena.bytes.clone()
    size = len(units) * grid.unit_bytes
    memory = device.allocate_host(first_byte + size + 5)
    memory.bytes.fill_(7)
    device.copy_to_host(device.copy_stream, grid, units, memory, first_byte)
    kept = [
        before[grid.origin_bytes + unit * grid.unit_bytes :][: grid.unit_bytes] for unit in units.tolist()
    ]
    expected = torch.full_like(memory.bytes, 7)
    expected[first_byte : first_byte + size] = torch.cat([torch.empty(0, dtype=torch.uint8), *kept])
    assert torch.equal(memory.bytes, expected)
    assert torch.equal(device.arena.bytes, before)
    device.arena.bytes.fill_(9)
    device.copy_from_host(device.copy_stream, memory, first_byte, grid, units)
    expected = torch.full_like(before, 9)
    for unit in units.tolist():
        span = slice(
            grid.origin_bytes + unit * grid.unit_bytes, grid.origin_bytes + (unit + 1) * grid.unit_bytes
        )
        expected[span] = before[span]
    assert torch.equal(device.arena.bytes, expected)


@pytest.mark.requirement("V1", "H1", "H2")
@settings(max_examples=60, deadline=None)
@given(units=some_units(), seed=st.integers(0, 9), first_byte=st.integers(0, 40))
def test_units_come_back_as_they_were(units: tuple[UnitGrid, IntArray], seed: int, first_byte: int) -> None:
    """A backup that is off by one unit is another request's text."""
    check_units_go_and_come_back(CPUDevice(arena(seed)), *units, first_byte)


@pytest.mark.requirement("V1")
@pytest.mark.parametrize(("units", "first_byte"), [([12], 0), ([-1], 0), ([0, 1], 1), ([0], 49), ([0], -1)])
def test_what_does_not_lie_in_the_arena_or_in_host_memory_is_refused(
    units: list[int], first_byte: int
) -> None:
    """On a GPU it would be a copy over somebody else's memory."""
    device = CPUDevice(arena(0))
    before, memory = device.arena.bytes.clone(), HostMemory(torch.full((96,), 7, dtype=torch.uint8))
    ids = np.array(units, np.int64)
    with pytest.raises(IndexError):
        device.copy_to_host(device.copy_stream, GRIDS[0], ids, memory, first_byte)
    with pytest.raises(IndexError):
        device.copy_from_host(device.copy_stream, memory, first_byte, GRIDS[0], ids)
    assert torch.equal(device.arena.bytes, before)
    assert (memory.bytes == 7).all()


@pytest.mark.requirement("V1")
def test_copies_have_a_stream_of_their_own() -> None:
    """On the forward stream a backup would hold up the next forward, on the schedule stream the next move."""
    device = CPUDevice(arena(0))
    names = {stream.name for stream in (device.copy_stream, device.forward_stream, device.schedule_stream)}
    assert len(names) == 3
