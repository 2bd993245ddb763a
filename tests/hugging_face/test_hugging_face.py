"""Tests of Trainer and Accelerate on 4 ranks, with mpiexec and torchrun; each program runs all its checks."""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import programs
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.hugging_face import installed, refused
from hpcsgd.methods import bsp
from pythons import python
from train.launches import unlaunched

TESTS, ROOT = Path(__file__).parents[1], Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/hugging_face"
PATIENCE = 300.0
"""Seconds; importing the libraries alone takes several, and the machine may be busy."""
BLOCK = re.compile(r"^ *```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
slowly = [pytest.mark.slow, pytest.mark.timeout(PATIENCE + 20)]


def names(checks: str) -> list[str]:
    """Return the names of a program's checks, in order."""
    tree = ast.parse((TESTS / "hugging_face" / f"{checks}.py").read_text())
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    return [each.name for each in functions if ast.unparse(each.args) == "scene: Scene"]


def by_mpiexec(*words: str) -> list[str]:
    return [programs.mpiexec(), "-n", "4", *python(*words)]


def by_torchrun(*words: str) -> list[str]:
    ranks = ["--standalone", "--nproc-per-node", "4", "--no-python", *python(*words)]
    return python("-m", "torch.distributed.run", *ranks)


def started(command: list[str], folder: Path, *, check: bool = True) -> programs.Done:
    environment = unlaunched(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    return programs.run(command, cwd=folder, env=environment, timeout=PATIENCE, check=check)


@pytest.mark.parametrize(
    ("checks", "launcher"),
    [
        pytest.param(checks, launcher, marks=[*slowly, *more], id=f"{checks}-{launcher.__name__}")
        for checks, launcher, *more in [
            ("trainer_checks", by_mpiexec),
            ("trainer_checks", by_torchrun, pytest.mark.long),
            ("checkpoint_checks", by_mpiexec),
            ("checkpoint_checks", by_torchrun, pytest.mark.long),
            ("accelerate_checks", by_mpiexec),
            ("accelerate_checks", by_torchrun, pytest.mark.long),
        ]
    ],
)
def test_all_checks_pass(checks: str, launcher: Callable[..., list[str]], tmp_path: Path) -> None:
    done = started(launcher("-m", f"hugging_face.{checks}", str(tmp_path)), TESTS)
    assert re.findall(r"^passed (\w+)$", done.stdout, re.MULTILINE) == names(checks)


BEGIN = """
import torch, hpcsgd, hpcsgd.transformers
from hugging_face.models import Tokens, arguments, gpt2
from pathlib import Path
method = hpcsgd.hierarchical(sync_every=2)
given = dict(train_dataset=Tokens(32), method=method)
out = Path({out!r})
"""


def program(folder: Path, body: str) -> Path:
    path = folder / "program.py"
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n{BEGIN.format(out=str(folder))}{body}\n"
    )
    return path


ENDS = {
    "no topology": (
        "hpcsgd.transformers.init(groups=2)\nhpcsgd.transformers.Trainer(gpt2(), arguments(out), **given)",
        "Trainer: expected topology= or groups=, given neither",
    ),
    "arguments before the ranks are known": (
        "args = arguments(out, use_cpu=False)\nhpcsgd.transformers.Trainer(gpt2(), args, groups=2, **given)",
        "for Accelerate this is rank 0 of 1, and for hpcsgd rank 0 of 2 ranks: call hpcsgd.transformers.init",
    ),
    "one rank saves alone": (
        "topology = hpcsgd.transformers.init(groups=2)\n"
        "trainer = hpcsgd.transformers.Trainer(gpt2(), arguments(out), topology=topology, **given)\n"
        "trainer.train()\n"
        "if topology.rank == 0: trainer.save_model()",
        "rank 1 has left",
    ),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=slowly) for case in ENDS])
def test_one_line_and_the_end_of_all(case: str, tmp_path: Path) -> None:
    body, line = ENDS[case]
    done = started(
        [programs.mpiexec(), "-n", "2", *python(str(program(tmp_path, body)))], tmp_path, check=False
    )
    assert done.returncode != 0
    lines = [text for text in done.stderr.splitlines() if text.startswith("hpcsgd:")]
    assert len(lines) == 1, done.stderr
    assert line in lines[0]


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE + 20)
def test_torchrun_needs_no_init(tmp_path: Path) -> None:
    body = (
        "trainer = hpcsgd.transformers.Trainer(gpt2(), arguments(out), groups=2, **given)\ntrainer.train()\n"
        "print(trainer.topology, trainer.accelerator.distributed_optimizers[0].t)"
    )
    done = started(by_torchrun(str(program(tmp_path, body))), tmp_path)
    assert "Topology(2 groups of 2, rank 3: shard 1 of group 1) 2" in done.stdout


@pytest.mark.parametrize(
    ("script", "found", "worst", "best"),
    [
        pytest.param("trainer.py", r"evaluation loss ([\d.]+)", 1.0, 0.0, marks=slowly),
        pytest.param("accelerate_loop.py", r"accuracy ([\d.]+)", 0.75, 1.0, marks=slowly),
    ],
)
def test_the_examples_train(script: str, found: str, worst: float, best: float, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / script, tmp_path)
    done = started(by_mpiexec(script), tmp_path)
    (number,) = re.findall(found, done.stdout)
    assert abs(float(number) - best) < abs(worst - best)


def test_the_page_shows_the_examples() -> None:
    code = "".join(path.read_text() for path in EXAMPLES.glob("*.py"))
    blocks = BLOCK.findall((ROOT / "docs/transformers.md").read_text())
    assert len(blocks) == 4
    for line in [line.strip() for block in blocks if "trl" not in block for line in block.splitlines()]:
        assert line == "..." or line in code, line


def test_a_missing_package_is_said_in_one_line() -> None:
    installed.require("hpcsgd.transformers", "torch")
    with pytest.raises(UserError) as caught:
        installed.require("hpcsgd.transformers", "torch", "no_such_package")
    line = 'hpcsgd.transformers needs the package no_such_package: pip install "hpcsgd[hf]"'
    assert str(caught.value) == line


def test_a_wrapper_around_the_model_is_refused() -> None:
    refused.require_plain("prepare()", torch.nn.Linear(2, 2))
    wrapped = torch.nn.DataParallel(torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match="the model is inside DataParallel, which would average gradients"):
        refused.require_plain("prepare()", wrapped)


def test_another_way_to_train_on_several_processes_is_refused() -> None:
    refused.require_left_out("TrainingArguments", {"fsdp": None, "deepspeed": None})
    with pytest.raises(UserError, match="TrainingArguments: deepspeed is another way"):
        refused.require_left_out("TrainingArguments", {"fsdp": None, "deepspeed": "zero.json"})


def test_arguments_for_ddp_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    given = SimpleNamespace(ddp_bucket_cap_mb=25, ddp_find_unused_parameters=False, ddp_static_graph=None)
    refused.warn_of_ddp(given)
    names = [message.split()[1] for message in caplog.messages]
    assert sorted(names) == ["ddp_bucket_cap_mb", "ddp_find_unused_parameters"]
    assert all("has no effect: there is no DistributedDataParallel" in message for message in caplog.messages)


@pytest.mark.filterwarnings("ignore")
def test_prepare_takes_the_objects_with_and_without_their_placement() -> None:
    """This is one rank without a launcher; `accelerate_checks.py` has several."""
    import accelerate
    from accelerate.state import AcceleratorState

    from hpcsgd.accelerate.accelerator import taken_over

    def prepare(world: Communicator) -> None:
        for placement in (None, [True, False]):
            model = torch.nn.Linear(2, 2)
            objects = model, torch.optim.SGD(model.parameters(), 0.1)
            ours = taken_over(accelerate.Accelerator(cpu=True))
            ours.train_with(form(world), bsp())
            ready, optimizer = ours.prepare(*objects, device_placement=placement)
            assert ready is model
            assert ours.distributed_optimizers == [optimizer.optimizer]

    with mock.patch.dict(os.environ):  # Accelerate sets variables
        threads.run(1, prepare)
    AcceleratorState._reset_state(reset_partial_state=True)
