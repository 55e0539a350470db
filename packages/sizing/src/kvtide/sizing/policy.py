"""How an engine serves, as far as it changes what a request holds: declared once, priced everywhere (row S5)."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs

from kvtide.plan import KVStoragePlan
from kvtide.sizing.errors import SizingError


class ChunkReads(enum.Enum):
    """Where the attention of a prefill chunk reads the chunk's own tokens: a property of the backend."""

    PAGES = "pages"
    """In window pages, so the whole chunk is written there first and retires once it is processed."""

    ACTIVATIONS = "activations"
    """In activations, so only the tail that later tokens need is ever written to window pages."""


class CheckpointStrategy(enum.Enum):
    """How a prefix tree keeps recurrent states."""

    NONE = "none"
    """No prefix sharing."""

    NO_BUFFER = "no_buffer"
    """The state at the sequence end; no grid; only without overlap."""

    EXTRA_BUFFER = "extra_buffer"
    """States at checkpoints on the grid, by way of tracking slots that a request holds."""

    EXTRA_BUFFER_LAZY = "extra_buffer_lazy"
    """The same with the second tracking slot taken only around a checkpoint; only with overlap."""


@attrs.frozen(kw_only=True)
class CheckpointRule:
    """What a strategy costs a request."""

    slots: int
    """State slots held all along: the running slot and tracking slots."""

    slots_at_checkpoint: int
    """State slots held while a state goes over to the tree."""

    on_grid: bool
    """Whether states are kept on the grid of checkpoints only, which chunks are cut on and windows are retained for."""


CHECKPOINT_RULES: Mapping[tuple[CheckpointStrategy, bool], CheckpointRule] = {
    (CheckpointStrategy.NONE, False): CheckpointRule(slots=1, slots_at_checkpoint=1, on_grid=False),
    (CheckpointStrategy.NONE, True): CheckpointRule(slots=1, slots_at_checkpoint=1, on_grid=False),
    (CheckpointStrategy.NO_BUFFER, False): CheckpointRule(slots=1, slots_at_checkpoint=2, on_grid=False),
    (CheckpointStrategy.EXTRA_BUFFER, False): CheckpointRule(slots=2, slots_at_checkpoint=2, on_grid=True),
    (CheckpointStrategy.EXTRA_BUFFER, True): CheckpointRule(slots=3, slots_at_checkpoint=3, on_grid=True),
    (CheckpointStrategy.EXTRA_BUFFER_LAZY, True): CheckpointRule(
        slots=2, slots_at_checkpoint=3, on_grid=True
    ),
}
"""By strategy and overlap; a pair that is not here does not run."""


@attrs.frozen(kw_only=True)
class ServingPolicy:
    """How an engine serves. The default is the plainest: no sharing, no overlap, no draft."""

    chunk_reads: ChunkReads = ChunkReads.PAGES
    """Where a prefill chunk's attention reads its own tokens."""

    strategy: CheckpointStrategy = CheckpointStrategy.NONE
    """How the prefix tree keeps recurrent states; it costs nothing in a model without state."""

    overlap: bool = False
    """Whether a forward is launched before the one before it is processed, so that nothing of that one has retired yet."""

    draft_tokens: int = 0
    """Tokens that a verify forward writes beside the one that decoding writes anyway."""

    checkpoint_interval: int | None = None
    """Tokens between checkpoints, for a plan that holds no state of a model that does: a stage of a pipeline retains its windows
    for the others' states. `None` where the plan's own state says it; `size_stages` fills it in."""

    def __attrs_post_init__(self) -> None:
        interval = self.checkpoint_interval
        if interval is not None and (
            isinstance(interval, bool) or not isinstance(interval, int) or interval <= 0
        ):
            raise SizingError(f"checkpoint_interval must be a positive integer or None, found {interval!r}")
        if (
            isinstance(self.draft_tokens, bool)
            or not isinstance(self.draft_tokens, int)
            or self.draft_tokens < 0
        ):
            raise SizingError(f"draft_tokens must be an integer of 0 or more, found {self.draft_tokens!r}")
        if (self.strategy, self.overlap) not in CHECKPOINT_RULES:
            raise SizingError(
                f"strategy {self.strategy.value!r} does not run {'with' if self.overlap else 'without'} overlap"
            )

    @property
    def drafted_tokens(self) -> int:
        """Tokens beyond a request's last that its forwards in flight may write before they are known to be too many."""
        return self.draft_tokens * (2 if self.overlap else 1)

    @property
    def rule(self) -> CheckpointRule:
        """What the strategy costs."""
        return CHECKPOINT_RULES[self.strategy, self.overlap]

    def grid_tokens(self, plan: KVStoragePlan) -> int | None:
        """Tokens between checkpoints, which windows are retained for; `None` where nothing lies on a grid.

        Raises `SizingError` for a strategy on the grid with a plan that has state and no `checkpoint_interval`, or another one
        than the policy, and with one whose pages or attention chunks the policy's would cut.
        """
        if not self.rule.on_grid:
            return None
        own, given = plan.checkpoint_interval, self.checkpoint_interval
        if plan.state_sub_pool is not None:
            if own is None:
                raise SizingError(
                    f"strategy {self.strategy.value!r} needs a plan with a checkpoint_interval; its state layers declare none"
                )
            if given not in (None, own):
                raise SizingError(
                    f"the policy's checkpoint_interval = {given} and the plan's = {own} differ: one model has one grid"
                )
            return own
        if given is not None:
            _check_divides(given, plan)
        return given


def _check_divides(interval: int, plan: KVStoragePlan) -> None:
    """What planning checks for a plan with state: checkpoints lie at ends of pages, and attention chunks keep step with them."""
    if interval % plan.page_tokens:
        raise SizingError(
            f"page_tokens = {plan.page_tokens} does not divide checkpoint_interval = {interval}: a checkpoint would lie inside a "
            "page"
        )
    for pool in plan.token_sub_pools:
        stretch = pool.chunk_tokens
        if stretch is not None and interval % stretch and stretch % interval:
            raise SizingError(
                f"checkpoint_interval = {interval} and the attention chunk of {stretch} tokens must divide one another: "
                "checkpoints and ends of chunks would drift apart"
            )
