"""``hpcsgd init``: ask for settings that no flag gives, and write the files that do not exist yet."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection
from pathlib import Path

from hpcsgd.cluster.starting.choices import COLLECTIONS, METHODS
from hpcsgd.cluster.starting.job_file import Request, commands, data_named, job_text, require_sense
from hpcsgd.cluster.starting.site import is_cluster, site_text
from hpcsgd.config.schema import checked
from hpcsgd.errors import UserError
from hpcsgd.files.atomic import new_file

Ask = Callable[[str], str]
SITES = (Path("site.toml"), Path("~", ".config", "hpcsgd", "site.toml"))
"""The paths at which `hpcsgd job` looks for ``site.toml``."""


def begin(
    file: Path,
    *,
    data: str | None = None,
    model: str | None = None,
    ranks: int | None = None,
    groups: int | None = None,
    method: str | None = None,
    epochs: int | None = None,
    data_file: Path | None = None,
    ask: Ask | None = None,
) -> list[str]:
    """Write the job file and, in a cluster, a missing ``site.toml``; return lines of text about them.

    `ask` puts a question to the user and returns the answer; without it, missing values get defaults.
    Mistakes raise `UserError` before anything is written.
    """
    if file.exists():
        raise UserError(f"{file}: is there already, and stays as it is: give another name")
    if not file.parent.is_dir():
        raise UserError(f"{file}: there is no folder {file.parent}")
    asked = _Asked(ask)
    data = asked.word("data", data, COLLECTIONS, None, others=".h5")
    kind = data_named(data, data_file)
    model = asked.word("model", model, kind.kind.models, next(iter(kind.kind.models)))
    ranks = asked.number("ranks", ranks, 4)
    groups = asked.number("groups", groups, ranks // 2 if ranks % 2 == 0 and ranks > 2 else ranks)
    method = asked.word("method", method, METHODS, "hierarchical" if groups > 1 else "bsp")
    place = data_file or (Path(data) if data.endswith(".h5") else file.parent / f"{data}.h5")
    wanted = Request(data, model, ranks, groups, method, place, epochs)
    require_sense(wanted, kind)
    text = job_text(wanted, kind, file)
    checked(tomllib.loads(text), file)
    _write(file, text)
    lines = [f"written   {file}", *_write_site()]
    return [*lines, *(f"next      {command}" for command in commands(wanted, kind, file))]


def _write_site() -> list[str]:
    if not is_cluster():
        return []
    if there := next((place for place in SITES if place.expanduser().exists()), None):
        return [f"site      {there} stays as it is"]
    _write(SITES[0], site_text())
    return [f"written   {SITES[0]}: look it through, it is what Slurm tells"]


def _write(file: Path, text: str) -> None:
    try:
        with new_file(file) as part:
            part.write_text(text, encoding="utf-8")
    except FileExistsError:
        raise UserError(f"{file}: is there already, and stays as it is: give another name") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}") from error


class _Asked:
    """Asks the user until an answer is valid; uses defaults if nobody can be asked."""

    def __init__(self, ask: Ask | None) -> None:
        self._ask = ask

    def word(
        self, name: str, given: str | None, allowed: Collection[str], default: str | None, others: str = ""
    ) -> str:
        """Return the answer, which must be one of `allowed` or, if `others` is set, end with `others`."""
        if given is not None:
            return given
        names = ", ".join(allowed)
        if self._ask is None:
            if default is None:
                raise UserError(f"--{name} is missing. Allowed: {names}, or an {others} dataset file")
            return default
        while True:
            answer = self._ask(_question(name, names, default)).strip() or default or ""
            if answer in allowed or (others and answer.endswith(others)):
                return answer

    def number(self, name: str, given: int | None, default: int) -> int:
        if given is not None or self._ask is None:
            return default if given is None else given
        while True:
            answer = self._ask(_question(name, "", str(default))).strip() or str(default)
            if answer.isdecimal() and int(answer) > 0:
                return int(answer)


def _question(name: str, names: str, default: str | None) -> str:
    return f"{name}{f' ({names})' if names else ''}{f' [{default}]' if default else ''}: "
