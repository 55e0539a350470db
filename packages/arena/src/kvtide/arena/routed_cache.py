"""From a layer to its views (row A4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import torch

from kvtide.arena.memory import KVArena
from kvtide.plan import ArenaLayout, BandLayout, Plane

OFFSET_BITS = 64
"""Of the offsets that torch and this package's programs compute with."""


@attrs.frozen(eq=False)
class LayerView:
    """The planes of one layer in one band."""

    band: str
    """Whose physical ids index the planes."""

    page_tokens: int | None
    """Tokens a page; `None` for state."""

    planes: Mapping[str, torch.Tensor]
    """By name: `[page_count, entries, …]` for attention, `[slot_count, …]` for state."""

    tokens_per_entry: int = 1
    """Tokens that one entry stands for; more than one only in a compressed chain."""


class RoutedKVCache:
    """Layer → its views, over one arena, made once.

    A layer has at most one view of each kind: attention, a compressed chain, state. A chain stands in a band that outlives the
    layer's own attention, or has fewer entries than tokens.
    """

    def __init__(
        self,
        arena: KVArena,
        layout: ArenaLayout,
        shared_layers: Iterable[tuple[int, int]] = (),
        *,
        offset_bits: int = OFFSET_BITS,
    ) -> None:
        """View every plane of every band of `layout`.

        `shared_layers`, as a `KVStoragePlan` has them, pairs layers that store no attention with those whose they read.
        `offset_bits` is what the model's kernels compute offsets with, from a plane's first element, signed and in elements; it
        bounds slot ids too. Raises `ValueError` for a plane whose last element lies beyond their reach (row A3).
        """
        self._attention: dict[int, LayerView] = {}
        self._compressed: dict[int, LayerView] = {}
        self._state: dict[int, LayerView] = {}
        for band in layout.bands:
            _check_reach(band, offset_bits)
            for layer in sorted({plane.layer for plane in band.planes}):
                view = _view(arena, band, layer)
                if view.page_tokens is None:
                    self._state[layer] = view
                elif view.tokens_per_entry > 1 or layer in self._attention:
                    self._compressed[layer] = view
                else:
                    self._attention[layer] = view
        for layer, source in shared_layers:
            for routed in (self._attention, self._compressed):
                if source in routed:
                    routed[layer] = routed[source]

    def attention(self, layer: int) -> LayerView | None:
        """Keys and values, or the latent, of `layer`, an entry a token; `None` where it reads none."""
        return self._attention.get(layer)

    def compressed(self, layer: int) -> LayerView | None:
        """The compressed chain of `layer`; `None` where it has none."""
        return self._compressed.get(layer)

    def state(self, layer: int) -> LayerView | None:
        """Recurrent state of `layer`; `None` where it has none."""
        return self._state.get(layer)

    def views(self, layer: int) -> tuple[LayerView, ...]:
        """All that `layer` has, in the order of the three above."""
        found = (self.attention(layer), self.compressed(layer), self.state(layer))
        return tuple(view for view in found if view is not None)


def _check_reach(band: BandLayout, offset_bits: int) -> None:
    """Raise `ValueError` unless kernels with so many bits reach the last element of every plane's last page."""
    most = (1 << (offset_bits - 1)) - 1

    def pages_within(plane: Plane) -> int:
        width = plane.dtype.byte_width
        return max(0, ((most + 1) * width - plane.byte_count) // band.unit_bytes + 1)

    plane = min(band.planes, key=pages_within)
    if band.page_count > pages_within(plane):
        raise ValueError(
            f"kernels with {offset_bits}-bit offsets cannot address plane {plane.name!r} of layer {plane.layer} in band "
            f"{band.name!r}: of its {band.page_count} pages of {band.unit_bytes} bytes, element {most}, the last they reach, "
            f"lies behind {pages_within(plane)}: use kernels with 64-bit offsets, or a smaller arena"
        )


def _view(arena: KVArena, band: BandLayout, layer: int) -> LayerView:
    own = [plane for plane in band.planes if plane.layer == layer]
    return LayerView(
        band=band.name,
        page_tokens=band.page_tokens,
        planes={plane.name: arena.plane(band, plane) for plane in own},
        tokens_per_entry=1 if band.page_tokens is None else band.page_tokens // own[0].shape[0],
    )
