"""The log of whose bytes a row reads follows a request to the host and back: a replay would compare with the wrong tensors (X5)."""

from __future__ import annotations

import numpy as np
import pytest

from kvtide.engine.origins import Origins, RowOrigins
from kvtide.sizing import CheckpointStrategy, ServingPolicy
from kvtide.storage import KVStorage, PreparedStep

from .summing import storage_of


def admitted(storage: KVStorage, origins: Origins, prompt: list[int]) -> int:
    (row,) = np.asarray(storage.admit([len(prompt)], [4], prompts=[prompt])).tolist()
    origins.admitted(row)
    return int(row)


def ran(storage: KVStorage, origins: Origins, row: int, count: int) -> RowOrigins:
    step = storage.prepare_step([row], [count])
    assert isinstance(step, PreparedStep)
    storage.launch_forward(step).resolve()
    (log,) = origins.launched(step)
    storage.record_forward(step)
    storage.forward_processed(step)
    storage.advance(step, [7])
    return log


@pytest.mark.requirement("X5", "K2")
def test_a_request_that_was_restored_reads_what_it_would_have_read() -> None:
    """A hit that no forward has begun from yet, then its own pages behind it, in whatever row and units it comes back."""
    storage = storage_of(policy=ServingPolicy(strategy=CheckpointStrategy.NO_BUFFER))
    origins = Origins(storage)
    first = admitted(storage, origins, [1, 2, 3, 4])
    ran(storage, origins, first, 4)
    storage.release([first])
    second = admitted(storage, origins, [1, 2, 3, 4, 5, 6, 8])
    assert storage.requests.cached_tokens[second] == 4

    def there_and_back(row: int) -> int:
        kept = origins.retracted(row)
        backups = storage.retract_to_host([row])
        admitted(storage, origins, [9, 9, 9])
        (again,) = np.asarray(storage.restore(backups)).tolist()
        assert again != row
        origins.restored(again, kept)
        return int(again)

    again = there_and_back(second)
    log = ran(storage, origins, again, 3)
    assert (log.key, log.state) == (1, (0, 4))
    assert log.pages["full"] == (0, 0)
    log = ran(storage, origins, there_and_back(again), 1)
    assert (log.key, log.state) == (1, None)
    assert log.pages["full"] == (0, 0, 1, 1)
    assert log.pages["window-5"] == (-1, 0, 1, 1)
