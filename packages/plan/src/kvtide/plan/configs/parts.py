"""What layers of each kind store, read off config fields: attention with its lifetimes, and the recurrent states.

These are serving shapes. A causal convolution of `kernel` taps needs the `kernel - 1` inputs before the next token, so its
state keeps that many columns. Recurrent state accumulates over a whole request and is float32 unless the config names
another type; the convolution's inputs are activations and keep the model's type.
"""

from __future__ import annotations

import attrs

from kvtide.plan.configs.fields import ConfigFields
from kvtide.plan.decl import (
    FullLifetime,
    KVPart,
    MHAGeometry,
    MLAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
)
from kvtide.plan.dtypes import DType


@attrs.frozen(kw_only=True)
class TextModel:
    """One model's fields and element types, as the part makers read them."""

    fields: ConfigFields
    """Checked access to the text config."""

    layer_count: int
    """Layers of the model, drafts not among them."""

    kv_dtype: DType
    """Element type of attention entries."""

    dtype: DType
    """Element type of activations, which convolution states keep."""


def full_mha(model: TextModel) -> KVPart:
    """Keys and values of every token."""
    return KVPart(_mha(model), FullLifetime())


def window_mha(model: TextModel) -> KVPart:
    """Keys and values of the last `sliding_window` tokens; the field counts the query's own token."""
    return KVPart(_mha(model), WindowLifetime(model.fields.positive("sliding_window")))


def full_mla(model: TextModel) -> KVPart:
    """The compressed latent of every token, with its rotary key."""
    fields = model.fields
    geometry = MLAGeometry(
        fields.positive("kv_lora_rank"), fields.not_negative("qk_rope_head_dim"), model.kv_dtype
    )
    return KVPart(geometry, FullLifetime())


def gated_delta_net(model: TextModel) -> KVPart:
    """A convolution over queries, keys and values, and one key-by-value matrix a value head (arXiv 2412.06464)."""
    fields = model.fields
    key_dim = fields.positive("linear_key_head_dim")
    value_dim = fields.positive("linear_value_head_dim")
    value_heads = fields.positive("linear_num_value_heads")
    conv_width = 2 * fields.positive("linear_num_key_heads") * key_dim + value_heads * value_dim
    return _recurrent_part(
        model, conv_width, fields.positive("linear_conv_kernel_dim"), (value_heads, key_dim, value_dim)
    )


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
        heads=heads,
        head_dim=head_dim,
        groups=fields.positive("mamba_n_groups"),
        state_dim=fields.positive("mamba_d_state"),
        conv_kernel=fields.positive("mamba_d_conv"),
    )


def mamba2_nemotron(model: TextModel) -> KVPart:
    """Mamba-2 in the spelling of Nemotron-H."""
    fields = model.fields
    return _mamba2(
        model,
        heads=fields.positive("mamba_num_heads"),
        head_dim=fields.positive("mamba_head_dim"),
        groups=fields.positive("n_groups"),
        state_dim=fields.positive("ssm_state_size"),
        conv_kernel=fields.positive("conv_kernel"),
    )


def mamba1(model: TextModel) -> KVPart:
    """Mamba (arXiv 2312.00752): one state row an inner channel, the convolution over the same channels."""
    fields = model.fields
    inner = fields.positive("mamba_expand") * fields.positive("hidden_size")
    return _recurrent_part(
        model, inner, fields.positive("mamba_d_conv"), (inner, fields.positive("mamba_d_state"))
    )


def short_conv(model: TextModel) -> KVPart:
    """A gated short convolution over the hidden size (LFM2): state without recurrence."""
    conv = _conv_tensor(model, model.fields.positive("hidden_size"), model.fields.positive("conv_L_cache"))
    return KVPart(StateGeometry(tuple(conv)), StateLifetime())


def _mha(model: TextModel) -> MHAGeometry:
    fields = model.fields
    kv_heads = fields.optional_positive("num_key_value_heads") or fields.positive("num_attention_heads")
    query_heads = fields.optional_positive("num_attention_heads")
    if query_heads is not None and query_heads % kv_heads:
        raise fields.error(
            "num_key_value_heads", f"= {kv_heads} does not divide num_attention_heads = {query_heads}"
        )
    head_dim = fields.optional_positive("head_dim")
    if head_dim is None:
        head_dim = fields.quotient(
            "head_dim",
            fields.positive("hidden_size"),
            fields.positive("num_attention_heads"),
            "hidden_size / num_attention_heads",
        )
    return MHAGeometry(kv_heads, head_dim, head_dim, model.kv_dtype)


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
    return KVPart(StateGeometry((*_conv_tensor(model, conv_width, conv_kernel), recurrent)), StateLifetime())


def _conv_tensor(model: TextModel, width: int, kernel: int) -> list[TensorDecl]:
    """The `conv` tensor `[width, kernel - 1]`; none for a kernel of one tap, which remembers nothing."""
    return [TensorDecl("conv", (width, kernel - 1), model.dtype)] if kernel > 1 else []
