"""Write the recommended groups and method into the job file, and leave its other lines unchanged."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from hpcsgd.config.reader import as_table
from hpcsgd.config.schema import load
from hpcsgd.errors import UserError, count_text
from hpcsgd.files.atomic import replacing
from hpcsgd.files.reading import read_json, read_text

_HEADER = re.compile(r"^\s*\[\[?\s*([^\]\s.]+)[^\]]*\]\]?\s*(#.*)?$")


def write_choice(path: Path, groups: int, method: Mapping[str, Any]) -> None:
    """Set the number of groups and the method in the job file `path`.

    Raises `UserError`, and leaves the file unchanged, if [parallel] and [method] are not sections of their
    own but, for instance, inline tables.
    """
    before = read_text(path)
    wanted = tomllib.loads(before)
    kept = wanted.get("parallel", {})
    parallel = {key: value for key, value in kept.items() if key not in ("groups", "group_size")}
    wanted |= {"parallel": {"groups": groups, **parallel}, "method": dict(method)}
    text = before
    for section in ("parallel", "method"):
        text = _with_section(text, section, wanted[section])
    try:
        same = tomllib.loads(text) == wanted
    except tomllib.TOMLDecodeError:
        same = False
    if not same:
        raise UserError(
            f"{path}: [parallel] and [method] are not separate sections: set "
            f"groups = {groups} and {method['name']} there yourself"
        )
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def nodes_of(plan: Path, path: Path, overrides: Sequence[str]) -> tuple[int, int]:
    """Return the number of nodes, and of ranks per node, that a plan recommends for the job file `path`.

    Raises `UserError` if `plan` is not a plan.json, or if the job file has other groups or another method.
    """
    try:
        choice = read_json(plan)["choice"]
        nodes, ranks, groups, method = (choice[key] for key in ("nodes", "ranks", "groups", "method"))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{plan}: not the plan.json of hpcsgd plan: {error}") from error
    config = load(path, overrides)
    if (config.parallel.groups, as_table(config.method)) != (groups, method):
        raise UserError(
            f"{path}: the plan is for {count_text(groups, 'group')} and {choice['label']}: put it there "
            "with hpcsgd plan "
            "--write, or leave --plan out"
        )
    return nodes, ranks // nodes


def _with_section(text: str, name: str, table: Mapping[str, Any]) -> str:
    """Return `text` with section `name` and its subsections replaced with `table`, in the same place."""
    kept: list[str] = []
    place: int | None = None
    inside = False
    for line in text.splitlines(keepends=True):
        if found := _HEADER.match(line):
            inside = found[1] == name
            if inside and place is None:
                place = len(kept)
        if not inside:
            kept.append(line)
    body = tomli_w.dumps({name: dict(table)}).rstrip() + "\n\n"
    if place is None:
        return "".join(kept).rstrip("\n") + "\n\n" + body.rstrip() + "\n"
    last = place == len(kept)
    return "".join([*kept[:place], body.rstrip() + "\n" if last else body, *kept[place:]])
