"""``hpcsgd init``: ask for settings that no flag gives, and write the files that do not exist yet."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from hpcsgd.cluster.starting.choices import COLLECTIONS, METHODS
from hpcsgd.cluster.starting.job_file import (
    Request,
    commands,
    data_named,
    job_text,
    require_groups,
    require_method,
    require_model,
    require_positive,
)
from hpcsgd.cluster.starting.site import is_cluster, site_text
from hpcsgd.config.schema import checked
from hpcsgd.errors import UserError
from hpcsgd.files.atomic import new_file

Ask = Callable[[str], str]
Answer = TypeVar("Answer", str, int)
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
    if epochs is not None:
        require_positive("epochs", epochs)
    asked = _Asked(ask)
    data = asked.text("data", data, None, [*COLLECTIONS, "FILE.h5"], lambda name: data_named(name, data_file))
    kind = data_named(data, data_file)
    models = kind.kind.models
    offered = [*models, "package.module:function"]
    model = asked.text("model", model, next(iter(models)), offered, lambda name: require_model(name, kind))
    ranks = asked.number("ranks", ranks, 4, lambda n: require_positive("ranks", n))
    usual = ranks // 2 if ranks % 2 == 0 and ranks > 2 else ranks
    groups = asked.number("groups", groups, usual, lambda n: require_groups(n, ranks))
    method = asked.text("method", method, "hierarchical" if groups > 1 else "bsp", METHODS, require_method)
    place = data_file or (Path(data) if data.endswith(".h5") else file.parent / f"{data}.h5")
    wanted = Request(data, model, ranks, groups, method, place, epochs)
    text = job_text(wanted, kind, file)
    checked(tomllib.loads(text), file)
    _write(file, text)
    lines = [f"written   {file}", *_write_site()]
    if model not in models:
        lines.append(f"next      write the arguments of {model} into [model.arguments] of {file}")
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


@dataclass(frozen=True)
class _Question(Generic[Answer]):
    """The question for the setting `name`. `allowed`: the answers that it lists, if it lists any."""

    name: str
    default: Answer | None
    allowed: str
    read: Callable[[str], Answer]
    """Makes an answer of the user's words."""
    require: Callable[[Answer], object]
    """Raises `UserError` for an answer that is a mistake."""

    def put(self, ask: Ask) -> Answer:
        """Ask until the answer is valid; before the question is repeated, say what was wrong."""
        usual = "" if self.default is None else f" [{self.default}]"
        question, wrong = f"{self.name}{f' ({self.allowed})' if self.allowed else ''}{usual}: ", ""
        while True:
            words = ask(wrong + question).strip()
            if not words and self.default is not None:
                return self.default
            try:
                return self.valid(self.read(words) if words else None)
            except UserError as error:
                wrong = f"{error}\n"

    def valid(self, answer: Answer | None) -> Answer:
        """Return `answer`, or raise `UserError` if it is missing or a mistake."""
        if answer is None:
            raise UserError(f"--{self.name} is missing. Allowed: {self.allowed}")
        self.require(answer)
        return answer


class _Asked:
    """Asks the user until an answer is valid; uses defaults if nobody can be asked."""

    def __init__(self, ask: Ask | None) -> None:
        self._ask = ask

    def text(
        self,
        name: str,
        given: str | None,
        default: str | None,
        allowed: Collection[str],
        require: Callable[[str], object],
    ) -> str:
        """Return `given`, the user's answer or the default; `require` raises `UserError` for a mistake."""
        return self._answer(given, _Question(name, default, ", ".join(allowed), str, require))

    def number(self, name: str, given: int | None, default: int, require: Callable[[int], object]) -> int:
        """Return `given`, the user's answer or the default; `require` raises `UserError` for a mistake."""
        return self._answer(given, _Question(name, default, "", _number, require))

    def _answer(self, given: Answer | None, question: _Question[Answer]) -> Answer:
        if given is None and self._ask is not None:
            return question.put(self._ask)
        return question.valid(question.default if given is None else given)


def _number(words: str) -> int:
    if not words.isdecimal():
        raise UserError(f"{words}: expected a whole number")
    return int(words)
