"""What a model's layers store, and where every byte of it lies: declarations, sub-pools, byte layout.

Pure arithmetic, without torch and without a device. Declare layers (`KVLayerDecl`) or read them off a config
(`from_config`), group them into sub-pools (`plan_kv_storage`), and lay the sub-pools over an arena (`lay_out`).
"""

from kvtide.plan.configs import KNOWN_MODEL_TYPES, ConfigError, from_config
from kvtide.plan.decl import (
    FullLifetime,
    Geometry,
    KVLayerDecl,
    KVPart,
    Lifetime,
    MHAGeometry,
    MLAGeometry,
    StateGeometry,
    StateLifetime,
    TensorDecl,
    WindowLifetime,
)
from kvtide.plan.dtypes import DType
from kvtide.plan.errors import PlanError
from kvtide.plan.grouping import KVStoragePlan, SubPool, SubPoolKind, plan_kv_storage
from kvtide.plan.layout import ArenaLayout, BandLayout, Growth, PageSpan, growths, lay_out, pack
from kvtide.plan.unit import ALIGNMENT_BYTES, Plane, UnitLayout, align_up

__all__ = [
    "ALIGNMENT_BYTES",
    "KNOWN_MODEL_TYPES",
    "ArenaLayout",
    "BandLayout",
    "ConfigError",
    "DType",
    "FullLifetime",
    "Geometry",
    "Growth",
    "KVLayerDecl",
    "KVPart",
    "KVStoragePlan",
    "Lifetime",
    "MHAGeometry",
    "MLAGeometry",
    "PageSpan",
    "PlanError",
    "Plane",
    "StateGeometry",
    "StateLifetime",
    "SubPool",
    "SubPoolKind",
    "TensorDecl",
    "UnitLayout",
    "WindowLifetime",
    "align_up",
    "from_config",
    "growths",
    "lay_out",
    "pack",
    "plan_kv_storage",
]
