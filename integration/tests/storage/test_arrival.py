"""What a scheduler asks when a request arrives: could it ever be admitted, and how long may its output be (K5, K6)."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.arena import SCRATCH_BYTES
from kvtide.sizing import SizingError, size_plan
from kvtide.storage import AdmissionRefusal, KVStorage, StorageError, build_kv_storage

from .test_storage import CHUNK_TOKENS, MODELS, build, plan_of

CONTEXT_TOKENS = 64
"""Of what `build` builds."""

LENGTHS = st.integers(1, CONTEXT_TOKENS + 4)


def hybrid(arena_bytes: int, rows: int = 6) -> KVStorage:
    return build(plan_of(windows=(5,), full=True, state=True, page_tokens=4), arena_bytes, rows)


def is_admitted_alone(storage: KVStorage, prompt_tokens: int, output_tokens: int) -> bool:
    """By admitting it into an empty storage, and releasing it."""
    rows = storage.admit([prompt_tokens], [output_tokens])
    if isinstance(rows, AdmissionRefusal):
        assert rows.is_final
        return False
    storage.release(rows)
    return True


@pytest.mark.requirement("K5", "K6")
@settings(deadline=None, max_examples=60)
@given(
    model=st.sampled_from(MODELS),
    page_tokens=st.sampled_from([1, 4]),
    arena_bytes=st.integers(2_500, 9_000),
    prompt=LENGTHS,
    output=LENGTHS,
)
def test_what_is_refused_at_arrival_is_what_an_empty_storage_never_admits(
    model: dict[str, object], page_tokens: int, arena_bytes: int, prompt: int, output: int
) -> None:
    """Refused for nothing, a request is lost that could be served; let in, it waits for ever. The lengths that the text names are
    the longest: each is admitted, and the next one is not.
    """
    plan = plan_of(**model, page_tokens=page_tokens)  # type: ignore[arg-type]  # as the table has them
    try:
        storage = build(plan, arena_bytes)
    except SizingError:
        return
    refusal = storage.arrival_refusal(prompt, output)
    assert (refusal is None) == is_admitted_alone(storage, prompt, output)
    outputs = [n for n in range(1, CONTEXT_TOKENS + 1) if is_admitted_alone(storage, prompt, n)]
    assert storage.max_new_tokens_for_memory(prompt) == max(outputs, default=0)
    if refusal is not None:
        assert refusal.is_final
        prompts = [n for n in range(1, CONTEXT_TOKENS + 1) if is_admitted_alone(storage, n, output)]
        with_prompt = f"at most {max(outputs)} output tokens" if outputs else "no output"
        with_output = f"at most {max(prompts)} prompt tokens" if prompts else "no prompt"
        assert str(refusal).endswith(
            f"; with {prompt} prompt tokens {with_prompt} could be served, with {output} output tokens {with_output}"
        )
    storage.verify_idle()


@pytest.mark.requirement("K5")
def test_a_refusal_at_arrival_names_what_does_not_fit_and_what_would() -> None:
    """An operator reads which limit it was, a client which lengths to send instead."""
    storage = hybrid(3_000)
    memory = str(storage.arrival_refusal(55, 9))
    assert re.search(
        r"16 × \d+ bytes of 'full' at peak, token by token, do not fit in \d+ bytes, not even alone; ",
        memory,
    )
    lengths = re.search(
        r"with 55 prompt tokens (.*) could be served, with 9 output tokens at most (\d+) ", memory
    )
    assert lengths is not None
    assert is_admitted_alone(storage, int(lengths[2]), 9)
    too_long = str(storage.arrival_refusal(60, 6))
    assert too_long.startswith("a request of 66 tokens, output included, is longer than the 64 that rows are")


@pytest.mark.requirement("K5")
def test_a_request_that_must_only_wait_is_not_refused_at_arrival() -> None:
    """What others hold now is not its concern, and asking changes nothing."""
    storage = hybrid(9_000, rows=40)
    while not isinstance(refusal := storage.admit([20], [10]), AdmissionRefusal):
        pass
    assert not refusal.is_final
    before = storage.admitted_at_peak(), storage.resident_now()
    assert storage.arrival_refusal(20, 10) is None
    assert storage.arrival_refusal(60, 6) is not None
    assert storage.max_new_tokens_for_memory(20) >= 10
    assert (storage.admitted_at_peak(), storage.resident_now()) == before
    storage.verify_idle()


@pytest.mark.requirement("S6", "K5")
def test_a_refusal_names_what_is_admitted_at_peak_and_what_is_resident_now() -> None:
    """Two figures with two names: without the second, a refusal beside idle bytes looks like a mistake."""
    storage = hybrid(9_000, rows=40)
    rows = np.zeros(0, np.int64)
    while not isinstance(taken := storage.admit([20], [10]), AdmissionRefusal):
        rows = np.concatenate([rows, taken])
    peak = storage.sized.demand(prompt_tokens=20, output_tokens=10).units
    names = [band.name for band in storage.layout.bands]
    at_peak = {name: len(rows) * units for name, units in zip(names, peak, strict=True)}
    resident = {"state": len(rows), "window-5": 0, "full": 0}
    assert storage.admitted_at_peak() == at_peak
    assert storage.resident_now() == resident
    step = storage.prepare_step(rows[:1], [CHUNK_TOKENS])
    resident |= {"window-5": 2, "full": 2}
    assert storage.resident_now() == resident
    refusal = str(storage.admit([20], [10]))
    for what, units in (("admitted at peak are", at_peak), ("resident now", resident)):
        assert f"{what} " + ", ".join(f"{name!r} {units[name]}" for name in names) in refusal
    assert all(resident[name] <= at_peak[name] for name in names)
    storage.abandon(step)  # type: ignore[arg-type]  # it was admitted
    storage.release(rows)
    assert set(storage.admitted_at_peak().values()) == set(storage.resident_now().values()) == {0}


@pytest.mark.requirement("K6")
@pytest.mark.parametrize("tokens", [0, -1])
def test_lengths_that_are_no_lengths_are_refused(tokens: int) -> None:
    """A clip of nothing would be taken for an answer."""
    storage = hybrid(9_000)
    with pytest.raises(StorageError, match="prompt_tokens must be a positive integer"):
        storage.max_new_tokens_for_memory(tokens)
    with pytest.raises(StorageError, match="output_tokens must be a positive integer"):
        storage.arrival_refusal(4, tokens)


@pytest.mark.requirement("K1", "S1")
def test_the_share_of_state_slots_reaches_the_plan() -> None:
    """A storage whose boot targets are not those that its builder was told would be tuned in vain."""
    plan = plan_of(windows=(5,), full=True, state=True, page_tokens=4)
    limits = {"max_running_requests": 40, "max_context_tokens": 64, "chunk_tokens": CHUNK_TOKENS}
    storages = {
        share: build_kv_storage(plan, budget_bytes=SCRATCH_BYTES + 9_000, state_share=share, **limits)
        for share in (None, 0.1, 0.5)
    }
    targets = {share: storage.sized.targets for share, storage in storages.items()}
    assert targets[0.1] != targets[None] == targets[0.5]
    beside = {"scratch of moves": SCRATCH_BYTES}
    sized = size_plan(
        plan, budget_bytes=SCRATCH_BYTES + 9_000, state_share=0.1, beside_arena=beside, **limits
    )
    assert targets[0.1] == sized.targets
    with pytest.raises(SizingError, match="exclude one another"):
        build_kv_storage(plan, budget_bytes=SCRATCH_BYTES + 9_000, state_share=0.1, state_slots=1, **limits)
