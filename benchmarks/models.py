"""Hybrid models of the comparison, as numbers, and the bytes that a request needs at the least. NumPy and kvtide are not needed."""

import math
from dataclasses import dataclass

import numpy as np

BUDGET_BYTES = 40_000_000_000
LENGTHS = (1024, 8192, 65536)


@dataclass(frozen=True)
class Model:
    """Layers by kind; keys and values in bfloat16, convolutions too, recurrent states in float32."""

    name: str
    full_layers: int
    kv_heads: int
    head_dim: int
    window_layers: int = 0
    window_tokens: int = 0
    state_layers: int = 0
    conv_shape: tuple[int, ...] = ()
    recurrent_shape: tuple[int, ...] = ()

    @property
    def entry_bytes(self) -> int:
        """A token's in one attention layer."""
        return 2 * self.kv_heads * self.head_dim * 2

    @property
    def full_token_bytes(self) -> int:
        """A token's in all full-attention layers."""
        return self.full_layers * self.entry_bytes

    @property
    def window_token_bytes(self) -> int:
        """A token's in all window layers."""
        return self.window_layers * self.entry_bytes

    @property
    def state_layer_bytes(self) -> int:
        """A request's in one state layer."""
        return 2 * math.prod(self.conv_shape) + 4 * math.prod(self.recurrent_shape) if self.conv_shape else 0

    @property
    def state_bytes(self) -> int:
        """A request's in all state layers."""
        return self.state_layers * self.state_layer_bytes

    def needed_bytes(self, tokens: int) -> int:
        """What the next token of a request with `tokens` resident ones needs, whoever keeps it."""
        in_windows = min(tokens, self.window_tokens) * self.window_token_bytes
        return tokens * self.full_token_bytes + in_windows + self.state_bytes


MODELS = (
    Model("gpt-oss-120b", 18, 8, 64, window_layers=18, window_tokens=128),
    Model("Gemma-3-27B", 10, 16, 128, window_layers=52, window_tokens=1024),
    Model(
        "Qwen3-Next-80B", 12, 2, 256, state_layers=36, conv_shape=(8192, 3), recurrent_shape=(32, 128, 128)
    ),
    Model(
        "Jamba-1.5-mini-like", 4, 8, 128, state_layers=28, conv_shape=(8192, 3), recurrent_shape=(8192, 16)
    ),
)


def mixed_lengths() -> list[int]:
    """Resident lengths of a mixed batch: log-normal, median 2,000, no multiple of any page."""
    draw = np.random.default_rng(7)
    lengths: list[int] = np.clip(draw.lognormal(np.log(2000), 1.1, 4000), 64, 65536).astype(int).tolist()
    return lengths


def ideal_count(model: Model, lengths: list[int]) -> int:
    """How many requests of `lengths`, in order, a budget without any loss holds."""
    needed = np.cumsum([model.needed_bytes(length) for length in lengths])
    return int(np.searchsorted(needed, BUDGET_BYTES, side="right"))
