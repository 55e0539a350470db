"""`kvtide plan` answers a capacity question in a second, or says in one line why it cannot (S1, S2, P7)."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

from kvtide.engine import cli
from kvtide.engine.commands import plan_report

ROOT = Path(__file__).resolve().parents[2]
SHARED_CONFIGS = ROOT.parent / "shared" / "data" / "configs"

HYBRID = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 262144,
}
WINDOWED = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


@pytest.fixture(autouse=True)
def commands_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry points that `pyproject.toml` declares, so that no stale installation is tested instead."""
    project = tomllib.loads((ROOT / "integration" / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"][cli.COMMAND_GROUP]
    found = {
        name: importlib.metadata.EntryPoint(name, value, cli.COMMAND_GROUP)
        for name, value in declared.items()
    }
    monkeypatch.setattr(cli, "installed_commands", lambda: found)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(HYBRID))
    return file


def kvtide(*arguments: object) -> Result:
    """What the program prints and returns for a command line."""
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments], terminal_width=110)


def document(*arguments: object) -> dict[str, Any]:
    result = kvtide("plan", *arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def assert_one_line(result: Result, *parts: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("kvtide plan: ")
    for part in parts:
        assert part in result.stderr


@pytest.mark.requirement("S1", "P9")
def test_the_tables_hold_the_figures_of_the_model(config_file: Path) -> None:
    """Somebody who knows the model card finds its numbers: 77,266,944 bytes a slot, 24,576 bytes a token."""
    result = kvtide("plan", config_file, "--budget", "40GiB")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in result.stdout.splitlines()]
    bands = [line for line in lines if line[0] in ("state", "full")]
    assert bands[0][:5] == ["state", "grow-up end", "36", "77,266,944", "77,266,944"]
    assert bands[1][:5] == ["full", "grow-down end", "12", "393,216", "393,216"]
    assert bands[2][:3] == ["state", "state slots", ""]
    assert bands[3][:3] == ["full", "every token", "24,576"]
    assert [line[0] for line in lines if line[0].endswith("tokens") and len(line) == 7] == [
        "1,024 tokens",
        "8,192 tokens",
        "65,536 tokens",
    ]
    assert max(map(len, result.stdout.splitlines())) <= 110


@pytest.mark.requirement("S1", "S5", "S6")
def test_the_document_says_what_fits_by_hand(tmp_path: Path) -> None:
    """Three lengths over two bands, each figure from the page size and the config by arithmetic."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(WINDOWED))
    found = document(file, "--budget", "40GiB", "--page-size", 16, "--chunk", 512, "--max-running", 200)

    page_bytes = 16 * 12 * 8 * 64 * 2 * 2
    # Full holds every page. The window holds 127 kept tokens and a chunk of 512, in the worst place 41 pages.
    pages = {1024: (41, 64), 8192: (41, 512), 65536: (41, 4096)}
    assert [context["context_tokens"] for context in found["contexts"]] == list(pages)
    for context in found["contexts"]:
        window, full = pages[context["context_tokens"]]
        assert context["units"] == {"window-128": window, "full": full}
        assert context["bytes"] == {"window-128": window * page_bytes, "full": full * page_bytes}
        assert context["request_bytes"] == (window + full) * page_bytes
        in_memory = (found["arena_bytes"] // page_bytes - 2) // (window + full)
        assert context["requests_in_memory"] == in_memory
        assert context["requests_admitted"] == min(200, in_memory)
        # Between forwards the window holds 127 tokens behind the end of a page.
        assert context["requests_resident"] == (found["arena_bytes"] // page_bytes - 2) // (8 + full)
    assert found["used_bytes"] <= found["budget_bytes"] == 40 * 2**30
    assert found["budget_bytes"] - found["used_bytes"] < 64
    beside = sum(term["byte_count"] for term in found["fixed"] if not term["in_arena"])
    assert found["arena_bytes"] + beside == found["used_bytes"]
    assert [band["target_tokens"] for band in found["bands"]] == [
        16 * band["target_units"] for band in found["bands"]
    ]


@pytest.mark.requirement("S1")
def test_every_field_of_the_document_is_documented(config_file: Path) -> None:
    """Programs read these names; the classes that say what they mean are the only place they come from."""
    found = document(config_file, "--budget", "40GiB")

    def names(report: type) -> list[str]:
        return [field.name for field in attrs.fields(report)]

    assert list(found) == names(plan_report.CapacityReport)
    for field, report in (
        ("fixed", plan_report.FixedReport),
        ("bands", plan_report.BandReport),
        ("contexts", plan_report.ContextReport),
        ("stages", plan_report.StageReport),
    ):
        assert all(list(entry) == names(report) for entry in found[field])


@pytest.mark.requirement("P7")
def test_options_change_what_they_name(config_file: Path) -> None:
    """Each option reaches the planner, and nothing else moves with it."""
    plain = document(config_file, "--budget", "40GiB")
    assert (plain["page_tokens"], plain["max_running_requests"], plain["kv_dtypes"]) == (
        16,
        256,
        ["bfloat16"],
    )
    assert plain["max_context_tokens"] == 262144

    paged = document(config_file, "--budget", "40GiB", "--page-size", 64)
    assert paged["bands"][1]["unit_bytes"] == 4 * plain["bands"][1]["unit_bytes"]
    quantised = document(config_file, "--budget", "40GiB", "--kv-dtype", "float8_e4m3fn")
    assert quantised["bands"][1]["bytes_per_token"] * 2 == plain["bands"][1]["bytes_per_token"]
    assert quantised["bands"][0] == plain["bands"][0] | {
        key: quantised["bands"][0][key] for key in ("capacity_units", "target_units")
    }
    limited = document(config_file, "--budget", "40GiB", "--max-len", 8192, "--max-running", 3)
    assert [context["requests_admitted"] for context in limited["contexts"]] == [3, 3, 0]
    rows = {term["name"]: term["byte_count"] for term in limited["fixed"]}["mirror of rows"]
    assert rows == 4 * 3 * 8192 // 16


def test_a_request_longer_than_allowed_is_shown_as_such(config_file: Path) -> None:
    """A number there would promise what admission refuses."""
    result = kvtide("plan", config_file, "--budget", "40GiB", "--max-len", "8192")
    assert "none: over 8,192" in result.stdout


@pytest.mark.requirement("S1")
@pytest.mark.parametrize(
    ("text", "byte_count"),
    [
        ("40GiB", 40 * 2**30),
        ("40GB", 40 * 10**9),
        ("40 gib", 40 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("2048MiB", 2**31),
        ("1TB", 10**12),
        ("5000000000", 5 * 10**9),
        ("5000000000B", 5 * 10**9),
        ("1." + "0" * 5000 + "1TiB", 2**40),
        ("0" * 5000 + "1TiB", 2**40),
        ("123456789012.000000000001KB", 123456789012000),
        ("70368744177664.9", 2**46),
    ],
)
def test_budgets_are_read_to_the_byte(config_file: Path, text: str, byte_count: int) -> None:
    """GB and GiB differ by 7 %, which is thousands of tokens."""
    assert document(config_file, "--budget", text)["budget_bytes"] == byte_count


@pytest.mark.parametrize(
    "text",
    ["0", "0GiB", "0.1B", "-5GiB", "forty gigs", "GiB", "", "1e9", "40QiB", "40GiB!", "nan", "4_0", "٣"],
)
def test_a_zero_negative_or_wordy_budget_is_one_line(config_file: Path, text: str) -> None:
    """The line repeats what was given, since it may come out of somebody's script."""
    assert_one_line(kvtide("plan", config_file, "--budget", text), "--budget must be", f"found {text!r}")


@pytest.mark.parametrize(
    "text", ["9" * 5000, "9" * 5000 + "TiB", "9999999999999999TiB", "1024.0001TiB", "1125899906842625"]
)
def test_a_budget_beyond_any_rank_is_one_line(config_file: Path, text: str) -> None:
    """A slip of the unit, or of a script: said by the option's name, and in no more characters than it takes."""
    result = kvtide("plan", config_file, "--budget", text)
    assert_one_line(result, "--budget must be at most 1024TiB, found '" + text[:16])
    assert len(result.stderr) < 150


@pytest.mark.requirement("S2")
def test_a_budget_below_the_floor_lists_the_terms_in_one_line(config_file: Path) -> None:
    """The planner's own refusal reaches the user whole."""
    result = kvtide("plan", config_file, "--budget", "10MiB")
    assert_one_line(result, "1 × 77266944 bytes of 'state'", "missing ")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "is no JSON"),
        (b"model_type: llama", "is no JSON"),
        (b"\xff\xfe{", "is no JSON: it is no UTF-8 text"),
        (b"[1]", "holds no JSON object but a list"),
        (b"null", "holds no JSON object but a NoneType"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"num_hidden_layers": ' + b"9" * 5000 + b"}", "is no JSON"),
        (b"{}", "model_type is missing"),
        (b'{"model_type": "gpt2"}', "model_type 'gpt2' is not known; known are bamba, "),
        (
            b'{"model_type": "llama", "num_hidden_layers": 0}',
            "num_hidden_layers must be a positive integer, found 0",
        ),
        (
            json.dumps(HYBRID | {"max_position_embeddings": 10**30}).encode(),
            "max_position_embeddings must be at most 1099511627776, found 1000000000000000000000000000000; or give --max-len",
        ),
        (
            json.dumps(HYBRID | {"max_position_embeddings": "long"}).encode(),
            "max_position_embeddings must be a positive integer, found 'long'",
        ),
    ],
)
def test_a_file_that_is_no_config_is_one_line(tmp_path: Path, content: bytes, part: str) -> None:
    """A config is other people's file; a traceback would blame us."""
    file = tmp_path / "config.json"
    file.write_bytes(content)
    assert_one_line(kvtide("plan", file, "--budget", "40GiB"), part)


def test_a_missing_file_and_a_directory_are_one_line(tmp_path: Path) -> None:
    """The two slips that everybody makes."""
    assert_one_line(
        kvtide("plan", tmp_path / "config.json", "--budget", "1GiB"), "cannot read", "No such file"
    )
    assert_one_line(kvtide("plan", tmp_path, "--budget", "1GiB"), "is a directory")


@pytest.mark.parametrize("name", ["[bold]c", "[/]", "[/red]", ":smile:", "a[0]", "[link=x]", "\\[b]"])
def test_a_path_is_printed_as_it_is(tmp_path: Path, name: str) -> None:
    """Shells and people put brackets and colons in names; none of them is a style, and none is swallowed."""
    folder = tmp_path / name if "/" in name else tmp_path
    file = folder / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(HYBRID))
    result = kvtide("plan", file, "--budget", "40GiB")
    assert result.exit_code == 0
    assert f"{file}:" in result.stdout.replace("\n", "")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--page-size", "0"], "--page-size"),
        (["--max-running", "-1"], "--max-running"),
        (["--max-len", "many"], "--max-len"),
        (["--chunk", "0"], "--chunk"),
        (["--kv-dtype", "fp7"], "--kv-dtype"),
        (["--nonsense"], "--nonsense"),
        (["--json", "--explain"], "--explain prints text, --json one document"),
        *[
            ([option, value], f"Invalid value for '{option}': ")
            for option in (
                "--tp",
                "--pp",
                "--page-size",
                "--window-page-size",
                "--draft-tokens",
                "--max-running",
                "--max-len",
                "--chunk",
                "--checkpoint-interval",
            )
            for value in (str(2**40 + 1), "9" * 5000)
        ],
        (["--page-size", "1000000000000"], "missing "),
    ],
)
def test_a_wrong_option_is_one_line(config_file: Path, options: list[str], part: str) -> None:
    """All wrong calls look alike, whoever finds them out."""
    assert_one_line(kvtide("plan", config_file, "--budget", "40GiB", *options), part)


@pytest.mark.requirement("P7", "S1")
def test_every_published_config_prints() -> None:
    """The acceptance of the planner: no published file surprises it."""
    files = sorted(SHARED_CONFIGS.glob("*.json"))
    if not files:
        pytest.skip("needs the optional folder ../shared/data beside the repository")
    assert len(files) >= 23
    for file in files:
        result = kvtide("plan", file, "--budget", "40GiB")
        assert (result.exit_code, result.stderr) == (0, "")
        for context in document(file, "--budget", "40GiB")["contexts"]:
            assert f"{context['requests_in_memory']:,}" in result.stdout
            assert context["requests_in_memory"] * context["request_bytes"] <= 40 * 2**30


def test_an_unknown_command_gives_the_list() -> None:
    """A misspelt command is answered with those there are."""
    result = kvtide("plna")
    assert (result.exit_code, result.stderr) == (2, "kvtide: no command 'plna'; commands are: demo, plan\n")


def test_no_command_prints_the_help_and_fails() -> None:
    """A script that lost its command must not pass."""
    result = kvtide()
    assert result.exit_code == 2
    assert "Commands:\n  demo" in result.stderr
    assert "  plan  What a model keeps in memory, and what fits in a budget.\n" in result.stderr


def test_the_version_is_the_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a bug report begins with."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"kvtide": "1.2.3"}[name])
    assert kvtide("--version").stdout == "kvtide 1.2.3\n"


def test_a_command_that_cannot_be_loaded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optional dependency that is not installed is named, without a traceback."""
    broken = importlib.metadata.EntryPoint("demo", "kvtide.engine.not_there:command", cli.COMMAND_GROUP)
    monkeypatch.setattr(cli, "installed_commands", lambda: {"demo": broken})
    result = kvtide("demo")
    assert result.exit_code == 1
    assert result.stderr == (
        "kvtide: command 'demo' cannot be loaded: No module named 'kvtide.engine.not_there'\n"
    )


@pytest.mark.requirement("P8")
def test_planning_from_the_command_line_imports_no_torch(config_file: Path) -> None:
    """The demo's torch costs seconds and may not be there at all; neither `plan` nor `--help` may touch it."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import importlib.metadata as metadata\n"
        "from kvtide.engine import cli\n"
        "found = {name: metadata.EntryPoint(name, f'kvtide.engine.commands.{name}:command', cli.COMMAND_GROUP)\n"
        "         for name in ('demo', 'plan')}\n"
        "cli.installed_commands = lambda: found\n"
        "for arguments in (['--help'], ['plan', sys.argv[1], '--budget', '40GiB']):\n"
        "    try: cli.main(arguments)\n"
        "    except SystemExit as ended: assert ended.code == 0, ended.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'kvtide.engine.commands.demo', 'kvtide.storage'}\n"
        "print('heavy:', [name for name in heavy if sys.modules.get(name)])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(config_file)], check=True, capture_output=True, text=True
    )
    assert ran.stdout.endswith("heavy: []\n")
