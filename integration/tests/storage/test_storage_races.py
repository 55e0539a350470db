"""`KVStorage` as it ships on the modelled device: its rules of order suffice, and each that is broken shows (K2, K4, X2).

A rule is broken at run time, where it is shipped, so that a rule that moves takes its line of the table along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import numpy as np
import pytest
import torch

from kvtide.device import Event, Stream, UnorderedAccessError
from kvtide.engine.modelled_device import ModelledTensorDevice
from kvtide.ledger import ForwardSteps
from kvtide.storage import KVStorage, RowState, SharedReadEnds
from kvtide.storage.host_copies import HostCopies
from kvtide.storage.row_state import RowBeginnings, RowResets
from kvtide.storage.row_units import RowUnits

from .overlapped_loop import BACKENDS, Scheduler

SEEDS, ITERATIONS = 10, 90

Function: TypeAlias = Callable[..., Any]
Plant: TypeAlias = Callable[[pytest.MonkeyPatch], None]


@attrs.frozen(kw_only=True)
class Broken:
    """One rule of the storage, and how it is broken."""

    id: str
    rule: str
    """What it says, where it holds."""

    plant: Plant
    """Breaks it."""

    error: type[Exception]
    """What finds it: a race, or a byte that is wrong."""

    report: str
    """A pattern of what is said then."""

    declaring: int = len(BACKENDS)
    """Of the backends, how many declare their read ends."""

    retracts: bool = False
    """Whether rows go to host memory and come back."""


# ── ways to break ──


def instead(owner: type, name: str, make: Callable[[Function], Function]) -> Plant:
    """What `make` makes of a method."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def without(owner: type, name: str) -> Plant:
    """A method that does nothing."""
    return instead(owner, name, lambda _: lambda *_: None)


def during(verb: str, *plants: Plant) -> Plant:
    """Broken while that verb of the storage runs, and no longer."""

    def make(original: Function) -> Function:
        def call(*args: Any, **named: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                for plant in plants:
                    plant(patch)
                return original(*args, **named)

        return call

    return instead(KVStorage, verb, make)


def no_wait(verb: str) -> Plant:
    """The verb queues no wait."""
    return during(verb, without(ModelledTensorDevice, "wait_event"))


def no_wait_for(verb: str, waiting: str, awaited: str) -> Plant:
    """While the verb runs, the one stream does not wait for the other."""

    def make(wait_event: Function) -> Function:
        def wait(device: ModelledTensorDevice, stream: Stream, event: Event) -> None:
            if (stream.name, event.stream.name) != (waiting, awaited):
                wait_event(device, stream, event)

        return wait

    return during(verb, instead(ModelledTensorDevice, "wait_event", make))


def read_end(end: Callable[[SharedReadEnds], Event | None]) -> Plant:
    """Another answer of `SharedReadEnds.end`."""
    return lambda patch: patch.setattr(SharedReadEnds, "end", property(end))


# ── what is made of rules ──


def declared_on_the_wrong_stream(_: Function) -> Function:
    """A read end on the schedule stream, which is behind it anyway."""

    def declare(ends: SharedReadEnds, *backends: str) -> None:
        ends._open.difference_update(backends)
        ends._newest = ends._device.record_event(ends._device.schedule_stream)

    return declare


def upload_after_its_event(patch: pytest.MonkeyPatch) -> None:
    """What the forward stream waits for was recorded before the upload."""
    upload, record_event = ModelledTensorDevice.upload, ModelledTensorDevice.record_event
    before: list[Event] = []

    def upload_late(device: ModelledTensorDevice, stream: Stream) -> int:
        before.append(record_event(device, stream))
        return upload(device, stream)

    patch.setattr(ModelledTensorDevice, "upload", upload_late)
    patch.setattr(ModelledTensorDevice, "record_event", lambda *_: before.pop())


def staging_back_at_once(upload: Function) -> Function:
    """The device counts an upload as over when it is queued."""

    def upload_and_return(device: ModelledTensorDevice, stream: Stream) -> Any:
        count = upload(device, stream)
        device.model.return_staging()
        return count

    return upload_and_return


def claim_the_newest(wait_queued: Function) -> Function:
    """The ledger is told of a wait for the whole forward, where its read end was waited for."""

    def claim(steps: ForwardSteps, _: Event) -> None:
        newest = steps.newest_recorded
        assert newest is not None, "the verb has recorded one"
        wait_queued(steps, newest.event)

    return claim


def reset_at_once(admit: Function) -> Function:
    """Rows are reset when they are handed out, by the host."""

    def admit_and_reset(storage: KVStorage, *args: Any) -> Any:
        rows = admit(storage, *args)
        resets = torch.from_numpy(storage._row_resets.take(np.empty(0, np.int64)).resets)
        storage.row_state.reset(resets, torch.zeros_like(resets))
        return rows

    return admit_and_reset


def take_and_keep(_: Function) -> Function:
    """Rows stay marked, and every forward resets them."""
    return lambda resets, _: RowBeginnings(np.flatnonzero(resets._marked), {})


def copy_unrecorded(_: Function) -> Function:
    """The copy is queued, and nobody else is told."""

    def begin(copies: HostCopies, *_: object) -> Event:
        return copies._device.record_event(copies._device.copy_stream)

    return begin


def race(one: str, other: str) -> str:
    """A pattern of their race, whichever is met first."""
    return f"^(?:{one}).* unordered with (?:{other})|^(?:{other}).* unordered with (?:{one})"


# ── the table ──

UPLOAD_UNDER_METADATA = r"upload \d+ of mirror '[^']+' entries .* unordered with metadata reading"
UPLOAD_UNDER_LAYERS = r"upload \d+ of mirror 'rows' entries .* unordered with forward \d+ reading"
METADATA_BEFORE_UPLOAD = r"metadata of mirror '[^']+' entries .* unordered with upload \d+ writing"
STAGING_UNDER_UPLOAD = r"staging for upload \d+ .* unordered with upload \d+ reading"
MOVE_UNDER_FORWARD = r"(move|zeroing) of band .* unordered with forward \d+"
TO_HOST, FROM_HOST, FORWARD, MOVE = "copy to the host", "copy from the host", r"forward \d+", "move|zeroing"
OTHERS_STATE = r"state of rows on the device"
OTHERS_PAGE = r"forward \d+: \S+ \d+"

BROKEN = [
    Broken(
        id="barrier.whole",
        rule="where a backend declares no read end, the schedule stream waits for all of its forward",
        plant=no_wait("record_forward"),
        error=UnorderedAccessError,
        report=UPLOAD_UNDER_METADATA,
        declaring=0,
    ),
    Broken(
        id="barrier.read_end",
        rule="the schedule stream waits for a declared read end",
        plant=no_wait("record_forward"),
        error=UnorderedAccessError,
        report=UPLOAD_UNDER_METADATA,
    ),
    Broken(
        id="barrier.every_backend",
        rule="a read end is one once every backend has declared",
        plant=read_end(lambda ends: ends._newest),
        error=UnorderedAccessError,
        report=UPLOAD_UNDER_LAYERS,
        declaring=1,
    ),
    Broken(
        id="barrier.stream",
        rule="a read end lies on the forward stream",
        plant=instead(SharedReadEnds, "declare", declared_on_the_wrong_stream),
        error=UnorderedAccessError,
        report=UPLOAD_UNDER_METADATA,
    ),
    Broken(
        id="barrier.told",
        rule="a wait for a read end is no wait for its forward, in the ledger's books",
        plant=during("record_forward", instead(ForwardSteps, "wait_queued", claim_the_newest)),
        error=UnorderedAccessError,
        report=MOVE_UNDER_FORWARD,
    ),
    Broken(
        id="upload.made",
        rule="each launch follows an upload of every change",
        plant=during("launch_forward", instead(ModelledTensorDevice, "upload", lambda _: lambda *_: 0)),
        error=AssertionError,
        report=OTHERS_PAGE,
    ),
    Broken(
        id="upload.waited",
        rule="the forward stream waits for the upload",
        plant=no_wait("launch_forward"),
        error=UnorderedAccessError,
        report=METADATA_BEFORE_UPLOAD,
    ),
    Broken(
        id="upload.first",
        rule="what it waits for is recorded behind the upload",
        plant=during("launch_forward", upload_after_its_event),
        error=UnorderedAccessError,
        report=METADATA_BEFORE_UPLOAD,
    ),
    Broken(
        id="upload.staging",
        rule="the device fills a staging buffer again once its upload is over, and launches do not wait for that",
        plant=during("launch_forward", instead(ModelledTensorDevice, "upload", staging_back_at_once)),
        error=UnorderedAccessError,
        report=STAGING_UNDER_UPLOAD,
    ),
    Broken(
        id="launch.abandoned",
        rule="the schedule stream waits for what was queued of a launch that is given up",
        plant=no_wait("abandon"),
        error=UnorderedAccessError,
        report=UPLOAD_UNDER_METADATA,
    ),
    Broken(
        id="writes.told",
        rule="the ledger is told what a step's forward writes",
        plant=instead(RowUnits, "writes_of_step", lambda _: lambda *_: {}),
        error=UnorderedAccessError,
        report=MOVE_UNDER_FORWARD,
    ),
    Broken(
        id="resets.marked",
        rule="a row that is handed out is marked",
        plant=without(RowResets, "mark"),
        error=AssertionError,
        report=OTHERS_STATE,
    ),
    Broken(
        id="resets.made",
        rule="the next forward's metadata phase resets marked rows",
        plant=without(RowState, "reset"),
        error=AssertionError,
        report=OTHERS_STATE,
    ),
    Broken(
        id="resets.behind_forwards",
        rule="and nobody before it: the last forward of the row's former request writes its values at its end",
        plant=instead(KVStorage, "admit", reset_at_once),
        error=AssertionError,
        report=OTHERS_STATE,
    ),
    Broken(
        id="resets.once",
        rule="one forward resets a row",
        plant=instead(RowResets, "take", take_and_keep),
        error=AssertionError,
        report=OTHERS_STATE,
    ),
    Broken(
        id="resets.abandoned",
        rule="rows that a launch was to reset are marked again when it is given up",
        plant=during("abandon", without(RowResets, "mark")),
        error=AssertionError,
        report=OTHERS_STATE,
    ),
    Broken(
        id="backup.behind_forwards",
        rule="a backup is copied behind the forwards that write its row",
        plant=no_wait_for("retract_to_host", "copy", "forward"),
        error=UnorderedAccessError,
        report=race(TO_HOST, FORWARD),
        retracts=True,
    ),
    Broken(
        id="backup.behind_moves",
        rule="and behind the moves that brought its units where they are read",
        plant=no_wait_for("retract_to_host", "copy", "schedule"),
        error=UnorderedAccessError,
        report=race(TO_HOST, MOVE),
        retracts=True,
    ),
    Broken(
        id="backup.recorded",
        rule="the ledger knows of the copy, so that whoever is handed its row's units waits for it",
        plant=during("retract_to_host", instead(HostCopies, "begin", copy_unrecorded)),
        error=UnorderedAccessError,
        report=race(TO_HOST, f"{FORWARD}|{MOVE}"),
        retracts=True,
    ),
    Broken(
        id="restore.behind_forwards",
        rule="a restore fills units behind the forwards that may still read them",
        plant=no_wait_for("restore", "copy", "forward"),
        error=UnorderedAccessError,
        report=race(FROM_HOST, FORWARD),
        retracts=True,
    ),
    Broken(
        id="restore.behind_moves",
        rule="and behind the moves and the zeroing of its take",
        plant=no_wait_for("restore", "copy", "schedule"),
        error=UnorderedAccessError,
        report=race(FROM_HOST, f"{FORWARD}|{MOVE}"),
        retracts=True,
    ),
    Broken(
        id="restore.before_forwards",
        rule="the next launch waits for what fills its rows' units",
        plant=no_wait_for("launch_forward", "forward", "copy"),
        error=UnorderedAccessError,
        report=race(FROM_HOST, FORWARD),
        retracts=True,
    ),
    Broken(
        id="restore.not_reset",
        rule="the next forward brings a restored row's state back",
        plant=without(RowState, "restore"),
        error=AssertionError,
        report=OTHERS_STATE,
        retracts=True,
    ),
]


def run_seeds(broken: Broken) -> None:
    """One world after another, each to its end."""
    for seed in range(SEEDS):
        Scheduler(seed, declaring=broken.declaring, retracts=broken.retracts).run(ITERATIONS)


@pytest.mark.requirement("X2", "V2", "K2", "K4", "H1", "H2")
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.id)
def test_each_rule_of_a_launch_is_needed(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that can be left out unnoticed is a hole in this world, or a rule that does nothing."""
    broken.plant(monkeypatch)
    with pytest.raises(broken.error, match=broken.report):
        run_seeds(broken)


@pytest.mark.requirement("V2", "V3", "K1", "K2", "K4", "L8")
@pytest.mark.parametrize("declaring", range(len(BACKENDS) + 1))
def test_the_storage_as_shipped_has_no_race_in_any_interleaving(declaring: int) -> None:
    """Forwards read mirrors and pages while the next is prepared and launched, rows end, are handed on, and pages move."""
    served = moved = reused = 0
    for seed in range(SEEDS):
        scheduler = Scheduler(seed, declaring=declaring)
        scheduler.run(ITERATIONS)
        served += scheduler.served
        reused += scheduler.reused_under_a_forward
        moved += scheduler.storage.chain.statistics().moved_units
    assert served > 50
    assert moved > 10
    assert reused > 10


@pytest.mark.requirement("V2", "V3", "K2", "K4", "H1", "H2")
@pytest.mark.parametrize("declaring", [0, len(BACKENDS)])
def test_rows_are_backed_up_and_restored_without_a_race_in_any_interleaving(declaring: int) -> None:
    """While their last forward runs, while pages move, while what they held is another's, and while the backup is still being copied."""
    restored = under_a_forward = under_its_backup = moved = 0
    for seed in range(SEEDS):
        scheduler = Scheduler(seed, declaring=declaring, retracts=True)
        scheduler.run(ITERATIONS)
        restored += scheduler.restored
        under_a_forward += scheduler.retracted_under_a_forward
        under_its_backup += scheduler.restored_under_its_backup
        moved += scheduler.storage.chain.statistics().moved_units
    assert min(restored, under_a_forward, under_its_backup, moved) > 20
