"""Named ways to store attention entries, as serving stacks offer them (row P6)."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvtide.plan.dtypes import DType
from kvtide.plan.errors import PlanError
from kvtide.plan.geometry import IndexerKeys, MHAGeometry, MLAGeometry, Quantization


@attrs.frozen(kw_only=True)
class KVFormat:
    """Element type and scales of attention entries."""

    name: str
    """What options and errors call it."""

    dtype: DType
    """Element type of the plane."""

    quantization: Quantization | None = None
    """Scales beside the elements; `None` where there are none."""

    rope_dtype: DType | None = None
    """Element type of a latent's rotary key where it stays out of the quantised part; such a format is for latents only."""

    @classmethod
    def plain(cls, dtype: DType) -> KVFormat:
        """`dtype` without scales."""
        return cls(name=dtype.value, dtype=dtype)

    def mha(
        self,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        one_tensor: bool = False,
        indexer: IndexerKeys | None = None,
    ) -> MHAGeometry:
        """Keys and values in this format; raises `PlanError` for a format of latents."""
        if self.rope_dtype is not None:
            raise PlanError(
                f"KV format {self.name!r} is for latents (MLA), and the model stores keys and values"
            )
        return MHAGeometry(
            kv_heads,
            key_dim,
            value_dim,
            self.dtype,
            one_tensor=one_tensor,
            quantization=self.quantization,
            indexer=indexer,
        )

    def mla(self, latent_dim: int, rope_dim: int, *, indexer: IndexerKeys | None = None) -> MLAGeometry:
        """A latent and its rotary key in this format."""
        return MLAGeometry(
            latent_dim,
            rope_dim,
            self.dtype,
            rope_dtype=self.rope_dtype,
            quantization=self.quantization,
            indexer=indexer,
        )


_BLOCK_32 = Quantization(scale_dtype=DType.UINT8, block_elements=32)

KV_FORMATS: Mapping[str, KVFormat] = {
    known.name: known
    for known in (
        *(KVFormat.plain(dtype) for dtype in DType),
        KVFormat(name="fp8", dtype=DType.FLOAT8_E4M3),
        KVFormat(
            name="fp8_per_head",
            dtype=DType.FLOAT8_E4M3,
            quantization=Quantization(scale_dtype=DType.FLOAT32),
        ),
        KVFormat(name="mxfp8", dtype=DType.FLOAT8_E4M3, quantization=_BLOCK_32),
        KVFormat(name="mxfp4", dtype=DType.UINT8, quantization=attrs.evolve(_BLOCK_32, elements_per_byte=2)),
        KVFormat(
            name="nvfp4",
            dtype=DType.UINT8,
            quantization=Quantization(scale_dtype=DType.FLOAT8_E4M3, block_elements=16, elements_per_byte=2),
        ),
        KVFormat(
            name="fp8_ds_mla",
            dtype=DType.FLOAT8_E4M3,
            quantization=Quantization(scale_dtype=DType.FLOAT32, block_elements=128),
            rope_dtype=DType.BFLOAT16,
        ),
        KVFormat(
            name="fp8_ds_v4",
            dtype=DType.FLOAT8_E4M3,
            quantization=Quantization(scale_dtype=DType.UINT8, block_elements=64, scale_multiple=8),
            rope_dtype=DType.BFLOAT16,
        ),
    )
}
"""By name: the plain element types; fp8 with one scale a tensor (kept with the weights) or a head; OCP microscaling in blocks
of 32 with `e8m0` scales; NVIDIA's fp4 in blocks of 16; DeepSeek's sparse MLA (656 bytes) and V4 (584 bytes) rows."""
