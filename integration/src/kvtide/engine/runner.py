"""From a batch to logits: a transformers model run over a store."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from kvtide.engine.attention import CHUNK_READS, Reach, reach_of
from kvtide.engine.batch import ForwardBatch, ForwardInputs, inputs_of_host
from kvtide.engine.cache import HybridCache
from kvtide.engine.declare import declare_layers
from kvtide.engine.errors import EngineError
from kvtide.engine.paged_attention import (
    PAGE_ATTENTION,
    PAGE_ATTENTION_FAMILIES,
    STEP_ARGUMENT,
    PageStep,
    register_page_attention,
)
from kvtide.engine.stores import ForwardStore
from kvtide.plan import KVLayerDecl, StateLifetime
from kvtide.sizing import ChunkReads


class Hook(enum.Enum):
    """Where the model is taken hold of."""

    CACHE = "cache layers"
    """transformers computes attention; its cache layers gather the tokens that the mask covers. Every known family."""

    PAGES = "page attention"
    """kvtide computes attention over whole pages. `PAGE_ATTENTION_FAMILIES`."""

    @property
    def chunk_reads(self) -> frozenset[ChunkReads]:
        """Where it can read a chunk's own tokens; a storage's policy names one of these, or windows would not hold what it reads.

        Page attention knows pages only. The cache layers are given the chunk's keys and values, and go by the store's word.
        """
        return frozenset({CHUNK_READS}) if self is Hook.PAGES else frozenset(ChunkReads)


def hooks_of(model_type: str) -> tuple[Hook, ...]:
    """The hooks that models of `model_type` run with."""
    return (Hook.CACHE, Hook.PAGES) if model_type in PAGE_ATTENTION_FAMILIES else (Hook.CACHE,)


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """`model` with another attention function, for as long as the block runs."""
    previous = model.config._attn_implementation  # noqa: SLF001  # transformers has a setter and no getter
    if name == previous:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


class ModelRunner:
    """One model, one hook, any number of stores."""

    def __init__(self, model: PreTrainedModel, hook: Hook = Hook.CACHE) -> None:
        """Read the model's declarations, which runs a few tokens through it.

        Raises `EngineError` for a model whose cache cannot be declared, and for `Hook.PAGES` with a family outside
        `PAGE_ATTENTION_FAMILIES`.
        """
        model_type = str(model.config.model_type)
        if hook not in hooks_of(model_type):
            raise EngineError(
                f"{hook.value} does not run {model_type}; it runs {', '.join(sorted(PAGE_ATTENTION_FAMILIES))}"
            )
        self.model = model
        self.hook = hook
        self.layers: tuple[KVLayerDecl, ...] = declare_layers(model)
        """What the model stores."""
        self._cache = HybridCache(self.layers, reads_pages=hook is Hook.PAGES)
        self._reaches = tuple(_reach(decl) for decl in self.layers)
        if hook is Hook.PAGES:
            register_page_attention()

    @torch.no_grad()
    def run(
        self, batch: ForwardBatch, store: ForwardStore, inputs: ForwardInputs | None = None
    ) -> torch.Tensor:
        """Logits after each row's last token, `[rows, vocabulary]`. Reads and writes the rows' bytes in `store`.

        `inputs` are what the host knows, unless they are given; with more places than rows, as `store` has then too, the others are
        padding, whose logits are dropped.
        """
        inputs = inputs_of_host(batch) if inputs is None else inputs
        arguments: dict[str, object] = {
            "input_ids": inputs.token_ids,
            "position_ids": inputs.positions,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        if self.hook is Hook.CACHE and len(batch.rows) > 1:
            arguments["attention_mask"] = _padding_mask(batch)
        name = PAGE_ATTENTION if self.hook is Hook.PAGES else "eager"
        with attention_implementation(self.model, name), self._cache.step(batch, store) as step:
            if self.hook is Hook.PAGES:
                arguments[STEP_ARGUMENT] = PageStep(step, self._reaches, inputs.positions[:, 0])
            logits: torch.Tensor = self.model(cache=self._cache, **arguments).logits
        # A copy, so that no more than the last token is kept where a model computes all.
        return logits[: len(batch.rows), -1].clone()


def _padding_mask(batch: ForwardBatch) -> torch.Tensor:
    """`[rows, longest row]`: 1 where a left-padded row has a token."""
    lengths = torch.tensor(batch.tokens_before) + batch.query_tokens
    longest = int(lengths.max())
    return (torch.arange(longest) >= longest - lengths[:, None]).long()


def _reach(decl: KVLayerDecl) -> Reach:
    lifetimes = [part.lifetime for part in decl.parts if not isinstance(part.lifetime, StateLifetime)]
    return reach_of(lifetimes[0]) if lifetimes else Reach()
