"""The page for users of Horovod: its script runs on four ranks, and the names in its table exist."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

import hpcsgd
import programs
from pythons import python

PAGE = (Path(__file__).parents[2] / "docs/from-horovod.md").read_text()
SCRIPT = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_script_runs(tmp_path: Path) -> None:
    (script,) = SCRIPT.findall(PAGE)
    (tmp_path / "train.py").write_text(script)
    done = programs.run([programs.mpiexec(), "-n", "4", *python("train.py")], cwd=tmp_path)
    assert re.fullmatch(r"mean loss \d\.\d\d\n", done.stdout)


def test_the_names_exist() -> None:
    names = set(re.findall(r"\bhpcsgd((?:\.\w+)+)\(", PAGE))
    assert len(names) > 8
    for name in names:
        functools.reduce(getattr, name[1:].split("."), hpcsgd)
    topology = set(re.findall(r"`topology\.(\w+)`", PAGE))
    assert topology >= {"rank", "world_size", "local_rank"}
    fields = {*vars(hpcsgd.Topology), *hpcsgd.Topology.__dataclass_fields__}
    assert topology <= fields
