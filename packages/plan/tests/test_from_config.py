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
    page_multiple,
    plan_kv_storage,
)

from .published import (
    BAMBA_9B,
    DEEPSEEK_V3,
    DEEPSEEK_V4_FLASH,
    FALCON_H1_34B,
    GEMMA3_4B,
    GEMMA3_27B,
    GEMMA4_26B,
    GEMMA4_E2B,
    GLM_5,
    GPT_OSS_20B,
    GRANITE_4_H_SMALL,
    JAMBA_V01,
    KIMI_LINEAR,
    LFM2_12B,
    LLAMA4_SCOUT,
    LLAMA_31_8B,
    MIMO_V2_FLASH,
    MINIMAX_M2,
    MINIMAX_M3,
    MINIMAX_TEXT_01,
    MISTRAL_7B,
    NEMOTRON_3_NANO,
    PUBLISHED,
    QWEN3_NEXT,
    QWEN25_7B,
    QWEN35_27B,
)


def bands_of(config: dict[str, Any], **options: Any) -> dict[str, tuple[int, int]]:
    decls = from_config(config, **options)
    plan = plan_kv_storage(decls, page_tokens=max(16, page_multiple(decls)))
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
    spelled_alike = {
        "qwen3_5_moe": "qwen3_5",
        "qwen3_5_moe_text": "qwen3_5_text",
        "minimax": "minimax_text_01",
        "minimax_m3_vl": "minimax_m3",
        "minimax_m3_vl_text": "minimax_m3",
    }
    assert {spelled_alike.get(known, known) for known in KNOWN_MODEL_TYPES} == covered
    for other, spelling in spelled_alike.items():
        flat = {"minimax_text_01": MINIMAX_TEXT_01, "minimax_m3": MINIMAX_M3}.get(
            spelling, QWEN35_27B["text_config"]
        )
        assert from_config(flat | {"model_type": other}) == from_config(flat | {"model_type": spelling})


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
                **{key: value for key, value in GEMMA4_26B["text_config"].items() if "global" not in key},
                "per_layer_config": {
                    f"{layer:02}": {"head_dim": 512, "num_key_value_heads": 2} for layer in range(5, 30, 6)
                },
            },
            GEMMA4_26B,
        ),
        (
            {
                **{
                    key: value
                    for key, value in MIMO_V2_FLASH.items()
                    if not key.startswith(("swa", "hybrid", "sliding"))
                },
                "sliding_window": 129,
            },
            MIMO_V2_FLASH,
        ),
        (
            {
                **{key: value for key, value in DEEPSEEK_V4_FLASH.items() if key != "compress_ratios"},
                "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
                "layer_types": [
                    *["sliding_attention"] * 2,
                    *["compressed_sparse_attention", "heavily_compressed_attention"] * 20,
                    "compressed_sparse_attention",
                ],
            },
            DEEPSEEK_V4_FLASH,
        ),
        (
            {
                **{key: value for key, value in KIMI_LINEAR.items() if key != "linear_attn_config"},
                "linear_num_heads": 32,
                "layer_types": [
                    "full_attention" if layer in {4, 8, 12, 16, 20, 24, 27} else "linear_attention"
                    for layer in range(1, 28)
                ],
            },
            KIMI_LINEAR,
        ),
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
@pytest.mark.parametrize("model_type", ["gpt2", "mllama_text_model", 7, ["llama"]])
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
    """The outer name would hide that the text model is what is missing."""
    with pytest.raises(ConfigError, match=r"^model_type 'mllama_text_model' is not known"):
        from_config({"model_type": "mllama", "text_config": {"model_type": "mllama_text_model"}})


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
        {"layer_types": ["bidirectional"] * 24},
        "layer_types[0] must be one of full_attention, attention, sliding_attention, chunked_attention, ",
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
    (MIMO_V2_FLASH, {"swa_head_dim": 0}, "swa_head_dim must be a positive integer, found 0"),
    (
        MIMO_V2_FLASH,
        {"hybrid_layer_pattern": [0, 1]},
        "hybrid_layer_pattern names 2 layers, but num_hidden_layers is 48",
    ),
    (
        MIMO_V2_FLASH,
        {"hybrid_layer_pattern": [0] * 47 + [2]},
        "hybrid_layer_pattern[47] must be one of 0, 1, found 2",
    ),
    (
        LLAMA4_SCOUT["text_config"],
        {"attention_chunk_size": -1},
        "attention_chunk_size must be a positive integer, found -1",
    ),
    (
        GEMMA4_E2B,
        {"num_kv_shared_layers": 33},
        "num_kv_shared_layers = 33 leaves layer 4 no full attention to share",
    ),
    (
        GEMMA4_E2B,
        {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention is 'all': an encoder attends",
    ),
    (GEMMA4_E2B, {"per_layer_config": [3]}, "per_layer_config must be a JSON object, found [3]"),
    (
        GEMMA4_E2B,
        {"per_layer_config": {"last": {}}},
        "per_layer_config must name layers by number, found 'last'",
    ),
    (GEMMA4_E2B, {"per_layer_config": {"4": 7}}, "per_layer_config.4 must be a JSON object, found 7"),
    (
        GEMMA4_E2B,
        {"per_layer_config": {"4": {"head_dim": -1}}},
        "head_dim must be a positive integer, found -1",
    ),
    (GLM_5, {"index_topk_pattern": "FSX" * 26}, "indexer_types[2] must be full or shared, found 'X'"),
    (GLM_5, {"indexer_types": ["full"]}, "indexer_types names 1 layers, but num_hidden_layers is 78"),
    (
        DEEPSEEK_V4_FLASH,
        {"compress_ratios": [0] * 42},
        "compress_ratios names 42 layers, but num_hidden_layers is 43",
    ),
    (
        DEEPSEEK_V4_FLASH,
        {"compress_ratios": [7] * 43},
        "compress_ratios[0] must be one of 0, 4, 128, found 7",
    ),
    (
        DEEPSEEK_V4_FLASH,
        {"qk_rope_head_dim": 512},
        "qk_rope_head_dim must be below head_dim = 512, found 512",
    ),
    (KIMI_LINEAR, {"linear_attn_config": [3]}, "linear_attn_config must be a JSON object, found [3]"),
    (
        KIMI_LINEAR,
        {"linear_attn_config": KIMI_LINEAR["linear_attn_config"] | {"kda_layers": [1, 1]}},
        "linear_attn_config.full_attn_layers and kda_layers must name every layer of 1 to 27 once between them",
    ),
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
