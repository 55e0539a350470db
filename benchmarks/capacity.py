"""How many requests 40 GB hold: ours at pages 1, 64 and those that `kvtide plan` suggests, beside the ideal.

*Now* fills the allocator that ships, over a device that does no byte work, until it refuses: each request has prefilled all but its
last token in chunks of 8,192, of which windows get the tail that later tokens read, and has the pages of its last token. *At peak*
is the planner's answer when every request is at its own peak at once. *Useful* is what the requests held now need at
the least, of all bytes, and *in use* what they hold. Id tables and request rows are beside the 40 GB, as the peers' are.
"""

import argparse
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import structlog
from chain_books import NO_UNITS, QuietDevice, layers_of
from models import BUDGET_BYTES, LENGTHS, MODELS, Model, ideal_count, mixed_lengths
from workload import Figure, IntArray, print_figures

from kvtide.chain import BandTake, ChainAllocator, Taken
from kvtide.engine.commands.plan_pages import suggest_pages
from kvtide.ledger import ForwardSteps
from kvtide.plan import KVStoragePlan, lay_out, pack, plan_kv_storage
from kvtide.sizing import ChunkReads, ServingPolicy, context_demand

CHUNK_TOKENS = 8192
POLICY = ServingPolicy(chunk_reads=ChunkReads.ACTIVATIONS)


class PageSizes(NamedTuple):
    """Tokens a page."""

    owner: int
    window: int

    def __str__(self) -> str:
        return str(self.owner) if self.owner == self.window else f"{self.owner} / {self.window}"


class Held(NamedTuple):
    """What 40 GB held."""

    at_peak: int
    now: int
    live_share: float
    """Units in use, of all bytes, with `now` requests."""


class Filler:
    """Requests in one arena, until one is refused."""

    def __init__(self, plan: KVStoragePlan) -> None:
        layout = lay_out(plan, BUDGET_BYTES)
        device = QuietDevice(BUDGET_BYTES, takes_notes=False)
        mirrors = device.create_mirrors({f"ids:{band.name}": layout.id_count(band) for band in layout.bands})
        self.chain = ChainAllocator(layout, device, mirrors, ForwardSteps())
        self.has_state = plan.state_sub_pool is not None
        self.page_tokens = plan.page_tokens
        self.windows = [
            (pool.name, pool.window_tokens, pool.page_tokens)
            for pool in plan.token_sub_pools
            if pool.window_tokens is not None and pool.page_tokens is not None
        ]

    def fill(self, lengths: Sequence[int]) -> tuple[int, float]:
        """How many of `lengths`, in order, are held before the first refusal, and the share of the bytes in use by then."""
        for count, length in enumerate(lengths):
            live_bytes = self.chain.statistics().live_bytes
            if not self._admit(length):
                return count, live_bytes / BUDGET_BYTES
        raise AssertionError(f"{len(lengths)} requests do not fill the arena")

    def _admit(self, length: int) -> bool:
        """Prefill all but the last token and take the pages of that one; whatever was taken of a refused one stays."""
        pages: IntArray = NO_UNITS
        first_held = {name: 0 for name, _, _ in self.windows}
        ends = [*range(CHUNK_TOKENS, length - 1, CHUNK_TOKENS), length - 1, length]
        start = 0
        for end in ends:
            new_pages = -(-end // self.page_tokens) - len(pages)
            bands = {name: self._tail(name, pages, start, end, new_pages) for name, _, _ in self.windows}
            taken = self.chain.take(
                pages=new_pages, state_slots=int(self.has_state and not start), bands=bands or None
            )
            if not isinstance(taken, Taken):
                return False
            self.chain.written(taken)
            pages = np.concatenate([pages, taken.pages])
            if end < length:
                self._retire(pages, first_held, start, end)
            start = end
        return True

    def _tail(self, name: str, pages: IntArray, start: int, end: int, new_pages: int) -> BandTake:
        """Window pages for tokens `[start, end)`: of those, what the token behind reads."""
        window, page_tokens = next((tokens, page) for band, tokens, page in self.windows if band == name)
        ratio = self.page_tokens // page_tokens
        first = max(-(-start // page_tokens), max(0, end - window + 1) // page_tokens)
        wanted = np.arange(first, -(-end // page_tokens))
        fresh = wanted[wanted >= len(pages) * ratio] - len(pages) * ratio
        held = wanted[wanted < len(pages) * ratio]
        assert fresh.max(initial=-1) < new_pages * ratio
        return BandTake(fresh=fresh, held=pages[held // ratio] * ratio + held % ratio)

    def _retire(self, pages: IntArray, first_held: dict[str, int], start: int, end: int) -> None:
        for name, window, page_tokens in self.windows:
            ratio = self.page_tokens // page_tokens
            kept = max(0, end - window + 1) // page_tokens
            # A chunk that is longer than the window bound its tail alone.
            gone = np.arange(first_held[name], min(kept, -(-start // page_tokens)))
            if len(gone):
                self.chain.free_pages(name, pages[gone // ratio] * ratio + gone % ratio)
            first_held[name] = max(first_held[name], kept)


def held_at_peak(plan: KVStoragePlan, lengths: Sequence[int]) -> int:
    """How many of `lengths`, in order, the arena packs, each at its peak."""
    layout = lay_out(plan, BUDGET_BYTES)
    demands = {
        length: context_demand(plan, context_tokens=length, chunk_tokens=CHUNK_TOKENS, policy=POLICY).units
        for length in set(lengths)
    }
    units = np.zeros(len(plan.sub_pools), np.int64)
    for count, length in enumerate(lengths):
        units += demands[length]
        if pack(layout, units.tolist()) is None:
            return count
    raise AssertionError(f"{len(lengths)} requests do not fill the arena")


def held(model: Model, sizes: PageSizes, lengths: Sequence[int]) -> Held:
    """Requests of `lengths` in 40 GB."""
    plan = plan_kv_storage(layers_of(model), page_tokens=sizes.owner, window_page_tokens=sizes.window)
    return Held(held_at_peak(plan, lengths), *Filler(plan).fill(lengths))


def suggested(model: Model) -> PageSizes:
    """What `kvtide plan` suggests for requests of 1k, 8k and 64k tokens."""
    pages = suggest_pages(layers_of(model), LENGTHS, chunk_tokens=CHUNK_TOKENS, policy=POLICY)
    return PageSizes(pages.page_tokens, pages.window_page_tokens)


def lengths_of(case: str) -> list[int]:
    """Lengths of a case: as many of one length as could ever fit, or a mix."""
    return mixed_lengths() if case == "mix" else [int(case)] * 4000


CASES = (*map(str, LENGTHS), "mix")


def useful_share(model: Model, lengths: Sequence[int], count: int) -> float:
    """What the first `count` of `lengths` need at the least, of all bytes."""
    return sum(map(model.needed_bytes, lengths[:count])) / BUDGET_BYTES


def rows() -> Iterator[tuple[Model, str, Sequence[tuple[PageSizes, Held]]]]:
    """Every model and case, with what is held by page sizes: 1, 64 and those suggested, in this order."""
    for model in MODELS:
        sizes = (PageSizes(1, 1), PageSizes(64, 64), suggested(model))
        for case in CASES:
            yield model, case, [(each, held(model, each, lengths_of(case))) for each in sizes]


def figures() -> Iterator[Figure]:
    """Requests held now, for a table beside peers'; the suggested sizes as page 0."""
    for model, case, found in rows():
        for page_tokens, (_, one) in zip((1, 64, 0), found, strict=True):
            yield Figure(f"{model.name}, {case}", page_tokens, one.now)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="a line a figure")
    arguments = parser.parse_args()
    # The engine chooses what is logged; here, nothing that a relief says.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if arguments.json:
        print_figures(figures())
        return
    print("| at peak / now | tokens | ideal | page 1 | 64 | suggested | | useful | in use |")
    print("| - | -: | -: | -: | -: | -: | -: | -: | -: |")
    for model, case, found in rows():
        lengths = lengths_of(case)
        counts = " | ".join(f"{one.at_peak} / {one.now}" for _, one in found)
        useful = " / ".join(f"{useful_share(model, lengths, one.now):.1%}" for _, one in found)
        in_use = " / ".join(f"{one.live_share:.1%}" for _, one in found)
        row = (model.name, case, ideal_count(model, lengths), counts, found[-1][0], useful, in_use)
        print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
