"""Lives of requests that share prefixes, by hand: the words for them, and those that reach what drawn ones seldom come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import attrs

from kvtide.simulation import OPERATIONS, Action, BandDraft, Operation, Run, Scenario, run_actions
from kvtide.sizing import CheckpointStrategy, ChunkReads
from kvtide.storage.simulated import OPERATIONS as TREE_OPERATIONS
from kvtide.storage.simulated.settings import settings_of

ALL: Mapping[str, Operation] = {
    operation.name: operation
    for operation in sorted((*OPERATIONS, *TREE_OPERATIONS), key=lambda one: one.name)
}
"""What `kvtide stress` draws where both are installed."""

BANDS = (
    # More than a window frees as it moves on.
    BandDraft(kind="state", entry_bytes=160),
    BandDraft(kind="window", window_tokens=6, entry_bytes=16, page_tokens=2),
    BandDraft(kind="full", entry_bytes=16, page_tokens=2),
)


STATELESS, WINDOWLESS = BANDS[1:], (BANDS[0], BANDS[2])


def serving(strategy: CheckpointStrategy, *, overlap: bool, bands: tuple[BandDraft, ...] = BANDS) -> Scenario:
    """A scenario that serves so, with pages of two tokens and checkpoints, if on a grid, every four."""
    for seed in range(10_000):
        scenario = Scenario(
            bands=bands,
            arena_bytes=4096,
            row_count=6,
            overlap=2,
            declares_read_end=True,
            rank_seeds=(seed, 7),
            random_queries=False,
        )
        settings = settings_of(scenario)
        assert settings is not None
        policy = settings.sized.policy
        if (policy.strategy, policy.overlap, policy.chunk_reads) == (
            strategy,
            overlap,
            ChunkReads.PAGES,
        ) and settings.grid in {None, 4}:
            return scenario
    raise AssertionError("no seed draws it")


def begin(tokens: int, outputs: int, *, text: int = 0, whole: int = 0, tells: int = 0xFFFF) -> Action:
    """Bits of `text` are the runs of three tokens that say something else, of `tells` the places of which the scheduler tells the token;
    with `whole` there must be room for all of its life.
    """
    numbers = {"tokens": tokens, "outputs": outputs, "text": text, "key": 0, "whole": whole, "retracts": 0}
    numbers["tells"] = tells
    return Action("tree: begin", numbers)


def serve(forwards: int, *, crowds: int = 0, relents: int = 0, fixes: int = 0) -> Action:
    """By launches; bits of `crowds` and `relents` are those before which others take what there is of slots, or give it back, those of
    `fixes` those behind which they fix checkpoints.
    """
    numbers = {"requests": 255, "forwards": forwards, "tokens": 4}
    numbers |= {"crowds": crowds, "relents": relents, "fixes": fixes}
    return Action("tree: serve", numbers)


END = Action("tree: end", {"requests": 255})
PROCESS = Action("tree: process", {})

LIFE = (begin(8, 40), *[serve(8)] * 6, END)
"""A request from its begin to its end, whose checkpoints are the tree's."""


def carried_out(scenario: Scenario, *actions: Action) -> Run:
    return run_actions(scenario, actions, ALL)


STEP, LAUNCH = (
    Action("tree: step", {"requests": 255, "tokens": 4, "retracts": 0}),
    Action("tree: launch", {"completion": 0}),
)
TEXTS = (0x1111, 0x2222, 0x3333)
THREE_LIVES = tuple(
    action for bits in TEXTS for action in (begin(tokens=8, outputs=40, text=bits), *LIFE[1:])
)
"""Three texts fill the arena."""


def admitted_under_a_forward(strategy: CheckpointStrategy, *, overlap: bool, text: int = 0xAAAA) -> Run:
    """In a full arena, while a request computes, one comes that needs room for all of its life, and both go to their ends."""
    return carried_out(
        serving(strategy, overlap=overlap),
        *THREE_LIVES,
        begin(8, 30, text=0xFFFF),
        serve(2),
        begin(24, 20, text=text, whole=1),
        *[serve(8)] * 20,
        END,
    )


def _on_a_grid(*actions: Action) -> Run:
    return carried_out(serving(CheckpointStrategy.EXTRA_BUFFER, overlap=True), *actions)


def _elsewhere(bands: tuple[BandDraft, ...], arena_bytes: int, *actions: Action) -> Run:
    """Where a tree has no place, or next to none."""
    scenario = serving(CheckpointStrategy.NO_BUFFER, overlap=False)
    return carried_out(attrs.evolve(scenario, bands=bands, arena_bytes=arena_bytes), *actions)


RARE: tuple[tuple[Callable[[], Run], frozenset[tuple[str, str]]], ...] = (
    (
        partial(admitted_under_a_forward, CheckpointStrategy.EXTRA_BUFFER, overlap=True),
        frozenset({("tree: begin", "with nothing, evicting, under a forward")}),
    ),
    (
        partial(admitted_under_a_forward, CheckpointStrategy.EXTRA_BUFFER, overlap=True, text=TEXTS[-1]),
        frozenset({("tree: begin", "with a hit, evicting, under a forward")}),
    ),
    (
        partial(
            _on_a_grid,
            *THREE_LIVES,
            Action("admit", {}),
            Action("fill", {"request": 0, "spare": 0, "band": 0}),
            begin(24, 2, text=TEXTS[-1]),
        ),
        frozenset({("tree: begin", "with a hit, evicting")}),
    ),
    (
        partial(_on_a_grid, begin(8, 40), STEP, LAUNCH, STEP, END),
        frozenset({("tree: end", "aborted, under a forward, in the open batch")}),
    ),
    (
        # Its last forward is in flight, and nobody else wants one.
        partial(_on_a_grid, begin(2, 1), serve(1), serve(1)),
        frozenset({("tree: serve", "one"), ("tree: serve", "none")}),
    ),
    (
        partial(
            _elsewhere,
            (attrs.evolve(BANDS[1], page_tokens=1), BANDS[2]),
            4096,
            begin(2, 1),
            Action("tree: empty", {}),
            Action("tree: make room", {}),
            Action("tree: crowd", {"request": 0, "fixes": 0}),
        ),
        frozenset(
            {
                ("tree: begin", "pages of several sizes"),
                ("tree: empty", "no tree"),
                ("tree: make room", "no tree"),
                ("tree: crowd", "nobody"),
            }
        ),
    ),
    (partial(_elsewhere, BANDS, 256, begin(2, 1)), frozenset({("tree: begin", "more than the arena holds")})),
    (
        # A page of one token and half of another.
        partial(_elsewhere, (attrs.evolve(BANDS[2], page_tokens=1),), 24, begin(2, 1)),
        frozenset({("tree: begin", "no room for two tokens")}),
    ),
)
"""Lives, and what each reaches that drawn ones seldom come to."""
