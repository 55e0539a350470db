"""From a layer to its views (row A4)."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from kvtide.arena.memory import KVArena
from kvtide.plan import ArenaLayout


@attrs.frozen(eq=False)
class LayerView:
    """The planes of one layer in one band."""

    band: str
    """Whose physical ids index the planes."""

    page_tokens: int | None
    """Tokens a page; `None` for state."""

    planes: Mapping[str, torch.Tensor]
    """By name: `[page_count, page_tokens, …]` for attention, `[slot_count, …]` for state."""


class RoutedKVCache:
    """Layer → its attention view and its state view, over one arena, made once."""

    def __init__(self, arena: KVArena, layout: ArenaLayout) -> None:
        """View every plane of every band of `layout`."""
        self._attention: dict[int, LayerView] = {}
        self._state: dict[int, LayerView] = {}
        for band in layout.bands:
            routed = self._state if band.page_tokens is None else self._attention
            for layer in sorted({plane.layer for plane in band.planes}):
                planes = {
                    plane.name: arena.plane(band, plane) for plane in band.planes if plane.layer == layer
                }
                routed[layer] = LayerView(band=band.name, page_tokens=band.page_tokens, planes=planes)

    def attention(self, layer: int) -> LayerView | None:
        """Keys and values, or the latent, of `layer`; `None` where it stores none."""
        return self._attention.get(layer)

    def state(self, layer: int) -> LayerView | None:
        """Recurrent state of `layer`; `None` where it has none."""
        return self._state.get(layer)
