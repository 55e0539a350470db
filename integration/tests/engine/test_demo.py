"""The demo: what it claims is what ran, and one wrong byte turns its exit status to 1."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvtide.engine.broken_rules import BrokenDevice, Rule, SpoilingForwards
from kvtide.engine.check import replay_on_plain_tensors
from kvtide.engine.commands.demo import command
from kvtide.engine.demo import build_tight_storage
from kvtide.engine.forwards import ModelledForwards
from kvtide.engine.loop import StepReport, serve
from kvtide.engine.models import MODELS, RANDOM_VOCABULARY
from kvtide.engine.overlap import serve_overlapped
from kvtide.engine.picture import capture, draw
from kvtide.engine.runner import Hook, ModelRunner
from kvtide.engine.static_split import average_split, peaks, requests_held
from kvtide.engine.workload import (
    CHUNK_TOKENS,
    OVERLAP,
    PLAIN,
    RUNNING_REQUESTS,
    random_requests,
    text_requests,
)
from kvtide.plan import pack
from kvtide.storage import ForwardIds, PreparedStep, UnresolvedIds

SVG = "{http://www.w3.org/2000/svg}"


def demo(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        command, ["--model", "gpt_oss", "--page-size", "16", "--out", str(folder), *arguments]
    )


@pytest.mark.requirement("X5")
def test_the_demo_serves_checks_and_draws(tmp_path: Path) -> None:
    """The table's figures, for programs: at least twelve requests, pages that moved, everything equal."""
    result = demo(tmp_path, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["equal"] is True
    assert [run["hook"] for run in document["runs"]] == ["cache layers", "page attention"]
    for run in document["runs"]:
        assert run["requests"] >= 12
        assert run["pages_moved"] > 0
        assert run["prompt_tokens_known"] >= run["prompt_tokens_hit"] > 0
        assert sum(run["units_evicted"].values()) > 0
        assert run["requests_held"] > run["requests_held_static"]
        root = ET.parse(run["picture"]).getroot()
        steps = [text.text for text in root.iter(f"{SVG}text") if (text.text or "").startswith("step ")]
        assert len(steps) == -(-run["steps"] // 25), "a row a step, a label each 25"


@pytest.mark.requirement("X5")
def test_one_wrong_page_table_turns_the_exit_status_to_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that cannot fail would be worth nothing."""
    resolve = UnresolvedIds.resolve
    forwards = 0

    def tampered(self: UnresolvedIds) -> ForwardIds:
        nonlocal forwards
        ids = resolve(self)
        forwards += 1
        if forwards == 40:
            ids.page_tables["full"].zero_()
        return ids

    monkeypatch.setattr(UnresolvedIds, "resolve", tampered)
    result = demo(tmp_path)
    assert result.exit_code == 1
    assert "DIFFERS" in result.stdout
    assert "logits of request" in result.stdout


@pytest.mark.requirement("X5", "K4", "L5", "A5", "K3")
@pytest.mark.parametrize("model", ["gemma3", "qwen3_5"])
@pytest.mark.parametrize("rule", [rule.value for rule in Rule])
def test_each_rule_that_is_switched_off_is_a_wrong_text(tmp_path: Path, rule: str, model: str) -> None:
    """What a trained model writes goes wrong and is shown, the check fails, and the run itself goes on to its end."""
    arguments = ["--model", model, "--page-size", "16", "--out", str(tmp_path), "--json", "--break", rule]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 1, result.output
    document = json.loads(result.stdout)
    assert document["equal"] is False
    assert document["broken"] == rule
    for run in document["runs"]:
        # Transformers' masks never show the cache hook what was not zeroed.
        is_hidden = rule == "zeroing" and run["hook"] == "cache layers"
        assert run["equal"] == is_hidden, run["hook"]
        assert bool(run["wrong_texts"]) != is_hidden
        assert all(text["served"] != text["alone"] for text in run["wrong_texts"])
        assert bool(run["unordered"]) == (rule in {"barrier", "clearance"})


@pytest.mark.requirement("X5")
@pytest.mark.parametrize("declares_read_end", [True, False])
def test_the_worst_timing_alone_breaks_nothing(*, declares_read_end: bool) -> None:
    """What goes wrong above does so for want of the rule, not because of the device's timing or of what free bytes become."""
    runner, requests = ModelRunner(MODELS["gemma3"].load(), Hook.PAGES), text_requests()
    storage = build_tight_storage(
        runner, requests, 16, policy=OVERLAP, make_device=lambda arena: BrokenDevice(arena, None)
    )
    forwards = SpoilingForwards(ModelledForwards(storage, declares_read_end=declares_read_end), storage)
    result = serve_overlapped(runner, storage, forwards, requests, chunk_tokens=CHUNK_TOKENS)
    assert storage.chain.statistics().moved_units > 0
    assert replay_on_plain_tensors(runner, result.forwards, page_tokens=16) is None
    assert isinstance(storage.device, BrokenDevice)
    assert storage.device.model.races == ()


@pytest.mark.requirement("X5", "K4")
def test_a_wrong_text_is_shown_beside_the_right_one(tmp_path: Path) -> None:
    """In one line each, whatever bytes a broken run brings forth: a missing barrier is a wrong token, not a theory."""
    result = CliRunner().invoke(
        command, ["--model", "gemma3", "--page-size", "16", "--out", str(tmp_path), "--break", "barrier"]
    )
    assert result.exit_code == 1, result.output
    assert re.search(
        r"▸Derivative Works that ␀+\n +wrong; alone it is ▸Derivative Works that You", result.stdout
    )
    assert result.stdout.startswith("Without barrier: the schedule stream does not wait for the read end")
    assert "Prefixes are not shared meanwhile" in result.stdout
    told = re.findall(r"^(gemma3, page size 16, .*?): (.*)$", result.stdout, re.MULTILINE)
    assert {where.removeprefix("gemma3, page size 16, ") for where, _ in told} <= {
        "cache layers",
        "page attention",
        "cache layers and page attention",
    }
    assert len(told) == len(set(told)) > 2
    assert any("accesses that nothing orders" in text for _, text in told)
    assert "nothing went wrong" not in result.stdout


@pytest.mark.requirement("X5", "A5")
def test_a_rule_that_shows_nothing_is_said_to(tmp_path: Path) -> None:
    """Pages of one token hold nothing that was not written: a demonstration that passes in silence would look like a check that cannot
    fail.
    """
    arguments = ["--model", "gemma3", "--page-size", "1", "--out", str(tmp_path), "--break", "zeroing"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Without zeroing: pages and state slots are handed out as")
    assert (
        result.stdout.count("nothing went wrong without zeroing: what was there before is written over") == 1
    )
    assert "gemma3, page size 1, cache layers and page attention: nothing went wrong" in result.stdout


def test_the_plain_loop_is_still_there_and_breaks_nothing(tmp_path: Path) -> None:
    """One forward at a time needs none of the rules that can be switched off, and runs every strategy but the lazy one; and what a
    newcomer sees is a table.
    """
    result = demo(tmp_path, "--loop", "plain", "--strategy", "none")
    assert result.exit_code == 0, result.output
    assert "Served from one arena" in result.stdout
    assert "window-16 full" in result.stdout
    assert "Without" not in result.stdout
    assert "went wrong" not in result.stdout
    assert str(tmp_path / "gpt_oss-page16-") in result.stdout
    unlike = demo(tmp_path, "--loop", "plain", "--strategy", "extra_buffer_lazy")
    assert unlike.exit_code == 2
    assert "does not run without overlap" in unlike.stderr
    refused = demo(tmp_path, "--loop", "plain", "--break", "barrier")
    assert refused.exit_code == 2
    assert "--break barrier needs the overlap loop" in refused.stderr


def test_a_wrong_check_level_in_the_environment_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIDE_CHECK_LEVEL", "loud")
    result = demo(tmp_path)
    assert result.exit_code == 2
    assert "KVTIDE_CHECK_LEVEL='loud' is no check level" in result.stderr


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """Before three minutes of work, not after."""
    (tmp_path / "file").write_text("")
    result = demo(tmp_path / "file" / "below")
    assert result.exit_code == 2
    assert "--out" in result.stderr


def test_requests_held_are_those_that_the_loop_held() -> None:
    """The comparison with a static split counts with the loop's own steps, so it must count as the loop does."""
    runner = ModelRunner(MODELS["falcon_h1"].load())
    requests = random_requests(RANDOM_VOCABULARY, seed=3)
    storage = build_tight_storage(runner, requests, page_tokens=4)
    running: list[int] = []

    def observe(report: StepReport) -> None:
        running.append(len(report.running) + len(report.finished))

    serve(runner, storage, requests, chunk_tokens=CHUNK_TOKENS, observe=observe)
    demands = peaks(storage.plan, requests, CHUNK_TOKENS, PLAIN)
    held = requests_held(
        requests,
        demands,
        lambda units: pack(storage.layout, units) is not None,
        chunk_tokens=CHUNK_TOKENS,
        row_count=RUNNING_REQUESTS,
    )
    assert (held.most, held.steps, held.never_fit) == (max(running), len(running), 0)


def test_a_static_split_gives_each_band_its_average_share() -> None:
    """The comparison is with walls in the best place, and with every byte behind the prefix."""
    runner = ModelRunner(MODELS["gpt_oss"].load())
    requests = random_requests(RANDOM_VOCABULARY)
    storage = build_tight_storage(runner, requests, page_tokens=1)
    layout = storage.layout
    split = average_split(layout, [(3, 1), (1, 3)])
    middle = layout.prefix_bytes + (layout.arena_bytes - layout.prefix_bytes) // 2
    assert split.walls == (middle,)
    assert split.units == tuple((middle - layout.prefix_bytes) // band.unit_bytes for band in layout.bands)
    assert split.fits(split.units)
    assert not split.fits((split.units[0] + 1, 0))


def test_the_picture_shows_live_pages_where_they_lie() -> None:
    """A picture that is drawn from anything but the books would be decoration."""
    runner = ModelRunner(MODELS["gpt_oss"].load())
    requests = random_requests(RANDOM_VOCABULARY)
    storage = build_tight_storage(runner, requests, page_tokens=16)
    rows = storage.admit([40], [8])
    step = storage.prepare_step(rows, [min(40, CHUNK_TOKENS)])
    assert isinstance(step, PreparedStep)
    frame = capture(storage)
    for band, drawn in zip(storage.layout.bands, frame.bands, strict=True):
        live_bytes = sum(end - start for start, end in drawn.live)
        assert live_bytes == len(storage.chain.live_units(band.name)) * band.unit_bytes
        assert all(drawn.span[0] <= start < end <= drawn.span[1] for start, end in drawn.live)
    root = ET.fromstring(draw(storage.layout, [frame, frame], title="a < b", walls=[1000]))
    paths = [path.attrib["d"] for path in root.iter(f"{SVG}path")]
    assert len(paths) == 2 * len(storage.layout.bands)
    assert all(path.count("M") >= 2 for path in paths), "a run in each of the two rows"
