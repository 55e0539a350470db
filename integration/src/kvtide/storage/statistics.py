"""What a storage holds and has done, exact, as values: for logs and metrics."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvtide.chain import ChainStatistics


@attrs.frozen(kw_only=True)
class AdmissionStatistics:
    """What admission has decided since the start."""

    admitted_requests: int
    """Requests that got a row."""

    turned_away_requests: int
    """Requests that were refused for ever when their turn came."""

    retracted_requests: int
    """Admitted requests whose memory was taken away; 0 unless the policy overcommits."""

    further_shares: int
    """Shares of output promised beyond the first; 0 unless the policy overcommits."""

    waits: Mapping[str, int]
    """Refusals that were not final, by what was waited for."""


@attrs.frozen(kw_only=True)
class SharingStatistics:
    """What sharing prefixes has come to since the start, and what is kept for it."""

    matched_tokens: int
    """Tokens of admitted prompts that were known."""

    hit_tokens: int
    """Of them, those that were restored and needed no prefill."""

    restorable_tokens: Mapping[str, int]
    """Hit tokens by sub-pool: how many of the known ones each band by itself could have restored. A hit is had of all bands or none, so
    `hit_tokens` is at most the least of these; bands far above it waited for another.
    """

    held_units: Mapping[str, int]
    """In the tree, by band."""

    evictable_units: Mapping[str, int]
    """Of them, those that no request needs."""

    evicted_units: Mapping[str, int]
    """By band."""

    stalled_checkpoints: Mapping[str, int]
    """Checkpoints forgone, and slots that could not be replaced at once, by reason."""


@attrs.frozen(kw_only=True)
class BackupStatistics:
    """What retraction backups have come to since the start."""

    backed_up_requests: int
    """Retracted requests whose memory was kept."""

    restored_requests: int
    """Rows that were given such memory back; one that was restored twice counts twice."""

    backed_up_bytes: int
    """Copied to the host."""

    restored_bytes: int
    """Copied back."""

    copies_in_flight: int
    """Copies of either kind that are not over."""


@attrs.frozen(kw_only=True)
class StorageStatistics:
    """The storage at one moment."""

    rows_in_use: int
    """Requests admitted and not released."""

    free_rows: int
    """Rows that can be handed out."""

    forwards_in_flight: int
    """Launched and not processed."""

    launches: int
    """Launches since the start."""

    aborted_launches: int
    """Those of them that were abandoned."""

    flushed_units: int
    """Units that opportunistic flushes have moved since the start."""

    admitted_at_peak: Mapping[str, int]
    """Units promised to the rows in use, by band."""

    outstanding: Mapping[str, int]
    """Units of them that no row holds yet, by band: room that is spoken for."""

    admission: AdmissionStatistics
    """Verdicts."""

    backups: BackupStatistics
    """Memory of retracted requests."""

    sharing: SharingStatistics | None
    """`None` without a policy that shares prefixes."""

    chain: ChainStatistics
    """Bands and bytes."""
