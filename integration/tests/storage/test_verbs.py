"""The verbs as one face: each is in the table of `KVStorage`, and each takes whole numbers of any make and no others."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from kvtide.arena import SCRATCH_BYTES
from kvtide.device import ModelledDevice
from kvtide.ledger import CheckLevel
from kvtide.sizing import CheckpointStrategy, ServingPolicy
from kvtide.storage import KVStorage, Overcommit, PreparedStep, StepState, StorageError, build_kv_storage

from .test_storage import plan_of

GRID = 4
NUMBERS = {"SupportsIndex", "npt.ArrayLike", "npt.ArrayLike | None", "Sequence[npt.ArrayLike] | None"}
"""Annotations of what a verb takes that is, or holds, whole numbers."""

VERBS = {
    name: verb
    for name, verb in inspect.getmembers(KVStorage, inspect.isfunction)
    if not name.startswith("_") and name not in {"statistics", "admitted_at_peak", "resident_now"}
}
"""All but the questions about figures."""


def build() -> KVStorage:
    """A stage without states, which retains its windows for those of others: every verb has something to do."""
    return build_kv_storage(
        plan_of(windows=(5,), full=True, state=False, page_tokens=GRID),
        budget_bytes=SCRATCH_BYTES + 20_000,
        max_running_requests=4,
        max_context_tokens=64,
        chunk_tokens=8,
        policy=ServingPolicy(strategy=CheckpointStrategy.EXTRA_BUFFER, checkpoint_interval=GRID),
        check_level=CheckLevel.STRICT,
    )


class Served:
    """A storage with one request, of 8 and 4 tokens in row 0, whose first 4 tokens are written."""

    def __init__(self) -> None:
        self.storage = build()
        self.storage.admit([8], [4])
        self.step = self.prepared([0], [4])
        self.storage.launch_forward(self.step).resolve()
        self.storage.record_forward(self.step)
        self.storage.forward_processed(self.step)

    def prepared(self, rows: object, counts: object) -> PreparedStep:
        step = self.storage.prepare_step(rows, counts)  # type: ignore[arg-type]  # whatever a test gives
        assert isinstance(step, PreparedStep)
        return step

    def advanced(self) -> KVStorage:
        if self.step.state is StepState.PROCESSED:
            self.storage.advance(self.step)
        return self.storage


CALLS: dict[tuple[str, str], tuple[Callable[[Served, object], object], list[int] | int]] = {
    ("arrival_refusal", "prompt_tokens"): (lambda s, v: s.storage.arrival_refusal(v, 4), 8),
    ("arrival_refusal", "output_tokens"): (lambda s, v: s.storage.arrival_refusal(8, v), 4),
    ("max_new_tokens_for_memory", "prompt_tokens"): (
        lambda s, v: s.storage.max_new_tokens_for_memory(v),
        8,
    ),
    ("admit", "prompt_tokens"): (lambda s, v: s.storage.admit(v, [4]).tolist(), [8]),
    ("admit", "output_tokens"): (lambda s, v: s.storage.admit([8], v).tolist(), [4]),
    ("admit", "prompts"): (lambda s, v: s.storage.admit([3], [4], prompts=[v]).tolist(), [5, 6, 7]),
    ("next_chunk_tokens", "row"): (lambda s, v: s.storage.next_chunk_tokens(v, 99), 0),
    ("next_chunk_tokens", "most"): (lambda s, v: s.storage.next_chunk_tokens(0, v), 5),
    ("prepare_step", "rows"): (lambda s, v: s.advanced() and s.prepared(v, [4]).rows.tolist(), [0]),
    ("prepare_step", "counts"): (lambda s, v: s.advanced() and s.prepared([0], v).counts.tolist(), [4]),
    ("checkpoints_taken", "rows"): (lambda s, v: s.storage.checkpoints_taken(v, [4]), [0]),
    ("checkpoints_taken", "lengths"): (lambda s, v: s.storage.checkpoints_taken([0], v), [4]),
    ("advance", "chosen"): (lambda s, v: s.storage.advance(s.step, v), [7]),
    ("release", "rows"): (lambda s, v: s.advanced().release(v), [0]),
    ("retract", "rows"): (lambda s, v: s.advanced().retract(v), [0]),
    ("retract_to_host", "rows"): (
        lambda s, v: s.advanced().retract_to_host(v)[0].written_tokens,
        [0],
    ),
}
"""A verb that takes whole numbers, by what it calls them; the last is what is right."""

MAKES: dict[str, Callable[[list[int]], object]] = {
    "tuple": tuple,
    "list of NumPy's": lambda values: [np.int64(value) for value in values],
    "int32": lambda values: np.array(values, np.int32),
    "uint8": lambda values: np.array(values, np.uint8),
    "torch": torch.tensor,
}
WRONG: dict[str, Callable[[int], object]] = {
    "a fraction": lambda value: value + 0.5,
    "a float that is whole": float,
    "NaN": lambda value: float("nan"),
    "a bool": bool,
    "a bool of NumPy": np.bool_,
    "a bool of torch": lambda value: torch.tensor(bool(value)),
    "text": str,
    "an object": lambda value: object(),
    "a complex number": complex,
}


@pytest.mark.requirement("K1")
def test_every_verb_is_in_the_table_and_nothing_else() -> None:
    """Pages promise it to whoever asks for `help`: a verb that is missing there is one whose waits nobody knows."""
    named = re.findall(r"^ *\| `(\w+)` \|", KVStorage.__doc__ or "", re.MULTILINE)
    assert sorted(named) == sorted(VERBS)
    assert len(named) == len(set(named))


@pytest.mark.requirement("K1")
def test_every_number_that_a_verb_takes_is_tried() -> None:
    """A verb that comes anew comes into the table of calls; and none says `int` of what a scheduler has from NumPy."""
    taken = {
        (name, parameter.name): str(parameter.annotation)
        for name, verb in VERBS.items()
        for parameter in inspect.signature(verb).parameters.values()
    }
    assert {key for key, annotation in taken.items() if annotation in NUMBERS} == set(CALLS)
    assert not [
        key
        for key, annotation in taken.items()
        if re.search(r"\bint\b|Array", annotation) and annotation not in NUMBERS
    ]


@pytest.mark.requirement("K1")
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("key", CALLS, ids="-".join)
def test_whole_numbers_are_taken_whoever_made_them(key: tuple[str, str], make: str) -> None:
    """A scheduler's lengths come out of arrays: what one verb takes, no other refuses."""
    call, right = CALLS[key]
    is_scalar = isinstance(right, int)
    made = MAKES[make]([right] if isinstance(right, int) else right)
    value = made[0] if is_scalar else made  # type: ignore[index]  # each is a sequence
    served, expected = Served(), Served()
    assert call(served, value) == call(expected, right)
    assert served.storage.statistics() == expected.storage.statistics()


@pytest.mark.requirement("K1")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("key", CALLS, ids="-".join)
def test_what_is_no_whole_number_is_named_before_anything_changes(key: tuple[str, str], wrong: str) -> None:
    """Rounded, it would be another row's, or a shorter length; as a bare error, somebody else's."""
    call, right = CALLS[key]
    value = WRONG[wrong](right if isinstance(right, int) else right[0])
    served, expected = Served(), Served()
    if key[0] not in {"checkpoints_taken", "advance"}:
        served.advanced()
        expected.advanced()
    with pytest.raises(StorageError, match=f"^{key[1]} must be a "):
        call(served, value if isinstance(right, int) else [value])
    assert served.storage.statistics() == expected.storage.statistics()
    served.advanced().release([0])
    served.storage.verify_idle()


@pytest.mark.requirement("K1")
def test_a_ragged_list_is_named_too() -> None:
    """NumPy's own words for it name no argument."""
    with pytest.raises(StorageError, match=r"^rows must be a list or array of whole numbers: "):
        Served().advanced().release([[0], [1, 2]])  # type: ignore[list-item]  # as one would
    with pytest.raises(StorageError, match=r"^rows must fit in 64 bits"):
        Served().advanced().release(np.array([2**63], np.uint64))


@pytest.mark.requirement("K1")
@pytest.mark.parametrize("slip", [True, np.True_, np.array(True), torch.tensor(True)])
@pytest.mark.parametrize("make", [list, tuple])
def test_a_bool_among_numbers_is_none(slip: object, make: Callable[[list[object]], Any]) -> None:
    """By itself it is refused: NumPy would make a 1 of it here."""
    with pytest.raises(StorageError, match=r"^rows must be a list or array of whole numbers, found [\[(]"):
        Served().advanced().release(make([0, slip]))


@pytest.mark.requirement("K6")
def test_a_chunk_is_cut_of_a_row_in_use_alone() -> None:
    """The last row's answer for row −1, or 0 for a free row, would be taken for the end of a prompt."""
    storage = Served().advanced()
    for row, text in ((99, "rows run from 0 to 3"), (-1, "rows run from 0 to 3"), (2, "not in use")):
        with pytest.raises(StorageError, match=rf"cannot cut a chunk of rows \[{row}\]: {text}"):
            storage.next_chunk_tokens(row, 8)
    with pytest.raises(StorageError, match="most must be 0 or more, found -3"):
        storage.next_chunk_tokens(0, -3)
    assert [storage.next_chunk_tokens(0, most) for most in (0, 3, 4, 99)] == [0, 0, 4, 4]


@pytest.mark.requirement("K1")
def test_a_budget_and_its_limits_are_whole_numbers_of_any_make() -> None:
    """They are computed from a device's free bytes as often as they are written down."""
    plan = plan_of(windows=(5,), full=True, state=True, page_tokens=GRID)
    limits = {
        "budget_bytes": SCRATCH_BYTES + 20_000,
        "max_running_requests": 4,
        "max_context_tokens": 64,
        "chunk_tokens": 8,
        "state_slots": 2,
        "scratch_bytes": SCRATCH_BYTES,
    }
    built = build_kv_storage(plan, **limits)  # type: ignore[arg-type]  # as the table has them
    made = {name: np.int64(value) for name, value in limits.items()}
    assert build_kv_storage(plan, **made).layout == built.layout  # type: ignore[arg-type]
    for name in limits:
        with pytest.raises(StorageError, match=f"^{name} must be a whole number, found 2.5"):
            build_kv_storage(plan, **{**limits, name: 2.5})  # type: ignore[arg-type]  # the fault
    assert Overcommit(np.float32(0.07)).expected_output_fraction == Fraction(7, 100)


@pytest.mark.requirement("K1", "X5")
def test_a_device_without_tensors_is_refused_by_name() -> None:
    """The modelled device by itself is one: a reader of its page tries it first, and an AttributeError names no remedy."""
    with pytest.raises(
        StorageError, match=r"cannot run ModelledDevice: it has no tensors .*ModelledTensorDevice"
    ):
        build_kv_storage(
            plan_of(windows=(5,), full=True, state=True, page_tokens=GRID),
            budget_bytes=SCRATCH_BYTES + 20_000,
            max_running_requests=4,
            max_context_tokens=64,
            chunk_tokens=8,
            make_device=lambda arena: ModelledDevice(arena.byte_count, seed=1),  # type: ignore[arg-type, return-value]
        )
