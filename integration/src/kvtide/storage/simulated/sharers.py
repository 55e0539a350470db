"""The sharers of a world: requests that share prefixes over one tree a rank, told the same and held to one answer.

Their forwards are the world's own: they join its open batch, and whoever launches, processes or gives it up, they hear of it. What is
looked at:

| when | what must hold |
| - | - |
| a request begins with a hit, a forward is launched | all that it reads is there, and computed from its own prompt (`meanings`) |
| behind every action | a request holds no more than it was priced for; the tree's books are what its nodes say; each band's units add up; ranks agree |
| at the end | with every request over and the tree emptied, nothing is held |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np

from kvtide.chain import Taken
from kvtide.device import IntArray
from kvtide.plan import pack
from kvtide.simulation import (
    BatchEntry,
    BatchTake,
    CheckFailedError,
    Request,
    SimulatedBand,
    World,
)
from kvtide.storage.simulated.meanings import Meanings
from kvtide.storage.simulated.prompts import SharingRequest
from kvtide.storage.simulated.settings import SharingSettings
from kvtide.storage.simulated.sharing_rank import SharingRank
from kvtide.storage.tree.matching import walk
from kvtide.storage.tree.nodes import NO_STATE, nodes_below

T = TypeVar("T")


class Sharers:
    """A `Holder`."""

    def __init__(self, world: World, settings: SharingSettings) -> None:
        """None yet."""
        self._world = world
        self.settings = settings
        self.meanings = Meanings(world.bands)
        self.ranks = [SharingRank(world, rank, settings, self.meanings) for rank in world.ranks]
        self.requests: list[SharingRequest] = []
        """Not over, in the order of their admission."""
        self.extra_keys: list[Hashable] = []
        """All that requests have come with."""
        self._stalls: Counter[str] = Counter()
        self._begun = 0

    # ── verbs ──

    def admit(
        self, text: IntArray, prompt_tokens: int, extra_key: Hashable, *, whole: bool, tells: int
    ) -> SharingRequest | None:
        """A request that says `text`, and begins with what the tree has of its prompt; `None` without room for it. A row must be free."""
        world, outputs = self._world, len(text) - prompt_tokens
        world_row = world.free_rows[0]
        row = self._carry_out(
            "an admission with its prompt",
            lambda rank: rank.admit(world_row, text[:prompt_tokens], outputs, extra_key, whole=whole),
        )
        if row is None:
            return None
        if extra_key not in self.extra_keys:
            self.extra_keys.append(extra_key)
        table, cached = self.ranks[0].requests, int(self.ranks[0].requests.cached_tokens[row])
        request = SharingRequest(
            self._begun,
            world.free_rows.pop(0),
            cached,
            table_row=row,
            text=text,
            prompt_tokens=prompt_tokens,
            limit=int(table.limits[row]),
            extra_key=extra_key,
            tells=tells,
            price=tuple(self.ranks[0].price(prompt_tokens, outputs, cached).values()),
        )
        self._begun += 1
        self.requests.append(request)
        self._follow_rows()
        self.meanings.check_reads("a request that begins with a hit", request, cached)
        return request

    def fits_alone(self, prompt_tokens: int, outputs: int) -> bool:
        """Whether an arena that holds nothing else serves such a request to its end."""
        units = self.ranks[0].price(prompt_tokens, outputs, 0)
        return pack(self.settings.sized.layout, list(units.values())) is not None

    def ready(self) -> list[SharingRequest]:
        """Those that can have a further step: not in the open batch, and no more in flight than the policy allows."""
        most = 2 if self.settings.sized.policy.overlap and not self._world.scenario.micro_batches else 1
        return [
            one
            for one in self.requests
            if one not in self._world.batch and len(one.steps) < most and one.length < one.limit
        ]

    def has_chunk(self, request: SharingRequest, most_tokens: int) -> bool:
        """Whether a chunk of at most so many tokens may end anywhere; behind its prompt a request always has one."""
        return self.ranks[0].chunk(request.table_row, most_tokens) > 0

    def prepare(self, requests: Sequence[SharingRequest], most_tokens: int) -> bool:
        """Let `requests` have a step in the open batch, with at most so many tokens of a prompt; false, with nothing changed, without room.

        Each must have such a chunk.
        """
        lead = self.ranks[0]
        rows = np.array([one.table_row for one in requests], np.int64)
        counts = np.array([lead.chunk(row, most_tokens) for row in rows.tolist()], np.int64)
        answers = self._carry_out_each("a step of sharers", lambda rank: rank.prepare(rows, counts))
        if answers[0] is False:
            return False
        taken = tuple(answer for answer in answers if isinstance(answer, Taken))
        if taken:
            self._world.batch.takes.append(BatchTake(taken, lead.chain.promised))
        self._follow_rows()
        for request, count in zip(requests, counts.tolist(), strict=True):
            self._world.batch.put(request, request.length, request.length + count, ())
        return True

    def release(self, requests: Sequence[SharingRequest]) -> None:
        """Requests are over, at their end or before it."""
        rows = np.array([one.table_row for one in requests], np.int64)
        self._carry_out("a release", lambda rank: rank.release(rows))
        for request in requests:
            request.is_over = True
            self.requests.remove(request)
            self._world.batch.drop(request)
            self._world.free_rows.append(request.row)
        self._follow_rows()

    def make_room(self, asked: dict[str, int]) -> bool | None:
        """As a rank's."""
        return self._carry_out("an eviction", lambda rank: rank.make_room(asked))

    def empty(self) -> None:
        """Have the tree let go of all that no request needs."""
        self._carry_out("the emptying of the tree", lambda rank: rank.evict_all())

    def is_complete(self, request: SharingRequest) -> bool:
        """Whether it has come to its last token, and that was looked at."""
        return request.length == request.limit and not request.steps

    def has_checkpoint_due(self) -> bool:
        """Whether the next launch, or the processing of what is in flight, asks for state slots."""
        grid = self.settings.grid
        return any(one.checkpoints for one in self.requests) or any(
            grid is not None and entry.end % grid == 0
            for entry in self._world.batch.entries
            if isinstance(entry.request, SharingRequest)
        )

    def unrivalled_checkpoints(self) -> list[int]:
        """State slots on their way that the tree will take: it is told of the prompt, and nobody else is about to bring it one."""
        return [
            slot
            for one in self.requests
            for length, slot in one.checkpoints
            if one.is_known(length)
            and not self._has_checkpoint(one, length)
            and not any(
                other is not one
                and other.extra_key == one.extra_key
                and np.array_equal(other.text[:length], one.text[:length])
                for other in self.requests
            )
        ]

    def _has_checkpoint(self, request: SharingRequest, length: int) -> bool:
        """Whether the tree keeps a state there, be it that no hit ends in it since a window's tail is gone."""
        page_tokens = self.settings.sized.plan.page_tokens
        root = self.ranks[0].sharing.tree.match([], request.extra_key).node
        path, pages = walk(root, request.text[:length].tobytes(), page_tokens * 8)
        return pages * page_tokens == length and path[-1].end == pages and path[-1].state != NO_STATE

    # ── what the tree holds ──

    def units_of_tree(self) -> int:
        """Units that the tree holds, whoever is charged for them."""
        return sum(self.ranks[0].sharing.tree.held_units().values())

    def evicted(self) -> int:
        """Units that the tree has evicted so far."""
        return sum(self.ranks[0].sharing.tree.statistics().evicted_units.values())

    def held_by_tree(self) -> dict[str, IntArray]:
        """Band → virtual units of the tree, in an order that every run repeats."""
        tree = self.ranks[0].sharing.tree
        shape, found = tree.shape, {name: list[int]() for name in tree.shape.bands}
        for extra_key in self.extra_keys:
            for node in nodes_below([tree.match([], extra_key).node]):
                if shape.full is not None:
                    found[shape.full] += node.pages.tolist()
                for window, span in zip(shape.windows, node.spans, strict=True):
                    found[window.name] += node.units(window, np.flatnonzero(span.bound)).tolist()
                if shape.state is not None and node.state != NO_STATE:
                    found[shape.state].append(node.state)
        return {name: np.array(sorted(units), np.int64) for name, units in found.items()}

    # ── what a `Holder` hears ──

    def launched(self, entries: Sequence[BatchEntry]) -> None:
        """Units get their meaning, states on the grid are copied."""
        own = [(entry, entry.request) for entry in entries if isinstance(entry.request, SharingRequest)]
        if not own:
            return
        for entry, request in own:
            self.meanings.check_reads(f"a forward over sharer {request.number}", request, entry.start)
        for entry, request in own:
            self.meanings.written(request, entry.start, entry.end)
            request.steps.append((entry.start, entry.end))
        rows = np.array([request.table_row for _, request in own], np.int64)
        ends = np.array([entry.end for entry, _ in own], np.int64)
        copies = dict(self._carry_out("the recording of a forward", lambda rank: rank.recorded(rows, ends)))
        for entry, request in own:
            slot = copies.get(request.state_slots[0])
            if slot is not None:
                request.checkpoints.append((entry.end, slot))
        self._follow_rows()

    def processed(self, requests: Sequence[Request]) -> None:
        """Rows advance over their oldest steps; what they computed goes over."""
        own = [one for one in requests if isinstance(one, SharingRequest) and not one.is_over]
        if not own:
            return
        rows = np.array([one.table_row for one in own], np.int64)
        ends = [one.steps.popleft()[1] for one in own]
        told = [one.told(end) for one, end in zip(own, ends, strict=True)]
        is_mute = max(told) < 0 and any(end >= one.prompt_tokens for one, end in zip(own, ends, strict=True))
        lengths, tokens = np.array(ends, np.int64), None if is_mute else np.array(told, np.int64)
        self._carry_out("an advance", lambda rank: rank.advance(rows, lengths, tokens))
        for request, end in zip(own, ends, strict=True):
            if request.checkpoints and request.checkpoints[0][0] == end:
                request.checkpoints.popleft()
        self._follow_rows()

    def abandoned(self, entries: Sequence[BatchEntry], *, is_launched: bool) -> None:
        """Rows give back what the step took."""
        own = [(entry, entry.request) for entry in entries if isinstance(entry.request, SharingRequest)]
        if not own:
            return
        rows = np.array([request.table_row for _, request in own], np.int64)
        starts = np.array([entry.start for entry, _ in own], np.int64)
        self._carry_out(
            "an abandoned step", lambda rank: rank.abandoned(rows, starts, is_launched=is_launched)
        )
        self._follow_rows()

    def check(self) -> None:
        """See the module's docstring."""
        lead = self.ranks[0]
        for place, band in enumerate(self._world.bands):
            for request in self.requests:
                held = int(lead.units.counts[place, request.table_row])
                if held > request.price[place]:
                    raise CheckFailedError(
                        "capacity_answer",
                        f"sharer {request.number} holds {held} units of band {band.name!r} at {request.length} tokens, priced for "
                        f"{request.price[place]}",
                    )
            self._check_sum(place, band)
        pages = self.meanings.pages()
        for request in self.requests:
            named = np.unique(request.pages[request.pages > 0])
            strange = named[~np.isin(named, pages)]
            if len(strange):
                raise CheckFailedError(
                    "wrong_binding",
                    f"the row of sharer {request.number} names virtual pages {strange.tolist()}, of which neither sharers nor their tree "
                    "hold anything",
                )
        lead.sharing.verify(lead.requests.live_rows())
        decided = [rank.decided() for rank in self.ranks]
        if any(each != decided[0] for each in decided):
            raise CheckFailedError("rank_divergence", f"ranks' sharers stand at {decided}")

    def let_go(self) -> None:
        """Release all, empty the tree."""
        self.release(list(self.requests))
        self.empty()
        for band in self._world.bands:
            if self.meanings.held(band):
                raise CheckFailedError(
                    "ledger_leak",
                    f"{self.meanings.held(band)} units of band {band.name!r} are left of sharers and their tree, which are gone",
                )

    # ── helpers ──

    def _check_sum(self, place: int, band: SimulatedBand) -> None:
        lead = self.ranks[0]
        rows, tree = int(lead.units.counts[place].sum()), lead.sharing.held_units()[band.name]
        if rows + tree != self.meanings.held(band):
            raise CheckFailedError(
                "byte_accounting",
                f"sharers account for {rows} units of band {band.name!r} and their tree for {tree} others; "
                f"{self.meanings.held(band)} were taken and not freed",
            )

    def _carry_out(self, what: str, call: Callable[[SharingRank], T]) -> T:
        return self._carry_out_each(what, call)[0]

    def _carry_out_each(self, what: str, call: Callable[[SharingRank], T]) -> list[T]:
        """`call` on every rank; its answers, and all that it did, must agree."""
        world = self._world
        for each in self.ranks:
            each.chain.log.clear()
        waits = world.scenario.waits_for_transfers and any(use.is_open_transfer for use in world.uses.uses)
        answers = world.on_each(
            what, lambda rank: call(self.ranks[rank.place]), may_wait_for="network" if waits else None
        )
        world.end_waited(world.waited_for(what))
        logs = [each.chain.log for each in self.ranks]
        for place, log in enumerate(logs):
            if log != logs[0]:
                raise CheckFailedError(
                    "rank_divergence", f"{what} does {log} on rank {place}, {logs[0]} on rank 0"
                )
        stalls = Counter(self.ranks[0].stalls())
        for reason, count in (stalls - self._stalls).items():
            world.facts[f"tree: {reason}"] += count
        self._stalls = stalls
        return answers

    def _follow_rows(self) -> None:
        """Requests' pages and state slots are those of their rows."""
        table = self.ranks[0].requests
        for request in self.requests:
            row = request.table_row
            request.pages = table.pages[row, : table.page_counts[row]].astype(np.int64)
            request.state_slots = [int(table.state_slots[row])]
