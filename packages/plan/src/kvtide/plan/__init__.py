"""What a model's layers store, and where every byte of it lies: declarations, sub-pools, byte layout.

Pure arithmetic, without torch and without a device. Declare layers (`KVLayerDecl`) or read them off a config
(`from_config`), group them into sub-pools (`plan_kv_storage`), and lay the sub-pools over an arena (`lay_out`).
"""

from kvtide.plan.configs import KNOWN_MODEL_TYPES, ConfigError, from_config
from kvtide.plan.decl import KVLayerDecl, KVPart, page_multiple
from kvtide.plan.dtypes import DType
from kvtide.plan.errors import PlanError
from kvtide.plan.formats import KV_FORMATS, KVFormat
from kvtide.plan.fused_draft import place_fused_draft
from kvtide.plan.geometry import (
    CompressedGeometry,
    Geometry,
    IndexerKeys,
    MHAGeometry,
    MLAGeometry,
    Quantization,
    StateGeometry,
    TensorDecl,
)
from kvtide.plan.grouping import plan_kv_storage
from kvtide.plan.layout import ArenaLayout, BandLayout, Growth, PageSpan, growths, lay_out, pack
from kvtide.plan.lifetime import ChunkLifetime, FullLifetime, Lifetime, StateLifetime, WindowLifetime
from kvtide.plan.stages import split_stages
from kvtide.plan.storage_plan import KVStoragePlan, SubPool, SubPoolKind, TreeSlot
from kvtide.plan.unit import (
    ALIGNMENT_BYTES,
    GPU_SCRATCH_BYTES,
    MOVE_SCRATCH_BYTES,
    Plane,
    UnitLayout,
    align_up,
)

__all__ = [
    "ALIGNMENT_BYTES",
    "GPU_SCRATCH_BYTES",
    "KNOWN_MODEL_TYPES",
    "KV_FORMATS",
    "MOVE_SCRATCH_BYTES",
    "ArenaLayout",
    "BandLayout",
    "ChunkLifetime",
    "CompressedGeometry",
    "ConfigError",
    "DType",
    "FullLifetime",
    "Geometry",
    "Growth",
    "IndexerKeys",
    "KVFormat",
    "KVLayerDecl",
    "KVPart",
    "KVStoragePlan",
    "Lifetime",
    "MHAGeometry",
    "MLAGeometry",
    "PageSpan",
    "PlanError",
    "Plane",
    "Quantization",
    "StateGeometry",
    "StateLifetime",
    "SubPool",
    "SubPoolKind",
    "TensorDecl",
    "TreeSlot",
    "UnitLayout",
    "WindowLifetime",
    "align_up",
    "from_config",
    "growths",
    "lay_out",
    "pack",
    "page_multiple",
    "place_fused_draft",
    "plan_kv_storage",
    "split_stages",
]
