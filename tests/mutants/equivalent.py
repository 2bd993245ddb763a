"""Mutants that change nothing that anyone could notice, and why."""

from __future__ import annotations

from collections.abc import Mapping

EQUIVALENT: Mapping[tuple[str, str, str], str] = {}
"""File, line before and line after, both stripped → the reason."""
