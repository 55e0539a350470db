"""Any order of verbs under every policy at once: overlap, tails of chunks, checkpoints, steps given up, rows backed up and restored, on
real bytes (K2, K5, K7, S5).
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvtide.arena import SCRATCH_BYTES, gather_tokens
from kvtide.plan import SubPool
from kvtide.sizing import CheckpointStrategy, ChunkReads, ServingPolicy, SizingError
from kvtide.storage import (
    AdmissionRefusal,
    KVStorage,
    Overcommit,
    PreparedStep,
    PromiseRefusal,
    RowBackup,
    build_kv_storage,
)

from .test_storage import CHUNK_TOKENS, ToyModel, plan_of, poison_free_bytes
from .test_windows import first_kept

GRID_TOKENS = 4
MODELS = [
    {"windows": (5,), "full": True, "state": False},
    {"windows": (1, 16), "full": True, "state": False},
    {"windows": (6, 3), "full": False, "state": False},
    {"windows": (4,), "chunks": (12,), "full": True, "state": False},
    {"windows": (5,), "full": True, "state": True},
    {"windows": (), "full": False, "state": True},
]
LIVES = 12
"""Random lives of each policy; together they take seconds."""


class OrderedModel(ToyModel):
    """Reads what a forward of its policy may read, whatever has not been retired yet."""

    def check_reads(self, step: PreparedStep, pool: SubPool, layer: int, table: torch.Tensor) -> None:
        in_activations = self.storage.sized.policy.chunk_reads is ChunkReads.ACTIVATIONS
        view = self.storage.routed_cache.attention(layer)
        assert view is not None
        for place, row in enumerate(step.rows.tolist()):
            start = int(step.starts[place])
            is_elsewhere = in_activations and start < self.storage.requests.prompts[row]
            end = start if is_elsewhere else start + int(step.counts[place])
            self.check_entries(pool, layer, row, range(first_kept(pool, start), end), table[place])
            for plane in view.planes.values():
                assert torch.isfinite(plane[table[place]].flatten(1)).all(), (
                    "a page holds a former tenant's bytes"
                )

    def check_entries(self, pool: SubPool, layer: int, row: int, tokens: range, table: torch.Tensor) -> None:
        """Of a row's `tokens`, found through its page table `[pages]`."""
        view = self.storage.routed_cache.attention(layer)
        assert view is not None
        page_tokens = self.storage.plan.page_tokens
        at = torch.arange(tokens.start, tokens.stop)
        slots = table[at // page_tokens] * page_tokens + at % page_tokens
        expected = torch.tensor([self.entry(row, position, layer) for position in tokens])
        for plane in view.planes.values():
            assert (gather_tokens(plane, slots).flatten(1) == expected[:, None]).all(), (
                f"{pool.name} layer {layer} row {row} tokens {tokens}"
            )

    def check_hit(self, row: int) -> None:
        """A hit on the row's latest checkpoint finds every token that it reads."""
        storage = self.storage
        length = int(storage.requests.checkpoint_lengths[row])
        virtual = storage.requests.pages[row].astype(np.int64)
        for pool in storage.plan.token_sub_pools:
            table = torch.from_numpy(storage.chain.physical_units(pool.name, virtual))
            for layer in pool.layers:
                self.check_entries(pool, layer, row, range(first_kept(pool, length), length), table)


class Life:
    """One storage, driven by a seed."""

    def __init__(self, storage: KVStorage, draw: random.Random, *, has_grid: bool) -> None:
        self.storage, self.draw, self.has_grid = storage, draw, has_grid
        self.model = OrderedModel(storage)
        self.prepared: list[PreparedStep] = []
        self.flying: list[PreparedStep] = []
        self.set_aside: list[tuple[int, RowBackup]] = []
        """Retracted requests by number, with their backups."""
        self.restored = 0
        self.admitted = 0
        self.abandoned = 0

    def admit(self) -> None:
        rows = self.storage.admit([self.draw.randint(1, 40)], [self.draw.randint(1, 12)])
        if not isinstance(rows, AdmissionRefusal):
            self.admitted += 1
            self.model.request_of_row[int(rows[0])] = self.admitted

    def count(self, row: int) -> int:
        """Tokens of a row's next step; 0 where there is none."""
        requests = self.storage.requests
        start, prompt = int(requests.prepared[row]), int(requests.prompts[row])
        if start >= prompt:
            return int(start < requests.limits[row])
        most = min(prompt - start, int(requests.chunk_limits[row]))
        ends = [
            count
            for count in range(1, most + 1)
            if not self.has_grid or start + count == prompt or (start + count) % GRID_TOKENS == 0
        ]
        return self.draw.choice(ends)

    def prepare(self) -> None:
        requests, most = self.storage.requests, 2 if self.storage.sized.policy.overlap else 1
        if len(self.prepared) + len(self.flying) >= most:
            return
        held = {row for step in self.prepared for row in step.rows.tolist()}
        rows = [row for row in requests.live_rows().tolist() if row not in held and self.draw.random() < 0.5]
        counts = {row: count for row in rows if (count := self.count(row))}
        if not counts:
            return
        step = self.storage.prepare_step(list(counts), list(counts.values()))
        if isinstance(step, PromiseRefusal):
            self.release(step.overcommitted[0])
            return
        assert isinstance(step, PreparedStep), f"an admitted request was refused: {step}"
        self.prepared.append(step)

    def launch(self) -> None:
        if self.prepared:
            step = self.prepared.pop(0)
            self.model.forward(step)
            self.flying.append(step)

    def abandon(self) -> None:
        if self.prepared:
            step = self.prepared.pop()
            if not self.prepared and self.draw.random() < 0.5:
                self.storage.launch_forward(step)
            self.storage.abandon(step)
            self.abandoned += 1

    def process(self) -> None:
        if not self.flying:
            return
        storage, step = self.storage, self.flying.pop(0)
        requests = storage.requests
        storage.forward_processed(step)
        is_same = requests.is_same_request(step.rows, step.generations)
        rows, ends = step.rows[is_same], (step.starts + step.counts)[is_same]
        if self.has_grid:
            reached = ends // GRID_TOKENS > step.starts[is_same] // GRID_TOKENS
            storage.checkpoints_taken(rows[reached], ends[reached] // GRID_TOKENS * GRID_TOKENS)
        storage.advance(step)
        for row in rows.tolist():
            if self.has_grid:
                self.model.check_hit(row)
            if requests.lengths[row] == requests.limits[row]:
                self.release(row)

    def release(self, row: int) -> None:
        self._abandon_steps_of(row)
        self.storage.release([row])

    def retract(self) -> None:
        """Whatever its forwards are doing."""
        live = self.storage.requests.live_rows().tolist()
        if not live or len(self.set_aside) > 2:
            return
        row = self.draw.choice(live)
        self._abandon_steps_of(row)
        (backup,) = self.storage.retract_to_host([row])
        self.set_aside.append((self.model.request_of_row[row], backup))

    def restore(self) -> None:
        """Some of those that were retracted, together."""
        if not self.set_aside:
            return
        chosen = self.draw.sample(self.set_aside, min(len(self.set_aside), self.draw.choice([1, 1, 2])))
        rows = self.storage.restore([backup for _, backup in chosen])
        if isinstance(rows, AdmissionRefusal):
            return
        self.restored += len(chosen)
        for row, (number, backup) in zip(rows.tolist(), chosen, strict=True):
            self.model.request_of_row[row] = number
            self.set_aside.remove((number, backup))

    def _abandon_steps_of(self, row: int) -> None:
        while any(row in step.rows for step in self.prepared):
            self.storage.abandon(self.prepared.pop())

    def live(self, events: int) -> None:
        verbs = [self.admit, self.prepare, self.prepare, self.launch, self.launch, self.process, self.abandon]
        verbs += [self.draw.choice([self.retract, self.admit]), self.restore]
        for _ in range(events):
            poison_free_bytes(self.storage)
            self.draw.choice(verbs)()
            live = self.storage.requests.live_rows()
            if len(live) and self.draw.random() < 0.02:
                self.release(int(self.draw.choice(live.tolist())))
            self.storage._admission.verify(self.storage.requests.live_rows())
        while self.prepared:
            self.storage.abandon(self.prepared.pop())
        while self.flying:
            self.process()
        self.storage.verify_idle()
        self.storage.release(self.storage.requests.live_rows())
        self.storage.verify_idle()
        for number, backup in self.set_aside:
            row = int(np.asarray(self.storage.restore([backup]))[0])
            self.model.request_of_row[row] = number
            while count := self.count(row):
                self.prepare_and_process(row, count)
            if row in self.storage.requests.live_rows():
                self.storage.release([row])
        self.storage.verify_idle()

    def prepare_and_process(self, row: int, count: int) -> None:
        """A forward of one row, with nothing in flight."""
        step = self.storage.prepare_step([row], [count])
        assert isinstance(step, PreparedStep), f"all of its output was promised: {step}"
        self.prepared.append(step)
        self.launch()
        self.process()


@pytest.mark.requirement("K5", "K7", "S5", "K1", "K2", "A5", "K11", "H1", "H2")
@pytest.mark.parametrize("has_grid", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("reads", ChunkReads)
def test_whatever_is_prepared_given_up_launched_and_ended_rows_read_what_they_wrote(
    reads: ChunkReads, overlap: bool, has_grid: bool
) -> None:
    """Each policy is priced and retired by itself, and it is their products that servers run: no take of an admitted request is refused,
    none holds more than it was promised, a forward finds its bytes, and a hit those of the latest checkpoint.
    """
    lives = abandoned = restored = 0
    for seed in range(LIVES):
        draw = random.Random(f"{reads} {overlap} {has_grid} {seed}")
        model = MODELS[seed % len(MODELS)]
        strategy = CheckpointStrategy.EXTRA_BUFFER if has_grid else CheckpointStrategy.NONE
        try:
            storage = build_kv_storage(
                plan_of(**model, page_tokens=draw.choice([1, 2, 4])),  # type: ignore[arg-type]  # as the table has them
                budget_bytes=SCRATCH_BYTES + draw.randint(9_000, 16_000),
                max_running_requests=4,
                max_context_tokens=64,
                chunk_tokens=draw.choice([CHUNK_TOKENS, 11]),
                policy=ServingPolicy(
                    overlap=overlap,
                    chunk_reads=reads,
                    strategy=strategy,
                    checkpoint_interval=GRID_TOKENS if has_grid else None,
                ),
                writes_whole_pages=draw.random() < 0.5,
                overcommit=Overcommit(0.3) if draw.random() < 0.3 else None,
            )
        except SizingError:
            continue
        life = Life(storage, draw, has_grid=has_grid)
        life.live(110)
        lives += 1
        abandoned += life.abandoned
        restored += life.restored
    assert lives > LIVES // 2
    assert abandoned > lives
    assert restored > lives
