"""From a Hugging Face `config.json` to layer declarations (row P7).

    declarations = from_config(json.loads(path.read_text()))

What comes out is what serving stacks store, one declaration a layer of the model itself. Layers of a built-in draft
(`num_nextn_predict_layers`, `mtp_*`) are not declared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvtide.plan.configs.families import FAMILIES, Family, LayerKind
from kvtide.plan.configs.fields import LAYER_LIMIT, ConfigError, ConfigFields
from kvtide.plan.configs.parts import TextModel
from kvtide.plan.decl import KVLayerDecl, KVPart
from kvtide.plan.dtypes import DType

KNOWN_MODEL_TYPES: tuple[str, ...] = tuple(sorted(FAMILIES))
"""Every `model_type` that `from_config` reads."""


def from_config(config: Mapping[str, Any], *, kv_dtype: DType | None = None) -> tuple[KVLayerDecl, ...]:
    """The declarations of every layer of the model that `config` describes.

    `config` is the parsed file; where it nests its text model as `text_config`, that is what counts. Attention entries are
    stored as `kv_dtype`, by default in the config's own element type, bfloat16 where it names none. Raises `ConfigError`, one
    line naming field and value, for an unknown `model_type` and for fields that are missing or make no sense.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"a config must be a JSON object, found {type(config).__name__}")
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
        kv_dtype=kv_dtype or dtype,
        dtype=dtype,
    )
    kinds = family.kinds(model)
    stored = {kind: _parts(model, family, kind) for kind in dict.fromkeys(kinds)}
    return tuple(KVLayerDecl(layer, stored[kind]) for layer, kind in enumerate(kinds))


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
            f"model_type {model_type!r} is not known; known are {', '.join(KNOWN_MODEL_TYPES)}; any other model can be "
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
