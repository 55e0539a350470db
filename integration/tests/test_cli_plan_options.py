"""What the options of `kvtide plan` ask, each against arithmetic or the planner itself (P4, P7, P10, S1, S4, S5)."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

from kvtide.engine.commands.plan import command
from kvtide.engine.commands.plan_baselines import single_page, static_split_requests
from kvtide.engine.commands.plan_pages import wasted_share
from kvtide.engine.commands.plan_report import PageSuggestion
from kvtide.plan import (
    ChunkLifetime,
    DType,
    KVLayerDecl,
    KVPart,
    MLAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    from_config,
    lay_out,
    pack,
    plan_kv_storage,
)
from kvtide.sizing import CHECKPOINT_RULES, KVDemand, ServingPolicy

HYBRID = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
}
WINDOWED = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
DRAFT = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
LATENT = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
STATELESS_FIRST = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 3,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "compress_ratios": [0, 0, 128],
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Config files by name."""
    named = {
        "stateless first": STATELESS_FIRST,
        "hybrid": HYBRID,
        "windowed": WINDOWED,
        "draft": DRAFT,
        "latent": LATENT,
    }
    for name, config in named.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    return {name: tmp_path / f"{name}.json" for name in named}


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments], terminal_width=110)


def document(*arguments: object) -> dict[str, Any]:
    result = plan(*arguments, "--budget", "40GiB", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def refusal(*arguments: object) -> str:
    result = plan(*arguments, "--budget", "40GiB")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    return result.stderr


@pytest.mark.requirement("P7")
def test_tensor_parallel_ranks_hold_their_share(files: dict[str, Path]) -> None:
    """All figures are one rank's: half the heads, half the state."""
    whole, half = document(files["hybrid"]), document(files["hybrid"], "--tp", 2)
    assert (whole["tp_size"], half["tp_size"]) == (1, 2)
    for one, other in zip(whole["bands"], half["bands"], strict=True):
        assert one["payload_bytes"] == 2 * other["payload_bytes"]
    assert "linear_num_key_heads = 16 is not divided by tp_size = 3" in refusal(files["hybrid"], "--tp", 3)


@pytest.mark.requirement("S4", "P7")
def test_stages_are_listed_and_the_least_of_them_counts(files: dict[str, Path]) -> None:
    """48 layers in 5 stages: 10, 10, 10, 9, 9, of which the first three hold 2, 3 and 2 full layers."""
    found = document(files["hybrid"], "--pp", 5)
    assert [(stage["first_layer"], stage["last_layer"]) for stage in found["stages"]] == [
        (0, 9),
        (10, 19),
        (20, 29),
        (30, 38),
        (39, 47),
    ]
    for place, context in enumerate(found["contexts"]):
        counts = [stage["requests_in_memory"][place] for stage in found["stages"]]
        assert context["requests_in_memory"] == min(counts)
    assert len({stage["concurrency"] for stage in found["stages"]}) == 1
    assert "Stages" in plan(files["hybrid"], "--budget", "40GiB", "--pp", 5).stdout
    assert "pp_size = 49 is more than the 48 layers" in refusal(files["hybrid"], "--pp", 49)


@pytest.mark.requirement("S4", "S5")
def test_a_stage_of_windows_alone_is_priced_with_the_others_checkpoints(files: dict[str, Path]) -> None:
    """DeepSeek V4 in 2 stages: the first has windows alone, and a hit on a state of the other needs its windows too."""
    serving = ("--strategy", "extra_buffer", "--checkpoint-interval", 2048)
    found = document(files["stateless first"], "--pp", 2, *serving)
    assert found["checkpoint_interval"] == 2048
    assert found["stage"] == 0
    # 127 tokens behind a checkpoint and 2,047 past it, or a chunk of 2,048 past it: 17 pages of 128.
    assert [context["units"]["window-128"] for context in found["contexts"]] == [8, 17, 17]


@pytest.mark.requirement("P10")
def test_windows_may_have_smaller_pages(files: dict[str, Path]) -> None:
    """A window of 128 tokens in pages of 256 holds twice what it needs; in pages of 16 it does not."""
    coarse = document(files["windowed"], "--page-size", 256, "--chunk", 16)
    fine = document(files["windowed"], "--page-size", 256, "--chunk", 16, "--window-page-size", 16)
    assert [band["page_tokens"] for band in fine["bands"]] == [16, 256]
    assert [context["units"]["window-128"] for context in coarse["contexts"]] == [2, 2, 2]
    assert [context["units"]["window-128"] for context in fine["contexts"]] == [10, 10, 10]
    assert fine["contexts"][0]["requests_in_memory"] > coarse["contexts"][0]["requests_in_memory"]
    wrong = refusal(files["windowed"], "--page-size", 256, "--window-page-size", 48)
    assert "pages of 48 tokens in band 'window-128' do not divide the owner's pages of 256" in wrong


@pytest.mark.requirement("P4", "S5")
def test_a_drafts_layers_join_the_models_bands(files: dict[str, Path]) -> None:
    """2 layers × 8 heads × 64 × 2 × 2 bytes more a token, and 3 drafted tokens more in every peak."""
    alone, fused = document(files["windowed"]), document(files["windowed"], "--draft", files["draft"])
    assert (fused["draft_layers"], fused["draft_tokens"]) == (2, 3)
    window, full = fused["bands"]
    assert full["bytes_per_token"] == alone["bands"][1]["bytes_per_token"] + 2 * 8 * 64 * 2 * 2
    assert window["bytes_per_token"] == alone["bands"][0]["bytes_per_token"]
    # 1,024 tokens written and 3 drafted behind them: a page more.
    assert (alone["contexts"][0]["units"]["full"], fused["contexts"][0]["units"]["full"]) == (64, 65)
    single = document(files["windowed"], "--draft", files["draft"], "--draft-tokens", 0, "--pp", 2)
    assert [stage["last_layer"] for stage in single["stages"]] == [11, 25]
    mixed = refusal(files["latent"], "--draft", files["draft"])
    assert "mixes kinds of geometry" in mixed
    assert "the draft's layers are [61, 62]" in mixed
    recurrent = refusal(files["windowed"], "--draft", files["hybrid"])
    assert "have recurrent state, and the target has no state band to join" in recurrent


@pytest.mark.requirement("P7")
@pytest.mark.parametrize(
    "content", ["", "[1]", "{}", '{"model_type": "gpt2"}', '{"model_type": "llama", "num_hidden_layers": 0}']
)
def test_what_is_wrong_with_a_draft_says_so(files: dict[str, Path], tmp_path: Path, content: str) -> None:
    """Two configs are read; a line that names neither sends its reader to the wrong one."""
    draft = tmp_path / "other.json"
    draft.write_text(content)
    assert str(draft) in refusal(files["windowed"], "--draft", draft)
    missing = tmp_path / "missing.json"
    assert str(missing) in refusal(files["windowed"], "--draft", missing)


@pytest.mark.requirement("S5")
def test_the_way_of_serving_changes_what_a_request_holds(files: dict[str, Path]) -> None:
    """Tracking slots, the window behind a checkpoint, and chunks that never reach window pages."""
    plain = document(files["hybrid"])
    kept = document(files["hybrid"], "--strategy", "extra_buffer", "--checkpoint-interval", 256, "--overlap")
    assert (kept["strategy"], kept["checkpoint_interval"], kept["overlap"]) == ("extra_buffer", 256, True)
    assert plain["contexts"][0]["units"]["state"] == 1
    assert kept["contexts"][0]["units"]["state"] == 3
    pages = document(files["windowed"], "--chunk", 8192)
    tails = document(files["windowed"], "--chunk", 8192, "--chunk-reads", "activations")
    assert pages["contexts"][2]["units"]["window-128"] == (127 + 8192 + 15 + 15) // 16
    assert tails["contexts"][2]["units"]["window-128"] == 2 * 9
    assert "needs a plan with a checkpoint_interval" in refusal(files["hybrid"], "--strategy", "extra_buffer")
    between = refusal(files["hybrid"], "--checkpoint-interval", 24)
    assert "page_tokens = 16 does not divide checkpoint_interval = 24" in between


@pytest.mark.requirement("P6")
def test_kv_formats_are_options(files: dict[str, Path]) -> None:
    """fp4 in blocks of 32: half a byte an element and a byte a block, of 24,576 bytes in bfloat16."""
    assert (
        document(files["hybrid"], "--kv-dtype", "mxfp4")["bands"][1]["bytes_per_token"]
        == 24_576 // 32 * 17 // 2
    )
    assert "KV format 'fp8_ds_mla' is for latents" in refusal(files["hybrid"], "--kv-dtype", "fp8_ds_mla")


@pytest.mark.requirement("S1", "P9")
def test_explain_prints_arithmetic_that_adds_up(files: dict[str, Path]) -> None:
    """Somebody with a pocket calculator can follow it from the config to the bytes."""
    result = plan(files["hybrid"], "--budget", "40GiB", "--explain")
    assert (
        "  36 layers × (conv 8192×3 bfloat16 49,152 + recurrent 32×128×128 float32 2,097,152) = 77,266,944"
        in result.stdout
    )
    assert "  payload 393,216 + alignment 0 = 393,216" in result.stdout
    (arena,) = [line for line in result.stdout.splitlines() if line.startswith("arena: ")]
    terms, total = arena.removeprefix("arena: ").split(" = ")
    numbers = [int(word.replace(",", "")) for word in terms.split() if word[0].isdigit()]
    assert numbers[0] - sum(numbers[1:]) == int(total.split(", ")[0].replace(",", ""))
    request = next(
        line for line in result.stdout.splitlines() if line.startswith("a request of 1,024 tokens")
    )
    assert "1 × 77,266,944 of state + 64 × 393,216 of full = 102,432,768 bytes" in request


@pytest.mark.requirement("S1")
def test_plot_writes_a_picture_with_a_line_a_policy(files: dict[str, Path], tmp_path: Path) -> None:
    """It is well-formed, names what it draws, and has a point for each length of which a request fits."""
    out = tmp_path / "out.svg"
    assert plan(files["hybrid"], "--budget", "40GiB", "--plot", out).exit_code == 0
    tree = ET.parse(out)
    names = {element.text for element in tree.iter() if element.tag.endswith("}title")}
    assert names == {"one arena", "static split", "single page size"}
    lines = [element for element in tree.iter() if element.tag.endswith("}polyline")]
    assert all(len(str(line.get("points")).split()) >= 7 for line in lines)
    assert "cannot write" in refusal(files["hybrid"], "--plot", tmp_path / "not" / "there.svg")


@pytest.mark.requirement("P10", "S1")
def test_pages_that_waste_over_3_percent_are_answered_with_better_ones(files: dict[str, Path]) -> None:
    """A request of 1,536 tokens in two pages of 1,024 leaves a quarter empty; the suggestion keeps its promise."""
    fine = document(files["windowed"])
    assert fine["wasted_percent"] <= 3
    assert fine["suggestion"] is None
    coarse = document(files["windowed"], "--page-size", 1024)
    assert coarse["wasted_percent"] == 25
    better = coarse["suggestion"]
    assert list(better) == [field.name for field in attrs.fields(PageSuggestion)]
    again = document(
        files["windowed"],
        "--page-size",
        better["page_tokens"],
        "--window-page-size",
        better["window_page_tokens"],
    )
    assert again["wasted_percent"] == better["wasted_percent"] <= 3
    printed = " ".join(plan(files["windowed"], "--budget", "40GiB", "--page-size", 1024).stdout.split())
    assert (
        f"--page-size {better['page_tokens']} --window-page-size {better['window_page_tokens']} would waste"
        in printed
    )


@pytest.mark.requirement("P10", "S5")
def test_what_checkpoints_retain_is_no_waste(files: dict[str, Path]) -> None:
    """A window behind the latest checkpoint is needed for a hit: pages of one token waste nothing, pages of 16 their rounding."""
    parts = (
        KVPart(MLAGeometry(16, 0, DType.UINT8), WindowLifetime(128)),
        KVPart(MLAGeometry(16, 0, DType.UINT8), ChunkLifetime(512)),
        KVPart(StateGeometry((TensorDecl("recurrent", (64,), DType.UINT8),)), StateLifetime(1024)),
    )
    layers = [KVLayerDecl(layer, (part,)) for layer, part in enumerate(parts)]
    for strategy, overlap in CHECKPOINT_RULES:
        asked: dict[str, Any] = {"context_tokens": 3000, "chunk_tokens": 2000}
        asked["policy"] = ServingPolicy(strategy=strategy, overlap=overlap)
        assert wasted_share(plan_kv_storage(layers, page_tokens=1), **asked) == 0
        assert wasted_share(plan_kv_storage(layers, page_tokens=16), **asked) < Fraction(1, 50)


@pytest.mark.requirement("S1")
def test_other_policies_hold_what_their_models_say(files: dict[str, Path]) -> None:
    """At the reference length a static split loses nothing; at others the shorter pool decides."""
    found = document(files["hybrid"])
    short, reference, long = found["contexts"]
    assert reference["requests_in_memory"] - reference["requests_static_split"] <= 1
    assert short["requests_static_split"] < short["requests_in_memory"]
    assert long["requests_static_split"] < long["requests_in_memory"]
    # One pool for latents alone is the same under every policy.
    for context in document(files["latent"])["contexts"]:
        counts = {context[f"requests_{name}"] for name in ("in_memory", "static_split", "single_page")}
        assert max(counts) - min(counts) <= 1


@pytest.mark.requirement("S1")
def test_the_models_of_other_policies_by_hand() -> None:
    """Qwen3-Next: 12 full layers and three groups of 12 state layers; a state's 2,146,304 bytes a layer hold 1,048 tokens.

    With pools for requests of (1 slot, 10 pages), a request of (1, 20) finds half as many.
    """
    storage = plan_kv_storage(from_config(HYBRID), page_tokens=8)
    pages = single_page(storage)
    assert (pages.group_layers, pages.groups) == (12, {"state": 3, "full": 1})
    assert pages.page_bytes == 12 * 2_146_304
    assert pages.page_tokens == {"full": 2_146_304 // (8 * 2048) * 8}

    layout = lay_out(storage, 20 * 2**30)
    reference = KVDemand((1, 10))
    most = static_split_requests(layout, reference, reference)
    assert static_split_requests(layout, reference, KVDemand((1, 20))) in (most // 2, most // 2 - 1)
    assert pack(layout, [most, 10 * most]) is not None
