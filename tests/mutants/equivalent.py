"""Mutants that change nothing that anyone could notice, and why."""

from __future__ import annotations

from collections.abc import Mapping

EQUIVALENT: Mapping[tuple[str, str, str], str] = {
    (
        "hpcsgd/engine/with_state.py",
        "def ready_for(self, call: str, *, across: bool = True) -> StepContext:",
        "def ready_for(self, call: str, *, across: bool = False) -> StepContext:",
    ): "an abstract method's default is that of nobody",
    (
        "hpcsgd/elastic/elastic_average.py",
        "OVER = 3",
        "OVER = 4",
    ): "states are compared with each other, and this one stays the largest",
    (
        "hpcsgd/elastic/ring.py",
        "if addend is not None and (came - added * size >= _BLOCK or came == len(incoming)):",
        "if addend is not None and ((came + (added * size)) >= _BLOCK or came == len(incoming)):",
    ): "it adds in smaller blocks, which gives the same bits",
    (
        "hpcsgd/report/curves.py",
        'marker = "." if len(found[name]) < SMOOTHED_FROM else None',
        'marker = "." if len(found[name]) <= SMOOTHED_FROM else None',
    ): "from how many points of a line on they have no marks",
    (
        "hpcsgd/report/page/bars.py",
        'ranks = {"title": "rank", "dtick": 1} if len(found) <= 16 else {"title": "rank"}',
        'ranks = {"title": "rank", "dtick": 1} if len(found) <= 17 else {"title": "rank"}',
    ): "up to how many ranks each has its number below its bar",
    (
        "hpcsgd/performance/probing/delta.py",
        'part.write_text(json.dumps(to_json(changes, setting(config)), indent=1) + "\\n")',
        'part.write_text(json.dumps(to_json(changes, setting(config)), indent=2) + "\\n")',
    ): "blanks between the values of a JSON file",
}
"""The reason for each mutant, by its file and its stripped line before and after the change."""
