"""What a scheduler uses: `build_kv_storage`, and the verbs of `KVStorage` over request rows.

The life of a request: `admit` → (`prepare_step` → `launch_forward` → the model resolves the ids and runs over
`storage.routed_cache` → `record_forward` → `forward_processed` → `advance`) as often as it takes → `release`. With an overlapping
`ServingPolicy` the next step of a row is prepared, launched and recorded before its last one is processed.
"""

from kvtide.chain import Refusal, TakeRefusal
from kvtide.storage.admission import AdmissionRefusal
from kvtide.storage.build import build_kv_storage
from kvtide.storage.errors import StorageError
from kvtide.storage.forward_ids import ForwardIds, ForwardStateSlots, UnresolvedIds
from kvtide.storage.read_ends import SharedReadEnds
from kvtide.storage.requests import RequestTable
from kvtide.storage.row_state import RowState
from kvtide.storage.settings import StorageSettings
from kvtide.storage.statistics import StorageStatistics
from kvtide.storage.steps import PreparedStep, StepState
from kvtide.storage.storage import KVStorage

__all__ = [
    "AdmissionRefusal",
    "ForwardIds",
    "ForwardStateSlots",
    "KVStorage",
    "PreparedStep",
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
    "build_kv_storage",
]
