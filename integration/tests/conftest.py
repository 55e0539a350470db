"""Without a GPU, Triton programs run in Triton's interpreter. It is chosen when they are compiled, so before any import of Triton."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
