"""A scheduler with overlap over a storage that shares prefixes, on bytes: every unit that a forward reads must hold its own prefix.

Forwards run when they are launched. A page, or a state, is filled with a mark of the prompt's prefix that it ends, and looked at by every
forward that reads it; so a hit, a hand-over, an eviction under a forward or a checkpoint of another length shows as a wrong byte.
"""

from __future__ import annotations

import random
from collections import deque

import attrs
import numpy as np
import numpy.typing as npt

from kvtide.arena import CPUDevice, KVArena
from kvtide.ledger import Access, CheckLevel, HostCopy, NetworkTransfer
from kvtide.plan import KVStoragePlan, lay_out
from kvtide.sizing import CheckpointStrategy, ServingPolicy, SizedPlan
from kvtide.storage import AdmissionRefusal, KVStorage, PreparedStep, Refusal, RowBackup
from kvtide.storage.tree import EvictionPolicy
from kvtide.storage.tree.nodes import Node, nodes_below

ROWS, CONTEXT, CHUNK = 4, 40, 8


@attrs.define(eq=False)
class Client:
    """A request, and how far its forwards have come."""

    tokens: list[int]
    """Prompt, then what it generates; the device, so to speak, knows them all from the start."""
    prompt: int
    salt: str | None
    row: int = -1
    launched: int = 0
    """Tokens that forwards were launched for."""
    cached: int = 0


def shared_storage(
    plan: KVStoragePlan,
    arena_bytes: int,
    strategy: CheckpointStrategy,
    *,
    overlap: bool,
    eviction_policy: EvictionPolicy | None = None,
    policy: ServingPolicy | None = None,
) -> KVStorage:
    """A storage of few bytes that keeps states in one of the ways."""
    layout = lay_out(plan, arena_bytes)
    sized = SizedPlan(
        plan=plan,
        layout=layout,
        budget_bytes=arena_bytes,
        fixed=(),
        targets=(),
        max_running_requests=ROWS,
        max_context_tokens=CONTEXT,
        chunk_tokens=CHUNK,
        policy=policy or ServingPolicy(strategy=strategy, overlap=overlap),
        concurrency=1,
    )
    device = CPUDevice(KVArena.allocate(layout.arena_bytes))
    return KVStorage(sized, device, check_level=CheckLevel.STRICT, eviction_policy=eviction_policy)


def tree_of(storage: KVStorage) -> list[tuple[object, ...]]:
    """All that the tree of a storage knows, node by node; of uses, which came before which."""
    assert storage._sharing is not None
    tree = storage._sharing.tree
    nodes = list(nodes_below(tree._roots.values()))
    order = {stamp: rank for rank, stamp in enumerate(sorted({s for node in nodes for s in node.stamps}))}
    return sorted(
        (
            tree._keys[_root_of(node)] or "",
            node.first,
            node.raw,
            len(node.pages),
            [np.flatnonzero(span.bound).tolist() for span in node.spans],
            node.state >= 0,
            [order[stamp] for stamp in node.stamps],
        )
        for node in nodes
        if not node.is_root
    )


def _root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


class SharingWorld:
    """See the module's docstring."""

    def __init__(
        self,
        storage: KVStorage,
        seed: int,
        *,
        tokens: int = 2,
        sends: bool = False,
        retracts: bool = False,
    ) -> None:
        """Clients come and go as `seed` says; prompts are of `tokens` different tokens, so they meet.

        With `sends`, running requests are copied to peers and to the host, which goes on when they are over. With `retracts`, running
        requests are backed up, retracted and restored.
        """
        self.storage = storage
        self.random = random.Random(seed)
        self.alphabet = tokens
        self.recent: deque[list[int]] = deque(maxlen=6)
        self.running: list[Client] = []
        self.waiting: deque[Client] = deque()
        self.flying: deque[tuple[PreparedStep, list[Client]]] = deque()
        self.overlap = storage.sized.policy.overlap
        self.arena: npt.NDArray[np.uint8] = storage.device.arena.bytes.numpy()
        self.with_sends = sends
        self.sends: list[HostCopy | NetworkTransfer] = []
        self.retracts = retracts
        self.set_aside: list[tuple[Client, RowBackup]] = []
        self.restored_behind_hits = 0
        self.pinned = 0
        """Steps in which a send touched what was the tree's."""
        self.served = self.hit_tokens = self.turned_away = self.refused_steps = 0

    def run(self, steps: int) -> None:
        """So many steps of the scheduler, and then to the end of what runs."""
        for _ in range(steps):
            if self.random.random() < 0.4 and len(self.waiting) < 3:
                self.waiting.append(self.client())
            self.begin_and_end_sends()
            self.step()
        while self.sends:
            self.storage.chain.uses.end(self.sends.pop())
        self.drain()

    def drain(self) -> None:
        """To the end of what runs."""
        while self.running or self.flying or self.waiting or self.set_aside:
            self.step()
        self.storage.verify_idle()

    def begin_and_end_sends(self) -> None:
        """Of some pages of a row, and its state; they outlive the row, and most of what they touch is the tree's by then."""
        if self.sends and self.random.random() < 0.15:
            self.storage.chain.uses.end(self.sends.pop(0))
        if not self.with_sends or not self.running or len(self.sends) > 1 or self.random.random() > 0.3:
            return
        chain, requests = self.storage.chain, self.storage.requests
        row = self.random.choice(self.running).row
        held = requests.pages[row, : requests.page_counts[row]].astype(np.int64)
        units = {}
        for pool in self.storage.plan.token_sub_pools:
            bound = np.unique(held[held > 0])
            bound = bound[chain.physical_units(pool.name, bound) > 0]
            units[pool.name] = bound[: self.random.randint(0, 4)]
        if self.storage.plan.state_sub_pool is not None:
            units["state"] = requests.state_slots[row : row + 1].copy()
        units = {name: virtual for name, virtual in units.items() if len(virtual)}
        if units:
            device = self.storage.device
            send = NetworkTransfer("send", Access.READ)
            backup = HostCopy("backup", Access.READ, device.record_event(device.schedule_stream))
            self.sends.append(send if self.random.random() < 0.7 else backup)
            chain.uses.begin(self.sends[-1], units)

    def client(self) -> Client:
        """A prompt that often begins as another one did, and as much output as there is room for."""
        prompt = self.random.choice((5, 9, 12, 16, 20, 25))
        tokens = [self.random.randrange(self.alphabet) for _ in range(prompt)]
        if self.recent and self.random.random() < 0.7:
            other = self.random.choice(self.recent)
            common = self.random.randrange(len(other) + 1)
            tokens[:common] = other[:common]
            tokens = tokens[:prompt]
        output = self.random.randrange(1, CONTEXT - prompt)
        tokens += [self.random.randrange(self.alphabet) for _ in range(output)]
        self.recent.append(tokens)
        return Client(tokens, prompt, self.random.choice((None, None, "b")))

    def step(self) -> None:
        """Admit, launch, process what must be, look at the books."""
        if self.retracts:
            self.retract_and_restore()
        self.admit()
        launched = self.launch()
        while self.flying and (not launched or not self.overlap or len(self.flying) > 1):
            self.process()
            launched = True
        self.finish()
        self.check_books()

    def admit(self) -> None:
        while self.waiting:
            client, before = self.waiting[0], tree_of(self.storage)
            lengths = [client.prompt], [len(client.tokens) - client.prompt]
            rows = self.storage.admit(
                *lengths,
                prompts=[client.tokens[: client.prompt]],
                extra_keys=[client.salt],
            )
            if isinstance(rows, AdmissionRefusal):
                assert tree_of(self.storage) == before, "a refusal changes nothing"
                without = self.storage.admit(*lengths)
                assert isinstance(without, AdmissionRefusal), "it is refused for having a hit"
                if not rows.is_final or self.sends:
                    return
                self.turned_away += 1
                self.waiting.popleft()
                continue
            self.waiting.popleft()
            client.row = int(rows[0])
            client.cached = client.launched = int(self.storage.requests.cached_tokens[client.row])
            self.hit_tokens += client.cached
            self.running.append(client)

    def retract_and_restore(self) -> None:
        """Somebody who may be in a forward, with what the tree has of it; and somebody who was."""
        if self.set_aside:
            client, backup = self.random.choice(self.set_aside)
            rows = self.storage.restore([backup])
            if not isinstance(rows, AdmissionRefusal):
                self.set_aside.remove((client, backup))
                client.row = int(rows[0])
                assert client.launched == self.storage.requests.lengths[client.row]
                self.running.append(client)
                self.restored_behind_hits += client.cached > 0
            else:
                assert not rows.is_final
        elif self.running and self.random.random() < 0.3:
            client = self.random.choice(self.running)
            (backup,) = self.storage.retract_to_host([client.row])
            self.running.remove(client)
            self.set_aside.append((client, backup))

    def launch(self) -> bool:
        """A chunk of one row, or a token of each that decodes."""
        prefilling = [client for client in self.running if client.launched < client.prompt]
        decoding = [
            client for client in self.running if client.prompt <= client.launched < len(client.tokens) - 1
        ]
        if prefilling and (not decoding or self.random.random() < 0.6):
            chosen = prefilling[:1]
            # A budget below the grid leaves no chunk but a prompt's last; the scheduler waits until it can give more.
            grid = self.storage.sized.policy.grid_tokens(self.storage.plan)
            budget = self.random.choice((CHUNK, CHUNK, 4 if grid is None else grid - 1))
            few = self.storage.next_chunk_tokens(chosen[0].row, budget)
            counts = [few or self.storage.next_chunk_tokens(chosen[0].row, CHUNK // 2)]
        elif decoding:
            chosen = [client for client in decoding if self.random.random() < 0.8] or decoding
            counts = [1] * len(chosen)
        else:
            return False
        evicted = self.evicted()
        step = self.storage.prepare_step([client.row for client in chosen], counts)
        if isinstance(step, Refusal):
            self.refused_steps += 1
            assert self.sends, f"an admitted request was refused: {step}"
            assert self.evicted() == evicted, "what is refused evicts nothing"
            return False
        self.storage.launch_forward(step)
        for client, count in zip(chosen, counts, strict=True):
            self.forward(client, client.launched, client.launched + count)
            client.launched += count
        self.storage.record_forward(step)
        self.flying.append((step, chosen))
        return True

    def process(self) -> None:
        step, chosen = self.flying.popleft()
        self.storage.forward_processed(step)
        ends = (step.starts + step.counts).tolist()
        self.storage.advance(
            step,
            [
                client.tokens[end] if client.prompt <= end < len(client.tokens) else -1
                for client, end in zip(chosen, ends, strict=True)
            ],
        )

    def finish(self) -> None:
        """Those whose last token is processed, or whose client has gone."""
        lengths = self.storage.requests.lengths
        over = [
            client
            for client in self.running
            if lengths[client.row] >= len(client.tokens) - 1 or self.random.random() < 0.02
        ]
        if over:
            self.storage.release([client.row for client in over])
            self.served += len(over)
            self.running = [client for client in self.running if client not in over]

    def check_books(self) -> None:
        """Nobody holds more than it was promised, and every promise can be kept."""
        storage = self.storage
        storage._admission.verify(storage.requests.live_rows())
        assert storage._sharing is not None
        self.pinned += bool(storage._sharing.tree._pins.open)
        storage._sharing.verify(storage.requests.live_rows())
        live = {band.name: band.live_units for band in storage.chain.statistics().bands}
        cached = storage._sharing.held_units()
        assert live == {name: count + cached[name] for name, count in storage.resident_now().items()}

    def evicted(self) -> dict[str, int]:
        """Units that the tree has let go of for others, by band."""
        sharing = self.storage.statistics().sharing
        assert sharing is not None
        return dict(sharing.evicted_units)

    # ── bytes ──

    def forward(self, client: Client, start: int, end: int) -> None:
        """Look at what it reads, and write what it computes."""
        storage, plan = self.storage, self.storage.plan
        pages = storage.requests.pages[client.row].astype(np.int64)
        for pool in plan.token_sub_pools:
            first = 0
            if pool.window_tokens is not None:
                first = max(0, start - pool.window_tokens + 1)
            elif pool.chunk_tokens is not None:
                first = start // pool.chunk_tokens * pool.chunk_tokens
            read = np.arange(first // plan.page_tokens, start // plan.page_tokens)
            self._check(client, pool.name, pages[read], (read + 1) * plan.page_tokens)
            written = np.arange(start // plan.page_tokens, end // plan.page_tokens)
            self._fill(client, pool.name, pages[written], (written + 1) * plan.page_tokens)
        state = plan.state_sub_pool
        if state is not None:
            slot = storage.requests.state_slots[client.row : client.row + 1]
            if start:
                self._check(client, state.name, slot, np.array([start]))
            self._fill(client, state.name, slot, np.array([end]))

    def mark(self, client: Client, length: int) -> int:
        """Of a prefix: alike for like prefixes of one salt."""
        return hash((client.salt, tuple(client.tokens[:length]))) % 250 + 1

    def _check(
        self, client: Client, name: str, virtual: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> None:
        for unit, length in zip(self._units(name, virtual), lengths.tolist(), strict=True):
            assert (unit == self.mark(client, length)).all(), (
                f"{name} of {length} tokens is of another prefix"
            )

    def _fill(
        self, client: Client, name: str, virtual: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> None:
        for unit, length in zip(self._units(name, virtual), lengths.tolist(), strict=True):
            unit[:] = self.mark(client, length)

    def _units(self, name: str, virtual: npt.NDArray[np.int64]) -> list[npt.NDArray[np.uint8]]:
        band = self.storage.layout.band(name)
        physical = self.storage.chain.physical_units(name, virtual)
        assert (physical > (0 if band.has_sink else -1)).all(), f"{name} {virtual} reads as the sink"
        starts = (band.origin_bytes + physical * band.unit_bytes).tolist()
        return [self.arena[start : start + band.unit_bytes] for start in starts]
