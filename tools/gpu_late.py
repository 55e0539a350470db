"""A device whose schedule stream is late at random, and which can leave out the waits of one kind: the walk must notice."""

import enum
import random
from typing import Any, cast

from gpu_place import Place
from kvtide.arena import TensorDevice
from kvtide.device import Event, IntArray, Stream, UnitGrid

LATE_CYCLES = 24_000_000
"""A dozen milliseconds, several times what the host takes to queue an iteration: what should have waited is through by then."""


class Fault(enum.Enum):
    """Which waits are left out."""

    NONE = "every wait is made"
    UPLOAD = "forwards do not wait for the upload"
    BARRIER = "what follows a launch does not wait for its forward"
    MOVE = "moves wait for no forward"


class LateDevice:
    """Every call but five goes to the device behind it."""

    def __init__(self, place: Place, device: TensorDevice, draw: random.Random, fault: Fault) -> None:
        """Late as `draw` says."""
        self._place = place
        self._device = device
        self._draw = draw
        self._fault = fault
        self._held: list[Event] = []
        """What the schedule stream was told to wait for since it last did something."""
        self._is_late = False
        self._forward_has_just_ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def record_event(self, stream: Stream) -> Event:
        """As the device does."""
        self._forward_has_just_ended = stream is self._device.forward_stream
        return self._device.record_event(stream)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """The schedule stream's waits are held back until it is told to do something."""
        # The barrier follows the event of the forward that it stands behind.
        is_barrier, self._forward_has_just_ended = self._forward_has_just_ended, False
        if stream is self._device.schedule_stream:
            if not (is_barrier and self._fault is Fault.BARRIER):
                self._held.append(event)
        elif self._fault is not Fault.UPLOAD:
            self._device.wait_event(stream, event)

    def copy_units(self, stream: Stream, grid: UnitGrid, sources: IntArray, targets: IntArray) -> None:
        """Behind its waits, and late."""
        if self._fault is not Fault.MOVE:
            self._wait()
        self._be_late()
        self._device.copy_units(stream, grid, sources, targets)

    def zero_units(self, stream: Stream, grid: UnitGrid, units: IntArray) -> None:
        """Behind its waits, and late."""
        self._wait()
        self._be_late()
        self._device.zero_units(stream, grid, units)

    def upload(self, stream: Stream) -> int:
        """Behind its waits, and late; then the dice are thrown anew."""
        self._wait()
        self._be_late()
        count = self._device.upload(stream)
        self._is_late = self._draw.random() < 0.5
        return count

    def _wait(self) -> None:
        for event in self._held:
            self._device.wait_event(self._device.schedule_stream, event)
        self._held.clear()

    def _be_late(self) -> None:
        if self._is_late:
            self._place.keep_busy(self._device, self._device.schedule_stream, LATE_CYCLES)


def late_device(place: Place, device: TensorDevice, draw: random.Random, fault: Fault) -> TensorDevice:
    """See `LateDevice`, which is one in all but type."""
    return cast(TensorDevice, LateDevice(place, device, draw, fault))
