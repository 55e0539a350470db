"""Breadth first over every sequence of actions, one state at a time, so that the first bad sequence found is a shortest one.

    layer 0      ○                       Each state keeps its parent and the action that led here, nothing else: a clone
    layer 1      ○ ○ ○                   would be tens of kilobytes. To go on from a state, its sequence is repeated from
    layer 2      ○○ ○ ○○○○               the root. States of a layer stand in the order of their parents, so all but the
                    ↑ path kept          end of the path is that of the state before: about one repeated action a state.

Two states with one canonical form have the same future, so only the first is gone on from. Forms are known by 64 bits of their
hash: of a million states, two different ones are taken for one with a chance of about three in a hundred million.

That nothing is left of a state once all of it is ended and freed, a *drain* tells, which costs more than all other checks: it is asked of
one state of many. Once anything fails, the search begins anew and drains every state, for there may be shorter sequences that lose something.

Processes share a layer in pieces. Each knows the states that it has met itself, and one keeps what is new to all; pieces are
counted in their order, so a search finds the same with any number of processes.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.pool import AsyncResult
from typing import TypeAlias

import attrs

from kvtide.simulation.exhaustive.shapes import Shape
from kvtide.simulation.exhaustive.small_actions import Action, actions, leaves_alone
from kvtide.simulation.exhaustive.small_checks import Placements, check_drains, check_state
from kvtide.simulation.exhaustive.small_steps import step
from kvtide.simulation.exhaustive.small_world import Facts, SmallWorld
from kvtide.simulation.failures import CheckFailedError, Failure, failure_of
from kvtide.simulation.sweep import quiet_logs

Path: TypeAlias = tuple[Action, ...]
"""A sequence of actions from the root."""

DRAINED = 32
"""One state of so many is ended and freed to see that nothing is left."""

_PIECE = 32
"""States that a process goes on from before it reports."""


@attrs.frozen(kw_only=True)
class Exhausted:
    """What a search found."""

    shape: str
    """Of which arena."""

    states: int
    """Different states, the first among them."""

    depth: int
    """Every sequence of so many actions was tried."""

    transitions: int
    """Actions tried, refused ones among them."""

    seconds: float
    """How long it took."""

    cpu_seconds: float
    """Time of all its processes' cores."""

    layers: tuple[int, ...]
    """New states by length of the shortest sequence; the last may be incomplete."""

    outcomes: Counter[tuple[str, str]]
    """Word of an action and what became of it → how often."""

    failure: Failure | None = None
    """What failed, after the last action of `sequence`."""

    sequence: Path = ()
    """The first bad sequence, a shortest one; `repeat` shows the same."""


@attrs.frozen
class Piece:
    """What became of some states that were gone on from."""

    fresh: list[tuple[int, Action, int]]
    """Place of the state in the piece, the action, and the digest of the state it led to, new to the process."""

    outcomes: Counter[tuple[str, str]]
    """See `Exhausted`."""

    cpu_seconds: float
    """Time of the process's core."""

    failure: Failure | None
    """What failed, if anything; the piece ends there."""

    sequence: Path
    """After which actions."""


class Explorer:
    """Goes on from states that it is told of as sequences."""

    def __init__(self, shape: Shape, words: Sequence[str] = (), drained: int = DRAINED) -> None:
        """At the root, which is known; tries actions of these `words` alone, or all, and drains one state of so many."""
        self.facts = Facts(shape)
        self._drained = drained
        self._words = frozenset(words)
        self._placements = Placements(self.facts.layout)
        root = SmallWorld(self.facts)
        self._empty = root.chain.books()
        self.root_digest = root.digest()
        """Of the state with nothing held."""
        self._known = {self.root_digest}
        self._outcomes: Counter[tuple[str, str]] = Counter()
        self._sequence: Path = ()
        self._trail: list[tuple[Action, SmallWorld]] = [(("root",), root)]

    def explore(self, sequences: Sequence[Path]) -> Piece:
        """Try every action after each sequence, up to the first that fails."""
        start = time.process_time()
        self._outcomes = Counter()
        fresh: list[tuple[int, Action, int]] = []
        failure = None
        try:
            with _no_collection():
                for place, sequence in enumerate(sequences):
                    fresh += [(place, action, digest) for action, digest in self._expand(sequence)]
        except Exception as error:  # noqa: BLE001 - whatever is raised is what the search was made to find
            failure = failure_of(error, len(self._sequence) - 1)
        cpu_seconds = time.process_time() - start
        return Piece(fresh, self._outcomes, cpu_seconds, failure, self._sequence if failure else ())

    def _expand(self, sequence: Path) -> Iterator[tuple[Action, int]]:
        world = self._at(sequence)
        before = world.form()
        # Its clones carry what questions are answered from: if an action changes capacity without a word, that is stale.
        world.chain.keep_snapshots()
        for action in list(actions(world)):
            if self._words and action[0] not in self._words:
                continue
            self._sequence = (*sequence, action)
            if leaves_alone(world, action):
                self._outcomes[str(action[0]), _refused(world, action, before)] += 1
                continue
            after = world.clone()
            self._outcomes[str(action[0]), step(after, action)] += 1
            # Of every action that may change anything: two that lead to one state may change it by different rules.
            after.chain.verify_snapshots()
            digest = after.digest()
            if digest not in self._known:
                self._known.add(digest)
                check_state(after, self._placements)
                if digest % self._drained == 0:
                    check_drains(after, self._empty)
                yield action, digest

    def _at(self, sequence: Path) -> SmallWorld:
        """The state behind a sequence; what it shares with the last one is not repeated."""
        trail = self._trail
        shared = 0
        while shared < min(len(sequence), len(trail) - 1) and trail[shared + 1][0] == sequence[shared]:
            shared += 1
        del trail[shared + 1 :]
        for action in sequence[shared:]:
            world = trail[-1][1].clone()
            step(world, action)
            trail.append((action, world))
        return trail[-1][1]


def _refused(world: SmallWorld, action: Action, before: tuple[object, ...]) -> str:
    """An action that will be refused, in a state of that form; its outcome."""
    outcome = step(world, action)
    if world.form() != before:
        raise CheckFailedError(
            "changed_by_refusal", f"{action} was refused or given up, and changed something"
        )
    return outcome


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is looked for: a state is gone with the last that refers to it, and there are thousands a second."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Tree:
    """Every state met, by number, in the order met: its parent and the action that led here."""

    def __init__(self, root_digest: int) -> None:
        self._parents = array("q", [-1])
        self._taken: list[Action] = [("root",)]
        self._named: dict[Action, Action] = {}
        self._known = {root_digest}

    def __len__(self) -> int:
        return len(self._parents)

    def add(self, parent: int, action: Action, digest: int) -> None:
        """One more, unless it is known."""
        if digest not in self._known:
            self._known.add(digest)
            self._parents.append(parent)
            self._taken.append(self._named.setdefault(action, action))

    def path(self, state: int) -> Path:
        """How it was first reached."""
        found = []
        while state:
            found.append(self._taken[state])
            state = self._parents[state]
        return tuple(reversed(found))


def exhaust(
    shape: Shape,
    *,
    depth: int | None = None,
    seconds: float | None = None,
    words: Sequence[str] = (),
    jobs: int = 1,
    on_layer: Callable[[int, int], None] | None = None,
    on_failure: Callable[[Failure], None] | None = None,
) -> Exhausted:
    """Try every sequence of at most `depth` actions, or as many as `seconds` allow, on `jobs` processes.

    With `words`, of actions that these words name alone: fewer of them, and longer sequences. It ends with the first bad sequence, or
    once there is no new state. `on_layer` is told the depth reached and the states so far.

    After a failure, which `on_failure` is told, it looks for shorter sequences that lose something, which may take longer than
    `seconds`; `on_layer` is told of those layers, too.
    """
    found = _search(
        shape, depth=depth, seconds=seconds, words=words, jobs=jobs, drained=DRAINED, on_layer=on_layer
    )
    if found.failure is not None and len(found.sequence) > 1:
        if on_failure is not None:
            on_failure(found.failure)
        shorter = _search(
            shape,
            depth=len(found.sequence) - 1,
            seconds=None,
            words=words,
            jobs=jobs,
            drained=1,
            on_layer=on_layer,
        )
        if shorter.failure is not None:
            return attrs.evolve(found, failure=shorter.failure, sequence=shorter.sequence)
    return found


def _search(
    shape: Shape,
    *,
    depth: int | None,
    seconds: float | None,
    words: Sequence[str],
    jobs: int,
    drained: int,
    on_layer: Callable[[int, int], None] | None,
) -> Exhausted:
    start = time.perf_counter()
    explorer = Explorer(shape, words, drained)
    tree = _Tree(explorer.root_digest)
    outcomes: Counter[tuple[str, str]] = Counter()
    layers, first, reached, cpu_seconds = [1], 0, 0, 0.0
    failed: Piece | None = None
    is_late = False
    with _explorers(explorer, jobs, shape, words, drained) as explore:
        while first < len(tree) and failed is None and not is_late and (depth is None or reached < depth):
            end = len(tree)
            starts = range(first, end, _PIECE)
            pieces = ([tree.path(state) for state in range(low, min(low + _PIECE, end))] for low in starts)
            for low, piece in zip(starts, explore(pieces), strict=False):
                outcomes.update(piece.outcomes)
                cpu_seconds += piece.cpu_seconds
                for place, action, digest in piece.fresh:
                    tree.add(low + place, action, digest)
                failed = piece if piece.failure is not None else None
                is_late = seconds is not None and time.perf_counter() - start > seconds
                if failed is not None or is_late:
                    break
            else:
                reached += 1
            first = end
            layers.append(len(tree) - end)
            if on_layer is not None:
                on_layer(reached, len(tree))
    return Exhausted(
        shape=shape.name,
        states=len(tree),
        depth=reached,
        transitions=outcomes.total(),
        seconds=time.perf_counter() - start,
        cpu_seconds=cpu_seconds,
        layers=tuple(layers),
        outcomes=outcomes,
        failure=None if failed is None else failed.failure,
        sequence=() if failed is None else failed.sequence,
    )


def repeat(shape: Shape, sequence: Sequence[Action]) -> Failure | None:
    """Do a sequence again, every check of a search after each action, and the last state emptied; what fails."""
    facts = Facts(shape)
    world, placements = SmallWorld(facts), Placements(facts.layout)
    empty, done = world.chain.books(), 0
    try:
        for action in sequence:
            done += 1
            world.chain.keep_snapshots()
            if leaves_alone(world, action):
                _refused(world, action, world.form())
            else:
                step(world, action)
                world.chain.verify_snapshots()
            check_state(world, placements)
        check_drains(world, empty)
    except Exception as error:  # noqa: BLE001 - whatever is raised is what is looked for
        return failure_of(error, done - 1)
    return None


_Explore: TypeAlias = Callable[[Iterable[list[Path]]], Iterator[Piece]]


@contextlib.contextmanager
def _explorers(explorer: Explorer, jobs: int, *begun: object) -> Iterator[_Explore]:
    """What goes on from pieces, in their order: here, or on processes, each with an explorer `begun` so."""
    if jobs == 1:
        yield lambda pieces: map(explorer.explore, pieces)
        return
    # Spawned, not forked: a forked child would inherit whatever threads and locks the caller has.
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=_begin, initargs=begun) as pool:

        def explore(pieces: Iterable[list[Path]]) -> Iterator[Piece]:
            # A few ahead: a layer's sequences all at once would fill the memory.
            asked = deque[AsyncResult[Piece]]()
            for piece in pieces:
                asked.append(pool.apply_async(_explore, (piece,)))
                if len(asked) > 4 * jobs:
                    yield asked.popleft().get()
            while asked:
                yield asked.popleft().get()

        yield explore


_own: list[Explorer] = []


def _begin(shape: Shape, words: Sequence[str], drained: int) -> None:
    quiet_logs()
    _own.append(Explorer(shape, words, drained))


def _explore(piece: list[Path]) -> Piece:
    return _own[0].explore(piece)
