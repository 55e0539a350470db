"""A decode step captured as one CUDA graph and replayed while pages move (row K13).

Everything between a step's rows and its outputs is in the graph: rows look their virtual pages up in the mirror of the request
table, those are translated by the mirrors of the bands, tokens are written and pages gathered, states are read and written. Its
inputs lie at fixed addresses. A step fills them for the rows that take part, in places drawn anew; the other places are padding,
whose tokens name the sink and whose state is −1. The same step over plain tensors must give the same bits.
"""

import math
import random
from collections.abc import Callable

import attrs
import numpy as np
import torch

from gpu_place import Place
from gpu_walk import (
    CHUNK,
    CONTEXT,
    DIM,
    FULL_LAYER,
    HEADS,
    PAGE_TOKENS,
    PHASE,
    ROWS,
    STATE_LAYER,
    WINDOW,
    WINDOW_LAYER,
    plan,
)
from kvtide.arena import (
    LayerView,
    TensorDevice,
    gather_pages,
    gather_tokens,
    token_slots,
    translate_ids,
    write_tokens,
)
from kvtide.device import IntArray
from kvtide.storage import AdmissionRefusal, KVStorage, PreparedStep, UnresolvedIds

PLACES, REQUESTS = 6, 4
"""Rows that the graph has room for, and requests that decode."""

PADDING = (-1, 0, -1, REQUESTS)
"""Of a place where no row is: what `Inputs` says."""

ARENA_BYTES = 900_000

WINDOWS = {FULL_LAYER: CONTEXT, WINDOW_LAYER: WINDOW}


def features(positions: torch.Tensor, layer: int, name: str) -> torch.Tensor:
    """`[…, HEADS, DIM]` of a position, different in each layer and plane."""
    place = torch.arange(HEADS * DIM, device=positions.device).view(HEADS, DIM)
    phase = layer + {"key": 1, "value": 2, "query": 3}[name]
    return torch.sin(positions[..., None, None] * 0.37 + place * 0.11 + phase)


def attend(read: dict[str, torch.Tensor], positions: torch.Tensor, layer: int) -> torch.Tensor:
    """Attention of each row's newest token over its window, `[PLACES, HEADS, DIM]`."""
    at = torch.arange(CONTEXT, device=positions.device)
    visible = (at <= positions[:, None]) & (at > positions[:, None] - WINDOWS[layer])
    scores = (features(positions, layer, "query")[:, None] * read["key"]).sum(-1) / math.sqrt(DIM)
    weights = scores.masked_fill(~visible[..., None], -math.inf).softmax(1)
    return (weights[..., None] * read["value"]).sum(1)


def next_state(state: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What a state of `[PLACES, …]` becomes with a token."""
    return state * 0.5 + torch.sin(positions * 0.7)[:, None]


@attrs.define(eq=False)
class Inputs:
    """What a step brings, at fixed addresses, `[PLACES]` each."""

    rows: torch.Tensor
    """Rows of the request table; −1 in a padded place."""
    positions: torch.Tensor
    """Of the token written; 0 in a padded place."""
    state_slots: torch.Tensor
    """Virtual; −1 in a padded place."""
    requests: torch.Tensor
    """Which of the plain tensors' rows; the last, which is nobody's, in a padded place."""

    @classmethod
    def of_padding(cls, memory: str) -> "Inputs":
        """No row takes part."""
        return cls(*[torch.full((PLACES,), value, dtype=torch.int64, device=memory) for value in PADDING])

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All four."""
        return self.rows, self.positions, self.state_slots, self.requests


@attrs.define(eq=False)
class Paged:
    """The step over the arena."""

    storage: KVStorage
    inputs: Inputs
    tables: dict[int, torch.Tensor] = attrs.field(factory=dict)
    """By layer: the physical pages that the last step read, `[PLACES, pages a row]`."""

    def view(self, layer: int) -> LayerView:
        """Of a layer, which has one."""
        (view,) = self.storage.routed_cache.views(layer)
        return view

    def step(self) -> list[torch.Tensor]:
        """Outputs of both attention layers, and states."""
        mirrors, positions = self.storage.device.tables, self.inputs.positions
        row_table = mirrors["rows"].view(-1, self.storage.sized.pages_per_row)
        columns = torch.arange(row_table.shape[1], device=positions.device)
        is_held = (self.inputs.rows >= 0)[:, None] & (columns <= (positions // PAGE_TOKENS)[:, None])
        virtual = torch.where(is_held, row_table[self.inputs.rows.clamp(min=0)], 0)
        outputs = []
        for layer in WINDOWS:
            view = self.view(layer)
            table = self.tables[layer] = translate_ids(mirrors[f"ids:{view.band}"], virtual)
            page = table.gather(1, (positions // PAGE_TOKENS)[:, None])[:, 0]
            slots = token_slots(page, positions % PAGE_TOKENS, PAGE_TOKENS)
            read = {}
            for name, plane in view.planes.items():
                write_tokens(plane, slots, features(positions, layer, name))
                read[name] = gather_pages(plane, table).flatten(1, 2)
            outputs.append(attend(read, positions, layer))
        view = self.view(STATE_LAYER)
        slots = translate_ids(mirrors[f"ids:{view.band}"], self.inputs.state_slots)
        plane = view.planes["recurrent"].unsqueeze(1)
        state = next_state(gather_tokens(plane, slots), positions)
        write_tokens(plane, slots, state)
        return [*outputs, state]


@attrs.define(eq=False)
class Plain:
    """The same step without pages: one tensor a layer and plane, with a row for each request and one for padding."""

    inputs: Inputs
    tokens: dict[int, dict[str, torch.Tensor]]
    states: torch.Tensor

    @classmethod
    def empty(cls, inputs: Inputs, memory: str) -> "Plain":
        """Nothing written."""
        shape = (REQUESTS + 1, CONTEXT, HEADS, DIM)
        tokens = {
            layer: {name: torch.zeros(shape, device=memory) for name in ("key", "value")} for layer in WINDOWS
        }
        return cls(inputs, tokens, torch.zeros(REQUESTS + 1, 4100, device=memory))

    def step(self) -> list[torch.Tensor]:
        """See `Paged.step`."""
        outputs = []
        which, positions = self.inputs.requests, self.inputs.positions
        for layer, planes in self.tokens.items():
            for name, tokens in planes.items():
                tokens[which, positions] = features(positions, layer, name)
            outputs.append(attend({name: each[which] for name, each in planes.items()}, positions, layer))
        state = next_state(self.states[which], positions)
        self.states[which] = torch.where((self.inputs.rows >= 0)[:, None], state, 0.0)
        return [*outputs, state]


def captured(
    place: Place, storage: KVStorage, work: Callable[[], list[torch.Tensor]]
) -> Callable[[], list[torch.Tensor]]:
    """`work` as one graph of the forward stream, and its outputs; run once before, so that everything is compiled."""
    device = storage.device
    with device.on_stream(device.forward_stream):
        outputs = work()
        place.synchronize()
        if not place.is_gpu:
            return work
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            assert _refuses(device), "ids were sent inside a capture"
            outputs = work()

    def replay() -> list[torch.Tensor]:
        graph.replay()
        return outputs

    return replay


def _refuses(device: TensorDevice) -> bool:
    """Whether nothing is sent to the forward stream, which captures."""
    try:
        device.send(device.forward_stream, [np.zeros(1, np.int64)])
    except RuntimeError:
        return True
    return False


def decode_under_moves(place: Place, steps: int, seed: int) -> str:
    """Replay the step while other requests come and go; what it did, in words."""
    storage = place.storage(plan(), ARENA_BYTES, rows=ROWS, context=CONTEXT, chunk=CHUNK)
    device, draw = storage.device, random.Random(seed)  # noqa: S311  # draws a schedule
    inputs = Inputs.of_padding(place.memory)
    paged, plain = Paged(storage, inputs), Plain.empty(inputs, place.memory)
    replay = captured(place, storage, paged.step)
    rows = storage.admit([1] * REQUESTS, [steps + 2] * REQUESTS)
    assert not isinstance(rows, AdmissionRefusal), str(rows)
    seen = {
        layer: torch.zeros(REQUESTS + 1, CONTEXT // PAGE_TOKENS, device=place.memory).long()
        for layer in WINDOWS
    }
    wrong, moved = (torch.zeros((), dtype=torch.int64, device=place.memory) for _ in range(2))
    others: list[int] = []
    for number in range(steps):
        for _ in range(2):
            # Short ones and long ones by turns, so that bands want one another's bytes.
            churn(storage, others, draw, ((1, 12), (100, 220))[number // PHASE % 2])
        takes_part = sorted(draw.sample(range(REQUESTS), draw.randint(1, REQUESTS)))
        step, unresolved = launched(storage, rows[takes_part], [1] * len(takes_part))
        with device.on_stream(device.forward_stream):
            fill(storage, inputs, unresolved, takes_part, draw)
            is_live = inputs.rows >= 0
            outputs = replay()
            for found, expected in zip(outputs, plain.step(), strict=True):
                wrong += ((found != expected).flatten(1) & is_live[:, None]).sum()
            for layer, table in paged.tables.items():
                before = seen[layer][inputs.requests]
                moved += ((before != table) & (before > 0) & (table > 0) & is_live[:, None]).sum()
                seen[layer][inputs.requests] = table
        finish(storage, step)
    place.synchronize()
    assert wrong.item() == 0, f"{wrong.item()} outputs differ from those without pages"
    assert moved.item() > 0, "no page of the rows in the graph moved between replays"
    for layer in WINDOWS:
        for name, plane in paged.view(layer).planes.items():
            assert plane[0].isfinite().all(), f"the sink of layer {layer}, plane {name}, is not finite"
    return f"{steps} replays, {moved.item()} of their pages moved between them, outputs equal to the last bit"


def fill(
    storage: KVStorage, inputs: Inputs, unresolved: UnresolvedIds, requests: list[int], draw: random.Random
) -> None:
    """Copy a step to the fixed addresses, its rows to places drawn anew and padding to the others; on the forward stream."""
    values = np.repeat(np.array(PADDING)[:, None], PLACES, axis=1)
    places = draw.sample(range(PLACES), len(requests))
    values[:, places] = [
        unresolved.rows,
        unresolved.write_positions,
        unresolved.state_slots,
        np.array(requests),
    ]
    (sent,) = storage.device.send(storage.device.forward_stream, [values])
    for fixed, value in zip(inputs.tensors(), sent, strict=True):
        fixed.copy_(value)


def churn(storage: KVStorage, others: list[int], draw: random.Random, lengths: tuple[int, int]) -> None:
    """Let another request come, whose prompt of −1 in every token is of so many tokens; where it does not fit, let some go."""
    prompt = draw.randint(*lengths)
    admitted = storage.admit([prompt], [1])
    if isinstance(admitted, AdmissionRefusal):
        going = [other for other in others if draw.random() < 0.4]
        others[:] = [other for other in others if other not in going]
        storage.release(going)
        return
    others.append(int(admitted[0]))
    for first in range(0, prompt, CHUNK):
        tokens = min(CHUNK, prompt - first)
        step, unresolved = launched(storage, admitted, [tokens])
        with storage.device.on_stream(storage.device.forward_stream):
            ids = unresolved.resolve()
            for layer in WINDOWS:
                view = storage.routed_cache.attention(layer)
                assert view is not None
                for plane in view.planes.values():
                    written = torch.full((tokens, HEADS, DIM), -1.0, device=plane.device)
                    write_tokens(plane, ids.write_slots[view.band], written)
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
