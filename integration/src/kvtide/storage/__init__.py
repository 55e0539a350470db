"""What a scheduler uses: `build_kv_storage`, and the verbs of `KVStorage` over request rows.

The life of a request: `admit` → (`prepare_step` → `launch_forward` → the model resolves the ids and runs over
`storage.routed_cache` → `record_forward` → `forward_processed` → `advance`) as often as it takes → `release`.
"""

from kvtide.chain import Refusal, TakeRefusal
from kvtide.storage.admission import AdmissionRefusal
from kvtide.storage.build import build_kv_storage
from kvtide.storage.errors import StorageError
from kvtide.storage.forward_ids import ForwardIds, UnresolvedIds
from kvtide.storage.requests import RequestTable
from kvtide.storage.steps import PreparedStep, StepState
from kvtide.storage.storage import KVStorage

__all__ = [
    "AdmissionRefusal",
    "ForwardIds",
    "KVStorage",
    "PreparedStep",
    "Refusal",
    "RequestTable",
    "StepState",
    "StorageError",
    "TakeRefusal",
    "UnresolvedIds",
    "build_kv_storage",
]
