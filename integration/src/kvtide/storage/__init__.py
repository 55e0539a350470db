"""What a scheduler uses: `build_kv_storage`, and the verbs of `KVStorage` over request rows.

The life of a request: `admit` → (`prepare_step` → `launch_forward` → the model resolves the ids and runs over
`storage.routed_cache` → `record_forward` → `forward_processed` → `advance`) as often as it takes → `release`. With an overlapping
`ServingPolicy` the next step of a row is prepared, launched and recorded before its last one is processed.
"""

from kvtide.chain import Refusal, TakeRefusal
from kvtide.storage.build import build_kv_storage
from kvtide.storage.errors import StorageError
from kvtide.storage.forward_ids import ForwardIds, ForwardStateSlots, UnresolvedIds
from kvtide.storage.overcommit import Overcommit
from kvtide.storage.prefix_cache import PrefixCache
from kvtide.storage.read_ends import SharedReadEnds
from kvtide.storage.refusals import AdmissionRefusal, PromiseRefusal, WillFree
from kvtide.storage.requests import RequestTable
from kvtide.storage.row_state import RowState
from kvtide.storage.settings import StorageSettings
from kvtide.storage.statistics import AdmissionStatistics, StorageStatistics
from kvtide.storage.steps import PreparedStep, StepState
from kvtide.storage.storage import KVStorage

__all__ = [
    "AdmissionRefusal",
    "AdmissionStatistics",
    "ForwardIds",
    "ForwardStateSlots",
    "KVStorage",
    "Overcommit",
    "PrefixCache",
    "PreparedStep",
    "PromiseRefusal",
    "Refusal",
    "RequestTable",
    "RowState",
    "SharedReadEnds",
    "StepState",
    "StorageError",
    "StorageSettings",
    "StorageStatistics",
    "TakeRefusal",
    "UnresolvedIds",
    "WillFree",
    "build_kv_storage",
]
