"""Models to plan for: published configs where the optional folder has them, and one of each kind of chain built by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from kvtide.plan import (
    KV_FORMATS,
    ChunkLifetime,
    CompressedGeometry,
    DType,
    FullLifetime,
    Geometry,
    IndexerKeys,
    KVLayerDecl,
    KVPart,
    Lifetime,
    MHAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
    from_config,
)

SHARED_CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "data" / "configs"

Models: TypeAlias = Mapping[str, tuple[KVLayerDecl, ...]]
"""Layers by model."""

CHECKPOINT_INTERVAL = 1024
"""Of every model with state: a multiple of every page that is tried."""

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt-oss of 24 layers": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "Mistral 7B v0.1": {
        "model_type": "mistral",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "Qwen3-Next 80B": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "Gemma 3 27B": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "head_dim": 128,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
    },
}
"""What counts of some published configs, by model."""


def published_configs() -> dict[str, dict[str, Any]]:
    """Every `config.json` of the optional folder beside the repository, by `organisation/model`; none where it is missing."""
    files = sorted(SHARED_CONFIGS.glob("*.json"))
    return {file.stem.replace("--", "/"): json.loads(file.read_text(encoding="utf-8")) for file in files}


def published_models() -> Models:
    """Their layers."""
    return {
        name: from_config(config, checkpoint_interval=CHECKPOINT_INTERVAL)
        for name, config in published_configs().items()
    }


def built_by_hand() -> Models:
    """One model of each kind of chain: ends alone, one float, two; with and without an owner, state, and entries of odd sizes."""
    heads = MHAGeometry(8, 128, 128, DType.BFLOAT16)
    small_heads = MHAGeometry(8, 64, 64, DType.BFLOAT16)
    few_heads = MHAGeometry(2, 256, 256, DType.BFLOAT16)
    fp4_heads = KV_FORMATS["nvfp4"].mha(3, 80, 80)
    latent = KV_FORMATS["fp8_ds_mla"].mla(512, 64, indexer=IndexerKeys(128, DType.FLOAT8_E4M3, DType.FLOAT32))
    row = KV_FORMATS["fp8_ds_v4"].mla(448, 64)
    delta = StateGeometry(
        (
            TensorDecl("conv", (8192, 3), DType.BFLOAT16),
            TensorDecl("recurrent", (32, 128, 128), DType.FLOAT32),
        )
    )
    small_state = StateGeometry((TensorDecl("conv", (1000, 3), DType.BFLOAT16),))
    state, full = StateLifetime(CHECKPOINT_INTERVAL), FullLifetime()
    model = _model_of
    return {
        "full": model((32, heads, full)),
        "full of four bits": model((33, fp4_heads, full)),
        "latents and indexer keys": model((61, latent, full)),
        "window and full": model((12, small_heads, WindowLifetime(128)), (12, small_heads, full)),
        "two windows and full": model(
            (6, heads, WindowLifetime(4096)), (20, fp4_heads, WindowLifetime(512)), (4, few_heads, full)
        ),
        "chunks and full": model((36, heads, ChunkLifetime(8192)), (12, heads, full)),
        "a window alone": model((32, heads, WindowLifetime(4096))),
        "two windows alone": model((8, heads, WindowLifetime(8192)), (24, small_heads, WindowLifetime(1000))),
        "state alone": model((48, delta, state)),
        "state and full": model((36, delta, state), (12, few_heads, full)),
        "small state, window and full": model(
            (20, small_state, state), (20, heads, WindowLifetime(1024)), (5, few_heads, full)
        ),
        "state, two windows and full": model(
            (10, delta, state),
            (4, few_heads, WindowLifetime(2048)),
            (9, fp4_heads, WindowLifetime(300)),
            (5, heads, full),
        ),
        "compressed": model(
            (43, small_state, state),
            (43, row, WindowLifetime(128)),
            (21, CompressedGeometry(row, 4), full),
            (20, CompressedGeometry(row, 128), full),
        ),
        "shared layers": (
            *model((12, few_heads, WindowLifetime(512)), (3, few_heads, full)),
            *(KVLayerDecl(15 + layer, (), shares_layer=layer % 15) for layer in range(20)),
        ),
    }


def _model_of(*parts: tuple[int, Geometry, Lifetime]) -> tuple[KVLayerDecl, ...]:
    """So many layers of each geometry and lifetime, one behind another."""
    layers = [KVPart(geometry, lifetime) for count, geometry, lifetime in parts for _ in range(count)]
    return tuple(KVLayerDecl(layer, (part,)) for layer, part in enumerate(layers))
