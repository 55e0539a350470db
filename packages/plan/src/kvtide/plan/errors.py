"""Errors of the planner: one base, so that a command line can turn any of them into one line."""

from __future__ import annotations


class PlanError(ValueError):
    """A declaration, a config or an arena size that cannot be planned; the text names field and value."""
