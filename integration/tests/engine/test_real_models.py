"""Real hybrid models on an arena so small that bands take each other's bytes: their output is that of the models without it.

Every run here has each free byte of the arena filled with NaN after each step, and is compared with two oracles: the same
batches over plain tensors, bit for bit, and the model's own `generate()` for each request alone. The second half breaks
something on purpose and requires the comparison to see it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtide.arena import CPUDevice
from kvtide.device import IntArray, Stream, UnitGrid
from kvtide.engine.check import (
    CheckResult,
    expected_tokens,
    first_token_difference,
    replay_on_plain_tensors,
)
from kvtide.engine.loop import StepReport
from kvtide.engine.models import MODELS
from kvtide.engine.runner import Hook
from kvtide.storage import KVStorage

PAGE_SIZES = (1, 16)
# A hook each, or one in all: the overlap loop serves every model with both, in `test_overlap_models`.
EVERY_WAY = [
    pytest.param(name, page_tokens, hook, id=f"{name}-{page_tokens}-{hook.name.lower()}")
    for name, model in MODELS.items()
    for page_tokens, hook in zip(PAGE_SIZES, (model.hooks[0], model.hooks[-1]), strict=True)
    if hook is Hook.PAGES or not model.is_asked_for
]
BANDS = {
    "gemma3": ("window-16", "full"),
    "qwen3_5": ("state", "full"),
    "llama": ("full",),
    "gpt_oss": ("window-16", "full"),
    "deepseek_v3": ("full",),
    "falcon_h1": ("state", "full"),
    "lfm2": ("state", "full"),
    "llama4": ("chunk-32", "full"),
}
EVERY_BAND = [(name, band) for name, bands in BANDS.items() for band in bands]
READING_PAGES = [name for name, model in MODELS.items() if Hook.PAGES in model.hooks]

Serve = Callable[..., Any]


@pytest.mark.requirement("X5")
@pytest.mark.parametrize(("name", "page_tokens", "hook"), EVERY_WAY)
def test_served_output_equals_plain_tensors_and_generate(
    serve_on_tight_arena: Serve,
    tokens_alone: Callable[..., tuple[int, ...]],
    name: str,
    page_tokens: int,
    hook: Hook,
) -> None:
    """Under pressure, with moves and NaN in every free byte, no logit changes in any bit and no token at all."""
    served = serve_on_tight_arena(name, page_tokens, hook)
    assert len(served.result.tokens) == len(served.requests) >= 12
    assert replay_on_plain_tensors(served.runner, served.result.forwards, page_tokens=page_tokens) is None
    for request in served.requests:
        alone = expected_tokens(request, tokens_alone(name, request))
        assert (
            first_token_difference(request.request_id, served.result.tokens[request.request_id], alone)
            is None
        )
    served.storage.verify_idle()
    # A chain of one band takes bytes from nobody: all the others had to move pages.
    bands = served.storage.chain.statistics().bands
    assert (served.storage.chain.statistics().moved_units > 0) == (len(bands) > 1)


@pytest.mark.requirement("X5")
def test_rows_of_a_batch_are_not_in_order_of_arrival(serve_on_tight_arena: Serve) -> None:
    """A row is reused, so requests change places; equality above then says that identity is the row, not the place."""
    served = serve_on_tight_arena("llama", 16, Hook.CACHE)
    arrival = {request.request_id: place for place, request in enumerate(served.requests)}
    places = [[arrival[request_id] for request_id in ran.batch.request_ids] for ran in served.result.forwards]
    assert any(order != sorted(order) for order in places)


# --- canaries: what is broken on purpose must be seen ---------------------------------------------------------------


class WithoutZeroing(CPUDevice):
    """Hands out pages with whatever the last tenant left."""

    def zero_units(self, stream: Stream, grid: UnitGrid, units: IntArray) -> None:
        pass


@pytest.mark.requirement("A5", "X5")
@pytest.mark.parametrize("name", READING_PAGES)
def test_page_attention_sees_pages_that_were_not_zeroed(
    serve_on_tight_arena: Serve, requests_of: Callable[..., Any], name: str
) -> None:
    """Weight zero times NaN is NaN: without zeroing on hand-out, the first partly filled page spoils the logits."""
    served = serve_on_tight_arena(
        name, 16, Hook.PAGES, requests=requests_of(name)[3:6], make_device=WithoutZeroing
    )
    difference = replay_on_plain_tensors(served.runner, served.result.forwards, page_tokens=16)
    assert difference is not None
    assert difference.forward == 0


@pytest.mark.requirement("A5")
def test_the_cache_hook_cannot_see_them(serve_on_tight_arena: Serve, requests_of: Callable[..., Any]) -> None:
    """Transformers' masks never show it those bytes, which is why there are two hooks."""
    served = serve_on_tight_arena(
        "gemma3", 16, Hook.CACHE, requests=requests_of("gemma3")[3:6], make_device=WithoutZeroing
    )
    assert replay_on_plain_tensors(served.runner, served.result.forwards, page_tokens=16) is None


class Once:
    """Does `harm` after the first step from `step` on in which two requests decode and their pages are written."""

    def __init__(self, harm: Callable[[KVStorage], None], step: int = 8) -> None:
        self.harm = harm
        self.step = step
        self.done = False

    def __call__(self, storage: KVStorage, report: StepReport) -> None:
        decoding = (storage.requests.lengths >= storage.requests.prompts) & (storage.requests.limits > 0)
        if not self.done and report.step >= self.step and decoding.sum() >= 2:
            self.harm(storage)
            self.done = True


def a_decoding_row(storage: KVStorage, index: int) -> int:
    table = storage.requests
    rows = [row for row in table.live_rows().tolist() if table.lengths[row] >= table.prompts[row]]
    return int(rows[index])


def unit_ids(storage: KVStorage, band: str, row: int) -> int:
    """The virtual id of a unit of `row` in `band` that its next forward reads: its state slot, or its last page."""
    table = storage.requests
    if band == "state":
        return int(table.state_slots[row])
    return int(table.pages[row, (table.lengths[row] - 1) // storage.plan.page_tokens])


@pytest.mark.requirement("X5")
@pytest.mark.parametrize(("name", "band_name"), EVERY_BAND)
def test_one_corrupted_page_is_seen(
    serve_on_tight_arena: Serve, requests_of: Callable[..., Any], name: str, band_name: str
) -> None:
    """The bytes of one live unit change; the comparison names a forward after that step."""

    def corrupt(storage: KVStorage) -> None:
        virtual = unit_ids(storage, band_name, a_decoding_row(storage, 0))
        page = int(storage.device.tables[f"ids:{band_name}"][virtual])
        band = storage.layout.band(band_name)
        unit = storage.device.arena.bytes[band.start_byte(page) : band.start_byte(page + 1)]
        unit.view(torch.float32).mul_(-1.5)

    once = Once(corrupt)
    served = serve_on_tight_arena(
        name, 16, MODELS[name].hooks[-1], requests=requests_of(name)[3:9], meddle=once
    )
    assert once.done
    difference = replay_on_plain_tensors(served.runner, served.result.forwards, page_tokens=16)
    assert difference is not None
    assert difference.forward > 0
    assert difference.differing > 0


@pytest.mark.requirement("X5")
@pytest.mark.parametrize(("name", "band_name"), EVERY_BAND)
def test_one_stale_mapping_is_seen(
    serve_on_tight_arena: Serve, requests_of: Callable[..., Any], name: str, band_name: str
) -> None:
    """On the device, one virtual id points at a page of another request."""

    def point_elsewhere(storage: KVStorage) -> None:
        mine, other = (unit_ids(storage, band_name, a_decoding_row(storage, index)) for index in (0, 1))
        table = storage.device.tables[f"ids:{band_name}"]
        assert table[mine] != table[other]
        table[mine] = table[other]

    once = Once(point_elsewhere)
    served = serve_on_tight_arena(
        name, 16, MODELS[name].hooks[-1], requests=requests_of(name)[3:9], meddle=once
    )
    assert once.done
    assert replay_on_plain_tensors(served.runner, served.result.forwards, page_tokens=16) is not None


@pytest.mark.requirement("X5")
def test_a_corrupted_page_changes_the_text_of_a_trained_model(
    serve_on_tight_arena: Serve, requests_of: Callable[..., Any], tokens_alone: Callable[..., tuple[int, ...]]
) -> None:
    """Both oracles see it: the logits of a forward, and the text of a request."""

    def corrupt(storage: KVStorage) -> None:
        page = int(storage.chain.live_units("full")[0])
        band = storage.layout.band("full")
        storage.device.arena.bytes[band.start_byte(page) : band.start_byte(page + 1)].view(
            torch.float32
        ).mul_(-9)

    served = serve_on_tight_arena(
        "gemma3", 16, Hook.CACHE, requests=requests_of("gemma3")[3:9], meddle=Once(corrupt)
    )
    logits = replay_on_plain_tensors(served.runner, served.result.forwards, page_tokens=16)
    tokens = tuple(
        difference
        for request in served.requests
        if (
            difference := first_token_difference(
                request.request_id,
                served.result.tokens[request.request_id],
                expected_tokens(request, tokens_alone("gemma3", request)),
            )
        )
    )
    assert re.fullmatch(
        r"forward \d+: \d+ logits of request 'r\d' at position \d+ differ by up to \S+", str(logits)
    )
    assert tokens
    assert not CheckResult(logits=logits, tokens=tokens).is_equal
