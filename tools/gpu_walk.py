"""A random walk of a real storage with overlapping forwards, and a decode step replayed as one CUDA graph while pages move."""

import math
import random

import attrs
import numpy as np
import torch

from gpu_place import Place, keep_busy
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
from kvtide.storage import AdmissionRefusal, ForwardIds, KVStorage, PreparedStep, UnresolvedIds

WINDOW, PAGE_TOKENS, CHUNK, CONTEXT = 40, 8, 32, 256
HEADS, DIM = 2, 32
FULL_LAYER, WINDOW_LAYER, STATE_LAYER = 0, 1, 2
ROWS = 12
ARENA_BYTES = 600_000
DELAY_CYCLES = 300_000


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
class Walk:
    """Requests in two groups, whose forwards overlap; each token holds a number of its request, layer and position."""

    place: Place
    storage: KVStorage
    random: random.Random
    errors: torch.Tensor
    """Values read that were not those written, counted on the device."""
    left: dict[int, list[int]] = attrs.field(factory=dict)
    """By row: tokens of prompt and output still to come, and the request's number."""
    in_flight: list[PreparedStep] = attrs.field(factory=list)
    requests: int = 0
    forwards: int = 0

    def turn(self, parity: int) -> None:
        """Admit what fits, run one forward of half the rows, then look at the forward before."""
        while not isinstance(
            rows := self.storage.admit(
                [prompt := self.random.randint(1, 180)], [output := self.random.randint(1, 24)]
            ),
            AdmissionRefusal,
        ):
            self.requests += 1
            self.left[int(rows[0])] = [prompt, output - 1, self.requests]
        chosen = [row for row in self.left if row % 2 == parity]
        if chosen:
            self.run(chosen)
        while len(self.in_flight) > 1 or (self.in_flight and not chosen):
            self.process(self.in_flight.pop(0))

    def run(self, rows: list[int]) -> None:
        """Prepare, launch and record one forward."""
        counts = [min(self.random.randint(1, CHUNK), self.left[row][0]) or 1 for row in rows]
        step = self.storage.prepare_step(rows, counts)
        assert isinstance(step, PreparedStep), f"an admitted request was refused: {step}"
        unresolved = self.storage.launch_forward(step)
        with self.place.on(self.storage.device.forward_stream):
            self.forward(step, unresolved)
        self.storage.record_forward(step)
        self.in_flight.append(step)
        self.forwards += 1

    def process(self, step: PreparedStep) -> None:
        """Wait for a forward, count its tokens, release rows that are done or unlucky."""
        assert step.done_event is not None
        self.storage.device.wait_on_host(step.done_event)
        self.storage.forward_processed(step)
        self.storage.advance(step)
        for row, count in zip(step.rows.tolist(), step.counts.tolist(), strict=True):
            self.left[row][0 if self.left[row][0] else 1] -= count
        done = [
            row for row in step.rows.tolist() if self.left[row][:2] == [0, 0] or self.random.random() < 0.01
        ]
        if done:
            self.storage.release(done)
            for row in done:
                del self.left[row]

    def forward(self, step: PreparedStep, unresolved: UnresolvedIds) -> None:
        """Write this step's tokens and states, and read everything that the rows may still read."""
        ids = unresolved.resolve()
        if self.place.is_gpu:
            keep_busy(DELAY_CYCLES)
        numbers = np.array([self.left[row][2] for row in step.rows.tolist()])
        token_requests = np.repeat(numbers, step.counts)
        row_ends = step.starts + step.counts
        device = self.storage.device
        requests, positions, starts, ends, row_requests = device.send(
            device.forward_stream,
            [token_requests, unresolved.write_positions, step.starts, row_ends, numbers],
        )
        for layer, window in ((FULL_LAYER, CONTEXT), (WINDOW_LAYER, WINDOW)):
            view = self.storage.routed_cache.attention(layer)
            assert view is not None
            table = ids.page_tables[view.band]
            columns = table.shape[1] * PAGE_TOKENS
            at = torch.arange(columns, device=table.device)
            slots = torch.repeat_interleave(table * PAGE_TOKENS, PAGE_TOKENS, dim=1) + at % PAGE_TOKENS
            readable = (at < ends[:, None]) & (at > starts[:, None] - window)
            for place, plane in enumerate(view.planes.values()):
                written = entry(requests, positions, layer + place).view(-1, 1, 1).expand(-1, HEADS, DIM)
                write_tokens(plane, ids.write_slots[view.band], written)
                read = gather_tokens(plane, torch.where(readable, slots, -1)).flatten(2)
                expected = torch.where(readable, entry(row_requests[:, None], at, layer + place), 0.0)
                self.errors += (read != expected[..., None]).sum()
                self.errors += (~gather_pages(plane, table).isfinite()).sum()
        self.state(ids, starts, ends)

    def state(self, ids: ForwardIds, starts: torch.Tensor, ends: torch.Tensor) -> None:
        """A state counts its tokens; a new one is zero."""
        view = self.storage.routed_cache.state(STATE_LAYER)
        assert view is not None
        assert ids.state_slots is not None
        plane = view.planes["recurrent"].unsqueeze(1)
        self.errors += (gather_tokens(plane, ids.state_slots) != starts[:, None]).sum()
        write_tokens(plane, ids.state_slots, ends[:, None].expand(-1, plane.shape[2]).float())


def entry(requests: torch.Tensor, positions: torch.Tensor, layer: int) -> torch.Tensor:
    """What a token holds: a whole number below 2^24, exact in float32."""
    return (requests % 4000 * 4096 + positions * 8 + layer).float()


def walk(place: Place, turns: int, seed: int) -> str:
    """Run one; what it did, in words. Raises `AssertionError` when a row read what it did not write."""
    storage = place.storage(plan(), ARENA_BYTES, rows=ROWS, context=CONTEXT, chunk=CHUNK)
    errors = torch.zeros((), dtype=torch.int64, device=place.memory)
    place.synchronize()
    run = Walk(place, storage, random.Random(seed), errors)  # noqa: S311  # draws a schedule
    for turn in range(turns):
        run.turn(turn % 2)
    while run.in_flight:
        run.process(run.in_flight.pop(0))
    place.synchronize()
    moved = storage.chain.statistics().moved_units
    assert run.errors.item() == 0, f"{run.errors.item()} values read were not those written"
    assert moved > 0, "no page moved: the walk shows nothing of moves"
    if run.left:
        storage.release(list(run.left))
    storage.verify_idle()
    return f"{run.forwards} forwards of {run.requests} requests, {moved} units moved"


# --- a decode step as one graph -----------------------------------------------------------------------------------

BATCH = 4
COLUMNS = CONTEXT // PAGE_TOKENS


@attrs.define(eq=False)
class Decode:
    """One token for each of `BATCH` rows through two attention layers, on buffers at fixed addresses."""

    place: Place
    storage: KVStorage
    positions: torch.Tensor
    tables: dict[int, torch.Tensor]
    slots: dict[int, torch.Tensor]
    plain: dict[int, dict[str, torch.Tensor]]
    """By layer and plane: the same tokens without pages, `[BATCH, CONTEXT, HEADS, DIM]`."""

    def paged(self) -> torch.Tensor:
        """The outputs over the arena."""
        outputs = []
        for layer, window in ((FULL_LAYER, CONTEXT), (WINDOW_LAYER, WINDOW)):
            view = self.storage.routed_cache.attention(layer)
            assert view is not None
            read = {}
            for name, plane in view.planes.items():
                write_tokens(plane, self.slots[layer], features(self.positions, layer, name))
                read[name] = gather_pages(plane, self.tables[layer]).flatten(1, 2)
            outputs.append(self.attend(read, layer, window))
        return torch.stack(outputs)

    def without_pages(self) -> torch.Tensor:
        """The outputs over plain tensors."""
        outputs = []
        rows = torch.arange(BATCH, device=self.positions.device)
        for layer, window in ((FULL_LAYER, CONTEXT), (WINDOW_LAYER, WINDOW)):
            for name, tokens in self.plain[layer].items():
                tokens[rows, self.positions] = features(self.positions, layer, name)
            outputs.append(self.attend(self.plain[layer], layer, window))
        return torch.stack(outputs)

    def attend(self, read: dict[str, torch.Tensor], layer: int, window: int) -> torch.Tensor:
        """Attention of each row's newest token over its window."""
        query = features(self.positions, layer, "query")
        at = torch.arange(CONTEXT, device=query.device)
        visible = (at <= self.positions[:, None]) & (at > self.positions[:, None] - window)
        scores = (query[:, None] * read["key"]).sum(-1) / math.sqrt(DIM)
        weights = scores.masked_fill(~visible[..., None], -math.inf).softmax(1)
        return (weights[..., None] * read["value"]).sum(1)

    def load(self, ids: ForwardIds, positions: torch.Tensor) -> None:
        """Copy one step's ids to the fixed addresses; columns behind a row's end name the sink."""
        self.positions.copy_(positions)
        for layer, table in self.tables.items():
            view = self.storage.routed_cache.attention(layer)
            assert view is not None
            pages = ids.page_tables[view.band]
            table.zero_()
            table[:, : pages.shape[1]].copy_(pages)
            self.slots[layer].copy_(ids.write_slots[view.band])


def features(positions: torch.Tensor, layer: int, name: str) -> torch.Tensor:
    """`[…, HEADS, DIM]` of a position, different in each layer and plane."""
    place = torch.arange(HEADS * DIM, device=positions.device).view(HEADS, DIM)
    phase = layer + {"key": 1, "value": 2, "query": 3}[name]
    return torch.sin(positions[..., None, None] * 0.37 + place * 0.11 + phase)


def decode_under_moves(place: Place, steps: int, seed: int) -> str:
    """Replay a captured decode step while other requests come and go; what it did, in words."""
    storage = place.storage(plan(), ARENA_BYTES, rows=ROWS, context=CONTEXT, chunk=CHUNK)
    device, draw = storage.device, random.Random(seed)  # noqa: S311  # draws a schedule
    decode = Decode(
        place,
        storage,
        positions=torch.zeros(BATCH, dtype=torch.int64, device=place.memory),
        tables={
            layer: torch.zeros(BATCH, COLUMNS, dtype=torch.int64, device=place.memory) for layer in (0, 1)
        },
        slots={layer: torch.zeros(BATCH, dtype=torch.int64, device=place.memory) for layer in (0, 1)},
        plain={
            layer: {
                name: torch.zeros(BATCH, CONTEXT, HEADS, DIM, device=place.memory)
                for name in ("key", "value")
            }
            for layer in (0, 1)
        },
    )
    rows = storage.admit([1] * BATCH, [steps + 2] * BATCH)
    assert not isinstance(rows, AdmissionRefusal), str(rows)
    place.synchronize()
    graph: torch.cuda.CUDAGraph | None = None
    wrong = torch.zeros((), dtype=torch.int64, device=place.memory)
    output = torch.zeros(0, device=place.memory)
    others: list[int] = []
    for _ in range(steps):
        churn(place, storage, others, draw)
        step, unresolved = launched(storage, rows, [1] * BATCH)
        with place.on(device.forward_stream):
            ids = unresolved.resolve()
            (positions,) = device.send(device.forward_stream, [unresolved.write_positions])
            decode.load(ids, positions)
            if graph is None:
                # The first step runs as it is, and compiles; then it is captured, which runs nothing.
                output = decode.paged()
                if place.is_gpu:
                    place.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                        output = decode.paged()
            if graph is not None:
                graph.replay()
            wrong += (output != decode.without_pages()).sum()
        finish(storage, step)
    place.synchronize()
    moved = storage.chain.statistics().moved_units
    assert wrong.item() == 0, f"{wrong.item()} outputs differ from those without pages"
    assert moved > 0, "no page moved between replays"
    return f"{steps} replays, {moved} units moved between them, outputs equal to the last bit"


def churn(place: Place, storage: KVStorage, others: list[int], draw: random.Random) -> None:
    """Let one other request come, with a first chunk of −1 in every token, or let one go."""
    admitted = storage.admit([CHUNK], [draw.randint(1, 40)])
    if isinstance(admitted, AdmissionRefusal):
        storage.release([others.pop(draw.randrange(len(others)))])
        return
    others.append(int(admitted[0]))
    step, unresolved = launched(storage, admitted, [CHUNK])
    with place.on(storage.device.forward_stream):
        ids = unresolved.resolve()
        for layer in (FULL_LAYER, WINDOW_LAYER):
            view = storage.routed_cache.attention(layer)
            assert view is not None
            for plane in view.planes.values():
                tokens = torch.full((CHUNK, HEADS, DIM), -1.0, device=place.memory)
                write_tokens(plane, ids.write_slots[view.band], tokens)
    finish(storage, step)


def launched(storage: KVStorage, rows: IntArray, counts: list[int]) -> tuple[PreparedStep, UnresolvedIds]:
    """A step that was prepared and launched."""
    step = storage.prepare_step(rows, counts)
    assert isinstance(step, PreparedStep), f"an admitted request was refused: {step}"
    return step, storage.launch_forward(step)


def finish(storage: KVStorage, step: PreparedStep) -> None:
    """Record a forward, wait for it, and count its tokens."""
    storage.record_forward(step)
    assert step.done_event is not None
    storage.device.wait_on_host(step.done_event)
    storage.forward_processed(step)
    storage.advance(step)
