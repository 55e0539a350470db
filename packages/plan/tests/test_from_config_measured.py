"""Every known family against caches measured in transformers (P7). Skips where the optional data folder is missing.

Measured and planned figures differ in what transformers stores otherwise than serving kernels do. Each difference is a term
of arithmetic here, and what is left must be equal to the byte:

- a convolution's inputs: `kernel` columns there, `kernel - 1` here;
- an indexer's key: 128 × bf16 there, 128 × fp8 and a float32 scale here;
- K = V (Gemma 4's global layers, DeepSeek V4): counted as two tensors there, stored once here;
- chunked attention (Llama 4): a window of the chunk's length there, a lifetime of its own here, of the same bytes;
- DeepSeek V4's compressed chains: not measured at all.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvtide.plan import (
    ChunkLifetime,
    DType,
    KVPart,
    MHAGeometry,
    MLAGeometry,
    StateGeometry,
    WindowLifetime,
    from_config,
    plan_kv_storage,
)

from .published import (
    FALCON_H1_34B,
    GEMMA3_27B,
    GEMMA4_26B,
    GEMMA4_E2B,
    GRANITE_4_H_SMALL,
    KIMI_LINEAR,
    LFM2_12B,
    OLMO_HYBRID_7B,
)

MAMBA2 = {"mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2}
WITHOUT_FILE: dict[str, dict[str, Any]] = {
    "google/gemma-3-12b-it (text)": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 48,
        "hidden_size": 3840,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
    },
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "ai21labs/Jamba-v0.1": {
        "model_type": "jamba",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "ai21labs/AI21-Jamba-1.5-Mini": {
        "model_type": "jamba",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
    },
    "Lfm2Config default": {
        "model_type": "lfm2",
        "num_hidden_layers": 16,
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": KIMI_LINEAR,
    "allenai/Olmo-Hybrid-7B": OLMO_HYBRID_7B,
    "mistralai/Mistral-7B-v0.1": {
        "model_type": "mistral",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiiuae/Falcon-H1-7B-Instruct": MAMBA2
    | {
        "model_type": "falcon_h1",
        "num_hidden_layers": 44,
        "hidden_size": 3072,
        "head_dim": 128,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_d_state": 256,
    },
    "tiiuae/Falcon-H1-Tiny-90M": MAMBA2
    | {
        "model_type": "falcon_h1",
        "num_hidden_layers": 24,
        "hidden_size": 512,
        "head_dim": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "mamba_d_ssm": 768,
        "mamba_n_heads": 24,
        "mamba_d_head": 32,
        "mamba_d_state": 64,
    },
    "ibm-granite/granite-4.0-h-small": MAMBA2
    | {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 40,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
    },
}
"""The smallest configs of measured models that have no file, from the figures that their entries name as source."""

ELSEWHERE = {
    "MiniMaxAI/MiniMax-M3": "no entry",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": "no entry",
    "deepseek-ai/DeepSeek-V4-Flash": "a partial entry, compared term by term below",
}
"""Published files that the general comparison passes over, and why."""

DTYPE_WIDTHS = {"bfloat16": 2, "float32": 4}


def one_column_bytes(entry: dict[str, Any]) -> int:
    """What transformers' extra convolution column weighs in a slot: width × element, for every state layer."""
    return sum(
        len(group["layers"]) * state["shape"][0] * DTYPE_WIDTHS[state["dtype"]]
        for group in entry["groups"]
        for state in group.get("states", [])
        if state["kind"] == "conv"
    )


def indexer_difference(entry: dict[str, Any]) -> int:
    """What bf16 indexer keys weigh a token more than fp8 ones with a float32 scale, over all layers."""
    return sum(
        len(group["layers"]) * (group["indexer"]["dim"] * 2 - (group["indexer"]["dim"] + 4))
        for group in entry["groups"]
        if "indexer" in group
    )


def assert_part_is_measured(part: KVPart, group: dict[str, Any]) -> None:
    """One part of one layer against the tensors that its layer's cache held."""
    match part.geometry:
        case MHAGeometry() as mha:
            kv = group["kv"]
            assert (kv["k_heads"], kv["v_heads"]) == (mha.kv_heads, mha.kv_heads)
            assert (kv["k_dim"], kv["v_dim"], kv["dtype"]) == (mha.key_dim, mha.value_dim, mha.dtype.value)
        case MLAGeometry() as mla:
            kv = group["kv"]
            assert (kv["k_heads"], kv["k_dim"], kv["v_dim"]) == (1, mla.latent_dim, mla.rope_dim)
            indexer = group.get("indexer")
            assert (mla.indexer and mla.indexer.dim) == (indexer and indexer["dim"])
        case StateGeometry(tensors):
            planned = {tensor.name: tensor for tensor in tensors}
            measured = {state["kind"]: state for state in group["states"]}
            assert planned.keys() == measured.keys()
            for name, tensor in planned.items():
                shape = list(tensor.shape)
                if name == "conv":
                    shape[-1] += 1
                assert shape == measured[name]["shape"]
                assert tensor.dtype.value == measured[name]["dtype"]
    match part.lifetime:
        case WindowLifetime(tokens) | ChunkLifetime(tokens):
            assert tokens == group["window"]
        case _:
            assert group.get("window") is None


def assert_model_is_measured(config: dict[str, Any], entry: dict[str, Any]) -> None:
    """Layer by layer and in sum."""
    decls = from_config(config, equal_kv_once=False)
    assert len(decls) == entry["num_layers"]
    group_of = {layer: group for group in entry["groups"] for layer in group["layers"]}
    for decl in decls:
        group = group_of[decl.layer]
        assert len(decl.parts) == ("kv" in group) + ("states" in group)
        for part in decl.parts:
            assert_part_is_measured(part, group)

    figures = {
        pool.name: pool.payload_bytes_per_token for pool in plan_kv_storage(decls, page_tokens=1).sub_pools
    }
    assert figures.pop("full", 0) == entry["full_bytes_per_token"] - indexer_difference(entry)
    assert figures.pop("state", 0) == entry["state_bytes_per_slot"] - one_column_bytes(entry)
    windows = entry["window_bytes_per_token"].items()
    kind = "chunk" if entry["chunked"] else "window"
    assert figures == {f"{kind}-{window}": byte_count for window, byte_count in windows}


@pytest.mark.requirement("P7")
def test_every_published_file_gives_the_measured_bytes(
    shared_configs: dict[str, dict[str, Any]], measured_models: dict[str, dict[str, Any]]
) -> None:
    """The measurement ran the model's own code, so it shares no slip with this package."""
    compared = shared_configs.keys() - ELSEWHERE.keys()
    assert len(compared) == len(shared_configs) - len(ELSEWHERE) >= 20
    for model in compared:
        assert_model_is_measured(shared_configs[model], measured_models[model])


@pytest.mark.requirement("P7")
@pytest.mark.parametrize("model", WITHOUT_FILE)
def test_a_config_written_from_published_numbers_gives_the_measured_bytes(
    model: str, measured_models: dict[str, dict[str, Any]]
) -> None:
    """Families of which no file is at hand are held to the same standard."""
    assert_model_is_measured(WITHOUT_FILE[model], measured_models[model])


@pytest.mark.requirement("P7")
def test_every_measured_model_and_every_file_is_compared(
    measured_models: dict[str, dict[str, Any]], shared_configs: dict[str, dict[str, Any]]
) -> None:
    """So that no model is passed over in silence."""
    assert measured_models.keys() | shared_configs.keys() == shared_configs.keys() | WITHOUT_FILE.keys()
    assert ELSEWHERE.keys() <= shared_configs.keys()


@pytest.mark.requirement("P6", "P7")
def test_gemma_4s_equal_keys_and_values_are_counted_twice_there(
    measured_models: dict[str, dict[str, Any]], shared_configs: dict[str, dict[str, Any]]
) -> None:
    """5 global layers × 2 heads × 512 × 2 bytes = 10,240 a token: transformers holds that once as keys, once as values."""
    entry = measured_models["google/gemma-4-26B-A4B"]
    plan = plan_kv_storage(from_config(shared_configs["google/gemma-4-26B-A4B"]), page_tokens=1)
    once = plan.sub_pool("full").payload_bytes_per_token
    assert once == 5 * 2 * 512 * 2 == entry["full_bytes_per_token"] - 10_240
    # The demand that the data's README prints (142 MiB full at 7,259 tokens) is transformers' two tensors.
    assert round(7_259 * 2 * once / 2**20) == 142


@pytest.mark.requirement("P6", "P7")
def test_an_indexer_key_weighs_124_bytes_more_there(measured_models: dict[str, dict[str, Any]]) -> None:
    """DeepSeek V3.2, spelled out: 61 × (256 - 132) = 7,564 bytes a token, from 85,888 to 78,324."""
    entry = measured_models["deepseek-ai/DeepSeek-V3.2"]
    assert indexer_difference(entry) == 61 * (256 - 132) == 7_564
    assert entry["full_bytes_per_token"] - 7_564 == 70_272 + 8_052 == 78_324


@pytest.mark.requirement("P6", "P7")
def test_deepseek_v4_term_by_term(
    measured_models: dict[str, dict[str, Any]], shared_configs: dict[str, dict[str, Any]]
) -> None:
    """Only its windows are measured, in bf16 and counted as keys and as values, which are one tensor: 43 × 512 × 2 × 2."""
    config = shared_configs["deepseek-ai/DeepSeek-V4-Flash"]
    entry = measured_models["deepseek-ai/DeepSeek-V4-Flash"]
    halves = plan_kv_storage(from_config(config, kv_dtype=DType.BFLOAT16), page_tokens=128)
    measured = entry["window_bytes_per_token"]["128"]
    assert halves.sub_pool("window-128").payload_bytes_per_token * 2 == measured == 43 * 512 * 2 * 2

    # What its kernels store is one fp8 row, and what the data's README says of that is arithmetic over 584 bytes.
    plan = plan_kv_storage(from_config(config), page_tokens=128)
    assert plan.sub_pool("window-128").unit.payload_bytes == 43 * 128 * 584 == 3_214_336
    chains = plan.sub_pool("full").unit.payload_bytes
    assert chains * 4 == 128 * (21 * (584 + 132)) + 4 * 20 * 584
    assert round(chains / 128) == 3_850


@pytest.mark.requirement("P6", "P7")
def test_figures_of_the_datas_readme_are_met() -> None:
    """Gemma 3 27B, Gemma 4 E2B, Falcon-H1 34B and LFM2 1.2B have no entry, but their numbers are given in prose."""

    def bands(config: dict[str, Any], **options: Any) -> dict[str, tuple[int, int]]:
        plan = plan_kv_storage(from_config(config, **options), page_tokens=16)
        return {pool.name: (len(pool.layers), pool.payload_bytes_per_token) for pool in plan.sub_pools}

    gemma_3 = bands(GEMMA3_27B)
    assert (gemma_3["full"], gemma_3["window-1024"][1] * 1024) == ((10, 81_920), 436_207_616)
    assert {name: layers for name, (layers, _) in bands(GEMMA4_E2B).items()} == {"window-512": 12, "full": 3}
    falcon = bands(FALCON_H1_34B | {"mamba_ssm_dtype": "bfloat16"})
    assert (falcon["full"], falcon["state"]) == ((72, 147_456), (72, 153_206_784))
    # Its demands of 7,259 and 1,149 tokens in MiB: gemma-4-26B with K and V apart, Granite with transformers' extra column.
    gemma_4 = bands(GEMMA4_26B, equal_kv_once=False)
    granite = bands(GRANITE_4_H_SMALL)
    column = 36 * (8192 + 2 * 128) * 2
    for tokens, gemma_full, granite_full in ((7_259, 142, 113), (1_149, 22, 18)):
        assert round(tokens * gemma_4["full"][1] / 2**20) == gemma_full
        assert gemma_4["window-1024"][1] * 1024 == 200 * 2**20
        assert round(tokens * granite["full"][1] / 2**20) == granite_full
        assert round((granite["state"][1] + column) / 2**20) == 146
    lfm2 = bands(LFM2_12B)
    assert (lfm2["full"][0], lfm2["state"]) == (6, (10, 10 * 2 * 2_048 * 2))


@pytest.mark.requirement("P7")
def test_the_convolution_column_explains_the_whole_difference(
    measured_models: dict[str, dict[str, Any]],
) -> None:
    """Qwen3-Next, spelled out: 36 layers × (2 × 16 + 32) heads × 128 × 2 bytes = 589,824, from 4 columns to 3."""
    entry = measured_models["Qwen/Qwen3-Next-80B-A3B-Instruct"]
    assert one_column_bytes(entry) == 36 * (2 * 16 + 32) * 128 * 2 == 589_824
    assert entry["state_bytes_per_slot"] - 589_824 == 77_266_944
