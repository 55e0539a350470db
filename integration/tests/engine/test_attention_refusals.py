"""What attention over pages refuses, and what it takes whatever its layout: alike in torch and in Triton."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch

from kvtide.engine.attention import PagedRows, Reach, attend, torch_attention
from kvtide.engine.errors import EngineError

from .attention_cases import EVERYTHING, Case, Tensors, tensors_of, written_out

pytest.importorskip("triton", reason="Triton is not installed: its programs are tested where it is")
from kvtide.engine.attention import triton_attention

pytestmark = pytest.mark.usefixtures("loops_in_the_interpreter")
BACKENDS = pytest.mark.parametrize(
    "function", [torch_attention.attend, triton_attention.attend], ids=["torch", "triton"]
)


def with_rows(tensors: Tensors, **change: Any) -> Tensors:
    return attrs.evolve(tensors, rows=attrs.evolve(tensors.rows, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"query": torch.zeros(1, 3, 1, 8)},
        {"query": torch.zeros(1, 4, 2, 8)},
        {"query": torch.zeros(2, 4, 1, 8)},
        {"query": torch.zeros(1, 4, 1, 8, dtype=torch.float64)},
        {"keys": torch.zeros(4, 2, 2, 8)},
        {"values": torch.zeros(4, 4, 1, 8)},
        {"values": torch.zeros(3, 4, 2, 8)},
        {"values": torch.zeros(4, 3, 2, 8)},
        {"sinks": torch.zeros(3)},
    ],
    ids=[
        "heads",
        "query tokens",
        "rows",
        "type",
        "page tokens",
        "value heads",
        "value pages",
        "tokens of a value page",
        "sinks",
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(change: dict[str, torch.Tensor]) -> None:
    tensors = attrs.evolve(tensors_of(Case(tokens_before=(5,), query_tokens=1)), **change)
    with pytest.raises(EngineError, match=r"cannot attend with queries \[[12], "):
        tensors.attend(attend)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_before": torch.zeros(1, dtype=torch.int64)},
        {"tokens_before": torch.zeros((2, 1), dtype=torch.int64)},
        {"tokens_before": torch.zeros(2, dtype=torch.int32)},
        {"page_table": torch.zeros((1, 2), dtype=torch.int64)},
        {"page_table": torch.zeros((3, 2), dtype=torch.int64)},
        {"page_table": torch.zeros(2, dtype=torch.int64)},
        {"page_table": torch.zeros((2, 2), dtype=torch.int32)},
    ],
    ids=["lengths", "a length each", "type of lengths", "too short", "too long", "no table", "type of pages"],
)
def test_rows_that_are_not_those_of_the_queries_are_refused(change: dict[str, torch.Tensor]) -> None:
    """A table of fewer rows would be read behind its end, where another row's pages may lie, or nothing."""
    tensors = with_rows(tensors_of(Case(tokens_before=(5, 3), query_tokens=1)), **change)
    with pytest.raises(EngineError, match=r"cannot attend with queries \[2, "):
        tensors.attend(attend)


@pytest.mark.parametrize("reach", [EVERYTHING, Reach(window_tokens=2)], ids=["full", "window"])
def test_a_row_with_more_tokens_than_its_table_holds_is_refused_where_the_host_knows(reach: Reach) -> None:
    tensors = tensors_of(Case(tokens_before=(9, 2), query_tokens=3, page_tokens=4, reach=reach))
    assert tensors.rows.page_table.shape == (2, 3)
    narrow = with_rows(tensors, page_table=tensors.rows.page_table[:, :2].contiguous())
    with pytest.raises(EngineError, match="a row has 12 tokens, and 2 pages of 4 tokens are all"):
        narrow.attend(attend)
    tensors.attend(attend)


@BACKENDS
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("query_tokens", [1, 3])
@pytest.mark.parametrize("reach", [EVERYTHING, Reach(window_tokens=2), Reach(chunk_tokens=5)])
def test_where_the_host_does_not_know_it_such_a_row_is_nan_and_no_other_row_is(
    function: Any, reach: Reach, query_tokens: int, *, has_sinks: bool
) -> None:
    """The table's neighbour in memory names pages that do not exist: nobody may look one up."""
    case = Case(
        tokens_before=(21, 2, 8 - query_tokens),
        query_tokens=query_tokens,
        page_tokens=4,
        reach=reach,
        has_sinks=has_sinks,
    )
    tensors = tensors_of(case)
    table = torch.full((3, 6), 1 << 40, dtype=torch.int64)
    table[:, :2] = tensors.rows.page_table[:, :2]
    narrow = with_rows(tensors, page_table=table[:, :2]).attend(function)
    assert narrow[0].isnan().all()
    torch.testing.assert_close(narrow[1:].double(), written_out(tensors)[1:], rtol=1e-4, atol=1e-5)


@BACKENDS
def test_lengths_and_sinks_need_not_be_dense(function: Any) -> None:
    """As the first column of positions is, and a slice of every head's sinks."""
    tensors = tensors_of(Case(tokens_before=(9, 5, 2), query_tokens=3, has_sinks=True))
    assert tensors.sinks is not None
    positions = tensors.rows.tokens_before[:, None] + torch.arange(3)
    apart = with_rows(tensors, tokens_before=positions[:, 0])
    apart = attrs.evolve(apart, sinks=tensors.sinks.repeat_interleave(2)[::2])
    assert not apart.rows.tokens_before.is_contiguous()
    torch.testing.assert_close(apart.attend(function), tensors.attend(function), rtol=0, atol=0)


def test_entries_that_are_not_dense_are_refused() -> None:
    tensors = tensors_of(Case(tokens_before=(5,), query_tokens=1))
    with pytest.raises(EngineError, match=r"entries of the keys lie 2 elements apart"):
        attrs.evolve(tensors, keys=torch.zeros(4, 4, 2, 16)[..., ::2]).attend(triton_attention.attend)


@pytest.mark.parametrize(
    "bounds",
    [
        {"window_tokens": 0},
        {"chunk_tokens": 0},
        {"window_tokens": -3},
        {"window_tokens": 6, "chunk_tokens": 4},
    ],
)
def test_a_reach_is_one_bound_of_one_token_or_more(bounds: dict[str, int]) -> None:
    """Nobody would compute what else it said: no token at all, or the smaller of two."""
    with pytest.raises(
        EngineError, match="a query sees a window or an attention chunk, of one token or more"
    ):
        Reach(**bounds)


@pytest.mark.parametrize(("row_count", "query_tokens"), [(0, 1), (2, 0)])
def test_attention_of_nothing_is_nothing(row_count: int, query_tokens: int) -> None:
    """Of the shape that it would have."""
    rows = PagedRows(
        page_table=torch.zeros((row_count, 4), dtype=torch.int64),
        tokens_before=torch.zeros(row_count, dtype=torch.int64),
        query_tokens=query_tokens,
        page_tokens=4,
        reach=EVERYTHING,
    )
    output = attend(
        torch.zeros(row_count, 4, query_tokens, 8),
        torch.zeros(3, 4, 2, 8),
        torch.zeros(3, 4, 2, 5),
        rows,
        scaling=0.3,
    )
    assert output.shape == (row_count, query_tokens, 4, 5)


@BACKENDS
def test_fp16_scores_may_be_past_its_largest_number(function: Any) -> None:
    """80 × 80 × 16 is, and a 64th of it is not: scores are products of fp16 in fp32."""
    tensors = tensors_of(Case(tokens_before=(2,), query_tokens=1, key_dim=16, dtype=torch.float16))
    large = attrs.evolve(
        tensors, query=torch.full_like(tensors.query, 80), keys=torch.full_like(tensors.keys, 80)
    )
    output = large.attend(function, scaling=1 / 64)
    # Every key has the same score.
    page = int(tensors.rows.page_table[0, 0])
    expected = tensors.values[page, :3].float().mean(dim=0).repeat_interleave(2, dim=0)
    torch.testing.assert_close(output[0, 0].float(), expected, rtol=2e-3, atol=2e-3)


class NotingProgram:
    """A program that is only launched."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *_, **__: None


@pytest.mark.parametrize(("row_count", "heads"), [(2048, 32), (70_000, 1)])
def test_a_launch_may_have_many_rows_and_heads(
    row_count: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's grids are long in their first axis only: 65,535 in the others."""
    program = NotingProgram()
    monkeypatch.setattr(triton_attention.programs, "attend_pages", program)
    rows = PagedRows(
        page_table=torch.zeros((row_count, 1), dtype=torch.int64),
        tokens_before=torch.zeros(row_count, dtype=torch.int64),
        query_tokens=1,
        page_tokens=16,
        reach=EVERYTHING,
    )
    plane = torch.zeros(1, 16, heads, 16)
    triton_attention.attend(torch.zeros(row_count, heads, 1, 16), plane, plane, rows, scaling=1.0, sinks=None)
    (grid,) = program.grids
    assert math.prod(grid) == row_count * heads
    assert max(grid[1:]) <= 65_535


def test_blocks_are_what_shared_memory_holds() -> None:
    """In bytes: fp32 entries have room for half as many as bf16's. What fits nowhere is refused with the figures."""
    blocks = triton_attention.blocks_of
    assert blocks(4096, 128, 128, 2) == (64, 64)
    assert blocks(8, 128, 128, 2) == (16, 64)
    assert blocks(4096, 128, 128, 4) == (32, 32)
    assert blocks(4096, 256, 256, 2) == (32, 32)
    assert blocks(4096, 256, 256, 4) == (16, 16)
    assert blocks(4096, 1024, 512, 2) == (16, 16)
    with pytest.raises(EngineError, match="4 bytes need 193 KiB of shared memory, and 99 KiB are there"):
        blocks(8, 1024, 1024, 4)
