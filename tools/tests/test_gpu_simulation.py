"""What the simulation would see on a GPU's streams, on streams that exist in time alone (row X1)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_simulation
from gpu_place import Place
from gpu_simulation import ACTIONS, first_wrong_byte, simulate, simulate_without_waits
from kvtide.arena import CPUDevice, KVArena
from kvtide.device import Event, ImmediateStream, Stream
from kvtide.simulation import OPERATIONS, RealDevice, open_device, run_seed, run_seed_on

from .late_streams import CLOCK_HZ, WORK_SECONDS, TimedDevice

CPU = Place(is_gpu=False)


class LateRealDevice(RealDevice):
    """A real device over `TimedDevice`: what is submitted takes effect at its time, as on a GPU."""

    def __init__(self, arena_bytes: int, seed: int) -> None:
        timed = TimedDevice(KVArena.allocate(arena_bytes))

        def make_stream(name: str) -> Stream:
            stream = ImmediateStream(name)
            timed.ends[stream] = 0.0
            return stream

        super().__init__(torch, timed, make_stream, seed, is_gpu=False)

    def run_all(self) -> None:
        self._device.pass_until(max(self._device.ends.values()) + 1)

    def _carry_out(self, stream: Stream, name: str, run: Callable[[Any], None]) -> None:
        work = super()._carry_out
        self._device.queue(stream, WORK_SECONDS, lambda: work(stream, name, run))

    def _keep_busy(self, stream: Stream, cycles: int) -> None:
        self._device.queue(stream, cycles / CLOCK_HZ, lambda: None)


@pytest.mark.requirement("X1")
@pytest.mark.parametrize("seed", [1, 4, 7, 8, 13])
def test_the_operations_find_what_must_be_there_on_late_streams(seed: int) -> None:
    """With every wait there is nothing to find, whatever is late."""
    assert "forwards" in simulate(CPU, seed, LateRealDevice)


@pytest.mark.requirement("X1", "X2")
def test_missing_waits_are_noticed_on_late_streams() -> None:
    """The delays are long enough to show them; on a GPU the same check must find the same."""
    assert "caught by seed" in simulate_without_waits(CPU, LateRealDevice)


@pytest.mark.requirement("X1", "X2")
@pytest.mark.parametrize("name", ["schedule", "forward", "backups", "loads", "refills"])
def test_missing_waits_of_each_stream_are_noticed_on_late_streams(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late streams that hid the waits of one stream would say of that one nothing. Results have no work; their waits are the host's."""
    wait = RealDevice.wait_event

    def leave_out(device: RealDevice, stream: Stream, event: Event) -> None:
        if stream.name != name:
            wait(device, stream, event)

    monkeypatch.setattr(RealDevice, "wait_event", leave_out)
    assert "caught by seed" in first_wrong_byte(CPU, LateRealDevice)


@pytest.mark.requirement("X1", "X2")
@pytest.mark.parametrize(("name", "answer"), [("query_event", True), ("wait_on_host", None)])
def test_a_host_that_goes_ahead_is_noticed_on_late_streams(
    name: str, answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host reads has come when an event says so, and not before: gates, ends of copies, results."""
    monkeypatch.setattr(RealDevice, name, lambda *_: answer)
    assert "caught by seed" in first_wrong_byte(CPU, LateRealDevice)


@pytest.mark.requirement("X1", "X2")
def test_only_a_wrong_byte_counts_as_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that does not work at all would else pass for one whose waits are needed."""

    def breaks(*_: object) -> int:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(RealDevice, "upload", breaks)
    with pytest.raises(AssertionError, match=r"something else: .* illegal memory access"):
        simulate_without_waits(CPU, LateRealDevice)


@pytest.mark.requirement("X1")
def test_a_seed_that_shows_nothing_is_none_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no forward ran, nothing looked at the pages."""
    admitting = tuple(operation for operation in OPERATIONS if operation.name == "admit")
    monkeypatch.setattr(gpu_simulation, "OPERATIONS", admitting)
    with pytest.raises(AssertionError, match="no forward ran"):
        simulate(CPU, 1, LateRealDevice)


@pytest.mark.requirement("X1")
@pytest.mark.parametrize("name", ["zero_units", "copy_units", "upload"])
def test_wrong_contents_are_noticed_on_a_device_that_ships(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparisons happen on the device, and are looked at later: each must be looked at."""
    monkeypatch.setattr(CPUDevice, name, lambda *args, **named: 0)
    assert "caught by seed" in first_wrong_byte(CPU)


@pytest.mark.requirement("X1")
def test_more_comparisons_than_there_is_room_for_are_all_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are few bytes that a long run fills more than once."""
    monkeypatch.setattr("kvtide.simulation.real.real_device._COMPARISONS", 5)
    assert "forwards" in simulate(CPU, 1)
    monkeypatch.setattr(CPUDevice, "zero_units", lambda *args, **named: 0)
    with pytest.raises(AssertionError, match="lost_write"):
        simulate(CPU, 1)


@pytest.mark.requirement("X1")
def test_a_real_device_meets_what_the_modelled_one_met() -> None:
    """The same actions, decided alike: as many forwards, moves and refusals, where no operation asks when an end is reached."""
    asking = {"begin transfer", "end use", "lull", "pass time"}
    operations = {operation.name: operation for operation in OPERATIONS if operation.name not in asking}
    met = Counter[str]()
    for seed in range(3):
        real = run_seed_on(partial(open_device, "cpu"), seed, ACTIONS, operations)
        assert real.failure is None
        assert real.facts == run_seed(seed, ACTIONS, operations).facts
        met.update(real.facts)
    assert min(met[fact] for fact in ("takes", "forwards", "units moved", "refusals")) > 0


@pytest.mark.requirement("X1")
def test_on_a_gpu_all_work_would_be_queued_on_a_stream() -> None:
    """Nobody sees a GPU here: its device and its programs run on a stand-in for its streams, which notes who names none."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("stand_in_streams.py")), "0", "40"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failure"] is None
    assert found["outside"] == {}
    assert min(found[what] for what in ("forwards", "moved", "delays", "inside")) > 0
