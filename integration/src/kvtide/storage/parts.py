"""What a storage is made of, and in which order: each part knows those before it, and no part the storage.

    device → mirrors → chain, request rows, row state → units → takes → admission → prefixes → ids, host copies → admitting, launches, backups

Nothing is allocated for a plan, policy or device that cannot be run.
"""

from __future__ import annotations

from kvtide.arena import RoutedKVCache, TensorDevice
from kvtide.chain import ChainAllocator
from kvtide.device import UnitGrid
from kvtide.ledger import CheckLevel, ForwardSteps, InvariantChecks
from kvtide.sizing import CheckpointStrategy, SizedPlan, mirror_lengths
from kvtide.storage.admission import ChainPrefillBudget
from kvtide.storage.admitting import Admitting
from kvtide.storage.backups import Backups
from kvtide.storage.evicting_takes import EvictingTakes
from kvtide.storage.forward_ids import IdTranslator
from kvtide.storage.host_copies import HostCopies
from kvtide.storage.launches import Launches
from kvtide.storage.overcommit import Overcommit
from kvtide.storage.prefix_sharing import PrefixSharing
from kvtide.storage.requests import RequestTable
from kvtide.storage.row_state import RowResets, RowState
from kvtide.storage.row_units import RowUnits
from kvtide.storage.supported import check_device, check_policy, check_supported
from kvtide.storage.tree import EvictionPolicy


class StorageParts:
    """The parts of one storage, which alone uses them; each says what it is for."""

    def __init__(
        self,
        sized: SizedPlan,
        device: TensorDevice,
        *,
        check_level: CheckLevel,
        kernel_offset_bits: int,
        writes_whole_pages: bool,
        overcommit: Overcommit | None,
        eviction_policy: EvictionPolicy | None,
    ) -> None:
        """Of an empty storage over the arena of `device`; arguments and errors as `build_kv_storage`."""
        check_supported(sized.plan)
        check_policy(sized.policy)
        check_device(device)
        self.routed_cache = RoutedKVCache(
            device.arena, sized.layout, sized.plan.shared_layers, offset_bits=kernel_offset_bits
        )
        mirrors = device.create_mirrors(
            mirror_lengths(
                sized.layout,
                max_running_requests=sized.max_running_requests,
                pages_per_row=sized.pages_per_row,
            )
        )
        device.prewarm([UnitGrid(band.origin_bytes, band.unit_bytes) for band in sized.layout.bands])
        self.checks = InvariantChecks(check_level)
        self.chain = ChainAllocator(sized.layout, device, mirrors, ForwardSteps(), checks=self.checks)
        self.requests = RequestTable(sized.max_running_requests, sized.pages_per_row, mirrors["rows"])
        with device.on_stream(device.forward_stream):
            self.row_state = RowState(sized.max_running_requests, device.arena.bytes.device)
        self.row_resets = RowResets(sized.max_running_requests)
        self.units = RowUnits(sized, self.requests, self.chain, writes_whole_pages=writes_whole_pages)
        self.takes = EvictingTakes(self.chain)
        self.admission = ChainPrefillBudget(
            sized, self.chain, self.takes, self.requests, units=self.units, overcommit=overcommit
        )
        self.sharing: PrefixSharing | None = None
        if sized.policy.strategy is not CheckpointStrategy.NONE:
            self.sharing = PrefixSharing(
                sized,
                self.chain,
                self.requests,
                units=self.units,
                takes=self.takes,
                policy=eviction_policy,
            )
            self.takes.use(self.sharing)
        self.copies = HostCopies(device, self.chain)
        self.translator = IdTranslator(
            device,
            sized.plan,
            sized.pages_per_row,
            self.row_state,
            self.checks,
        )
        self.admitting = Admitting(
            sized,
            self.chain,
            self.requests,
            units=self.units,
            takes=self.takes,
            admission=self.admission,
            sharing=self.sharing,
            row_resets=self.row_resets,
        )
        self.launches = Launches(
            device,
            self.chain,
            self.requests,
            units=self.units,
            sharing=self.sharing,
            row_resets=self.row_resets,
            translator=self.translator,
            copies=self.copies,
        )
        self.backups = Backups(
            sized,
            device,
            self.chain,
            self.requests,
            row_state=self.row_state,
            row_resets=self.row_resets,
            units=self.units,
            takes=self.takes,
            admission=self.admission,
            sharing=self.sharing,
            copies=self.copies,
        )
