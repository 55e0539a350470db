"""The NumPy device does what the seam promises (V1), so that an allocator tested on it behaves alike on any other."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.device import Device, Event, IntArray, Mirror, NumpyDevice, Stream, UnitGrid

ARENA_BYTES = 48 + 4 * 32 + 5
GRID = UnitGrid(origin_bytes=48, unit_bytes=32)
"""Four units over `ARENA_BYTES`: 48 bytes before them and 5 behind belong to nobody."""


def ids(*values: int) -> IntArray:
    return np.array(values, np.int64)


def filled_device() -> NumpyDevice:
    """A device whose arena holds a different value in each unit, and 255 outside them."""
    device = NumpyDevice(ARENA_BYTES)
    for unit in range(4):
        device.units(GRID)[unit] = unit + 1
    return device


def held(device: NumpyDevice) -> list[int]:
    """The value of each unit; fails where a unit is not of one value, or a byte outside the units has changed."""
    units = device.arena[48:176].reshape(4, 32)
    assert (units == units[:, :1]).all()
    assert (device.arena[:48] == 255).all()
    assert (device.arena[176:] == 255).all()
    return [int(value) for value in units[:, 0]]


@st.composite
def safe_copies(draw: st.DrawFn, unit_count: int) -> tuple[list[int], list[int]]:
    """Sources and targets in an order in which no later source is an earlier target and no target comes twice."""
    sources: list[int] = []
    targets: list[int] = []
    for _ in range(draw(st.integers(0, unit_count - 1))):
        free = [unit for unit in range(unit_count) if unit not in targets]
        sources.append(draw(st.sampled_from(free)))
        targets.append(draw(st.sampled_from(free)))
    return sources, targets


@pytest.mark.requirement("V1")
def test_the_numpy_device_implements_the_whole_seam() -> None:
    """A method that is missing or takes other arguments would show first in the middle of a forward."""
    device: Device = NumpyDevice(16)
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


@pytest.mark.requirement("V1")
def test_every_recorded_event_is_a_fresh_one() -> None:
    """Ledgers tell forwards apart by their events: two that compared equal would be one key of a dict."""
    device = NumpyDevice(16)
    first, second = (device.record_event(device.forward_stream) for _ in range(2))
    assert first != second
    assert len({first, second}) == 2


@pytest.mark.requirement("V1")
def test_an_event_is_reached_when_it_is_recorded() -> None:
    """Work is done when the call that queues it returns, so every wait is over at once."""
    device = NumpyDevice(16)
    event = device.record_event(device.forward_stream)
    assert device.query_event(event)
    device.wait_event(device.schedule_stream, event)
    device.wait_on_host(event)


@pytest.mark.requirement("V1")
def test_the_arena_starts_as_nan() -> None:
    """A page that is read before it was zeroed or written shows itself in any float type."""
    assert np.isnan(NumpyDevice(64).arena.view(np.float32)).all()
    assert np.isnan(NumpyDevice(64).arena.view(np.float16)).all()


@pytest.mark.requirement("V1")
def test_copies_read_what_stood_there_before_the_batch_began() -> None:
    """A unit may be a source first and a target later: a chain of moves shifts every unit by one."""
    device = filled_device()
    device.copy_units(device.schedule_stream, GRID, ids(2, 1, 0), ids(3, 2, 1))
    assert held(device) == [1, 1, 2, 3]
    device.copy_units(device.schedule_stream, GRID, ids(1, 2, 3), ids(0, 1, 2))
    assert held(device) == [1, 2, 3, 3]


@pytest.mark.requirement("V1")
@settings(deadline=None)
@given(copies=safe_copies(4))
def test_copies_in_a_safe_order_equal_copies_one_by_one(copies: tuple[list[int], list[int]]) -> None:
    """What the caller's order promises: a device may copy in any batches, the outcome is that of one after another."""
    sources, targets = copies
    device = filled_device()
    device.copy_units(device.schedule_stream, GRID, ids(*sources), ids(*targets))
    expected = [1, 2, 3, 4]
    for source, target in zip(sources, targets, strict=True):
        expected[target] = expected[source]
    assert held(device) == expected


@pytest.mark.requirement("V1")
def test_zeroing_clears_whole_units_and_nothing_beside_them() -> None:
    """One byte too many is a neighbour's data; one too few is a former tenant's."""
    device = filled_device()
    device.zero_units(device.schedule_stream, GRID, ids(3, 1))
    assert held(device) == [1, 0, 3, 0]


@pytest.mark.requirement("V1")
@pytest.mark.parametrize("byte_work", [True, False])
@pytest.mark.parametrize(("sources", "targets"), [((1,), (2, 3)), ((1, 2), (3,)), ((), (2,)), ((1,), ())])
def test_lists_of_units_of_different_lengths_are_refused_with_nothing_changed(
    byte_work: bool, sources: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    """One source would be spread over many targets, and a capacity run without bytes would not even notice."""
    device = NumpyDevice(ARENA_BYTES, byte_work=byte_work)
    device.arena[:] = np.arange(len(device.arena))
    before = device.arena.copy()
    with pytest.raises(ValueError, match=f"cannot copy {len(sources)} sources to {len(targets)} targets"):
        device.copy_units(device.schedule_stream, GRID, ids(*sources), ids(*targets))
    np.testing.assert_array_equal(device.arena, before)


@pytest.mark.requirement("V1")
@pytest.mark.parametrize("byte_work", [True, False])
@pytest.mark.parametrize("unit", [-1, 4])
def test_a_unit_outside_the_arena_is_refused_with_nothing_changed(unit: int, byte_work: bool) -> None:
    """A masked row, −1, would wrap to the arena's last unit, and a capacity run without bytes would not even notice."""
    device = NumpyDevice(ARENA_BYTES, byte_work=byte_work)
    stream = device.schedule_stream
    found = rf"units run from {min(0, unit)} to {max(0, unit)}, an arena of 181 bytes holds \[0, 4\) from byte 48 at 32 bytes each"
    with pytest.raises(IndexError, match=found):
        device.zero_units(stream, GRID, ids(unit, 0))
    with pytest.raises(IndexError, match=found):
        device.copy_units(stream, GRID, ids(unit, 0), ids(1, 2))
    with pytest.raises(IndexError, match=found):
        device.copy_units(stream, GRID, ids(1, 2), ids(0, unit))
    assert (device.arena == 255).all()


@pytest.mark.requirement("V1")
def test_without_byte_work_an_arena_of_any_size_costs_no_memory() -> None:
    """Capacity questions about a 141 GB device are asked on a laptop; mirrors work as ever."""
    device = NumpyDevice(2**47, byte_work=False)
    far = UnitGrid(origin_bytes=16, unit_bytes=2**20)
    last = ids(far.unit_count(2**47) - 1)
    device.copy_units(device.schedule_stream, far, ids(0), last)
    device.zero_units(device.schedule_stream, far, last)
    device.create_mirrors({"table": 3})["table"].stage(ids(1), ids(7))
    device.upload(device.schedule_stream)
    assert (device.arena_bytes, device.arena.nbytes) == (2**47, 0)
    assert device.tables["table"].tolist() == [0, 7, 0]


# --- mirrors ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("V1")
def test_staged_values_land_with_the_next_upload_and_not_before() -> None:
    """A running forward reads the mirrors; only the upload, which the schedule orders, may change them."""
    device = NumpyDevice(16)
    mirrors = device.create_mirrors({"rows": 4, "ids:full": 3})
    mirrors["ids:full"].stage(ids(0, 2), ids(5, 6))
    assert not device.tables["ids:full"].any()
    assert device.upload(device.schedule_stream) == 2
    assert device.tables["ids:full"].tolist() == [5, 0, 6]
    assert device.tables["rows"].tolist() == [0, 0, 0, 0]
    assert device.upload(device.schedule_stream) == 0


@pytest.mark.requirement("V1")
def test_tables_are_int32_windows_of_one_flat_buffer_and_stay_where_they_are() -> None:
    """One upload a step writes every table; a graph that was captured over a table finds it for ever."""
    device = NumpyDevice(16)
    mirrors = device.create_mirrors({"a": 2, "b": 3})
    assert [(mirror.length, device.tables[name].dtype) for name, mirror in mirrors.items()] == [
        (2, np.dtype(np.int32)),
        (3, np.dtype(np.int32)),
    ]
    addresses = {name: table.ctypes.data for name, table in device.tables.items()}
    assert addresses["b"] == addresses["a"] + 2 * 4
    mirrors["b"].stage(ids(2), ids(9))
    device.upload(device.schedule_stream)
    assert {name: table.ctypes.data for name, table in device.tables.items()} == addresses


@pytest.mark.requirement("V1")
def test_the_last_value_staged_for_an_entry_wins() -> None:
    """A page that is freed and taken again within one iteration is staged twice; kernels must read the second."""
    device = NumpyDevice(16)
    mirror = device.create_mirrors({"table": 4})["table"]
    mirror.stage(ids(1, 1, 3), ids(10, 11, 12))
    mirror.stage(ids(3), ids(13))
    assert device.upload(device.schedule_stream) == 2
    assert device.tables["table"].tolist() == [0, 11, 0, 13]


@pytest.mark.requirement("V1")
@settings(deadline=None)
@given(
    notes=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 2**31 - 1)), max_size=6),
            st.booleans(),
        )
    )
)
def test_any_notes_and_uploads_leave_what_plain_assignment_would(
    notes: list[tuple[str, list[tuple[int, int]], bool]],
) -> None:
    """The dumbest model of a mirror: a list, assigned at once, looked at after an upload."""
    device = NumpyDevice(16)
    mirrors: dict[str, Mirror] = device.create_mirrors(dict.fromkeys("abc", 5))
    model = {name: [0] * 5 for name in "abc"}
    for name, entries, upload in notes:
        indices, values = (
            ids(*(entry[0] for entry in entries)),
            np.array([entry[1] for entry in entries], np.int64),
        )
        mirrors[name].stage(indices, values)
        indices[:], values[:] = 0, 99  # The caller may go on using its arrays.
        for index, value in entries:
            model[name][index] = value
        if upload:
            device.upload(device.schedule_stream)
            assert {table: device.tables[table].tolist() for table in "abc"} == model
    device.upload(device.schedule_stream)
    assert {table: device.tables[table].tolist() for table in "abc"} == model


@pytest.mark.requirement("V1")
@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_outside_its_table_is_refused(index: int) -> None:
    """In the flat buffer it is an entry of the neighbouring table: a page mapped for the wrong request."""
    device = NumpyDevice(16)
    mirrors = device.create_mirrors({"a": 2, "b": 3, "c": 2})
    with pytest.raises(IndexError, match=r"of a table with 3 entries"):
        mirrors["b"].stage(ids(0, index), ids(1, 1))
    assert device.upload(device.schedule_stream) == 0


@pytest.mark.requirement("V1")
@pytest.mark.parametrize(("indices", "values"), [((0, 1), (5,)), ((), (5,)), ((0,), ())])
def test_lists_of_different_lengths_are_refused(indices: tuple[int, ...], values: tuple[int, ...]) -> None:
    """One missing value would shift every value staged after it."""
    device = NumpyDevice(16)
    mirror = device.create_mirrors({"a": 2})["a"]
    with pytest.raises(ValueError, match=rf"cannot stage {len(values)} values at {len(indices)} indices"):
        mirror.stage(ids(*indices), ids(*values))


@pytest.mark.requirement("V1")
def test_mirrors_are_created_once() -> None:
    """A second set would leave the holders of the first writing where nobody reads."""
    device = NumpyDevice(16)
    device.create_mirrors({"a": 2})
    with pytest.raises(RuntimeError, match="create them all in one call"):
        device.create_mirrors({"b": 2})
