"""What one request holds at most, in units of each band, wherever it is asked (row S5).

A request writes `prompt + output - 1` tokens: the last one generated is returned, never fed back. Prefill writes the prompt in
chunks; decode one token a forward, or `1 + draft_tokens` of which at least one stays. Once a forward is processed, pages that
no later token reads are retired. Three things move the peak:

- *retirement*: where a chunk's attention reads its own tokens in activations, window pages never hold the whole chunk; with
  overlap, a forward's pages retire one forward later;
- *checkpoints* on a grid keep the window behind the latest one, since a hit lands there, and prefill retires only as one is
  taken, so chunks are cut on the grid, but for a prompt's last; each that is due is assumed to be taken, which is the
  storage's to guarantee (K9);
- *the purpose* says where the request's own work begins, and whose the pages before that are.

Every count is the most over all lives that the arguments allow. It is exact where chunks read pages, and for plain windows where
they read activations. With a grid or attention chunks on top of activations it is a bound: what was kept before the
chunk, a tail for each forward in flight and what a decode forward writes, or what chunks in pages would hold, whichever is less.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

import attrs

from kvtide.plan import KVStoragePlan, SubPool
from kvtide.sizing.bisection import last_that
from kvtide.sizing.errors import SizingError
from kvtide.sizing.held import HeldBand, round_up
from kvtide.sizing.policy import ChunkReads, ServingPolicy

DEFAULT_POLICY = ServingPolicy()


@attrs.frozen
class KVDemand:
    """Units per band, in chain order: pages for attention, state slots for state."""

    units: tuple[int, ...]
    """One count a band."""


class DemandPurpose(enum.Enum):
    """Why a request is priced."""

    CEILING = "ceiling"
    """What it could ever hold in an empty arena: the memory clip."""

    ADMIT = "admit"
    """What it will take beside the cached prefix, whose pages the tree holds: admission."""

    LOAD_BACK = "load back"
    """What it will take where the cached prefix has to be loaded from the host first."""

    DECODE_PREALLOC = "decode prealloc"
    """What it will take where the whole prompt arrives from a prefill process, or a whole backup from the host: a retracted request
    restored with all it had processed as `prompt_tokens`."""


class OwnWork(enum.Enum):
    """Where a request's own forwards begin."""

    BEGINNING = "at its first token"
    CACHED = "behind the cached prefix"
    PROMPT = "behind the prompt"


@attrs.frozen(kw_only=True)
class DemandRule:
    """How a purpose prices."""

    begins: OwnWork
    """Where the request's own forwards begin."""

    credits_cached: bool
    """Whether pages of the cached prefix are held by someone else and cost nothing."""

    loaded_slots: int
    """State slots for what arrives beside the request's own: the loaded checkpoint, which the tree keeps."""


DEMAND_RULES: Mapping[DemandPurpose, DemandRule] = {
    DemandPurpose.CEILING: DemandRule(begins=OwnWork.BEGINNING, credits_cached=False, loaded_slots=0),
    DemandPurpose.ADMIT: DemandRule(begins=OwnWork.CACHED, credits_cached=True, loaded_slots=0),
    DemandPurpose.LOAD_BACK: DemandRule(begins=OwnWork.CACHED, credits_cached=False, loaded_slots=1),
    DemandPurpose.DECODE_PREALLOC: DemandRule(begins=OwnWork.PROMPT, credits_cached=False, loaded_slots=0),
}
"""One row a purpose."""


def request_demand(
    plan: KVStoragePlan,
    *,
    prompt_tokens: int,
    output_tokens: int,
    chunk_tokens: int,
    purpose: DemandPurpose = DemandPurpose.CEILING,
    cached_tokens: int = 0,
    policy: ServingPolicy = DEFAULT_POLICY,
) -> KVDemand:
    """The most units of each band that a request ever holds at once, over every chunking and every acceptance of drafts.

    Args:
        plan: the model's sub-pools; its page sizes and checkpoint interval count.
        prompt_tokens: length of the prompt, cached prefix included.
        output_tokens: most tokens generated.
        chunk_tokens: longest prefill chunk.
        purpose: why it is priced, a row of `DEMAND_RULES`.
        cached_tokens: tokens of the prompt that need no prefill; counts for ADMIT and LOAD_BACK.
        policy: how the engine serves.

    Raises:
        SizingError: a count is no positive integer; the cached prefix is no shorter than the prompt, or does not end at a
            page's end and on the grid; the policy keeps checkpoints and the plan has none, or a chunk is shorter than their
            interval, so that none could be taken.
    """
    check_positive(prompt_tokens=prompt_tokens, output_tokens=output_tokens, chunk_tokens=chunk_tokens)
    grid = _checked_grid(plan, chunk_tokens, policy)
    _check_cached(cached_tokens, prompt_tokens, grid or 1, plan.page_tokens)
    rule = DEMAND_RULES[purpose]
    life = _Life(
        begin=_begin(rule, cached_tokens, prompt_tokens),
        first=cached_tokens if rule.credits_cached else 0,
        prompt=prompt_tokens,
        output=output_tokens,
        chunk=chunk_tokens,
        grid=grid,
        policy=policy,
    )
    loaded = rule.loaded_slots if cached_tokens else 0
    return KVDemand(
        tuple(_units(pool, life) + (loaded if pool.page_tokens is None else 0) for pool in plan.sub_pools)
    )


def context_demand(
    plan: KVStoragePlan, *, context_tokens: int, chunk_tokens: int, policy: ServingPolicy = DEFAULT_POLICY
) -> KVDemand:
    """What a request that writes `context_tokens` holds at most of each band, over every split into prompt and output.

    The worst split of one band need not be that of another. Raises what `request_demand` raises.
    """
    check_positive(context_tokens=context_tokens, chunk_tokens=chunk_tokens)
    longest = _Life(
        begin=0,
        first=0,
        prompt=context_tokens,
        output=1,
        chunk=chunk_tokens,
        grid=_checked_grid(plan, chunk_tokens, policy),
        policy=policy,
    )
    return KVDemand(
        tuple(
            max(
                _units(pool, attrs.evolve(longest, prompt=prompt, output=context_tokens - prompt + 1))
                for prompt in _worst_prompts(pool, longest)
            )
            for pool in plan.sub_pools
        )
    )


def _worst_prompts(pool: SubPool, longest: _Life) -> set[int]:
    """Prompts among which is the worst for `pool`, of all those that `longest`, which is all prompt, could be split into.

    Prefill counts every prompt up to the whole length N, decoding those below N, which leave it a forward.

    - What a prompt p holds depends on p by terms that never fall as p grows, and by pages that reach to the prompt's end, or a
      step behind it, from the first that is kept where its last chunk begins, where that chunk and the one before it do, or at
      p. Such a term falls only where that first page turns to a later one: *between turns every term grows with p, and so do
      their sums, maxima and minima*.
    - At each of those three places a turn comes once in T tokens, T being a page, or the grid or stretch where it is longer.
      With p + T the same pages are kept T tokens later, or more where the request's beginning had cut them off: no term is less
      than with p. So the last T prompts suffice, and among them the last of all and the last before each turn.
    - Decoding behind the prompt holds most at its last length or before a turn of what is kept there (`HeldBand.most_pages`);
      from the prompt before the last turn on, it passes both.
    - State slots are most with the fewest prompt tokens, which leave a forward to verify drafts.
    """
    whole = longest.prompt
    if pool.page_tokens is None:
        return {1}
    band = _held_band(pool, pool.page_tokens, longest)
    below = max(1, whole - 1)

    def before_chunk(prompt: int) -> int:
        return band.first_page(_begin_of_chunks(band, attrs.evolve(longest, prompt=prompt), 1))

    def before_chunks(prompt: int) -> int:
        return band.first_page(_begin_of_chunks(band, attrs.evolve(longest, prompt=prompt), 2))

    return {
        below,
        whole,
        _before_turn(band.first_page, below),
        _before_turn(before_chunk, below),
        _before_turn(before_chunks, below),
    }


def _before_turn(first_page: Callable[[int], int], last: int) -> int:
    """The longest prompt whose first page kept is an earlier one than that of `last`; 1 where there is none."""
    turned = first_page(last)
    return last_that(lambda prompt: prompt == 1 or first_page(prompt) < turned, 1, last)


def check_positive(**counts: int) -> None:
    """Raise `SizingError` for a count that is no positive integer, by its name."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise SizingError(f"{name} must be a positive integer, found {value!r}")


def _checked_grid(plan: KVStoragePlan, chunk_tokens: int, policy: ServingPolicy) -> int | None:
    grid = policy.grid_tokens(plan)
    if grid is not None and chunk_tokens < grid:
        raise SizingError(
            f"chunk_tokens = {chunk_tokens} is below checkpoint_interval = {grid}: no chunk would reach a checkpoint"
        )
    return grid


@attrs.frozen(kw_only=True)
class _Life:
    """One request, reduced to what its peak depends on."""

    begin: int
    """Tokens that are there before its own first forward."""

    first: int
    """Tokens at the beginning that someone else holds; a multiple of every page."""

    prompt: int
    output: int
    chunk: int
    grid: int | None
    policy: ServingPolicy

    @property
    def step(self) -> int:
        """Tokens that one decode forward writes."""
        return 1 + self.policy.draft_tokens

    @property
    def longest_decoding(self) -> int:
        """Tokens processed when the last decode forward is launched; below `prompt` where there is none."""
        return self.prompt + self.output - 2


def _begin(rule: DemandRule, cached_tokens: int, prompt_tokens: int) -> int:
    match rule.begins:
        case OwnWork.BEGINNING:
            return 0
        case OwnWork.CACHED:
            return cached_tokens
        case OwnWork.PROMPT:
            return prompt_tokens


def _check_cached(cached_tokens: int, prompt_tokens: int, grid: int, page_tokens: int) -> None:
    if isinstance(cached_tokens, bool) or not isinstance(cached_tokens, int) or cached_tokens < 0:
        raise SizingError(f"cached_tokens must be an integer of 0 or more, found {cached_tokens!r}")
    if cached_tokens >= prompt_tokens:
        raise SizingError(
            f"cached_tokens = {cached_tokens} must be below prompt_tokens = {prompt_tokens}: one token at least is computed"
        )
    for what, multiple in (("page_tokens", page_tokens), ("checkpoint_interval", grid)):
        if cached_tokens % multiple:
            raise SizingError(
                f"cached_tokens = {cached_tokens} is no multiple of {what} = {multiple}: no hit ends there"
            )


def _state_slots(life: _Life) -> int:
    rule, processed = life.policy.rule, life.prompt + life.output - 1
    if rule.on_grid and life.grid is not None:
        hands_over = processed // life.grid > life.begin // life.grid
    else:
        # A state is cached for a request that goes on: after any forward but the last.
        hands_over = processed - life.begin > 1
    slots = rule.slots_at_checkpoint if hands_over else rule.slots
    # Which of a verify forward's states stays is known only once it is processed. With overlap too there is one set of them:
    # the forward stream commits one forward's before it verifies the next.
    verifies = life.output > 1 and life.policy.draft_tokens > 0
    return slots + (life.step if verifies else 0)


def _units(pool: SubPool, life: _Life) -> int:
    """Most units of one band."""
    if pool.page_tokens is None:
        return _state_slots(life)
    band = _held_band(pool, pool.page_tokens, life)
    return max(_prefill_pages(band, life), _decode_pages(band, life))


def _held_band(pool: SubPool, page_tokens: int, life: _Life) -> HeldBand:
    return HeldBand(
        page_tokens=page_tokens,
        window_tokens=pool.window_tokens,
        chunk_tokens=pool.chunk_tokens,
        grid_tokens=life.grid or 1,
    )


def _prefill_pages(band: HeldBand, life: _Life) -> int:
    """Most pages during prefill; where the whole prompt arrives, those that hold what is kept of it."""
    behind = 1 if life.policy.overlap else 0
    pages = _chunk_pages(band, life, behind)
    if life.policy.chunk_reads is ChunkReads.PAGES:
        return pages
    # What was kept before the chunk, and for each forward in flight the tail that is kept behind it.
    before = _pages_before_a_chunk(band, life)
    tail = max(
        band.most_pages_on_grid(life.begin, life.prompt, 0, life.first),
        band.pages(life.prompt, life.prompt, life.first),
    )
    return min(pages, before + (1 + behind) * tail)


def _pages_before_a_chunk(band: HeldBand, life: _Life) -> int:
    """Most pages that are kept where a chunk begins."""
    return band.most_pages_on_grid(life.begin, life.prompt - 1, 0, life.first)


def _chunk_pages(band: HeldBand, life: _Life, behind: int) -> int:
    """Most pages while a chunk, and with overlap the one before it, is in pages whole."""
    inner = (1 + behind) * _aligned_chunk(band, life)
    return max(
        band.pages(_begin_of_chunks(band, life, 1 + behind), life.prompt, life.first),
        band.most_pages_on_grid(life.begin, life.prompt - inner, inner, life.first),
    )


def _aligned_chunk(band: HeldBand, life: _Life) -> int:
    """Tokens of the longest chunk that ends on the grid."""
    return life.chunk // band.grid_tokens * band.grid_tokens


def _begin_of_chunks(band: HeldBand, life: _Life, count: int) -> int:
    """Where the prompt's last chunks begin, `count` of them, each as long as it may be."""
    before = (count - 1) * _aligned_chunk(band, life)
    return max(life.begin, round_up(life.prompt - life.chunk - before, band.grid_tokens))


def _decode_pages(band: HeldBand, life: _Life) -> int:
    longest = life.longest_decoding
    if longest < life.prompt:
        return 0
    if not life.policy.overlap:
        return band.most_pages(life.prompt, longest, life.step, life.first)
    # The first decode forward is launched while the last chunk is unprocessed, every other while one before it is.
    return max(
        _first_decode_pages(band, life),
        band.most_pages(life.prompt, longest - 1, 2 * life.step, life.first),
    )


def _first_decode_pages(band: HeldBand, life: _Life) -> int:
    """Most pages while the last chunk and the first decode forward are in flight together."""
    end = life.prompt + life.step
    pages = band.pages(_begin_of_chunks(band, life, 1), end, life.first)
    if life.policy.chunk_reads is ChunkReads.PAGES:
        return pages
    # What was kept before the chunk, and its tail with what the decode forward writes behind it.
    return min(pages, _pages_before_a_chunk(band, life) + band.pages(life.prompt, end, life.first))
