"""The attention backend over pages: torch and Triton against a softmax that is written out, and against each other."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.engine.attention import CHUNK_READS, PagedRows, Reach, attend, reach_of, torch_attention
from kvtide.engine.errors import EngineError
from kvtide.engine.workload import OVERLAP, PLAIN
from kvtide.plan import ChunkLifetime, FullLifetime, WindowLifetime

pytest.importorskip("triton", reason="Triton is not installed: its programs are tested where it is")
from triton.runtime import interpreter

from kvtide.engine.attention import triton_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EVERYTHING = Reach()
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
TYPES = [torch.float32, torch.float16]
if DEVICE == "cuda":
    # Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
    TYPES.append(torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def loops_in_the_interpreter() -> Iterator[None]:
    """Triton 3.6's interpreter makes loop bounds of arrays of one element as NumPy 2.4 no longer does."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
        yield


@attrs.frozen(kw_only=True)
class Case:
    """Rows, sizes and a reach; values follow from the seed."""

    tokens_before: tuple[int, ...]
    query_tokens: int
    kv_heads: int = 2
    group: int = 2
    key_dim: int = 8
    value_dim: int = 8
    page_tokens: int = 4
    reach: Reach = EVERYTHING
    has_sinks: bool = False
    spare_columns: int = 0
    dtype: torch.dtype = torch.float32
    seed: int = 0


@attrs.frozen(eq=False)
class Tensors:
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rows: PagedRows
    sinks: torch.Tensor | None

    def attend(self, function: Any, scaling: float = 0.3) -> torch.Tensor:
        return function(
            self.query, self.keys, self.values, self.rows, scaling=scaling, sinks=self.sinks
        ).cpu()


def tensors_of(
    case: Case, *, unwritten: float = 0.0, behind: float = 0.0, seed: int | None = None
) -> Tensors:
    """The case's values in pages scattered over two planes of one page, as in an arena; `seed` draws where.

    What is not written holds `unwritten`, and what lies behind every query's reach, in pages that a window has given up too, `behind`.
    """
    numbers = np.random.default_rng(case.seed)
    shape = (len(case.tokens_before), case.kv_heads * case.group, case.query_tokens, case.key_dim)

    def drawn(*size: int) -> torch.Tensor:
        return torch.from_numpy(numbers.standard_normal(size).astype(np.float32)).to(case.dtype)

    query = drawn(*shape)
    sinks = drawn(shape[1]) if case.has_sinks else None
    per_page = case.page_tokens
    lengths = [before + case.query_tokens for before in case.tokens_before]
    columns = -(-max(lengths) // per_page) + case.spare_columns
    page_count = 2 + sum(-(-length // per_page) for length in lengths)
    width = case.key_dim + case.value_dim
    # A page's envelope: keys of all its tokens, then values, then another layer's bytes.
    envelopes = torch.full((page_count, per_page * case.kv_heads * (width + 3)), math.nan, dtype=case.dtype)
    keys, values = (
        envelopes[:, first : first + per_page * case.kv_heads * dim].view(
            page_count, per_page, case.kv_heads, dim
        )
        for first, dim in ((0, case.key_dim), (per_page * case.kv_heads * case.key_dim, case.value_dim))
    )
    keys[0], values[0] = 0.0, 0.0
    places = np.random.default_rng(case.seed if seed is None else seed).permutation(page_count - 1) + 1
    table = torch.zeros((len(lengths), columns), dtype=torch.int64)
    for row, (before, length) in enumerate(zip(case.tokens_before, lengths, strict=True)):
        pages, places = np.split(places, [-(-length // per_page)])
        first_seen = int(case.reach.first_seen(torch.tensor([before])))
        for index, page in enumerate(pages.tolist()):
            keys[page], values[page] = unwritten, unwritten
            if (index + 1) * per_page > first_seen:
                table[row, index] = page
            for offset in range(min(per_page, length - index * per_page)):
                entry = (drawn(case.kv_heads, case.key_dim), drawn(case.kv_heads, case.value_dim))
                is_behind = index * per_page + offset < first_seen
                keys[page, offset] = behind if is_behind else entry[0]
                values[page, offset] = behind if is_behind else entry[1]
    rows = PagedRows(
        page_table=table.to(DEVICE),
        tokens_before=torch.tensor(case.tokens_before).to(DEVICE),
        query_tokens=case.query_tokens,
        page_tokens=per_page,
        reach=case.reach,
    )
    there = envelopes.to(DEVICE)
    keys, values = (
        there.as_strided(plane.shape, plane.stride(), plane.storage_offset()) for plane in (keys, values)
    )
    return Tensors(query.to(DEVICE), keys, values, rows, None if sinks is None else sinks.to(DEVICE))


def written_out(tensors: Tensors, scaling: float = 0.3) -> torch.Tensor:
    """Attention as its formula says, one query, head and key at a time, in double precision."""
    rows, query = tensors.rows, tensors.query.cpu().double()
    row_count, heads, query_tokens, _ = query.shape
    keys, values = tensors.keys.cpu().double(), tensors.values.cpu().double()
    group = heads // keys.shape[2]
    table = rows.page_table.cpu()
    output = torch.zeros(row_count, query_tokens, heads, values.shape[-1], dtype=torch.float64)
    for row, before in enumerate(rows.tokens_before.tolist()):
        for token in range(query_tokens):
            position = before + token
            seen = [
                key
                for key in range(position + 1)
                if (rows.reach.window_tokens is None or key > position - rows.reach.window_tokens)
                and (
                    rows.reach.chunk_tokens is None
                    or key // rows.reach.chunk_tokens == position // rows.reach.chunk_tokens
                )
            ]
            for head in range(heads):
                entries = [
                    (int(table[row, key // rows.page_tokens]), key % rows.page_tokens, head // group)
                    for key in seen
                ]
                scores = [float(query[row, head, token] @ keys[at]) * scaling for at in entries]
                powers = [math.exp(score) for score in scores]
                total = sum(powers)
                if tensors.sinks is not None:
                    total += math.exp(float(tensors.sinks[head]))
                for power, at in zip(powers, entries, strict=True):
                    output[row, token, head] += power / total * values[at]
    return output


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
    error = 1e-5 if dtype is torch.float32 else 2e-2
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


@pytest.mark.requirement("A3")
def test_offsets_past_2_31_elements_are_addressed_exactly() -> None:
    """Planes of an arena of many GiB, a sparse mapping of which only the pages in use are ever touched."""
    near = tensors_of(Case(tokens_before=(9,), query_tokens=1, kv_heads=1, page_tokens=4))
    stride, count = 1 << 30, near.keys.shape[0]

    def far(plane: torch.Tensor) -> torch.Tensor:
        region = mmap.mmap(
            -1, 4 * count * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        )
        there = torch.frombuffer(region, dtype=torch.float32).as_strided(
            plane.shape, (stride, *plane.stride()[1:])
        )
        for page in near.rows.page_table[0].tolist():
            there[page] = plane[page]
        return there

    assert int(near.rows.page_table.max()) * stride > 1 << 31
    apart = attrs.evolve(near, keys=far(near.keys), values=far(near.values))
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


@pytest.mark.parametrize(
    "change",
    [
        {"query": torch.zeros(1, 3, 1, 8)},
        {"query": torch.zeros(1, 4, 2, 8)},
        {"query": torch.zeros(1, 4, 1, 8, dtype=torch.float64)},
        {"values": torch.zeros(4, 4, 1, 8)},
        {"sinks": torch.zeros(3)},
    ],
    ids=["heads", "query tokens", "type", "value heads", "sinks"],
)
def test_shapes_that_do_not_belong_together_are_refused(change: dict[str, torch.Tensor]) -> None:
    tensors = attrs.evolve(tensors_of(Case(tokens_before=(5,), query_tokens=1)), **change)
    with pytest.raises(EngineError, match=r"cannot attend with queries \[1, "):
        tensors.attend(attend)


def test_entries_that_are_not_dense_are_refused() -> None:
    tensors = tensors_of(Case(tokens_before=(5,), query_tokens=1))
    with pytest.raises(EngineError, match=r"entries of the keys lie 2 elements apart"):
        attrs.evolve(tensors, keys=torch.zeros(4, 4, 2, 16)[..., ::2]).attend(triton_attention.attend)
