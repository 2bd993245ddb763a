"""Names that were changed: an error about an old name contains the new one."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import hpcsgd
from hpcsgd import UserError
from hpcsgd.cli import app
from hpcsgd.config.keys import keys, meant
from hpcsgd.config.schema import Config, load
from hpcsgd.core.traits import GradReduceTraits
from hpcsgd.errors import near_miss
from hpcsgd.performance.simulation.scenario import FailuresSection, MessagesSection
from hpcsgd.renamed import OF_OTHERS, RENAMED, new_name
from hpcsgd.train.families import FAMILIES

NEEDED = (
    '[data]\npath = "a.h5"\ngroup_batch_size = 4\n[model]\nname = "mlp"\n'
    '[method]\nname = "bsp"\n[optimizer]\nlr = 0.1\n'
)
"""The keys that every job file needs."""


def options() -> set[str]:
    """Return the names of the arguments of all commands."""
    commands = [app[name].default_command for name in app if not name.startswith("-")]
    return {name for command in commands if command for name in inspect.signature(command).parameters}


def test_no_old_name_is_a_public_name() -> None:
    assert set(hpcsgd.__all__).isdisjoint(RENAMED)


def test_public_names_exist() -> None:
    """Entries that begin with a capital letter are names of classes."""
    for names in RENAMED.values():
        for name in names:
            assert not name[0].isupper() or name in hpcsgd.__all__, name


def test_the_place_decides_between_two_new_names() -> None:
    assert new_name("staleness", ["max_staleness"]) == "max_staleness"
    assert new_name("staleness", ["overlap_steps", "peers"]) == "overlap_steps"
    assert new_name("staleness", ["peers"]) is None


def test_a_name_that_looks_alike_gives_way_to_the_new_one() -> None:
    assert near_miss("every", ["never", "sync_every"]).startswith("did you mean 'sync_every'? ")


def test_a_name_that_differs_in_case_alone_goes_before_the_new_one() -> None:
    assert near_miss("Reset", ["ResetState", "reset"]).startswith("did you mean 'reset'? ")
    assert near_miss("Reset", ["ResetState", "restart"]).startswith("did you mean 'ResetState'? ")


def test_an_old_public_name() -> None:
    with pytest.raises(AttributeError, match="'Job'; it has been renamed to 'Topology'"):
        getattr(hpcsgd, "Job")  # noqa: B009 - type checkers know that it is not there
    with pytest.raises(AttributeError, match=r"'Never'$"):
        getattr(hpcsgd, "Never")  # noqa: B009


@pytest.mark.parametrize("name", OF_OTHERS)
def test_a_name_of_torch_or_horovod(name: str) -> None:
    assert OF_OTHERS[name] in hpcsgd.__all__
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; use '{OF_OTHERS[name]}' instead$"):
        getattr(hpcsgd, name)


@pytest.mark.parametrize("name", ["join", "Join"])
def test_join_is_equal_batches(name: str) -> None:
    assert OF_OTHERS[name] == "equal_batches"


def test_an_old_argument() -> None:
    with pytest.raises(UserError, match="no argument 'every'; did you mean 'sync_every'"):
        hpcsgd.hierarchical(every=4)  # pyright: ignore[reportCallIssue]
    with pytest.raises(UserError, match="no argument 'workers'; did you mean 'num_workers'"):
        hpcsgd.Loader(range(4), 2, workers=2)  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(UserError, match="no argument 'shards'; did you mean 'leaves_shards'"):
        GradReduceTraits(shards=True)  # pyright: ignore[reportCallIssue]


def test_values_of_keys_exist() -> None:
    values = {name for table in FAMILIES.values() for name in table}
    for old in (
        "averaged",
        "everyones",
        "over_positions",
        "own",
        "packed",
        "per_run",
        "rate_inside",
        "streamed",
    ):
        assert any(name in values for name in RENAMED[old]), old


def test_new_names_exist() -> None:
    """They are public names, arguments of public functions, keys of job files, their values, or flags."""
    functions = [getattr(hpcsgd, name) for name in hpcsgd.__all__ if callable(getattr(hpcsgd, name))]
    arguments = {name for function in functions for name in inspect.signature(function).parameters}
    of_files = {part for path in keys(Config) for part in path.split(".")}
    values = {name for table in FAMILIES.values() for name in table} | {"keep", "average", "alive"}
    scenarios = {field.name for section in (MessagesSection, FailuresSection) for field in fields(section)}
    traits = {field.name for field in fields(GradReduceTraits)}
    known = {*scenarios, *traits, *hpcsgd.__all__, *arguments, *of_files, *values, *options()}
    assert {name for names in RENAMED.values() for name in names} - known == set()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[job]\ngroups = 2", "[job]: unknown section: did you mean 'parallel'?"),
        ('[data]\nstore = "a.h5"', "[data] store = \"a.h5\": unknown key: did you mean 'path'?"),
        ("[training]\ncheckpoint_every = 5\n" + NEEDED, "did you mean 'checkpoint_every_steps'?"),
        ('[parallel]\ntransport = { group = "mpi" }', "did you mean 'device_backend'?"),
    ],
)
def test_an_old_key_of_a_job_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f"seed = 1\n{text}\n")
    with pytest.raises(UserError, match=re.escape(message)):
        load(file)


@pytest.mark.parametrize(
    ("given", "meant_by_it"),
    [
        ("meets", "--sync-rate"),
        ("run.folder", "--run.output_dir"),
        ("job.groups", "--parallel.groups"),
        ("data.batch_size", "--data.group_batch_size"),
        ("island", "--replica-group"),
        ("store", "--data-file"),
    ],
)
def test_an_old_flag(given: str, meant_by_it: str) -> None:
    flags = [name.replace("_", "-") for name in options()]
    assert meant(given, "3", flags, keys(Config))[0] == meant_by_it
