"""`KVStorage` as it ships on the modelled device: its waits and its uploads suffice, and each that is missing shows (K4)."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest
import torch

from kvtide.arena import SCRATCH_BYTES
from kvtide.device import Event, IntArray, RunningWork, Stream, UnitGrid, UnorderedAccessError
from kvtide.engine.modelled_device import ModelledTensorDevice
from kvtide.ledger import CheckLevel
from kvtide.plan import (
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    KVStoragePlan,
    MLAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    plan_kv_storage,
)
from kvtide.sizing import ServingPolicy
from kvtide.storage import (
    ForwardIds,
    KVStorage,
    PreparedStep,
    RowBackup,
    SharedReadEnds,
    UnresolvedIds,
    build_kv_storage,
)

PAGE_TOKENS = 2


def plan() -> KVStoragePlan:
    state = StateGeometry((TensorDecl("s", (112,), DType.UINT8),))
    return plan_kv_storage(
        [
            KVLayerDecl(0, (KVPart(MLAGeometry(24, 0, DType.UINT8), FullLifetime()),)),
            KVLayerDecl(1, (KVPart(MLAGeometry(40, 0, DType.UINT8), WindowLifetime(5)),)),
            KVLayerDecl(2, (KVPart(state, StateLifetime()),)),
        ],
        page_tokens=PAGE_TOKENS,
    )


class StorageDevice(ModelledTensorDevice):
    """A modelled device from which one wait can be left out."""

    dropped_stream: Stream | None = None
    """The next wait of this stream is dropped."""

    dropped_pair: tuple[str, str] | None = None
    """Waits of the first stream for the second are dropped, while `dropping`."""

    dropping: bool = False

    def wait_event(self, stream: Stream, event: Event) -> None:
        if stream is self.dropped_stream:
            self.dropped_stream = None
        elif not (self.dropping and self.dropped_pair == (stream.name, event.stream.name)):
            super().wait_event(stream, event)


def chosen_token(number: int, length: int) -> int:
    """What a forward leaves that brings request `number` to `length` tokens; 0 before the first."""
    return 1_000 * number + length if length else 0


class Scheduler:
    """The overlap loop with drawn batches: a row's next forward is launched while its last one runs.

    Every page and state slot of a request holds the request's number; a row's state on the device counts its tokens.
    """

    def __init__(
        self,
        seed: int,
        *,
        declares: bool = False,
        dropped: str | None = None,
        dropped_pair: tuple[str, str] | None = None,
        dropped_in: str = "",
        broken: str | None = None,
        retracts: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.declares = declares
        """Whether the forwards' one backend declares its read end."""
        self.dropped = dropped
        """Which wait is missing: "barrier", "upload" or none."""
        self.broken = broken
        """What the storage does wrong: "early reset", "no record of a backup" or nothing."""
        self.retracts = retracts
        """Whether rows are backed up, retracted and restored."""
        self.set_aside: list[tuple[int, RowBackup]] = []
        self.restored = self.retracted_under_a_forward = self.restored_under_its_backup = 0
        self.storage: KVStorage = build_kv_storage(
            plan(),
            budget_bytes=SCRATCH_BYTES + 4_200,
            max_running_requests=6,
            max_context_tokens=40,
            chunk_tokens=8,
            make_device=lambda arena: StorageDevice(arena, seed=seed),
            policy=ServingPolicy(overlap=True),
            check_level=CheckLevel.STRICT,
        )
        self.device = cast(StorageDevice, self.storage.device)
        self.device.dropped_pair = dropped_pair
        self.dropped_in = dropped_in
        """The verb during which those waits are dropped."""
        layout = self.storage.layout
        self.grids = {band.name: UnitGrid(band.origin_bytes, band.unit_bytes) for band in layout.bands}
        self.device.watch(layout)
        self.numbers: dict[int, int] = {}
        self.flying: list[tuple[PreparedStep, Event]] = []
        self.served = 0
        self.reused_under_a_forward = 0

    def run(self, iterations: int) -> None:
        """Launch, then process the forward before: the overlap loop. Ends with nothing in flight and nothing held."""
        for _ in range(iterations):
            if self.retracts:
                self._retract_and_restore()
            self._admit()
            launched = self._launch()
            while len(self.flying) > launched:
                self._process()
            if self.random.random() < 0.3:
                with self.device.model.no_host_waits("flush_opportunistic"):
                    self.storage.flush_opportunistic()
        while self.flying:
            self._process()
        if self.numbers:
            self.storage.release(list(self.numbers))
        self.storage.verify_idle()

    def _admit(self) -> None:
        prompts = [self.random.randint(1, 14) for _ in range(self.random.randint(1, 2))]
        with self.device.model.no_host_waits("admit"):
            rows = self.storage.admit(prompts, [self.random.randint(1, 10) for _ in prompts])
        if isinstance(rows, np.ndarray):
            for row in rows.tolist():
                self.served += 1
                self.numbers[row] = self.served % 250 + 1
                if self.broken == "early reset":
                    rows = torch.from_numpy(self.storage._row_resets.take().resets)
                    self.storage.row_state.reset(rows, torch.zeros_like(rows))
                self.reused_under_a_forward += any(row in step.rows for step, _ in self.flying)

    @contextmanager
    def _verb(self, name: str) -> Iterator[None]:
        self.device.dropping = name == self.dropped_in
        with self.device.model.no_host_waits(name):
            yield
        self.device.dropping = False

    def _retract_and_restore(self) -> None:
        copies = self.storage.statistics().backups
        if self.numbers and len(self.set_aside) < 4 and self.random.random() < 0.4:
            row = self.random.choice(list(self.numbers))
            self.retracted_under_a_forward += any(row in step.rows for step, _ in self.flying)
            begin = self.storage.chain.uses.begin
            if self.broken == "no record of a backup":
                self.storage.chain.uses.begin = lambda signal, units: None  # type: ignore[method-assign]  # the fault
            with self._verb("retract_to_host"):
                (backup,) = self.storage.retract_to_host([row])
            if self.broken == "no record of a backup":
                self.storage._copies._open.clear()
                self.storage.chain.uses.begin = begin  # type: ignore[method-assign]
            self.set_aside.append((self.numbers.pop(row), backup))
        elif self.set_aside and self.random.random() < 0.6:
            number, backup = self.random.choice(self.set_aside)
            with self._verb("restore"):
                rows = self.storage.restore([backup])
            if isinstance(rows, np.ndarray):
                self.restored += 1
                self.restored_under_its_backup += copies.copies_in_flight > 0
                self.set_aside.remove((number, backup))
                self.numbers[int(rows[0])] = number

    def _launch(self) -> bool:
        """A forward over some rows that have tokens left; whether there was one, and it was not aborted."""
        requests, device = self.storage.requests, self.device
        ready = [row for row in self.numbers if requests.prepared[row] < requests.limits[row]]
        rows = np.array(
            self.random.sample(ready, max(0, len(ready) - self.random.choice([0, 0, 1, 9]))), np.int64
        )
        if not len(rows):
            return False
        left = np.maximum(1, requests.prompts[rows] - requests.prepared[rows])
        counts = np.minimum(left, [self.random.randint(1, 8) for _ in rows])
        with device.model.no_host_waits("prepare_step"):
            step = self.storage.prepare_step(rows, counts)
        assert isinstance(step, PreparedStep)
        if self.dropped == "upload":
            device.dropped_stream = device.forward_stream
        with self._verb("launch_forward"):
            ids = self._resolve_later(self.storage.launch_forward(step), step)
        if self.random.random() < 0.1:
            # Its metadata phase is queued, and runs; the layers never come.
            self.storage.abandon(step)
            return False
        ends = SharedReadEnds(device, ["pages"])
        if self.declares:
            ends.declare("pages")
        numbers = [self.numbers[row] for row in rows.tolist()]
        name = f"forward {step.launch.forward}" if step.launch else ""
        device.model.submit(
            device.forward_stream,
            name,
            run=lambda work: self._body(work, name, ids[0], numbers, step),
            discovers=True,
        )
        if self.dropped == "barrier":
            device.dropped_stream = device.schedule_stream
        self.storage.record_forward(step, ends)
        assert step.done_event is not None
        self.flying.append((step, step.done_event))
        return True

    def _resolve_later(self, unresolved: UnresolvedIds, step: PreparedStep) -> list[ForwardIds]:
        """The forward's metadata phase, queued: the ids come in a list that is empty until it has run."""
        numbers = [self.numbers[row] for row in step.rows.tolist()]
        found: list[ForwardIds] = []
        pages_per_row = self.storage.sized.pages_per_row
        first = [row * pages_per_row for row in unresolved.rows.tolist()]

        def resolve(_: RunningWork) -> None:
            found.append(unresolved.resolve())
            state = self.storage.row_state
            lengths, tokens = state.lengths[step.rows].tolist(), state.last_tokens[step.rows].tolist()
            assert lengths == step.starts.tolist(), "state of rows on the device"
            chosen = [
                chosen_token(number, start)
                for number, start in zip(numbers, step.starts.tolist(), strict=True)
            ]
            assert tokens == chosen, "state of rows on the device"

        self.device.model.submit(
            self.device.forward_stream,
            "metadata",
            reads=[
                *(self.device.model.mirror_span("rows", entry, entry + pages_per_row) for entry in first),
                *(self.device.model.mirror_span(f"ids:{band.name}") for band in self.storage.layout.bands),
            ],
            run=resolve,
        )
        return found

    def _body(
        self,
        work: RunningWork,
        name: str,
        ids: ForwardIds,
        numbers: list[int],
        step: PreparedStep,
    ) -> None:
        """Read each row's state, write it and the row's new pages, read all that it has written; retired entries name the sink.

        A page behind the newest token is an aborted launch's, which the row keeps.
        """
        assert ids.state_slots is not None
        slots = ids.state_slots.slots.tolist()
        for slot, number, start in zip(slots, numbers, step.starts.tolist(), strict=True):
            assert (work.read(self._span("state", slot)) == (number if start else 0)).all(), (
                f"{name}: state {slot}"
            )
        owner = np.repeat(np.arange(len(numbers)), step.counts)
        written: dict[str, list[tuple[int, int]]] = {
            band: [
                (int(slot) // PAGE_TOKENS, numbers[place]) for slot, place in zip(slots, owner, strict=True)
            ]
            for band, slots in ids.write_slots.items()
        }
        held = {
            band: [
                (int(page), numbers[place])
                for place, end in enumerate(step.starts + step.counts)
                for page in table[place, : -(-end // PAGE_TOKENS)]
                if page
            ]
            for band, table in ids.page_tables.items()
        }
        written["state"] = held["state"] = list(zip(slots, numbers, strict=True))
        for band, pages in written.items():
            for page, number in dict(pages).items():
                work.write(self._span(band, page), number)
        for band, pages in held.items():
            for page, number in pages:
                assert (work.read(self._span(band, page)) == number).all(), f"{name}: {band} {page}"
        state, ends = self.storage.row_state, (step.starts + step.counts).tolist()
        state.lengths[ids.rows] += torch.from_numpy(step.counts)
        state.last_tokens[ids.rows] = torch.tensor(
            [chosen_token(number, end) for number, end in zip(numbers, ends, strict=True)]
        )

    def _process(self) -> None:
        step, end = self.flying.pop(0)
        self.device.wait_on_host(end)
        with self.device.model.no_host_waits("forward_processed"):
            self.storage.forward_processed(step)
            self.storage.advance(step)
            requests = self.storage.requests
            rows = step.rows[requests.is_same_request(step.rows, step.generations)]
            stops = np.array([self.random.random() < 0.25 for _ in rows], np.bool_)
            over = rows[stops | (requests.lengths[rows] >= requests.limits[rows])]
            if len(over):
                self.storage.release(over)
        for row in over.tolist():
            del self.numbers[row]

    def _span(self, band: str, unit: int) -> Any:
        ids: IntArray = np.array([unit], np.int64)
        return self.device.spans(self.grids[band], ids)[0]


@pytest.mark.requirement("V2", "V3", "K1", "K2", "K4", "L8")
@pytest.mark.parametrize("declares", [False, True])
def test_the_storage_as_shipped_has_no_race_in_any_interleaving(declares: bool) -> None:
    """Forwards read mirrors and pages while the next is prepared and launched, rows end, are handed on, and pages move."""
    served = moved = reused = 0
    for seed in range(12):
        scheduler = Scheduler(seed, declares=declares)
        scheduler.run(90)
        served += scheduler.served
        reused += scheduler.reused_under_a_forward
        moved += scheduler.storage.chain.statistics().moved_units
    assert served > 50
    assert moved > 10
    assert reused > 10


@pytest.mark.requirement("V2", "K4")
@pytest.mark.parametrize("declares", [False, True])
@pytest.mark.parametrize(
    ("dropped", "report"),
    [
        ("barrier", r"upload \d+ of mirror '[^']+' entries .* unordered with metadata reading"),
        ("upload", r"metadata of mirror '[^']+' entries .* unordered with upload \d+ writing"),
    ],
)
def test_each_wait_of_a_launch_is_needed(dropped: str, report: str, declares: bool) -> None:
    """Without the barrier an upload changes ids under the forward before; without the other, a forward reads them too early."""

    def run_seeds() -> None:
        for seed in range(5):
            Scheduler(seed, declares=declares, dropped=dropped).run(60)

    with pytest.raises(UnorderedAccessError) as caught:
        run_seeds()
    assert re.search(report, str(caught.value))


@pytest.mark.requirement("K2")
def test_a_row_reset_when_it_is_handed_out_is_spoilt_by_the_last_forward_of_its_former_request() -> None:
    """Which still runs, and writes the row's values at its end: so the next forward resets them, on its own stream."""

    def run_seeds() -> None:
        for seed in range(5):
            Scheduler(seed, declares=True, broken="early reset").run(90)

    with pytest.raises(AssertionError, match=r"state of rows on the device"):
        run_seeds()


@pytest.mark.requirement("V2", "V3", "K2", "K4", "H1", "H2")
@pytest.mark.parametrize("declares", [False, True])
def test_rows_are_backed_up_and_restored_without_a_race_in_any_interleaving(declares: bool) -> None:
    """While their last forward runs, while pages move, while what they held is another's, and while the backup is still being copied."""
    restored = under_a_forward = under_its_backup = moved = 0
    for seed in range(12):
        scheduler = Scheduler(seed, declares=declares, retracts=True)
        scheduler.run(70)
        restored += scheduler.restored
        under_a_forward += scheduler.retracted_under_a_forward
        under_its_backup += scheduler.restored_under_its_backup
        moved += scheduler.storage.chain.statistics().moved_units
    assert min(restored, under_a_forward, under_its_backup, moved) > 20


@pytest.mark.requirement("V2", "H1", "H2", "K3")
@pytest.mark.parametrize(
    ("dropped_pair", "verb", "copy", "other"),
    [
        (("copy", "forward"), "retract_to_host", "copy to the host", r"forward \d+"),
        (("copy", "schedule"), "retract_to_host", "copy to the host", "move|zeroing"),
        (("copy", "forward"), "restore", "copy from the host", r"forward \d+"),
        (("copy", "schedule"), "restore", "copy from the host", r"move|zeroing|forward \d+"),
        (("forward", "copy"), "launch_forward", "copy from the host", r"forward \d+"),
    ],
)
def test_each_wait_of_a_copy_is_needed(
    dropped_pair: tuple[str, str], verb: str, copy: str, other: str
) -> None:
    """The copy stream stands behind the forward and the schedule stream, and the next forward behind what fills its pages."""

    def run_seeds() -> None:
        for seed in range(12):
            scheduler = Scheduler(
                seed, declares=True, retracts=True, dropped_pair=dropped_pair, dropped_in=verb
            )
            scheduler.run(90)

    with pytest.raises(UnorderedAccessError) as caught:
        run_seeds()
    names = str(caught.value).split(" unordered with ")
    assert len(names) == 2
    for name in (copy, other):
        assert any(re.match(name, one) for one in names), caught.value


@pytest.mark.requirement("V2", "H1", "L5")
def test_what_a_backup_reads_is_written_by_nobody_before_it_has() -> None:
    """Its row is over at once, its pages are the next request's: the ledger's record of the copy makes their writer wait."""

    def run_seeds() -> None:
        for seed in range(12):
            Scheduler(seed, declares=True, retracts=True, broken="no record of a backup").run(70)

    with pytest.raises(UnorderedAccessError, match="copy to the host"):
        run_seeds()
