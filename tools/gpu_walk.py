"""A random walk of a real storage whose forwards overlap, each token holding a number that says whose it is.

On the forward stream every forward begins late, before it resolves its ids, and half of them stop again before they touch a
page; the schedule stream is late in half of the iterations (`gpu_late`). Rows are released under forwards that have not
resolved them yet. So a wait that is missing is a number that is not what it should be, and `walk_with_fault` shows that it is.
"""

import random
import time

import attrs
import numpy as np
import torch

from gpu_late import LATE_CYCLES, Fault, late_device
from gpu_place import Place
from kvtide.arena import gather_pages, gather_tokens, write_tokens
from kvtide.device import IntArray
from kvtide.plan import (
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    KVStoragePlan,
    MHAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    plan_kv_storage,
)
from kvtide.storage import AdmissionRefusal, ForwardIds, KVStorage, PreparedStep

WINDOW, PAGE_TOKENS, CHUNK, CONTEXT = 40, 8, 32, 256
HEADS, DIM = 2, 32
FULL_LAYER, WINDOW_LAYER, STATE_LAYER = 0, 1, 2
ROWS = 32
PHASE = 14
ARENA_BYTES = 600_000


def plan() -> KVStoragePlan:
    """Full attention, a window, and a state: three bands whose units differ in size."""
    attention = MHAGeometry(HEADS, DIM, DIM, DType.FLOAT32)
    state = StateGeometry((TensorDecl("recurrent", (4100,), DType.FLOAT32),))
    return plan_kv_storage(
        [
            KVLayerDecl(FULL_LAYER, (KVPart(attention, FullLifetime()),)),
            KVLayerDecl(WINDOW_LAYER, (KVPart(attention, WindowLifetime(WINDOW)),)),
            KVLayerDecl(STATE_LAYER, (KVPart(state, StateLifetime()),)),
        ],
        page_tokens=PAGE_TOKENS,
    )


@attrs.define(eq=False)
class Request:
    """What is left of one."""

    number: int
    prompt: int
    """Tokens of the prompt still to be written."""
    output: int
    """Tokens of the output still to be written."""


@attrs.define(eq=False)
class Walk:
    """Requests in two groups, whose forwards overlap."""

    place: Place
    storage: KVStorage
    random: random.Random
    errors: torch.Tensor
    """Values read that were not those written, counted on the device."""
    running: dict[int, Request] = attrs.field(factory=dict)
    """By row."""
    in_flight: list[tuple[PreparedStep, list[Request]]] = attrs.field(factory=list)
    requests: int = 0
    forwards: int = 0
    host_seconds: float = 0.0
    """That it took to queue the forwards; delays must last longer."""

    def turn(self, turn: int) -> None:
        """Admit what fits, run one forward of half the rows, then look at the forward before.

        Short requests and long ones come by turns, so that bands want one another's bytes.
        """
        parity, lengths = turn % 2, ((1, 12), (100, 220))[turn // PHASE % 2]
        while not isinstance(
            rows := self.storage.admit(
                [prompt := self.random.randint(*lengths)], [output := self.random.randint(1, 5)]
            ),
            AdmissionRefusal,
        ):
            self.requests += 1
            self.running[int(rows[0])] = Request(self.requests, prompt, output - 1)
        chosen = [row for row in self.running if row % 2 == parity]
        if chosen:
            self.run(chosen)
            if self.random.random() < 0.2:
                self.release([self.random.choice(chosen)])
        while len(self.in_flight) > 1 or (self.in_flight and not chosen):
            self.process(*self.in_flight.pop(0))

    def run(self, rows: list[int]) -> None:
        """Prepare, launch and record one forward."""
        begun = time.perf_counter()
        requests = [self.running[row] for row in rows]
        counts = [min(self.random.randint(1, CHUNK), request.prompt) or 1 for request in requests]
        step = self.storage.prepare_step(rows, counts)
        assert isinstance(step, PreparedStep), f"an admitted request was refused: {step}"
        unresolved = self.storage.launch_forward(step)
        device, stream = self.storage.device, self.storage.device.forward_stream
        numbers = np.array([request.number for request in requests])
        resolved: list[ForwardIds] = []
        self.place.keep_busy(device, stream, LATE_CYCLES)
        self.place.queue(device, stream, lambda: resolved.append(unresolved.resolve()))
        self.place.keep_busy(device, stream, self.random.choice((0, LATE_CYCLES)))
        self.place.queue(
            device, stream, lambda: self.forward(step, numbers, unresolved.write_positions, resolved[0])
        )
        self.storage.record_forward(step)
        self.in_flight.append((step, requests))
        self.forwards += 1
        self.host_seconds += time.perf_counter() - begun

    def process(self, step: PreparedStep, requests: list[Request]) -> None:
        """Wait for a forward, count its tokens, release rows that are done."""
        assert step.done_event is not None
        self.storage.device.wait_on_host(step.done_event)
        self.storage.forward_processed(step)
        self.storage.advance(step)
        done = []
        for row, count, request in zip(step.rows.tolist(), step.counts.tolist(), requests, strict=True):
            if self.running.get(row) is not request:
                continue  # Released under this forward.
            if request.prompt:
                request.prompt -= count
            else:
                request.output -= count
            if not request.prompt and not request.output:
                done.append(row)
        self.release(done)

    def release(self, rows: list[int]) -> None:
        """Let requests go."""
        if rows:
            self.storage.release(rows)
        for row in rows:
            del self.running[row]

    def forward(
        self, step: PreparedStep, numbers: IntArray, write_positions: IntArray, ids: ForwardIds
    ) -> None:
        """Write this step's tokens and states, and read everything that the rows may still read."""
        owners, positions, starts, ends, rows = self.storage.device.send(
            self.storage.device.forward_stream,
            [
                np.repeat(numbers, step.counts),
                write_positions,
                step.starts,
                step.starts + step.counts,
                numbers,
            ],
        )
        for layer, window in ((FULL_LAYER, CONTEXT), (WINDOW_LAYER, WINDOW)):
            view = self.storage.routed_cache.attention(layer)
            assert view is not None
            table = ids.page_tables[view.band]
            assert table.dtype == ids.write_slots[view.band].dtype == torch.int64, "kernels are told int64"
            at = torch.arange(table.shape[1] * PAGE_TOKENS, device=table.device)
            slots = table[:, at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS
            readable = (at < ends[:, None]) & (at > starts[:, None] - window)
            for place, plane in enumerate(view.planes.values()):
                written = entry(owners, positions, layer + place).view(-1, 1, 1).expand(-1, HEADS, DIM)
                write_tokens(plane, ids.write_slots[view.band], written)
                read = gather_tokens(plane, torch.where(readable, slots, -1)).flatten(2)
                expected = torch.where(readable, entry(rows[:, None], at, layer + place), 0.0)
                self.errors += (read != expected[..., None]).sum()
                self.errors += (~gather_pages(plane, table).isfinite()).sum()
        self.state(ids, starts, ends)

    def state(self, ids: ForwardIds, starts: torch.Tensor, ends: torch.Tensor) -> None:
        """A state counts its tokens; a new one is zero."""
        view = self.storage.routed_cache.state(STATE_LAYER)
        assert view is not None
        assert ids.state_slots is not None
        assert ids.state_slots.slots.dtype == torch.int64, "kernels are told int64"
        plane = view.planes["recurrent"].unsqueeze(1)
        self.errors += (gather_tokens(plane, ids.state_slots.slots) != starts[:, None]).sum()
        write_tokens(plane, ids.state_slots.slots, ends[:, None].expand(-1, plane.shape[2]).float())


def entry(requests: torch.Tensor, positions: torch.Tensor, layer: int) -> torch.Tensor:
    """What a token holds: a whole number below 2^24, exact in float32."""
    return (requests % 4000 * 4096 + positions * 8 + layer).float()


def walked(place: Place, turns: int, seed: int, fault: Fault) -> tuple[Walk, int]:
    """A walk that has ended, and how many values it read that were not those written."""
    draw = random.Random(seed)  # noqa: S311  # draws a schedule
    storage = place.storage(
        plan(),
        ARENA_BYTES,
        rows=ROWS,
        context=CONTEXT,
        chunk=CHUNK,
        wrap=lambda device: late_device(place, device, draw, fault),
    )
    run = Walk(place, storage, draw, torch.zeros((), dtype=torch.int64, device=place.memory))
    place.synchronize()
    for turn in range(turns):
        run.turn(turn)
    while run.in_flight:
        run.process(*run.in_flight.pop(0))
    place.synchronize()
    return run, int(run.errors.item())


def walk(place: Place, turns: int, seed: int) -> str:
    """Run one; what it did, in words. Raises `AssertionError` when a row read what it did not write."""
    run, errors = walked(place, turns, seed, Fault.NONE)
    moved = run.storage.chain.statistics().moved_units
    assert errors == 0, f"{errors} values read were not those written"
    assert moved > 0, "no page moved: the walk shows nothing of moves"
    run.release(list(run.running))
    run.storage.verify_idle()
    return f"{run.forwards} forwards of {run.requests} requests, {moved} units moved"


def walk_with_fault(place: Place, turns: int, fault: Fault) -> str:
    """Leave out waits until a walk notices; in words, how soon. Raises `AssertionError` when none of a few seeds does."""
    queued_ms = 0.0
    for seed in range(3):
        run, errors = walked(place, turns, seed, fault)
        queued_ms = max(queued_ms, run.host_seconds / run.forwards * 1e3)
        if errors:
            return f"caught by seed {seed} in {run.forwards} forwards: {errors} values were not those written"
    raise AssertionError(
        "not caught: the walk could not see this fault, and shows nothing of these waits. The host took "
        f"{queued_ms:.1f} ms to queue a forward; a delay of {LATE_CYCLES} cycles, "
        f"{LATE_CYCLES / 2e6:.0f} ms at 2 GHz, must last several times as long"
    )
