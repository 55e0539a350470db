"""Whoever shares a prefix finishes, and nobody waits for having a hit: every order of what can happen in small storages (K5, K8).

There is no model here: the storage itself is walked, by replaying each way to a state. Requests arrive in every order, forwards have one
token or a whole chunk, answers end early; what the tree keeps and lets go of follows from that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from operator import mul
from typing import NamedTuple

import attrs
import numpy as np
import pytest

from kvtide.ledger import InvariantError
from kvtide.plan import ChunkLifetime, FullLifetime, KVStoragePlan, WindowLifetime
from kvtide.sizing import CheckpointStrategy
from kvtide.storage import AdmissionRefusal, KVStorage, PreparedStep
from kvtide.storage.admission import ChainPrefillBudget
from kvtide.storage.prefix_sharing import PrefixSharing
from kvtide.storage.tree import Match, PrefixTree, TreeLock

from .served import plan_of
from .sharing import shared_storage, tree_of


class Asked(NamedTuple):
    """A request."""

    prompt: tuple[int, ...]
    output: int


@attrs.frozen
class Scope:
    """What is walked."""

    plan: KVStoragePlan
    strategy: CheckpointStrategy
    overlap: bool
    pages: int
    """That the arena has room for, beside what the largest request needs at its peak."""
    requests: tuple[Asked, ...]


class Step(NamedTuple):
    """One thing that happens."""

    what: str
    request: int
    tokens: int = 0


BEGINNING = (0, 0, 0, 0)
LONG, OTHER = Asked((*BEGINNING, 1), 2), Asked((*BEGINNING, 2), 1)
NEARLY_BOTH = "a checkpoint short of both with their hits"
SHARED = CheckpointStrategy.EXTRA_BUFFER
SCOPES = {
    "full and a window": Scope(
        plan_of(FullLifetime(), WindowLifetime(3), page=1), SHARED, True, 0, (LONG, OTHER)
    ),
    "full and a window, three requests": Scope(
        plan_of(FullLifetime(), WindowLifetime(3), page=1),
        SHARED,
        False,
        2,
        (Asked((0, 0, 0, 1), 1), Asked((0, 0, 0, 1), 2), Asked((0, 0, 1), 1)),
    ),
    "full and chunks": Scope(
        plan_of(FullLifetime(), ChunkLifetime(4), page=1), SHARED, True, 2, (LONG, OTHER)
    ),
    "full, a window and state": Scope(
        plan_of(FullLifetime(), WindowLifetime(3), has_state=True, page=1), SHARED, False, 12, (LONG, OTHER)
    ),
    NEARLY_BOTH: Scope(
        plan_of(FullLifetime(), WindowLifetime(3), has_state=True, page=1), SHARED, False, 22, (LONG, OTHER)
    ),
    "full and state, lazily": Scope(
        plan_of(FullLifetime(), has_state=True, page=1),
        CheckpointStrategy.EXTRA_BUFFER_LAZY,
        True,
        8,
        (LONG, OTHER),
    ),
    "full and state, kept at the end": Scope(
        plan_of(FullLifetime(), has_state=True, page=1),
        CheckpointStrategy.NO_BUFFER,
        False,
        12,
        (LONG, OTHER),
    ),
}


@cache
def room(scope: Scope) -> int:
    """Bytes of the arena."""
    large = shared_storage(scope.plan, 1 << 16, scope.strategy, overlap=scope.overlap)
    sizes = [pool.unit.unit_bytes for pool in scope.plan.sub_pools]
    demands = [
        large.sized.demand(prompt_tokens=len(asked.prompt), output_tokens=asked.output)
        for asked in scope.requests
    ]
    most = max(sum(map(mul, demand.units, sizes)) for demand in demands)
    return large.layout.prefix_bytes + most + scope.pages * min(sizes)


class Walked:
    """A storage on its way."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.storage: KVStorage = shared_storage(
            scope.plan, room(scope), scope.strategy, overlap=scope.overlap
        )
        self.away = set(range(len(scope.requests)))
        self.queue: list[int] = []
        self.rows: dict[int, int] = {}
        self.prepared: dict[int, int] = {}
        self.flying: list[tuple[int, PreparedStep]] = []
        self.hits = 0
        """Requests that began with some."""

    def key(self) -> object:
        """Everything that what happens next depends on."""
        lengths = self.storage.requests.lengths
        running = [
            (index, self.prepared[index], int(lengths[row]), int(self.storage.requests.chunk_limits[row]))
            for index, row in sorted(self.rows.items())
        ]
        flying = [(index, int(step.counts[0])) for index, step in self.flying]
        return repr((sorted(self.away), self.queue, running, flying, tree_of(self.storage)))

    def do(self, step: Step) -> None:
        asked = self.scope.requests[step.request]
        match step.what:
            case "arrive":
                self.away.remove(step.request)
                self.queue.append(step.request)
            case "launch":
                prepared = self.storage.prepare_step([self.rows[step.request]], [step.tokens])
                assert isinstance(prepared, PreparedStep), f"an admitted request was refused: {prepared}"
                self.storage.launch_forward(prepared)
                self.storage.record_forward(prepared)
                self.prepared[step.request] += step.tokens
                self.flying.append((step.request, prepared))
            case "process" | "process and end":
                index, prepared = self.flying.pop(0)
                self.storage.forward_processed(prepared)
                self.storage.advance(
                    prepared, [9 if self.prepared.get(index, 0) >= len(asked.prompt) else -1]
                )
                total = len(asked.prompt) + asked.output - 1
                if index in self.rows and (
                    step.what == "process and end"
                    or int(self.storage.requests.lengths[self.rows[index]]) == total
                ):
                    self.storage.release([self.rows.pop(index)])
                    self.prepared.pop(index)
        self.admit()

    def admit(self) -> None:
        """From the head of the queue, as far as it goes."""
        while self.queue:
            asked, before = self.scope.requests[self.queue[0]], tree_of(self.storage)
            rows = self.storage.admit([len(asked.prompt)], [asked.output], prompts=[asked.prompt])
            if isinstance(rows, AdmissionRefusal):
                assert not rows.is_final, "it fits alone"
                assert tree_of(self.storage) == before, "a refusal changes nothing"
                return
            index = self.queue.pop(0)
            self.rows[index] = int(rows[0])
            self.prepared[index] = int(self.storage.requests.cached_tokens[rows[0]])
            self.hits += self.prepared[index] > 0

    def check(self) -> None:
        """Promises can be kept, and whoever waits has a reason, and would have to wait without its hit too."""
        live = self.storage.requests.live_rows()
        self.storage._admission.verify(live)
        assert self.storage._sharing is not None
        self.storage._sharing.verify(live)
        if self.queue:
            assert self.rows or self.flying, "somebody waits and nothing will free anything"
            asked = self.scope.requests[self.queue[0]]
            without = self.storage.admit([len(asked.prompt)], [asked.output])
            assert isinstance(without, AdmissionRefusal), "it waits for having a hit"

    def steps(self) -> Iterator[Step]:
        """All that can happen next."""
        for index in sorted(self.away):
            yield Step("arrive", index)
        if len(self.flying) < 1 + self.scope.overlap:
            for index, row in sorted(self.rows.items()):
                asked = self.scope.requests[index]
                prompt, at = len(asked.prompt), self.prepared[index]
                if at < prompt:
                    for count in {self.storage.next_chunk_tokens(row, most) for most in (2, 8)}:
                        yield Step("launch", index, count)
                elif at < prompt + asked.output - 1:
                    yield Step("launch", index, 1)
        if self.flying:
            index = self.flying[0][0]
            yield Step("process", index)
            if index in self.rows and self.prepared[index] >= len(self.scope.requests[index].prompt):
                yield Step("process and end", index)


def walk(scope: Scope) -> tuple[int, int, int]:
    """States that can be reached; those in which somebody waits; ends that somebody came to who began with a hit."""
    seen: set[object] = set()
    todo: list[tuple[Step, ...]] = [()]
    waits = hits = 0
    while todo:
        path = todo.pop()
        walked = Walked(scope)
        for step in path:
            walked.do(step)
        # From here on without going back, until nothing new happens.
        while (key := walked.key()) not in seen:
            seen.add(key)
            walked.check()
            waits += bool(walked.queue)
            after = list(walked.steps())
            if not after:
                assert not walked.rows
                walked.storage.verify_idle()
                hits += walked.hits > 0
                break
            todo += [(*path, step) for step in after[1:]]
            path = (*path, after[0])
            walked.do(after[0])
    return len(seen), waits, hits


@pytest.mark.requirement("K5", "K8")
@pytest.mark.parametrize("name", SCOPES)
def test_with_shared_prefixes_no_take_is_refused_and_nobody_waits_for_its_hit(name: str) -> None:
    """All arrival orders, all interleavings, early ends among them."""
    states, waits, hits = walk(SCOPES[name])
    assert states > 50
    assert hits
    assert waits > 10 or name == NEARLY_BOTH


Patch = pytest.MonkeyPatch


def a_hit_is_priced_beside_its_request(patch: Patch) -> None:
    hits = PrefixSharing.hits
    patch.setattr(
        PrefixSharing,
        "hits",
        lambda sharing, locks: attrs.evolve(
            hits(sharing, locks), tails=np.zeros_like(hits(sharing, locks).tails)
        ),
    )


def a_hit_is_never_passed_over(patch: Patch) -> None:
    patch.setattr(ChainPrefillBudget, "may_fit_without", lambda *_, **__: False)


def shared_units_are_counted_once(patch: Patch) -> None:
    patch.setattr(PrefixSharing, "units_counted_on_again", lambda _: {})


def nodes_stay_cut(patch: Patch) -> None:
    patch.setattr("kvtide.storage.tree.tree.join", lambda _: False)


def whoever_asks_has_used(patch: Patch) -> None:
    lock = PrefixTree.lock

    def used(tree: PrefixTree, match: Match) -> TreeLock:
        held = lock(tree, match)
        tree._locks.used(held, tree._evictor.policy.stamp())
        return held

    patch.setattr(PrefixTree, "lock", used)


@pytest.mark.requirement("K5", "K8")
@pytest.mark.parametrize(
    ("plant", "name", "found"),
    [
        (a_hit_is_priced_beside_its_request, "full and a window", "it waits for having a hit"),
        (a_hit_is_never_passed_over, NEARLY_BOTH, "it waits for having a hit"),
        (shared_units_are_counted_once, "full and a window, three requests", "storage.promise_kept"),
        (nodes_stay_cut, "full and a window, three requests", "a refusal changes nothing"),
        (whoever_asks_has_used, "full and a window, three requests", "a refusal changes nothing"),
    ],
)
def test_the_walk_finds_what_weaker_rules_do(
    plant: Callable[[Patch], None], name: str, found: str, monkeypatch: Patch
) -> None:
    """Each makes sharing cost something that it need not, or gives away what others count on."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, InvariantError), match=found):
        walk(SCOPES[name])
