"""The CUDA device (V1, K4, A7) on a stand-in for a GPU's streams: Triton's interpreter works on host bytes, at once.

The stand-in says on which stream work is queued, and events are reached when the test says so. What only a GPU can show, that
streams keep the order they are told, is shown on one by `tools/gpu_check.sh`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.arena import CUDADevice, KVArena, TensorDevice
from kvtide.arena import cuda_device as cuda_device_module
from kvtide.arena.pinned_staging import StagingBuffer
from kvtide.device import Device, IntArray, NumpyDevice, UnitGrid

from .test_host_memory import check_units_go_and_come_back, some_units

pytest.importorskip("triton", reason="Triton is not installed: the CUDA device needs it")
from kvtide.arena import triton_kernels

ARENA_BYTES = 600
GRIDS = [UnitGrid(0, 48), UnitGrid(16, 32), UnitGrid(112, 80)]
TABLES = {"rows": 7, "ids:full": 5, "ids:state": 3}

if torch.cuda.is_available():
    pytest.skip("the stand-in would hide the GPU that is here", allow_module_level=True)


@attrs.define(eq=False)
class HostEvent:
    """Reached when the test says so."""

    is_reached: bool = False

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.is_reached = True


class HostStreams:
    """What is queued, on which stream, in order; stands in for `torch.cuda`."""

    def __init__(self) -> None:
        self.current: HostStream | None = None
        self.log: list[tuple[str, HostStream | None]] = []
        self.events: list[HostEvent] = []
        self.synchronized = 0
        self.held: set[tuple[int, HostStream]] = set()
        self.capturing: HostStream | None = None

    @contextmanager
    def stream(self, stream: HostStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self, device: torch.device) -> None:
        self.synchronized += 1

    def count(self, what: str) -> int:
        return sum(entry == what for entry, _ in self.log)


class HostStream:
    def __init__(self, host: HostStreams) -> None:
        self.host = host

    def record_event(self) -> HostEvent:
        self.host.log.append(("event", self))
        self.host.events.append(HostEvent())
        return self.host.events[-1]

    def wait_event(self, event: HostEvent) -> None:
        self.host.log.append(("wait", self))

    def wait_stream(self, other: HostStream) -> None:
        self.host.log.append(("wait for stream", self))


class HostCUDADevice(CUDADevice):
    """Its staging is not pinned: only CUDA can do that."""

    def _create_pinned(self, byte_count: int) -> torch.Tensor:
        return torch.empty(byte_count, dtype=torch.uint8)


@pytest.fixture(scope="module")
def host() -> Iterator[HostStreams]:
    """Streams that note launches, copies, events and waits."""
    host = HostStreams()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda device: HostStream(host))
        patch.setattr(torch.cuda, "stream", host.stream)
        patch.setattr(torch.cuda, "synchronize", host.synchronize)
        patch.setattr(
            torch.cuda,
            "is_current_stream_capturing",
            lambda: host.capturing is not None and host.current is host.capturing,
        )
        patch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: host.held.add((tensor.data_ptr(), stream))
        )
        for owner, name, what in (
            (triton_kernels, "_copy_rows", "launch"),
            (triton_kernels, "_zero_rows", "launch"),
            (StagingBuffer, "send_to", "copy"),
        ):
            patch.setattr(owner, name, noted(host, what, getattr(owner, name)))
        yield host


def noted(host: HostStreams, what: str, function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        host.log.append((what, host.current))
        return function(*args, **kwargs)

    return call


def ids(*values: int) -> IntArray:
    return np.array(values, np.int64)


def cuda_device(arena_bytes: int = ARENA_BYTES, scratch_bytes: int = 96) -> HostCUDADevice:
    return HostCUDADevice(
        KVArena(torch.full((arena_bytes,), 0xFF, dtype=torch.uint8)),
        scratch_bytes=cuda_device_module.LANDING_BYTES + scratch_bytes,
    )


@st.composite
def moves(draw: st.DrawFn) -> tuple[UnitGrid, IntArray, IntArray]:
    """A grid and pairs in a legal order."""
    grid = draw(st.sampled_from(GRIDS))
    sources: list[int] = []
    targets: list[int] = []
    for _ in range(draw(st.integers(0, 5))):
        free = [unit for unit in range(grid.unit_count(ARENA_BYTES)) if unit not in targets]
        sources.append(draw(st.sampled_from(free)))
        targets.append(draw(st.sampled_from(free)))
    return grid, ids(*sources), ids(*targets)


@pytest.mark.requirement("V1")
def test_the_cuda_device_implements_the_whole_seam(host: HostStreams) -> None:
    """The allocator that is tested on one device is shipped on another: none may lack a method or differ in its arguments."""
    device: TensorDevice = cuda_device()
    for name, member in [*vars(Device).items(), *vars(TensorDevice).items()]:
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            assert not callable(getattr(device, name))
        elif callable(member):
            wanted = [parameter for parameter in inspect.signature(member).parameters if parameter != "self"]
            found = inspect.signature(getattr(device, name)).parameters.values()
            assert [each.name for each in found if each.default is inspect.Parameter.empty] == wanted, name


@pytest.mark.requirement("V1", "A6", "K4")
@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32), landing_bytes=st.sampled_from([64, 1 << 20]))
def test_any_sequence_of_work_leaves_the_numpy_devices_bytes_and_tables(
    host: HostStreams, data: st.DataObject, seed: int, landing_bytes: int
) -> None:
    """What was proven of an allocator on NumPy bytes holds here, whichever staging buffers are free again, and in pieces too
    where the ids of a call exceed the landing.
    """
    with mock.patch.object(cuda_device_module, "LANDING_BYTES", landing_bytes):
        run_any_sequence(host, data, seed)


def run_any_sequence(host: HostStreams, data: st.DataObject, seed: int) -> None:
    host.events.clear()
    cuda, model = cuda_device(), NumpyDevice(ARENA_BYTES)
    start = np.random.default_rng(seed).integers(0, 256, ARENA_BYTES, np.uint8)
    model.arena[:] = start
    cuda.arena.bytes.copy_(torch.from_numpy(start))
    devices: list[Device] = [cuda, model]
    mirrors = [device.create_mirrors(TABLES) for device in devices]
    cuda.prewarm(GRIDS)
    for _ in range(data.draw(st.integers(1, 12))):
        for event in host.events:
            event.is_reached = event.is_reached or data.draw(st.booleans())
        host.events = [event for event in host.events if not event.is_reached]
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
        np.testing.assert_array_equal(cuda.arena.bytes.numpy(), model.arena)
        for name in TABLES:
            np.testing.assert_array_equal(cuda.tables[name].numpy(), model.tables[name])


@pytest.mark.requirement("V1", "H1", "H2")
@settings(max_examples=60, deadline=None)
@given(units=some_units(), first_byte=st.integers(0, 40))
def test_units_go_to_the_host_and_come_back_on_the_copy_stream(
    host: HostStreams, units: tuple[UnitGrid, IntArray], first_byte: int
) -> None:
    """Each run of neighbours is one copy, whatever order the units are named in; no memory of the GPU is needed, and no launch."""
    device, launched = cuda_device(), host.count("launch")
    device.arena.bytes.copy_(torch.arange(ARENA_BYTES) % 251)
    check_units_go_and_come_back(device, *units, first_byte)
    assert host.count("launch") == launched
    runs = list(cuda_device_module._unit_runs(units[1]))
    assert np.array_equal(np.concatenate([ids(), *(np.arange(one, one + n) for _, one, n in runs)]), units[1])
    assert len(runs) == 1 + int((np.diff(units[1]) != 1).sum()) if len(units[1]) else not runs


@pytest.mark.requirement("V1", "H1")
def test_copies_to_the_host_are_queued_on_the_stream_that_they_are_given(host: HostStreams) -> None:
    """On torch's current one they would read what a forward is about to write."""
    device, streams = cuda_device(), []
    memory = device.allocate_host(96)

    def note(tensor: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        streams.append(host.current)
        assert non_blocking, "the host waits"
        return tensor

    with mock.patch.object(torch.Tensor, "copy_", note):
        device.copy_to_host(device.copy_stream, GRIDS[0], ids(1), memory, 0)
        device.copy_from_host(device.copy_stream, memory, 0, GRIDS[0], ids(1))
    device.queue_work(device.forward_stream, lambda: streams.append(host.current))
    assert streams == [
        device.copy_stream.torch_stream,
        device.copy_stream.torch_stream,
        device.forward_stream.torch_stream,
    ]


@pytest.mark.requirement("V1")
@pytest.mark.parametrize(
    ("sources", "targets"), [((1, 2, 3), (6, 7)), ((1,), (6, 7)), ((1,), ()), ((), (6,))]
)
def test_lists_of_units_of_different_lengths_are_refused_with_nothing_queued(
    host: HostStreams, sources: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    """The program would take the ids that are missing from what an earlier call left, and write over a stranger's page."""
    device = cuda_device()
    device.zero_units(device.schedule_stream, GRIDS[0], ids(*range(8)))
    host.log.clear()
    with pytest.raises(ValueError, match=f"cannot copy {len(sources)} sources to {len(targets)} targets"):
        device.copy_units(device.schedule_stream, GRIDS[0], ids(*sources), ids(*targets))
    with pytest.raises(IndexError, match="units run from 12 to 12"):
        device.copy_units(device.schedule_stream, GRIDS[0], ids(1), ids(12))
    assert not host.log


@pytest.mark.requirement("V1")
def test_a_list_that_cannot_run_is_refused_before_any_of_it_runs(host: HostStreams) -> None:
    """A caller that gives its pairs in a wrong order finds every page where it was."""
    device = cuda_device(scratch_bytes=0)
    host.log.clear()
    with pytest.raises(ValueError, match="pair 1 writes unit 2, which a later pair reads"):
        device.copy_units(device.schedule_stream, GRIDS[0], ids(5, 1, 2), ids(6, 2, 3))
    assert not host.log


@pytest.mark.requirement("V1")
def test_launches_and_copies_do_not_grow_with_the_batch(host: HostStreams) -> None:
    """An iteration uploads every table in one copy and one launch; so is a zeroing, and a move of any number of pages."""
    device = cuda_device(1 << 16)
    mirrors = device.create_mirrors({"rows": 500, "ids": 500})
    grid = UnitGrid(0, 64)

    def counts(batch: int) -> tuple[int, int]:
        host.log.clear()
        device.zero_units(device.schedule_stream, grid, np.arange(batch))
        device.copy_units(device.schedule_stream, grid, np.arange(batch) + 500, np.arange(batch))
        for mirror in mirrors.values():
            for part in np.array_split(np.arange(batch), min(batch, 5)):
                mirror.stage(part, part)
        assert device.upload(device.schedule_stream) == 2 * batch
        sent = device.send(device.forward_stream, [np.arange(batch), np.arange(2 * batch).reshape(2, -1)])
        assert [each.shape for each in sent] == [(batch,), (2, batch)]
        assert sent[1].flatten().tolist() == list(range(2 * batch))
        return host.count("launch"), host.count("copy")

    assert counts(1) == counts(400) == (3, 4)


@pytest.mark.requirement("V1")
def test_work_is_queued_on_the_stream_it_is_given_with_its_event_behind(host: HostStreams) -> None:
    """Work on another stream is ordered with nothing; an event before its work lets staging be filled under a copy."""
    device = cuda_device()
    mirrors = device.create_mirrors(TABLES)
    for stream in (device.schedule_stream, device.forward_stream):
        mirrors["rows"].stage(ids(1), ids(2))
        host.log.clear()
        device.zero_units(stream, GRIDS[0], ids(1, 2))
        device.copy_units(stream, GRIDS[0], ids(5, 4, 3, 2), ids(6, 5, 4, 3))
        device.upload(stream)
        device.send(stream, [ids(1)])
        event = device.record_event(stream)
        assert event.stream is stream
        with device.on_stream(stream):
            assert host.current is stream.torch_stream
        device.wait_event(stream, event)
        assert {where for _, where in host.log} == {stream.torch_stream}
        entries = [what for what, _ in host.log]
        # A float that moves over itself by one unit goes through scratch, two units at a time.
        work = ["copy", "launch", "event", "copy", *["launch"] * 4, "event", "copy", "launch", "event"]
        if stream is device.forward_stream:
            # Scratch and landing change hands.
            work = ["wait for stream", *work]
        assert entries == [*work, "copy", "event", "event", "wait"]


@pytest.mark.requirement("V1", "K4", "A7")
def test_staging_is_filled_again_only_behind_its_event_and_grows_instead_of_waiting(
    host: HostStreams,
) -> None:
    """A buffer filled under the copy that reads it uploads another call's ids; a wait for it would stall the scheduler."""
    device = cuda_device()
    device.create_mirrors(TABLES)
    device.prewarm(GRIDS[:1])
    small = cuda_device_module.SMALL_COUNT
    prewarmed = 6 + 2 + 2 * small
    assert device.staging_buffer_count == prewarmed
    waits = host.synchronized
    for many, reserved in ((ids(1), small), (ids(*[1] * 513), 6)):
        before = device.staging_buffer_count
        host.events.clear()
        for _ in range(reserved):
            device.zero_units(device.schedule_stream, GRIDS[0], many)
        assert device.staging_buffer_count == before
        device.zero_units(device.schedule_stream, GRIDS[0], many)
        assert device.staging_buffer_count == before + 1
        host.events[0].is_reached = True
        device.zero_units(device.schedule_stream, GRIDS[0], many)
        assert device.staging_buffer_count == before + 1
    for _ in range(small):
        device.send(device.forward_stream, [ids(7)])
    assert device.staging_buffer_count == prewarmed + 2
    device.send(device.forward_stream, [ids(7)])
    assert device.staging_buffer_count == prewarmed + 3
    assert host.synchronized == waits


@pytest.mark.requirement("K4")
def test_small_calls_pin_little(host: HostStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred rows admitted behind a busy GPU are hundreds of calls on their way: at a MiB each they would pin the host's memory."""
    pinned = []
    monkeypatch.setattr(
        HostCUDADevice,
        "_create_pinned",
        lambda device, size: pinned.append(size) or torch.empty(size, dtype=torch.uint8),
    )
    device = cuda_device(1 << 14)
    for _ in range(100):
        device.zero_units(device.schedule_stream, GRIDS[0], np.arange(100))
    assert sum(pinned) <= 100 * 4096


@pytest.mark.requirement("K4", "V1")
def test_the_host_waits_for_no_copy_of_ids(host: HostStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from memory that is not pinned, or one that is not told so, returns when the GPU is through with it."""
    pinned: list[tuple[int, int]] = []
    copies: list[tuple[bool, bool]] = []
    empty, copy = torch.empty, torch.Tensor.copy_

    def noted_empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        if pin_memory:
            pinned.append((made.data_ptr(), made.data_ptr() + made.nbytes))
        return made

    def noted_copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        is_pinned = any(start <= source.data_ptr() < end for start, end in pinned)
        copies.append((is_pinned, non_blocking))
        return copy(target, source)

    monkeypatch.setattr(torch, "empty", noted_empty)
    monkeypatch.setattr(torch.Tensor, "copy_", noted_copy)
    device = CUDADevice(KVArena(torch.zeros(ARENA_BYTES, dtype=torch.uint8)))
    mirrors = device.create_mirrors(TABLES)
    device.prewarm(GRIDS)
    copies.clear()
    mirrors["rows"].stage(ids(1), ids(2))
    device.upload(device.schedule_stream)
    device.zero_units(device.schedule_stream, GRIDS[0], ids(1))
    device.copy_units(device.schedule_stream, GRIDS[0], ids(1), ids(2))
    device.send(device.forward_stream, [ids(1)])
    # The interpreter copies too, from memory of its own.
    assert [each for each in copies if each[0]] == [(True, True)] * 4


@pytest.mark.requirement("V1")
def test_what_is_made_is_there_before_any_stream_may_use_it(host: HostStreams) -> None:
    """Tables are zeroed on torch's current stream, which is ordered with neither of these: zeros would land on the first upload."""
    waits = [host.synchronized]
    device = cuda_device()
    waits.append(host.synchronized)
    device.create_mirrors(TABLES)
    waits.append(host.synchronized)
    device.prewarm(GRIDS)
    waits.append(host.synchronized)
    assert np.diff(waits).tolist() == [1, 1, 1]


@pytest.mark.requirement("V1")
def test_an_event_is_reached_when_the_gpu_says_so_or_the_host_has_waited(host: HostStreams) -> None:
    """What is said too early is read before it is written."""
    device = cuda_device()
    event = device.record_event(device.forward_stream)
    assert not device.query_event(event)
    device.wait_on_host(event)
    assert device.query_event(event)


@pytest.mark.requirement("V1")
def test_forwards_run_on_the_stream_that_is_given(host: HostStreams) -> None:
    """An engine has a stream of its own; ids resolved on another are ordered with nothing it does."""
    own: Any = HostStream(host)
    device = HostCUDADevice(KVArena.allocate(ARENA_BYTES), forward_stream=own)
    with device.on_stream(device.forward_stream):
        assert host.current is own
    host.log.clear()
    device.send(device.forward_stream, [ids(1)])
    assert host.log == [("copy", own), ("event", own)]


@pytest.mark.requirement("K13")
def test_nothing_that_brings_ids_is_captured(host: HostStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay would read what lies in staging by then, and the staging's event would be one that no query may ask."""
    device = cuda_device()
    mirrors = device.create_mirrors(TABLES)
    mirrors["rows"].stage(ids(1), ids(2))
    stream = device.forward_stream
    monkeypatch.setattr(host, "capturing", stream.torch_stream)
    host.log.clear()
    for work in (
        lambda: device.copy_units(stream, GRIDS[0], ids(1), ids(2)),
        lambda: device.zero_units(stream, GRIDS[0], ids(1)),
        lambda: device.upload(stream),
        lambda: device.send(stream, [ids(1)]),
    ):
        with pytest.raises(RuntimeError, match="stream 'forward' is capturing a CUDA graph"):
            work()
    assert not host.log
    # Other streams work on, and what was staged is still there.
    assert device.upload(device.schedule_stream) == 1


@pytest.mark.requirement("A7")
def test_what_service_launches_was_prewarmed(host: HostStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program is compiled for each set of compile-time arguments, types and alignments; none may be new in service."""
    seen: set[tuple[object, ...]] = set()

    class Compiled:
        def __init__(self, program: Any) -> None:
            self._program = program

        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(*args: Any, **compiled: Any) -> None:
                kinds = [(str(each.dtype), each.data_ptr() % 16 == 0) for each in args[:2]]
                seen.add((self._program, *kinds, *sorted(compiled.items())))
                self._program[grid](*args, **compiled)

            return launch

    programs = triton_kernels.programs
    for name in ("copy_rows", "zero_rows"):
        monkeypatch.setattr(programs, name, Compiled(getattr(programs, name)))
    device = cuda_device(1 << 14, scratch_bytes=256)
    mirrors = device.create_mirrors({"a": 3, "b": 300})
    grids = [UnitGrid(16, 48), UnitGrid(0, 112), UnitGrid(32, 1024)]
    device.prewarm(grids)
    prewarmed = set(seen)
    assert prewarmed
    for batch in (1, 2, 7, 13):
        for grid in grids:
            device.zero_units(device.schedule_stream, grid, np.arange(batch))
            device.copy_units(device.schedule_stream, grid, np.arange(batch) + 1, np.arange(batch))
            device.copy_units(device.schedule_stream, grid, ids(1), ids(14))
        mirrors["a"].stage(ids(2), ids(9))
        mirrors["b"].stage(np.arange(batch), np.arange(batch))
        device.upload(device.schedule_stream)
    assert seen == prewarmed


@pytest.mark.requirement("V1")
def test_scratch_and_landing_go_from_stream_to_stream_behind_a_wait(host: HostStreams) -> None:
    """Two streams that move at once would read one another's units out of the one scratch that budgets pay for."""
    device = cuda_device()
    schedule, forward = device.schedule_stream, device.forward_stream
    for stream, waits in (
        (schedule, False),
        (schedule, False),
        (forward, True),
        (forward, False),
        (schedule, True),
    ):
        host.log.clear()
        device.copy_units(stream, GRIDS[0], ids(3, 2), ids(4, 3))
        assert (host.log[0] == ("wait for stream", stream.torch_stream)) == waits
        assert host.count("wait for stream") == waits
    # Sending touches neither.
    device.send(forward, [ids(1)])
    assert host.count("wait for stream") == 1


@pytest.mark.requirement("V1")
def test_whatever_the_streams_work_on_outlives_the_device(host: HostStreams) -> None:
    """Torch gives a tensor's memory to the next that asks as soon as Python lets go of it, unless it knows who still uses it."""
    device = cuda_device()
    device.create_mirrors(TABLES)
    for memory in (device.arena.bytes, device._scratch, device._landing, device._flat):
        for stream in (device.schedule_stream, device.forward_stream):
            assert (memory.data_ptr(), stream.torch_stream) in host.held


@pytest.mark.requirement("V1", "S1")
def test_it_holds_beside_its_arena_what_it_says(host: HostStreams) -> None:
    """Budgets pay for scratch once, at start: what grew in service would not be there to have."""
    device = cuda_device(1 << 16, scratch_bytes=96)
    device.create_mirrors(TABLES)
    device.prewarm(GRIDS)
    held = (device._scratch, device._landing)
    assert device.scratch_bytes == sum(each.numel() * each.element_size() for each in held)
    assert device.scratch_bytes == cuda_device_module.LANDING_BYTES + 96
    for _ in range(20):
        device.copy_units(device.schedule_stream, UnitGrid(0, 16), np.arange(9) + 1, np.arange(9))
    assert (device._scratch, device._landing) == held
    with pytest.raises(ValueError, match=r"cannot work in 96 bytes of scratch: .* alone take 1048576"):
        HostCUDADevice(KVArena.allocate(64), scratch_bytes=96)


@pytest.mark.requirement("V1")
def test_what_exceeds_the_landing_is_queued_in_as_few_pieces_as_it_takes(
    host: HostStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A band of a million pages moves in one call; its ids are bounded on the GPU all the same."""
    monkeypatch.setattr(cuda_device_module, "LANDING_BYTES", 1024)
    device = cuda_device(1 << 14)
    mirror = device.create_mirrors({"ids": 300})["ids"]
    mirror.stage(np.arange(300), np.arange(300) * 3)
    for work, launches in (
        (lambda: device.zero_units(device.schedule_stream, UnitGrid(0, 16), np.arange(128)), 1),
        (lambda: device.zero_units(device.schedule_stream, UnitGrid(0, 16), np.arange(129)), 2),
        (
            lambda: device.copy_units(
                device.schedule_stream, UnitGrid(0, 16), np.arange(200) + 500, np.arange(200)
            ),
            4,
        ),
        (lambda: device.upload(device.schedule_stream), 4),
    ):
        host.log.clear()
        work()
        assert (host.count("launch"), host.count("copy")) == (launches, launches)
    assert device.tables["ids"].tolist() == list(range(0, 900, 3))


def test_foreign_streams_and_events_are_refused(host: HostStreams) -> None:
    """Another device's event orders nothing here."""
    device, other = cuda_device(), NumpyDevice(ARENA_BYTES)
    with pytest.raises(TypeError, match="stream 'schedule' is not one of a CUDA device"):
        device.zero_units(other.schedule_stream, GRIDS[0], ids(1))
    with pytest.raises(TypeError, match="was recorded on another kind of device"):
        device.wait_event(device.schedule_stream, other.record_event(other.schedule_stream))
