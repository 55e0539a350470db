"""The fields that count of published configs, and the bytes of their model cards as arithmetic."""

from __future__ import annotations

from typing import Any

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

GEMMA4_26B: dict[str, Any] = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "dtype": "bfloat16",
        "num_hidden_layers": 30,
        "hidden_size": 2816,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    },
}
GEMMA4_E2B: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 35,
    "hidden_size": 1536,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
}
MIMO_V2_FLASH: dict[str, Any] = {
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 48,
    "hidden_size": 4096,
    "head_dim": 192,
    "v_head_dim": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "swa_num_key_value_heads": 8,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "hybrid_layer_pattern": [0, *([1] * 4 + [0]), *([1] * 5 + [0]) * 7],
}
LLAMA4_SCOUT: dict[str, Any] = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "num_hidden_layers": 48,
        "hidden_size": 5120,
        "head_dim": 128,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "attention_chunk_size": 8192,
    },
}
DEEPSEEK_V32: dict[str, Any] = DEEPSEEK_V3 | {"model_type": "deepseek_v32", "index_head_dim": 128}
GLM_5: dict[str, Any] = DEEPSEEK_V3 | {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "index_head_dim": 128,
}
DEEPSEEK_V4_FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "hidden_size": 4096,
    "head_dim": 512,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
    "torch_dtype": "bfloat16",
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}
KIMI_LINEAR: dict[str, Any] = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 27,
    "hidden_size": 2304,
    "num_attention_heads": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "linear_attn_config": {
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
    },
}
OLMO_HYBRID_7B: dict[str, Any] = {
    "model_type": "olmo_hybrid",
    "num_hidden_layers": 32,
    "hidden_size": 3840,
    "num_attention_heads": 30,
}
MINIMAX_TEXT_01: dict[str, Any] = {
    "model_type": "minimax_text_01",
    "num_hidden_layers": 80,
    "hidden_size": 6144,
    "head_dim": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "attn_type_list": ([0] * 7 + [1]) * 10,
}
MINIMAX_M3: dict[str, Any] = {
    "model_type": "minimax_m3",
    "num_hidden_layers": 60,
    "hidden_size": 6144,
    "head_dim": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "sparse_attention_config": {"sparse_index_dim": 128, "sparse_attention_freq": [0] * 3 + [1] * 57},
}

GEMMA2_9B: dict[str, Any] = {
    "model_type": "gemma2",
    "num_hidden_layers": 42,
    "hidden_size": 3584,
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
GEMMA3N_E4B: dict[str, Any] = {
    "model_type": "gemma3n",
    "text_config": {"model_type": "gemma3n_text", "num_hidden_layers": 35, "hidden_size": 2048},
}
OLMO3_7B: dict[str, Any] = {
    "model_type": "olmo3",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
}
COMMAND_R7B: dict[str, Any] = OLMO3_7B | {"model_type": "cohere2", "num_key_value_heads": 8}
LFM2_8B_A1B: dict[str, Any] = {
    "model_type": "lfm2_moe",
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "layer_types": ["full_attention" if layer in {2, 6, 10, 14, 18, 21} else "conv" for layer in range(24)],
}
GLM_45_AIR: dict[str, Any] = {
    "model_type": "glm4_moe",
    "num_hidden_layers": 46,
    "hidden_size": 4096,
    "head_dim": 128,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
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
    "gemma-4-26B-A4B, K = V stored once": (
        GEMMA4_26B,
        {"window-1024": (25, 25 * 8 * 256 * KV), "full": (5, 5 * 2 * 512 * 2)},
    ),
    "gemma-4-E2B, 20 layers share": (
        GEMMA4_E2B,
        {"window-512": (12, 12 * 1 * 256 * KV), "full": (3, 3 * 1 * 512 * KV)},
    ),
    "MiMo-V2-Flash, window of 128 tokens and the query": (
        MIMO_V2_FLASH,
        {"window-129": (39, 39 * 8 * (192 + 128) * 2), "full": (9, 9 * 4 * (192 + 128) * 2)},
    ),
    "Llama-4-Scout": (
        LLAMA4_SCOUT,
        {"chunk-8192": (36, 36 * 8 * 128 * KV), "full": (12, 12 * 8 * 128 * KV)},
    ),
    "DeepSeek-V3.2": (DEEPSEEK_V32, {"full": (61, 61 * ((512 + 64) * 2 + 128 + 4))}),
    "GLM-5": (GLM_5, {"full": (78, 78 * ((512 + 64) * 2 + 128 + 4))}),
    "GLM-5, an indexer in every fourth layer": (
        GLM_5 | {"index_topk_freq": 4, "index_skip_topk_offset": 1},
        {"full": (78, 78 * (512 + 64) * 2 + 20 * (128 + 4))},
    ),
    "DeepSeek-V4-Flash": (
        DEEPSEEK_V4_FLASH,
        {
            "state": (
                41,
                21 * 2 * 2 * (3 * 2 * 512 + 4 * 512 + 3 * 2 * 128 + 4 * 128) + 20 * 2 * 2 * 127 * 512,
            ),
            "window-128": (43, 43 * (448 + 64 * 2 + 8)),
            "full": (41, 21 * (584 + 132) // 4 + 20 * 584 // 128),
        },
    ),
    "Kimi-Linear-48B-A3B": (
        KIMI_LINEAR,
        {
            "state": (20, 20 * (3 * 32 * 128 * 3 * 2 + 32 * 128 * 128 * 4)),
            "full": (7, 7 * (512 + 64) * 2),
        },
    ),
    "Olmo-Hybrid-7B": (
        OLMO_HYBRID_7B,
        {
            "state": (24, 24 * ((2 * 30 * 96 + 30 * 192) * 3 * 2 + 30 * 96 * 192 * 4)),
            "full": (8, 8 * 30 * 128 * KV),
        },
    ),
    "MiniMax-Text-01": (
        MINIMAX_TEXT_01,
        {"state": (70, 70 * 64 * 128 * 128 * 4), "full": (10, 10 * 8 * 128 * KV)},
    ),
    "gemma-2-9b": (GEMMA2_9B, {"window-4096": (21, 21 * 8 * 256 * KV), "full": (21, 21 * 8 * 256 * KV)}),
    "gemma-3n-E4B, 15 layers share": (
        GEMMA3N_E4B,
        {"window-512": (16, 16 * 2 * 256 * KV), "full": (4, 4 * 2 * 256 * KV)},
    ),
    "Olmo-3-7B": (OLMO3_7B, {"window-4096": (24, 24 * 32 * 128 * KV), "full": (8, 8 * 32 * 128 * KV)}),
    "Command-R7B": (COMMAND_R7B, {"window-4096": (24, 24 * 8 * 128 * KV), "full": (8, 8 * 8 * 128 * KV)}),
    "LFM2-8B-A1B": (LFM2_8B_A1B, {"state": (18, 18 * 2048 * 2 * 2), "full": (6, 6 * 8 * 64 * KV)}),
    "GLM-4.5-Air": (GLM_45_AIR, {"full": (46, 46 * 8 * 128 * KV)}),
    "DeepSeek-V2-Lite": (DEEPSEEK_V2_LITE, {"full": (27, 27 * (512 + 64) * 2)}),
    "MiniMax-M3": (MINIMAX_M3, {"full": (60, 60 * 4 * 128 * KV + 57 * 128 * 2)}),
}
"""By model: its config, and for each band the layers in it and the payload bytes per token (per slot for state)."""
