"""Launched forwards: a metadata phase, then the model, on the forward stream (decision D12).

    launch   ── metadata phase ──┤ read end ├── layers ── choice of tokens ── row state ──┤ done
                reads the mirrors              hand control back at layer hooks

The host knows the batch's shape when it launches, and its tokens not always: those that the forward before chooses are read from
the row state, which that forward fills. On a modelled device all of it is queued, and runs in pieces between which the schedule
stream's work may run; on other devices torch does the queueing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Protocol

import attrs
import numpy as np
import torch

from kvtide.arena import TensorDevice
from kvtide.device import ByteSpan, IntArray, UnitGrid
from kvtide.engine.batch import ForwardBatch, ForwardInputs, Padding, inputs_of_device
from kvtide.engine.decode_buffers import DecodeBuffers
from kvtide.engine.hand_off import HandBack, HandOff
from kvtide.engine.modelled_device import ModelledTensorDevice
from kvtide.engine.runner import ModelRunner
from kvtide.engine.stores import ArenaForward, ArenaStore, ForwardStore, HandingBackStore
from kvtide.storage import ForwardIds, KVStorage, PreparedStep, SharedReadEnds, UnresolvedIds

BACKEND = "page tables and state slots"
"""The engine's one backend, which resolves everything in the metadata phase."""


@attrs.frozen(eq=False)
class ForwardResult:
    """What a forward leaves behind, on its device."""

    logits: torch.Tensor
    """After each row's last token, `[rows, vocabulary]`."""

    tokens: torch.Tensor
    """The most likely of each row, `[rows]`."""

    lengths: torch.Tensor
    """Tokens of each row that are written now, `[rows]`."""

    drawn_counts: torch.Tensor
    """Tokens chosen for each row so far, `[rows]`."""


class LaunchedForward:
    """One forward on its way. Its phases are called by a queue, in order, once each."""

    def __init__(
        self,
        runner: ModelRunner,
        storage: KVStorage,
        store: ArenaStore,
        batch: ForwardBatch,
        unresolved: UnresolvedIds,
        *,
        chooses: bool,
        buffers: DecodeBuffers | None = None,
    ) -> None:
        """`chooses`: whether its tokens count, which those of a prompt's inner chunk do not. With `buffers`, it runs padded."""
        self.batch = batch
        """Its rows."""
        self._runner = runner
        self._row_state = storage.row_state
        self._send = partial(storage.device.send, storage.device.forward_stream)
        self._store = store
        self._unresolved = unresolved
        self._chooses = chooses
        self._buffers = buffers
        self._ids: ForwardIds | None = None
        self._inputs: ForwardInputs | None = None
        self._result: ForwardResult | None = None
        self._error: Exception | None = None
        self._layers: ArenaForward | None = None
        self._has_advanced = False

    @property
    def padding(self) -> Padding | None:
        """Its shape, if it runs padded."""
        return None if self._buffers is None else self._buffers.padding

    def resolve(self) -> None:
        """The metadata phase: ids, and what the forward before has left for its rows."""
        self._ids = ids = self._unresolved.resolve()
        state = self._row_state
        self._inputs = inputs_of_device(
            self.batch, state.last_tokens[ids.rows], state.lengths[ids.rows], self._send
        )
        if self._buffers is not None:
            self._buffers.fill(ids, self._inputs)

    def run(self, hand_back: HandBack | None = None) -> None:
        """The model, the choice of tokens, the row state; an error waits for `result`, as a device's does.

        Raises `OutOfMemoryError` at once while the forward is being launched, which is without `hand_back`: the caller can try again.
        What it wrote of tokens, another run writes again; `has_changed_rows` says whether its rows can go on.
        """
        try:
            self._result = self._run(hand_back)
        except torch.OutOfMemoryError as error:
            if hand_back is None:
                raise
            self._error = error
        except Exception as error:  # noqa: BLE001  # raised where the host looks at the result
            self._error = error

    def result(self) -> ForwardResult:
        """What it computed; call it once the host has waited for its end. Raises what the model raised."""
        if self._error is not None:
            raise self._error
        assert self._result is not None, "the host has waited for the forward's end"
        return self._result

    @property
    def has_changed_rows(self) -> bool:
        """Whether states or row state may be other than it found them: another run would begin with those of its own end."""
        return self._has_advanced or (self._layers is not None and self._layers.has_stored_states)

    def _run(self, hand_back: HandBack | None) -> ForwardResult:
        ids, inputs, state = self._ids, self._inputs, self._row_state
        assert ids is not None, "the metadata phase comes first"
        self._layers = self._store.forward(ids if self._buffers is None else self._buffers.ids)
        if self._buffers is not None:
            inputs = self._buffers.inputs
        store: ForwardStore = self._layers
        if hand_back is not None:
            store = HandingBackStore(store, hand_back)
        logits = self._runner.run(self.batch, store, inputs)
        tokens = logits.argmax(dim=-1)
        self._has_advanced = True
        state.advance(ids.rows, self.batch.query_tokens, tokens if self._chooses else None)
        return ForwardResult(logits, tokens, state.lengths[ids.rows], state.drawn_counts[ids.rows])


class ForwardQueue(Protocol):
    """Where forwards are queued."""

    def launch(self, forward: LaunchedForward, step: PreparedStep) -> SharedReadEnds | None:
        """Queue a forward on the forward stream, behind everything there; its read ends, for `record_forward`.

        Raises `OutOfMemoryError` where there is no room for what it computes, as `LaunchedForward.run` does.
        """


class TorchForwards:
    """Torch queues: on a GPU as launches on the forward stream, on a CPU by doing them."""

    def __init__(self, device: TensorDevice) -> None:
        """On `device`."""
        self._device = device

    def launch(self, forward: LaunchedForward, step: PreparedStep) -> SharedReadEnds:
        """See `ForwardQueue.launch`."""
        ends = SharedReadEnds(self._device, [BACKEND])
        with self._device.on_stream(self._device.forward_stream):
            forward.resolve()
            ends.declare(BACKEND)
            forward.run()
        return ends


class ModelledForwards:
    """A modelled device runs forwards in pieces, when its seed or a host wait says so.

    They run behind the launch, where an `OutOfMemoryError` is too late for another try: it ends the run with the forward's result.
    """

    def __init__(self, storage: KVStorage, *, declares_read_end: bool = True) -> None:
        """On the device of `storage`, a `ModelledTensorDevice`. Without `declares_read_end`, the barrier waits for whole forwards."""
        device = storage.device
        assert isinstance(device, ModelledTensorDevice), "other devices queue for themselves"
        device.watch(storage.layout)
        self._device = device
        self._storage = storage
        self._declares_read_end = declares_read_end
        self._grids = {
            band.name: UnitGrid(band.origin_bytes, band.unit_bytes) for band in storage.layout.bands
        }
        self._pieces = 2 * len({layer for pool in storage.plan.sub_pools for layer in pool.layers}) + 2

    def launch(self, forward: LaunchedForward, step: PreparedStep) -> SharedReadEnds:
        """See `ForwardQueue.launch`. The last piece counts as touching all pages, so that no move may come before it."""
        assert step.launch is not None, "a forward is queued once its step is launched"
        device, name = self._device, f"forward {step.launch.forward}"
        ends = SharedReadEnds(device, [BACKEND])
        device.submit(f"metadata of {name}", reads=list(self._tables_read(step.rows)), run=forward.resolve)
        if self._declares_read_end:
            ends.declare(BACKEND)
        body = HandOff(forward.run)
        for _ in range(self._pieces - 1):
            device.submit(name, run=body.advance)
        reads, writes = list(self._pages_read(step)), list(self._pages_written(step))
        device.submit(name, reads=reads, writes=writes, run=body.finish)
        return ends

    def _tables_read(self, rows: IntArray) -> Iterator[ByteSpan]:
        model, pages_per_row = self._device.model, self._storage.sized.pages_per_row
        for row in rows.tolist():
            yield model.mirror_span("rows", row * pages_per_row, (row + 1) * pages_per_row)
        for band in self._grids:
            yield model.mirror_span(f"ids:{band}")

    def _pages_read(self, step: PreparedStep) -> Iterator[ByteSpan]:
        """All that the rows hold, as the host has it; the mirrors, behind the launch's upload, say the same."""
        requests = self._storage.requests
        held = requests.held(step.rows, np.zeros_like(step.rows), requests.page_counts[step.rows])
        yield from self._spans(step, held)

    def _pages_written(self, step: PreparedStep) -> Iterator[ByteSpan]:
        page_tokens = self._storage.plan.page_tokens
        first, end = step.starts // page_tokens, -(-(step.starts + step.counts) // page_tokens)
        yield from self._spans(step, self._storage.requests.held(step.rows, first, end))

    def _spans(self, step: PreparedStep, virtual_pages: IntArray) -> Iterator[ByteSpan]:
        storage = self._storage
        for pool in storage.plan.sub_pools:
            is_state = pool.page_tokens is None
            virtual = storage.requests.state_slots[step.rows] if is_state else virtual_pages
            units = storage.chain.physical_units(pool.name, virtual)
            yield from self._device.spans(self._grids[pool.name], units if is_state else units[units > 0])
