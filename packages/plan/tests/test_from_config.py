"""A published config becomes what serving stacks store, and a bad one becomes one line (P7).

The configs here are the fields that count, as their makers published them; the expected bytes are written as arithmetic, so
that a reader can check them against a model card.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvtide.plan import (
    KNOWN_MODEL_TYPES,
    ConfigError,
    DType,
    FullLifetime,
    KVPart,
    MHAGeometry,
    MLAGeometry,
    PlanError,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    from_config,
    plan_kv_storage,
)

LLAMA_31_8B: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MISTRAL_7B: dict[str, Any] = LLAMA_31_8B | {"model_type": "mistral", "sliding_window": 4096}
QWEN25_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "sliding_window": None,
}
QWEN3_06B: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
MINIMAX_M2: dict[str, Any] = {
    "model_type": "minimax_m2",
    "num_hidden_layers": 62,
    "hidden_size": 3072,
    "head_dim": 128,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
}
GEMMA3_27B: dict[str, Any] = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "head_dim": 128,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
    },
    "vision_config": {"num_hidden_layers": 27},
}
GEMMA3_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "hidden_size": 2560,
        "sliding_window": 1024,
    },
}
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_nextn_predict_layers": 1,
}
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN35_27B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": QWEN3_NEXT
    | {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "mamba_ssm_dtype": "float32",
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    },
}
FALCON_H1_34B: dict[str, Any] = {
    "model_type": "falcon_h1",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 72,
    "hidden_size": 5120,
    "head_dim": 128,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "mamba_d_ssm": 4096,
    "mamba_n_heads": 32,
    "mamba_d_head": 128,
    "mamba_n_groups": 2,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
GRANITE_4_H_SMALL: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 40,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
BAMBA_9B: dict[str, Any] = {
    key: value for key, value in GRANITE_4_H_SMALL.items() if key != "layer_types"
} | {
    "model_type": "bamba",
    "num_hidden_layers": 32,
    "attn_layer_indices": [9, 18, 27],
    "mamba_d_head": 64,
}
NEMOTRON_3_NANO: dict[str, Any] = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 52,
    "hidden_size": 2688,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "mamba_ssm_cache_dtype": "float32",
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "sliding_window": None,
}
JAMBA_V01: dict[str, Any] = {
    "model_type": "jamba",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}
LFM2_12B: dict[str, Any] = {
    "model_type": "lfm2",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}

KV = 2 * 2
"""A key and a value of two bytes."""

PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, tuple[int, int]]]] = {
    "Llama-3.1-8B": (LLAMA_31_8B, {"full": (32, 32 * 8 * 128 * KV)}),
    "Mistral-7B-v0.1": (MISTRAL_7B, {"window-4096": (32, 32 * 8 * 128 * KV)}),
    "Mistral-7B-v0.3": (MISTRAL_7B | {"sliding_window": None}, {"full": (32, 32 * 8 * 128 * KV)}),
    "Mixtral-8x7B-v0.1": (
        LLAMA_31_8B | {"model_type": "mixtral", "sliding_window": None},
        {"full": (32, 32 * 8 * 128 * KV)},
    ),
    "Qwen2.5-7B": (QWEN25_7B, {"full": (28, 28 * 4 * 128 * KV)}),
    "Qwen3-0.6B": (QWEN3_06B, {"full": (28, 28 * 8 * 128 * KV)}),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, {"full": (48, 48 * 4 * 128 * KV)}),
    "MiniMax-M2": (MINIMAX_M2, {"full": (62, 62 * 8 * 128 * KV)}),
    "gemma-3-27b": (
        GEMMA3_27B,
        {"window-1024": (52, 52 * 16 * 128 * KV), "full": (10, 10 * 16 * 128 * KV)},
    ),
    "gemma-3-4b, fields left to the family": (
        GEMMA3_4B,
        {"window-1024": (29, 29 * 4 * 256 * KV), "full": (5, 5 * 4 * 256 * KV)},
    ),
    "gpt-oss-20b": (GPT_OSS_20B, {"window-128": (12, 12 * 8 * 64 * KV), "full": (12, 12 * 8 * 64 * KV)}),
    "DeepSeek-V3": (DEEPSEEK_V3, {"full": (61, 61 * (512 + 64) * 2)}),
    "Kimi-K2": (DEEPSEEK_V3 | {"model_type": "kimi_k2"}, {"full": (61, 61 * (512 + 64) * 2)}),
    "Qwen3-Next-80B-A3B": (
        QWEN3_NEXT,
        {
            "state": (36, 36 * ((2 * 16 + 32) * 128 * 3 * 2 + 32 * 128 * 128 * 4)),
            "full": (12, 12 * 2 * 256 * KV),
        },
    ),
    "Qwen3.5-27B": (
        QWEN35_27B,
        {
            "state": (48, 48 * ((2 * 16 + 48) * 128 * 3 * 2 + 48 * 128 * 128 * 4)),
            "full": (16, 16 * 4 * 256 * KV),
        },
    ),
    "Falcon-H1-34B": (
        FALCON_H1_34B,
        {
            "state": (72, 72 * ((4096 + 2 * 2 * 256) * 3 * 2 + 4096 * 256 * 4)),
            "full": (72, 72 * 4 * 128 * KV),
        },
    ),
    "granite-4.0-h-small": (
        GRANITE_4_H_SMALL,
        {"state": (36, 36 * ((8192 + 2 * 128) * 3 * 2 + 8192 * 128 * 4)), "full": (4, 4 * 8 * 128 * KV)},
    ),
    "Bamba-9B": (
        BAMBA_9B,
        {"state": (29, 29 * ((8192 + 2 * 128) * 3 * 2 + 8192 * 128 * 4)), "full": (3, 3 * 8 * 128 * KV)},
    ),
    "Nemotron-3-Nano": (
        NEMOTRON_3_NANO,
        {
            "state": (23, 23 * ((64 * 64 + 2 * 8 * 128) * 3 * 2 + 64 * 64 * 128 * 4)),
            "full": (6, 6 * 2 * 128 * KV),
        },
    ),
    "Jamba-v0.1": (
        JAMBA_V01,
        {"state": (28, 28 * (8192 * 3 * 2 + 8192 * 16 * 4)), "full": (4, 4 * 8 * 128 * KV)},
    ),
    "LFM2-1.2B": (LFM2_12B, {"state": (10, 10 * 2048 * 2 * 2), "full": (6, 6 * 8 * 64 * KV)}),
}
"""By model: its config, and for each band the layers in it and the payload bytes per token (per slot for state)."""


def bands_of(config: dict[str, Any], **options: Any) -> dict[str, tuple[int, int]]:
    plan = plan_kv_storage(from_config(config, **options), page_tokens=16)
    return {pool.name: (len(pool.layers), pool.payload_bytes_per_token) for pool in plan.sub_pools}


@pytest.mark.requirement("P7", "P1")
@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_config_gives_the_bytes_of_its_model_card(model: str) -> None:
    """The capacity printed at boot is a multiple of these numbers."""
    config, bands = PUBLISHED[model]
    assert bands_of(config) == bands


@pytest.mark.requirement("P7")
def test_figures_that_others_published_are_met() -> None:
    """Numbers that stand in documents outside this repository, so that no slip is shared with the table above."""
    assert bands_of(QWEN3_NEXT)["state"][1] == 77_266_944
    assert bands_of(GEMMA3_27B)["full"][1] == 81_920
    assert bands_of(GEMMA3_27B)["window-1024"][1] * 1024 == 436_207_616
    assert bands_of(FALCON_H1_34B)["full"][1] == 147_456
    assert bands_of(FALCON_H1_34B | {"mamba_ssm_dtype": "bfloat16"})["state"][1] == 153_206_784
    assert bands_of(DEEPSEEK_V3)["full"][1] == 70_272


@pytest.mark.requirement("P7")
def test_every_known_family_is_in_the_table_of_published_models() -> None:
    """A family that no test reads is a claim, not a feature."""
    covered = {config["model_type"] for config, _ in PUBLISHED.values()}
    covered |= {
        config["text_config"]["model_type"] for config, _ in PUBLISHED.values() if "text_config" in config
    }
    spelled_alike = {"qwen3_5_moe": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_text"}
    assert {spelled_alike.get(known, known) for known in KNOWN_MODEL_TYPES} == covered
    for moe, dense in spelled_alike.items():
        flat = QWEN35_27B["text_config"]
        assert from_config(flat | {"model_type": moe}) == from_config(flat | {"model_type": dense})


@pytest.mark.requirement("P7", "P1")
def test_falcon_h1_has_attention_and_state_in_every_layer() -> None:
    """Both parts of a layer live at once, in two bands."""
    decl = from_config(FALCON_H1_34B)[71]
    assert decl.parts == (
        KVPart(MHAGeometry(4, 128, 128, DType.BFLOAT16), FullLifetime()),
        KVPart(
            StateGeometry(
                (
                    TensorDecl("conv", (4096 + 2 * 2 * 256, 3), DType.BFLOAT16),
                    TensorDecl("recurrent", (32, 128, 256), DType.FLOAT32),
                )
            ),
            StateLifetime(),
        ),
    )


@pytest.mark.requirement("P7")
def test_layers_that_store_nothing_are_declared_empty() -> None:
    """Layer indices stay the model's own, so that views and adapters need no second numbering."""
    decls = from_config(NEMOTRON_3_NANO)
    assert [decl.layer for decl in decls] == list(range(52))
    assert [len(decl.parts) for decl in decls[:7]] == [1, 0, 1, 0, 1, 1, 0]


@pytest.mark.requirement("P7")
def test_kv_dtype_changes_attention_entries_and_no_state() -> None:
    """Quantising the cache leaves convolution inputs and recurrent state as they are."""
    plain, quantised = bands_of(QWEN3_NEXT), bands_of(QWEN3_NEXT, kv_dtype=DType.FLOAT8_E4M3)
    assert quantised["full"][1] * 2 == plain["full"][1]
    assert quantised["state"] == plain["state"]


@pytest.mark.requirement("P7")
@pytest.mark.parametrize(
    ("changes", "kv_width", "conv_width"),
    [
        ({}, 2, 2),
        ({"torch_dtype": "float32"}, 4, 4),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, 4, 4),
        ({"dtype": None, "torch_dtype": "float16"}, 2, 2),
    ],
)
def test_the_configs_own_element_type_is_the_default(
    changes: dict[str, Any], kv_width: int, conv_width: int
) -> None:
    """Old configs say torch_dtype, new ones dtype, some neither: those are served in bfloat16."""
    bands = bands_of(LFM2_12B | changes)
    assert bands["full"][1] == 6 * 8 * 64 * 2 * kv_width
    assert bands["state"][1] == 10 * 2048 * 2 * conv_width


@pytest.mark.requirement("P7")
def test_a_nested_text_config_takes_its_element_type_from_the_file_around_it() -> None:
    """Multimodal configs name the type once, outside."""
    assert bands_of(GEMMA3_4B | {"torch_dtype": "float32"})["full"][1] == 5 * 4 * 256 * 2 * 4


@pytest.mark.requirement("P7")
def test_recurrent_state_is_float32_unless_the_config_says_otherwise() -> None:
    """Rounded at every token, bfloat16 state drifts; whoever wants it says so."""
    recurrent = from_config(JAMBA_V01)[0].parts[0].geometry.tensors()[1]
    assert (recurrent.name, recurrent.dtype) == ("recurrent", DType.FLOAT32)
    half = (
        from_config(NEMOTRON_3_NANO | {"mamba_ssm_cache_dtype": "bfloat16"})[0].parts[0].geometry.tensors()[1]
    )
    assert half.dtype is DType.BFLOAT16


@pytest.mark.requirement("P7")
@pytest.mark.parametrize(
    ("changes", "bands"),
    [
        (
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21},
            {"full": 21, "window-4096": 7},
        ),
        ({"use_sliding_window": True, "sliding_window": None}, {"full": 28}),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 4096,
                "layer_types": ["sliding_attention", "full_attention"] * 14,
            },
            {"full": 14, "window-4096": 14},
        ),
        ({"layer_types": ["sliding_attention"] * 28}, {"full": 28}),
    ],
)
def test_qwens_window_counts_only_when_it_is_switched_on(
    changes: dict[str, Any], bands: dict[str, int]
) -> None:
    """Its configs carry a window that is off; planning it would retire tokens that attention still reads."""
    assert {name: layers for name, (layers, _) in bands_of(QWEN25_7B | changes).items()} == bands


@pytest.mark.requirement("P7")
def test_a_window_larger_than_the_context_is_accepted() -> None:
    """Makers publish such configs; the window then holds what full attention would."""
    config = MISTRAL_7B | {"sliding_window": 10**6, "max_position_embeddings": 4096}
    assert list(bands_of(config)) == ["window-1000000"]


@pytest.mark.requirement("P7")
@pytest.mark.parametrize(
    ("config", "equal_to"),
    [
        (
            {**GRANITE_4_H_SMALL, "layer_types": (["linear_attention"] * 9 + ["full_attention"]) * 4},
            GRANITE_4_H_SMALL,
        ),
        ({**GRANITE_4_H_SMALL, "mamba_d_head": 64}, GRANITE_4_H_SMALL),
        ({key: value for key, value in GPT_OSS_20B.items() if key != "layer_types"}, GPT_OSS_20B),
        ({key: value for key, value in QWEN3_NEXT.items() if not key.startswith("linear")}, QWEN3_NEXT),
        ({**QWEN35_27B["text_config"], "model_type": "qwen3_5_text"}, QWEN35_27B),
        ({**MINIMAX_M2, "attn_type_list": [1] * 62}, MINIMAX_M2),
        ({**DEEPSEEK_V3, "num_nextn_predict_layers": 0}, DEEPSEEK_V3),
        (
            {
                **{
                    key: value
                    for key, value in NEMOTRON_3_NANO.items()
                    if "pattern" not in key and "hidden_l" not in key
                },
                "layers_block_type": [
                    {"M": "linear_attention", "E": "moe", "*": "full_attention"}[letter]
                    for letter in NEMOTRON_3_NANO["hybrid_override_pattern"]
                ],
            },
            NEMOTRON_3_NANO,
        ),
    ],
)
def test_spellings_of_one_model_give_one_plan(config: dict[str, Any], equal_to: dict[str, Any]) -> None:
    """Files of one model differ by the version of the library that wrote them."""
    assert from_config(config) == from_config(equal_to)


@pytest.mark.requirement("P7")
def test_a_state_of_one_tap_has_no_convolution_to_keep() -> None:
    """A kernel of one column looks at no earlier input; a tensor of width 0 would be no tensor."""
    (state,) = from_config(JAMBA_V01 | {"mamba_d_conv": 1})[0].parts
    assert [tensor.name for tensor in state.geometry.tensors()] == ["recurrent"]


@pytest.mark.requirement("P7")
@pytest.mark.parametrize("model_type", ["llama4_text", "deepseek_v32", "glm_moe_dsa", 7, ["llama"]])
def test_an_unknown_family_is_refused_with_the_known_ones_and_a_way_out(model_type: Any) -> None:
    """The reader learns whether to wait for support or to write ten lines now."""
    with pytest.raises(ConfigError) as caught:
        from_config(LLAMA_31_8B | {"model_type": model_type})
    text = str(caught.value)
    assert text.startswith(f"model_type {model_type!r} is not known; known are bamba, ")
    assert all(known in text for known in KNOWN_MODEL_TYPES)
    assert "KVLayerDecl(0, (KVPart(" in text
    assert "\n" not in text


@pytest.mark.requirement("P7")
def test_a_nested_family_that_is_not_known_is_refused_by_its_own_name() -> None:
    """Llama 4's outer name would hide that its text model is what is missing."""
    with pytest.raises(ConfigError, match=r"^model_type 'llama4_text' is not known"):
        from_config({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}})


REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        LLAMA_31_8B,
        {"model_type": None},
        "model_type is missing: the config does not say which family it describes",
    ),
    (LLAMA_31_8B, {"num_hidden_layers": None}, "num_hidden_layers is missing"),
    (LLAMA_31_8B, {"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, found 0"),
    (LLAMA_31_8B, {"num_hidden_layers": -3}, "num_hidden_layers must be a positive integer, found -3"),
    (LLAMA_31_8B, {"num_hidden_layers": True}, "num_hidden_layers must be a positive integer, found True"),
    (LLAMA_31_8B, {"num_hidden_layers": "32"}, "num_hidden_layers must be a positive integer, found '32'"),
    (LLAMA_31_8B, {"num_hidden_layers": 32.0}, "num_hidden_layers must be a positive integer, found 32.0"),
    (LLAMA_31_8B, {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000, found 1000000000"),
    (LLAMA_31_8B, {"head_dim": 2**31}, "head_dim must be at most 2147483647, found 2147483648"),
    (
        LLAMA_31_8B,
        {"head_dim": 10**5000},
        "head_dim must be at most 2147483647, found an integer of thousands of digits",
    ),
    (LLAMA_31_8B, {"head_dim": False}, "head_dim must be a positive integer, found False"),
    (
        LLAMA_31_8B,
        {"hidden_size": 4097},
        "head_dim is left out, and hidden_size / num_attention_heads = 4097 / 32 is no integer",
    ),
    (LLAMA_31_8B, {"hidden_size": None}, "hidden_size is missing"),
    (
        LLAMA_31_8B,
        {"num_key_value_heads": 7},
        "num_key_value_heads = 7 does not divide num_attention_heads = 32",
    ),
    (
        LLAMA_31_8B,
        {"torch_dtype": "bf16"},
        "torch_dtype must be one of float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, int8, uint8, found 'bf16'",
    ),
    (LLAMA_31_8B, {"text_config": "llama"}, "text_config must be a JSON object, found str"),
    (MISTRAL_7B, {"sliding_window": 0}, "sliding_window must be a positive integer, found 0"),
    (MISTRAL_7B, {"sliding_window": False}, "sliding_window must be a positive integer, found False"),
    (QWEN25_7B, {"use_sliding_window": "no"}, "use_sliding_window must be true or false, found 'no'"),
    (
        GPT_OSS_20B,
        {"layer_types": ["full_attention"] * 23},
        "layer_types names 23 layers, but num_hidden_layers is 24",
    ),
    (
        GPT_OSS_20B,
        {"layer_types": ["full_attention"] * 25},
        "layer_types names 25 layers, but num_hidden_layers is 24",
    ),
    (GPT_OSS_20B, {"layer_types": "full_attention"}, "layer_types must be a list, found 'full_attention'"),
    (
        GPT_OSS_20B,
        {"layer_types": ["full_attention"] * 23 + [3]},
        "layer_types[23] must be a string, found 3",
    ),
    (
        GPT_OSS_20B,
        {"layer_types": ["chunked_attention"] * 24},
        "layer_types[0] must be one of full_attention, attention, sliding_attention, linear_attention, ",
    ),
    (
        GPT_OSS_20B,
        {"layer_types": ["mamba"] * 24},
        "layer_types asks for recurrent state; this family has full attention, window attention",
    ),
    (GPT_OSS_20B, {"sliding_window": -128}, "sliding_window must be a positive integer, found -128"),
    (
        GEMMA3_27B,
        {"text_config": GEMMA3_27B["text_config"] | {"num_hidden_layers": 0}},
        "text_config.num_hidden_layers must be a positive integer, found 0",
    ),
    (
        GEMMA3_27B,
        {"text_config": GEMMA3_27B["text_config"] | {"use_bidirectional_attention": True}},
        "text_config.use_bidirectional_attention is true: an encoder attends both ways and keeps no KV",
    ),
    (DEEPSEEK_V3, {"kv_lora_rank": None}, "kv_lora_rank is missing"),
    (DEEPSEEK_V3, {"qk_rope_head_dim": -1}, "qk_rope_head_dim must be an integer of 0 or more, found -1"),
    (MINIMAX_M2, {"attn_type_list": [1, 0]}, "attn_type_list[1] must be 1 (softmax), found 0"),
    (
        QWEN3_NEXT,
        {"full_attention_interval": 0},
        "full_attention_interval must be a positive integer, found 0",
    ),
    (
        FALCON_H1_34B,
        {"mamba_n_heads": 31},
        "mamba_n_heads x mamba_d_head = 3968, but mamba_d_ssm = 4096",
    ),
    (
        GRANITE_4_H_SMALL,
        {"mamba_n_heads": 127},
        "mamba_d_head is left out, and mamba_expand x hidden_size / mamba_n_heads = 8192 / 127 is no integer",
    ),
    (GRANITE_4_H_SMALL, {"layer_types": None}, "layer_types is missing"),
    (
        BAMBA_9B,
        {"attn_layer_indices": [9, 32]},
        "attn_layer_indices[1] must be below num_hidden_layers = 32, found 32",
    ),
    (BAMBA_9B, {"attn_layer_indices": None}, "attn_layer_indices is missing, and so is layer_types"),
    (
        BAMBA_9B,
        {"attn_layer_indices": [True]},
        "attn_layer_indices[0] must be an integer of 0 or more, found True",
    ),
    (
        NEMOTRON_3_NANO,
        {"hybrid_override_pattern": "M*"},
        "hybrid_override_pattern names 2 layers, but num_hidden_layers is 52",
    ),
    (
        NEMOTRON_3_NANO,
        {"hybrid_override_pattern": "MX"},
        "hybrid_override_pattern must be a string of the letters * M E -, found 'MX'",
    ),
    (NEMOTRON_3_NANO, {"mamba_ssm_cache_dtype": 4}, "mamba_ssm_cache_dtype must be one of float32, "),
    (JAMBA_V01, {"attn_layer_offset": 8}, "attn_layer_offset must be below attn_layer_period = 8, found 8"),
]


@pytest.mark.requirement("P7")
@pytest.mark.parametrize(("config", "changes", "text"), REFUSALS, ids=[text[:50] for *_, text in REFUSALS])
def test_a_senseless_field_is_refused_in_one_line_naming_it_and_its_value(
    config: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    """A config is other people's JSON: what it gets wrong must not become a plan that is quietly wrong."""
    with pytest.raises(ConfigError) as caught:
        from_config(config | changes)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


@pytest.mark.requirement("P7")
@pytest.mark.parametrize("config", [[], "llama", None, 3])
def test_what_is_no_object_is_refused(config: Any) -> None:
    """JSON has other roots than objects."""
    with pytest.raises(ConfigError, match="a config must be a JSON object, found"):
        from_config(config)


@pytest.mark.requirement("P7")
def test_a_config_error_is_a_plan_error() -> None:
    """One except clause turns everything the planner refuses into a line."""
    assert issubclass(ConfigError, PlanError)


@pytest.mark.requirement("P7")
def test_reading_changes_nothing_in_the_config() -> None:
    """The caller goes on to hand the same mapping to others."""
    before = json.dumps(QWEN35_27B)
    from_config(QWEN35_27B)
    assert json.dumps(QWEN35_27B) == before


@pytest.mark.requirement("P7")
def test_mla_keeps_the_rotary_key_beside_the_latent() -> None:
    """512 + 64 columns a token, whatever the head counts say."""
    assert from_config(DEEPSEEK_V3)[0].parts[0].geometry == MLAGeometry(512, 64, DType.BFLOAT16)
