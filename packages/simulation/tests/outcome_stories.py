"""Short sequences for outcomes that drawn ones seldom come to, or come to only where a part of a sequence is run.

Each is a scenario, its actions, and what they are kept for. They serve while what a seed draws changes; a story that no longer reaches
its outcomes fails the test that carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import attrs

from kvtide.simulation import Action, BandDraft, Scenario

PAGES = Scenario(
    bands=(BandDraft(kind="full", entry_bytes=16),),
    arena_bytes=256,
    row_count=4,
    overlap=2,
    declares_read_end=True,
    rank_seeds=(1, 2),
    random_queries=False,
)
"""Fifteen pages of a token each, the lowest of them taken last."""

SLOTS = attrs.evolve(PAGES, bands=(BandDraft(kind="state", entry_bytes=16),), arena_bytes=64)
"""Four slots."""

FLOATING = attrs.evolve(
    PAGES,
    bands=(
        BandDraft(kind="state", entry_bytes=208),
        BandDraft(kind="window", window_tokens=16, entry_bytes=40),
        BandDraft(kind="window", window_tokens=1, entry_bytes=72),
    ),
    arena_bytes=672,
    row_count=1,
)
"""Two slots, or one and pages of two windows."""


class Story(NamedTuple):
    """See the module's docstring."""

    scenario: Scenario
    actions: tuple[Action, ...]
    reaches: frozenset[tuple[str, str]]


def story(scenario: Scenario, actions: Iterable[Action], *reaches: tuple[str, str]) -> Story:
    return Story(scenario, tuple(actions), frozenset(reaches))


def do(name: str, **numbers: int) -> Action:
    return Action(name, {key.replace("_", " "): value for key, value in numbers.items()})


# ── words ──

LOADED = (
    do("load", window=0, request=0, band=0, bits=0, pages=0, yields=0, promise=1),
    do("submit load", load=0),
    do("end use", use=0, waits=1, closes=0),
)
"""A request with one page, which a load has filled."""

RUN_ALL = (do("pass time", rank=0, work=0, asks=0), do("pass time", rank=1, work=0, asks=0))
FLUSH, ADMIT = do("flush", moves=9), do("admit")
READ = do("launch", unknown=0, completion=0, probe=0, readers=1)
UNFIX, FAIL = do("unfix", use=0), do("fail", transfer=0, first=0)
BEGIN = do("begin transfer", transfer=0, flush=0)
ENDS = do("end use", use=0, waits=1, closes=0)
LULL = do("lull", leaving=0, requests=0, readers=0, then=2, band_0=0)
CHECKPOINT = do("checkpoint", requests=1, over=0)


def send(*, last: int = 0) -> Action:
    """Pages of the newest of two, or all of it."""
    return do("send", requests=2, bands=1, bits=0xFFFF, last=last, closes=0)


def finish(request: int) -> Action:
    return do("finish", requests=1 << request, polls=0)


def grow(*, rows: int) -> Action:
    """By a token each."""
    return do("grow", rows=rows, tokens=1, reserve=0, cover=0, bits=0, promise=0, slots=0)


def crowd(**numbers: int) -> Action:
    """All that is not named is 0; an eighth of what fits is taken."""
    places = {f"{what}_{place}": 0 for what in ("ending", "readers") for place in range(2)}
    few = {"leaving": 0, "closes": 0, "giving_up": 0, "failing": 0, "moves": 0, "band": 0, "share": 1}
    return do("crowd", **{**few, **places, **numbers})


def restore(*, over: int) -> Action:
    return do("restore", request=0, over=over)


SENT = (*LOADED, *LOADED, send(), *RUN_ALL, BEGIN)
"""Of two requests with a page each, that of the newer is sent."""

LEFT = (*LOADED, *LOADED, send(last=1), *RUN_ALL, BEGIN)
"""It waits for the send."""

MOVED = (finish(0), FLUSH)
"""The older one's page is the hole that the newer one's moves into."""

RETREATED = (*LOADED, *LOADED, finish(0), READ, FLUSH)
"""A forward reads a page that moves into the other's place, and the band has retreated from where it was."""

STORIES = (
    story(PAGES, (*SENT, FAIL, UNFIX), ("unfix", "send out of quarantine")),
    story(
        PAGES,
        (*SENT, *MOVED, FAIL, UNFIX),
        ("fail", "send quarantined, moved elsewhere meanwhile"),
        ("unfix", "send out of quarantine, moved elsewhere meanwhile"),
    ),
    story(PAGES, (*SENT, *MOVED, ENDS), ("end use", "send over, moved elsewhere meanwhile")),
    story(
        PAGES,
        (*SENT, *MOVED, finish(0), ENDS),
        ("end use", "send over, freed under it, its units were fenced"),
    ),
    story(
        PAGES,
        (*SENT, *MOVED, finish(0), FAIL, UNFIX),
        ("fail", "send quarantined, freed under it, its units were fenced"),
        ("unfix", "send out of quarantine, freed under it, its units were fenced"),
    ),
    story(
        PAGES,
        (*LEFT, *MOVED, do("end use", use=0, waits=1, closes=1)),
        ("end use", "send over, moved elsewhere meanwhile, its request over"),
    ),
    story(
        PAGES,
        (*LEFT, *MOVED, FAIL),
        ("fail", "send quarantined, moved elsewhere meanwhile, its request over"),
    ),
    story(
        PAGES,
        (*RETREATED, *LOADED, do("refill by peer", request=0, bands=1, bits=1)),
        ("refill by peer", "held, a forward may still read there"),
    ),
    story(
        PAGES,
        (
            *RETREATED,
            do("receive", pages=0, yields=0, promise=1, flush=0),
            BEGIN,
            do("process", flush=0),
            BEGIN,
        ),
        ("receive", "held, a forward may still read there"),
        ("begin transfer", "receive: a forward may still read there"),
        ("begin transfer", "receive: gated"),
    ),
    story(
        PAGES,
        (*LOADED, *LOADED, do("back up", requests=2, bands=1, bits=1), *MOVED, ENDS),
        ("end use", "backup over, moved elsewhere meanwhile"),
    ),
    story(
        PAGES,
        (ADMIT, ADMIT, ADMIT, grow(rows=3), crowd(leaving=1, failing=1, ending_1=1, readers_0=1)),
        ("crowd", "quarantined, taken, settled"),
    ),
    story(
        PAGES,
        (ADMIT, LOADED[0], do("fill", request=0, spare=0, band=0), do("give up", request=0), LULL),
        ("lull", "idle, flushed, room asked for"),
    ),
    story(SLOTS, (ADMIT, CHECKPOINT, restore(over=0)), ("restore", "restored, idle")),
    story(SLOTS, (ADMIT, CHECKPOINT, restore(over=1)), ("restore", "copied over, idle")),
    story(SLOTS, (ADMIT, CHECKPOINT, READ, restore(over=0)), ("restore", "restored, under a forward")),
    story(SLOTS, (ADMIT, *[CHECKPOINT] * 3, restore(over=0)), ("restore", "refused")),
    story(
        FLOATING,
        (
            ADMIT,
            do("grow", rows=1, tokens=0, reserve=2, cover=3, bits=1, promise=0, slots=0),
            READ,
            do("load", window=1, request=0, band=1, bits=1, pages=0, yields=0, promise=0),
        ),
        ("load", "window: reserved, moved"),
    ),
)
