"""The overlap loop over `KVStorage` as it ships, on the modelled device, with batches and timing that a seed draws.

A row's next forward is launched while its last one runs; launches are given up before or behind their metadata phase; rows end, are
handed on, and pages move; where rows are retracted, they are restored later. Every page and state slot of a request holds the request's
number, and a row's state on the device counts its tokens and names the last, so a wrong byte says so; an access that nothing orders is
a race, whatever it found.
"""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch

from kvtide.arena import SCRATCH_BYTES
from kvtide.device import ByteSpan, Event, IntArray, RunningWork, UnitGrid
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
BACKENDS = ("metadata", "layers")


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


def chosen_token(number: int, length: int) -> int:
    """What a forward leaves that brings request `number` to `length` tokens; 0 before the first."""
    return 1_000 * number + length if length else 0


class Scheduler:
    """One storage and its scheduler; a forward has two backends, and the second may look its rows up as late as in its layers."""

    def __init__(self, seed: int, *, declaring: int = 2, retracts: bool = False) -> None:
        """`declaring` of the two backends declare their read ends; `retracts` rows to host memory, and restores them."""
        self.random = random.Random(seed)
        self.declaring = declaring
        self.retracts = retracts
        self.storage: KVStorage = build_kv_storage(
            plan(),
            budget_bytes=SCRATCH_BYTES + 4_200,
            max_running_requests=6,
            max_context_tokens=40,
            chunk_tokens=8,
            make_device=lambda arena: ModelledTensorDevice(arena, seed=seed),
            policy=ServingPolicy(overlap=True),
            check_level=CheckLevel.STRICT,
        )
        self.device = cast(ModelledTensorDevice, self.storage.device)
        layout = self.storage.layout
        self.grids = {band.name: UnitGrid(band.origin_bytes, band.unit_bytes) for band in layout.bands}
        self.device.watch(layout)
        self.numbers: dict[int, int] = {}
        self.flying: list[tuple[PreparedStep, Event]] = []
        self.served = 0
        self.reused_under_a_forward = 0
        self.set_aside: list[tuple[int, RowBackup]] = []
        self.restored = self.retracted_under_a_forward = self.restored_under_its_backup = 0

    def run(self, iterations: int) -> None:
        """Launch, then process the forward before: the overlap loop. Ends with nothing in flight and nothing held."""
        for _ in range(iterations):
            if self.retracts:
                self._retract_or_restore()
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
                self.reused_under_a_forward += any(row in step.rows for step, _ in self.flying)

    def _retract_or_restore(self) -> None:
        in_flight = self.storage.statistics().backups.copies_in_flight
        if self.numbers and len(self.set_aside) < 4 and self.random.random() < 0.4:
            row = self.random.choice(list(self.numbers))
            self.retracted_under_a_forward += any(row in step.rows for step, _ in self.flying)
            with self.device.model.no_host_waits("retract_to_host"):
                (backup,) = self.storage.retract_to_host([row])
            self.set_aside.append((self.numbers.pop(row), backup))
        elif self.set_aside and self.random.random() < 0.6:
            place = self.random.randrange(len(self.set_aside))
            number, backup = self.set_aside[place]
            with self.device.model.no_host_waits("restore"):
                rows = self.storage.restore([backup])
            if isinstance(rows, np.ndarray):
                self.restored += 1
                self.restored_under_its_backup += in_flight > 0
                del self.set_aside[place]
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
        with device.model.no_host_waits("launch_forward"):
            unresolved = self.storage.launch_forward(step)
        abandoned = self.random.choices(["no", "at once", "behind its metadata phase"], [18, 1, 1])[0]
        if abandoned == "at once":
            self.storage.abandon(step)
            return False
        looked_up = self._rows_of(unresolved)
        ids = self._resolve_later(unresolved, step, looked_up)
        if abandoned != "no":
            # What is queued runs; the layers never come.
            self.storage.abandon(step)
            return False
        ends = SharedReadEnds(device, BACKENDS)
        ends.declare(*BACKENDS[: self.declaring])
        late = looked_up if self.declaring < len(BACKENDS) else []
        numbers = [self.numbers[row] for row in rows.tolist()]
        name = f"forward {step.launch.forward}" if step.launch else ""

        def run_layers(work: RunningWork) -> None:
            for span in late:
                work.read(span)
            self._body(work, name, ids[0], numbers, step)

        device.model.submit(device.forward_stream, name, run=run_layers, discovers=True)
        self.storage.record_forward(step, ends)
        assert step.done_event is not None
        self.flying.append((step, step.done_event))
        return True

    def _rows_of(self, unresolved: UnresolvedIds) -> list[ByteSpan]:
        """What a forward looks up in the mirror of the request table."""
        pages_per_row = self.storage.sized.pages_per_row
        first = [row * pages_per_row for row in unresolved.rows.tolist()]
        return [self.device.model.mirror_span("rows", entry, entry + pages_per_row) for entry in first]

    def _resolve_later(
        self, unresolved: UnresolvedIds, step: PreparedStep, looked_up: list[ByteSpan]
    ) -> list[ForwardIds]:
        """The forward's metadata phase, queued: the ids come in a list that is empty until it has run."""
        found: list[ForwardIds] = []
        starts = step.starts.tolist()
        last = [
            chosen_token(self.numbers[row], start)
            for row, start in zip(step.rows.tolist(), starts, strict=True)
        ]

        def resolve(_: RunningWork) -> None:
            found.append(unresolved.resolve())
            state = self.storage.row_state
            assert state.lengths[step.rows].tolist() == starts, "state of rows on the device"
            assert state.last_tokens[step.rows].tolist() == last, "state of rows on the device"

        self.device.model.submit(
            self.device.forward_stream,
            "metadata",
            reads=[
                *looked_up,
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
