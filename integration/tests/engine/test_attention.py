"""The attention backend over pages: torch and Triton against a softmax that is written out, and against each other."""

from __future__ import annotations

import math
import mmap
import sys

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.engine.attention import CHUNK_READS, PagedRows, Reach, reach_of, torch_attention
from kvtide.engine.workload import OVERLAP, PLAIN
from kvtide.plan import ChunkLifetime, FullLifetime, WindowLifetime

from .attention_cases import DEVICE, EVERYTHING, Case, Tensors, tensors_of, written_out

pytest.importorskip("triton", reason="Triton is not installed: its programs are tested where it is")

from kvtide.engine.attention import triton_attention

pytestmark = pytest.mark.usefixtures("loops_in_the_interpreter")
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
TYPES = [torch.float32, torch.float16]
if DEVICE == "cuda":
    # Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
    TYPES.append(torch.bfloat16)


REACHES = st.one_of(
    st.just(EVERYTHING),
    st.integers(1, 20).map(lambda tokens: Reach(window_tokens=tokens)),
    st.integers(1, 20).map(lambda tokens: Reach(chunk_tokens=tokens)),
)
CASES = st.builds(
    Case,
    tokens_before=st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    query_tokens=st.sampled_from([1, 1, 2, 5, 19]),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 8]),
    key_dim=st.sampled_from([3, 8, 16]),
    value_dim=st.sampled_from([1, 8, 20]),
    page_tokens=st.sampled_from([1, 3, 4, 16]),
    reach=REACHES,
    has_sinks=st.booleans(),
    spare_columns=st.integers(0, 3),
    seed=st.integers(0, 1000),
)


@pytest.mark.requirement("P6")
@settings(max_examples=40, deadline=None)
@given(case=CASES)
def test_torch_computes_what_the_formula_says(case: Case) -> None:
    """Grouped heads, widths that differ, any page size, windows, attention chunks, sinks; unwritten bytes have weight zero."""
    tensors = tensors_of(case, unwritten=7.0, behind=-5.0)
    found = tensors.attend(torch_attention.attend)
    torch.testing.assert_close(found.double(), written_out(tensors), rtol=1e-4, atol=1e-5)


@pytest.mark.requirement("A6", "P6")
@settings(max_examples=40, deadline=None)
@given(case=CASES)
def test_triton_computes_what_the_formula_says_and_loads_nothing_else(case: Case) -> None:
    """NaN in every byte that no query sees: of the next layer, of what is not written, of what a window has left behind."""
    tensors = tensors_of(case, unwritten=math.nan, behind=math.nan)
    found = tensors.attend(triton_attention.attend)
    torch.testing.assert_close(found.double(), written_out(tensors), rtol=1e-4, atol=1e-5)


@pytest.mark.requirement("A6")
@pytest.mark.parametrize(("dtype", "query_tokens"), [(torch.float32, 20), *((each, 1) for each in TYPES)])
@pytest.mark.parametrize("reach", [EVERYTHING, Reach(window_tokens=100)], ids=["full", "window"])
def test_triton_and_torch_agree_where_keys_are_cut_into_shares(
    dtype: torch.dtype, query_tokens: int, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long rows beside short ones, so that some shares have no key; several blocks of queries; models' types."""
    monkeypatch.setattr(triton_attention, "SHARE_BLOCKS", 1)
    case = Case(
        tokens_before=(150, 3),
        query_tokens=query_tokens,
        group=4,
        key_dim=24,
        page_tokens=16,
        reach=reach,
        has_sinks=True,
    )
    tensors = tensors_of(attrs.evolve(case, dtype=dtype))
    assert triton_attention._shares(4, tensors.rows, 64) == 2
    check_alike(tensors, 1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.requirement("A6")
@pytest.mark.parametrize(("before", "shares"), [(500, 8), (2100, 32)])
def test_triton_and_torch_agree_with_as_many_shares_as_there_may_be(
    before: int, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most have no key of the short row."""
    monkeypatch.setattr(triton_attention, "SHARE_BLOCKS", 1)
    case = Case(tokens_before=(before, 70), query_tokens=1, kv_heads=1, page_tokens=16, has_sinks=True)
    tensors = tensors_of(case)
    assert triton_attention._shares(2, tensors.rows, 64) == shares
    check_alike(tensors, 1e-5)


def test_keys_are_cut_into_no_more_shares_than_are_joined_fast() -> None:
    """However long the rows are, and only while programs are wanting."""
    long = attrs.evolve(
        tensors_of(Case(tokens_before=(3,), query_tokens=1)).rows,
        page_table=torch.zeros((1, 1 << 20), dtype=torch.int64),
    )
    assert triton_attention._shares(1, long, 64) == triton_attention.MOST_SHARES
    assert triton_attention._shares(64, long, 64) == 4
    assert triton_attention._shares(triton_attention.WANTED_PROGRAMS, long, 64) == 1


@pytest.mark.requirement("A6", "P6")
@pytest.mark.parametrize("query_tokens", [1, 21])
def test_triton_and_torch_agree_on_wide_entries(query_tokens: int) -> None:
    """Heads of 200 and more, as some models have: blocks of another size, and of several a row."""
    case = Case(tokens_before=(40, 3), query_tokens=query_tokens, group=3, key_dim=136, value_dim=200)
    check_alike(tensors_of(case), 1e-5)


def check_alike(tensors: Tensors, error: float) -> None:
    torch.testing.assert_close(
        tensors.attend(triton_attention.attend),
        tensors.attend(torch_attention.attend),
        rtol=error,
        atol=error,
    )


@pytest.mark.requirement("X5")
@settings(max_examples=12, deadline=None)
@given(case=CASES, seed=st.integers(0, 1000))
def test_where_pages_lie_changes_no_bit(case: Case, seed: int) -> None:
    """The same tokens in other pages, beside other unseen ones: what X5's comparison with plain tensors stands on."""
    for function in (torch_attention.attend, triton_attention.attend):
        here = tensors_of(case).attend(function)
        there = tensors_of(case, unwritten=3.0, behind=2.0, seed=seed).attend(function)
        assert torch.equal(here, there)


def far(tensor: torch.Tensor, stride: int, used: list[int]) -> torch.Tensor:
    """`tensor` with `stride` elements from one of its first dimension to the next; a sparse mapping that holds those that are `used`."""
    size = tensor.element_size() * (len(tensor) * stride + tensor[0].numel())
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    there = torch.frombuffer(region, dtype=tensor.dtype).as_strided(
        tensor.shape, (stride, *tensor.stride()[1:])
    )
    for place in used:
        there[place] = tensor[place]
    return there


@pytest.mark.requirement("A3")
@pytest.mark.parametrize("which", ["keys", "values", "query", "page table"])
def test_offsets_past_2_31_elements_are_addressed_exactly(which: str) -> None:
    """Tensors of many GiB, of which only what is used is ever touched. An odd stride has no grain but one element: the factors
    themselves are past 2³¹ when they are multiplied.
    """
    near = tensors_of(Case(tokens_before=(9, 2, 5), query_tokens=1, kv_heads=1, page_tokens=4))
    stride = (1 << 30) + 1
    pages = near.rows.page_table.unique().tolist()
    apart = {
        "keys": lambda: attrs.evolve(near, keys=far(near.keys, stride, pages)),
        "values": lambda: attrs.evolve(near, values=far(near.values, stride, pages)),
        "query": lambda: attrs.evolve(near, query=far(near.query, stride, [0, 1, 2])),
        "page table": lambda: attrs.evolve(
            near, rows=attrs.evolve(near.rows, page_table=far(near.rows.page_table, stride, [0, 1, 2]))
        ),
    }[which]()
    assert max(pages) * stride > 1 << 31
    assert 2 * stride > 1 << 31
    for function in (torch_attention.attend, triton_attention.attend):
        assert torch.equal(apart.attend(function), near.attend(function))


def test_pages_loaded_follow_from_sizes_that_the_host_knows() -> None:
    """A graph that was captured for a table's width is right for every length that the table holds."""
    rows = tensors_of(Case(tokens_before=(30, 2), query_tokens=1)).rows
    assert rows.loaded_pages == rows.page_table.shape[1] == 8
    # 5 tokens touch three pages of 4 at most.
    assert attrs.evolve(rows, reach=Reach(window_tokens=5)).loaded_pages == 2
    assert attrs.evolve(rows, reach=Reach(window_tokens=6)).loaded_pages == 3
    assert attrs.evolve(rows, reach=Reach(chunk_tokens=4), query_tokens=2).loaded_pages == 2
    assert attrs.evolve(rows, reach=Reach(window_tokens=500)).loaded_pages == 8


def test_a_row_loads_the_pages_from_its_window_to_its_newest_token() -> None:
    rows = PagedRows(
        page_table=torch.tensor([[0, 7, 5], [4, 0, 0]]),
        tokens_before=torch.tensor([9, 2]),
        query_tokens=1,
        page_tokens=4,
        reach=Reach(window_tokens=3),
    )
    # Row 0: tokens 4 to 11, a query at 9 that sees 7, 8 and 9. Row 1: tokens 0 to 7, a query at 2.
    assert rows.runs.pages.tolist() == [[7, 5], [4, 0]]
    assert rows.runs.hidden.long().tolist() == [[[1, 1, 1, 0, 0, 0, 1, 1]], [[0, 0, 0, 1, 1, 1, 1, 1]]]


def test_lifetimes_are_reaches_and_the_backend_says_what_its_chunks_read() -> None:
    """Storage prices and binds windows for chunks that are read in pages, since this is where they are read."""
    assert reach_of(FullLifetime()) == EVERYTHING
    assert reach_of(WindowLifetime(7)) == Reach(window_tokens=7)
    assert reach_of(ChunkLifetime(7)) == Reach(chunk_tokens=7)
    assert PLAIN.chunk_reads is OVERLAP.chunk_reads is CHUNK_READS
