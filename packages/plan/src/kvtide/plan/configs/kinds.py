"""Which layer is of which kind: the ways in which published configs say it, one function a way.

A finder takes a model and returns the kind of every layer, or raises a `ConfigError` that names the field.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from kvtide.plan.configs.fields import ConfigFields, shown
from kvtide.plan.configs.parts import HEAVY, SPARSE, TextModel, compress_rate


class LayerKind(enum.Enum):
    """What a layer is, as far as memory goes."""

    FULL = "full attention"
    WINDOW = "window attention"
    STATE = "recurrent state"
    CHUNK = "chunked-local attention"
    INDEXED = "full attention with an indexer"
    SPARSE_CHAIN = "window attention with a sparse compressed chain"
    HEAVY_CHAIN = "window attention with a heavily compressed chain"
    NOTHING = "nothing stored"


SPELLINGS = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
    "sliding_attention": LayerKind.WINDOW,
    "chunked_attention": LayerKind.CHUNK,
    "indexed_attention": LayerKind.INDEXED,
    "minimax_m3_sparse": LayerKind.INDEXED,
    "compressed_sparse_attention": LayerKind.SPARSE_CHAIN,
    "heavily_compressed_attention": LayerKind.HEAVY_CHAIN,
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
SourceFinder = Callable[[TextModel, tuple[LayerKind, ...]], Mapping[int, int]]


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
                f"{name}[{layer}]", f"must be one of {', '.join(SPELLINGS)}, found {shown(spelling)}"
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
            "hybrid_override_pattern", f"must be a string of the letters {letters}, found {shown(pattern)}"
        )
    if len(pattern) != model.layer_count:
        raise fields.error(
            "hybrid_override_pattern",
            f"names {len(pattern)} layers, but num_hidden_layers is {model.layer_count}",
        )
    return tuple(PATTERN_LETTERS[letter] for letter in pattern)


def by_flags(name: str, if_set: LayerKind, if_clear: LayerKind) -> KindFinder:
    """One kind for layers whose entry of the list `name` is 1, another for those of 0."""

    def find(model: TextModel) -> tuple[LayerKind, ...]:
        return _kinds_by_number(model, model.fields, name, {0: if_clear, 1: if_set})

    return find


def first_of(*finders: tuple[str, KindFinder]) -> KindFinder:
    """The finder of the first field that the config has; the last one where it has none."""

    def find(model: TextModel) -> tuple[LayerKind, ...]:
        found = next(
            (finder for name, finder in finders if model.fields.get(name) is not None), finders[-1][1]
        )
        return found(model)

    return find


def _kinds_by_number(
    model: TextModel, fields: ConfigFields, name: str, kinds: Mapping[int, LayerKind]
) -> tuple[LayerKind, ...]:
    numbers = fields.integers(name) or ()
    if len(numbers) < model.layer_count:
        raise fields.error(name, f"names {len(numbers)} layers, but num_hidden_layers is {model.layer_count}")
    for layer, number in enumerate(numbers):
        if number not in kinds:
            known = ", ".join(str(known) for known in kinds)
            raise fields.error(f"{name}[{layer}]", f"must be one of {known}, found {number}")
    # Lists of some files go on over the layers of a built-in draft.
    return tuple(kinds[number] for number in numbers[: model.layer_count])


def mimo_default(model: TextModel) -> tuple[LayerKind, ...]:
    """MiMo: full attention in the first layer and every sixth."""
    return tuple(
        LayerKind.FULL if not layer or not (layer + 1) % 6 else LayerKind.WINDOW
        for layer in range(model.layer_count)
    )


def llama4_kinds(model: TextModel) -> tuple[LayerKind, ...]:
    """Llama 4: layers without rotary embedding see everything, the others their own chunk."""
    if model.fields.get("attention_chunk_size") is None:
        return (LayerKind.FULL,) * model.layer_count
    return first_of(
        ("layer_types", always_listed),
        ("no_rope_layers", by_flags("no_rope_layers", LayerKind.CHUNK, LayerKind.FULL)),
        ("no_rope_layer_interval", full_every("no_rope_layer_interval", LayerKind.CHUNK)),
    )(model)


def gemma4_kinds(model: TextModel) -> tuple[LayerKind, ...]:
    """Gemma 4: windows with full attention in every sixth layer, and always in the last."""
    if model.fields.get("use_bidirectional_attention") == "all":
        raise model.fields.error(
            "use_bidirectional_attention", "is 'all': an encoder attends both ways and keeps no KV"
        )
    kinds = full_every("sliding_window_pattern", LayerKind.WINDOW)(model)
    return (*kinds[:-1], LayerKind.FULL)


def last_layers_share(model: TextModel, kinds: tuple[LayerKind, ...]) -> Mapping[int, int]:
    """Gemma 4: the last `num_kv_shared_layers` use the last layer of their kind before them."""
    fields = model.fields
    first = len(kinds) - fields.not_negative("num_kv_shared_layers")
    last_of = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    for layer in range(max(first, 0), len(kinds)):
        if kinds[layer] not in last_of:
            raise fields.error(
                "num_kv_shared_layers",
                f"= {len(kinds) - first} leaves layer {layer} no {kinds[layer].value} to share",
            )
    return {layer: last_of[kinds[layer]] for layer in range(max(first, 0), len(kinds))}


def glm_indexers(model: TextModel) -> tuple[LayerKind, ...]:
    """GLM 5: an indexer in every layer, or only where `indexer_types` (pattern, frequency) says; others reuse its choice."""
    fields = model.fields
    pattern = fields.get("index_topk_pattern")
    listed = fields.strings("indexer_types") if not isinstance(pattern, str) else tuple(pattern)
    letters = {
        "full": LayerKind.INDEXED,
        "shared": LayerKind.FULL,
        "F": LayerKind.INDEXED,
        "S": LayerKind.FULL,
    }
    if listed is None:
        every, offset = fields.positive("index_topk_freq"), fields.not_negative("index_skip_topk_offset")
        listed = tuple(
            "shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(model.layer_count)
        )
    if len(listed) != model.layer_count:
        raise fields.error(
            "indexer_types", f"names {len(listed)} layers, but num_hidden_layers is {model.layer_count}"
        )
    for layer, kind in enumerate(listed):
        if kind not in letters:
            raise fields.error(f"indexer_types[{layer}]", f"must be full or shared, found {shown(kind)}")
    return tuple(letters[kind] for kind in listed)


def kimi_kinds(model: TextModel) -> tuple[LayerKind, ...]:
    """Kimi Linear: `linear_attn_config` counts layers from 1; newer files list them; else every fourth from the fifth."""
    linear = model.fields.nested("linear_attn_config")
    full, states = linear.integers("full_attn_layers"), linear.integers("kda_layers")
    if full is None or states is None:
        if (listed := listed_kinds(model)) is not None:
            return listed
        return tuple(
            LayerKind.FULL if layer and layer % 4 == 0 else LayerKind.STATE
            for layer in range(model.layer_count)
        )
    if sorted((*full, *states)) != list(range(1, model.layer_count + 1)):
        raise linear.error(
            "full_attn_layers",
            f"and kda_layers must name every layer of 1 to {model.layer_count} once between them",
        )
    return tuple(
        LayerKind.FULL if layer + 1 in full else LayerKind.STATE for layer in range(model.layer_count)
    )


def minimax_m3_kinds(model: TextModel) -> tuple[LayerKind, ...]:
    """MiniMax M3: an indexer in the layers whose `sparse_attention_freq` is set."""
    sparse = model.fields.nested("sparse_attention_config")
    if sparse.get("sparse_attention_freq") is not None:
        flags = {0: LayerKind.FULL, 1: LayerKind.INDEXED}
        return _kinds_by_number(model, sparse, "sparse_attention_freq", flags)
    return listed_kinds(model) or (LayerKind.FULL,) * model.layer_count


def v4_kinds(model: TextModel) -> tuple[LayerKind, ...]:
    """DeepSeek V4: by stride, 0 for a window alone; lists go on over the layers of the built-in draft."""
    fields = model.fields
    if fields.get("compress_ratios") is None:
        return always_listed(model)
    strides = {
        0: LayerKind.WINDOW,
        compress_rate(model, SPARSE): LayerKind.SPARSE_CHAIN,
        compress_rate(model, HEAVY): LayerKind.HEAVY_CHAIN,
    }
    return _kinds_by_number(model, fields, "compress_ratios", strides)


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
