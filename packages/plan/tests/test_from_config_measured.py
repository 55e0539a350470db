"""Every known family against caches measured in transformers (P7). Skips where the optional data folder is missing.

Measured and planned figures differ in one thing: transformers keeps `kernel` columns of a convolution's inputs, serving
kernels `kernel - 1`. The tests subtract that column, so what is left must be equal to the byte.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvtide.plan import (
    KNOWN_MODEL_TYPES,
    ConfigError,
    KVPart,
    MHAGeometry,
    MLAGeometry,
    StateGeometry,
    WindowLifetime,
    from_config,
    plan_kv_storage,
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

READ_LATER = {
    "MiniMaxAI/MiniMax-M3": "minimax_m3",
    "XiaomiMiMo/MiMo-V2-Flash": "mimo_v2_flash",
    "allenai/Olmo-Hybrid-7B": "olmo_hybrid",
    "deepseek-ai/DeepSeek-V3.2": "deepseek_v32",
    "deepseek-ai/DeepSeek-V4-Flash": "deepseek_v4",
    "google/gemma-4-26B-A4B": "gemma4_text",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": "llama4_text",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama4_text",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": "kimi_linear",
    "zai-org/GLM-5": "glm_moe_dsa",
}
"""Models whose families are refused for now."""

DTYPE_WIDTHS = {"bfloat16": 2, "float32": 4}


def one_column_bytes(entry: dict[str, Any]) -> int:
    """What transformers' extra convolution column weighs in a slot: width × element, for every state layer."""
    return sum(
        len(group["layers"]) * state["shape"][0] * DTYPE_WIDTHS[state["dtype"]]
        for group in entry["groups"]
        for state in group.get("states", [])
        if state["kind"] == "conv"
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
    window = part.lifetime.window_tokens if isinstance(part.lifetime, WindowLifetime) else None
    assert isinstance(part.geometry, StateGeometry) or window == group["window"]


def assert_model_is_measured(config: dict[str, Any], entry: dict[str, Any]) -> None:
    """Layer by layer and in sum."""
    decls = from_config(config)
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
    assert figures.pop("full", 0) == entry["full_bytes_per_token"]
    assert figures.pop("state", 0) == entry["state_bytes_per_slot"] - one_column_bytes(entry)
    windows = entry["window_bytes_per_token"].items()
    assert figures == {f"window-{window}": byte_count for window, byte_count in windows}


@pytest.mark.requirement("P7")
def test_every_published_file_of_a_known_family_gives_the_measured_bytes(
    shared_configs: dict[str, dict[str, Any]], measured_models: dict[str, dict[str, Any]]
) -> None:
    """The measurement ran the model's own code, so it shares no slip with this package."""
    read = {model: config for model, config in shared_configs.items() if model not in READ_LATER}
    assert len(read) >= 14
    for model, config in read.items():
        assert_model_is_measured(config, measured_models[model])


@pytest.mark.requirement("P7")
@pytest.mark.parametrize("model", WITHOUT_FILE)
def test_a_config_written_from_published_numbers_gives_the_measured_bytes(
    model: str, measured_models: dict[str, dict[str, Any]]
) -> None:
    """Families of which no file is at hand are held to the same standard."""
    assert_model_is_measured(WITHOUT_FILE[model], measured_models[model])


@pytest.mark.requirement("P7")
def test_every_measured_model_is_either_read_or_known_to_come_later(
    measured_models: dict[str, dict[str, Any]], shared_configs: dict[str, dict[str, Any]]
) -> None:
    """So that no model is passed over in silence."""
    models = measured_models.keys() | shared_configs.keys()
    assert models == (shared_configs.keys() - READ_LATER.keys()) | WITHOUT_FILE.keys() | READ_LATER.keys()


@pytest.mark.requirement("P7")
def test_published_files_of_other_families_are_refused_by_name(
    shared_configs: dict[str, dict[str, Any]],
) -> None:
    """Chunked attention, indexers and compressed chains have no geometry yet; a wrong figure would be worse than none."""
    for model, model_type in READ_LATER.items():
        assert model_type not in KNOWN_MODEL_TYPES
        if model in shared_configs:
            with pytest.raises(ConfigError, match=f"^model_type '{model_type}' is not known"):
                from_config(shared_configs[model])


@pytest.mark.requirement("P7")
def test_the_convolution_column_explains_the_whole_difference(
    measured_models: dict[str, dict[str, Any]],
) -> None:
    """Qwen3-Next, spelled out: 36 layers × (2 × 16 + 32) heads × 128 × 2 bytes = 589,824, from 4 columns to 3."""
    entry = measured_models["Qwen/Qwen3-Next-80B-A3B-Instruct"]
    assert one_column_bytes(entry) == 36 * (2 * 16 + 32) * 128 * 2 == 589_824
    assert entry["state_bytes_per_slot"] - 589_824 == 77_266_944
