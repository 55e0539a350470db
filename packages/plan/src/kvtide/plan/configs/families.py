"""The model families that a config is read for: one row a `model_type`.

A row says how the kinds of the layers are found, what a layer of each kind stores, and which values published configs leave
out. A new family whose parts exist is a new row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from kvtide.plan.configs import parts
from kvtide.plan.configs.kinds import (
    KindFinder,
    LayerKind,
    SourceFinder,
    always_listed,
    by_flags,
    by_pattern,
    causal_windows,
    every_layer,
    first_of,
    full_at,
    full_by_period_and_offset,
    full_every,
    gemma4_kinds,
    glm_indexers,
    kimi_kinds,
    last_layers_share,
    llama4_kinds,
    mimo_default,
    minimax_m3_kinds,
    only_softmax,
    v4_kinds,
    window_where_set,
    window_where_switched_on,
)
from kvtide.plan.configs.parts import TextModel
from kvtide.plan.decl import KVPart

PartMaker = Callable[[TextModel], KVPart]


@attrs.frozen(kw_only=True)
class Family:
    """How one `model_type` is read."""

    kinds: KindFinder
    """The kind of every layer."""

    makers: Mapping[LayerKind, tuple[PartMaker, ...]]
    """What a layer of a kind stores; asked only for kinds that occur."""

    defaults: Mapping[str, int] = attrs.field(factory=dict)
    """Values of fields that published configs leave out."""

    sources: SourceFinder | None = None
    """Layers that use another's entries, and whose; `None` in families that do not."""

    kv_format: str | None = None
    """Name of the format in which its kernels store entries, whatever the weights' type; `None` for the config's own type."""


_FULL_MHA = {LayerKind.FULL: (parts.full_mha,)}
_MHA = {LayerKind.FULL: (parts.full_mha,), LayerKind.WINDOW: (parts.window_mha,)}

LLAMA = Family(kinds=every_layer(LayerKind.FULL), makers=_FULL_MHA)
MISTRAL = Family(kinds=window_where_set, makers=_MHA, defaults={"sliding_window": 4096})
MIXTRAL = Family(kinds=window_where_set, makers=_MHA)
QWEN2 = Family(kinds=window_where_switched_on, makers=_MHA)
QWEN3 = Family(kinds=window_where_switched_on, makers=_MHA, defaults={"head_dim": 128})
QWEN3_MOE = Family(kinds=window_where_switched_on, makers=_MHA, defaults={"max_window_layers": 0})
MINIMAX_M2 = Family(kinds=only_softmax, makers=_FULL_MHA)
GEMMA3 = Family(
    kinds=causal_windows,
    makers=_MHA,
    defaults={
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
)
GEMMA2 = Family(
    kinds=full_every("sliding_window_pattern", LayerKind.WINDOW),
    makers=_MHA,
    defaults={"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "sliding_window_pattern": 2},
)
GEMMA3N = Family(
    kinds=full_every("sliding_window_pattern", LayerKind.WINDOW),
    makers=_MHA,
    defaults={
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 15,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
    },
    sources=last_layers_share,
)
WINDOWS_AND_EVERY_FOURTH_FULL = Family(
    kinds=full_every("sliding_window_pattern", LayerKind.WINDOW),
    makers=_MHA,
    defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
)
GPT_OSS = Family(
    kinds=full_every("sliding_window_pattern", LayerKind.WINDOW),
    makers=_MHA,
    defaults={"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
)
DEEPSEEK_V3 = Family(kinds=every_layer(LayerKind.FULL), makers={LayerKind.FULL: (parts.full_mla,)})
GATED_DELTA = Family(
    kinds=full_every("full_attention_interval", LayerKind.STATE),
    makers=_FULL_MHA | {LayerKind.STATE: (parts.gated_delta_net,)},
    defaults={
        "full_attention_interval": 4,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
)
FALCON_H1 = Family(
    kinds=every_layer(LayerKind.FULL),
    makers={LayerKind.FULL: (parts.full_mha, parts.mamba2)},
)
GRANITE_HYBRID = Family(kinds=always_listed, makers=_FULL_MHA | {LayerKind.STATE: (parts.mamba2,)})
BAMBA = Family(kinds=full_at("attn_layer_indices"), makers=_FULL_MHA | {LayerKind.STATE: (parts.mamba2,)})
NEMOTRON_H = Family(
    kinds=by_pattern,
    makers=_FULL_MHA | {LayerKind.STATE: (parts.mamba2_nemotron,), LayerKind.NOTHING: ()},
    defaults={"head_dim": 128},
)
JAMBA = Family(
    kinds=full_by_period_and_offset,
    makers=_FULL_MHA | {LayerKind.STATE: (parts.mamba1,)},
    defaults={
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
    },
)
LFM2 = Family(
    kinds=full_at("full_attn_idxs"),
    makers=_FULL_MHA | {LayerKind.STATE: (parts.short_conv,)},
    defaults={"conv_L_cache": 3},
)

MIMO_V2 = Family(
    kinds=first_of(
        ("hybrid_layer_pattern", by_flags("hybrid_layer_pattern", LayerKind.WINDOW, LayerKind.FULL)),
        ("layer_types", always_listed),
        ("", mimo_default),
    ),
    makers={LayerKind.FULL: (parts.mimo_full,), LayerKind.WINDOW: (parts.mimo_window,)},
    defaults={"head_dim": 192, "v_head_dim": 128, "num_key_value_heads": 4},
)
LLAMA4 = Family(
    kinds=llama4_kinds,
    makers=_FULL_MHA | {LayerKind.CHUNK: (parts.chunk_mha,)},
    defaults={"head_dim": 128, "num_key_value_heads": 8, "no_rope_layer_interval": 4},
)
GEMMA4 = Family(
    kinds=gemma4_kinds,
    makers={LayerKind.FULL: (parts.gemma4_full,), LayerKind.WINDOW: (parts.window_mha,)},
    defaults={
        "head_dim": 256,
        "global_head_dim": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_kv_shared_layers": 0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    sources=last_layers_share,
)
DEEPSEEK_V32 = Family(
    kinds=every_layer(LayerKind.INDEXED),
    makers={LayerKind.INDEXED: (parts.full_mla_indexed,)},
    defaults={"index_head_dim": 128},
)
GLM_DSA = Family(
    kinds=glm_indexers,
    makers={LayerKind.INDEXED: (parts.full_mla_indexed,), LayerKind.FULL: (parts.full_mla,)},
    defaults={"index_head_dim": 128, "index_topk_freq": 1, "index_skip_topk_offset": 2},
)
DEEPSEEK_V4 = Family(
    kinds=v4_kinds,
    makers={
        LayerKind.WINDOW: (parts.v4_window,),
        LayerKind.SPARSE_CHAIN: (parts.v4_window, parts.v4_sparse_chain, parts.v4_sparse_tail),
        LayerKind.HEAVY_CHAIN: (parts.v4_window, parts.v4_heavy_chain, parts.v4_heavy_tail),
    },
    defaults={"index_head_dim": 128, "sliding_window": 128, "compress_rate_csa": 4, "compress_rate_hca": 128},
    kv_format="fp8_ds_v4",
)
KIMI_LINEAR = Family(
    kinds=kimi_kinds,
    makers={LayerKind.FULL: (parts.full_mla,), LayerKind.STATE: (parts.kimi_delta_attention,)},
    defaults={"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4},
)
OLMO_HYBRID = Family(
    kinds=full_every("full_attention_interval", LayerKind.STATE),
    makers=_FULL_MHA | {LayerKind.STATE: (parts.olmo_delta_net,)},
    defaults={"full_attention_interval": 4, "linear_conv_kernel_dim": 4},
)
MINIMAX_M3 = Family(kinds=minimax_m3_kinds, makers=_FULL_MHA | {LayerKind.INDEXED: (parts.full_mha_indexed,)})
MINIMAX = Family(
    kinds=first_of(
        ("attn_type_list", by_flags("attn_type_list", LayerKind.FULL, LayerKind.STATE)),
        ("layer_types", always_listed),
    ),
    makers=_FULL_MHA | {LayerKind.STATE: (parts.lightning,)},
)

FAMILIES: Mapping[str, Family] = {
    "bamba": BAMBA,
    "cohere2": WINDOWS_AND_EVERY_FOURTH_FULL,
    "deepseek_v2": DEEPSEEK_V3,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v4": DEEPSEEK_V4,
    "falcon_h1": FALCON_H1,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "gemma3n": GEMMA3N,
    "gemma3n_text": GEMMA3N,
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4,
    "glm4_moe": LLAMA,
    "glm_moe_dsa": GLM_DSA,
    "gpt_oss": GPT_OSS,
    "granitemoehybrid": GRANITE_HYBRID,
    "jamba": JAMBA,
    "kimi_k2": DEEPSEEK_V3,
    "kimi_linear": KIMI_LINEAR,
    "lfm2": LFM2,
    "lfm2_moe": LFM2,
    "llama": LLAMA,
    "llama4": LLAMA4,
    "llama4_text": LLAMA4,
    "mimo_v2_flash": MIMO_V2,
    "minimax": MINIMAX,
    "minimax_m2": MINIMAX_M2,
    "minimax_m3": MINIMAX_M3,
    "minimax_m3_vl": MINIMAX_M3,
    "minimax_m3_vl_text": MINIMAX_M3,
    "minimax_text_01": MINIMAX,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "nemotron_h": NEMOTRON_H,
    "olmo3": WINDOWS_AND_EVERY_FOURTH_FULL,
    "olmo_hybrid": OLMO_HYBRID,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_5": GATED_DELTA,
    "qwen3_5_moe": GATED_DELTA,
    "qwen3_5_moe_text": GATED_DELTA,
    "qwen3_5_text": GATED_DELTA,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": GATED_DELTA,
}
"""By `model_type`, the nested text model's spelling and the whole model's."""
