"""A GPU's timing without a GPU: two streams of a CPU device on a clock of their own, for the walk of `gpu_check.py`.

What is queued gets its place in time at once (behind its stream, what that waited for, and the host), with the ids it was handed then.
Whatever the host's clock has passed has taken effect, however the host comes to know of it: by a wait, by asking for an event, or by
memory that it reads.
"""

import heapq
from collections.abc import Callable
from itertools import count
from typing import cast

import attrs
import numpy as np
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
        self.takes_effect = False

    def queue(self, stream: Stream, seconds: float, work: Callable[[], object]) -> None:
        self.pass_until(self.now + HOST_SECONDS)
        begin = max(self.now, self.ends[stream])  # type: ignore[index]  # its own streams
        self.ends[stream] = begin + seconds  # type: ignore[index]  # as above
        heapq.heappush(self.effects, (begin, next(self.places), work))

    def pass_until(self, time: float) -> None:
        assert not self.takes_effect, (
            "what is queued lets no time pass: later effects would come in the middle of it"
        )
        self.now = max(self.now, time)
        self.takes_effect = True
        try:
            while self.effects and self.effects[0][0] < self.now:
                heapq.heappop(self.effects)[2]()
        finally:
            self.takes_effect = False

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
        work, pairs = super().copy_units, (np.array(sources), np.array(targets))
        self.queue(stream, WORK_SECONDS, lambda: work(stream, grid, *pairs))

    def zero_units(self, stream: Stream, grid: UnitGrid, units: IntArray) -> None:
        work, ids = super().zero_units, np.array(units)
        self.queue(stream, WORK_SECONDS, lambda: work(stream, grid, ids))

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
