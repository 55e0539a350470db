"""Hypothesis profiles: `pytest --hypothesis-profile nightly` draws thousands where CI draws hundreds."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("nightly", max_examples=5000)
