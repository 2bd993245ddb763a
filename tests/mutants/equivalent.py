"""Mutants that change nothing that a test could notice, with the reasons."""

from __future__ import annotations

from collections.abc import Mapping

EQUIVALENT: Mapping[tuple[str, str, str], str] = {
    (
        "hpcsgd/engine/with_state.py",
        "def ready_for(self, call: str, *, across: bool = True) -> StepContext:",
        "def ready_for(self, call: str, *, across: bool = False) -> StepContext:",
    ): "the method is abstract, and its own default is never used",
    (
        "hpcsgd/elastic/attempt.py",
        "UNLIKE = 4",
        "UNLIKE = 5",
    ): "states are compared with each other, and this one stays the largest",
    (
        "hpcsgd/elastic/ring.py",
        "if addend is not None and (came - added * size >= _BLOCK or came == len(incoming)):",
        "if addend is not None and ((came + (added * size)) >= _BLOCK or came == len(incoming)):",
    ): "it adds in smaller blocks, which gives the same bits",
    (
        "hpcsgd/comm/ring.py",
        "count = max(math.ceil(x.numel() / P / SEGMENT), 1)",
        "count = max(math.ceil((x.numel() * P) / SEGMENT), 1)",
    ): "a long vector travels in more and smaller segments, which gives the same bits",
    (
        "hpcsgd/data/formats/streams.py",
        "BLOCK = 1 << 20",
        "BLOCK = 1 << 21",
    ): "only the size of the pieces in which a file is read doubles",
    (
        "hpcsgd/comm/gloo.py",
        "self._splits += 1",
        "self._splits += 2",
    ): "the names of communicators stay different from each other",
    (
        "hpcsgd/train/tracing.py",
        "self._began = 0.0",
        "self._began = 1.0",
    ): "only the value of rank 0 is used, which replaces it",
    (
        "hpcsgd/models/resnet18.py",
        "same = stride == 1 and inputs == outputs",
        "same = ((stride == 1) or (inputs == outputs))",
    ): "a block of the network has both or none of the two",
    (
        "hpcsgd/report/curves.py",
        'marker = "." if len(found[name]) < SMOOTHED_FROM else None',
        'marker = "." if len(found[name]) <= SMOOTHED_FROM else None',
    ): "only the number of points from which on a line has no markers differs by one",
    (
        "hpcsgd/report/page/bars.py",
        'ranks = {"title": "rank", "dtick": 1} if len(found) <= 16 else {"title": "rank"}',
        'ranks = {"title": "rank", "dtick": 1} if len(found) <= 17 else {"title": "rank"}',
    ): "only the number of ranks up to which each bar has a number below it differs by one",
    (
        "hpcsgd/performance/probing/delta.py",
        'part.write_text(json.dumps(to_json(changes, setting(config)), indent=1) + "\\n")',
        'part.write_text(json.dumps(to_json(changes, setting(config)), indent=2) + "\\n")',
    ): "only the blanks in a JSON file change",
    (
        "hpcsgd/train/stopping.py",
        "pause = min(int(CHECK_EVERY / per_step), 10_000)",
        "pause = min(int(CHECK_EVERY / per_step), 10001)",
    ): "ranks check one step later, at a step that depends on the clock anyway",
    (
        "hpcsgd/performance/planning/picture.py",
        "axes.set_xticks(ranks, [str(N) for N in ranks], rotation=45 if len(ranks) > 6 else 0)",
        "axes.set_xticks(ranks, [str(N) for N in ranks], rotation=45 if len(ranks) > 6 else 1)",
    ): "only the angle of labels in a picture differs, by one degree",
    (
        "hpcsgd/train/reduce_settings.py",
        'if not {"bucket_cap_mb", "overlap_grad_reduce"} <= training.keys():',
        "if not {'bucket_cap_mb', 'overlap_grad_reduce'} < training.keys():",
    ): "the section always has a length, too, because TrainingSection refuses to have none",
}
"""The reason for each mutant, by its file and its stripped line before and after the change."""
