"""A GPU's timing without a GPU: two streams of a CPU device on a clock of their own, for the walk of `gpu_check.py`.

What is queued gets its place in time at once (behind its stream, what that waited for, and the host), and takes effect when the
host's clock has passed it: at a host wait, or at the end.
"""

import heapq
from collections.abc import Callable
from itertools import count
from typing import cast

import attrs
import torch

from gpu_place import Place
from kvtide.arena import CPUDevice, KVArena, TensorDevice
from kvtide.device import Event, IntArray, Stream, UnitGrid

CLOCK_HZ = 1.8e9
HOST_SECONDS, WORK_SECONDS = 2e-4, 2e-5
"""What a call costs the host, and what is queued the stream: guesses that a GPU should beat."""


@attrs.frozen(eq=False)
class TimedEvent:
    stream: Stream
    time: float


class TimedDevice(CPUDevice):
    """Calls take effect at their time."""

    def __init__(self, arena: KVArena) -> None:
        super().__init__(arena)
        self.now = 0.0
        self.ends = {self.schedule_stream: 0.0, self.forward_stream: 0.0}
        self.effects: list[tuple[float, int, Callable[[], object]]] = []
        self.places = count()

    def queue(self, stream: Stream, seconds: float, work: Callable[[], object]) -> None:
        self.now += HOST_SECONDS
        begin = max(self.now, self.ends[stream])  # type: ignore[index]  # its own streams
        self.ends[stream] = begin + seconds  # type: ignore[index]  # as above
        heapq.heappush(self.effects, (begin, next(self.places), work))

    def pass_until(self, time: float) -> None:
        self.now = max(self.now, time)
        while self.effects and self.effects[0][0] < self.now:
            heapq.heappop(self.effects)[2]()

    def record_event(self, stream: Stream) -> TimedEvent:  # type: ignore[override]  # events here have a time
        return TimedEvent(stream, max(self.now, self.ends[stream]))  # type: ignore[index]  # its own streams

    def wait_event(self, stream: Stream, event: Event) -> None:
        time = cast(TimedEvent, event).time
        self.ends[stream] = max(self.ends[stream], time)  # type: ignore[index]  # its own streams

    def query_event(self, event: Event) -> bool:
        return cast(TimedEvent, event).time <= self.now

    def wait_on_host(self, event: Event) -> None:
        self.pass_until(cast(TimedEvent, event).time)

    def copy_units(self, stream: Stream, grid: UnitGrid, sources: IntArray, targets: IntArray) -> None:
        work = super().copy_units
        self.queue(stream, WORK_SECONDS, lambda: work(stream, grid, sources, targets))

    def zero_units(self, stream: Stream, grid: UnitGrid, units: IntArray) -> None:
        work = super().zero_units
        self.queue(stream, WORK_SECONDS, lambda: work(stream, grid, units))

    def upload(self, stream: Stream) -> int:
        indices, values = self._staging.drain()

        def write() -> None:
            self._flat[torch.from_numpy(indices)] = torch.from_numpy(values)

        self.queue(stream, WORK_SECONDS, write)
        return len(indices)


@attrs.frozen
class TimedPlace(Place):
    """What the walk knows as a GPU; `made` holds its devices."""

    is_gpu: bool = False
    made: list[TimedDevice] = attrs.field(factory=list)

    def device(self, arena: KVArena) -> TensorDevice:
        self.made.append(TimedDevice(arena))
        return self.made[-1]

    def queue(self, device: TensorDevice, stream: Stream, work: Callable[[], object]) -> None:
        self.made[-1].queue(stream, WORK_SECONDS, work)

    def keep_busy(self, device: TensorDevice, stream: Stream, cycles: int) -> None:
        self.made[-1].queue(stream, cycles / CLOCK_HZ, lambda: None)

    def synchronize(self) -> None:
        for device in self.made:
            device.pass_until(max(device.ends.values()) + 1)
