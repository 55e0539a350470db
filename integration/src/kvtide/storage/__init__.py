"""What a scheduler uses: `build_kv_storage`, and the verbs of `KVStorage` over request rows.

The life of a request: `admit` → (`prepare_step` → `launch_forward` → the model resolves the ids and runs over
`storage.routed_cache` → `record_forward` → `forward_processed` → `advance`) as often as it takes → `release`. With an overlapping
`ServingPolicy` the next step of a row is prepared, launched and recorded before its last one is processed. With a policy that
shares prefixes, rows that are admitted with their prompts begin with what others have computed.

When each verb is called, what it refuses and what it waits for: the table that `help(kvtide.storage.KVStorage)` begins with.
"""

from kvtide.chain import Refusal, TakeRefusal
from kvtide.storage.backups import RowBackup
from kvtide.storage.build import build_kv_storage
from kvtide.storage.errors import HostMemoryError, StorageError
from kvtide.storage.forward_ids import ForwardIds, ForwardStateSlots, UnresolvedIds
from kvtide.storage.handed_pages import SharingObserver
from kvtide.storage.overcommit import Overcommit
from kvtide.storage.prefix_cache import PrefixCache
from kvtide.storage.read_ends import SharedReadEnds
from kvtide.storage.refusals import AdmissionRefusal, PromiseRefusal, WillFree
from kvtide.storage.requests import RequestTable
from kvtide.storage.row_state import RowState
from kvtide.storage.settings import StorageSettings
from kvtide.storage.statistics import (
    AdmissionStatistics,
    BackupStatistics,
    SharingStatistics,
    StorageStatistics,
)
from kvtide.storage.steps import PreparedStep, StepState
from kvtide.storage.storage import KVStorage
from kvtide.storage.tree import (
    CostAware,
    EvictionPolicy,
    LeastRecentlyUsed,
    PrefixTree,
    TreeLock,
    TreeShape,
    Worth,
)

__all__ = [
    "AdmissionRefusal",
    "AdmissionStatistics",
    "BackupStatistics",
    "CostAware",
    "EvictionPolicy",
    "ForwardIds",
    "ForwardStateSlots",
    "HostMemoryError",
    "KVStorage",
    "LeastRecentlyUsed",
    "Overcommit",
    "PrefixCache",
    "PrefixTree",
    "PreparedStep",
    "PromiseRefusal",
    "Refusal",
    "RequestTable",
    "RowBackup",
    "RowState",
    "SharedReadEnds",
    "SharingObserver",
    "SharingStatistics",
    "StepState",
    "StorageError",
    "StorageSettings",
    "StorageStatistics",
    "TakeRefusal",
    "TreeLock",
    "TreeShape",
    "UnresolvedIds",
    "WillFree",
    "Worth",
    "build_kv_storage",
]
