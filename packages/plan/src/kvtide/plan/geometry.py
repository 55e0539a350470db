"""What a part stores: the tensors that one token, one group of tokens, or one request writes (rows P1, P6).

A geometry answers one question, `tensors()`: names, shapes and element types, in the order in which they lie in a page. A
tensor has one element type; what is stored in two types (an fp8 latent with its bf16 rotary key, keys and their scales) is
two tensors, so every plane can be viewed as what it is.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import attrs

from kvtide.plan.checks import not_negative, positive
from kvtide.plan.dtypes import DType
from kvtide.plan.errors import PlanError


@attrs.frozen
class TensorDecl:
    """One tensor of a geometry: the shape that one entry (attention) or one request (state) stores."""

    name: str
    """Name of the plane, unique within the geometry: `key`, `value`, `latent`, `conv`, `recurrent`, …"""

    shape: tuple[int, ...]
    """Shape per entry or per request, e.g. `(kv_heads, key_dim)`."""

    dtype: DType
    """Element type."""

    tokens_per_entry: int = attrs.field(default=1, validator=positive)
    """Tokens that one entry stands for; more than one only in a compressed chain."""

    def __attrs_post_init__(self) -> None:
        if not self.name:
            raise PlanError("TensorDecl.name must not be empty")
        if any(isinstance(size, bool) or not isinstance(size, int) or size <= 0 for size in self.shape):
            raise PlanError(
                f"tensor {self.name!r} has shape {self.shape}: every size must be a positive integer"
            )

    @property
    def byte_count(self) -> int:
        """Bytes per entry or per request, without alignment."""
        return math.prod(self.shape) * self.dtype.byte_width


@attrs.frozen(kw_only=True)
class Quantization:
    """How quantised elements lie beside their scales. Scales of a whole tensor lie with the weights, not here."""

    scale_dtype: DType | None = None
    """Element type of the scales that each entry brings; `None` where one scale serves the whole tensor."""

    block_elements: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))
    """Neighbouring elements of a head that share a scale; `None` for one scale a head."""

    scale_multiple: int = attrs.field(default=1, validator=positive)
    """Scales a head are padded to a multiple of this, so that rows of them are aligned."""

    elements_per_byte: int = attrs.field(default=1, validator=positive)
    """2 for four-bit elements, which are packed into `uint8`."""

    def packed_width(self, width: int, what: str) -> int:
        """Stored elements of a row of `width`; raises `PlanError` where it does not pack."""
        if width % self.elements_per_byte:
            raise PlanError(f"{what} = {width} does not pack {self.elements_per_byte} elements a byte")
        return width // self.elements_per_byte

    def scale_count(self, width: int, what: str) -> int:
        """Scales of a row of `width` elements, padding included; raises `PlanError` where blocks do not divide it."""
        block = self.block_elements or width
        if width % block:
            raise PlanError(f"{what} = {width} is no multiple of the {block} elements that share a scale")
        return -(-(width // block) // self.scale_multiple) * self.scale_multiple


@attrs.frozen
class IndexerKeys:
    """One key a token, shared by all heads, with which sparse attention chooses what to read (DeepSeek V3.2)."""

    dim: int = attrs.field(validator=positive)
    """Width of the key."""

    dtype: DType
    """Element type."""

    scale_dtype: DType | None = None
    """Element type of its one scale; `None` where the key is not quantised."""

    def tensors(self) -> tuple[TensorDecl, ...]:
        """`index_key [dim]` per entry, and its scale."""
        key = TensorDecl("index_key", (self.dim,), self.dtype)
        return (key, *([TensorDecl("index_key_scale", (1,), self.scale_dtype)] if self.scale_dtype else []))


@attrs.frozen
class MHAGeometry:
    """Keys and values per head (multi-head, grouped-query and multi-query attention)."""

    kv_heads: int = attrs.field(validator=positive)
    """Key-value heads on this rank."""

    key_dim: int = attrs.field(validator=positive)
    """Width of one head's key."""

    value_dim: int = attrs.field(validator=positive)
    """Width of one head's value."""

    dtype: DType
    """Element type of both."""

    one_tensor: bool = attrs.field(default=False, kw_only=True)
    """Whether one tensor, `key_value`, serves as key and as value (K = V), stored once."""

    quantization: Quantization | None = attrs.field(default=None, kw_only=True)
    """Scales beside the elements; `None` where there are none."""

    indexer: IndexerKeys | None = attrs.field(default=None, kw_only=True)
    """The sparse selection's keys, where the layer has a selection of its own."""

    def __attrs_post_init__(self) -> None:
        if self.one_tensor and self.key_dim != self.value_dim:
            raise PlanError(
                f"MHAGeometry.one_tensor needs key_dim = value_dim, found {self.key_dim} and {self.value_dim}"
            )
        self.tensors()

    def tensors(self) -> tuple[TensorDecl, ...]:
        """`key [kv_heads, key_dim]` and `value [kv_heads, value_dim]` per token, scales behind each, then indexer keys."""
        rows = [("key_value", self.key_dim)] if self.one_tensor else []
        rows = rows or [("key", self.key_dim), ("value", self.value_dim)]
        tensors = [
            tensor
            for name, width in rows
            for tensor in _quantised(name, (self.kv_heads,), width, self.dtype, self.quantization)
        ]
        return (*tensors, *(self.indexer.tensors() if self.indexer else ()))


@attrs.frozen
class MLAGeometry:
    """A compressed latent shared by all heads, with its rotary key beside it (DeepSeek-V2, arXiv 2405.04434)."""

    latent_dim: int = attrs.field(validator=positive)
    """Rank of the compressed KV (`kv_lora_rank`)."""

    rope_dim: int = attrs.field(validator=not_negative)
    """Width of the rotary key; 0 where the model has none."""

    dtype: DType
    """Element type."""

    rope_dtype: DType | None = attrs.field(default=None, kw_only=True)
    """Element type of the rotary key where it is stored apart from a quantised latent; `None` in one tensor with it."""

    quantization: Quantization | None = attrs.field(default=None, kw_only=True)
    """Scales beside the elements; `None` where there are none."""

    indexer: IndexerKeys | None = attrs.field(default=None, kw_only=True)
    """The sparse selection's keys, where the layer has a selection of its own."""

    def __attrs_post_init__(self) -> None:
        self.tensors()

    def tensors(self) -> tuple[TensorDecl, ...]:
        """`latent [latent_dim + rope_dim]` per token, the rotary key in its last columns, or in a tensor `rope` of its own."""
        apart = self.rope_dtype is not None and self.rope_dim > 0
        width = self.latent_dim if apart else self.latent_dim + self.rope_dim
        tensors = _quantised("latent", (), width, self.dtype, self.quantization)
        if self.rope_dtype is not None and apart:
            tensors.append(TensorDecl("rope", (self.rope_dim,), self.rope_dtype))
        return (*tensors, *(self.indexer.tensors() if self.indexer else ()))


@attrs.frozen
class CompressedGeometry:
    """A compressed chain: one entry of `entry` for every `tokens_per_entry` tokens, written as their last one arrives."""

    entry: MLAGeometry
    """What one entry stores."""

    tokens_per_entry: int = attrs.field(validator=positive)
    """The stride; a page must be a multiple of it."""

    def tensors(self) -> tuple[TensorDecl, ...]:
        """The entry's tensors, at the chain's stride."""
        return tuple(
            attrs.evolve(tensor, tokens_per_entry=self.tokens_per_entry) for tensor in self.entry.tensors()
        )


@attrs.frozen
class StateGeometry:
    """Recurrent state of one request: any number of tensors, each with a dtype of its own."""

    state_tensors: tuple[TensorDecl, ...]
    """Tensors of one state slot, e.g. `conv` in bf16 and `recurrent` in fp32."""

    def __attrs_post_init__(self) -> None:
        if not self.state_tensors:
            raise PlanError("StateGeometry needs at least one tensor")
        names = [tensor.name for tensor in self.state_tensors]
        if len(set(names)) != len(names):
            raise PlanError(f"StateGeometry names a tensor twice: {names}")

    def tensors(self) -> tuple[TensorDecl, ...]:
        """The tensors of one slot."""
        return self.state_tensors


Geometry: TypeAlias = MHAGeometry | MLAGeometry | CompressedGeometry | StateGeometry
"""What a part stores."""


def _quantised(
    name: str, heads: tuple[int, ...], width: int, dtype: DType, quantization: Quantization | None
) -> list[TensorDecl]:
    """A row of `width` elements a head, and the scales behind it."""
    if quantization is None:
        return [TensorDecl(name, (*heads, width), dtype)]
    packed = quantization.packed_width(width, f"width of {name!r}")
    tensors = [TensorDecl(name, (*heads, packed), dtype)]
    if quantization.scale_dtype is not None:
        scales = quantization.scale_count(width, f"width of {name!r}")
        tensors.append(TensorDecl(f"{name}_scale", (*heads, scales), quantization.scale_dtype))
    return tensors
