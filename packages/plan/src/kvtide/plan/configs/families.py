"""The model families that a config is read for: one row a `model_type`.

A row says how the kinds of the layers are found, what a layer of each kind stores, and which values published configs leave
out. A new family whose parts exist is a new row.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

import attrs

from kvtide.plan.configs import parts
from kvtide.plan.configs.parts import TextModel
from kvtide.plan.decl import KVPart


class LayerKind(enum.Enum):
    """What a layer is, as far as memory goes."""

    FULL = "full attention"
    WINDOW = "window attention"
    STATE = "recurrent state"
    NOTHING = "nothing stored"


SPELLINGS = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
    "sliding_attention": LayerKind.WINDOW,
    "linear_attention": LayerKind.STATE,
    "mamba": LayerKind.STATE,
    "conv": LayerKind.STATE,
    "moe": LayerKind.NOTHING,
    "mlp": LayerKind.NOTHING,
}
"""Entries of `layer_types` lists, old and new spelling."""

PATTERN_LETTERS = {
    "*": LayerKind.FULL,
    "M": LayerKind.STATE,
    "E": LayerKind.NOTHING,
    "-": LayerKind.NOTHING,
}
"""Letters of `hybrid_override_pattern`."""

KindFinder = Callable[[TextModel], tuple[LayerKind, ...]]
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


def every_layer(kind: LayerKind) -> KindFinder:
    """All layers alike."""
    return lambda model: (kind,) * model.layer_count


def listed_kinds(model: TextModel) -> tuple[LayerKind, ...] | None:
    """The kinds that `layer_types` (or its older name) lists, `None` where the config has no such list."""
    fields = model.fields
    name = next((name for name in ("layer_types", "layers_block_type") if fields.get(name) is not None), None)
    listed = fields.strings(name) if name else None
    if name is None or listed is None:
        return None
    if len(listed) != model.layer_count:
        raise fields.error(name, f"names {len(listed)} layers, but num_hidden_layers is {model.layer_count}")
    for layer, spelling in enumerate(listed):
        if spelling not in SPELLINGS:
            raise fields.error(
                f"{name}[{layer}]", f"must be one of {', '.join(SPELLINGS)}, found {spelling!r}"
            )
    return tuple(SPELLINGS[spelling] for spelling in listed)


def window_where_set(model: TextModel) -> tuple[LayerKind, ...]:
    """The list, else one window for all layers where `sliding_window` is set, else full attention."""
    if (listed := listed_kinds(model)) is not None:
        return listed
    windowed = model.fields.get("sliding_window") is not None and not model.fields.has_null("sliding_window")
    return (LayerKind.WINDOW if windowed else LayerKind.FULL,) * model.layer_count


def window_where_switched_on(model: TextModel) -> tuple[LayerKind, ...]:
    """Qwen: `sliding_window` counts only behind `use_sliding_window`, for the list or from layer `max_window_layers` on."""
    if not model.fields.flag("use_sliding_window") or model.fields.get("sliding_window") is None:
        return (LayerKind.FULL,) * model.layer_count
    if (listed := listed_kinds(model)) is not None:
        return listed
    first = model.fields.not_negative("max_window_layers")
    return tuple(LayerKind.FULL if layer < first else LayerKind.WINDOW for layer in range(model.layer_count))


def full_every(period_field: str, others: LayerKind) -> KindFinder:
    """The list, else full attention in the last layer of each period and `others` before it."""

    def find(model: TextModel) -> tuple[LayerKind, ...]:
        if (listed := listed_kinds(model)) is not None:
            return listed
        period = model.fields.positive(period_field)
        return tuple(others if (layer + 1) % period else LayerKind.FULL for layer in range(model.layer_count))

    return find


def full_at(indices_field: str) -> KindFinder:
    """The list, else full attention in the layers of `indices_field` and state in the others."""

    def find(model: TextModel) -> tuple[LayerKind, ...]:
        if (listed := listed_kinds(model)) is not None:
            return listed
        indices = model.fields.integers(indices_field)
        if indices is None:
            raise model.fields.error(indices_field, "is missing, and so is layer_types")
        for place, index in enumerate(indices):
            if index >= model.layer_count:
                raise model.fields.error(
                    f"{indices_field}[{place}]",
                    f"must be below num_hidden_layers = {model.layer_count}, found {index}",
                )
        return tuple(
            LayerKind.FULL if layer in indices else LayerKind.STATE for layer in range(model.layer_count)
        )

    return find


def full_by_period_and_offset(model: TextModel) -> tuple[LayerKind, ...]:
    """Jamba: full attention in layers that leave `attn_layer_offset` modulo `attn_layer_period`."""
    period = model.fields.positive("attn_layer_period")
    offset = model.fields.not_negative("attn_layer_offset")
    if offset >= period:
        raise model.fields.error(
            "attn_layer_offset", f"must be below attn_layer_period = {period}, found {offset}"
        )
    return tuple(
        LayerKind.FULL if layer % period == offset else LayerKind.STATE for layer in range(model.layer_count)
    )


def always_listed(model: TextModel) -> tuple[LayerKind, ...]:
    """The list, which has to be there."""
    if (listed := listed_kinds(model)) is None:
        raise model.fields.error("layer_types", "is missing")
    return listed


def by_pattern(model: TextModel) -> tuple[LayerKind, ...]:
    """Nemotron-H: one letter a layer, or the list that newer configs spell out."""
    fields = model.fields
    pattern = fields.get("hybrid_override_pattern")
    if pattern is None:
        return always_listed(model)
    if not isinstance(pattern, str) or not set(pattern) <= set(PATTERN_LETTERS):
        letters = " ".join(PATTERN_LETTERS)
        raise fields.error(
            "hybrid_override_pattern", f"must be a string of the letters {letters}, found {pattern!r}"
        )
    if len(pattern) != model.layer_count:
        raise fields.error(
            "hybrid_override_pattern",
            f"names {len(pattern)} layers, but num_hidden_layers is {model.layer_count}",
        )
    return tuple(PATTERN_LETTERS[letter] for letter in pattern)


def only_softmax(model: TextModel) -> tuple[LayerKind, ...]:
    """MiniMax M2: full attention throughout; the older series' lightning layers (type 0) store something else."""
    for layer, attention_type in enumerate(model.fields.integers("attn_type_list") or ()):
        if attention_type != 1:
            raise model.fields.error(
                f"attn_type_list[{layer}]", f"must be 1 (softmax), found {attention_type}"
            )
    return (LayerKind.FULL,) * model.layer_count


def causal_windows(model: TextModel) -> tuple[LayerKind, ...]:
    """Gemma 3: windows with full attention in every sixth layer; the bidirectional encoders keep no KV."""
    if model.fields.flag("use_bidirectional_attention"):
        raise model.fields.error(
            "use_bidirectional_attention", "is true: an encoder attends both ways and keeps no KV"
        )
    return full_every("sliding_window_pattern", LayerKind.WINDOW)(model)


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

FAMILIES: Mapping[str, Family] = {
    "bamba": BAMBA,
    "deepseek_v3": DEEPSEEK_V3,
    "falcon_h1": FALCON_H1,
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "gpt_oss": GPT_OSS,
    "granitemoehybrid": GRANITE_HYBRID,
    "jamba": JAMBA,
    "kimi_k2": DEEPSEEK_V3,
    "lfm2": LFM2,
    "llama": LLAMA,
    "minimax_m2": MINIMAX_M2,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "nemotron_h": NEMOTRON_H,
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
