"""The CPU device does bit for bit what the NumPy device does (V1, A6), on bytes that models read through torch."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.arena import CPUDevice, KVArena, TensorDevice
from kvtide.device import Device, Event, IntArray, NumpyDevice, Stream, UnitGrid

ARENA_BYTES = 600
GRIDS = [UnitGrid(0, 48), UnitGrid(16, 32), UnitGrid(112, 80)]
TABLES = {"rows": 7, "ids:full": 5, "ids:state": 3}


def ids(*values: int) -> IntArray:
    return np.array(values, np.int64)


def cpu_device() -> CPUDevice:
    return CPUDevice(KVArena(torch.full((ARENA_BYTES,), 0xFF, dtype=torch.uint8)))


@st.composite
def moves(draw: st.DrawFn) -> tuple[UnitGrid, IntArray, IntArray]:
    """A grid and pairs in an order in which no later source is an earlier target and no target comes twice."""
    grid = draw(st.sampled_from(GRIDS))
    sources: list[int] = []
    targets: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        free = [unit for unit in range(grid.unit_count(ARENA_BYTES)) if unit not in targets]
        sources.append(draw(st.sampled_from(free)))
        targets.append(draw(st.sampled_from(free)))
    return grid, ids(*sources), ids(*targets)


@pytest.mark.requirement("V1")
def test_the_cpu_device_implements_the_whole_seam() -> None:
    """The allocator that is tested on one device is shipped on another: none may lack a method or differ in its arguments."""
    device: TensorDevice = cpu_device()
    for name, member in vars(Device).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            assert not callable(getattr(device, name))
        else:
            wanted = [parameter for parameter in inspect.signature(member).parameters if parameter != "self"]
            assert list(inspect.signature(getattr(device, name)).parameters) == wanted, name
    stream: Stream = device.schedule_stream
    event: Event = device.record_event(stream)
    assert event.stream.name == stream.name != device.forward_stream.name
    assert device.arena_bytes == device.arena.byte_count == ARENA_BYTES
    assert device.tables == {}


@pytest.mark.requirement("V1")
def test_events_are_fresh_and_reached_at_once() -> None:
    """Work is complete when its call returns; the ledger still needs one event a forward."""
    device = cpu_device()
    first, second = (device.record_event(device.forward_stream) for _ in range(2))
    assert first != second
    assert device.query_event(first)
    device.wait_event(device.schedule_stream, second)
    device.wait_on_host(second)


@pytest.mark.requirement("V1", "A6")
@settings(max_examples=150, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_any_sequence_of_work_leaves_the_numpy_devices_bytes_and_tables(
    data: st.DataObject, seed: int
) -> None:
    """What was proven of an allocator on NumPy bytes then holds on the bytes that a model reads."""
    cpu, model = cpu_device(), NumpyDevice(ARENA_BYTES)
    start = np.random.default_rng(seed).integers(0, 256, ARENA_BYTES, np.uint8)
    model.arena[:] = start
    cpu.arena.bytes.copy_(torch.from_numpy(start))
    devices: list[Device] = [cpu, model]
    mirrors = [device.create_mirrors(TABLES) for device in devices]
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["copy", "zero", "stage", "upload"])):
            case "copy":
                grid, sources, targets = data.draw(moves())
                for device in devices:
                    device.copy_units(device.schedule_stream, grid, sources, targets)
            case "zero":
                grid, units, _ = data.draw(moves())
                for device in devices:
                    device.zero_units(device.schedule_stream, grid, units)
            case "stage":
                name = data.draw(st.sampled_from(list(TABLES)))
                entry = st.tuples(st.integers(0, TABLES[name] - 1), st.integers(-1, 2**31 - 1))
                entries = data.draw(st.lists(entry, max_size=4))
                for mirror in mirrors:
                    mirror[name].stage(
                        ids(*(index for index, _ in entries)), ids(*(value for _, value in entries))
                    )
            case _:
                counts = [device.upload(device.schedule_stream) for device in devices]
                assert counts[0] == counts[1]
        np.testing.assert_array_equal(cpu.arena.bytes.numpy(), model.arena)
        for name in TABLES:
            np.testing.assert_array_equal(cpu.tables[name].numpy(), model.tables[name])


@pytest.mark.requirement("V1")
def test_ids_may_come_as_any_numpy_array() -> None:
    """Lists of pages are often reversed or slices of tables; torch takes neither a negative stride nor a read-only array."""
    device = cpu_device()
    grid = GRIDS[1]
    device.zero_units(device.schedule_stream, grid, np.arange(4)[::-1])
    pages = np.arange(8)
    pages.flags.writeable = False
    device.copy_units(device.schedule_stream, grid, pages[:4:3], pages[::-1][:2])
    units = device.arena.bytes[16 : 16 + 8 * 32].reshape(8, 32)
    assert (units == units[:, :1]).all()
    assert units[:, 0].tolist() == [0, 0, 0, 0, 255, 255, 0, 0]


@pytest.mark.requirement("V1")
@pytest.mark.parametrize(
    ("sources", "targets"), [((1, 2, 3), (6, 7)), ((1,), (6, 7)), ((1,), ()), ((), (6,))]
)
def test_lists_of_units_of_different_lengths_are_refused_with_nothing_changed(
    sources: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    """Runs of neighbours would be copied on past the shorter list."""
    device = cpu_device()
    device.arena.bytes[:] = torch.arange(ARENA_BYTES) % 251
    before = device.arena.bytes.clone()
    with pytest.raises(ValueError, match=f"cannot copy {len(sources)} sources to {len(targets)} targets"):
        device.copy_units(device.schedule_stream, GRIDS[1], ids(*sources), ids(*targets))
    assert torch.equal(device.arena.bytes, before)


@pytest.mark.requirement("V1")
@pytest.mark.parametrize("unit", [-1, 18])
def test_a_unit_outside_the_arena_is_refused_with_nothing_changed(unit: int) -> None:
    """Torch would fill unit −1 from the end: a masked row would clear another request's last page."""
    device = cpu_device()
    stream, grid = device.schedule_stream, GRIDS[1]
    device.arena.bytes[:] = torch.arange(ARENA_BYTES) % 251
    before = device.arena.bytes.clone()
    with pytest.raises(IndexError, match=r"holds \[0, 18\) from byte 16 at 32 bytes each"):
        device.zero_units(stream, grid, ids(0, unit))
    with pytest.raises(IndexError, match=r"holds \[0, 18\)"):
        device.copy_units(stream, grid, ids(0, unit), ids(2, 3))
    with pytest.raises(IndexError, match=r"holds \[0, 18\)"):
        device.copy_units(stream, grid, ids(0, 1), ids(2, unit))
    assert torch.equal(device.arena.bytes, before)


@pytest.mark.requirement("V1")
def test_tables_are_int32_at_addresses_that_no_upload_changes() -> None:
    """A captured graph reads the table that it was captured with, for as long as the storage lives."""
    device = cpu_device()
    mirrors = device.create_mirrors(TABLES)
    tables = dict(device.tables)
    addresses = {name: table.data_ptr() for name, table in tables.items()}
    assert {name: (table.dtype, len(table)) for name, table in tables.items()} == {
        name: (torch.int32, length) for name, length in TABLES.items()
    }
    for step in range(3):
        mirrors["ids:full"].stage(ids(step, 4), ids(step + 10, step + 20))
        mirrors["rows"].stage(ids(6), ids(step))
        assert device.upload(device.schedule_stream) == 3
        assert {name: table.data_ptr() for name, table in device.tables.items()} == addresses
    assert tables["ids:full"].tolist() == [10, 11, 12, 0, 22]
    assert tables["rows"].tolist() == [0, 0, 0, 0, 0, 0, 2]
    assert not tables["ids:state"].any()
    with pytest.raises(RuntimeError, match="create them all in one call"):
        device.create_mirrors({"more": 1})


@pytest.mark.requirement("A6")
def test_without_triton_the_package_works_on_a_cpu_and_says_what_the_cuda_device_needs() -> None:
    """Triton is optional: there is none for every platform, and importing it takes a second."""
    program = """
import sys
import torch
from kvtide.arena import CUDADevice, KVArena, gather_tokens, translate_ids, write_tokens
assert "triton" not in sys.modules
sys.modules["triton"] = None
plane = torch.zeros(2, 4, 3)
write_tokens(plane, torch.tensor([5]), torch.ones(1, 3))
assert gather_tokens(plane, torch.tensor([5])).eq(1).all()
assert translate_ids(torch.tensor([7]), torch.tensor([0])).tolist() == [7]
try:
    CUDADevice(KVArena.allocate(64))
except ImportError as error:
    assert "triton" in str(error), error
else:
    raise AssertionError("no error")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
