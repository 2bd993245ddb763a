"""Every key of the schema is on the page with its meaning; a key without an explanation is refused."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pytest

import job_file
import names
from hpcsgd.config.schema import Config, load
from hpcsgd.errors import UserError

ROW = re.compile(r"^\| `(\w+)` \| .+ \| .* \| .+ \|$", re.MULTILINE)
LEAST = """
[data]
path = "x.h5"
group_batch_size = 8
[model]
name = "cnn"
[optimizer]
lr = 0.1
[method]
name = "bsp"
[training]
epochs = 1
"""


def on_page(text: str) -> dict[str, list[str]]:
    """Return the keys of each section on the page."""
    first, *others = text.split("\n## [")
    found = {"": ROW.findall(first)}
    return found | {x.split("]")[0]: ROW.findall(x) for x in others}


def in_schema(kind: type, name: str = "") -> dict[str, list[str]]:
    """Return the keys of each section of the schema, except those with metadata."""
    hints, found = get_type_hints(kind), {name: []}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            found |= in_schema(hints[field.name], f"{name}.{field.name}" if name else field.name)
        elif not field.metadata:
            found[name].append(field.name)
    return found


def test_every_key_is_on_the_page() -> None:
    found = on_page(job_file.tables())
    assert found == in_schema(Config)
    assert sum(map(len, found.values())) > 50


def written(path: Path, table: dict[str, Any]) -> Path:
    text = "".join(
        f"[{name}]\n" + "".join(f"{key} = {value!r}\n" for key, value in section.items())
        for name, section in table.items()
    )
    path.write_text(text)
    return path


def test_what_is_to_be_given_is_just_that(tmp_path: Path) -> None:
    table = tomllib.loads(LEAST)
    assert load(written(tmp_path / "job.toml", table)).run.output_dir == Path("runs/job")
    needed = [
        (name, key.name.strip("`"))
        for name, kind in job_file.sections(Config)
        for key in job_file.keys(kind)
        if key.default == job_file.NEEDED
    ]
    assert set(needed) == {
        (name, key) for name, section in table.items() for key in section if key != "epochs"
    }
    for name, key in needed:
        without = {n: {k: v for k, v in s.items() if (n, k) != (name, key)} for n, s in table.items()}
        with pytest.raises(UserError, match=rf"\[{name}\] {key} is missing"):
            load(written(tmp_path / "job.toml", without))


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A section whose keys are all explained."""

    count: int  # how many; docs/gpu.md
    way: Literal["b", "a"] = "b"  # which | one
    place: str  # where; default: here


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncommented:
    """A section with a key that is not explained."""

    count: int  # how many
    way: str = "b"


def test_what_is_said_of_a_key() -> None:
    assert [str(key) for key in job_file.keys(Told)] == [
        "| `count` | int | *to be given* | how many; [gpu](gpu.md) |\n",
        '| `way` | `"b"`, `"a"` | `"b"` | which \\| one |\n',
        "| `place` | str | here | where |\n",
    ]


def test_a_key_without_a_meaning_is_refused() -> None:
    with pytest.raises(job_file.Unexplained, match=r"Uncommented\.way: say what it means"):
        job_file.tables(Uncommented)


def test_every_argument_that_is_a_part_has_its_names() -> None:
    found = {name: set(known) for arguments, known in names.families_of_arguments() for name in arguments}
    assert found["aggregate"] == {"gradients", "parameters"}
    assert found["quantize"] == {"bf16", "fp16", "int2", "int4", "int8"}
    assert found.keys() >= {
        "grad_reduce",
        "first",
        "graph",
        "optimizer_state",
        "outer",
        "selection",
        "sparsifier",
    }
    assert "| `[method] name` | `ad_psgd`, " in names.table()
