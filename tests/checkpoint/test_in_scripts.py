"""What `hpcsgd.save` saves in a script, `hpcsgd.load` restores: to the bit, or on other ranks."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, optim
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import hpcsgd
import programs
from hpcsgd.checkpoint import Checkpoints, capture
from hpcsgd.checkpoint.in_scripts import load, save
from hpcsgd.comm import Communicator, Deadlock, threads
from hpcsgd.core.topology import form
from hpcsgd.errors import JobError, UserError
from hpcsgd.files import lock
from trainings import Training

SAVED, LAST = 3, 6
GROUPS = pytest.mark.parametrize(("P", "K"), [(3, 2), (2, 2), (1, 2), (2, 1)])


class Script:
    """A user's training loop with the objects that users usually save."""

    def __init__(self, world: Communicator, P: int, method: str = "hierarchical", **options: Any) -> None:
        self.topology = form(world, groups=P)
        self.training = Training(self.topology, "momentum", method, **options)
        self.optimizer = self.training.optimizer
        self.sampler = hpcsgd.Sampler(97, self.topology, seed=5)
        self.scheduler = lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)
        self.generators = [
            torch.Generator().manual_seed(world.rank),
            np.random.default_rng(world.rank),
            random.Random(world.rank),
        ]
        self.ema = AveragedModel(self.training.net)
        self.seen: list[float] = []

    def items(self) -> dict[str, Any]:
        one, two, three = self.generators
        return {
            "sampler": self.sampler, "scheduler": self.scheduler, "ema": self.ema,
            "noise": one, "crops": two, "words": three, "seen": self.seen, "epoch": 0,
        }  # fmt: skip

    def steps(self, last: int) -> None:
        while self.training.t < last:
            self.training.steps(1)
            self.scheduler.step()
            self.ema.update_parameters(self.training.net)
            self.sampler.advance(2)
            self.seen += [
                torch.rand((), generator=self.generators[0]).item(),
                float(self.generators[1].random()),
                self.generators[2].random(),
            ]

    def save(self, folder: Path, **other: Any) -> None:
        save(folder, self.optimizer, **{**self.items(), "epoch": self.training.t, **other})

    def load(self, folder: Path, **other: Any) -> dict[str, Any]:
        found = load(folder, self.optimizer, **{**self.items(), **other})
        self.training.t = self.optimizer.t
        self.seen = found.get("seen", [])
        return found

    def everything(self) -> dict[str, Any]:
        return {
            **self.training.everything(),
            **{f"ema {name}": x.clone() for name, x in self.ema.state_dict().items()},
            "seen": torch.tensor(self.seen, dtype=torch.float64),
            "rates": torch.tensor([group["lr"] for group in self.optimizer.param_groups]),
            "sampler": torch.tensor(list(self.sampler.state_dict().values())),
        }


class Point(NamedTuple):
    x: int
    y: int


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


@GROUPS
def test_a_script_goes_on_to_the_same_bits(tmp_path: Path, P: int, K: int) -> None:
    def body(world: Communicator) -> None:
        whole = Script(world, P)
        whole.steps(SAVED)
        whole.save(tmp_path)
        whole.steps(LAST)
        resumed = Script(world, P)
        assert resumed.load(tmp_path)["epoch"] == SAVED
        resumed.steps(LAST)
        assert_same(resumed.everything(), whole.everything())

    threads.run(P * K, body)


@pytest.mark.ranks(4)
def test_processes_go_on_to_the_same_bits(run: Callable[..., Any], tmp_path: Path) -> None:
    """Processes have separate random generators, which must be restored, too; threads share theirs."""

    def body(world: Communicator) -> bool:
        folder = Path(world.gather_objects(str(tmp_path))[0])
        whole = Script(world, 2)
        whole.steps(SAVED)
        whole.save(folder)
        whole.steps(LAST)
        resumed = Script(world, 2)
        resumed.load(folder)
        resumed.steps(LAST)
        assert_same(resumed.everything(), whole.everything())
        return True

    assert all(run(4, body))


def test_random_numbers_of_the_process_go_on(tmp_path: Path) -> None:
    def body(world: Communicator) -> None:
        script = Script(world, 1)
        script.save(tmp_path)
        expected = [torch.rand(()).item(), np.random.rand(), random.random()]
        script.load(tmp_path)
        assert [torch.rand(()).item(), np.random.rand(), random.random()] == expected

    threads.run(1, body)


def test_on_other_ranks_it_goes_on_from_the_mean(tmp_path: Path) -> None:
    def first(world: Communicator) -> dict[str, Tensor]:
        script = Script(world, 2)
        script.steps(SAVED)
        script.save(tmp_path)
        return script.everything()

    def second(world: Communicator) -> dict[str, Any]:
        script = Script(world, 3)
        found = script.load(tmp_path)
        assert found["epoch"] == SAVED
        assert found["seen"] == []  # each rank had its own list
        assert script.sampler.state_dict()["consumed"] == SAVED * 2 * 4
        assert torch.rand((), generator=script.generators[0]).item() == fresh[world.rank]
        return script.everything()

    fresh = [torch.rand((), generator=torch.Generator().manual_seed(rank)).item() for rank in range(3)]
    before, after = threads.run(4, first), threads.run(3, second)
    assert not torch.equal(before[0]["ema module.scale"], before[2]["ema module.scale"])
    for name in (name for name in before[0] if name.startswith("ema ")):
        mean = sum(each[name].double() for each in before) / 4
        for each in after:
            torch.testing.assert_close(each[name].double(), mean, rtol=1e-6, atol=1e-7)
    assert torch.equal(after[0]["rates"], before[0]["rates"])


def test_without_a_checkpoint_nothing_changes(tmp_path: Path) -> None:
    def body(world: Communicator) -> None:
        script = Script(world, 2)
        before = script.everything()
        assert script.load(tmp_path / "none") == {"epoch": 0, "seen": []}
        assert_same(script.everything(), before)
        assert script.optimizer.t == 0

    threads.run(2, body)
    assert not (tmp_path / "none").exists()


def test_several_optimizers_are_saved_together(tmp_path: Path) -> None:
    def body(world: Communicator) -> None:
        scripts = Script(world, 2), Script(world, 2, "diloco", seed=7)
        optimizers = [script.optimizer for script in scripts]
        for script in scripts:
            script.steps(SAVED)
        save(tmp_path, *optimizers)
        expected = [script.training.everything() for script in scripts]
        for script in scripts:
            script.steps(LAST)
        assert load(tmp_path, *optimizers) == {}
        for script, saved in zip(scripts, expected, strict=True):
            assert_same(script.training.everything(), saved)
        with pytest.raises(JobError, match=r"2 optimizers, and load.. was given 1"):
            load(tmp_path, optimizers[0])

    threads.run(4, body)


def test_natural_gradients_are_saved_with_what_they_go_around(tmp_path: Path) -> None:
    def body(world: Communicator) -> None:
        script = Script(world, 2)
        outer = hpcsgd.NaturalGradient(script.optimizer, script.training.net, rank=2)
        script.training.optimizer = outer  # pyright: ignore[reportAttributeAccessIssue]
        script.training.steps(SAVED)
        save(tmp_path, outer)
        script.training.steps(LAST)
        expected = script.training.everything()
        load(tmp_path, outer)
        script.training.t = SAVED
        script.training.steps(LAST)
        assert_same(script.training.everything(), expected)

    threads.run(2, body)


@pytest.mark.parametrize(("value", "read"), [
    (np.arange(3, dtype=np.int16), np.arange(3, dtype=np.int16)), (None, None),
    (np.float32(0.5), np.float32(0.5)),
    ({"a": [1, (2.5, "x")], 3: torch.ones(2, dtype=torch.bfloat16)},) * 2, (torch.tensor(3), torch.tensor(3)),
])  # fmt: skip
def test_values_come_back_as_they_are(tmp_path: Path, value: object, read: object) -> None:
    def body(world: Communicator) -> None:
        script = Script(world, 1)
        save(tmp_path, script.optimizer, value=value)
        found = load(tmp_path, script.optimizer, value=0)["value"]
        assert type(found) is type(read)
        assert repr(found) == repr(read)

    threads.run(1, body)


MISTAKES: dict[str, tuple[Callable[[Script, Path], object], str]] = {
    "no optimizer": (
        lambda s, f: save(f, sampler=s.sampler),
        "expected DistributedOptimizers after the folder, given nothing",
    ),
    "a plain one": (
        lambda s, f: save(f, s.optimizer, s.optimizer.local.optimizer),
        "expected DistributedOptimizers after the folder, given DistributedOptimizer, SGD",
    ),
    "the model": (lambda s, f: save(f, s.optimizer, net=s.training.net), "net is saved with its Distributed"),
    "the optimizer inside": (
        lambda s, f: save(f, s.optimizer, inner=s.optimizer.local.optimizer), "inner is saved with its Dist",
    ),
    "by name": (lambda s, f: save(f, s.optimizer, second=s.optimizer), "second: give the Distributed"),
    "a named tuple": (
        lambda s, f: save(f, s.optimizer, seen={"a": Point(1, 2)}),
        "seen: a: a Point cannot be saved in a checkpoint: convert it to a plain tuple",
    ),
    "unlike folders": (
        lambda s, f: save(f / str(s.topology.rank), s.optimizer), r"save\(\): '.*/0' with nothing by name on",
    ),
    "unlike names": (
        lambda s, f: save(f, s.optimizer, **{f"best{s.topology.rank}": 1}),
        r"st0 \(a value\) on rank 0, .*st1",
    ),
    "nothing of that name": (
        lambda s, f: s.load(f, epochs=0),
        "nothing was saved as epochs: did you mean 'epoch'",
    ),
    "no scheduler": (
        lambda s, f: load(f, s.optimizer, sampler=s.sampler, ema=s.ema),
        "scheduler was saved, and load.. was not given it: give scheduler=, or scheduler=None",
    ),
    "an object in place of a value": (
        lambda s, f: s.load(f, epoch=s.scheduler),
        "epoch was a value, and load.. was given an object with a state_dict",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_on_all_ranks(tmp_path: Path, name: str) -> None:
    mistake, message = MISTAKES[name]

    def body(world: Communicator) -> None:
        script = Script(world, 2)
        script.steps(1)
        script.save(tmp_path)
        before = script.everything()
        with pytest.raises((UserError, JobError), match=message):
            mistake(script, tmp_path)
        assert_same(script.everything(), before)

    threads.run(2, body)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]


@pytest.mark.parametrize("P", [1, 2])
def test_who_saves_on_one_rank_alone_is_reported_at_once(tmp_path: Path, P: int) -> None:
    def body(world: Communicator) -> None:
        script = Script(world, P)
        script.steps(1)
        if world.rank == 0:
            script.save(tmp_path)
        script.steps(LAST)

    with pytest.raises((UserError, Deadlock), match=r"rank 0 is in save\(\)"):
        threads.run(2, body, timeout=60)
    assert not any(tmp_path.iterdir())


def test_objects_that_differed_need_the_same_ranks(tmp_path: Path) -> None:
    def first(world: Communicator) -> None:
        script = Script(world, 2)
        script.scheduler.milestones[world.rank] = 1
        script.save(tmp_path)

    def second(world: Communicator) -> None:
        script = Script(world, 1)
        with pytest.raises(JobError, match=r"scheduler was not the same on all ranks .* scheduler=None"):
            script.load(tmp_path)
        assert script.load(tmp_path, scheduler=None)["epoch"] == 0

    threads.run(2, first)
    threads.run(1, second)


class Kept:
    """An object whose state is one tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def state_dict(self) -> dict[str, Tensor]:
        return {"x": self.x}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.x = state["x"]


AVERAGED = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.float64]


@pytest.mark.parametrize("dtype", AVERAGED, ids=str)
def test_a_mean_is_rounded_once_in_every_type(tmp_path: Path, dtype: torch.dtype) -> None:
    def drawn(rank: int) -> Tensor:
        return torch.randn(7, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)

    def first(world: Communicator) -> None:
        save(tmp_path, Script(world, 3).optimizer, kept=Kept(drawn(world.rank)))

    def second(world: Communicator) -> Tensor:
        kept = Kept(torch.zeros(7, dtype=dtype))
        load(tmp_path, Script(world, 1).optimizer, kept=kept)
        return kept.x

    threads.run(3, first)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    mean = (drawn(0).to(wide) + drawn(1).to(wide) + drawn(2).to(wide)) / 3
    for found in threads.run(2, second):
        assert found.dtype == dtype
        assert torch.equal(found.to(wide), mean.to(dtype).to(wide))


@pytest.mark.parametrize("kind", ["sparse", "conjugated"])
def test_states_of_other_kinds_of_tensors(tmp_path: Path, kind: str) -> None:
    def of(rank: int) -> Tensor:
        x = torch.arange(6.0) - rank
        return x.clamp(min=0).to_sparse_coo() if kind == "sparse" else torch.complex(x, x).conj()

    def first(world: Communicator) -> None:
        kept = Kept(of(world.rank))
        optimizer = Script(world, 2).optimizer
        save(tmp_path, optimizer, kept=kept)
        load(tmp_path, optimizer, kept=kept)
        assert torch.equal(kept.x.to_dense(), of(world.rank).to_dense())

    def second(world: Communicator) -> None:
        kept = Kept(of(5))
        if kind == "sparse":
            with pytest.raises(JobError, match="kept was not the same on all ranks"):
                load(tmp_path, Script(world, 1).optimizer, kept=kept)
        else:
            load(tmp_path, Script(world, 1).optimizer, kept=kept)
            assert torch.equal(kept.x, (of(0) + of(1)) / 2)

    threads.run(2, first)
    threads.run(1, second)


def test_checkpoints_of_runs_are_not_for_scripts(tmp_path: Path) -> None:
    def body(world: Communicator) -> None:
        script = Script(world, 1)
        Checkpoints(tmp_path, script.topology).write(0, capture(script.optimizer, shared={}, own={}))
        with pytest.raises(
            JobError, match="was saved by `hpcsgd train`: continue with `hpcsgd train --resume`"
        ):
            script.load(tmp_path)

    threads.run(1, body)


@pytest.mark.parametrize("name", [
    "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR",
    "PolynomialLR", "CosineAnnealingLR", "CyclicLR", "OneCycleLR", "CosineAnnealingWarmRestarts",
    "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler",
])  # fmt: skip
def test_every_scheduler_of_torch(tmp_path: Path, name: str) -> None:
    def body(world: Communicator) -> None:
        def made() -> tuple[Script, Any]:
            script = Script(world, 1)
            return script, _scheduler(name, script.optimizer)

        def train(script: Script, scheduler: Any, last: int) -> list[float]:
            rates: list[float] = []
            while script.training.t < last:
                script.training.steps(1)
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
                rates += [group["lr"] for group in script.optimizer.param_groups]
            return rates

        script, scheduler = made()
        train(script, scheduler, SAVED)
        save(tmp_path, script.optimizer, scheduler=scheduler)
        expected = train(script, scheduler, LAST)
        script, scheduler = made()
        load(tmp_path, script.optimizer, scheduler=scheduler)
        script.training.t = SAVED
        assert train(script, scheduler, LAST) == expected

    threads.run(1, body)


def _scheduler(name: str, optimizer: optim.Optimizer) -> Any:
    s = lr_scheduler
    made: dict[str, Callable[[], Any]] = {
        "LambdaLR": lambda: s.LambdaLR(optimizer, lambda n: 1 / (n + 1)),
        "MultiplicativeLR": lambda: s.MultiplicativeLR(optimizer, lambda n: 0.9),
        "StepLR": lambda: s.StepLR(optimizer, 2),
        "MultiStepLR": lambda: s.MultiStepLR(optimizer, [1, 4]),
        "ConstantLR": lambda: s.ConstantLR(optimizer, total_iters=4),
        "LinearLR": lambda: s.LinearLR(optimizer),
        "ExponentialLR": lambda: s.ExponentialLR(optimizer, 0.9),
        "PolynomialLR": lambda: s.PolynomialLR(optimizer),
        "CosineAnnealingLR": lambda: s.CosineAnnealingLR(optimizer, 5),
        "CyclicLR": lambda: s.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
        "OneCycleLR": lambda: s.OneCycleLR(optimizer, 0.1, total_steps=20),
        "CosineAnnealingWarmRestarts": lambda: s.CosineAnnealingWarmRestarts(optimizer, 2),
        "ReduceLROnPlateau": lambda: s.ReduceLROnPlateau(optimizer, patience=1),
        "SequentialLR": lambda: s.SequentialLR(
            optimizer, [s.ConstantLR(optimizer), s.MultiStepLR(optimizer, [1, 3])], [4]
        ),
        "ChainedScheduler": lambda: s.ChainedScheduler([s.LinearLR(optimizer), s.StepLR(optimizer, 2)]),
    }
    return made[name]()


HOLDER = """\
import sys
from pathlib import Path
from hpcsgd.files.lock import hold

hold(Path(sys.argv[1]))
print("in it", flush=True)
sys.stdin.read()
"""


@pytest.mark.ranks(2)
@pytest.mark.threads
def test_one_job_at_a_time_saves_into_a_folder(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE", 0.0)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    process = programs.start([sys.executable, "-c", HOLDER, theirs], stdin=programs.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "in it\n"

    def refused(world: Communicator) -> str:
        script = Script(world, P=2)
        assert load(theirs, script.optimizer, epoch=3) == {"epoch": 3}  # reading needs no lock
        save(ours, script.optimizer, epoch=1)
        save(ours, script.optimizer, epoch=2)
        with pytest.raises(JobError) as error:
            save(theirs, script.optimizer, epoch=1)
        assert load(ours, script.optimizer, epoch=0) == {"epoch": 2}
        return str(error.value)

    for told in run(2, refused):
        assert f"{theirs}: in use by process {process.pid} on " in told
        assert "\n" not in told
    programs.finish(process)

    def goes_on(world: Communicator) -> None:
        save(theirs, Script(world, P=2).optimizer, epoch=1)

    run(2, goes_on)
