"""`KVStorage` as it ships on the modelled device: its waits and its uploads suffice, and each that is missing shows (K4)."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import pytest
import torch

from kvtide.arena import SCRATCH_BYTES, KVArena
from kvtide.device import Event, IntArray, ModelledDevice, RunningWork, Stream, UnitGrid, UnorderedAccessError
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
from kvtide.storage import ForwardIds, KVStorage, PreparedStep, UnresolvedIds, build_kv_storage

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


class StorageDevice(ModelledDevice):
    """The modelled device as `KVStorage` wants one: with a torch arena and torch tables over the same bytes."""

    def __init__(self, arena: KVArena, seed: int) -> None:
        super().__init__(arena.byte_count, seed=seed, random_queries=True, memory=arena.bytes.numpy())
        self.torch_arena = arena
        self.dropped_stream: Stream | None = None
        """The next wait of this stream is dropped."""

    @property
    def arena(self) -> Any:
        return self.torch_arena

    @property
    def tables(self) -> Any:
        return {name: torch.from_numpy(table) for name, table in super().tables.items()}

    def send(self, stream: Stream, arrays: Sequence[IntArray]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    @property
    def scratch_bytes(self) -> int:
        return SCRATCH_BYTES

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def prewarm(self, grids: Sequence[UnitGrid]) -> None:
        """Nothing is compiled."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        if stream is self.dropped_stream:
            self.dropped_stream = None
        else:
            super().wait_event(stream, event)


class Scheduler:
    """Two groups of requests whose forwards overlap; every page of a request holds the request's number."""

    def __init__(self, seed: int, dropped: str | None = None) -> None:
        self.random = random.Random(seed)
        self.dropped = dropped
        """Which wait of `launch_forward` is missing: "barrier", "upload" or none."""
        self.storage: KVStorage = build_kv_storage(
            plan(),
            budget_bytes=SCRATCH_BYTES + 2_600,
            max_running_requests=6,
            max_context_tokens=40,
            chunk_tokens=8,
            make_device=cast(Any, lambda arena: StorageDevice(arena, seed)),
        )
        self.device = cast(StorageDevice, self.storage.device)
        layout = self.storage.layout
        self.grids = {band.name: UnitGrid(band.origin_bytes, band.unit_bytes) for band in layout.bands}
        for band in layout.bands:
            if band.has_sink:
                sink = self.device.unit_spans(self.grids[band.name], np.zeros(1, np.int64))
                self.device.allow_unordered(sink[0])
        self.numbers: dict[int, int] = {}
        self.groups: list[list[int]] = [[], []]
        self.flying: list[tuple[PreparedStep, Event]] = []
        self.served = 0

    def run(self, iterations: int) -> None:
        """Launch, then process the forward before: the overlap loop. Ends with nothing in flight and nothing held."""
        for iteration in range(iterations):
            group = self.groups[iteration % 2]
            if not group:
                self._admit(group)
            if group:
                self._launch(group)
            while len(self.flying) > (1 if group else 0):
                self._process()
        while self.flying:
            self._process()
        for group in self.groups:
            if group:
                self.storage.release(group)
        self.storage.verify_idle()

    def _admit(self, group: list[int]) -> None:
        prompts = [self.random.randint(1, 14) for _ in range(self.random.randint(1, 3))]
        with self.device.no_host_waits("admit"):
            rows = self.storage.admit(prompts, [self.random.randint(1, 10) for _ in prompts])
        if isinstance(rows, np.ndarray):
            for row in rows.tolist():
                self.served += 1
                self.numbers[row] = self.served % 250 + 1
                group.append(row)

    def _launch(self, group: list[int]) -> None:
        requests, device = self.storage.requests, self.device
        rows = np.array(group)
        left = np.maximum(1, requests.prompts[rows] - requests.lengths[rows])
        counts = np.minimum(left, [self.random.randint(1, 8) for _ in group])
        with device.no_host_waits("prepare_step"):
            step = self.storage.prepare_step(rows, counts)
        assert isinstance(step, PreparedStep)
        if self.dropped == "barrier" and self.flying:
            device.dropped_stream = device.schedule_stream
        elif self.dropped == "upload":
            device.dropped_stream = device.forward_stream
        with device.no_host_waits("launch_forward"):
            ids = self._resolve_later(self.storage.launch_forward(step))
        numbers = [self.numbers[row] for row in group]
        name = f"forward {step.launch.forward}" if step.launch else ""
        device.submit(
            device.forward_stream,
            name,
            run=lambda work: self._body(work, name, ids[0], numbers, step),
            discovers=True,
        )
        self.storage.record_forward(step)
        self.flying.append((step, device.record_event(device.forward_stream)))

    def _resolve_later(self, unresolved: UnresolvedIds) -> list[ForwardIds]:
        """The forward's metadata phase, queued: the ids come in a list that is empty until it has run."""
        found: list[ForwardIds] = []
        pages_per_row = self.storage.sized.pages_per_row
        first = [row * pages_per_row for row in unresolved.rows.tolist()]
        self.device.submit(
            self.device.forward_stream,
            "metadata",
            reads=[
                *(self.device.mirror_span("rows", entry, entry + pages_per_row) for entry in first),
                *(self.device.mirror_span(f"ids:{band.name}") for band in self.storage.layout.bands),
            ],
            run=lambda _: found.append(unresolved.resolve()),
        )
        return found

    def _body(
        self, work: RunningWork, name: str, ids: ForwardIds, numbers: list[int], step: PreparedStep
    ) -> None:
        """Write each row's new pages and its state, then read all it holds; padded and retired entries name the sink."""
        owner = np.repeat(np.arange(len(numbers)), step.counts)
        written: dict[str, list[tuple[int, int]]] = {
            band: [
                (int(slot) // PAGE_TOKENS, numbers[place]) for slot, place in zip(slots, owner, strict=True)
            ]
            for band, slots in ids.write_slots.items()
        }
        held = {
            band: [(int(page), numbers[row]) for row, pages in enumerate(table) for page in pages if page]
            for band, table in ids.page_tables.items()
        }
        assert ids.state_slots is not None
        written["state"] = held["state"] = list(zip(ids.state_slots.tolist(), numbers, strict=True))
        for band, pages in written.items():
            for page, number in dict(pages).items():
                work.write(self._span(band, page), number)
        for band, pages in held.items():
            for page, number in pages:
                assert (work.read(self._span(band, page)) == number).all(), f"{name}: {band} {page}"

    def _process(self) -> None:
        step, end = self.flying.pop(0)
        self.device.wait_on_host(end)
        with self.device.no_host_waits("forward_processed"):
            self.storage.forward_processed(step)
            self.storage.advance(step)
            requests = self.storage.requests
            over = step.rows[requests.lengths[step.rows] >= requests.limits[step.rows]]
            if len(over):
                self.storage.release(over)
        for group in self.groups:
            group[:] = [row for row in group if row not in over.tolist()]

    def _span(self, band: str, unit: int) -> Any:
        ids: IntArray = np.array([unit], np.int64)
        return self.device.unit_spans(self.grids[band], ids)[0]


@pytest.mark.requirement("V2", "V3", "K4")
def test_the_storage_as_shipped_has_no_race_in_any_interleaving() -> None:
    """Forwards read mirrors and pages while the next is prepared, launched and another's pages are freed."""
    served = moved = 0
    for seed in range(12):
        scheduler = Scheduler(seed)
        scheduler.run(60)
        served += scheduler.served
        moved += scheduler.storage.chain.statistics().moved_units
    assert served > 50
    assert moved > 10


@pytest.mark.requirement("V2", "K4")
@pytest.mark.parametrize(
    ("dropped", "report"),
    [
        ("barrier", r"upload \d+ of mirror '[^']+' entries .* unordered with metadata reading"),
        ("upload", r"metadata of mirror '[^']+' entries .* unordered with upload \d+ writing"),
    ],
)
def test_each_wait_of_a_launch_is_needed(dropped: str, report: str) -> None:
    """Without the barrier an upload changes ids under the forward before; without the other, a forward reads them too early."""

    def run_seeds() -> None:
        for seed in range(5):
            Scheduler(seed, dropped).run(60)

    with pytest.raises(UnorderedAccessError) as caught:
        run_seeds()
    assert re.search(report, str(caught.value))
