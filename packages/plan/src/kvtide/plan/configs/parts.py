"""What layers of each kind store, read off config fields: attention with its lifetimes, and the recurrent states.

These are serving shapes. A causal convolution of `kernel` taps needs the `kernel - 1` inputs before the next token, so its
state keeps that many columns. Recurrent state accumulates over a whole request and is float32 unless the config names
another type; the convolution's inputs are activations and keep the model's type. DeepSeek's indexer keys are fp8 with one
float32 scale, whatever the entries beside them, as its kernels read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvtide.plan.configs.fields import ConfigFields
from kvtide.plan.configs.split import TensorSplit
from kvtide.plan.decl import KVPart
from kvtide.plan.dtypes import DType
from kvtide.plan.formats import KVFormat
from kvtide.plan.geometry import (
    CompressedGeometry,
    IndexerKeys,
    MHAGeometry,
    MLAGeometry,
    StateGeometry,
    TensorDecl,
)
from kvtide.plan.lifetime import ChunkLifetime, FullLifetime, StateLifetime, WindowLifetime


@attrs.frozen(kw_only=True)
class TextModel:
    """One model's fields and element types, as the part makers read them."""

    fields: ConfigFields
    """Checked access to the text config."""

    layer_count: int
    """Layers of the model, drafts not among them."""

    kv_format: KVFormat
    """How attention entries are stored."""

    dtype: DType
    """Element type of activations, which convolution states keep."""

    split: TensorSplit
    """What one rank holds."""

    equal_kv_once: bool
    """Whether a model whose values are its keys (K = V) stores them once."""

    checkpoint_interval: int | None
    """Tokens between states that a prefix cache may keep."""

    def with_layer_values(self, values: Mapping[str, Any]) -> TextModel:
        """The same model, as one of its layers is described."""
        fields = attrs.evolve(self.fields, layer_values=values)
        return attrs.evolve(self, fields=fields, split=attrs.evolve(self.split, fields=fields))

    def with_fields(self, name: str, defaults: dict[str, int]) -> TextModel:
        """The same model, reading the object `name` inside its config (Kimi's `linear_attn_config`)."""
        fields = attrs.evolve(self.fields.nested(name), defaults=defaults)
        return attrs.evolve(self, fields=fields, split=attrs.evolve(self.split, fields=fields))


# ── attention ──


def full_mha(model: TextModel) -> KVPart:
    """Keys and values of every token."""
    return KVPart(_mha(model), FullLifetime())


def full_mha_indexed(model: TextModel) -> KVPart:
    """The same, with one indexer key a token in the model's own type (MiniMax M3)."""
    sparse = model.fields.nested("sparse_attention_config")
    dim = sparse.optional_positive("sparse_index_dim") or model.fields.positive("index_head_dim")
    return KVPart(attrs.evolve(_mha(model), indexer=IndexerKeys(dim, model.dtype)), FullLifetime())


def window_mha(model: TextModel) -> KVPart:
    """Keys and values of the last `sliding_window` tokens; the field counts the query's own token."""
    return KVPart(_mha(model), WindowLifetime(model.fields.positive("sliding_window")))


def chunk_mha(model: TextModel) -> KVPart:
    """Keys and values of the current stretch of `attention_chunk_size` tokens (Llama 4)."""
    return KVPart(_mha(model), ChunkLifetime(model.fields.positive("attention_chunk_size")))


def mimo_full(model: TextModel) -> KVPart:
    """MiMo: values narrower than keys."""
    return KVPart(_mha(model, value_field="v_head_dim"), FullLifetime())


def mimo_window(model: TextModel) -> KVPart:
    """MiMo: windows have heads of their own, by default twice as many.

    `sliding_window_size` counts the tokens before the query; a config without it counts the query too.
    """
    fields = model.fields
    before = fields.optional_positive("sliding_window_size")
    window = fields.positive("sliding_window") if before is None else before + 1
    own = {"num_key_value_heads": 2 * fields.positive("num_key_value_heads")}
    for name in ("num_key_value_heads", "head_dim", "v_head_dim"):
        value = fields.optional_positive(f"swa_{name}")
        if value is not None:
            own[name] = value
    swa = model.with_layer_values({**own, **fields.layer_values})
    return KVPart(_mha(swa, value_field="v_head_dim"), WindowLifetime(window))


def gemma4_full(model: TextModel) -> KVPart:
    """Gemma 4's global layers: a head width of their own; where K = V, head count and tensor of their own too."""
    fields = model.fields
    equal = fields.flag("attention_k_eq_v")
    heads_field, width_field = "num_key_value_heads", "global_head_dim"
    if fields.is_layers_own("head_dim"):
        width_field = "head_dim"
    elif equal and fields.get("num_global_key_value_heads") is not None:
        heads_field = "num_global_key_value_heads"
    heads = model.split.or_copied(heads_field, fields.positive(heads_field))
    width = fields.positive(width_field)
    one_tensor = equal and model.equal_kv_once
    return KVPart(model.kv_format.mha(heads, width, width, one_tensor=one_tensor), FullLifetime())


def full_mla(model: TextModel) -> KVPart:
    """The compressed latent of every token, with its rotary key; every rank holds it whole."""
    return KVPart(_mla(model), FullLifetime())


def full_mla_indexed(model: TextModel) -> KVPart:
    """The same, with one indexer key a token (DeepSeek V3.2, GLM 5)."""
    keys = _indexer_keys(model.fields.positive("index_head_dim"))
    return KVPart(attrs.evolve(_mla(model), indexer=keys), FullLifetime())


SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
"""DeepSeek V4's names of its chains."""


def compress_rate(model: TextModel, chain: str) -> int:
    """Tokens an entry of a chain of DeepSeek V4; files name it in `compress_rates`, or leave it to the family."""
    named = model.fields.nested("compress_rates").optional_positive(chain)
    older = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}[chain]
    return named or model.fields.positive(older)


def v4_window(model: TextModel) -> KVPart:
    """DeepSeek V4: one row that is key and value at once, for the last tokens of every layer."""
    return KVPart(_v4_row(model), WindowLifetime(model.fields.positive("sliding_window")))


def v4_sparse_chain(model: TextModel) -> KVPart:
    """DeepSeek V4: one compressed row and one indexer key for every few tokens."""
    keys = _indexer_keys(model.fields.positive("index_head_dim"))
    row = attrs.evolve(_v4_row(model), indexer=keys)
    return KVPart(CompressedGeometry(row, compress_rate(model, SPARSE)), FullLifetime())


def v4_heavy_chain(model: TextModel) -> KVPart:
    """DeepSeek V4: one compressed row for every 128 tokens, or as many as the config says."""
    return KVPart(CompressedGeometry(_v4_row(model), compress_rate(model, HEAVY)), FullLifetime())


# ── state ──


def v4_sparse_tail(model: TextModel) -> KVPart:
    """What the sparse chain's compressors keep between entries: inputs of the open group, and half the last closed one.

    Keys and gates of both series, `[tokens, 2 × width]`, for the row and for the indexer's key; of the closed group the
    overlapping series alone. That they keep the model's type is our assumption: no config names one, and a kernel that keeps
    float32 needs twice as much.
    """
    rate = compress_rate(model, SPARSE)
    tensors = []
    for name, width in (
        ("row", model.fields.positive("head_dim")),
        ("index", model.fields.positive("index_head_dim")),
    ):
        if rate > 1:
            tensors.append(TensorDecl(f"{name}_open", (2, rate - 1, 2 * width), model.dtype))
        tensors.append(TensorDecl(f"{name}_closed", (2, rate, width), model.dtype))
    return KVPart(StateGeometry(tuple(tensors)), StateLifetime(model.checkpoint_interval))


def v4_heavy_tail(model: TextModel) -> KVPart:
    """What the heavy chain's compressor keeps between entries: inputs of the open group, keys and gates."""
    rate, width = compress_rate(model, HEAVY), model.fields.positive("head_dim")
    tensor = TensorDecl("row_open", (2, max(1, rate - 1), width), model.dtype)
    return KVPart(StateGeometry((tensor,)), StateLifetime(model.checkpoint_interval))


def gated_delta_net(model: TextModel) -> KVPart:
    """A convolution over queries, keys and values, and one key-by-value matrix a value head (arXiv 2412.06464)."""
    fields, split = model.fields, model.split
    key_dim = fields.positive("linear_key_head_dim")
    value_dim = fields.positive("linear_value_head_dim")
    key_heads = split.evenly("linear_num_key_heads", fields.positive("linear_num_key_heads"))
    value_heads = split.evenly("linear_num_value_heads", fields.positive("linear_num_value_heads"))
    conv_width = 2 * key_heads * key_dim + value_heads * value_dim
    return _recurrent_part(
        model, conv_width, fields.positive("linear_conv_kernel_dim"), (value_heads, key_dim, value_dim)
    )


def olmo_delta_net(model: TextModel) -> KVPart:
    """Olmo Hybrid: a gated delta net whose sizes follow from the attention's where they are left out."""
    fields = model.fields
    heads = fields.positive("num_attention_heads")
    key_heads = fields.optional_positive("linear_num_key_heads") or heads
    key_dim = (
        fields.optional_positive("linear_key_head_dim")
        or fields.positive("hidden_size") * 3 // 4 // key_heads
    )
    own = fields.with_defaults(
        {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": 2 * key_dim,
        }
    )
    return gated_delta_net(attrs.evolve(model, fields=own))


def kimi_delta_attention(model: TextModel) -> KVPart:
    """KDA (Kimi Linear): convolutions over queries, keys and values, one matrix a head."""
    own = model.with_fields(
        "linear_attn_config", {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}
    )
    heads = own.split.evenly("num_heads", own.fields.positive("num_heads"))
    width = own.fields.positive("head_dim")
    return _recurrent_part(
        model, 3 * heads * width, own.fields.positive("short_conv_kernel_size"), (heads, width, width)
    )


def lightning(model: TextModel) -> KVPart:
    """Lightning attention (MiniMax-Text-01): one matrix a query head, and no convolution."""
    heads = model.fields.positive("num_attention_heads")
    width = _head_dim(model.fields)
    return _recurrent_part(model, 1, 1, (model.split.evenly("num_attention_heads", heads), width, width))


def mamba2(model: TextModel) -> KVPart:
    """Mamba-2 (arXiv 2405.21060) in the spelling of Bamba, Falcon-H1 and Granite 4."""
    fields = model.fields
    heads = fields.positive("mamba_n_heads")
    if fields.get("mamba_d_ssm") is not None:
        inner, reading = fields.positive("mamba_d_ssm"), "mamba_d_ssm"
    else:
        inner = fields.positive("mamba_expand") * fields.positive("hidden_size")
        reading = "mamba_expand x hidden_size"
    if fields.get("mamba_d_head") in (None, "auto"):
        head_dim = fields.quotient("mamba_d_head", inner, heads, f"{reading} / mamba_n_heads")
    else:
        head_dim = fields.positive("mamba_d_head")
    if heads * head_dim != inner:
        raise fields.error("mamba_n_heads", f"x mamba_d_head = {heads * head_dim}, but {reading} = {inner}")
    return _mamba2(
        model,
        heads=model.split.evenly("mamba_n_heads", heads),
        head_dim=head_dim,
        groups=model.split.or_copied("mamba_n_groups", fields.positive("mamba_n_groups")),
        state_dim=fields.positive("mamba_d_state"),
        conv_kernel=fields.positive("mamba_d_conv"),
    )


def mamba2_nemotron(model: TextModel) -> KVPart:
    """Mamba-2 in the spelling of Nemotron-H."""
    fields = model.fields
    return _mamba2(
        model,
        heads=model.split.evenly("mamba_num_heads", fields.positive("mamba_num_heads")),
        head_dim=fields.positive("mamba_head_dim"),
        groups=model.split.or_copied("n_groups", fields.positive("n_groups")),
        state_dim=fields.positive("ssm_state_size"),
        conv_kernel=fields.positive("conv_kernel"),
    )


def mamba1(model: TextModel) -> KVPart:
    """Mamba (arXiv 2312.00752): one state row an inner channel, the convolution over the same channels."""
    fields = model.fields
    inner = fields.positive("mamba_expand") * fields.positive("hidden_size")
    inner = model.split.evenly("mamba_expand x hidden_size", inner)
    return _recurrent_part(
        model, inner, fields.positive("mamba_d_conv"), (inner, fields.positive("mamba_d_state"))
    )


def short_conv(model: TextModel) -> KVPart:
    """A gated short convolution over the hidden size (LFM2): state without recurrence."""
    width = model.split.evenly("hidden_size", model.fields.positive("hidden_size"))
    conv = _conv_tensor(model, width, model.fields.positive("conv_L_cache"))
    return KVPart(StateGeometry(tuple(conv)), StateLifetime(model.checkpoint_interval))


# ── helpers ──


def _head_dim(fields: ConfigFields) -> int:
    return fields.optional_positive("head_dim") or fields.quotient(
        "head_dim",
        fields.positive("hidden_size"),
        fields.positive("num_attention_heads"),
        "hidden_size / num_attention_heads",
    )


def _mha(model: TextModel, value_field: str | None = None) -> MHAGeometry:
    fields = model.fields
    kv_heads = fields.optional_positive("num_key_value_heads") or fields.positive("num_attention_heads")
    query_heads = fields.optional_positive("num_attention_heads")
    if query_heads is not None and query_heads % kv_heads:
        raise fields.error(
            "num_key_value_heads", f"= {kv_heads} does not divide num_attention_heads = {query_heads}"
        )
    if query_heads is not None:
        model.split.evenly("num_attention_heads", query_heads)
    key_dim = _head_dim(fields)
    value_dim = fields.positive(value_field) if value_field else key_dim
    return model.kv_format.mha(model.split.or_copied("num_key_value_heads", kv_heads), key_dim, value_dim)


def _mla(model: TextModel) -> MLAGeometry:
    fields = model.fields
    query_heads = fields.optional_positive("num_attention_heads")
    if query_heads is not None:
        model.split.evenly("num_attention_heads", query_heads)
    return model.kv_format.mla(fields.positive("kv_lora_rank"), fields.not_negative("qk_rope_head_dim"))


def _v4_row(model: TextModel) -> MLAGeometry:
    fields = model.fields
    width, rope = fields.positive("head_dim"), fields.not_negative("qk_rope_head_dim")
    if rope >= width:
        raise fields.error("qk_rope_head_dim", f"must be below head_dim = {width}, found {rope}")
    return model.kv_format.mla(width - rope, rope)


def _indexer_keys(dim: int) -> IndexerKeys:
    return IndexerKeys(dim, DType.FLOAT8_E4M3, DType.FLOAT32)


def _mamba2(
    model: TextModel, *, heads: int, head_dim: int, groups: int, state_dim: int, conv_kernel: int
) -> KVPart:
    conv_width = heads * head_dim + 2 * groups * state_dim
    return _recurrent_part(model, conv_width, conv_kernel, (heads, head_dim, state_dim))


def _recurrent_part(
    model: TextModel, conv_width: int, conv_kernel: int, recurrent_shape: tuple[int, ...]
) -> KVPart:
    dtype = model.fields.dtype("mamba_ssm_dtype", "mamba_ssm_cache_dtype") or DType.FLOAT32
    recurrent = TensorDecl("recurrent", recurrent_shape, dtype)
    tensors = (*_conv_tensor(model, conv_width, conv_kernel), recurrent)
    return KVPart(StateGeometry(tensors), StateLifetime(model.checkpoint_interval))


def _conv_tensor(model: TextModel, width: int, kernel: int) -> list[TensorDecl]:
    """The `conv` tensor `[width, kernel - 1]`; none for a kernel of one tap, which remembers nothing."""
    return [TensorDecl("conv", (width, kernel - 1), model.dtype)] if kernel > 1 else []
