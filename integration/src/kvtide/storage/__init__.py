"""What a scheduler uses: `build_kv_storage`, and the verbs of `KVStorage` over request rows.

    storage = build_kv_storage(plan, budget_bytes=…, max_running_requests=…, max_context_tokens=…, chunk_tokens=…)
    rows = storage.admit([prompt], [output])          # or an AdmissionRefusal
    step = storage.prepare_step(rows, [chunk])        # or a TakeRefusal
    ids = storage.launch_forward(step)                # …run the model with `ids` over `storage.routed_cache`…
    storage.record_forward(step)
    storage.forward_processed(step)
    storage.advance(rows, [chunk])
    storage.release(rows)
"""

from kvtide.chain import Refusal, TakeRefusal
from kvtide.storage.admission import AdmissionRefusal
from kvtide.storage.build import build_kv_storage
from kvtide.storage.errors import StorageError
from kvtide.storage.forward_ids import ForwardIds
from kvtide.storage.requests import RequestTable
from kvtide.storage.storage import KVStorage, PreparedStep

__all__ = [
    "AdmissionRefusal",
    "ForwardIds",
    "KVStorage",
    "PreparedStep",
    "Refusal",
    "RequestTable",
    "StorageError",
    "TakeRefusal",
    "build_kv_storage",
]
