"""Write the page: a template makes the tables, Plotly draws the plots from data in the page.

The page's content security policy allows it to load nothing, and to run only the two scripts whose hashes are
in the policy.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from hpcsgd.errors import UserError
from hpcsgd.files.atomic import overwrite
from hpcsgd.report.page import panels, tables
from hpcsgd.report.page.attempts import COMPLETE
from hpcsgd.report.page.runs import Run, find, load

log = logging.getLogger(__name__)

LARGEST = 5_000_000
"""Maximum number of bytes of a page."""
PAUSE = 4
"""While runs are followed, the pause between two pages is at least this multiple of the writing time."""


def write(paths: Sequence[Path], target: Path | None = None) -> Path:
    """Write the page of these runs to `target`, and return its path.

    The default `target` is ``report.html``, in the folder in `paths` if there is only one, otherwise in the
    working directory. Raises `UserError` if a folder cannot be read or the page cannot be written.
    """
    _library()  # fail early if a library is missing
    found = find(paths)
    target = _target(paths, target)
    _write(target, [load(label, folder) for label, folder in found.items()])
    return target


def follow(paths: Sequence[Path], target: Path | None = None, every: int = 10) -> Path:
    """Write the page again and again, from the runs' files, until all runs are complete.

    The page reloads itself.
    """
    _library()
    if every < 1:
        raise UserError(f"--every {every}: at least a second")
    target = _target(paths, target)
    done = written = False
    while not done:
        began = time.monotonic()
        try:
            runs = [load(label, folder) for label, folder in find(paths).items()]
            done = all(run.state == COMPLETE for run in runs)
            _write(target, runs, every=0 if done else every)
            written = True
        except UserError as error:
            if not written:
                raise
            log.warning("%s: will look again", error)  # a resuming run may be cutting its metrics now
        if not done:
            time.sleep(max(every, PAUSE * (time.monotonic() - began)))
    return target


def _target(paths: Sequence[Path], target: Path | None) -> Path:
    if target is not None and target.is_dir():
        raise UserError(f"--to {target}: a folder, and the page is a file: name one in it")
    return target or (paths[0] / "report.html" if len(paths) == 1 else Path("report.html"))


def _write(target: Path, runs: Sequence[Run], every: int = 0) -> None:
    points = panels.POINTS
    while len(page := render(runs, every, points).encode()) > LARGEST:
        points //= 2
        if panels.share(runs, 2 * points) == panels.LEAST:
            raise UserError(f"{target}: {len(page):,} bytes, at most {LARGEST:,}: name fewer runs")
    try:
        overwrite(target, page.decode())
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from error


def render(runs: Sequence[Run], every: int, points: int) -> str:
    """Return the page, with about `points` points in its plots."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    library = _library()
    script = _resource("page.js")
    buckets = panels.share(runs, points)
    found = panels.panels(runs, buckets)
    configuration = tables.configuration(runs)
    sections = groupby(enumerate(found), key=lambda numbered: numbered[1].section)
    return environment.from_string(_resource("page.html.j2")).render(
        title=runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        version=version("hpcsgd"),
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
        allowed=f"{_hash(script)} {_hash(library)}",
        every=every,
        runs=runs,
        figures=tables.figures(runs),
        differing=[row for row in configuration if row.differs],
        sections=[(section, list(inside)) for section, inside in sections],
        traced=any(run.ranks for run in runs),
        TIME=panels.TIME,
        WHEN=panels.WHEN,
        starts=tables.starts,
        start_head=tables.START_HEAD,
        words=tables.words,
        configuration=configuration,
        environment=tables.environment(runs),
        css=_resource("page.css"),
        data=_json(panels.data(runs, found, buckets)),
        crowded=panels.crowded_out(runs),
        library=_packed(library),
        script=script,
    )


def _json(data: Any) -> str:
    """Return `data` as JSON without ``<``, ``>`` and ``&``, so that it can stand in a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


@cache
def _packed(script: str) -> str:
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _resource(name: str) -> str:
    return files("hpcsgd.report.page").joinpath(name).read_text(encoding="utf-8")


def _library() -> str:
    """Return Plotly's script from its package."""
    try:
        from jinja2 import Environment  # noqa: F401 - the template needs it
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        name = (error.name or "plotly").partition(".")[0]
        raise UserError(f'the report needs the library `{name}`: pip install "hpcsgd[report]"') from error
    return get_plotlyjs()
