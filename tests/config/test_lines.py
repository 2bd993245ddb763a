"""The line number in the message about a mistake in a job file is the right one, or there is none."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from hpcsgd.comm import Communicator, threads
from hpcsgd.config.at_line import at_line, line_of
from hpcsgd.config.lines import lines
from hpcsgd.config.schema import load
from hpcsgd.core.topology import raise_on_all_ranks, shape
from hpcsgd.errors import About, JobError, UserError, in_file, in_section, located
from hpcsgd.report.loggers import require_loggers
from hpcsgd.train.loading import make_partition
from hpcsgd.train.parts import make_method

ROOT = Path(__file__).parents[2]
TRICKY = '''\
# [not] = a table
seed = 1 # nor = this
a.b = "x # \\" [no]"
"q # \\"x" = """
[method]
sync_every = 1 \\"""
"""
's' = \'\'\'
[data]
path = 2''\'\'\'
[t . "u.v"] # comment
x = { y = 1, z = { w = "}" } }
list = [ # c ]
  { one = 1 },
  "]", 'x', [1, 2], { two = 2, three = [ ] },
]
when = 1979-05-27 07:32:00
[[l]]
a = 1
[[l.m]]
b = 1
[[l]]
a = 2
[l.n]
c = 3
'''
PLACES = {
    ("seed",): 2, ("a",): 3, ("a", "b"): 3, ('q # "x',): 4, ("s",): 8, ("t",): 11, ("t", "u.v"): 11,
    ("t", "u.v", "x"): 12, ("t", "u.v", "x", "y"): 12, ("t", "u.v", "x", "z"): 12,
    ("t", "u.v", "x", "z", "w"): 12, ("t", "u.v", "list"): 13, ("t", "u.v", "list", 0, "one"): 14,
    ("t", "u.v", "list", 4, "two"): 15, ("t", "u.v", "list", 4, "three"): 15, ("t", "u.v", "when"): 17,
    ("l",): 18, ("l", 0, "a"): 19, ("l", 0, "m"): 20, ("l", 0, "m", 0, "b"): 21, ("l", 1, "a"): 23,
    ("l", 1, "n"): 24, ("l", 1, "n", "c"): 25,
}  # fmt: skip

JOB = """\
seed = 1

[data]
path = "s.h5"
group_batch_size = 8

[method] # sync_every = 3
name = "hierarchical"
sync_every = 0
grad_reduce = { name = "sparse", sparsifier = { name = "topk", density = 2 } }

[training]
steps = 3
samples = 4
"""


def test_every_key_has_its_line() -> None:
    assert lines(TRICKY) == PLACES
    assert lines(TRICKY.replace("\n", "\r\n").replace('"""\r\n[method]', '"""\n[method]')) == PLACES


@pytest.mark.parametrize("text", ["[method\n", "a = 1\na = 2\n", "a = \n", "a = {"])
def test_what_is_no_toml_has_none(text: str) -> None:
    assert lines(text) == {}


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.toml")), ids=lambda file: file.name)
def test_the_examples(file: Path) -> None:
    text = file.read_text()
    found = lines(text)
    assert found
    for path, line in found.items():
        assert str(path[-1]) in text.splitlines()[line - 1]


LEAVES = st.integers() | st.booleans() | st.text() | st.floats(allow_nan=False)
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=4))


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.booleans())
def test_any_file(tables: dict[str, Any], multiline: bool) -> None:
    text = tomli_w.dumps(tables, multiline_strings=multiline)
    found = lines(text)
    assert set(found) == set(_keys(tomllib.loads(text)))
    for path, line in found.items():
        some = text.split("\n")[line - 1]
        assert str(path[-1]) in some or '"' in some


def _keys(value: Any, place: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    pairs = list(
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    own = [(*place, key) for key, _ in pairs if isinstance(key, str)]
    return own + [path for key, inner in pairs for path in _keys(inner, (*place, key))]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    return Path("job.toml")


DENSITY = ("method", "grad_reduce", "sparsifier", "density")


@pytest.mark.parametrize(
    ("key", "value", "flags", "line"),
    [
        (("seed",), 1, "", 1),
        (("data", "group_batch_size"), 8, "", 5),
        (("data",), None, "", 3),
        (("method", "sync_every"), 0, "", 9),
        (("method", "evry"), None, "", 7),
        (("method", "name"), None, "", 8),
        (DENSITY, 2, "", 10),
        (("method", "grad_reduce", "sparsifier", "name"), None, "", 10),
        (("training", "steps"), 3, "", 13),
        (("training", "epochs"), None, "", 12),
        (("model", "name"), None, "", None),
        ((), None, "", None),
        # the value in the file is not the wrong one
        (("method", "sync_every"), 1, "", None),
        (("method", "sync_every"), 0, "--method.sync_every 0", None),
        (("method", "sync_every"), 0, "--method.sync_every=0", None),
        (("method", "sync_every"), 0, "--method {name='x'}", None),
        (("method", "sync_every"), 0, "--method.name x", 9),
        (DENSITY, 2, "--method.grad_reduce.name x", 10),
        (("method", "grad_reduce"), None, "--method.grad_reduce.name x", None),
        (("method", "grad_reduce"), None, "--method.name x", None),
        (("method", "grad_reduce"), None, "--data.group_batch_size 8", 10),
        (("method", "evry"), None, "--method.evry 3", None),
        (("training", "epochs"), None, "--training.steps none", None),
        (("method",), None, "--data.group_batch_size 8", None),
    ],
)
def test_a_key_and_its_line(
    file: Path, key: tuple[str, ...], value: int | None, flags: str, line: int | None
) -> None:
    assert line_of(About(str(file), key, value), file, flags.split()) == line
    told = f"{file}: no" if line is None else f"{file}:{line}: no"
    with pytest.raises(JobError) as caught, at_line(file, flags.split()):
        raise JobError("no", key=key, value=value, file=file)
    assert str(caught.value) == told


def test_other_files_have_none(file: Path) -> None:
    assert line_of(About("other.toml", ("method", "sync_every"), 0), file) is None
    assert line_of(About(None, ("method", "sync_every"), 0), file) is None
    assert line_of(About("none.toml", ("method", "sync_every"), 0), Path("none.toml")) is None
    with pytest.raises(UserError, match=r"^--method.sync_every 0: no$"), at_line(file):
        raise UserError("--method.sync_every 0: no", key="sync_every")
    told = r"^variant 'a': job.toml: \[method\]: no$"
    a = located("variant 'a'")
    with pytest.raises(UserError, match=told), at_line(file), a, in_file(file), in_section("method"):
        raise UserError("no")


SPARSE = 'grad_reduce = { name = "sparse", sparsifier = { name = "topk", density = 2 } }'
WHOLE = """\
[parallel]
groups = 3

[data]
path = "s.h5"
group_batch_size = 8
partition = { name = "dirichlet", alpha = 0 }

[model]
name = "mlp"

[optimizer]
lr = 0.1

[method]
name = "hierarchical"
sync_every = 4

[training]
epochs = 1
"""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lr = 0.1": "lr = -0.1"}, "job.toml:13: [optimizer] lr = -0.1: expected number > 0"),
        ({"lr = 0.1": ""}, "job.toml:12: [optimizer] lr is missing: expected number > 0"),
        (
            {"groups = 3": "groups = 3\ngroup_size = 2"},
            "job.toml:2: [parallel]: groups = 3 and group_size = 2: give",
        ),
        (
            {"epochs = 1": "steps = 1\nsamples = 2"},
            "job.toml:20: [training]: steps = 1 and samples = 2: give",
        ),
        ({"epochs": "epoch"}, "job.toml:20: [training] epoch = 1: unknown key: did you mean 'epochs'?"),
        ({"[parallel]": "[parallels]"}, "job.toml:1: [parallels]: unknown section: did you mean 'parallel'?"),
        ({"sync_every = 4": "sync_every = 0"}, "job.toml:17: [method]: sync_every = 0: groups average"),
        (
            {"sync_every = 4": 'sync_every = "4"'},
            "job.toml:17: [method]: hierarchical: sync_every = '4': expected int",
        ),
        ({"sync_every = 4": "evry = 4"}, "job.toml:17: [method]: hierarchical has no argument 'evry'"),
        ({"sync_every = 4": ""}, "job.toml:15: [method]: hierarchical needs 'sync_every'"),
        ({'"hierarchical"': '"hierachical"'}, "job.toml:16: [method] name: no 'hierachical'; did you mean"),
        (
            {"sync_every = 4": f"sync_every = 4\n{SPARSE}"},
            "job.toml:18: [method] grad_reduce sparsifier: density = 2: the share",
        ),
        (
            {"sync_every = 4": 'sync_every = 4\n[method.grad_reduce]\nname = "sparse"\nsparsifier = "topc"'},
            "job.toml:20: [method] grad_reduce sparsifier: no 'topc'",
        ),
        (
            {"epochs = 1": 'epochs = 1\n[run]\ntrace_steps = "7-1"'},
            'job.toml:22: [run]: trace_steps = "7-1": expected',
        ),
        (
            {"epochs = 1": 'epochs = 1\n[run]\nloggers = ["tensorbord"]'},
            "job.toml:22: [run] loggers: no 'tensorbord'",
        ),
        ({}, "job.toml:7: [data] partition: alpha = 0: must be a number > 0"),
        (
            {
                "partition = ": "[data.partition]\n",
                '{ name = "dirichlet", alpha = 0 }': 'name = "dirichlet"\nalpha = 0',
            },
            "job.toml:9: [data] partition: alpha = 0: must be a number > 0",
        ),
        (
            {'partition = { name = "dirichlet", alpha = 0 }': ""},
            "job.toml:2: [parallel]: groups = 3 is more than the 2 ranks of the job",
        ),
    ],
)
def test_mistakes_name_their_lines(file: Path, changes: dict[str, str], told: str) -> None:
    text = WHOLE
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)

    def on_each_rank(world: Communicator) -> None:
        with at_line(file), raise_on_all_ranks(world, "reading"):
            config = load(file)
            with in_file(file):
                make_method(config.method, steps_per_epoch=1)
                require_loggers(config.run.loggers or ())
                make_partition(config.data)
                with in_section("parallel"):
                    shape(world.size, config.parallel.groups, config.parallel.group_size)

    with pytest.raises(JobError) as caught:
        threads.run(2, on_each_rank)
    assert str(caught.value).startswith(told)


def test_of_one_rank_alone_no_line_is_reported(file: Path) -> None:
    def on_each_rank(world: Communicator) -> None:
        with at_line(file), raise_on_all_ranks(world, "reading"):
            if world.rank == 1:
                raise UserError("[data]: no", key=("data",), file=file)

    with pytest.raises(JobError, match=r"^rank 1 of 2, reading: job\.toml: \[data\]: no$"):
        threads.run(2, on_each_rank)
