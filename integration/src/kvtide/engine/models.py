"""The models that the demo and the tests run: small enough for one core, of the architectures that matter.

| name | layers | weights |
| - | - | - |
| gemma3 | 4 window (16) and 2 full | trained, bytes in and out |
| qwen3_5 | 6 gated delta net and 2 full | trained, bytes in and out |
| llama | 4 full | random |
| gpt_oss | 2 window (16) and 2 full, with sinks; experts | random |
| deepseek_v3 | 4 MLA; experts | random |
| falcon_h1 | 4 with Mamba-2 and full attention in each | random |
| granitemoehybrid | 4 Mamba-2 and 2 full; experts | random |
| lfm2 | 3 short convolutions and 1 full | random |
| bamba | 2 Mamba-2 and 2 full | random |
| nemotron_h | 2 Mamba-2, 1 full, 1 with neither | random |
| qwen3_next | 2 gated delta net and 2 full; experts | random |
| llama4 | 3 chunked-local (32) and 1 full; experts | random |

The demo serves the last five only if they are named.

Random weights are drawn wider than a fresh model's, whose greedy output repeats one token: equal tokens would then prove
little. The trained ones come from `tools/train_tiny.py` and lie beside this module in bf16; they run in fp32 like the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvtide.engine.runner import Hook, hooks_of

TRAINED = Path(__file__).parent / "trained"
"""One folder a trained model: `config.json`, `model.safetensors`."""

RANDOM_VOCABULARY = 199
"""Tokens of the random-weight models."""


@attrs.frozen(kw_only=True)
class DemoModel:
    """One model by name, not loaded yet."""

    name: str
    """Name in `MODELS`."""

    title: str
    """For people: family and what its layers keep."""

    load: Callable[[], PreTrainedModel]
    """The model in fp32, eager, ready to run; the same weights every time."""

    hooks: tuple[Hook, ...]
    """Ways it can be run."""

    is_text: bool
    """Whether a token is a byte of ASCII text, which the model was trained on."""

    is_asked_for: bool = False
    """Whether the demo serves it only if it is named: what it shows others show too."""


def load_trained(folder: Path) -> PreTrainedModel:
    """The model that `tools/train_tiny.py` saved in `folder`, in fp32."""
    return _ready(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    )


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model of random weights, wide enough that its greedy output varies; the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers
            config, dtype=torch.float32, attn_implementation="eager"
        )
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "conv" not in name:
                torch.nn.init.normal_(parameter, std=0.25 if parameter.shape[-1] <= 128 else 0.1)
    return _ready(model)


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    model.eval()  # type: ignore[no-untyped-call]  # transformers
    model.requires_grad_(False)
    return model


_COMMON: Mapping[str, object] = {
    "vocab_size": RANDOM_VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "num_attention_heads": 4,
}
_MAMBA: Mapping[str, object] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
_EXPERTS: Mapping[str, object] = {"num_local_experts": 4, "num_experts_per_tok": 2}

_RANDOM: Mapping[str, Mapping[str, object]] = {
    "llama": {"model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": 131_072,  # what the default YaRN factor of 32 stretches 4,096 to
        **_EXPERTS,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_d_ssm": 128,
        **_MAMBA,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "layer_types": ["mamba", "mamba", "attention"] * 2,
        "mamba_expand": 2,
        "shared_intermediate_size": 32,
        **_MAMBA,
        **_EXPERTS,
    },
    "lfm2": {
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "conv_L_cache": 6,  # a state that is worth as much beside its pages as a real model's
    },
    "bamba": {
        "model_type": "bamba",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "attn_layer_indices": [1, 3],
        "mamba_expand": 2,
        **_MAMBA,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hybrid_override_pattern": "M-*M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "chunk_size": 16,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "llama4": {
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_chunk_size": 32,
        "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
    },
}


def _load_random(name: str) -> PreTrainedModel:
    settings: dict[str, Any] = {**_COMMON, **_RANDOM[name]}
    return random_model(CONFIG_MAPPING[settings.pop("model_type")](**settings))


def _random(name: str, title: str, *, is_asked_for: bool = False) -> DemoModel:
    return DemoModel(
        name=name,
        title=title,
        load=functools.partial(_load_random, name),
        hooks=hooks_of(str(_RANDOM[name]["model_type"])),
        is_text=False,
        is_asked_for=is_asked_for,
    )


def _trained(name: str, model_type: str, title: str) -> DemoModel:
    return DemoModel(
        name=name,
        title=title,
        load=functools.partial(load_trained, TRAINED / name),
        hooks=hooks_of(model_type),
        is_text=True,
    )


MODELS: Mapping[str, DemoModel] = {
    model.name: model
    for model in (
        _trained("gemma3", "gemma3_text", "Gemma 3: window and full attention"),
        _trained("qwen3_5", "qwen3_5_text", "Qwen3.5: gated delta net and full attention"),
        _random("llama", "Llama: full attention"),
        _random("gpt_oss", "gpt-oss: window and full attention with sinks"),
        _random("deepseek_v3", "DeepSeek-V3: latent attention (MLA)"),
        _random("falcon_h1", "Falcon-H1: Mamba-2 and attention in each layer"),
        _random("granitemoehybrid", "Granite 4 hybrid: Mamba-2 layers and attention layers"),
        _random("lfm2", "LFM2: short convolutions and attention layers", is_asked_for=True),
        _random("bamba", "Bamba: Mamba-2 layers and attention layers", is_asked_for=True),
        _random("nemotron_h", "Nemotron-H: Mamba-2, attention and plain layers", is_asked_for=True),
        _random("qwen3_next", "Qwen3-Next: gated delta net and attention layers", is_asked_for=True),
        _random("llama4", "Llama 4: chunked-local and full attention", is_asked_for=True),
    )
}
"""By name, in the order in which they are shown."""
