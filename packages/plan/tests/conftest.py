"""Fixtures of the planner's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SHARED_DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"


@pytest.fixture(scope="session")
def shared_configs() -> dict[str, dict[str, Any]]:
    """Published `config.json` files by `organisation/model`; skips where the optional data folder is missing."""
    files = sorted((SHARED_DATA / "configs").glob("*.json"))
    if not files:
        pytest.skip("needs the optional folder ../shared/data beside the repository")
    return {file.stem.replace("--", "/"): json.loads(file.read_text()) for file in files}


@pytest.fixture(scope="session")
def measured_models() -> dict[str, dict[str, Any]]:
    """Cache geometry measured in transformers, by model name; skips where the optional data folder is missing."""
    file = SHARED_DATA / "models.json"
    if not file.exists():
        pytest.skip("needs the optional folder ../shared/data beside the repository")
    return {entry["model"]: entry for entry in json.loads(file.read_text())}
