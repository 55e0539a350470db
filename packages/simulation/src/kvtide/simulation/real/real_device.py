"""A device of `kvtide.arena` in the place of the modelled one: what the simulation's ranks ask of it, on real streams.

Each work is queued when the simulation submits it, behind a delay that is drawn: most have none, some are longer than the host takes
for an iteration. A transfer runs on one of a few streams that wait for nothing. The host looks at what was compared on the device when
everything is at rest.
"""

from __future__ import annotations

import importlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from kvtide.device import Event, HostMayNotWaitError, ImmediateStream, IntArray, Mirror, Stream, UnitGrid
from kvtide.simulation.failures import CheckFailedError
from kvtide.simulation.real.device_words import DeviceWords, HostMemory

LATE_CYCLES = (0, 0, 0, 200_000, 2_000_000, 8_000_000)
"""What a work is delayed by, in clock cycles: nothing, or up to some milliseconds."""

NETWORK_STREAMS = 4
"""That transfers take in turn."""

_COMPARISONS = 1 << 14

DEVICE_KINDS = ("cpu", "cuda")
"""Kinds of real device; on a CPU everything happens at once, which shows contents and nothing of order."""


def open_device(kind: str, arena_bytes: int, seed: int) -> RealDevice:
    """A device of one of `DEVICE_KINDS`, of the first GPU.

    Raises `ImportError` without `kvtide.arena`, and what torch raises without a GPU.
    """
    # Streams that shared a queue of the hardware would be ordered by it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # By name: the simulation is imported, and tested, where torch is not.
    torch: Any = importlib.import_module("torch")
    arena: Any = importlib.import_module("kvtide.arena")
    region = arena.KVArena.allocate(arena_bytes, kind)
    if kind == "cuda":
        return RealDevice(
            torch,
            arena.CUDADevice(region),
            lambda name: arena.CUDAStream(name, torch.cuda.Stream()),
            seed,
            is_gpu=True,
        )
    return RealDevice(torch, arena.CPUDevice(region), ImmediateStream, seed, is_gpu=False)


class RealDevice:
    """See the module's docstring; a `kvtide.device.Device`, and the calls of `ModelledDevice` that the simulation makes."""

    def __init__(
        self, torch: Any, device: Any, make_stream: Callable[[str], Stream], seed: int, *, is_gpu: bool
    ) -> None:
        """Over a `TensorDevice` with `make_stream` for more of its streams; delays are drawn from `seed`."""
        device.arena.bytes.fill_(0xFF)
        self._torch, self._device, self._make_stream, self._is_gpu = torch, device, make_stream, is_gpu
        self._random = random.Random(seed)  # noqa: S311 - repeatable on purpose
        self._operations: list[tuple[str, str | None]] = []
        self._network = [self.create_stream("network") for _ in range(NETWORK_STREAMS)]
        self._transfer_count = 0
        self._stream: Stream = self.schedule_stream
        self._work = "the host"
        self._found = torch.zeros(_COMPARISONS, dtype=torch.int64, device=device.arena.bytes.device)
        self._compared: list[str] = []
        self.queued: Counter[str] = Counter()
        """Calls that queued something, by stream."""
        self.waits: Counter[str] = Counter()
        """Waits for events, by stream."""
        self.synchronize()

    # ── the seam ──

    @property
    def arena_bytes(self) -> int:
        """See `Device.arena_bytes`."""
        count: int = self._device.arena_bytes
        return count

    @property
    def schedule_stream(self) -> Stream:
        """See `Device.schedule_stream`."""
        stream: Stream = self._device.schedule_stream
        return stream

    @property
    def forward_stream(self) -> Stream:
        """See `Device.forward_stream`."""
        stream: Stream = self._device.forward_stream
        return stream

    def record_event(self, stream: Stream) -> Event:
        """See `Device.record_event`."""
        event: Event = self._device.record_event(stream)
        return event

    def wait_event(self, stream: Stream, event: Event) -> None:
        """See `Device.wait_event`."""
        self.queued[stream.name] += 1
        self.waits[stream.name] += 1
        self._device.wait_event(stream, event)

    def query_event(self, event: Event) -> bool:
        """See `Device.query_event`."""
        answer: bool = self._device.query_event(event)
        return answer

    def wait_on_host(self, event: Event) -> None:
        """See `Device.wait_on_host`; raises `HostMayNotWaitError` inside `no_host_waits`."""
        self._refuse(f"wait for stream {event.stream.name!r}", event.stream.name)
        self._device.wait_on_host(event)

    def copy_units(self, stream: Stream, grid: UnitGrid, sources: IntArray, targets: IntArray) -> None:
        """See `Device.copy_units`; late."""
        self._be_late(stream)
        self._device.copy_units(stream, grid, sources, targets)

    def zero_units(self, stream: Stream, grid: UnitGrid, units: IntArray) -> None:
        """See `Device.zero_units`; late."""
        self._be_late(stream)
        self._device.zero_units(stream, grid, units)

    def create_mirrors(self, lengths: Mapping[str, int]) -> dict[str, Mirror]:
        """See `Device.create_mirrors`."""
        mirrors: dict[str, Mirror] = self._device.create_mirrors(lengths)
        return mirrors

    def upload(self, stream: Stream) -> int:
        """See `Device.upload`; late."""
        self._be_late(stream)
        count: int = self._device.upload(stream)
        return count

    # ── what ranks ask besides ──

    def create_stream(self, name: str) -> Stream:
        """One more stream."""
        return self._make_stream(name)

    def submit(
        self,
        stream: Stream,
        name: str,
        *,
        reads: Sequence[object] = (),
        writes: Sequence[object] = (),
        run: Callable[[Any], None] | None = None,
    ) -> None:
        """Queue work on a stream: `run` is called now, and what it tells `DeviceWords` is queued. Late."""
        self._be_late(stream)
        if run is not None:
            self._carry_out(stream, name, run)

    def start_transfer(
        self,
        name: str,
        *,
        reads: Sequence[object] = (),
        writes: Sequence[object] = (),
        run: Callable[[Any], None] | None = None,
    ) -> Event:
        """Queue work behind nothing but a few earlier transfers; the event is its end."""
        stream = self._network[self._transfer_count % NETWORK_STREAMS]
        self._transfer_count += 1
        self.submit(stream, name, run=run)
        return self.record_event(stream)

    def create_buffer(self, _name: str, byte_count: int) -> HostMemory:
        """Host memory that copies fill, pinned beside a GPU."""
        pinned = self._torch.zeros(byte_count // 8, dtype=self._torch.int64, pin_memory=self._is_gpu)
        return HostMemory(self, pinned)

    def read_on_host(
        self, span: tuple[HostMemory, int, int], *, name: str
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A copy of host memory; the caller has waited for whatever fills it."""
        self._refuse(f"read for {name}")
        return span[0].read(*span[1:])

    def unit_spans(self, _grid: UnitGrid, _units: IntArray) -> tuple[object, ...]:
        """Nothing is watched here."""
        return ()

    def mirror_span(self, _name: str) -> object:
        """Nothing is watched here."""
        return None

    def units(self, grid: UnitGrid, unit_count: int) -> DeviceWords:
        """A band's units as words, `[unit_count, words]`."""
        first, end = grid.origin_bytes, grid.origin_bytes + unit_count * grid.unit_bytes
        words = (
            self._device.arena.bytes[first:end].view(self._torch.int64).view(unit_count, grid.unit_bytes // 8)
        )
        return DeviceWords(self, words)

    def mirror(self, name: str) -> DeviceWords:
        """A mirror's entries."""
        return DeviceWords(self, self._device.tables[name])

    def run_all(self) -> None:
        """Time passes until everything queued has run."""
        if self._is_gpu:
            self._torch.cuda.synchronize()

    def ready_streams(self) -> list[Stream]:
        """None that could be told to run: they run by themselves."""
        return []

    def prewarm(self, grids: Sequence[UnitGrid]) -> None:
        """Compile what is needed, before the first delay is timed."""
        self._device.prewarm(grids)

    @contextmanager
    def no_host_waits(self, operation: str, *, except_on: str | None = None) -> Iterator[None]:
        """As `ModelledDevice.no_host_waits`."""
        self._operations.append((operation, except_on))
        try:
            yield
        finally:
            self._operations.pop()

    def synchronize(self) -> None:
        """Wait for everything, and raise `CheckFailedError` for the first comparison that found a difference."""
        self._refuse("wait for every stream")
        self._look()

    # ── for `DeviceWords` ──

    def here(self) -> AbstractContextManager[object]:
        """See `Queue.here`."""
        inside: AbstractContextManager[object] = self._device.on_stream(self._stream)
        return inside

    def sent(self, values: np.ndarray[Any, Any]) -> Any:
        """See `Queue.sent`."""
        whole = values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64)
        if not whole.size:
            return self._found.new_empty(whole.shape)
        return self._device.send(self._stream, [np.ascontiguousarray(whole)])[0]

    def compare(self, found: Any, expected: Any) -> None:
        """See `Queue.compare`; where there is no room left for results, the host waits and looks."""
        if len(self._compared) == _COMPARISONS:
            self._look()
        result = self._found[len(self._compared)]
        self._compared.append(self._work)
        if found.shape == expected.shape:
            result.copy_((found != expected).sum())
        else:
            result.fill_(max(found.numel(), expected.numel()))

    # ── helpers ──

    def _look(self) -> None:
        self.run_all()
        found = self._found[: len(self._compared)].tolist()
        compared, self._compared = self._compared, []
        for differences, what in zip(found, compared, strict=True):
            if differences:
                raise CheckFailedError(
                    "lost_write", f"{what} finds {differences} entries that are not what they must be"
                )

    def _carry_out(self, stream: Stream, name: str, run: Callable[[Any], None]) -> None:
        self._stream, self._work = stream, name
        try:
            run(None)
        finally:
            self._stream, self._work = self.schedule_stream, "the host"

    def _be_late(self, stream: Stream) -> None:
        self.queued[stream.name] += 1
        cycles = self._random.choice(LATE_CYCLES)
        if cycles:
            self._keep_busy(stream, cycles)

    def _keep_busy(self, stream: Stream, cycles: int) -> None:
        if self._is_gpu:
            with self._device.on_stream(stream):
                # There is no public way to be slow.
                self._torch.cuda._sleep(cycles)  # noqa: SLF001

    def _refuse(self, action: str, stream_name: str | None = None) -> None:
        for operation, except_on in self._operations:
            if stream_name is None or stream_name != except_on:
                raise HostMayNotWaitError(f"{operation} may not {action}")
