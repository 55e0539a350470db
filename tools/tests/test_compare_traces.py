"""`tools/compare_traces.py`: two traces, a trace and a checkout, two checkouts, two implementations (row X3)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import compare_traces

ROOT = Path(__file__).resolve().parent.parent.parent
STORIES = ROOT / "packages/simulation/src/kvtide/simulation/traces/stories"
FLUSH = STORIES / "flush-under-a-send.jsonl"


@pytest.fixture
def other_checkout(tmp_path: Path) -> Path:
    """A checkout whose allocator flushes one unit at a time."""
    return checkout_with(
        tmp_path / "other",
        "allocator.py",
        "band.flush_opportunistic(max_moves)",
        "band.flush_opportunistic(1)",
    )


def checkout_with(checkout: Path, file: str, text: str, other: str) -> Path:
    """A copy of this checkout with another text in a file of the chain."""
    for source in (ROOT / "packages").glob("*/src"):
        shutil.copytree(
            source, checkout / source.relative_to(ROOT), ignore=shutil.ignore_patterns("__pycache__")
        )
    path = checkout / "packages/chain/src/kvtide/chain" / file
    before = path.read_text(encoding="utf-8")
    assert text in before
    path.write_text(before.replace(text, other), encoding="utf-8")
    return checkout


@pytest.mark.requirement("X3")
def test_a_trace_is_what_this_checkout_does_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The quickest question after a change of the allocator."""
    assert compare_traces.main([str(FLUSH)]) == 0
    assert "every answer and state the same" in capsys.readouterr().out


@pytest.mark.requirement("X3")
def test_two_checkouts_are_told_apart_at_the_first_call_that_differs(
    other_checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever bisects or rewrites wants the call, the state before it, and both answers."""
    given = [str(FLUSH), "--checkout", str(ROOT), "--checkout", str(other_checkout), "--around", "2"]
    assert compare_traces.main(given) == 1
    shown = capsys.readouterr().out
    assert "chain.flush_opportunistic(max_moves=8)" in shown
    assert f'answer {ROOT}: {{"value": 2}}' in shown
    assert f'answer {other_checkout}: {{"value": 1}}' in shown
    assert "state {" in shown
    assert compare_traces.main([str(FLUSH), "--checkout", str(ROOT)]) == 0


@pytest.mark.requirement("X3")
def test_a_checkout_that_raises_differs_at_that_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The most likely way for a rewrite to differ: the call and its line, what was raised, and the state that both came from."""
    raises = "        if len(units.ids) > 2:\n            raise ValueError('boom')\n"
    line = "        self.ids.unbind(virtual, units)\n"
    broken = checkout_with(tmp_path / "broken", "band.py", line, raises + line)
    trace = STORIES / "fixed-page-in-the-middle.jsonl"
    assert compare_traces.main([str(trace), "--checkout", str(broken)]) == 1
    shown = capsys.readouterr().out
    assert '>      4 chain.free_pages(band_name="full"' in shown
    assert f"answer {trace}: {{}}" in shown
    assert f'answer {broken}: {{"raised": "ValueError", "message": "boom"}}' in shown
    assert shown.index("state {") < shown.index("> ")
    assert compare_traces.main([str(trace), "--checkout", str(broken), "--checkout", str(broken)]) == 0
    assert (
        "3 calls, every answer and state the same; there both raise ValueError: boom"
        in capsys.readouterr().out
    )


@pytest.mark.requirement("X3")
def test_tables_that_differ_alone_name_the_first_units(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two digests say nothing to anybody: the band, the virtual unit, and where each side has it."""
    line = "taken = joined(taken, self._grow_to(*span))"
    other = "grown = self._grow_to(*span)\n            taken = joined(taken, units_of(grown.ids[::-1]))"
    reversing = checkout_with(tmp_path / "reversing", "band.py", line, other)
    assert compare_traces.main([str(FLUSH), "--checkout", str(reversing)]) == 1
    shown = capsys.readouterr().out
    assert f'state {FLUSH}: {{"tables":' in shown
    assert f"band 'full' binds unit 1 to 12 in {FLUSH}, to 7 in {reversing}" in shown
    assert "band 'state'" not in shown


@pytest.mark.requirement("X3")
def test_two_traces_and_two_implementations_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two traces the first call that differs counts, too."""
    assert compare_traces.main([str(FLUSH), str(FLUSH)]) == 0
    lines = FLUSH.read_text(encoding="utf-8").splitlines()
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text("\n".join(lines[:-1]))
    assert compare_traces.main([str(FLUSH), str(shorter)]) == 1
    assert "length" in capsys.readouterr().out
    chain = "kvtide.simulation:ChainAdapter"
    assert compare_traces.main([str(FLUSH), "--adapter", chain, "--adapter", chain]) == 0
    other = STORIES / "float-in-the-way.jsonl"
    assert compare_traces.main([str(FLUSH), str(other)]) == 1
    assert "the arenas differ" in capsys.readouterr().out


@pytest.mark.requirement("X3")
def test_what_cannot_be_compared_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 is not "they differ"."""
    nothing = tmp_path / "none.jsonl"
    assert compare_traces.main([str(nothing)]) == 2
    assert capsys.readouterr().err == f"{nothing}: No such file or directory\n"
    for adapter, why in [
        ("nobody:here", "no adapter 'nobody:here'"),
        ("kvtide.simulation:read_trace", "TraceHeader"),
    ]:
        status = compare_traces.main([str(FLUSH), "--adapter", adapter])
        said = capsys.readouterr()
        assert status == (2 if why.startswith("no") else 1)
        assert why in said.err + said.out
        assert said.err.count("\n") <= 1
        assert "Usage" not in said.err
    assert compare_traces.main([str(FLUSH), "--checkout", str(tmp_path)]) == 2
    assert "is no checkout" in capsys.readouterr().err
    broken = tmp_path / "broken.jsonl"
    broken.write_text(FLUSH.read_text(encoding="utf-8").replace('"unit_bytes":96', '"unit_bytes":-16'))
    assert compare_traces.main([str(broken)]) == 3
    assert (
        "broken.jsonl, line 1: its layout is none: band 'state' has units of -16 bytes"
        in capsys.readouterr().err
    )
    assert compare_traces.main([str(FLUSH), str(broken)]) == 3
    for wrong in (["--checkout", str(ROOT), str(FLUSH)], ["--around", "-3"]):
        with pytest.raises(SystemExit, match="2"):
            compare_traces.main([str(FLUSH), *wrong])


def test_an_error_that_names_no_file_is_told_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that is full says so of no file."""

    def is_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compare_traces, "replay_in", is_full)
    assert compare_traces.main([str(FLUSH)]) == 2
    assert capsys.readouterr().err == "No space left on device\n"
