"""The report at the end of a run: files in the run's folder, and lines to print."""

from __future__ import annotations

from pathlib import Path

from hpcsgd.elastic import event_log
from hpcsgd.report import records, replica_groups, run_folder, trace
from hpcsgd.report.overlap import per_step
from hpcsgd.report.summary import summary, summary_text


def report(folder: Path) -> str:
    """Write `summary.json`, `curves.png`, and `timeline.png` if steps were traced, to the run's `folder`.

    Return the lines to print. If nothing was recorded, return "" and write nothing.
    """
    from hpcsgd.report.curves import plot_curves  # matplotlib is slow to import
    from hpcsgd.report.timeline import plot_timeline

    found = list(records.of_run(folder))
    if not found and not (folder / records.METRICS).exists():
        return ""
    numbers = summary(found)
    samples, events = records.samples_of_replica_groups(folder), event_log.of_run(folder)
    numbers |= replica_groups.numbers(events, samples, numbers["seconds"])
    if (traced := folder / trace.NAME).exists():
        numbers["trace"] = per_step(traced)
        plot_timeline(traced, folder / "timeline.png")
    run_folder.write_summary(folder, numbers)
    plot_curves(found, folder / "curves.png")
    return f"{summary_text(numbers)}\nwritten   {folder}"
