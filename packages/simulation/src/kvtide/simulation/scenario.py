"""What one run simulates: a small model's bands, an arena that is too small for them, and how the scheduler serves.

A scenario is a value: it prints, travels as JSON, and a failure is shrunk by trying simpler ones. Arenas hold tens to a few
hundred units, so that bands meet, takes settle, pages move and takes are refused within a few dozen operations.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from kvtide.chain import FLUSH_REACH
from kvtide.plan import (
    ArenaLayout,
    DType,
    FullLifetime,
    KVLayerDecl,
    KVPart,
    KVStoragePlan,
    MLAGeometry,
    PlanError,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    lay_out,
    plan_kv_storage,
)

LEAST_ARENA_BYTES = 256
"""A scenario is not shrunk below it."""

_SWITCHES = (
    "declares_read_end",
    "random_queries",
    "waits_for_transfers",
    "micro_batches",
    "small_thresholds",
)
"""Fields that are off in the simplest scenario."""


@attrs.frozen(kw_only=True)
class BandDraft:
    """One band, before it is planned."""

    kind: str
    """`state`, `window` or `full`."""

    window_tokens: int = 0
    """Tokens a query of a window sees; 0 for other kinds."""

    entry_bytes: int
    """Bytes of a token's entry; of a slot for state."""

    page_tokens: int = 1
    """Tokens a page; 1 for state, where it means nothing. The owner's is a multiple of each window's."""

    @property
    def name(self) -> str:
        """As `plan_kv_storage` will call it."""
        return f"window-{self.window_tokens}" if self.kind == "window" else self.kind


@attrs.frozen(kw_only=True)
class Scenario:
    """See the module's docstring."""

    bands: tuple[BandDraft, ...]
    """In chain order: state, windows from the longest, full; each kind but windows at most once."""

    arena_bytes: int
    """Bytes of each rank's arena."""

    row_count: int
    """Requests at a time."""

    overlap: int
    """Forwards in flight at a time."""

    declares_read_end: bool
    """Whether the schedule stream waits for a forward's metadata phase only, or for all of the forward (row K4)."""

    rank_seeds: tuple[int, ...]
    """One a rank: draws when its device runs what."""

    random_queries: bool
    """Whether a device answers by the toss of a coin whether an event was reached."""

    waits_for_transfers: bool = False
    """Whether a take that no layout around transfers serves waits for them on the host, or is refused."""

    micro_batches: bool = False
    """Whether forwards in flight have no request in common, as those of a pipeline that processes each a round later."""

    small_thresholds: bool = False
    """Whether the code under test takes a few units for many (`sizes`)."""

    flush_reach: int = FLUSH_REACH
    """How many times as far as a take needs a flush retreats."""

    def layout(self) -> ArenaLayout:
        """The arena's byte layout; raises `PlanError` for a scenario that cannot be laid out."""
        return lay_out(self.plan(), self.arena_bytes)

    def plan(self, checkpoint_interval: int | None = None) -> KVStoragePlan:
        """The bands as sub-pools, which have the same layout with every interval of checkpoints; raises `PlanError` as `layout` does."""
        decls = []
        for layer, band in enumerate(self.bands):
            if band.kind == "state":
                tensor = TensorDecl("state", (band.entry_bytes,), DType.UINT8)
                part = KVPart(StateGeometry((tensor,)), StateLifetime(checkpoint_interval))
            else:
                lifetime = FullLifetime() if band.kind == "full" else WindowLifetime(band.window_tokens)
                part = KVPart(MLAGeometry(band.entry_bytes, 0, DType.UINT8), lifetime)
            decls.append(KVLayerDecl(layer, (part,)))
        attention = [band for band in self.bands if band.kind != "state"]
        owner = next((band for band in attention if band.kind == "full"), attention[0] if attention else None)
        return plan_kv_storage(
            decls,
            page_tokens=1 if owner is None else owner.page_tokens,
            window_page_tokens={band.name: band.page_tokens for band in attention if band is not owner}
            or None,
        )

    def simpler(self) -> Iterator[Scenario]:
        """Scenarios that are simpler in one way each, the boldest first; some cannot be laid out."""
        for place in range(len(self.bands)):
            if len(self.bands) > 1:
                yield attrs.evolve(self, bands=self.bands[:place] + self.bands[place + 1 :])
        for share in (2, 4, 8):
            fewer = self.arena_bytes - self.arena_bytes // share // 16 * 16
            if LEAST_ARENA_BYTES <= fewer < self.arena_bytes:
                yield attrs.evolve(self, arena_bytes=fewer)
        if any(band.page_tokens > 1 for band in self.bands):
            yield attrs.evolve(self, bands=tuple(attrs.evolve(band, page_tokens=1) for band in self.bands))
        if self.row_count > 1:
            yield attrs.evolve(self, row_count=self.row_count - 1)
        if self.overlap > 1:
            yield attrs.evolve(self, overlap=self.overlap - 1)
        if len(self.rank_seeds) > 1:
            yield attrs.evolve(self, rank_seeds=self.rank_seeds[:1])
        if self.flush_reach != FLUSH_REACH:
            yield attrs.evolve(self, flush_reach=FLUSH_REACH)
        for switch in _SWITCHES:
            off: dict[str, Any] = {switch: False}
            if getattr(self, switch):
                yield attrs.evolve(self, **off)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return attrs.asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Scenario:
        """What `document` made; raises `ValueError`, `TypeError` or `KeyError` for anything else."""
        bands = tuple(BandDraft(**band) for band in document["bands"])
        found = cls(**{**document, "bands": bands, "rank_seeds": tuple(document["rank_seeds"])})
        for band in bands:
            if band.kind not in ("state", "window", "full"):
                raise ValueError(f"a band's kind is {band.kind!r}")
            _check_whole("a band's", band, {"window_tokens": 0, "entry_bytes": 1, "page_tokens": 1})
        _check_whole("its", found, {"arena_bytes": 1, "row_count": 1, "overlap": 1, "flush_reach": 1})
        for switch in _SWITCHES:
            if not isinstance(getattr(found, switch), bool):
                # A file's word, as the others.
                raise ValueError(  # noqa: TRY004
                    f"its {switch} is {getattr(found, switch)!r}, not true or false"
                )
        if not found.rank_seeds or not all(isinstance(seed, int) for seed in found.rank_seeds):
            raise ValueError(f"its rank_seeds are {list(found.rank_seeds)}, not one or more whole numbers")
        return found


def _check_whole(whose: str, values: object, least: Mapping[str, int]) -> None:
    """Raise `ValueError` unless each field is a whole number, no smaller than its least."""
    for name, low in least.items():
        value = getattr(values, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"{whose} {name} is {value!r}, not a whole number from {low}")


def draw_scenario(rng: random.Random) -> Scenario:
    """A scenario that can be laid out: any mix of kinds, unit sizes and page sizes, with and without sub-pages."""
    while True:
        bands = _draw_bands(rng)
        unit_bytes = [-(-band.entry_bytes * band.page_tokens // 16) * 16 for band in bands]
        units_each = rng.choice((8, 14, 24, 40))
        scenario = Scenario(
            bands=bands,
            # Mixed remainders: bands' grids meet neither each other nor the arena's end.
            arena_bytes=sum(unit_bytes) * units_each + rng.randrange(8) * 16,
            row_count=rng.randint(2, 10),
            overlap=rng.choice((1, 2, 2, 3, 3, 4)),
            declares_read_end=rng.random() < 0.85,
            rank_seeds=(rng.randrange(2**31), rng.randrange(2**31)),
            random_queries=rng.random() < 0.8,
            waits_for_transfers=rng.random() < 0.5,
            micro_batches=rng.random() < 0.25,
            small_thresholds=rng.random() < 0.4,
            flush_reach=rng.choice((1, 2, FLUSH_REACH, FLUSH_REACH)),
        )
        try:
            scenario.layout()
        except PlanError:
            continue
        return scenario


def _draw_bands(rng: random.Random) -> tuple[BandDraft, ...]:
    if rng.random() < 0.06:
        lone = rng.randrange(3)
        has_state, window_count, has_full = lone == 0, int(lone == 1), lone == 2
    else:
        has_state, window_count, has_full = (
            rng.random() < 0.7,
            rng.choice((0, 1, 1, 2, 2, 3)),
            rng.random() < 0.7,
        )
        if window_count + has_state + has_full < 2:
            return _draw_bands(rng)
    owner_tokens = rng.choice((1, 1, 2, 4, 4, 8))
    lengths = sorted(rng.sample(range(1, 25), window_count), reverse=True)
    bands = [BandDraft(kind="state", entry_bytes=16 * rng.randint(1, 20))] if has_state else []
    for place, tokens in enumerate(lengths):
        is_owner = not has_full and place == 0
        divisors = [each for each in (1, 2, 4, 8) if owner_tokens % each == 0]
        bands.append(
            BandDraft(
                kind="window",
                window_tokens=tokens,
                entry_bytes=rng.choice((8, 16, 24, 40, 48, 72)),
                page_tokens=owner_tokens if is_owner or rng.random() < 0.5 else rng.choice(divisors),
            )
        )
    if has_full:
        bands.append(
            BandDraft(kind="full", entry_bytes=rng.choice((8, 16, 24, 40, 48)), page_tokens=owner_tokens)
        )
    return tuple(bands)
