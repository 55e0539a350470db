"""Every address at which the attention programs read is an element of something they were given.

The interpreter reads host memory as it is asked to: what is read too much of and then dropped changes no output there, and is an illegal
access on a GPU, where it lies behind the arena.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvtide.engine.attention import Reach

from .attention_cases import DEVICE, EVERYTHING, Case, Tensors, tensors_of

pytest.importorskip("triton", reason="Triton is not installed: its programs are tested where it is")
from triton.runtime.interpreter import InterpreterBuilder

from kvtide.engine.attention import triton_attention

pytestmark = [
    pytest.mark.usefixtures("loops_in_the_interpreter"),
    pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is not used where a GPU is"),
]


class Accesses:
    """Addresses that programs have read and written, where their masks say so."""

    def __init__(self) -> None:
        self.loaded: set[int] = set()
        self.stored: set[int] = set()

    def note(self, into: set[int], addresses: Any, mask: Any) -> None:
        into.update(np.asarray(addresses)[np.asarray(mask, np.bool_)].tolist())


@pytest.fixture
def accesses(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accesses]:
    noted = Accesses()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def noted_load(self: Any, ptrs: Any, mask: Any, *more: Any) -> Any:
        noted.note(noted.loaded, ptrs.data, mask.data)
        return load(self, ptrs, mask, *more)

    def noted_store(self: Any, ptrs: Any, value: Any, mask: Any, *more: Any) -> Any:
        noted.note(noted.stored, ptrs.data, mask.data)
        return store(self, ptrs, value, mask, *more)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", noted_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", noted_store)
    return noted


def addresses_of(tensor: torch.Tensor) -> set[int]:
    """Of every element."""
    offsets = np.zeros(tensor.shape, np.int64)
    for axis, stride in enumerate(tensor.stride()):
        shape = [1] * tensor.dim()
        shape[axis] = -1
        offsets += np.arange(tensor.shape[axis]).reshape(shape) * stride
    return set((tensor.data_ptr() + offsets * tensor.element_size()).ravel().tolist())


def given(tensors: Tensors) -> dict[str, torch.Tensor]:
    there = {
        "query": tensors.query,
        "keys": tensors.keys,
        "values": tensors.values,
        "page table": tensors.rows.page_table,
        "tokens before": tensors.rows.tokens_before,
    }
    return there if tensors.sinks is None else there | {"sinks": tensors.sinks}


@pytest.mark.requirement("A6")
@pytest.mark.parametrize("reach", [EVERYTHING, Reach(window_tokens=9), Reach(chunk_tokens=8)])
@pytest.mark.parametrize(
    ("query_tokens", "share_blocks"), [(1, 4), (1, 1), (23, 4)], ids=["decode", "shares", "chunk"]
)
def test_nothing_is_read_but_elements_of_what_is_given(
    accesses: Accesses,
    reach: Reach,
    query_tokens: int,
    share_blocks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Widths that are no powers of two, blocks of queries that are not full, rows of several lengths; shares once they are written."""
    monkeypatch.setattr(triton_attention, "SHARE_BLOCKS", share_blocks)
    case = Case(
        tokens_before=(150, 3, 41),
        query_tokens=query_tokens,
        group=3,
        key_dim=20,
        value_dim=12,
        page_tokens=16,
        reach=reach,
        has_sinks=True,
    )
    tensors = tensors_of(case)
    tensors.attend(triton_attention.attend)
    elements = {name: addresses_of(tensor) for name, tensor in given(tensors).items()}
    for name, addresses in elements.items():
        assert accesses.loaded & addresses, name
    assert elements["query"] <= accesses.loaded
    assert accesses.loaded <= set().union(accesses.stored, *elements.values())
