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
        "hpcsgd/report/curves.py",
        'marker = "." if len(found[name]) < SMOOTHED_FROM else None',
        'marker = "." if len(found[name]) <= SMOOTHED_FROM else None',
    ): "from how many points of a line on they have no marks",
    (
        "hpcsgd/report/ensemble_picture.py",
        'axes.yaxis.set_major_locator(MaxNLocator("auto", integer=epochs > 2, steps=[1, 2, 5, 10]))',
        'axes.yaxis.set_major_locator(MaxNLocator("auto", integer=epochs > 2, steps=[1, 2, 6, 10]))',
    ): "which round numbers stand beside an axis",
    (
        "hpcsgd/report/page/bars.py",
        'ranks = {"title": "rank", "dtick": 1} if len(found) <= 16 else {"title": "rank"}',
        'ranks = {"title": "rank", "dtick": 1} if len(found) <= 17 else {"title": "rank"}',
    ): "up to how many ranks each has its number below its bar",
    (
        "hpcsgd/training/delta.py",
        'part.write_text(json.dumps(to_json(changes, setting(config)), indent=1) + "\\n")',
        'part.write_text(json.dumps(to_json(changes, setting(config)), indent=2) + "\\n")',
    ): "blanks between the values of a JSON file",
}
"""File, line before and line after, both stripped → the reason."""
