"""From a Hugging Face `config.json` to layer declarations (row P7).

    declarations = from_config(json.loads(path.read_text()))

What comes out is what serving stacks store, one declaration a layer of the model itself. Layers of a built-in draft
(`num_nextn_predict_layers`, `mtp_*`) are not declared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvtide.plan.checks import check_positive
from kvtide.plan.configs.families import FAMILIES, Family
from kvtide.plan.configs.fields import LAYER_LIMIT, ConfigError, ConfigFields, shown
from kvtide.plan.configs.kinds import LayerKind
from kvtide.plan.configs.parts import TextModel
from kvtide.plan.configs.split import TensorSplit
from kvtide.plan.decl import KVLayerDecl, KVPart
from kvtide.plan.dtypes import DType
from kvtide.plan.errors import PlanError
from kvtide.plan.formats import KV_FORMATS, KVFormat
from kvtide.plan.stages import split_stages

KNOWN_MODEL_TYPES: tuple[str, ...] = tuple(sorted(FAMILIES))
"""Every `model_type` that `from_config` reads."""


def from_config(
    config: Mapping[str, Any],
    *,
    kv_dtype: DType | KVFormat | None = None,
    equal_kv_once: bool = True,
    checkpoint_interval: int | None = None,
    tp_size: int = 1,
    pp_size: int = 1,
    pp_rank: int = 0,
) -> tuple[KVLayerDecl, ...]:
    """The declarations of the layers of the model that `config` describes, as one rank holds them.

    Args:
        config: the parsed file; where it nests its text model as `text_config`, that is what counts.
        kv_dtype: how attention entries are stored, an element type or one of `KV_FORMATS`; by default in the config's own
            element type, bfloat16 where it names none, and a row of DeepSeek V4 in the form that its kernels read.
        equal_kv_once: whether a model whose values are its keys (Gemma 4's `attention_k_eq_v`) stores them once; kernels
            that know no such thing store both, and so does transformers.
        checkpoint_interval: tokens between the states that a prefix cache may keep; `None` without checkpoints.
        tp_size: ranks that split every layer by heads. Key-value heads are copied where ranks outnumber them; latents and
            indexer keys lie whole on every rank.
        pp_size: pipeline stages, as `split_stages` cuts them.
        pp_rank: the stage whose layers are wanted.

    Raises:
        ConfigError: one line naming field and value, for an unknown `model_type`, fields that are missing or make no sense,
            and heads that `tp_size` does not split.
        PlanError: stages that cannot be cut so.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"a config must be a JSON object, found {type(config).__name__}")
    check_positive("tp_size", tp_size)
    check_positive("pp_size", pp_size)
    if isinstance(pp_rank, bool) or not isinstance(pp_rank, int) or not 0 <= pp_rank < pp_size:
        raise PlanError(f"pp_rank must lie in [0, pp_size = {pp_size}), found {pp_rank!r}")
    fields = _text_fields(config)
    family, fields = _with_family(fields, config)
    dtype = (
        fields.dtype("dtype", "torch_dtype")
        or ConfigFields(config).dtype("dtype", "torch_dtype")
        or DType.BFLOAT16
    )
    model = TextModel(
        fields=fields,
        layer_count=_layer_count(fields),
        kv_format=_kv_format(kv_dtype, family, dtype),
        dtype=dtype,
        split=TensorSplit(fields, tp_size),
        equal_kv_once=equal_kv_once,
        checkpoint_interval=checkpoint_interval,
    )
    kinds = family.kinds(model)
    stored: dict[tuple[LayerKind, str], tuple[KVPart, ...]] = {}
    sources = family.sources(model, kinds) if family.sources else {}
    layer_values = _layer_values(fields)
    decls = []
    for layer, kind in enumerate(kinds):
        if layer in sources:
            decls.append(KVLayerDecl(layer, (), shares_layer=sources[layer]))
            continue
        own = layer_values.get(layer, {})
        # Layers of a kind are alike but for what the file says of each, and there are few such differences.
        alike = (kind, repr(sorted(own.items())))
        if alike not in stored:
            stored[alike] = _parts(model.with_layer_values(own), family, kind)
        decls.append(KVLayerDecl(layer, stored[alike]))
    return split_stages(decls, pp_size)[pp_rank]


def _layer_values(fields: ConfigFields) -> Mapping[int, Mapping[str, Any]]:
    """What `per_layer_config`, as transformers writes it since 5, says of its layers; keys are numbers, padded with zeros."""
    per_layer = fields.nested("per_layer_config")
    for name in per_layer.values:
        if not (isinstance(name, str) and name.isascii() and name.isdecimal() and len(name) < 10):
            raise fields.error("per_layer_config", f"must name layers by number, found {shown(name)}")
    return {int(name): per_layer.nested(name).values for name in per_layer.values}


def _kv_format(kv_dtype: DType | KVFormat | None, family: Family, dtype: DType) -> KVFormat:
    if isinstance(kv_dtype, KVFormat):
        return kv_dtype
    if kv_dtype is None and family.kv_format is not None:
        return KV_FORMATS[family.kv_format]
    return KVFormat.plain(kv_dtype or dtype)


def _text_fields(config: Mapping[str, Any]) -> ConfigFields:
    text = config.get("text_config")
    if text is None:
        return ConfigFields(config)
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config must be a JSON object, found {type(text).__name__}")
    return ConfigFields(text, "text_config.")


def _with_family(fields: ConfigFields, config: Mapping[str, Any]) -> tuple[Family, ConfigFields]:
    model_type = fields.get("model_type") or config.get("model_type")
    if model_type is None:
        raise ConfigError("model_type is missing: the config does not say which family it describes")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConfigError(
            f"model_type {shown(model_type)} is not known; known are {', '.join(KNOWN_MODEL_TYPES)}; any other model can be "
            "declared by hand, layer by layer: KVLayerDecl(0, (KVPart(MHAGeometry(8, 128, 128, DType.BFLOAT16), "
            "FullLifetime()),))"
        )
    return family, attrs.evolve(fields, defaults=family.defaults)


def _layer_count(fields: ConfigFields) -> int:
    """`num_hidden_layers`; Nemotron-H's newer configs leave it to the length of their layer list."""
    listed = fields.strings("layers_block_type")
    if fields.get("num_hidden_layers") is None and listed:
        return len(listed)
    return fields.positive("num_hidden_layers", limit=LAYER_LIMIT)


def _parts(model: TextModel, family: Family, kind: LayerKind) -> tuple[KVPart, ...]:
    makers = family.makers.get(kind)
    if makers is None:
        known = ", ".join(known.value for known in family.makers)
        raise model.fields.error("layer_types", f"asks for {kind.value}; this family has {known}")
    return tuple(make(model) for make in makers)


__all__ = ["KNOWN_MODEL_TYPES", "ConfigError", "from_config"]
