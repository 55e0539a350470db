"""The format of traces: what is written down, and what is refused where it is read (row X3)."""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvtide.chain import ChainAllocator
from kvtide.ledger import ForwardSteps
from kvtide.simulation import Operation
from kvtide.simulation.traces import CALLS, STORIES, TraceError, parse_trace, replay

ChainUses: Any = import_module("kvtide.chain.uses").ChainUses
SCHEMA = Path(__file__).resolve().parents[3] / "docs" / "traces.md"
"""Not there where the tests run beside the wheel alone."""


@pytest.mark.requirement("X3")
def test_every_call_is_written_down_and_can_be_made(operations: dict[str, Operation]) -> None:
    """Each call of the table is a method, with those parameters, and stands in the schema's page."""
    owners = {"chain": ChainAllocator, "uses": ChainUses, "steps": ForwardSteps}
    for call, parameters in CALLS.items():
        target, _, name = call.partition(".")
        signature = inspect.signature(getattr(owners[target], name))
        assert list(signature.parameters)[1:] == list(parameters), call
        if SCHEMA.exists():
            assert f"`{call}`" in SCHEMA.read_text(encoding="utf-8"), call


@pytest.mark.requirement("X3")
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "line 1"),
        ("{}", "version is None"),
        ('{"trace": 2}', "version is 2, this one reads 1"),
        ("[]", "line 1"),
        ('{"trace": 1, "settings": {"waits_for_transfers": true, "flush_reach": 0}}', "flush_reach is 0"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(text: str, why: str) -> None:
    """People hand in the wrong file."""
    with pytest.raises(TraceError, match=why):
        parse_trace(text.splitlines(), "a file")


def with_line(text: str) -> list[str]:
    """A story's trace with another line 5."""
    lines = (STORIES / "float-in-the-way.jsonl").read_text(encoding="utf-8").splitlines()
    return [*lines[:4], text, *lines[5:]]


TAKE = {"pages": 1, "state_slots": 0, "bands": None}
HALF = {"fresh": None, "held": []}


@pytest.mark.requirement("X3")
@pytest.mark.parametrize(
    ("call", "args", "why"),
    [
        ("chain.give", {}, "no call 'chain.give'; a trace holds chain.take, "),
        ("chain.take", {}, "the args of chain.take are without 'pages': {}"),
        ("chain.take", [1, 2], "the args of chain.take are [1, 2], not an object"),
        ("chain.take", {**TAKE, "pages": True}, "'pages' of chain.take is true, not of kind 'count'"),
        ("chain.take", {**TAKE, "pages": 2**63}, "not of kind 'count'"),
        ("chain.take", {**TAKE, "bands": {"full": HALF}}, "not of kind 'takes'"),
        ("chain.take", {**TAKE, "bands": {"full": {**HALF, "unwritten": [1.0]}}}, "not of kind 'takes'"),
        ("chain.units_fit", {"units": {"full": "2"}}, "not of kind 'counts'"),
        ("chain.free_pages", {"band_name": 3, "virtual": []}, "'band_name' of chain.free_pages is 3"),
        ("chain.free_pages", {"band_name": "full", "virtual": [None]}, "not of kind 'units'"),
        ("chain.written", {"taken": -1}, "not of kind 'take'"),
        ("chain.forward_recorded", {"forward": [3], "writes": {}}, "not of kind 'recorded'"),
        ("chain.forward_recorded", {"forward": [3, "forward 3"], "writes": {"full": 1}}, "'unit lists'"),
        ("steps.forward_aborted", {"record": None}, "not of kind 'record'"),
        ("steps.wait_queued", {"event": 3}, "not of kind 'event'"),
        ("uses.end", {"signal": "copy-delete 3"}, "not of kind 'owner'"),
        ("uses.end_each", {"signals": "transfer-read 3"}, "not of kind 'owners'"),
    ],
)
def test_a_call_that_no_trace_holds_is_refused_where_it_is_read(call: str, args: Any, why: str) -> None:
    """An implementation that is asked what nobody can ask says nothing about itself."""
    line = json.dumps({"call": call, "args": args, "answer": {}})
    with pytest.raises(TraceError, match=f"a file, line 5: .*{re.escape(why)}"):
        parse_trace(with_line(line), "a file")


@pytest.mark.requirement("X3")
@pytest.mark.parametrize("key", ["answer", "state", "rebound"])
def test_what_a_line_tells_is_objects(key: str) -> None:
    """They are compared key by key."""
    line = {"call": "chain.take", "args": TAKE, "answer": {}, key: [1]}
    with pytest.raises(TraceError, match=rf"line 5: its {key} is \[1\], not an object"):
        parse_trace(with_line(json.dumps(line)), "a file")


@pytest.mark.requirement("X3", "P9")
@pytest.mark.parametrize(
    ("band", "key", "value", "why"),
    [
        (None, "prefix_bytes", 512, "a prefix of 512 bytes in an arena of 512"),
        (None, "prefix_bytes", 8, "a prefix of 8 bytes"),
        (None, "arena_bytes", "512", "in an arena of '512'"),
        (None, "bands", [], "no band"),
        (None, "owner", "window-9", "its owner is 'window-9', attention bands are ['window-4', 'full']"),
        (None, "owner", None, "its owner is None"),
        (0, "unit_bytes", -16, "band 'state' has units of -16 bytes from byte 80: positive multiples of 16"),
        (0, "unit_bytes", 0, "has units of 0 bytes"),
        (0, "unit_bytes", 96.0, "unit_bytes of band 'state' is 96.0"),
        (2, "origin_bytes", 24, "from byte 24"),
        (
            1,
            "page_count",
            17,
            "band 'window-4' hands out pages [3, 17); behind the prefix and inside the arena lie [3, 16)",
        ),
        (1, "first_page", 2, "hands out pages [2, 16)"),
        (0, "has_sink", True, "page 0 of band 'state' is a sink: True, and not in the prefix"),
        (2, "name", "state", "bands are called ['state', 'window-4', 'state']"),
        (1, "growth", "UP", "bands grow ['UP', 'UP', 'DOWN'], in their places ['UP', 'FLOAT', 'DOWN']"),
        (1, "growth", "SIDEWAYS", "growth 'SIDEWAYS', known are ['UP', 'FLOAT', 'DOWN']"),
        (1, "kind", "FULL", "kinds are ['STATE', 'FULL', 'FULL']"),
        (1, "page_tokens", None, "a page of band 'window-4', of kind WINDOW, holds None tokens"),
        (0, "page_tokens", 1, "a page of band 'state', of kind STATE, holds 1 tokens"),
        (1, "page_tokens", 3, "pages of 3 tokens of band 'window-4' do not divide the owner's 1"),
    ],
)
def test_a_layout_that_is_none_is_refused(band: int | None, key: str, value: Any, why: str) -> None:
    """An allocator computes with what it is given; a negative unit would be an index out of range, somewhere."""
    lines = (STORIES / "float-in-the-way.jsonl").read_text(encoding="utf-8").splitlines()
    header = json.loads(lines[0])
    (header["layout"] if band is None else header["layout"]["bands"][band])[key] = value
    with pytest.raises(TraceError, match=f"a file, line 1: its layout is none: .*{re.escape(why)}"):
        parse_trace([json.dumps(header), *lines[1:]], "a file")


@pytest.mark.requirement("X3")
def test_keys_that_nobody_knows_are_passed_over() -> None:
    """A later version may tell more, of everything."""
    lines = (STORIES / "float-in-the-way.jsonl").read_text(encoding="utf-8").splitlines()
    header = json.loads(lines[0])
    for place in (header, header["layout"], header["settings"], *header["layout"]["bands"]):
        place["more"] = 1
    call = json.loads(lines[1])
    call["more"] = call["args"]["more"] = 1
    again, found = parse_trace([json.dumps(header), json.dumps(call), *lines[2:]], "a file")
    assert replay(again, found) is None


def test_a_broken_line_is_named(operations: dict[str, Operation]) -> None:
    """Of thousands."""
    text = (STORIES / "float-in-the-way.jsonl").read_text(encoding="utf-8").splitlines()
    text[4] = '{"call": "chain.take"}'
    with pytest.raises(TraceError, match="a file, line 5: no trace: KeyError"):
        parse_trace(text, "a file")


def test_lines_say_a_state_only_where_it_changes() -> None:
    """Questions change nothing, and traces are long."""
    text = (STORIES / "state-slots-exhausted.jsonl").read_text(encoding="utf-8").splitlines()
    said = ["state" in json.loads(line) for line in text[1:]]
    assert said == [True, False, False, False, True, True, False]
