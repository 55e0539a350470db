"""What a storage logs: each event that the page for schedulers lists comes when it says, and no other does."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

import kvtide.storage
from kvtide.storage import AdmissionRefusal, KVStorage, Overcommit, PreparedStep, PromiseRefusal

from .test_storage_overlap import admitted, build, done, in_flight, prepared
from .tiny import tiny_plan, tiny_storage

PAGE = Path(__file__).parents[3] / "docs" / "drive-kvstorage.md"
Events = dict[str, tuple[str, frozenset[str]]]
"""Level and fields by event."""


def documented() -> Events:
    rows = re.findall(
        r"^\| `(\w+\.\w+)` \| (\w+) \| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {event: (level, frozenset(re.findall(r"`(\w+)`", fields))) for event, level, fields in rows}


def step(storage: KVStorage, row: int) -> None:
    prepared = storage.prepare_step([row], [1])
    assert isinstance(prepared, PreparedStep)
    storage.launch_forward(prepared)
    storage.record_forward(prepared)
    storage.forward_processed(prepared)
    storage.advance(prepared)


def live() -> None:
    """One of everything that can become of a request over a storage that overcommits."""
    storage = tiny_storage(tiny_plan(), units=12, rows=4, overcommit=Overcommit(0.5))
    assert isinstance(storage.admit([10], [10]), AdmissionRefusal)
    rows = [int(np.asarray(storage.admit([1], [8]))[0]) for _ in range(3)]
    for _ in range(2):
        for row in rows:
            step(storage, row)
    given_up = storage.prepare_step([rows[0]], [1])
    assert isinstance(given_up, PreparedStep)
    storage.launch_forward(given_up)
    storage.abandon(given_up)
    for _ in range(2):
        step(storage, rows[0])
    refusal = storage.prepare_step([rows[0]], [1])
    assert isinstance(refusal, PromiseRefusal)
    (backup,) = storage.retract_to_host([rows[1]])
    storage.release(rows[:1])
    assert storage.flush_opportunistic()
    storage.release(rows[2:])
    assert not isinstance(storage.restore([backup]), AdmissionRefusal)


@pytest.mark.requirement("K1")
def test_a_storage_logs_what_its_page_lists_and_nothing_else() -> None:
    """Whoever alarms on an event, or draws its fields, is told if it goes: an event that is dropped is a queue that stands unseen."""
    with capture_logs() as logs:
        live()
    told: Events = {
        entry["event"]: (entry["log_level"], frozenset(entry) - {"event", "log_level"}) for entry in logs
    }
    assert told == documented()


@pytest.mark.requirement("K1")
def test_no_event_of_the_storage_is_missing_on_the_page() -> None:
    """The life above may not come by all of them."""
    (folder,) = kvtide.storage.__path__
    text = "".join(path.read_text(encoding="utf-8") for path in Path(folder).rglob("*.py"))
    written = re.findall(r"^ *log\.\w+\(\s*\"([\w.]+)\"", text, re.MULTILINE)
    assert set(written) == documented().keys()
    assert len(re.findall(r"^ *log\.\w+\(", text, re.MULTILINE)) == len(written)


@pytest.mark.requirement("K4", "C7")
def test_an_aborted_launch_and_a_flush_are_told_with_their_figures() -> None:
    """Both are rare, and cost: a server that aborts launches all day has too little memory for activations."""
    storage = build(arena_bytes=8_000)
    rows = [admitted(storage, 8, 2) for _ in range(4)]
    for row in rows:
        done(storage, in_flight(storage, row, 8))
    with capture_logs() as logs:
        launched = prepared(storage, rows[3], 1)
        storage.launch_forward(launched)
        storage.abandon(launched, may_have_run=True)
        storage.abandon(prepared(storage, rows[2], 1))
        storage.release(rows[:2])
        moved = storage.flush_opportunistic()
        assert storage.flush_opportunistic() == 0
    assert moved
    assert [entry for entry in logs if entry["event"].startswith("storage.")] == [
        {
            "event": "storage.launch_aborted",
            "log_level": "info",
            "rows": [rows[3]],
            "may_have_run": True,
        },
        {"event": "storage.flushed", "log_level": "info", "units": moved},
    ]
