"""Tests of checkpoints with Lightning: a file with the averaged model, and files of ranks to resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_runs import by_mpiexec, by_torchrun

pytestmark = pytest.mark.slow
RunCases = Callable[..., dict[str, list[Any]]]
FILES = {"hierarchical": ("last", "epoch", "after"), "diloco": ("epoch",), "sgp": ("epoch",)}
"""By method, the files saved at the end of the last validation, at the end of the epoch, and after `fit`."""
MODELS = ("within_an_epoch", "other_shape", "of_another_strategy", "finished")
FOLDERS = ("bad_files", "removed")


@pytest.mark.parametrize("by", [by_mpiexec, pytest.param(by_torchrun, marks=pytest.mark.long)])
@pytest.mark.parametrize("method", ["hierarchical", "diloco", "sgp"])
def test_a_training_resumes_with_the_same_bits(method: str, by: Any, run_cases: RunCases) -> None:
    of_ranks = run_cases("resume", by=by)["resume"]
    whole = of_ranks[0][method]["whole"]
    assert whole[-1] == 44
    for found in (each[method] for each in of_ranks):
        assert found["whole"] == whole
        assert found["resumed"] == dict.fromkeys(FILES[method], whole)
        assert found["averaged"] == dict.fromkeys(FILES[method], True)


def test_each_file_has_a_folder_of_the_ranks(run_cases: RunCases) -> None:
    names = [f"{name}.ckpt{end}" for name in ("after", "best", "epoch", "last") for end in ("", ".ranks")]
    assert run_cases("resume")["resume"][0]["kept"] == names


def test_a_checkpoint_between_validations_has_the_averaged_model(run_cases: RunCases) -> None:
    of_ranks = run_cases(*MODELS)["within_an_epoch"]
    for found in of_ranks:
        assert found["file"] == found["averaged"] != found["own"]
        assert found["end"] == found["without"]


def test_another_shape_begins_with_the_averaged_model(run_cases: RunCases) -> None:
    first, *others = run_cases(*MODELS)["other_shape"]
    assert first["t"] == 22
    assert first["difference"] < 1e-6
    assert first["end"][-1] == 33
    assert others == [first] * 3


def test_a_finished_training_is_the_averaged_model_again(run_cases: RunCases) -> None:
    for found in run_cases(*MODELS)["finished"]:
        assert found["averaged"]
        assert found["longer"] == found["whole"]


def test_a_checkpoint_of_another_strategy_gives_the_state_of_the_optimizer(run_cases: RunCases) -> None:
    assert run_cases(*MODELS)["of_another_strategy"] == [True] * 4


@pytest.mark.parametrize(
    ("name", "text"),
    {
        "of another": "another training has written it",
        "alone": "third.ckpt.ranks/step-00000011: no checkpoint is there, or it is damaged",
        "far": "memory://far.ckpt: each rank writes its part of a checkpoint",
    }.items(),
)
def test_what_belongs_together_has_to_be_there(name: str, text: str, run_cases: RunCases) -> None:
    for found in run_cases(*FOLDERS)["bad_files"]:
        assert text in found[name]


def test_weights_alone_are_the_averaged_model(run_cases: RunCases) -> None:
    for found in run_cases(*FOLDERS)["bad_files"]:
        assert found["weights only"] == [True, False]


def test_an_older_checkpoint_is_removed_with_its_folder(run_cases: RunCases) -> None:
    for found in run_cases(*FOLDERS)["removed"]:
        assert found["names"] == ["epoch=2.ckpt", "epoch=2.ckpt.ranks", "last.ckpt"]
        assert found["end"][-1] == 44
