"""Mutants that change nothing that anyone could notice, and why."""

from __future__ import annotations

from collections.abc import Mapping

EQUIVALENT: Mapping[tuple[str, str, str], str] = {
    (
        "hpcsgd/islands/meetings.py",
        "OVER = 3",
        "OVER = 4",
    ): "states are compared with each other, and this one stays the largest",
    (
        "hpcsgd/islands/ring.py",
        "if addend is not None and (came - added * size >= _BLOCK or came == len(incoming)):",
        "if addend is not None and ((came + (added * size)) >= _BLOCK or came == len(incoming)):",
    ): "it adds in smaller blocks, which gives the same bits",
    (
        "hpcsgd/training/delta.py",
        'part.write_text(json.dumps(to_json(changes, setting(config)), indent=1) + "\\n")',
        'part.write_text(json.dumps(to_json(changes, setting(config)), indent=2) + "\\n")',
    ): "blanks between the values of a JSON file",
}
"""File, line before and line after, both stripped → the reason."""
