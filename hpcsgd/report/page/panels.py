"""The plots of the page as plain values: content and titles. `page.js` draws them.

A course is a series of values by step. The page can draw it against steps, samples, seconds or bytes: the
run's `Ruler` says how many of each a step corresponds to.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcsgd.report.figures import FIGURES
from hpcsgd.report.page.bars import count_bars, phase_bars, phase_course, rank_bars
from hpcsgd.report.page.reading import COMPUTED, SPENT, Key
from hpcsgd.report.page.runs import Run
from hpcsgd.report.page.thinning import BUCKETS, Points, ThinnedCourse
from hpcsgd.report.page.timelines import replica_groups, restarts

Trace = dict[str, Any]
LOSS, GROUPS, TIME = "Loss and figures", "Groups", "Time and bytes"
WORK, REST, WHEN = "Optimizer and speed", "Whatever else was recorded", "Starts"
SECTIONS = (LOSS, GROUPS, TIME, WORK, REST, WHEN)
KNOWN: Mapping[Key, tuple[str, str]] = {
    ("step", "loss"): (LOSS, "training loss"),
    **{("eval", key): (LOSS, f"test {figure.name}") for key, figure in FIGURES.items()},
    ("eval", "loss"): (LOSS, "test loss"),
    ("sync", "distance"): (GROUPS, "distance D between groups, at synchronizations"),
    ("eval", "distance"): (GROUPS, "distance D of the groups from their mean, at tests"),
    (COMPUTED, "lssr"): (GROUPS, "LSSR: the fraction of local steps so far"),
    ("method", "density"): (GROUPS, "density: the part of a gradient that is sent"),
    ("method", "error"): (GROUPS, "error ‖e‖: what was not sent yet"),
    (COMPUTED, "mean staleness"): (GROUPS, "staleness: updates by others, mean"),
    (COMPUTED, "mean ahead"): (GROUPS, "steps ahead of the slowest group, mean"),
    ("step", "grads_shared"): (REST, "steps that shared gradients without averaging models"),
    ("step", "lr"): (WORK, "learning rate"),
    ("step", "gradient_norm"): (WORK, "norm of the gradient"),
    ("step", "samples_per_s"): (WORK, "samples/s"),
    ("step", "tokens_per_s"): (WORK, "tokens/s"),
    ("step", "utilization"): (WORK, "part of the peak"),
}
"""Section and title of known courses. Other courses are in `REST`, with their own names as titles."""
SMOOTH = 60
"""Number of points of the smoothed training loss, a line of means."""
FEW = 20
"""The largest number of points of a course whose points are marked."""
LOGARITHMIC_FROM = 20
"""If the largest value exceeds the smallest by more than this factor, the axis is logarithmic."""
POINTS = 100_000
"""Approximate number of points on the whole page, which take 2 MB."""
LEAST = 4
"""Minimum number of buckets (see `thinning`) of a course."""
PANELS = 120
"""Maximum number of panels of courses; a browser is slow with more."""


@dataclass
class Panel:
    """One plot of the page.

    The traces of a `course`, a value over the run, have ``step`` and ``y``. Others are in Plotly's format.
    """

    section: str
    title: str
    traces: list[Trace]
    course: bool = False
    log: bool = False
    note: str = ""
    """Text below the plot."""
    wide: bool = False
    layout: dict[str, Any] = field(default_factory=dict)
    """Plotly's layout options of this plot."""


def panels(runs: Sequence[Run], buckets: int) -> list[Panel]:
    """Return the panels in the order of their sections, without empty ones."""
    phases = [p for run in runs for p, _ in run.reading.totals.phases["seconds"].most_common()]
    phases += [p for run in runs for p in run.reading.totals.phases["bytes"]]
    phases += [p for run in runs for rank in run.ranks.values() for q in rank.seconds.values() for p in q]
    colours = {phase: i for i, phase in enumerate(dict.fromkeys(phases))}
    found = [
        *_courses(runs, buckets),
        *(Panel(GROUPS, **asdict(each)) for each in (*count_bars(runs), *replica_groups(runs))),
        *(Panel(TIME, **asdict(each)) for each in phase_bars(runs, colours)),
        *(Panel(TIME, course=True, **asdict(each)) for each in phase_course(runs, colours)),
        *(Panel(TIME, **asdict(each)) for each in rank_bars(runs, colours)),
        *(Panel(WHEN, **asdict(each)) for each in restarts(runs)),
    ]
    return sorted(found, key=lambda panel: SECTIONS.index(panel.section))


def share(runs: Sequence[Run], points: int = POINTS) -> int:
    """Return the number of buckets per course such that all courses have about `points` points."""
    courses = sum(min(len(run.reading.courses), PANELS) for run in runs)
    return min(BUCKETS, max(LEAST, points // (2 * max(courses, 1))))


def data(runs: Sequence[Run], found: Sequence[Panel], buckets: int) -> dict[str, Any]:
    """Return the data from which the page's script draws the plots."""
    columns = [list(zip(*run.reading.ruler.rows(buckets), strict=True)) for run in runs]
    return {
        "spent": SPENT,
        "runs": [
            {
                "label": html.escape(run.label, quote=False),
                "ruler": [_short(column) for column in ruler],
                "restarts": [a.first_step for a in run.timeline.attempts[1:] if a.first_step],
            }
            for run, ruler in zip(runs, columns, strict=True)
        ],
        "panels": [asdict(panel) for panel in found],
    }


def crowded_out(runs: Sequence[Run]) -> list[str]:
    """Return the titles of courses that the page leaves out, because there are more than `PANELS` panels."""
    return [_title(key) for names in _grouped(runs)[PANELS:] for key in names]


def _grouped(runs: Sequence[Run]) -> list[list[Key]]:
    """Return the keys of the courses in each panel; panels of known courses come first."""
    keys = dict.fromkeys(key for run in runs for key in run.reading.courses)
    order = [*(key for key in KNOWN if key in keys), *(key for key in keys if key not in KNOWN)]
    return _together(order, apart=len(runs) > 1)


def _courses(runs: Sequence[Run], buckets: int) -> Iterator[Panel]:
    for names in _grouped(runs)[:PANELS]:
        courses = {(i, key): c for key in names for i, run in enumerate(runs) if (c := _drawn(run, key))}
        if courses:
            yield _course_panel(names, courses, buckets, len(runs))


def _drawn(run: Run, key: Key) -> ThinnedCourse | None:
    found = run.reading.courses.get(key)
    nothing = key == ("eval", "distance") and found is not None and found.extremes() == (0, 0)
    return None if nothing else found


def _together(keys: Sequence[Key], *, apart: bool) -> list[list[Key]]:
    """Return the keys grouped by panel. Metrics in seconds share a panel, unless colours mean runs."""
    found: dict[object, list[Key]] = {}
    for key in keys:
        shared = not apart and key[0] == "method" and key[1].endswith("_seconds")
        found.setdefault("seconds" if shared else key, []).append(key)
    return list(found.values())


def _course_panel(
    names: Sequence[Key], courses: Mapping[tuple[int, Key], ThinnedCourse], buckets: int, runs: int
) -> Panel:
    section, title = KNOWN.get(names[0]) or (REST, _title(names[0]))
    if len(names) > 1:
        title = "seconds of a step, as noted"
    traces: list[Trace] = []
    for place, ((run, key), course) in enumerate(courses.items()):
        look = {"run": run, "name": _name(key), "colour": run if runs > 1 else place, "of": course.values}
        points = course.points(buckets)
        if key == ("step", "loss") and course.values > FEW:
            traces.append({**look, "look": "faint", **_xy(points)})
            traces.append({**look, "look": "line", "name": "mean", **_xy(course.means(SMOOTH))})
        else:
            traces.append({**look, "look": "line" if len(points) > FEW else "points", **_xy(points)})
    extremes = [found for course in courses.values() if (found := course.extremes())]
    low, high = min((e[0] for e in extremes), default=0), max((e[1] for e in extremes), default=0)
    layout = {"yaxis": {"range": [0, 1.03]}} if names[0] == (COMPUTED, "lssr") else {}
    logarithmic = 0 < LOGARITHMIC_FROM * low < high
    return Panel(section, title, traces, True, logarithmic, _strange(courses), layout=layout)


def _title(key: Key) -> str:
    kind, name = key
    return name if kind in ("method", COMPUTED) else f"{name} ({kind})"


def _name(key: Key) -> str:
    return html.escape(key[1].removesuffix("_seconds"), quote=False)


def _strange(courses: Mapping[tuple[int, Key], ThinnedCourse]) -> str:
    strange = [course for course in courses.values() if course.strange_at is not None]
    if not strange:
        return ""
    first = min(course.strange_at or 0 for course in strange)
    return f"{sum(c.strange for c in strange):,} values that are not finite, the first at step {first:,.0f}"


def _xy(points: Points) -> dict[str, list[float]]:
    return {"step": _short([x for x, _ in points]), "y": _short([y for _, y in points])}


def _short(values: Sequence[float]) -> list[float]:
    """Return the values rounded to six digits, and whole numbers as int, to keep the page small."""
    return [int(v) if v == int(v) and abs(v) < 1e15 else float(f"{v:.6g}") for v in values]
